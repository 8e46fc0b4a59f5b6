"""The names of DeepSpeed that the plugin relies on. `enable()` checks all of them.

The list describes DeepSpeed 0.18 and 0.19.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

_STAGE3 = "deepspeed.runtime.zero.stage3"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_SEQUENCE = "deepspeed.sequence.layer"
_FPDT = "deepspeed.sequence.fpdt_layer"
_ENGINE = "deepspeed.runtime.engine"
_GROUPS = "deepspeed.utils.groups"
_REMEDY = "install deepspeed>=0.18,<0.20"

# (module, class or module in it): names that must exist, some with parameters that they must take.
RELIED_ON: dict[tuple[str, str], str] = {
    ("deepspeed", "DeepSpeedConfig"): "__init__(config)",
    ("deepspeed", "ops"): "__compatible_ops__",
    (_ENGINE, "DeepSpeedEngine"): """
        __init__(args, model, config, config_class)
        _configure_zero_optimizer(optimizer) _forward_prologue(inputs, kwargs) _forward_epilogue destroy __del__
        _get_param_fragment_func(param) step
        save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        _save_checkpoint(save_dir, tag) _save_zero_checkpoint(save_path, tag) use_node_local_storage
        load_module_state_dict(checkpoint, strict, custom_load_fn, fetch_z3_params)
        _load_checkpoint(load_dir, tag, load_optimizer_states, load_module_only)
        _get_ckpt_name(checkpoints_path, tag, pp_placeholder)
    """,
    ("deepspeed.runtime.checkpoint_engine", "TorchCheckpointEngine"): "save(state_dict, path)",
    ("deepspeed.runtime.pipe.engine", ""): "PipelineEngine",
    ("deepspeed.utils.timer", "ThroughputTimer"): "start stop(global_step, report_speed)",
    ("deepspeed.runtime.hybrid_engine", ""): "DeepSpeedHybridEngine",
    (_ENGINE, ""): "DeepSpeedZeRoOffload",
    ("deepspeed.runtime.superoffload.superoffload_stage3", ""): "SuperOffloadOptimizer_Stage3",
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3"): """
        __init__(module, init_optimizer, param_names, reduce_scatter) initialize_ds_offload(module)
        _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(params_to_reduce) create_reduce_and_remove_grad_hooks
        _DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads(buffer_to_reduce)
        reduce_ready_partitions_and_remove_grads(param) independent_gradient_partition_epilogue _post_step(timer_names)
        checkpoint_event_prologue checkpoint_event_epilogue _get_norm_groups has_overflow(partition_gradients)
        _rigid_state_dict
        _rigid_load_state_dict(state_dict, load_optimizer_states) load_state_dict step(closure)
        get_grad_norm_direct(gradients, params, norm_type) partition_grads(params_to_release, grad_partitions)
        _setup_for_real_optimizer _create_fp32_partitions initialize_optimizer_states
        _prepare_fp32_grad_for_sub_group(sub_group_id) unscale_and_clip_grads(sub_group_id, total_norm)
        _optimizer_step(sub_group_id) _reassign_or_swap_out_partitioned_parameters(sub_group_id)
        _get_fp32_grad_state_partition(param, release_swap_buffers) set_fp32_grad_for_param(value, param)
        set_local_grad_for_param(value, param) update_fp32_grad_for_param_vectorized(update_func, param_list)
        _fp32_state_allgather(param, fp32_state_partition) get_fp32_grad_partitions
        _get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)
        set_full_hp_param(value, param, optim_state_key) set_local_hp_param(value, param, optim_state_key)
        offload_states _restore_from_bit16_weights load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
    """,
    (_OFFLOAD, "DeepSpeedZeRoOffload"): """
        __init__(module, ds_config, overlap_comm) pre_sub_module_forward_function(sub_module)
        post_sub_module_forward_function(sub_module) pre_sub_module_backward_function(sub_module) destroy
        get_param_coordinator post_sub_module_backward_function(sub_module) partition_all_parameters
    """,
    (_PARTITION, "Init"): """
        __init__(config_dict_or_path, config, zero_quantized_weights) _post_init_method(module)
        __exit__(exc_type, exc_value, traceback) _all_gather(param_list, async_op, hierarchy)
        _partition(param_list, force, has_been_updated, free_data) _remove_tensor_creation_wrappers
        _add_tensor_creation_wrappers
    """,
    (_PARTITION, ""): """
        top_level_context free_param(param) zero3_linear_wrap(input, weight, bias)
        get_allgather_dtype(param, param_ds_tensor)
    """,
    (_PARTITION, "ZeroParamStatus"): "NOT_AVAILABLE",
    (_OFFLOAD, ""): "FWD_MODULE_STACK",
    (_SEQUENCE, "dist"): "all_to_all_single(output, tensor, output_split_sizes, input_split_sizes, group)",
    (_SEQUENCE, ""): "single_all_to_all(input, group, async_op, handle)",
    (_SEQUENCE, "_SeqAllToAll"): "forward(group, input, is_fwd) backward(ctx)",
    (_FPDT, "_FPDTGPUAttentionImpl_"): "backward(ctx)",
    (_FPDT, "_FPDTGPUOffloadingAttentionImpl_"): "backward(ctx)",
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", ""): "UlyssesSPAttentionHF",
    (_GROUPS, ""): "_WORLD_GROUP _clone_world_group _get_sequence_parallel_group _get_sequence_parallel_world_size",
    ("deepspeed.comm", ""): "reduce_scatter_fn(output_tensor, tensor, group)",
    ("deepspeed.comm", "comms_logger"): "enabled prof_all prof_ops append(raw_name, record_name, latency, msg_size)",
    ("deepspeed.profiling.flops_profiler.profiler", ""): "module_flop_count module_mac_count",
    ("deepspeed.profiling.flops_profiler", "FlopsProfiler"): "start_profile(ignore_list) stop_profile",
}

# (module, class): attributes of objects that exist only inside an engine; the class's own methods must mention them.
RELIED_ON_ATTRIBUTES: dict[tuple[str, str], str] = {
    (_ENGINE, "DeepSpeedEngine"): """
        module_forward_pre_hook module_forward_post_hook zero_optimization_partition_weights monitor global_samples
    """,
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3"): """
        fp16_groups gradient_accumulation_dtype communication_data_type param_names parameter_offload
        persistent_parameters overflow loss_scale ipg_buckets micro_step_id model_parallel_group offload_optimizer
        reduce_and_partition_stream reduce_bucket_size _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        averaged_gradients clip_grad dp_process_group fp16_partitioned_groups_flat_id fp32_partitioned_groups_flat
        grad_partitions_flat_buffer grad_position sub_group_to_group_id _z3_optimizer
        _grad_acc_hooks contiguous_gradients gradient_predivide_factor enable_sanity_checks dtype
    """,
    (_OFFLOAD, "DeepSpeedZeRoOffload"): """
        module ds_z3_leaf_module param_coordinator pre_bwd_fn post_bwd_fn _max_available_parameters_in_numel
        _max_reuse_distance_in_numel _prefetch_bucket_sz
    """,
    (_PARTITION, "Init"): """
        all_gather all_gather_coalesced partition ds_active_sub_modules ds_id ds_numel ds_process_group ds_shape
        ds_status ds_tensor
    """,
}


def verify() -> None:
    """Raise RuntimeError unless this DeepSpeed has every name that the plugin relies on, with its parameters."""
    import deepspeed

    version = deepspeed.__version__
    for (module_name, owner), listed in RELIED_ON.items():
        for name, parameters in re.findall(r"(\w+)(?:\(([^)]*)\))?", listed):
            path = [*filter(None, owner.split(".")), name]
            where = ".".join((module_name, *path))
            try:
                found = functools.reduce(getattr, path, importlib.import_module(module_name))
            except (ImportError, AttributeError):
                raise RuntimeError(
                    f"zeropp_fp8 relies on {where}, which DeepSpeed {version} does not have; {_REMEDY}"
                ) from None
            missing = _not_taken(found, [*filter(None, parameters.split(", "))])
            if missing:
                raise RuntimeError(
                    f"zeropp_fp8 relies on {where} taking {', '.join(missing)}, which DeepSpeed {version} does not; "
                    f"{_REMEDY}"
                )
    for (module_name, class_name), attributes in RELIED_ON_ATTRIBUTES.items():
        mentioned = _names_in_methods(getattr(importlib.import_module(module_name), class_name))
        for name in attributes.split():
            if name not in mentioned:
                raise RuntimeError(
                    f"zeropp_fp8 relies on the attribute {name} of {module_name}.{class_name}, which DeepSpeed "
                    f"{version} does not have; {_REMEDY}"
                )


def _not_taken(function: Any, parameters: list[str]) -> list[str]:
    if not parameters:
        return []
    taken = inspect.signature(inspect.unwrap(function)).parameters
    # DeepSpeed's profiling decorator hides the signature behind (*args, **kwargs).
    if {p.kind for p in taken.values()} == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        return []
    return [name for name in parameters if name not in taken]


def _names_in_methods(cls: type) -> set[str]:
    """Return every attribute name that the methods of a class, and functions inside them, read or write."""
    names: set[str] = set()

    def scan(code) -> None:
        names.update(code.co_names)
        for constant in code.co_consts:
            if inspect.iscode(constant):
                scan(constant)

    for value in vars(cls).values():
        # DeepSpeed's profiling decorator keeps the method in a closure, without __wrapped__.
        cells = getattr(value, "__closure__", None) or ()
        for function in (value, *(cell.cell_contents for cell in cells)):
            if inspect.isfunction(function):
                scan(inspect.unwrap(function).__code__)
    return names
