"""The engine for a ds_config that asks for the plugin: a DeepSpeedEngine that builds the plugin's ZeRO-3."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.metadata import version

from deepspeed import comm as ds_comm
from deepspeed.runtime.engine import DeepSpeedEngine

from zeropp_fp8 import sharded
from zeropp_fp8.config import IN_TREE_KEYS, SECTION, TRIAL_VARIABLE, ConfigError, without_in_tree_keys
from zeropp_fp8.optim import Muon
from zeropp_fp8.plugin.throughput import wait_for_compute

FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"  # DeepSpeed's key in a checkpoint
ALONE = "_zeropp_fp8_alone"  # on a model whose engine has ended: hooks that let the model run
_stock_init = DeepSpeedEngine.__init__  # the plugin replaces it while it is installed


class ZeroppEngine(DeepSpeedEngine):
    """DeepSpeedEngine that builds the plugin's ZeRO-3."""

    zeropp_fp8_session = None
    _zeropp_fp8_conversion = None
    _zeropp_fp8_loading = ()  # (folder, tag) while a checkpoint is loaded
    _zeropp_fp8_destroyed = False

    def _zeropp_fp8_init(self, plugin_config, args, model, *positional, config, config_class, **kwargs):
        # nn.Module.__setattr__ fails for modules before Module.__init__; a plain object needs no such call.
        object.__setattr__(self, "_zeropp_fp8_config", plugin_config)
        config = without_in_tree_keys(config)
        for key, off in IN_TREE_KEYS.items():
            setattr(config_class.zero_config, key, off)
        if plugin_config.computes_in_low_precision:
            # ZeRO-3 puts hooks on modules afterwards, and hooks keep calling the class that they saw.
            object.__setattr__(self, "_zeropp_fp8_conversion", _converted(model, plugin_config.compute))
        try:
            _stock_init(self, args, model, *positional, config=config, config_class=config_class, **kwargs)
            wait_for_compute(self.tput_timer)
            self._zeropp_fp8_observe()
            self._zeropp_fp8_gatherer.ownership.made()
        except BaseException:
            # Collecting it must do nothing: another engine may have the model by then.
            self._zeropp_fp8_destroyed = self.zeropp_fp8_session is not None
            self._zeropp_fp8_let_go()
            raise

    def _zeropp_fp8_observe(self):
        observed = self._zeropp_fp8_config.observed or TRIAL_VARIABLE in os.environ
        if observed and hasattr(self.optimizer, "parameter_offload"):  # not an engine that only evaluates
            from zeropp_fp8.numerics import observe

            observe(self)

    def _configure_basic_optimizer(self, model_parameters):
        if self.optimizer_name() != "muon" or self._zeropp_fp8_config.partition != "whole_tensor":
            return super()._configure_basic_optimizer(model_parameters)
        from zeropp_fp8.plugin.muon import muon_of

        return muon_of(self.module, model_parameters, self.optimizer_params() or {})

    def zero_allow_untested_optimizer(self):
        return isinstance(self.basic_optimizer, Muon) or super().zero_allow_untested_optimizer()

    def _configure_expert_parallel(self, *args, **kwargs):
        try:
            return super()._configure_expert_parallel(*args, **kwargs)
        except TypeError as error:  # DeepSpeed 0.19.8 in an output recorder of transformers 5.23
            both = " with ".join(f"{name} {version(name)}" for name in ("deepspeed", "transformers"))
            said = f'"expert_parallel.enabled": AutoEP does not start in {both} ({error}); install other versions'
            raise ConfigError(f"{said}, such as transformers 5.17 with DeepSpeed 0.19.8") from error

    def _configure_zero_optimizer(self, optimizer):
        from zeropp_fp8.zero.session import Session
        from zeropp_fp8.zero.ulysses import exchange_in_fp8

        config, conversion, this = self._zeropp_fp8_config, self._zeropp_fp8_conversion, weakref.ref(self)
        check_owners(config, optimizer)
        group, others = _partition_group(self.module, self.mpu), _model_parallel(self.mpu)
        where = {}
        if config.partition == "whole_tensor":
            from zeropp_fp8.zero.owners.placement import Owners

            where = {"placement": functools.partial(Owners, optimizer=optimizer)}
        session = Session(config, group, conversion, others, this, **where)
        session.ledger.comms_logger = ds_comm.comms_logger
        session.leave_exact(self.module)
        object.__setattr__(self, "zeropp_fp8_session", session)
        object.__setattr__(self, "_zeropp_fp8_exchanging", exchange_in_fp8(self.module, session))
        with _zero_classes_of(session):
            stage = super()._configure_zero_optimizer(optimizer)
        getattr(stage, "parameter_offload", stage).all_is_there()
        return stage

    def _forward_prologue(self, inputs, kwargs):
        self._zeropp_fp8_offload.gather_what_is_read(True)
        with self._zeropp_fp8_not_walked():
            return super()._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self):
        self._zeropp_fp8_offload.gather_what_is_read(False)
        with self._zeropp_fp8_not_walked():
            return super()._forward_epilogue()

    def forward(self, *inputs, **kwargs):
        try:
            with self._zeropp_fp8_exchanging():
                return super().forward(*inputs, **kwargs)
        except BaseException:
            self._zeropp_fp8_offload.leave_forward()
            raise

    def backward(self, loss, *args, **kwargs):
        for part in self.zeropp_fp8_session.parts:
            part.loss_is(loss)
        with self._zeropp_fp8_exchanging():
            return super().backward(loss, *args, **kwargs)

    def step(self, *args, **kwargs):
        super().step(*args, **kwargs)
        if self.monitor.enabled and self.global_rank == 0:
            found = self._zeropp_fp8_metrics().items()  # empty if no step has ended here
            events = [(f"Train/Samples/zeropp_fp8/{name}", value, self.global_samples) for name, value in found]
            self.monitor.write_events(events)

    @functools.cached_property
    def _zeropp_fp8_metrics(self):
        from zeropp_fp8.zero.telemetry import StepMetrics

        return StepMetrics(self.zeropp_fp8_session)

    @contextmanager
    def _zeropp_fp8_not_walked(self):
        """Skip DeepSpeed's own walk over all modules: DeepSpeed asks this method before it walks."""
        self.__dict__["zero_optimization_partition_weights"] = lambda: False
        try:
            yield
        finally:
            del self.__dict__["zero_optimization_partition_weights"]

    def destroy(self):
        if self._zeropp_fp8_destroyed:
            # DeepSpeed calls it again when the engine is collected. By then a later engine may have the model
            # (Trainer.train() called twice), and this engine must not take off the later one's layers and hooks.
            return
        if self.zeropp_fp8_session is None:
            super().destroy()
            return
        self._zeropp_fp8_offload.check_is_last()
        object.__setattr__(self, "_zeropp_fp8_destroyed", True)
        try:
            super().destroy()
        finally:
            self._zeropp_fp8_let_go()
        from zeropp_fp8.zero.offload import run_alone

        handles = run_alone(self.module)
        if handles:
            setattr(self.module, ALONE, handles)

    def _zeropp_fp8_let_go(self):
        """Detach this engine from the model: take off all that it has put there, even if its constructor has failed."""
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            if name in vars(self):
                vars(self)[name].remove()
        if self.zeropp_fp8_session is not None:
            self.zeropp_fp8_session.on_model.close()
        elif self._zeropp_fp8_conversion is not None:
            self._zeropp_fp8_conversion.restore()

    def __del__(self):
        if self.zeropp_fp8_session is not None:
            # Each rank collects engines at its own time, but all ranks must agree on who gathers what. So the
            # model keeps what is attached to it.
            object.__setattr__(self, "_zeropp_fp8_destroyed", True)
            if hasattr(getattr(self, "optimizer", None), "hooks"):  # it trains, and its constructor has come so far
                self.optimizer.hooks.take_no_more()
        super().__del__()

    @property
    def _zeropp_fp8_offload(self):
        return getattr(self.optimizer, "parameter_offload", self.optimizer)

    @property
    def _zeropp_fp8_gatherer(self):
        return self._zeropp_fp8_offload.gatherer

    def _get_param_fragment_func(self, param):
        stock = functools.partial(super()._get_param_fragment_func, param)
        from zeropp_fp8.zero.gather.attached import unit_of

        return unit_of(param).storage.fragment(self.param_names[param], param, stock)

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        options = {"client_state": client_state or {}, "exclude_frozen_parameters": exclude_frozen_parameters}
        stock = functools.partial(super().save_checkpoint, **options)
        from zeropp_fp8.zero.checkpoint.commit import save_in_two_phases

        return save_in_two_phases(self, stock, save_dir, tag, save_latest)

    def _save_checkpoint(self, *args, **kwargs):
        with self._zeropp_fp8_keeping_error():
            super()._save_checkpoint(*args, **kwargs)

    def _save_zero_checkpoint(self, *args, **kwargs):
        with self._zeropp_fp8_keeping_error():
            super()._save_zero_checkpoint(*args, **kwargs)

    def _zeropp_fp8_keeping_error(self):
        """Keep errors while a checkpoint is saved in two phases; otherwise raise them."""
        return getattr(self.checkpoint_engine, "keeping_error", nullcontext)()

    def _load_checkpoint(self, load_dir, tag, *args, **kwargs):
        stock = functools.partial(super()._load_checkpoint, load_dir, tag, *args, **kwargs)
        from zeropp_fp8.zero.checkpoint.check import check_files, check_ranks
        from zeropp_fp8.zero.fragment import fragments_stand_in

        if not self.load_universal_checkpoint():
            if self._zeropp_fp8_config.checkpoint.verify:
                check_files(load_dir, tag)
            with_states = kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False)
            check_ranks(self.zeropp_fp8_session, self._get_ckpt_name(load_dir, tag), with_states)
        self._zeropp_fp8_loading = (load_dir, tag)
        try:
            with fragments_stand_in():
                if not self.load_universal_checkpoint():
                    return stock()
                from zeropp_fp8.zero.frozen.checkpoint import FrozenLoad  # the checkpoint may hold codes

                return FrozenLoad(self, load_dir, tag).load_universal(stock)
        finally:
            self._zeropp_fp8_loading = ()
            # Weights are written straight into the shards: nothing derived from the old ones may remain.
            self._zeropp_fp8_gatherer.weights_changed()

    def load_module_state_dict(self, checkpoint, *args, **kwargs):
        stock, frozen = super().load_module_state_dict, checkpoint.get(FROZEN_PARAM_FRAGMENTS)
        if frozen is None:
            return stock(checkpoint, *args, **kwargs)
        from zeropp_fp8.zero.fragment import has_codes
        from zeropp_fp8.zero.gather.attached import unit_of

        gatherer = self._zeropp_fp8_gatherer
        if has_codes(frozen) or any(unit.storage.sends_as_stored for unit in gatherer.units):
            from zeropp_fp8.zero.frozen.checkpoint import FrozenLoad

            return FrozenLoad(self, *self._zeropp_fp8_loading).load_module(stock, checkpoint, *args, **kwargs)
        params = {self.param_names[p]: p for p in self.module.parameters() if self.param_names.get(p) in frozen}
        own = {n: unit_of(p).storage.from_slice(p, frozen[n]) for n, p in params.items()}
        return stock({**checkpoint, FROZEN_PARAM_FRAGMENTS: own}, *args, **kwargs)


