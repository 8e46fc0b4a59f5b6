"""Subclass of DeepSpeedZeRoOffload: gathers and releases around modules. Engines without optimizer have only this."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload, ZeROOrderedDict
from torch import nn
from torch.utils.checkpoint import _recomputation_hook
from torch.utils.hooks import RemovableHandle

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.zero.attachment import Attachment, is_attached
from zeropp_fp8.zero.compiled import compile_blocks, leave_untraced
from zeropp_fp8.zero.compute_scaling import ComputeScaling
from zeropp_fp8.zero.gather.attached import units_of
from zeropp_fp8.zero.gather.blocks import find_blocks
from zeropp_fp8.zero.gather.coordinator import UnitCoordinator
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.gather.ownership import check_attachable
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.sliced import Sliced, SlicedExperts
from zeropp_fp8.zero.gather.storage import Storage
from zeropp_fp8.zero.gather.units import build_units
from zeropp_fp8.zero.gather.used_experts import InParts, Routing, class_of, places_of
from zeropp_fp8.zero.report import print_start_table
from zeropp_fp8.zero.session import Session

_ENGINES = "zeropp_fp8_engines"  # attribute of a module or parameter: the engines over it
_COUNT = [0]  # DeepSpeed numbers the modules of all engines


class _CallTensors:
    """Counts a module call's inputs, or outputs, that need a gradient and that have one in this backward.

    It counts per call: a module may call itself, and may be called several times before a backward. Activation
    checkpointing calls it once more only to save tensors, and backward never reaches such a call.
    """

    def __init__(self) -> None:
        self.number = 0
        self._backward = -1  # its id: an exception may end a call, and backward may reach a call twice
        self._reached = 0

    def reach(self) -> int:
        """Count one more tensor that has its gradient; returns the count."""
        running = torch._C._current_graph_task_id()
        if self._backward != running:
            self._backward, self._reached = running, 0
        self._reached += 1
        return self._reached


def _before_backward_of(offload: ZeroppOffload, module: nn.Module) -> type[torch.autograd.Function]:
    """An identity on a module's outputs whose backward calls a hook before the module's own.

    DeepSpeed's own function has a `setup_context`, and autograd inspects its signature at each call.
    """

    class PreBackwardFunctionForModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            ctx.outputs = offload.outputs
            return output.detach()

        @staticmethod
        def backward(ctx, *grads):
            offload.pre_sub_module_backward_function(module, begins=ctx.outputs.reach() == 1)
            return grads

    return PreBackwardFunctionForModule


def _after_backward_of(offload: ZeroppOffload, module: nn.Module) -> type[torch.autograd.Function]:
    """An identity on a module's inputs whose backward calls a hook when all of them have their gradients."""

    class PostBackwardFunctionModule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            ctx.inputs = offload.inputs
            ctx.inputs.number += tensor.requires_grad
            return tensor.detach()

        @staticmethod
        def backward(ctx, *grads):
            if ctx.inputs.reach() == ctx.inputs.number:
                offload.post_sub_module_backward_function(module)
            return grads

    return PostBackwardFunctionModule


class _OrdinaryTensors:
    """No autograd and no inference tensors, because training uses tensors that an evaluation gathers or keeps."""

    def __enter__(self) -> None:
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *exc) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(*exc)


