"""Block-scaled formats: consecutive elements share one bf16 scale.

value = scale * element(code). Payload of one row of n elements, with B = block_size and nb = ceil(n / B):

    [ nb scales, bf16 | zeros up to a multiple of 16 | codes, ceil(n * bits / 8) bytes | zeros up to a multiple of 16 ]

Codes start at a multiple of 16 bytes so that kernels can store and load 16 of them at once.

With the Hadamard rotation n is first padded with zeros to a multiple of 32, because all 32 rotated values are needed
to get any of them back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeropp_fp8.formats.base import WireFormat, align_up, check_encodable
from zeropp_fp8.formats.chunks import Scratch, pieces
from zeropp_fp8.formats.hadamard import HADAMARD_GROUP, rotate_, rotate_back_, rotate_integers_back
from zeropp_fp8.formats.noise import Seed, uniform
from zeropp_fp8.formats.rounding import ROUNDING_MODES
from zeropp_fp8.formats.scales import MIN_SCALE, block_scales

SCALE_BYTES = 2


class Element(Protocol):
    """What a block-scaled format needs to know about the numbers inside a block."""

    bits: int
    largest: float
    largest_decoded: float
    codes_per_byte: int
    is_integer: bool

    def quantize_(
        self, scaled: Tensor, rounding: str, noise: Tensor | None, codes: Tensor, scratch: Scratch
    ) -> None: ...

    def dequantize(self, codes: Tensor, values: Tensor, scratch: Scratch) -> None: ...


class BlockScaledFormat(WireFormat):
    """Elements of one kind with a scale per block.

    NaN and Inf: a block that holds one decodes to NaN throughout. Finite values never overflow: the scale is rounded
    up, and a decoded value is clamped to the finite range of the target dtype.

    Args:
        name: the format's public name.
        element: the kind of number inside a block.
        block_size: elements a scale is shared by; None for one scale per row (per tensor).
        hadamard: rotate groups of 32 before quantizing (block_size must then be a multiple of 32).
        rounding: one of ROUNDING_MODES.

    Raises:
        ValueError: a block size or rounding mode that does not exist.
        TypeError: a block size that is no int.
    """

    def __init__(
        self,
        name: str,
        element: Element,
        block_size: int | None = 128,
        hadamard: bool = False,
        rounding: str = "nearest",
    ) -> None:
        if block_size is not None and type(block_size) is not int:
            raise TypeError(f"{name}: block_size must be an int or None, got {block_size!r}")
        if rounding not in ROUNDING_MODES:
            raise ValueError(f"{name}: rounding must be one of {ROUNDING_MODES}, got {rounding!r}")
        if block_size is not None and (block_size < 1 or block_size % element.codes_per_byte):
            raise ValueError(f"{name}: block_size must be a positive multiple of {element.codes_per_byte}")
        if hadamard and block_size is not None and block_size % HADAMARD_GROUP:
            raise ValueError(f"{name}: block_size must be a multiple of {HADAMARD_GROUP} with hadamard")
        self.name = name
        self.element = element
        self.block_size = block_size
        self.hadamard = hadamard
        self.rounding = rounding

    def __repr__(self) -> str:
        extras = ", hadamard" if self.hadamard else ""
        extras += "" if self.rounding == "nearest" else f", {self.rounding}"
        return f"{self.name} (block {self.block_size or 'whole tensor'}{extras})"

    @property
    def bits_per_element(self) -> float:
        return self.element.bits + (8 * SCALE_BYTES / self.block_size if self.block_size else 0.0)

    @property
    def needs_seed(self) -> bool:
        return self.rounding == "stochastic"

    def code_count(self, numel: int) -> int:
        """How many codes a row carries: its elements, padded to what the rotation and the packing need."""
        multiple = HADAMARD_GROUP if self.hadamard else self.element.codes_per_byte
        return -(-numel // multiple) * multiple

    def blocks(self, numel: int) -> tuple[int, int]:
        """(number of blocks, block size) of a row."""
        block_size = self.block_size or self.code_count(numel)
        return math.ceil(numel / block_size), block_size

    def payload_bytes(self, numel: int) -> int:
        if numel == 0:
            return 0
        return align_up(self._codes_start(numel) + self.code_count(numel) // self.element.codes_per_byte)

    def _codes_start(self, numel: int) -> int:
        return align_up(self.blocks(numel)[0] * SCALE_BYTES)

    def _code_bytes(self, numel: int) -> slice:
        """Which bytes of a row's payload are codes."""
        start = self._codes_start(numel)
        return slice(start, start + self.code_count(numel) // self.element.codes_per_byte)

    def _codes_of(self, codes: Tensor, row: slice, block: slice, numel: int) -> Tensor:
        """The bytes of some blocks in `codes` [rows, code bytes]; the last block's may be fewer than its size says."""
        block_bytes = self.blocks(numel)[1] // self.element.codes_per_byte
        return codes[row, block.start * block_bytes : block.stop * block_bytes]

    @torch.no_grad()
    def encode_rows_seeded(self, matrix: Tensor, seed: Seed | None, out: Tensor | None = None) -> Tensor:
        check_encodable(matrix, self.name)
        rows, numel = matrix.shape
        payload = out
        if payload is None:
            payload = torch.empty(rows, self.payload_bytes(numel), dtype=torch.uint8, device=matrix.device)
        if numel == 0 or rows == 0:
            return payload
        num_blocks, block_size = self.blocks(numel)
        code_bytes = self._code_bytes(numel)
        payload[:, num_blocks * SCALE_BYTES : code_bytes.start] = 0
        payload[:, code_bytes.stop :] = 0
        codes = payload[:, code_bytes]
        scratch = Scratch(matrix.device)
        for row, block in pieces(rows, num_blocks, block_size, matrix.device):
            blocks = _padded_blocks(matrix[row], block, block_size, scratch)
            scale_bytes = payload[row, block.start * SCALE_BYTES : block.stop * SCALE_BYTES]
            some_codes = self._codes_of(codes, row, block, numel)
            self._encode_blocks_(blocks, row, block, seed, scale_bytes, some_codes, scratch)
        return payload

    def _encode_blocks_(
        self,
        blocks: Tensor,
        row: slice,
        block: slice,
        seed: Seed | None,
        scale_bytes: Tensor,
        code_bytes: Tensor,
        scratch: Scratch,
    ) -> None:
        """Encode fp32 `blocks` [rows, blocks, block size], which lie at (row, block) and are overwritten.

        Args:
            scale_bytes: uint8 [rows, 2 * blocks] to write.
            code_bytes: uint8 [rows, code bytes] to write, perhaps fewer than the last block has elements.
        """
        if self.hadamard:
            rotate_(blocks, scratch)
        magnitudes = torch.abs(blocks, out=scratch("magnitudes", blocks.shape))
        scales = block_scales(magnitudes.amax(dim=-1), self.element.largest)
        # The scales are exact in bf16, so their upper halves are it. A cast would also do, but CPU and CUDA cast NaN to
        # different bits, and payloads are compared byte for byte.
        scale_bytes.copy_(
            scales.view(torch.int16)[:, 1::2].clone(memory_format=torch.contiguous_format).view(torch.uint8)
        )

        # An all-zero block is multiplied by any number; a NaN block holds code 0, its scale says NaN. One division a
        # block and a product an element: an exact division an element would be the slowest instruction of a kernel by
        # far.
        blocks *= (torch.ones_like(scales) / scales.clamp_min(MIN_SCALE)).unsqueeze(-1)
        if scales.device.type != "cpu" or math.isnan(scales.sum().item()):  # a GPU's stream is not waited for
            torch.nan_to_num_(blocks, nan=0.0, posinf=0.0, neginf=0.0)
        scaled = blocks.view(blocks.shape[0], -1)[:, : code_bytes.shape[1] * self.element.codes_per_byte]
        noise = None
        if self.needs_seed:
            first = block.start * blocks.shape[2]
            columns = range(first, first + scaled.shape[1])
            noise = uniform(seed, range(row.start, row.stop), columns, scratch)
        self.element.quantize_(scaled, self.rounding, noise, code_bytes, scratch)

    def _parts(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """(fp32 scales [rows, blocks], uint8 codes [rows, code bytes]) of a payload."""
        num_blocks = self.blocks(numel)[0]
        # clone() gives the bytes an aligned storage of their own; a view as bf16 needs one.
        scale_bytes = payload[:, : num_blocks * SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        return scale_bytes.view(torch.bfloat16).float(), payload[:, self._code_bytes(numel)]

    def _may_exceed(self, scales: Tensor, limit: float, rotated: bool) -> bool:
        """Whether decoded numbers may lie beyond +-limit. On a GPU always true: looking would wait for it."""
        if scales.device.type != "cpu":
            return True
        largest = self.element.largest_decoded * (HADAMARD_GROUP if rotated else 1)
        return not scales.abs().max().item() * largest <= limit  # also where a scale is NaN

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
            limit: clamp to +-limit; None where nothing can exceed it.
        """
        values = scratch(name, (*scales.shape, block_size))
        flat = values.view(scales.shape[0], -1)
        count = codes.shape[1] * self.element.codes_per_byte
        self.element.dequantize(codes, flat[:, :count], scratch)
        if count < flat.shape[1]:
            flat[:, count:] = 0
        if rotated:
            # Before scaling: sums of codes cannot overflow, sums of values near the largest fp32 number could.
            values = rotate_integers_back(values, scratch) if self.element.is_integer else rotate_back_(values, scratch)
        values *= scales.unsqueeze(-1)
        return values if limit is None else values.clamp_(-limit, limit)

    @torch.no_grad()
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        rows = payload.shape[0]
        decoded = torch.empty(rows, numel, dtype=dtype, device=payload.device) if out is None else out
        if numel == 0 or rows == 0:
            return decoded
        num_blocks, block_size = self.blocks(numel)
        scales, codes = self._parts(payload, numel)
        limit = torch.finfo(dtype).max
        limit = limit if self._may_exceed(scales, limit, self.hadamard) else None
        scratch = Scratch(payload.device)
        for row, block in pieces(rows, num_blocks, block_size, payload.device):
            some_codes = self._codes_of(codes, row, block, numel)
            values = self._decode_blocks(scales[row, block], some_codes, block_size, limit, self.hadamard, scratch)
            _copy_blocks(values, decoded[row], block)
        return decoded

    @torch.no_grad()
    def mean_of_rows(self, payloads: Sequence[Tensor], numel: int, out: Tensor | None = None) -> Tensor:
        rows, device = payloads[0].shape[0], payloads[0].device
        mean = torch.empty(rows, numel, dtype=torch.float32, device=device) if out is None else out
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
            _copy_blocks(total, mean[row], block)
        return mean


def _padded_blocks(rows: Tensor, block: slice, block_size: int, scratch: Scratch) -> Tensor:
    """Some blocks of a matrix [rows, n] as fp32 [rows, blocks, block size], with zeros beyond its end."""
    part = rows[:, block.start * block_size : block.stop * block_size]
    blocks = scratch("values", (rows.shape[0], block.stop - block.start, block_size))
    flat = blocks.view(rows.shape[0], -1)
    flat[:, : part.shape[1]] = part
    if part.shape[1] < flat.shape[1]:
        flat[:, part.shape[1] :] = 0
    return blocks


def _copy_blocks(blocks: Tensor, rows: Tensor, block: slice) -> None:
    """Write fp32 [rows, blocks, block size] to where they belong in a matrix [rows, n]; drop what is beyond its end."""
    block_size = blocks.shape[2]
    part = rows[:, block.start * block_size : block.stop * block_size]
    part.copy_(blocks.view(blocks.shape[0], -1)[:, : part.shape[1]])