# Scripts and libraries print and compare the name.
ZeroppEngine.__name__ = ZeroppEngine.__qualname__ = DeepSpeedEngine.__name__


def check_owners(config, optimizer=None) -> None:
    """Refuse owners of whole tensors if this DeepSpeed does not ask where in a parameter a rank's part begins, and an
    optimizer that gathers by itself."""
    import deepspeed
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    if config.partition == "whole_tensor" and not hasattr(DeepSpeedZeroOptimizer_Stage3, "_get_param_partition_rank"):
        raise ConfigError(
            f'"{SECTION}.partition": "whole_tensor" needs DeepSpeed 0.19.3 or later, this is {deepspeed.__version__}; '
            'update it, or set partition to "slice"'
        )
    if config.partition == "whole_tensor" and type(optimizer).__name__ == "MuonWithAuxAdam":
        raise ConfigError(
            f'"{SECTION}.partition": "whole_tensor" does not go with DeepSpeed\'s MuonWithAuxAdam; let the ds_config '
            'make the optimizer ("optimizer.type": "Muon"), or use zeropp_fp8.optim.Muon'
        )


def _converted(model, compute):
    """Make the model's linear layers compute in low precision; refuse a model without any layer that can."""
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
    """Return the process group over which the model's parameters, but for experts, are partitioned, or will be."""
    import torch.distributed as dist

    there = (p for p in module.parameters() if sharded.is_sharded(p) and sharded.experts_group(p) is None)
    found = {id(sharded.group(p)): sharded.group(p) for p in there}
    if len(found) > 1:
        raise ConfigError(
            f'"{SECTION}": the model\'s parameters are partitioned over {len(found)} different process groups; the '
            "plugin needs one: remove the section, or what has partitioned them"
        )
    if found:
        return next(iter(found.values()))
    if mpu is not None and hasattr(mpu, "get_data_parallel_group"):
        return mpu.get_data_parallel_group()
    return dist.group.WORLD


def _model_parallel(mpu):
    """Return the process group of the ranks that share one copy of the model; None if each rank has its own."""
    return mpu.get_model_parallel_group() if hasattr(mpu, "get_model_parallel_group") else None


@contextmanager
def _zero_classes_of(session) -> Iterator[None]:
    """Give the plugin's classes for `session` under the names that DeepSpeed looks up while it builds its ZeRO-3."""
    # SuperOffload's class must exist before the swap, or it would inherit from the plugin's.
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
    from deepspeed.runtime import engine as engine_module
    from deepspeed.runtime.zero import stage3 as stage3_module

    from zeropp_fp8.zero.as_deepspeed import replaced
    from zeropp_fp8.zero.offload import ZeroppOffload
    from zeropp_fp8.zero.stage3 import ZeroppStage3

    stage = replaced(stage3_module, "DeepSpeedZeroOptimizer_Stage3", functools.partial(ZeroppStage3, session=session))
    offload = replaced(engine_module, "DeepSpeedZeRoOffload", functools.partial(ZeroppOffload, session=session))
    with stage, offload:
        yield
