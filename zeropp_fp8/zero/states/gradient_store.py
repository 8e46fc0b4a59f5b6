"""Reduced gradients in FP8 until the step: 1 byte per element, with the scales that all ranks share.

FP8-LM (arXiv 2310.18313), section 2.1. The last hop of a reduction writes codes at once, of sums over micro-batches
that have added up inside the node, too. Where each micro-batch is reduced to the end, this rank's part adds up in 16 or
32 bits here, and becomes FP8 when the step begins, scaled by its own amax: the shared one is for smaller sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats import SharedScaleFormat
from zeropp_fp8.formats.scale_table import SharedScales
from zeropp_fp8.optim import FP8Gradients
from zeropp_fp8.optim.state_formats import TILE
from zeropp_fp8.zero.reduce.gradient_scales import GradientScales
from zeropp_fp8.zero.stage_part import Row, StagePart
from zeropp_fp8.zero.states.groups import StateGroup


class GradientStore(StagePart):
    """This rank's parts of the mean gradients.

    Args:
        wire_format: what codes are; its element is that of the store.
        scales: the scales of all matrices.
        groups: the layout.
        dtype: of sums over micro-batches and of vectors.
    """

    def __init__(
        self, wire_format: SharedScaleFormat, scales: GradientScales, groups: Sequence[StateGroup], dtype: torch.dtype
    ) -> None:
        self.format, self.element = wire_format, wire_format.name
        self.scales = scales
        self._lay_out(groups, dtype)
        self._codes: dict = {id(g): _zeros(g, torch.uint8) for g in self.groups if g.matrices}  # [padded_numel]
        self._tables: dict[tuple, tuple] = {}  # by group and members: indices, and what the kernel needs

    def _lay_out(self, groups: Sequence[StateGroup], dtype: torch.dtype) -> None:
        self.groups = list(groups)
        self.dtype = dtype
        self.gives_up = f"gradients until the step ({self.element})"
        self._keeps_numbers = False
        self._shown: dict[int, Tensor] = {}
        self._place = {sharded.key(p): (g, k) for g in self.groups for k, p in enumerate(g.params)}
        # By id(group): `dtype` [padded_numel]; of matrices made when needed.
        self._sums = {id(g): _zeros(g, dtype) for g in self.groups if not g.matrices}
        self._summed: set[int] = set()  # sharded.key of matrices whose gradient is in a sum
        # By id(group): fp32 [params], gradient = code * this; from `close` until the next gradient comes.
        self._multipliers: dict[int, Tensor] = {}
        self._headroom: dict[int, float] = {}  # by sharded.key: how many times the shared scale's a code stands for
        self._headrooms: dict[tuple[float, ...], Tensor] = {}  # fp32, those of a group's parameters

    def show_in(self, partitions: dict[int, Tensor], params: Iterable[Parameter]) -> None:
        """Let DeepSpeed's partitions, by sharded.key, be the store's: it makes lists of them in every backward."""
        self._shown = partitions
        partitions.update((sharded.key(p), self.view(p)) for p in params)

    def rows(self) -> list[Row]:
        return [("stored gradients", self.element, 0, "vectors, and sums over micro-batches, in 16 or 32 bits")]

    def formats_changed(self) -> None:
        """Hold gradients of matrices in 16 or 32 bits too, from now on."""
        self._keeps_numbers = True
        self._sums = {id(g): _zeros(g, self.dtype) for g in self.groups}
        self._summed.clear()
        self._multipliers.clear()
        self._codes.clear()
        self.show_in(self._shown, [p for group in self.groups for p in group.params])

    def _in_codes(self, group: StateGroup) -> bool:
        """Whether a group's gradients become codes."""
        return group.matrices and not self._keeps_numbers

    def _view(self, buffers: dict[int, Tensor], param: Parameter) -> Tensor:
        group, segment = self._place[sharded.key(param)]
        if id(group) not in buffers:
            buffers[id(group)] = _zeros(group, self.dtype)
        return group.segments.view(buffers[id(group)], segment)

    def view(self, param: Parameter) -> Tensor:
        """Where the step will find this rank's part: FP8 codes (uint8) of a matrix, numbers of a vector."""
        return self._view(self._codes if self._in_codes(self._place[sharded.key(param)][0]) else self._sums, param)

    def destinations(
        self, params: Sequence[Parameter], last_micro_batch: bool, again: bool, headroom: float = 1.0
    ) -> list[Tensor]:
        """Where a reduction of a unit writes this rank's part of each, or (`again`) adds to.

        Args:
            params: those of a unit.
            last_micro_batch: the step follows this backward.
            again: a gradient is there already, of an earlier micro-batch or of this backward. All reductions must have
                arrived then.
            headroom: how many times larger than with the shared scale alone the numbers of new codes are.
        """
        return [self._destination(param, last_micro_batch, again, headroom) for param in params]

    def _destination(self, param: Parameter, last_micro_batch: bool, again: bool, headroom: float) -> Tensor:
        if not self._in_codes(self._place[sharded.key(param)][0]):
            return self._view(self._sums, param)
        if not again:
            self._multipliers.clear()
            self._summed.discard(sharded.key(param))
            if last_micro_batch:
                self._headroom[sharded.key(param)] = headroom
                return self._new_codes(param)
            self._summed.add(sharded.key(param))
        elif sharded.key(param) not in self._summed:
            self._view(self._sums, param).copy_(self.read(param))
            self._summed.add(sharded.key(param))
        return self._view(self._sums, param)

    def _new_codes(self, param: Parameter) -> Tensor:
        """Where a reduction writes what goes into the codes of a matrix."""
        return self._view(self._codes, param)

    def arrived(self, params: Sequence[Parameter]) -> None:
        """A reduction has written what `destinations` gave for these; called where it is issued. Codes need no more."""

    def _multipliers_of(self, group: StateGroup) -> Tensor:
        """fp32 [params] of a group of matrices: what their codes are multiplied with."""
        if id(group) in self._multipliers:
            return self._multipliers[id(group)]
        headrooms = tuple(self._headroom.get(sharded.key(p), 1.0) for p in group.params)
        if headrooms not in self._headrooms:
            self._headrooms[headrooms] = torch.tensor(headrooms, dtype=torch.float32, device=group.segments.device)
        return self.scales.decode_of(group.params) * self._headrooms[headrooms]

    @torch.no_grad()
    def read(self, param: Parameter) -> Tensor:
        """fp32 [this rank's elements], a copy."""
        group, segment = self._place[sharded.key(param)]
        if not self._in_codes(group) or sharded.key(param) in self._summed:
            return self._view(self._sums, param).to(torch.float32, copy=True)
        start = group.segments.starts[segment]
        return self._decoded(group, start, start + group.segments.padded(segment))[: group.segments.numels[segment]]

    @torch.no_grad()
    def write(self, param: Parameter, values: Tensor) -> None:
        """Replace this rank's part, [its elements]."""
        if self._in_codes(self._place[sharded.key(param)][0]):
            self._summed.add(sharded.key(param))
        self._view(self._sums, param).copy_(values)

    @torch.no_grad()
    def drop_sum(self, param: Parameter) -> None:
        """Let what several micro-batches have added up for a parameter be zeros."""
        if sharded.key(param) in self._summed or not self._in_codes(self._place[sharded.key(param)][0]):
            self._view(self._sums, param).zero_()

    @torch.no_grad()
    def close(self) -> None:
        """The step begins: what has added up becomes FP8, and every code keeps its scale until the next gradients."""
        for group in self.groups:
            if not self._in_codes(group):
                continue
            # A copy in any case: the shared scales move on with the step.
            multipliers = self._multipliers[id(group)] = self._multipliers_of(group)
            numels = group.segments.numels
            members = [k for k, p in enumerate(group.params) if sharded.key(p) in self._summed and numels[k]]
            if members:
                self._encode(group, members, multipliers)
        self._summed.clear()

    def _encode(self, group: StateGroup, members: list[int], multipliers: Tensor) -> None:
        segments, codes = group.segments, self._codes[id(group)]
        sums = [segments.view(self._sums[id(group)], k) for k in members]
        # Where it is not finite the step will be skipped; NaN and Inf become NaN whatever the scale.
        amax = torch.stack([n.float() for n in torch._foreach_norm(sums, torch.inf)]).nan_to_num(0.0, 0.0, 0.0)
        scales = self.format.scale_of_amax(amax)
        encode = torch.ones_like(scales) / scales
        index, table = self._table(group, members)
        multipliers[index] = scales
        if segments.device.type == "cuda":
            from zeropp_fp8 import kernels

            places = kernels.TensorTable(sums, table, segments.device)
            whole = torch.zeros(1, dtype=torch.int32, device=segments.device)
            uncounted = torch.zeros(3, 2, dtype=torch.int64, device=segments.device)
            shared = SharedScales(encode, scales, amax, uncounted)
            kernels.quantize(sums[0], places, table, whole, codes.view(1, -1), shared=shared)
            return
        for i, (k, values) in enumerate(zip(members, sums)):
            self.format.encode_scaled(values.view(1, -1), encode[i : i + 1], segments.view(codes, k).view(1, -1))

    def _table(self, group: StateGroup, members: list[int]) -> tuple[Tensor, object]:
        """(int64 indices, the kernel's SegmentTable; None on a CPU) of some matrices of a group."""
        key = (id(group), *members)
        if key not in self._tables:
            segments, table = group.segments, None
            if segments.device.type == "cuda":
                from zeropp_fp8 import kernels

                numels, starts = [segments.numels[k] for k in members], [segments.starts[k] for k in members]
                table = kernels.SegmentTable(self.format, numels, starts, segments.device)
            self._tables[key] = torch.tensor(members, device=segments.device), table
        return self._tables[key]

    # -- for the step, after `close` ---------------------------------------------------------------------------------

    def of(self, group: StateGroup) -> FP8Gradients | list[Tensor]:
        """A group's gradients as the optimizer takes them."""
        if self._in_codes(group):
            return FP8Gradients(group.segments, self._codes[id(group)], self.format.name, self._multipliers_of(group))
        return [group.segments.view(self._sums[id(group)], k) for k in range(len(group.params))]

    @torch.no_grad()
    def copy_ranges(self, ranges: Iterable[tuple[Parameter, int, Tensor]]) -> None:
        """Write numbers from an element of this rank's part on to a flat tensor, and zeros beyond the part's end.

        Each group decodes in one run all between the first and the last of its elements.
        """
        pieces: dict[int, tuple[StateGroup, list[tuple[int, Tensor]]]] = {}
        for param, first, out in ranges:
            group, segment = self._place[sharded.key(param)]
            own = max(0, min(out.numel(), group.segments.numels[segment] - first))
            if own < out.numel():
                out[own:].zero_()
            if own:
                place = group.segments.starts[segment] + first
                pieces.setdefault(id(group), (group, []))[1].append((place, out[:own]))
        for group, found in pieces.values():
            start, end = found[0][0] // TILE * TILE, found[-1][0] + found[-1][1].numel()
            stop = -(-end // TILE) * TILE
            numbers = self._decoded(group, start, stop) if self._in_codes(group) else self._sums[id(group)][start:stop]
            own_numbers = [numbers[place - start :][: out.numel()] for place, out in found]
            torch._foreach_copy_([out for _, out in found], own_numbers)

    def _decoded(self, group: StateGroup, start: int, stop: int) -> Tensor:
        """fp32 of a group's codes between two multiples of TILE, a copy; undefined in padding."""
        rows = self._codes[id(group)][start:stop].view(-1, TILE)
        tiles = group.segments.tile_segments[start // TILE : stop // TILE]
        numbers = self.format.decode_rows(rows, TILE, torch.float32)
        return numbers.mul_(self._multipliers_of(group)[tiles].unsqueeze(-1)).view(-1)

    @torch.no_grad()
    def square_sum(self, sub_group: int, counted: Callable[[Parameter], bool] | None = None) -> Tensor:
        """fp64 scalar: the sum of squares of this rank's gradients of a sub-group; not finite where one of them is.

        `counted`: which parameters count; None: all.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.groups[0].segments.device)
        for group in self.groups:
            if group.sub_group == sub_group:
                members = [k for k, p in enumerate(group.params) if counted is None or counted(p)]
                if self._in_codes(group):
                    total += self._codes_squared(group, members)
                else:
                    vectors = [group.segments.view(self._sums[id(group)], k) for k in members]
                    norms = torch._foreach_norm(vectors, 2, dtype=torch.float64) if vectors else []
                    total += sum((norm.square() for norm in norms), start=0.0)
        return total

    def _codes_squared(self, group: StateGroup, members: list[int]) -> Tensor:
        codes, factors = self._codes[id(group)], self._multipliers_of(group).double().square()
        if len(members) < len(group.params):
            index, _ = self._table(group, members)
            factors = torch.zeros_like(factors).index_copy_(0, index, factors[index])
        if codes.device.type == "cuda":
            from zeropp_fp8.kernels.optimizer.squares import squares_of_tiles

            partial = squares_of_tiles(codes, self.format.name, TILE)
        else:
            rows = codes.view(-1, TILE)
            partial = self.format.decode_rows(rows, TILE, torch.float32).square_().sum(dim=1)
        return (partial.double() * factors[group.segments.tile_segments]).sum()

    def num_bytes(self) -> int:
        """Bytes of codes, vectors and sums."""
        buffers = (*self._codes.values(), *self._sums.values())
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def _zeros(group: StateGroup, dtype: torch.dtype) -> Tensor:
    return torch.zeros(group.segments.padded_numel, dtype=dtype, device=group.segments.device)
