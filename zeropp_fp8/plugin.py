"""Installing the plugin: the only file that names the parts of DeepSpeed that are replaced.

    deepspeed.DeepSpeedEngine        -> a subclass that builds the plugin's ZeRO-3 where the ds_config asks for it
    deepspeed.DeepSpeedHybridEngine  -> a subclass that refuses such a ds_config
    deepspeed.DeepSpeedConfig        -> says which file it is that cannot be read
    deepspeed.zero.Init.__init__     -> hides the four ZeRO++ keys and checks the configuration early
    deepspeed.zero.Init              -> stores frozen weights as codes while a model is made; gathers and partitions
                                        each parameter by the engine that it belongs to
    zero3_linear_wrap                -> the same linear function at half the host cost
    deepspeed.sequence               -> exchanges that travel in FP8 where an engine asks for it
    groups._clone_world_group        -> the data-parallel group has the time limit of the world

Every name relied on is looked up in `enable()`. The facts are those of DeepSpeed 0.18 and 0.19.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from zeropp_fp8.config import (
    IN_TREE_KEYS,
    RECIPE_VARIABLE,
    SECTION,
    ConfigError,
    load_ds_config,
    resolve,
    without_in_tree_keys,
)

_STAGE3 = "deepspeed.runtime.zero.stage3"
_OFFLOAD = "deepspeed.runtime.zero.parameter_offload"
_PARTITION = "deepspeed.runtime.zero.partition_parameters"
_SEQUENCE = "deepspeed.sequence.layer"
_FPDT = "deepspeed.sequence.fpdt_layer"
_ENGINE = "deepspeed.runtime.engine"
_GROUPS = "deepspeed.utils.groups"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"  # DeepSpeed's key in a checkpoint
_ALONE = "_zeropp_fp8_alone"  # on a model whose engine has ended: what lets it run
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

# (module, class, attributes that the class's own methods must mention): objects that exist only inside an engine.
RELIED_ON_ATTRIBUTES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (_ENGINE, "DeepSpeedEngine", ("module_forward_pre_hook", "module_forward_post_hook")),
    (
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3",
        (
            "fp16_groups",
            "gradient_accumulation_dtype",
            "communication_data_type",
            "param_names",
            "parameter_offload",
            "persistent_parameters",
            "overflow",
            "loss_scale",
            "ipg_buckets",
            "micro_step_id",
            "model_parallel_group",
            "offload_optimizer",
            "reduce_and_partition_stream",
            "reduce_bucket_size",
            "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition",
            "averaged_gradients",
            "clip_grad",
            "dp_process_group",
            "fp16_partitioned_groups_flat_id",
            "fp32_partitioned_groups_flat",
            "grad_partitions_flat_buffer",
            "grad_position",
            "sub_group_to_group_id",
            "_z3_optimizer",
        ),
    ),
    (
        _OFFLOAD,
        "DeepSpeedZeRoOffload",
        (
            "module",
            "ds_z3_leaf_module",
            "param_coordinator",
            "pre_bwd_fn",
            "post_bwd_fn",
            "_max_available_parameters_in_numel",
            "_max_reuse_distance_in_numel",
            "_prefetch_bucket_sz",
        ),
    ),
    (
        _PARTITION,
        "Init",
        (
            "all_gather",
            "all_gather_coalesced",
            "partition",
            "ds_active_sub_modules",
            "ds_id",
            "ds_numel",
            "ds_process_group",
            "ds_shape",
            "ds_status",
            "ds_tensor",
        ),
    ),
)

_restore: list[tuple[Any, Any, Any]] = []  # (object or dict, name or key, what was there)


def _verify() -> None:
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

    for module_name, class_name, attributes in RELIED_ON_ATTRIBUTES:
        mentioned = _names_in_methods(getattr(importlib.import_module(module_name), class_name))
        for name in attributes:
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


def _replace(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        _restore.append((owner, name, owner.get(name)))
        owner[name] = value
    else:
        _restore.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def is_enabled() -> bool:
    """Whether the plugin is installed now."""
    return bool(_restore)


def enable() -> None:
    """See zeropp_fp8.enable."""
    if is_enabled():
        return
    # zero.Init replaces torch.Tensor.__new__; importing torch._dynamo under that dies in torch 2.13, so import first.
    import deepspeed
    import torch._dynamo

    _verify()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero import utils as zero_utils
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    from zeropp_fp8.optim import FP8AdamW
    from zeropp_fp8.zero.activations import replace_exchanges
    from zeropp_fp8.zero.frozen_init import gathering, partitioning, storing_exit, storing_post_init
    from zeropp_fp8.zero.linear import lean_linear

    _replace(deepspeed, "DeepSpeedEngine", _engine_class(deepspeed.DeepSpeedEngine))
    _replace(deepspeed, "DeepSpeedHybridEngine", _refusing_hybrid_engine(deepspeed.DeepSpeedHybridEngine))
    _replace(deepspeed.DeepSpeedConfig, "__init__", _init_naming_file(deepspeed.DeepSpeedConfig.__init__))
    _replace(Init, "__init__", _init_without_in_tree_keys(Init.__init__))
    _replace(Init, "_post_init_method", storing_post_init(Init._post_init_method))
    _replace(Init, "__exit__", storing_exit(Init.__exit__))
    _replace(Init, "_all_gather", gathering(Init._all_gather))
    _replace(Init, "_partition", partitioning(Init._partition))
    stock_linear = partition_parameters.zero3_linear_wrap
    _replace(partition_parameters, "zero3_linear_wrap", lean_linear(stock_linear))
    if torch.nn.functional.linear is stock_linear:  # an earlier engine has put it there
        _replace(torch.nn.functional, "linear", partition_parameters.zero3_linear_wrap)
    replace_exchanges(_replace)
    _replace(groups, "_clone_world_group", _world_group_with_time_limit)
    # DeepSpeed asks this list for permission.
    _replace(zero_utils, "ZERO_SUPPORTED_OPTIMIZERS", [*zero_utils.ZERO_SUPPORTED_OPTIMIZERS, FP8AdamW])
    if get_accelerator().device_name() == "cpu":
        # init_distributed() would compile a shared-memory op with gcc (30 s) that nothing here uses.
        _replace(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)


def disable() -> None:
    """See zeropp_fp8.disable."""
    while _restore:
        owner, name, value = _restore.pop()
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)


def _init_naming_file(stock_init):
    """DeepSpeedConfig.__init__, which reads a ds_config before any engine is made, with errors that name the file."""

    @functools.wraps(stock_init)
    def __init__(self, config, *args, **kwargs):
        if isinstance(config, (str, os.PathLike)):
            load_ds_config(config)
        stock_init(self, config, *args, **kwargs)

    return __init__


def _world_group_with_time_limit():
    """DeepSpeed's copy of the world, over which ZeRO-3 works; its own has torch's limit, whatever the script asked."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    from zeropp_fp8.comm import time_limit

    if groups._WORLD_GROUP is None:
        groups._WORLD_GROUP = dist.new_group(ranks=range(dist.get_world_size()), timeout=time_limit())
    return groups._WORLD_GROUP


