"""A stage's gradients, states and layout as DeepSpeed stores them: in its partitions, in fp32, in equal slices.

The configuration may replace these objects by others with the same methods: StoredGradients and StatesAtRest
(states/), OwnerLayout (owners/). A method with the name of a DeepSpeed method answers that method of the stage; all
other methods stay DeepSpeed's own (stage3.py has the list). `stays` says why DeepSpeed's offload_states cannot move the
tensors of such an object; None: it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from deepspeed import comm as ds_comm
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded

GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Partitions:
    """Reduced gradients in 16 or 32 bits, in DeepSpeed's buffer, until the step."""

    stays = None

    def __init__(self, stage) -> None:
        self.stage = stage

    def order_is_known(self, params: list[Parameter]) -> None:
        """The order in which quantized gradients of `params` are reduced is known."""

    def destinations(
        self, params: list[Parameter], again: bool, headroom: float
    ) -> tuple[Sequence[Tensor], Callable[[], None] | None]:
        """(tensors for this rank's parts of a unit's mean gradients, a function to call once they are written).

        Args:
            again: the gradients are added to those that are there.
            headroom: the factor by which FP8 codes will be larger than with the shared scales alone.
        """
        partitions, own_numel, places = getattr(self.stage, GRAD_PARTITIONS), self.stage.session.own_numel, []
        for param in params:
            partition, numel = partitions[sharded.key(param)], own_numel(param)
            places.append(partition if partition.numel() == numel else partition.narrow(0, 0, numel))
        return places, None

    def take(self, params: list[Parameter], parts: list[Tensor], again: bool) -> list[Tensor]:
        """Write or add these parts; returns their new places. The parameters' gradients are not needed any more."""
        with replaced(self.stage, "micro_step_id", int(again)):  # DeepSpeed adds from 1 on
            return self.stage.stock.partition_grads(params, parts)

    def write(self, param: Parameter, values: Tensor) -> None:
        """Replace this rank's part of a gradient by `values` [elements of the part]."""
        partition, _ = self.stage.stock._get_fp32_grad_state_partition(param, False)
        partition.data.view(-1)[: values.numel()].copy_(values)

    def drop(self, param: Parameter) -> None:
        """Set a gradient to zero."""
        getattr(self.stage, GRAD_PARTITIONS)[sharded.key(param)].zero_()

    def of(self, group) -> list[Tensor]:
        """The gradients of a StateGroup in the form that an update takes."""
        return self.destinations(group.params, again=False, headroom=1.0)[0]

    def flat(self, sub_group_id: int) -> Tensor:
        """All gradients of a sub-group as one tensor, for a torch optimizer.

        DeepSpeed records the reading stream for each partition, and looks the stream up in Python each time.
        Partitions are views of few buffers, so this records the stream once per buffer.
        """
        partitions = self.stage.averaged_gradients[sub_group_id]
        for partition in {p.untyped_storage().data_ptr(): p for p in partitions if p.is_cuda}.values():
            partition.record_stream(torch.cuda.current_stream(partition.device))
        return self.stage.flatten(partitions)

    def has_overflow(self, partition_gradients: bool) -> bool:
        return self.stage.stock.has_overflow(partition_gradients)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        return self.stage.stock.get_fp32_grad_partitions()

    def norms(self) -> list[Tensor]:
        """The 2-norm of each sub-group over all ranks, -1 where it is not finite."""
        return self.stage.stock._get_norm_groups()

    def get_grad_norm_direct(self, gradients, params, norm_type=2):
        """The global 2-norm in one multi-tensor pass and one all-reduce; DeepSpeed takes one pass per parameter.

        It is computed in fp64, as in DeepSpeed: squares of numbers above 1.8e19 overflow fp32, those of 1e-23 vanish in
        it. Unquantized gradients take DeepSpeed's passes, because `lossless` promises its bits, and a multi-tensor pass
        adds in another order.
        """
        stage, session = self.stage, self.stage.session
        plain = float(norm_type) == 2.0 and stage.model_parallel_group is None and gradients
        if not plain:
            return stage.stock.get_grad_norm_direct(gradients, params, norm_type)
        if not session.config.quantizes_gradients:
            each = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
            return norm_of_squares(torch.stack(each).square().sum(), session)
        own = [g for g in gradients if g.numel()]
        total = torch.zeros((), dtype=torch.float64, device=session.device)
        if own:  # a rank may own nothing
            total = torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).square().sum()
        return norm_of_squares(total, session)

    def free(self) -> None:
        """The engine has ended."""


