"""A stage's gradients, states and layout as DeepSpeed stores them: in its partitions, in fp32, in equal slices.

The configuration may replace these objects by others with the same methods: StoredGradients and StoredStates
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
from zeropp_fp8.zero.chunks import may_be_cut, step_by_chunks

GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class Partitions:
    """Reduced gradients in 16 or 32 bits, in DeepSpeed's partitions, until the step.

    DeepSpeed keeps a buffer for all of them. Here a unit's are made when its first gradient comes, and dropped after
    the step: where the activations of a forward take most memory, there are no gradients yet. Offloaded ones stay
    DeepSpeed's.
    """

    stays = None

    def __init__(self, stage) -> None:
        self.stage = stage
        self._are_dropped = False

    def _setup_for_real_optimizer(self) -> None:
        stage = self.stage
        if stage.offload_optimizer:
            stage.stock._setup_for_real_optimizer()
            return
        set_up_without_buffer(stage)
        params = {sharded.key(param): param for group in stage.fp16_groups for param in group}
        setattr(stage, GRAD_PARTITIONS, _MadeWhenAsked(lambda key: self._make([params[key]], are_zeros=True)))

    def _make(self, params: list[Parameter], are_zeros: bool) -> None:
        """Make the partitions that are not there, in the memory of the main stream, whose activations leave it."""
        stage, partitions = self.stage, getattr(self.stage, GRAD_PARTITIONS)
        dtype, device = stage.gradient_accumulation_dtype, stage.session.device
        new = [param for param in params if sharded.key(param) not in partitions]
        if not new:
            return
        numels = list(map(sharded.shard_numel, new))
        make = torch.zeros if are_zeros else torch.empty
        if device.type == "cuda":
            main, here = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
            with torch.cuda.stream(main):
                flat = make(sum(numels), dtype=dtype, device=device)
            if here != main:
                here.wait_stream(main)
        else:
            flat = make(sum(numels), dtype=dtype, device=device)
        partitions.update(zip(map(sharded.key, new), flat.split(numels)))
        self._are_dropped = False

    def _get_fp32_grad_state_partition(self, param: Parameter, release_swap_buffers: bool) -> tuple[Tensor, int]:
        if self._are_dropped:
            raise RuntimeError("zeropp_fp8: a step drops the gradients: look at them between backward and step")
        return self.stage.stock._get_fp32_grad_state_partition(param, release_swap_buffers)

    def forget(self) -> None:
        """The step has used the gradients, or they are not wanted: there are none until the next ones come."""
        if self.stage.offload_optimizer:
            return
        partitions = getattr(self.stage, GRAD_PARTITIONS)
        for partition in {p.untyped_storage().data_ptr(): p for p in partitions.values() if p.is_cuda}.values():
            partition.record_stream(torch.cuda.current_stream(partition.device))
        partitions.clear()
        self._are_dropped = True

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
        numels = list(map(self.stage.session.own_numel, params))
        padded = numels != list(map(sharded.shard_numel, params))
        self._make(params, are_zeros=again or padded)  # nobody writes the padding
        partitions = getattr(self.stage, GRAD_PARTITIONS)
        places = [partitions[sharded.key(param)] for param in params]
        return [place[:numel] for place, numel in zip(places, numels)] if padded else places, None

    def take(self, params: list[Parameter], parts: list[Tensor], again: bool) -> list[Tensor]:
        """Write or add these parts; returns their new places. The parameters' gradients are not needed any more."""
        self._make(params, are_zeros=True)
        with replaced(self.stage, "micro_step_id", int(again)):  # DeepSpeed adds from 1 on
            return self.stage.stock.partition_grads(params, parts)

    def write(self, param: Parameter, values: Tensor) -> None:
        """Replace this rank's part of a gradient by `values` [elements of the part]."""
        partition, _ = self._get_fp32_grad_state_partition(param, False)
        partition.data.view(-1)[: values.numel()].copy_(values)

    def drop(self, param: Parameter) -> None:
        """Set a gradient to zero."""
        partitions = getattr(self.stage, GRAD_PARTITIONS)
        if sharded.key(param) in partitions:
            partitions[sharded.key(param)].zero_()

    def of(self, group) -> list[Tensor]:
        """The gradients of a StateGroup in the form that an update takes."""
        return self.destinations(group.params, again=True, headroom=1.0)[0]

    def copy_range(self, sub_group_id: int, start: int, out: Tensor) -> None:
        """Write a sub-group's gradients, for a torch optimizer, from its element `start` on to flat `out`."""
        partitions = self.stage.averaged_gradients[sub_group_id]
        within = self.stage.ranges[sub_group_id].within(start, start + out.numel())
        pieces = [partitions[index][first:last] for index, first, last, _ in within]
        if pieces:
            torch._foreach_copy_(out.split([piece.numel() for piece in pieces]), pieces)

    def has_overflow(self, partition_gradients: bool) -> bool:
        if self.stage.offload_optimizer or not partition_gradients:
            return self.stage.stock.has_overflow(partition_gradients)
        own = [partition for partition in getattr(self.stage, GRAD_PARTITIONS).values() if partition.numel()]
        none = torch.zeros(1, dtype=torch.float32, device=self.stage.device)
        amax = torch.stack(torch._foreach_norm(own, torch.inf)) if own else none
        return on_any_rank(self.stage, amax.isfinite().all().logical_not_())

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
        plain = plain and sharded.experts_group(params[0]) is None
        if not plain:
            return stage.stock.get_grad_norm_direct(gradients, params, norm_type)
        if not session.config.reduces_gradients:
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

    def _by_chunks(self) -> bool:
        """Whether fp32 gradients are made and used chunk by chunk; offloaded ones are there already."""
        stage = self.stage
        scales = getattr(stage, "torch_autocast_gradscaler", None)  # looks at gradients in each step
        return not stage.offload_optimizer and scales is None and may_be_cut(stage.optimizer)

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        if not self._by_chunks():
            flat = self.stage.fp32_partitioned_groups_flat[sub_group_id]
            flat.grad = torch.empty_like(flat, requires_grad=False)
            self.stage.gradients.copy_range(sub_group_id, 0, flat.grad)
            self.stage.averaged_gradients[sub_group_id] = None

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        if self._by_chunks():
            self._total_norm = total_norm
        else:
            self.stage.stock.unscale_and_clip_grads(sub_group_id, total_norm)

    def _optimizer_step(self, sub_group_id: int) -> None:
        stage, flats = self.stage, self.stage.fp32_partitioned_groups_flat
        if not self._by_chunks():
            stage.stock._optimizer_step(sub_group_id)
            return
        flat = flats[sub_group_id]

        def step(start: int, part: Tensor) -> None:
            flats[sub_group_id] = part  # DeepSpeed's methods take it for the whole
            stage.gradients.copy_range(sub_group_id, start, part.grad)
            stage.stock.unscale_and_clip_grads(sub_group_id, self._total_norm)
            stage.stock._optimizer_step(sub_group_id)

        try:
            step_by_chunks(stage.optimizer, flat, step)
        finally:
            flats[sub_group_id] = flat
        stage.averaged_gradients[sub_group_id] = None

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

    `updated`: its tensors; None: the groups', which ZeRO-3 empties between steps. Returns whether a group was changed.
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


class _MadeWhenAsked(dict):
    """Calls `make(key)`, which adds the entry, for a key that is not there."""

    def __init__(self, make: Callable[[int], None]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: int) -> Tensor:
        self._make(key)
        return self[key]

    def move(self, device: torch.device) -> None:
        self.update({key: tensor.to(device) for key, tensor in self.items()})


def set_up_without_buffer(stage) -> None:
    """DeepSpeed's set-up for an optimizer; its buffer for all gradients is empty in the end."""
    with replaced(stage, "gradient_accumulation_dtype", torch.uint8):  # let it be small until then
        stage.stock._setup_for_real_optimizer()
    stage.grad_partitions_flat_buffer = torch.empty(0, dtype=stage.gradient_accumulation_dtype, device=stage.device)


def on_any_rank(stage, flag: Tensor) -> bool:
    """Whether a boolean is true on a rank, of tensor parallelism too."""
    flag = flag.to(torch.uint8)
    ds_comm.all_reduce(flag, op=ds_comm.ReduceOp.MAX, group=stage.dp_process_group)
    stage._model_parallel_all_reduce(tensor=flag, op=ds_comm.ReduceOp.MAX)
    return bool(flag.item())


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