def _init_without_in_tree_keys(stock_init):
    """zero.Init.__init__ that checks the configuration and does not see the ZeRO++ keys."""
    from zeropp_fp8.zero.frozen_init import stream_into_store

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        bound = inspect.signature(stock_init).bind(self, *args, **kwargs)
        for name in ("config_dict_or_path", "config"):
            given = bound.arguments.get(name)
            if given is not None:
                ds_config = load_ds_config(given)
                plugin_config = resolve(ds_config)
                if plugin_config is not None:
                    stream_into_store(self, plugin_config)
                    bound.arguments[name] = without_in_tree_keys(ds_config)
                    for key in IN_TREE_KEYS:  # some of them are arguments of Init too
                        if key in bound.arguments:
                            bound.arguments[key] = IN_TREE_KEYS[key]
        stock_init(*bound.args, **bound.kwargs)

    return __init__


def _refusing_hybrid_engine(stock_class):
    class HybridEngine(stock_class):
        """DeepSpeedHybridEngine, which has ZeRO-3 code of its own, refuses a ds_config that asks for the plugin."""

        def __init__(self, *args, config=None, **kwargs):
            resolve(load_ds_config(config), hybrid_engine=True)
            super().__init__(*args, config=config, **kwargs)

    return HybridEngine


def _engine_class(stock_class):
    class ZeroppEngine(stock_class):
        """DeepSpeedEngine that builds the plugin's ZeRO-3 when the ds_config asks for it, and is stock otherwise."""

        zeropp_fp8_session = None
        _zeropp_fp8_conversion = None
        _zeropp_fp8_activations = None
        _zeropp_fp8_frozen_load = None
        _zeropp_fp8_destroyed = False

        def __init__(self, args, model, *positional, config=None, config_class=None, **kwargs):
            config = load_ds_config(config) if config is not None else None
            plugin_config = resolve(config) if config is not None else None
            # nn.Module.__setattr__ is not usable before Module.__init__ for modules only; a plain object is fine.
            object.__setattr__(self, "_zeropp_fp8_config", plugin_config)
            if plugin_config is not None:
                config = without_in_tree_keys(config)
                for key, off in IN_TREE_KEYS.items():
                    setattr(config_class.zero_config, key, off)
                if plugin_config.computes_in_low_precision:
                    # Before ZeRO-3 puts its hooks on modules, which would keep calling the class that they saw.
                    object.__setattr__(self, "_zeropp_fp8_conversion", _converted(model, plugin_config.compute))
            else:
                _refuse_left_over(model)
            for handle in model.__dict__.pop(_ALONE, ()):
                handle.remove()
            try:
                super().__init__(args, model, *positional, config=config, config_class=config_class, **kwargs)
            except BaseException:
                self._zeropp_fp8_let_go()
                raise
            if plugin_config is None and self.global_rank == 0:
                print(
                    f'zeropp_fp8: stock DeepSpeed; the ds_config has no "{SECTION}" section and no ZeRO++ key '
                    f"(or switches the section off), and {RECIPE_VARIABLE} names no recipe for it",
                    flush=True,
                )

        def _configure_zero_optimizer(self, optimizer):
            if self._zeropp_fp8_config is None:
                return super()._configure_zero_optimizer(optimizer)
            from zeropp_fp8.zero.activations import exchange_in_fp8
            from zeropp_fp8.zero.session import Session

            _check_owners(self._zeropp_fp8_config)
            group = _partition_group(self.module, self.mpu)
            session = Session(self._zeropp_fp8_config, group, self._zeropp_fp8_conversion, _model_parallel(self.mpu))
            object.__setattr__(self, "zeropp_fp8_session", session)
            object.__setattr__(self, "_zeropp_fp8_activations", exchange_in_fp8(self.module, session))
            with _zero_classes_of(session):
                return super()._configure_zero_optimizer(optimizer)

        def destroy(self):
            if self._zeropp_fp8_destroyed:
                # DeepSpeed calls it again when the engine is collected. A later engine may have the model by then
                # (Trainer.train() called twice), and its layers and hooks are not this one's to take off.
                return
            object.__setattr__(self, "_zeropp_fp8_destroyed", True)
            try:
                super().destroy()
            finally:
                self._zeropp_fp8_let_go()
            if self.zeropp_fp8_session is not None:
                from zeropp_fp8.zero.offload import run_alone

                # They would hold the engine for as long as the model lives.
                self.module_forward_pre_hook.remove()
                self.module_forward_post_hook.remove()
                setattr(self.module, _ALONE, run_alone(self.module))

        def _zeropp_fp8_let_go(self):
            """Take off the model what is not DeepSpeed's to take off."""
            if self._zeropp_fp8_conversion is not None:
                self._zeropp_fp8_conversion.restore()
            if self._zeropp_fp8_activations is not None:
                self._zeropp_fp8_activations.remove()

        def __del__(self):
            if self.zeropp_fp8_session is not None:
                # Engines are collected at moments of each rank's own: what destroy() does together with other ranks
                # must be left out.
                self.zeropp_fp8_session.collected = True
            super().__del__()

        def _zeropp_fp8_owners(self):
            """The stage whose parameters have owners, if there is one."""
            stage = self.optimizer
            return stage if getattr(stage, "has_owners", False) else None

        def _get_param_fragment_func(self, param):
            from zeropp_fp8.zero.frozen_checkpoint import fragment_of

            stage, codes = self._zeropp_fp8_owners(), fragment_of(self.param_names[param], param)
            if codes is not None:
                return codes
            fragment = super()._get_param_fragment_func(param)
            return fragment if stage is None else stage.slice_of_owned(param, fragment)

        def save_checkpoint(
            self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False
        ):
            options = {"client_state": client_state or {}, "exclude_frozen_parameters": exclude_frozen_parameters}
            stock = functools.partial(super().save_checkpoint, **options)
            if self.zeropp_fp8_session is None:
                return stock(save_dir, tag, save_latest=save_latest)
            from zeropp_fp8.zero.checkpoint_commit import save_in_two_phases

            return save_in_two_phases(self, stock, save_dir, tag, save_latest)

        def _save_checkpoint(self, *args, **kwargs):
            with self._zeropp_fp8_keeping_error():
                super()._save_checkpoint(*args, **kwargs)

        def _save_zero_checkpoint(self, *args, **kwargs):
            with self._zeropp_fp8_keeping_error():
                super()._save_zero_checkpoint(*args, **kwargs)

        def _zeropp_fp8_keeping_error(self):
            """While a checkpoint is saved in two phases; otherwise errors go their way."""
            return getattr(self.checkpoint_engine, "keeping_error", nullcontext)()

        def _load_checkpoint(self, load_dir, tag, *args, **kwargs):
            stock = functools.partial(super()._load_checkpoint, load_dir, tag, *args, **kwargs)
            if self.zeropp_fp8_session is None:
                return stock()
            from zeropp_fp8.zero.checkpoint_check import check_files, check_ranks
            from zeropp_fp8.zero.fragment import fragments_stand_in
            from zeropp_fp8.zero.frozen_checkpoint import FrozenLoad

            if not self.load_universal_checkpoint():
                if self._zeropp_fp8_config.checkpoint.verify:
                    check_files(load_dir, tag)
                with_states = kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False)
                check_ranks(self.zeropp_fp8_session, self._get_ckpt_name(load_dir, tag), with_states)
            self._zeropp_fp8_frozen_load = FrozenLoad(self, load_dir, tag)
            try:
                with fragments_stand_in():
                    universal = self.load_universal_checkpoint()
                    return self._zeropp_fp8_frozen_load.load_universal(stock) if universal else stock()
            finally:
                self._zeropp_fp8_frozen_load = None
                # Weights are written straight into the shards: nothing derived from the old ones may survive.
                getattr(self.optimizer, "parameter_offload", self.optimizer).gatherer.weights_changed()

        def load_module_state_dict(self, checkpoint, *args, **kwargs):
            if self.zeropp_fp8_session is not None:
                from zeropp_fp8.zero.frozen_checkpoint import FrozenLoad

                load = self._zeropp_fp8_frozen_load or FrozenLoad(self)
                if load.concerns(checkpoint):
                    return load.load_module(super().load_module_state_dict, checkpoint, *args, **kwargs)
            stage, frozen = self._zeropp_fp8_owners(), checkpoint.get(FROZEN_PARAM_FRAGMENTS)
            if stage is not None and frozen is not None:
                params = {self.param_names[p]: p for p in self.module.parameters() if self.param_names.get(p) in frozen}
                owned = {name: stage.owned_of_slice(param, frozen[name]) for name, param in params.items()}
                checkpoint = {**checkpoint, FROZEN_PARAM_FRAGMENTS: owned}
            return super().load_module_state_dict(checkpoint, *args, **kwargs)

    ZeroppEngine.__name__ = ZeroppEngine.__qualname__ = stock_class.__name__
    return ZeroppEngine


