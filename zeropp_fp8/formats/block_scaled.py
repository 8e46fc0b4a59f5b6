"""Block-scaled formats: consecutive elements share one bf16 scale.

value = scale * element(code). Payload of one row of n elements, with B = block_size and nb = ceil(n / B):

    [ nb scales, bf16 | zeros up to a multiple of 16 | codes, ceil(n * bits / 8) bytes | zeros up to a multiple of 16 ]

Codes start at a multiple of 16 bytes so that kernels can store and load 16 of them at once.

With the Hadamard rotation n is first padded with zeros to a multiple of 32, because all 32 rotated values are needed
to get any of them back.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.formats.base import WireFormat, align_up, check_encodable
from zeropp_fp8.formats.hadamard import HADAMARD_GROUP, rotate, rotate_back
from zeropp_fp8.formats.noise import Seed, uniform
from zeropp_fp8.formats.rounding import ROUNDING_MODES
from zeropp_fp8.formats.scales import block_scales

SCALE_BYTES = 2


class Element(Protocol):
    """What a block-scaled format needs to know about the numbers inside a block."""

    bits: int
    largest: float
    codes_per_byte: int

    def quantize_(self, scaled: Tensor, rounding: str, noise: Tensor | None) -> Tensor: ...

    def dequantize(self, codes: Tensor) -> Tensor: ...


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

    @torch.no_grad()
    def encode_rows_seeded(self, matrix: Tensor, seed: Seed | None) -> Tensor:
        check_encodable(matrix, self.name)
        rows, numel = matrix.shape
        if numel == 0 or rows == 0:
            return torch.empty(rows, self.payload_bytes(numel), dtype=torch.uint8, device=matrix.device)
        num_blocks, block_size = self.blocks(numel)
        blocks = F.pad(matrix.float(), (0, num_blocks * block_size - numel)).view(rows, num_blocks, block_size)
        if self.hadamard:
            blocks = rotate(blocks)

        scales = block_scales(blocks.abs().amax(dim=-1), self.element.largest)
        # An all-zero block is multiplied by 1; a NaN block holds code 0, its scale says NaN. One division a block and a
        # product an element: an exact division an element would be the slowest instruction of a kernel by far.
        factor = torch.where(scales == 0, torch.ones_like(scales), torch.ones_like(scales) / scales).unsqueeze(-1)
        scaled = torch.nan_to_num_(blocks * factor, nan=0.0, posinf=0.0, neginf=0.0)
        scaled = scaled.view(rows, -1)[:, : self.code_count(numel)]
        noise = uniform(seed, rows, scaled.shape[1], scaled.device) if self.needs_seed else None
        codes = self.element.quantize_(scaled, self.rounding, noise)

        # The scales are exact in bf16, so their upper halves are it. A cast would also do, but CPU and CUDA cast NaN to
        # different bits, and payloads are compared byte for byte.
        scale_bytes = scales.view(torch.int32).bitwise_right_shift(16).to(torch.int16).view(torch.uint8)
        payload = torch.empty(rows, self.payload_bytes(numel), dtype=torch.uint8, device=matrix.device)
        codes_start = self._codes_start(numel)
        codes_end = codes_start + codes.shape[1]
        payload[:, : scale_bytes.shape[1]] = scale_bytes
        payload[:, scale_bytes.shape[1] : codes_start] = 0
        payload[:, codes_start:codes_end] = codes
        payload[:, codes_end:] = 0
        return payload

    @torch.no_grad()
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        rows = payload.shape[0]
        if numel == 0 or rows == 0:
            return torch.empty(rows, numel, dtype=dtype, device=payload.device)
        num_blocks, block_size = self.blocks(numel)
        code_count = self.code_count(numel)
        codes_start = self._codes_start(numel)
        codes_end = codes_start + code_count // self.element.codes_per_byte
        # clone() gives the bytes an aligned storage of their own; a view as bf16 needs one.
        scale_bytes = payload[:, : num_blocks * SCALE_BYTES].clone(memory_format=torch.contiguous_format)
        scales = scale_bytes.view(torch.bfloat16).float()
        values = self.element.dequantize(payload[:, codes_start:codes_end].contiguous())
        if code_count != num_blocks * block_size:
            values = F.pad(values, (0, num_blocks * block_size - code_count))
        values = values.view(rows, num_blocks, block_size)
        if self.hadamard:
            # Before scaling: sums of codes cannot overflow, sums of values near the largest fp32 number could.
            values = rotate_back(values)
        values = values.mul_(scales.unsqueeze(-1))
        limit = torch.finfo(dtype).max
        values = values.clamp_(-limit, limit).view(rows, -1)
        return values[:, :numel].to(dtype).contiguous()