class FP32States:
    """Master weights and moments as DeepSpeed and the given optimizer store them."""

    stays = None

    def __init__(self, stage, optimizer: torch.optim.Optimizer) -> None:
        self.stage, session = stage, stage.session
        self._may_fuse = session.config.quantizes
        if self._may_fuse and _use_fused_update(optimizer) and session.topology.rank == 0:
            print("zeropp_fp8: the optimizer leaves the choice to torch: its fused update is used", flush=True)

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        flat = self.stage.fp32_partitioned_groups_flat[sub_group_id]
        flat.grad = self.stage.gradients.flat(sub_group_id).to(flat.dtype)
        self.stage.averaged_gradients[sub_group_id] = None

    def write(self, param: Parameter, values: Tensor, key: str | None) -> None:
        """Replace this rank's part of a master weight (None) or of a state with this name."""
        partition, _ = self.stage.stock._get_fp32_opt_state_partition(param, False, key)
        partition.data[: values.numel()].copy_(values)

    def expanded(self, takes_back: bool, with_states: bool = True) -> nullcontext:
        """While it lasts, DeepSpeed's lists hold fp32 states.

        Args:
            takes_back: changes to the fp32 states are stored afterwards.
            with_states: the optimizer's states are expanded too, not only master weights.
        """
        return nullcontext()

    def take_weights(self) -> None:
        """Copy the model's weights to master weights, because only the former were loaded."""
        self.stage.stock._restore_from_bit16_weights()

    def loaded(self) -> None:
        """The optimizer has loaded its states from a checkpoint."""
        if self._may_fuse:
            _use_fused_update(self.stage.optimizer, self.stage.fp32_partitioned_groups_flat)

    def free(self) -> None:
        """The engine has ended."""


def _use_fused_update(optimizer: torch.optim.Optimizer, updated: Sequence[Tensor] | None = None) -> bool:
    """Select `fused` in every group of a torch Adam or AdamW on a GPU that asks for neither fused nor foreach.

    By default torch picks the foreach variant, which passes over a flat partition a dozen times: about 90 bytes per
    element against 28 for the fused kernel, 7 ms against 2 for 330M elements on an H200.

    `updated`: tensors that the optimizer updates; None: the groups' parameters. ZeRO-3 empties groups between steps.
    Returns whether a group was changed.
    """
    changed = False
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return changed
    for group in optimizer.param_groups:
        chosen = any(group.get(name) is not None for name in ("fused", "foreach"))
        params = group["params"] if updated is None else updated
        on_gpu = len(params) > 0 and all(p.is_cuda and p.is_floating_point() for p in params)
        if chosen or group.get("capturable") or group.get("differentiable") or not on_gpu:
            continue
        group["fused"] = changed = True
    for param, state in optimizer.state.items():
        # The fused kernel counts steps on the device.
        if isinstance(param, torch.Tensor) and param.is_cuda and torch.is_tensor(state.get("step")):
            state["step"] = state["step"].to(param.device)
    return changed


class SliceLayout:
    """Each rank has DeepSpeed's equal slices of parameters, as in its checkpoints."""

    stays = None

    def __init__(self, stage) -> None:
        self.stage = stage

    def to_slices(self, state_dict: dict) -> dict:
        """Convert a rigid state dict to the form of DeepSpeed's checkpoints."""
        return state_dict

    def to_parts(self, state_dict: dict) -> dict:
        """The inverse of `to_slices`."""
        return state_dict


def norm_of_squares(squares: Tensor, session, model_parallel: Callable[[Tensor], None] | None = None) -> Tensor:
    """Square roots of sums over all ranks; -1, as in DeepSpeed, where one is not finite.

    `model_parallel`: sums over another group too.
    """
    ds_comm.all_reduce(squares, op=ds_comm.ReduceOp.SUM, group=session.topology.group)
    if model_parallel is not None:
        model_parallel(squares)
    norms = squares.sqrt()
    return torch.where(norms.isfinite(), norms, torch.full_like(norms, -1.0))


def reduce_scatter(own: Tensor, message: Tensor, group) -> None:
    """Sum a flat tensor over the ranks of a group; `own`, which may be a part of it, becomes this rank's part."""
    ds_comm.reduce_scatter_fn(own, message, group=group)


class Freed:
    """Replaces an object that an engine has freed; any access raises an error."""

    def __getattr__(self, name: str):
        raise RuntimeError(
            "zeropp_fp8: engine.destroy() has freed the gradients and optimizer states that were in low precision, and "
            "the residuals of error feedback; look at them, and save checkpoints, before it"
        )


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """While it lasts, an attribute of an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