def _check_owners(config) -> None:
    """Owners of whole tensors need a DeepSpeed that asks where in a parameter a rank's part begins."""
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if config.partition == "whole_tensor" and not hasattr(DeepSpeedZeroOptimizer_Stage3, "_get_param_partition_rank"):
        raise ConfigError(
            f'"{SECTION}.partition": "whole_tensor" needs DeepSpeed 0.19.3 or later, this is {deepspeed.__version__}; '
            'update it, or set partition to "slice"'
        )


def _refuse_left_over(model) -> None:
    """Refuse a model that an engine of the plugin still holds: DeepSpeed alone would not know what it meets."""
    from zeropp_fp8.compute.linear import LinearPrecision

    layer = next(
        (n for n, m in model.named_modules() if isinstance(getattr(m, "precision", None), LinearPrecision)), None
    )
    param = next((n for n, p in model.named_parameters() if hasattr(p, "zeropp_fp8_wire")), None)
    stored = next((n for n, p in model.named_parameters() if hasattr(p, "zeropp_fp8_stored")), None)
    if stored is not None and param is None:
        raise ConfigError(
            f"{stored} rests as codes of the frozen store, which stock DeepSpeed would take for numbers; add the "
            f'"{SECTION}" section with which the model was made to this ds_config, or make the model without '
            '"frozen.format"'
        )
    if layer is not None or param is not None:
        raise ConfigError(
            f'the ds_config has no "{SECTION}" section, but an engine that had one still holds the model: '
            + (f"the layer {layer} computes in low precision" if layer is not None else f"{param} is gathered by it")
            + "; call destroy() on that engine before the next one is made"
        )


