"""One quantity of all segments (the first moment, say) in one number format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.formats.e8m0 import NAN_SCALE, E8M0Scale, power_of_two
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_formats import TILE, StateFormats, check_scales, storage_of


class StateBuffer:
    """Codes of all segments in one flat tensor, with a scale per segment or per block where the format has scales.

    It starts as zeros.

    Args:
        segments: the layout.
        storage: a name of STORAGE_NAMES.
        scales: "tensor" (a segment has one scale) or "block".
        block_size: elements of a block.

    Attributes:
        storage: the number format (`Storage`).
        codes: [segments.padded_numel], fp32, bf16, fp16 or, for FP8, uint8.
        scales: uint8 E8M0 bytes, [segments] or [padded_numel / block_size]; None where the format has none.

    Raises:
        ValueError: an unknown name or block size.
    """

    def __init__(self, segments: Segments, storage: str, scales: str = "tensor", block_size: int = 128) -> None:
        self.segments = segments
        self.storage = storage_of(storage)
        check_scales(scales, block_size)
        self.per_block = scales == "block"
        self.block_size = block_size
        device = segments.device
        self.codes = torch.zeros(segments.padded_numel, dtype=self.storage.dtype, device=device)
        units = segments.padded_numel // block_size if self.per_block else len(segments)
        self.scales = torch.zeros(units, dtype=torch.uint8, device=device) if self.storage.scaled else None
        self._tiles: dict[tuple, Tensor] = {}

    def units(self, segment: int) -> slice:
        """Where the scales of a segment lie: one, or one for each block that is not padding alone."""
        if not self.per_block:
            return slice(segment, segment + 1)
        first = self.segments.starts[segment] // self.block_size
        return slice(first, first + -(-self.segments.numels[segment] // self.block_size))

    def decode(self, segment: int) -> Tensor:
        """fp32 [numel], a copy."""
        numel = self.segments.numels[segment]
        if self.scales is None:
            return self.segments.view(self.codes, segment).to(torch.float32, copy=True)
        numbers = self.storage.numbers_of(self._rows(segment))
        factors = self.factors(self.units(segment)).unsqueeze(-1)
        return (numbers * factors).view(-1)[:numel]

    def decode_range(self, first: int, last: int) -> Tensor:
        """fp32 of all blocks from element `first` to `last`, multiples of TILE; undefined in padding."""
        rows = self.codes[first:last].view(-1, self.block_size)
        factors = self.factors(slice(first // self.block_size, last // self.block_size))
        return (self.storage.numbers_of(rows) * factors.unsqueeze(-1)).view(-1)

    def factors(self, units: slice = slice(None)) -> Tensor:
        """fp32: what codes with these scales are multiplied with."""
        return _ANY_SCALE.decode(self.scales[units])

    def encode_(self, segment: int, values: Tensor) -> None:
        """Replace a segment's numbers by fp32 `values` [numel], rounded to nearest."""
        numel = self.segments.numels[segment]
        if values.numel() != numel or values.dtype != torch.float32:
            raise ValueError(f"segment {segment} takes {numel} fp32 numbers, got {values.numel()} of {values.dtype}")
        if numel == 0:
            return
        values = values.detach().reshape(-1)
        if self.scales is None:
            self.segments.view(self.codes, segment).copy_(self.storage.codes_of(values))
            return
        rows = self._rows(segment)
        padding = rows.numel() - numel
        x = (F.pad(values, (0, padding)) if padding else values).view_as(rows)
        magnitudes = x.view(torch.int32) & 0x7FFFFFFF  # as integers NaN > Inf > every finite number
        scales = self.storage.scale_bytes(magnitudes.amax(dim=1))
        scaled = x * power_of_two((254 - scales).clamp_min_(0)).unsqueeze(-1)
        scaled.masked_fill_((scales == NAN_SCALE).unsqueeze(-1), 0.0)
        rows.copy_(self.storage.codes_of(scaled))
        self.scales[self.units(segment)] = scales.to(torch.uint8)

    def encode_several_(self, segments: Sequence[int], values: Tensor, in_place: bool = False) -> None:
        """Replace the numbers of some segments, rounded to nearest; on a GPU FP8 codes with blocks in one launch.

        Args:
            segments: of one buffer like this one, in ascending order.
            values: flat fp32, bf16 or fp16: these segments one after the other, each padded to a multiple of TILE; or
                (`in_place`) all segments, laid out as they are here.
        """
        if self.codes.is_cuda and self.per_block and self.storage.is_float8:
            from zeropp_fp8.kernels.optimizer.encode_blocks import encode_blocks

            tiles = self._tiles_of(tuple(segments), in_place)
            encode_blocks(values, self.codes, self.scales, tiles, self.storage.name, self.block_size)
            return
        start = 0
        for segment in segments:
            first = self.segments.starts[segment] if in_place else start
            self.encode_(segment, values[first : first + self.segments.numels[segment]].float())
            start += self.segments.padded(segment)

    def square_sum(self, segments: Sequence[int]) -> Tensor:
        """fp64 []: the sum of squares of some segments' FP8 numbers with blocks; NaN where one is not finite."""
        if self.codes.is_cuda:
            from zeropp_fp8.kernels.optimizer.squares import squares_of_tiles

            blocks = squares_of_tiles(self.codes, self.storage.name, self.block_size)
        else:
            blocks = self.storage.numbers_of(self.codes).view(-1, self.block_size).square_().sum(dim=1)
        squares = blocks.double() * self.factors().double().square()
        squares = squares.view(-1, TILE // self.block_size)
        if len(segments) < len(self.segments):
            squares = squares[self._tiles_of(tuple(segments), True)[:, 1]]
        return squares.sum()

    def decode_all(self) -> list[Tensor]:
        """fp32 [numel] of every segment."""
        return [self.decode(segment) for segment in range(len(self.segments))]

    def encode_all_(self, values: Tensor | Sequence[Tensor]) -> None:
        """Replace all numbers, from a list of tensors or from a flat fp32 tensor laid out by the segments."""
        for segment in range(len(self.segments)):
            one = self.segments.view(values, segment) if isinstance(values, Tensor) else values[segment]
            self.encode_(segment, one.detach().reshape(-1).to(torch.float32))

    def num_bytes(self) -> int:
        """The bytes of codes and scales, padding included."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales) if t is not None)

    def _tiles_of(self, segments: tuple[int, ...], in_place: bool) -> Tensor:
        """int64 [tiles, 3] of some segments: a tile's number in `encode_several_`'s values, here, and its elements."""
        key = segments, in_place
        if key not in self._tiles:
            rows: list[tuple[int, int, int]] = []
            for segment in segments:
                first, numel = self.segments.starts[segment] // TILE, self.segments.numels[segment]
                rows += [(first + k, first + k, min(TILE, numel - k * TILE)) for k in range(-(-numel // TILE))]
            if not in_place:
                rows = [(source, tile, left) for source, (_, tile, left) in enumerate(rows)]
            self._tiles[key] = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3).to(self.codes.device)
        return self._tiles[key]

    def _rows(self, segment: int) -> Tensor:
        """The codes of a segment, a row for each scale. Blocks are whole: the last one ends in padding."""
        if not self.per_block:
            return self.segments.view(self.codes, segment).view(1, -1)
        units = self.units(segment)
        return self.codes.view(-1, self.block_size)[units]


_ANY_SCALE = E8M0Scale(448.0, "rceil", spoiled_by_special=True)  # decoding does not depend on the element


def make_state_buffers(
    segments: Segments, formats: StateFormats, states: Iterable[str] = ("exp_avg", "exp_avg_sq")
) -> tuple[StateBuffer, ...]:
    """(master, *states), all zero; `states`: the moments whose formats store them."""
    names = (getattr(formats, name) for name in ("master", *states))
    return tuple(StateBuffer(segments, name, formats.scales, formats.block_size) for name in names)
