"""The names of DeepSpeed that the plugin relies on, and their check: all of them, when it is enabled.

The facts are those of DeepSpeed 0.18 and 0.19.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

_STAGE3 = "deepspeed.runtime.zero.stage3"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_SEQUENCE = "deepspeed.sequence.layer"
_FPDT = "deepspeed.sequence.fpdt_layer"
_ENGINE = "deepspeed.runtime.engine"
_GROUPS = "deepspeed.utils.groups"
_MANGLED = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"

# (module, dotted name, parameters it must take)
RELIED_ON: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("deepspeed", "DeepSpeedEngine", ()),
    ("deepspeed", "DeepSpeedHybridEngine", ()),
    ("deepspeed", "DeepSpeedConfig.__init__", ("config",)),
    ("deepspeed", "ops.__compatible_ops__", ()),
    (_ENGINE, "DeepSpeedEngine._configure_zero_optimizer", ("optimizer",)),
    (_ENGINE, "DeepSpeedEngine.destroy", ()),
    (_ENGINE, "DeepSpeedEngine.__del__", ()),
    (_ENGINE, "DeepSpeedEngine._get_param_fragment_func", ("param",)),
    (
        _ENGINE,
        "DeepSpeedEngine.save_checkpoint",
        ("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
    ),
    (_ENGINE, "DeepSpeedEngine._save_checkpoint", ("save_dir", "tag")),
    (_ENGINE, "DeepSpeedEngine._save_zero_checkpoint", ("save_path", "tag")),
    (_ENGINE, "DeepSpeedEngine.use_node_local_storage", ()),
    ("deepspeed.runtime.checkpoint_engine", "TorchCheckpointEngine.save", ("state_dict", "path")),
    (_ENGINE, "DeepSpeedEngine.load_module_state_dict", ("checkpoint", "strict", "custom_load_fn", "fetch_z3_params")),
    (_ENGINE, "DeepSpeedEngine._load_checkpoint", ("load_dir", "tag", "load_optimizer_states", "load_module_only")),
    (_ENGINE, "DeepSpeedEngine._get_ckpt_name", ("checkpoints_path", "tag", "pp_placeholder")),
    (_ENGINE, "DeepSpeedZeRoOffload", ()),
    ("deepspeed.runtime.superoffload.superoffload_stage3", "SuperOffloadOptimizer_Stage3", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.__init__", ("module", "init_optimizer", "param_names", "reduce_scatter")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.initialize_ds_offload", ("module",)),
    (_STAGE3, f"DeepSpeedZeroOptimizer_Stage3.{_MANGLED}", ("params_to_reduce",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.create_reduce_and_remove_grad_hooks", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.reduce_ready_partitions_and_remove_grads", ("param",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._post_step", ("timer_names",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._get_norm_groups", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.has_overflow", ("partition_gradients",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._rigid_state_dict", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._rigid_load_state_dict", ("state_dict", "load_optimizer_states")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.load_state_dict", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.step", ("closure",)),
    (_OFFLOAD, "DeepSpeedZeRoOffload.__init__", ("module", "ds_config", "overlap_comm")),
    (_OFFLOAD, "DeepSpeedZeRoOffload.pre_sub_module_forward_function", ("sub_module",)),
    (_OFFLOAD, "DeepSpeedZeRoOffload.post_sub_module_forward_function", ("sub_module",)),
    (_OFFLOAD, "DeepSpeedZeRoOffload.pre_sub_module_backward_function", ("sub_module",)),
    (_OFFLOAD, "DeepSpeedZeRoOffload.destroy", ()),
    (_PARTITION, "Init.__init__", ("config_dict_or_path", "config", "zero_quantized_weights")),
    (_PARTITION, "Init._post_init_method", ("module",)),
    (_PARTITION, "Init.__exit__", ("exc_type", "exc_value", "traceback")),
    (_PARTITION, "Init._all_gather", ("param_list", "async_op", "hierarchy")),
    (_PARTITION, "Init._partition", ("param_list", "force", "has_been_updated", "free_data")),
    (_PARTITION, "Init._remove_tensor_creation_wrappers", ()),
    (_PARTITION, "Init._add_tensor_creation_wrappers", ()),
    (_PARTITION, "top_level_context", ()),
    (_PARTITION, "free_param", ("param",)),
    (_PARTITION, "ZeroParamStatus.NOT_AVAILABLE", ()),
    (_PARTITION, "zero3_linear_wrap", ("input", "weight", "bias")),
    (_OFFLOAD, "FWD_MODULE_STACK", ()),
    (_OFFLOAD, "DeepSpeedZeRoOffload.get_param_coordinator", ()),
    (_OFFLOAD, "DeepSpeedZeRoOffload.post_sub_module_backward_function", ("sub_module",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct", ("gradients", "params", "norm_type")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.partition_grads", ("params_to_release", "grad_partitions")),
    (_PARTITION, "get_allgather_dtype", ("param", "param_ds_tensor")),
    # Exchanges of sequence parallelism.
    (_SEQUENCE, "dist.all_to_all_single", ("output", "tensor", "output_split_sizes", "input_split_sizes", "group")),
    (_SEQUENCE, "single_all_to_all", ("input", "group", "async_op", "handle")),
    (_SEQUENCE, "_SeqAllToAll.forward", ("group", "input", "is_fwd")),
    (_SEQUENCE, "_SeqAllToAll.backward", ("ctx",)),
    (_FPDT, "_FPDTGPUAttentionImpl_.backward", ("ctx",)),
    (_FPDT, "_FPDTGPUOffloadingAttentionImpl_.backward", ("ctx",)),
    ("deepspeed.runtime.sequence_parallel.ulysses_sp", "UlyssesSPAttentionHF", ()),
    (_GROUPS, "_WORLD_GROUP", ()),
    (_GROUPS, "_clone_world_group", ()),
    (_GROUPS, "_get_sequence_parallel_group", ()),
    (_GROUPS, "_get_sequence_parallel_world_size", ()),
    # Gradients and states in low precision.
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.initialize_optimizer_states", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group", ("sub_group_id",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads", ("sub_group_id", "total_norm")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._optimizer_step", ("sub_group_id",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters", ("sub_group_id",)),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._get_fp32_grad_state_partition", ("param", "release_swap_buffers")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.set_fp32_grad_for_param", ("value", "param")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.set_local_grad_for_param", ("value", "param")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.update_fp32_grad_for_param_vectorized", ("update_func", "param_list")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._fp32_state_allgather", ("param", "fp32_state_partition")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.get_fp32_grad_partitions", ()),
    (
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition",
        ("param", "release_swap_buffers", "optim_state_key"),
    ),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.set_full_hp_param", ("value", "param", "optim_state_key")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.set_local_hp_param", ("value", "param", "optim_state_key")),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3.offload_states", ()),
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3._restore_from_bit16_weights", ()),
    (
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.load_hp_checkpoint_state_from_checkpoint_dir_stage3",
        ("checkpoint_dir",),
    ),
    ("deepspeed.runtime.zero.utils", "ZERO_SUPPORTED_OPTIMIZERS", ()),
)

# (module, class): attributes that the class's own methods must mention, of objects that exist only inside an engine.
RELIED_ON_ATTRIBUTES: dict[tuple[str, str], str] = {
    (_ENGINE, "DeepSpeedEngine"): "module_forward_pre_hook module_forward_post_hook",
    (_STAGE3, "DeepSpeedZeroOptimizer_Stage3"): """
        fp16_groups gradient_accumulation_dtype communication_data_type param_names parameter_offload
        persistent_parameters overflow loss_scale ipg_buckets micro_step_id model_parallel_group offload_optimizer
        reduce_and_partition_stream reduce_bucket_size _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        averaged_gradients clip_grad dp_process_group fp16_partitioned_groups_flat_id fp32_partitioned_groups_flat
        grad_partitions_flat_buffer grad_position sub_group_to_group_id _z3_optimizer
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
    """Raise RuntimeError unless this DeepSpeed has every name the plugin relies on, with its parameters."""
    import deepspeed

    for module_name, dotted, parameters in RELIED_ON:
        where = f"{module_name}.{dotted}"
        try:
            found: Any = importlib.import_module(module_name)
            for part in dotted.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            raise RuntimeError(
                f"zeropp_fp8 relies on {where}, which DeepSpeed {deepspeed.__version__} does not have; "
                "install deepspeed>=0.18,<0.20"
            ) from None
        if parameters:
            taken = inspect.signature(inspect.unwrap(found)).parameters
            # DeepSpeed's profiling decorator hides the signature behind (*args, **kwargs).
            opaque = {p.kind for p in taken.values()} == {
                inspect.Parameter.VAR_POSITIONAL,
                inspect.Parameter.VAR_KEYWORD,
            }
            missing = [name for name in parameters if name not in taken]
            if missing and not opaque:
                raise RuntimeError(
                    f"zeropp_fp8 relies on {where} taking {', '.join(missing)}, which DeepSpeed "
                    f"{deepspeed.__version__} does not; install deepspeed>=0.18,<0.20"
                )

    for (module_name, class_name), attributes in RELIED_ON_ATTRIBUTES.items():
        mentioned = _names_in_methods(getattr(importlib.import_module(module_name), class_name))
        for name in attributes.split():
            if name not in mentioned:
                raise RuntimeError(
                    f"zeropp_fp8 relies on the attribute {name} of {module_name}.{class_name}, which DeepSpeed "
                    f"{deepspeed.__version__} does not have; install deepspeed>=0.18,<0.20"
                )


def _names_in_methods(cls: type) -> set[str]:
    """Every attribute name that the methods of a class read or write, functions inside them included."""
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
