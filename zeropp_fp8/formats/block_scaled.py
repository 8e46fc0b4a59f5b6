"""Block-scaled formats: consecutive elements share one scale.

value = scale * element(code). Payload of one row of n elements, with B = block_size and nb = ceil(n / B):

    [ nb scales | zeros up to a multiple of 16 | codes, ceil(n * bits / 8) bytes | zeros up to a multiple of 16 ]

A scale is a bf16 number or for NF4 an fp32 number (scales.py), or in the MX formats (mx.py) a power of two in one byte.
double_quantized.py has what is written in its place when scales are quantized themselves. Codes start at a multiple of
16 bytes so that kernels can store and load 16 of them at once.

With the Hadamard rotation n is first padded with zeros to a multiple of 32, because all 32 rotated values are needed
to get any of them back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zeropp_fp8.formats.base import KernelSpec, WireFormat, align_up, check_encodable
from zeropp_fp8.formats.chunks import Scratch, pieces
from zeropp_fp8.formats.hadamard import HADAMARD_GROUP, rotate_, rotate_back_
from zeropp_fp8.formats.packing import group_of
from zeropp_fp8.formats.scales import Bf16Scale, BlockScale


class Element(Protocol):
    """The numbers inside a block, as a block-scaled format needs them."""

    bits: int
    largest: float
    keeps_infinity: bool  # whether decoding leaves Inf as it is; otherwise it becomes the largest finite number

    def quantize_(self, scaled: Tensor, codes: Tensor, scratch: Scratch) -> None: ...

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None: ...


class BlockScaledFormat(WireFormat):
    """Elements of one kind with a scale per block, rounded to nearest, ties to the even code.

    NaN and Inf: but for MX formats a block that holds one decodes to NaN throughout. Finite values never overflow: the
    scale is rounded up, and a decoded value is clamped to the finite range of the target dtype.

    Args:
        name: the format's public name.
        element: the kind of number inside a block.
        block_size: elements a scale is shared by; None for one scale per row (per tensor).
        hadamard: rotate groups of 32 before quantizing (block_size must then be a multiple of 32).
        scale: how blocks are scaled; None: by a bf16 number.

    Raises:
        ValueError: a block size that does not exist.
        TypeError: a block size that is no int.
    """

    def __init__(
        self,
        name: str,
        element: Element,
        block_size: int | None = 128,
        hadamard: bool = False,
        scale: BlockScale | None = None,
    ) -> None:
        self.name, self.element, self.block_size, self.hadamard = name, element, block_size, hadamard
        self.scale = scale or Bf16Scale(element.largest)
        self._packed = group_of(element.bits)[0]  # codes that fill whole bytes
        if block_size is None:
            return
        if type(block_size) is not int:
            raise TypeError(f"{name}: block_size must be an int or None, got {block_size!r}")
        if block_size < 1 or block_size % self._packed:
            raise ValueError(f"{name}: block_size must be a positive multiple of {self._packed}")
        if hadamard and block_size % HADAMARD_GROUP:
            raise ValueError(f"{name}: block_size must be a multiple of {HADAMARD_GROUP} with hadamard")

    def __repr__(self) -> str:
        extras = ", hadamard" if self.hadamard else ""
        return f"{self.name} (block {self.block_size or 'whole tensor'}{extras})"

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "block_size": self.block_size, "hadamard": self.hadamard}

    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            self.name, self.element.bits, self.block_size, self.hadamard, self.element.largest, self.scale.name
        )

    @property
    def bits_per_element(self) -> float:
        return self.element.bits + (8 * self.scale.num_bytes / self.block_size if self.block_size else 0.0)

    @property
    def granule(self) -> int:
        # A block size is a multiple of what packing and rotation need.
        if self.block_size is None:
            raise ValueError(f"{self.name}: one scale for the whole tensor; its parts would have other ones")
        return self.block_size

    def granule_runs(self, numel: int) -> list[tuple[int, int]]:
        granules = numel // self.granule
        return [
            (0, self.scale_bytes(numel) // granules),
            (self._codes_start(numel), self.code_bytes(numel) // granules),
        ]

    def code_count(self, numel: int) -> int:
        """How many codes a row carries: its elements, padded to what the rotation and the packing need."""
        multiple = HADAMARD_GROUP if self.hadamard else self._packed
        return -(-numel // multiple) * multiple

    def code_bytes(self, numel: int) -> int:
        """Bytes of a row's codes, padding not counted."""
        return self.code_count(numel) * self.element.bits // 8

    def blocks(self, numel: int) -> tuple[int, int]:
        """(number of blocks, block size) of a row."""
        block_size = self.block_size or self.code_count(numel)
        return math.ceil(numel / block_size), block_size

    def payload_bytes(self, numel: int) -> int:
        if numel == 0:
            return 0
        return align_up(self._codes_start(numel) + self.code_bytes(numel))

    def scale_bytes(self, numel: int) -> int:
        """Bytes of a row's scales, padding after them not counted."""
        return self.blocks(numel)[0] * self.scale.num_bytes

    def _codes_start(self, numel: int) -> int:
        return align_up(self.scale_bytes(numel))

    def _places(self, numel: int) -> tuple[slice, slice]:
        """Which bytes of a row's payload are (scales, codes)."""
        start = self._codes_start(numel)
        return slice(0, self.scale_bytes(numel)), slice(start, start + self.code_bytes(numel))

    def _codes_of(self, codes: Tensor, row: slice, block: slice, numel: int) -> Tensor:
        """The bytes of some blocks in `codes` [rows, code bytes]; the last block's may be fewer than its size says."""
        block_bytes = self.blocks(numel)[1] * self.element.bits // 8
        return codes[row, block.start * block_bytes : block.stop * block_bytes]

    @torch.no_grad()
    def encode_rows(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        check_encodable(matrix, self.name)
        rows, numel = matrix.shape
        payload = out
        if payload is None:
            payload = torch.empty(rows, self.payload_bytes(numel), dtype=torch.uint8, device=matrix.device)
        if numel == 0 or rows == 0:
            return payload
        scales, codes = self._places(numel)
        payload[:, scales.stop : codes.start] = 0
        payload[:, codes.stop :] = 0
        self.encode_into(matrix, payload[:, scales], payload[:, codes])
        return payload

    def encode_into(self, matrix: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write the scales and codes of `matrix` [rows, n] to uint8 [rows, scale bytes] and [rows, code bytes]."""
        size = self.scale.num_bytes

        def scale_(blocks: Tensor, row: slice, block: slice, scratch: Scratch) -> None:
            self.scale.scale_(blocks, scales[row, block.start * size : block.stop * size], scratch)

        self._encode_codes(matrix, codes, scale_)

    def _encode_codes(
        self, matrix: Tensor, codes: Tensor, scale_: Callable[[Tensor, slice, slice, Scratch], None]
    ) -> None:
        """Write the codes of `matrix` [rows, n] to uint8 [rows, code bytes].

        `scale_` divides fp32 [rows, blocks, block size], the blocks of a row slice and a block slice, by their scales.
        """
        rows, numel = matrix.shape
        num_blocks, block_size = self.blocks(numel)
        scratch = Scratch(matrix.device)
        for row, block in pieces(rows, num_blocks, block_size, matrix.device):
            blocks = padded_blocks(matrix[row], block, block_size, scratch)
            some_codes = self._codes_of(codes, row, block, numel)
            if self.hadamard:
                rotate_(blocks, scratch)
            scale_(blocks, row, block, scratch)
            scaled = blocks.view(blocks.shape[0], -1)[:, : some_codes.shape[1] * 8 // self.element.bits]
            self.element.quantize_(scaled, some_codes, scratch)

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """(fp32 scales [rows, blocks], uint8 codes [rows, code bytes]) of a payload."""
        scales, codes = self._places(numel)
        return self._decode_scales(payload[:, scales], numel), payload[:, codes]

    def _decode_scales(self, scale_bytes: Tensor, numel: int) -> Tensor:
        """fp32 [rows, blocks] of uint8 [rows, scale bytes]."""
        return self.scale.decode(scale_bytes)

    def _decode_blocks(
        self,
        scales: Tensor,
        codes: Tensor,
        block_size: int,
        limit: float | None,
        rotated: bool,
        scratch: Scratch,
        name: str = "values",
    ) -> Tensor:
        """fp32 [rows, blocks, block size] in a buffer of `scratch`: codes (rotated back if asked for) times scales.

        Args:
            scales: fp32 [rows, blocks].
            codes: uint8 [rows, code bytes], perhaps fewer than the last block has elements.
            limit: clamp to +-limit; None: not at all.
        """
        values = scratch(name, (*scales.shape, block_size))
        flat = values.view(scales.shape[0], -1)
        count = codes.shape[1] * 8 // self.element.bits
        self.element.dequantize(codes, flat[:, :count], scratch)
        if count < flat.shape[1]:
            flat[:, count:] = 0
        if rotated:
            # Before scaling: sums of codes cannot overflow, sums of values near the largest fp32 number could.
            rotate_back_(values, scratch)
        return self._times_scales(values, scales, limit)

    def _times_scales(self, values: Tensor, scales: Tensor, limit: float | None) -> Tensor:
        """fp32 `values` [rows, blocks, block size], overwritten, times their blocks' scales, within +-limit."""
        scales = scales.unsqueeze(-1)
        if limit is None:
            return values.mul_(scales)
        if not self.element.keeps_infinity:
            return values.mul_(scales).clamp_(-limit, limit)
        # A product that overflows is clamped; an element that is Inf stays Inf, or becomes NaN by its scale.
        infinite = torch.isinf(values)
        values *= scales
        return torch.where(infinite, values, values.clamp(-limit, limit))

    @torch.no_grad()
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        rows = payload.shape[0]
        # Not torch.empty, which under deepspeed.zero.Init gives 16 bits where fp32 is asked for.
        decoded = payload.new_empty(rows, numel, dtype=dtype) if out is None else out
        if numel == 0 or rows == 0:
            return decoded
        scales, codes = self._parts(payload, numel)
        num_blocks, block_size = self.blocks(numel)
        limit = torch.finfo(decoded.dtype).max
        scratch = Scratch(codes.device)
        for row, block in pieces(rows, num_blocks, block_size, codes.device):
            some_codes = self._codes_of(codes, row, block, numel)
            values = self._decode_blocks(scales[row, block], some_codes, block_size, limit, self.hadamard, scratch)
            copy_blocks(values, decoded[row], block)
        return decoded

    @torch.no_grad()
    def mean_of_rows(self, payloads: Sequence[Tensor], numel: int) -> Tensor:
        rows, device = payloads[0].shape[0], payloads[0].device
        mean = torch.empty(rows, numel, dtype=torch.float32, device=device)
        if numel == 0 or rows == 0:
            return mean
        num_blocks, block_size = self.blocks(numel)
        parts = [self._parts(payload, numel) for payload in payloads]
        scratch = Scratch(mean.device)
        for row, block in pieces(rows, num_blocks, block_size, mean.device):
            total = None
            for scales, codes in parts:
                some_codes = self._codes_of(codes, row, block, numel)
                name = "total" if total is None else "values"
                values = self._decode_blocks(scales[row, block], some_codes, block_size, None, False, scratch, name)
                total = values if total is None else total.add_(values)
            total *= 1.0 / len(payloads)
            if self.hadamard:
                # The rotation is linear: the sum is rotated back once instead of each summand.
                rotate_back_(total, scratch)
            copy_blocks(total, mean[row], block)
        return mean


def padded_blocks(rows: Tensor, block: slice, block_size: int, scratch: Scratch) -> Tensor:
    """Some blocks of a matrix [rows, n] as fp32 [rows, blocks, block size], with zeros beyond its end."""
    part = rows[:, block.start * block_size : block.stop * block_size]
    blocks = scratch("values", (rows.shape[0], block.stop - block.start, block_size))
    flat = blocks.view(rows.shape[0], -1)
    flat[:, : part.shape[1]] = part
    if part.shape[1] < flat.shape[1]:
        flat[:, part.shape[1] :] = 0
    return blocks


def copy_blocks(blocks: Tensor, rows: Tensor, block: slice) -> None:
    """Write fp32 [rows, blocks, block size] to where they belong in a matrix [rows, n]; drop what is beyond its end."""
    block_size = blocks.shape[2]
    part = rows[:, block.start * block_size : block.stop * block_size]
    part.copy_(blocks.view(blocks.shape[0], -1)[:, : part.shape[1]])