def _only_saves() -> bool:
    """Whether non-reentrant activation checkpointing runs a function again inside backward.

    No backward goes through this run. It saves tensors for the backward of the first run.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__qualname__.startswith(_recomputation_hook.__qualname__)


def _parameters_by_name(model: nn.Module) -> list[ZeROOrderedDict]:
    """The dictionaries in which modules look up their parameters.

    DeepSpeed walks over the model twice per forward; with nn.Module.modules that takes 5 ms for 2,500 modules.
    """
    seen, waiting, found = set(), [model], []
    while waiting:
        module = waiting.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        waiting.extend(module._modules.values())
        if type(module._parameters) is not ZeROOrderedDict:
            _order_parameters(module)  # a module that was added to the model later
        if type(module._parameters) is ZeROOrderedDict:
            found.append(module._parameters)
    return found


_order_parameters = getattr(parameter_offload, "ensure_zero_ordered_dict", lambda module: None)  # since 0.19


def _gathers_what_is_read(model: nn.Module, yes: bool) -> None:
    """Set whether DeepSpeed gathers a missing parameter when code reads it by its name."""
    for parameters in _parameters_by_name(model):
        parameters._in_forward = yes


def _begin_alone(module: nn.Module, args) -> None:
    parameter_offload.FWD_MODULE_STACK.append(module)
    _gathers_what_is_read(module, True)


def _end_alone(module: nn.Module, args, output) -> None:
    _gathers_what_is_read(module, False)
    parameter_offload.FWD_MODULE_STACK.pop()


def run_alone(model: nn.Module) -> list[RemovableHandle]:
    """Let a model run after its last engine has ended, as under DeepSpeed's: a read gathers parameters, and they stay.

    Nothing here refers to that engine. Returns no handles if the model has another engine.
    """
    if is_attached(model, _ENGINES):
        return []
    after = model.register_forward_hook(_end_alone, always_call=True)
    return [model.register_forward_pre_hook(_begin_alone), after]


def storages_of(route: Route) -> list[Storage]:
    """The storages that a configuration needs, imported on demand. A parameter belongs to the first that takes it."""
    config, storages = route.session.config, []
    if config.frozen.format != "none":
        from zeropp_fp8.zero.frozen.unit import Stored

        storages.append(Stored(route))
    if config.partition == "whole_tensor":
        from zeropp_fp8.zero.owners.unit import Owned

        storages.append(Owned(route))
    else:
        storages.append(Sliced(route))
    return storages


def storages_of_experts(model: nn.Module, session: Session) -> list[Storage]:
    """The storage of experts that are dealt out, if there are some."""
    sessions = dict.fromkeys(session.of(param) for param in model.parameters())
    return [SlicedExperts(Route(each)) for each in sessions if each is not session]


class ZeroppOffload(DeepSpeedZeRoOffload):
    """DeepSpeed's hooks around modules, with this project's units, coordinator and gathers behind them."""

    def __init__(self, module, *args, session: Session, trains: bool = False, **kwargs) -> None:
        self.session = session
        self._trains = trains
        self.destroyed = False
        self._earlier: list[ZeroppOffload] = []  # engines over (part of) this model, made before this one
        self._later: list[ZeroppOffload] = []
        self._on_model = ExitStack()  # undoes everything that this constructor has done so far
        session.on_model.callback(self.destroy)
        check_attachable(module.parameters())  # before anything changes on modules that another engine runs
        granularity = session.config.gather_granularity
        self.blocks = find_blocks(module) if granularity == "block" else []
        self._places = places_of(module, session.config) if session.topology.world_size > 1 else {}
        self._evaluating = False
        self._by_name: list[ZeROOrderedDict] = []
        self.generating = False  # inside zeropp_fp8.generation (generation/context.py)
        self.announced: str | None = None  # the place of weights in the last generation
        self.before_backward: Callable[[bool], None] | None = None  # called as a module's backward begins
        self.after_backward_of: Callable[[nn.Module], None] | None = None  # called when one is over
        # For the call whose hooks run now: DeepSpeed's hooks pass its tensors one by one, with nothing in between.
        self.inputs, self.outputs = _CallTensors(), _CallTensors()
        super().__init__(module, *args, **kwargs)
        if session.conversion is not None:
            session.parts.append(ComputeScaling(session))
        route = Route(session)
        storages = [*storages_of_experts(module, session), *storages_of(route)]
        apart = {place: functools.partial(class_of, experts) for place, experts in self._places.items()}
        units = build_units(module, self.blocks, granularity, storages, apart)
        self.gatherer = Gatherer(route, storages)
        self._on_model.callback(self.gatherer.detach)
        self.gatherer.attach(units)
        self.param_coordinator = UnitCoordinator(
            self.gatherer,
            prefetch_numel=self._prefetch_bucket_sz,
            max_live_numel=self._max_available_parameters_in_numel,
            max_reuse_numel=self._max_reuse_distance_in_numel,
        )
        self.param_coordinator.apart = self._places
        self._routings = {
            place: Routing(self.gatherer, [u for u in units_of(place.parameters()) if isinstance(u, InParts)], experts)
            for place, experts in self._places.items()
        }
        self._on_model.callback(self._leave_pass)
        if session.config.compile == "blocks":
            compile_blocks(self.blocks, self._attachment.put)

    def all_is_there(self) -> None:
        """The engine has allocated all that it needs at start: choose secondary shards, print the table. Collective."""
        self.gatherer.secondary.choose(self.gatherer.units)
        print_start_table(self.session, self.gatherer, self.module, self.blocks)

    def gather_what_is_read(self, yes: bool) -> None:
        """A forward of the engine begins (`yes`), and parameters are gathered when read by name, or it has ended."""
        if yes:
            self._by_name = _parameters_by_name(self.module)
        for parameters in self._by_name:
            parameters._in_forward = yes

    def setup_zero_stage3_hooks(self) -> None:
        self._on_model.callback(self._remove_module_hooks)
        super().setup_zero_stage3_hooks()
        # DeepSpeed never removes the module from this stack, so the model would never be freed.
        self._on_model.callback(parameter_offload.FWD_MODULE_STACK.remove, self.module)

    def _register_deepspeed_module(self, module, count=_COUNT) -> None:
        """Put this project's autograd functions where DeepSpeed looks for its own before it makes them."""
        self._attachment.put(module, "pre_bwd_fn", _before_backward_of(self, module))
        self._attachment.put(module, "post_bwd_fn", _after_backward_of(self, module))
        for inner in module.modules() if self._places and sharded.is_leaf(module) else ():
            if inner in self._places and inner is not module:
                self._register_deepspeed_module(inner, count)  # DeepSpeed registers nothing inside of leaf modules
                count[0] += 1
        if module in self._places:
            self.forward_hooks.append(module.register_forward_pre_hook(self._routing_is_known, with_kwargs=True))
        super()._register_deepspeed_module(module, count)
        if module is self.module:  # this is the last one; TRL registers hooks again
            hooks = (self.fwd_pre_hook, *self.forward_hooks, *self.backward_hooks)
            leave_untraced(hooks)
            self._attachment.silences(hooks)

    def _attach(self, model: nn.Module) -> None:
        """Put this engine's hooks and leaf modules on the model: it gathers parameters for all engines over it."""
        self._attachment = Attachment(self, (*model.modules(), *model.parameters()), _ENGINES)
        self._on_model.callback(self._detach)
        for earlier in self._attachment.attach():
            self._earlier.append(earlier.owner)
            earlier.owner._later.append(self)
        for param in model.parameters():
            self._attachment.keep(param, "ds_persist", "ds_z3_leaf_module")
        for leaf in (*self.blocks, *self._places):
            if not sharded.is_leaf(leaf):
                # DeepSpeed then fetches and releases it as one unit.
                self._attachment.put(leaf, "_z3_leaf", True)

    def _detach(self) -> None:
        self._attachment.detach()
        for engine in self._earlier:
            engine._later.remove(self)

    def check_is_last(self) -> None:
        """Check that this engine is the last one over the model: engines end in the reverse order of their making.

        Raises:
            RuntimeError: there is a later engine; raised on all ranks, before anything has changed.
        """
        if self._later:
            raise RuntimeError(
                f"destroy(): {len(self._later)} engine(s) made later over this model, or part of it, are still there, "
                "and have it now, also if the script has dropped them; call their destroy() first, that of the last "
                "one before the others"
            )

    def _convert_to_zero_parameters(self, ds_config, module, mpu) -> None:
        """After DeepSpeed's conversion, store frozen parameters if so configured, and take the model over."""
        super()._convert_to_zero_parameters(ds_config, module, mpu)
        frozen = self.session.config.frozen
        if frozen.format != "none" or any(sharded.stored_as_codes(param) for param in module.parameters()):
            from zeropp_fp8.zero.frozen.selection import store_frozen

            store_frozen(module, frozen, self._trains, self.session.on_model)
        self._attach(module)

    def mark_persistent_parameters(self, param_threshold: int, model_threshold: int) -> list[nn.Parameter]:
        """DeepSpeed's choice without stored parameters, because persistent ones would be kept in 16 bits."""
        chosen = super().mark_persistent_parameters(param_threshold, model_threshold)
        for param in chosen:
            param.ds_persist = not sharded.stored_as_codes(param)
        return [param for param in chosen if sharded.stays(param)]

    def get_param_coordinator(self, *args, **kwargs) -> UnitCoordinator:
        """The coordinator; DeepSpeed's hooks ask for it each time."""
        return self.param_coordinator

    def partition_all_parameters(self) -> None:
        """Release all before a step, without DeepSpeed's walk over the model; the coordinator checks the result.

        Parameters that a later engine over the model has gathered are released too: the step writes its weights.
        """
        for engine in (self, *self._later):
            engine.param_coordinator.release_and_reset_all(engine.module)
            for routing in engine._routings.values():
                routing.forget()

    # -- the ledger's kind of a gather's bytes: the hooks know which pass it is --------------------------------------

    def _kind(self, forward: bool) -> str:
        if self._evaluating:
            return OUTSIDE
        recomputing = torch._C._current_graph_task_id() != -1  # activation checkpointing, inside backward
        return "weights_forward" if forward and not recomputing else "weights_backward"

    # -- the hooks: DeepSpeed's own do the same with tracing, memory reports and profiling ranges around it, which cost
    # -- more than the work itself once there is one unit per block --------------------------------------------------

    def pre_sub_module_forward_function(self, sub_module) -> None:
        if sub_module is self.module:
            self._leave_unfinished()
        if self.gatherer.module_depth == 0 and torch._C._current_graph_task_id() == -1:
            self._check_usable()
            self._evaluating = not torch.is_grad_enabled()
            if sub_module is not self.module:  # DeepSpeed's own hook tells the coordinator about self.module
                self.param_coordinator.submodule_called(sub_module)
        parameter_offload.FWD_MODULE_STACK.append(sub_module)
        with _OrdinaryTensors(), self.session.ledger.counting(self._kind(forward=True)):
            # Such a run saves parameters too. They stay until the backward that needs them is over.
            self.param_coordinator.fetch_sub_module(sub_module, forward=not _only_saves())
        self.gatherer.module_depth += 1
        self.inputs = _CallTensors()

    def _routing_is_known(self, place: nn.Module, args: tuple, kwargs: dict) -> None:
        comes_back = torch.is_grad_enabled() and not _only_saves()
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]  # in all of transformers' mixtures
        with _OrdinaryTensors(), self.session.ledger.counting(self._kind(forward=True)):
            self._routings[place].forward_begins(chosen, comes_back)

    def leave_forward(self) -> None:
        """An exception has ended a forward: its modules use their parameters no more."""
        self.gather_what_is_read(False)
        if torch._C._current_graph_task_id() == -1:
            for engine in (self, *self._later):
                engine._leave_unfinished()
                engine.param_coordinator.leave_all()

    def _leave_unfinished(self) -> None:
        """Forget modules whose forward an exception has ended, such as the early stop of checkpointing."""
        while self.gatherer.module_depth and torch._C._current_graph_task_id() == -1:
            parameter_offload.FWD_MODULE_STACK.pop()
            self.gatherer.module_depth -= 1

    def release_backward_leftovers(self) -> None:
        for engine in (self, *self._later):
            engine._leave_unfinished()
            engine.param_coordinator.release_backward_leftovers()

    def _check_usable(self) -> None:
        """Refuse parameters that must not be used, while no module is active yet.

        An error then leaves the engine unchanged. Units that are still gathered are checked here, as no gather follows.
        """
        try:
            for unit in self.gatherer.units:
                unit.storage.check_usable(unit.params)
        except RuntimeError:
            _gathers_what_is_read(self.module, False)  # DeepSpeedEngine.forward has set it: a read would gather
            raise

    def post_sub_module_forward_function(self, sub_module) -> None:
        self.gatherer.module_depth = max(0, self.gatherer.module_depth - 1)
        self.outputs = _CallTensors()
        stack = parameter_offload.FWD_MODULE_STACK  # its first entry is always the model
        if sub_module in stack[len(stack) - self.gatherer.module_depth :]:
            return  # it has called itself, and its outer call may go on
        with _OrdinaryTensors():
            self.param_coordinator.release_sub_module(sub_module, forward=True)

    def pre_sub_module_backward_function(self, sub_module, begins: bool = True) -> None:
        self._evaluating = False
        engines = self._over_the_model()
        for engine in engines:
            if engine.before_backward is not None:
                engine.before_backward(len(engines) == 1)
        with _OrdinaryTensors(), self.session.ledger.counting(self._kind(forward=False)):
            if sub_module in self._routings:
                self._routings[sub_module].backward_begins()
            self.param_coordinator.fetch_sub_module(sub_module, forward=False)
        if begins:
            self.param_coordinator.backward_begins(sub_module)

    def post_sub_module_backward_function(self, sub_module) -> None:
        if not self.param_coordinator.backward_ends(sub_module):
            return  # an inner call: the outer call's backward still needs the parameters
        # Autograd goes in reverse order, so all gradients of the module's own parameters are there by now, except for
        # those of other uses.
        with _OrdinaryTensors():
            for engine in self._over_the_model():
                if engine.after_backward_of is not None:
                    engine.after_backward_of(sub_module)
            self.param_coordinator.release_sub_module(sub_module, forward=False)
            if sub_module in self._routings:
                self._routings[sub_module].backward_ends()

    def _over_the_model(self) -> list[ZeroppOffload]:
        """This engine and earlier ones over (part of) the model: the backward may belong to any of them."""
        return [self, *self._earlier]

    def _leave_pass(self) -> None:
        """End a pass that an exception may have left unfinished."""
        self._leave_unfinished()
        _gathers_what_is_read(self.module, False)
        self.param_coordinator.release_and_reset_all(self.module)

    def destroy(self) -> None:
        """Remove the hooks, and detach the parameters: DeepSpeed's own gathers return. A second call does nothing."""
        self.check_is_last()
        self.destroyed = True
        self._on_model.close()