def _converted(model, compute):
    """Let the model's linear layers compute in low precision; refuse a model in which there is none that can."""
    from zeropp_fp8.compute import convert_linear_layers

    try:
        report = convert_linear_layers(model, compute)
    except ValueError as error:
        raise ConfigError(
            f'"{SECTION}.compute.format": {error}; if another engine over the same model did it, call destroy() on '
            "that engine before the next one is made"
        ) from None
    if not report.converted:
        raise ConfigError(
            f'"{SECTION}.compute.format": no linear layer of the model can compute in it ({report}); set it to "none", '
            'or change "compute.skip_modules", "compute.min_features" or "compute.scaling"'
        )
    return report


def _partition_group(module, mpu):
    """The process group that the model's parameters are, or are about to be, partitioned over."""
    import torch.distributed as dist

    found = {id(p.ds_process_group): p.ds_process_group for p in module.parameters() if hasattr(p, "ds_process_group")}
    if len(found) > 1:
        raise ConfigError(
            f'"{SECTION}": the model\'s parameters are partitioned over {len(found)} different process groups (expert '
            "parallelism); the plugin needs one: remove the section or the expert parallelism"
        )
    if found:
        return next(iter(found.values()))
    if mpu is not None and hasattr(mpu, "get_data_parallel_group"):
        return mpu.get_data_parallel_group()
    return dist.group.WORLD


def _model_parallel(mpu):
    """The process group of the ranks that hold one copy of the model together; None where each rank does."""
    return mpu.get_model_parallel_group() if hasattr(mpu, "get_model_parallel_group") else None


@contextmanager
def _zero_classes_of(session) -> Iterator[None]:
    """While DeepSpeed builds its ZeRO-3 objects, the names it looks up give the plugin's classes for `session`."""
    # SuperOffload's class must exist before the swap, or it would inherit from the plugin's.
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
    from deepspeed.runtime import engine as engine_module
    from deepspeed.runtime.zero import stage3 as stage3_module

    from zeropp_fp8.zero.offload import ZeroppOffload
    from zeropp_fp8.zero.stage3 import ZeroppStage3

    stock = stage3_module.DeepSpeedZeroOptimizer_Stage3, engine_module.DeepSpeedZeRoOffload
    stage3_module.DeepSpeedZeroOptimizer_Stage3 = functools.partial(ZeroppStage3, session=session)
    engine_module.DeepSpeedZeRoOffload = functools.partial(ZeroppOffload, session=session)
    try:
        yield
    finally:
        stage3_module.DeepSpeedZeroOptimizer_Stage3, engine_module.DeepSpeedZeRoOffload = stock
