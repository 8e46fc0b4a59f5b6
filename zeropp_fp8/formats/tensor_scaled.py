"""FP8 E4M3 with one fp32 scale for a whole tensor, of which each rank may store a part.

    scale = max(largest finite magnitude / 448, 2^-126); 1 where all is 0
    code  = FP8(value * (1 / scale)), to nearest, ties to even
    value = code * scale

A weight that is stored so is the operand of its GEMM with a scale per tensor, byte for byte. NaN and Inf become the NaN
code and do not count in the scale. Payload of a row of n elements:

    [ fp32 scale | 12 zeros | codes, n bytes | zeros up to a multiple of 16 ]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.base import PAYLOAD_ALIGNMENT, WireFormat, align_up, check_encodable, part_of
from zeropp_fp8.formats.float8 import scale_of_amax
from zeropp_fp8.formats.shared_scale import SharedScaleFormat

_SCALE_BYTES = 4
_HEADER = PAYLOAD_ALIGNMENT  # codes start at a multiple of 16 bytes
_CHUNK = 1 << 22  # elements of a row that are in fp32 at once: 16 MB


class TensorScaledFormat(WireFormat):
    """`fp8_e4m3` with a scale per row, or, where rows are parts of a tensor, a scale per tensor."""

    name = "fp8_e4m3"

    def __init__(self) -> None:
        self._codes = SharedScaleFormat(self.name)
        self.dtype = self._codes.dtype

    def __repr__(self) -> str:
        return f"{self.name} (a scale per tensor)"

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "scales": "tensor"}

    @property
    def bits_per_element(self) -> float:
        return 8.0

    def payload_bytes(self, numel: int) -> int:
        return _HEADER + align_up(numel) if numel else 0

    @property
    def granule(self) -> int:
        return PAYLOAD_ALIGNMENT

    def granule_runs(self, numel: int) -> list[tuple[int, int]]:
        return [(_HEADER, self.granule)]

    def shared_bytes(self, numel: int) -> slice:
        return slice(0, _SCALE_BYTES)

    @torch.no_grad()
    def encode_rows(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        check_encodable(matrix, self.name)
        rows, numel = matrix.shape
        if out is None:
            out = torch.empty(rows, self.payload_bytes(numel), dtype=torch.uint8, device=matrix.device)
        if numel and rows:
            self._write(matrix, self._scales_of(matrix), out)
        return out

    def _encode_part(self, flat: Tensor, first: int, numel: int, out: Tensor) -> None:
        self._write(part_of(flat, first, numel), self._scales_of(flat.view(1, -1)), out)

    def _scales_of(self, matrix: Tensor) -> Tensor:
        """fp32 [rows, 1]."""
        amax = matrix.new_zeros(matrix.shape[0], 1, dtype=torch.float32)
        for start in range(0, matrix.shape[1], _CHUNK):
            magnitudes = matrix[:, start : start + _CHUNK].abs()
            magnitudes.masked_fill_(magnitudes.isfinite().logical_not_(), 0.0)
            torch.maximum(amax, magnitudes.amax(dim=1, keepdim=True).float(), out=amax)
        return scale_of_amax(amax, self.dtype)

    def _write(self, matrix: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the payloads of `matrix` [rows, n] with fp32 scales [rows, 1] to `out`."""
        numel = matrix.shape[1]
        out[:, :_SCALE_BYTES] = scales.view(torch.uint8)
        out[:, _SCALE_BYTES:_HEADER] = 0
        out[:, _HEADER + numel :] = 0
        multipliers = torch.ones_like(scales) / scales
        for start in range(0, numel, _CHUNK):
            part = matrix[:, start : start + _CHUNK]
            codes = out[:, _HEADER + start : _HEADER + start + part.shape[1]]
            self._codes.encode_scaled(part, multipliers, codes)

    def decode_scales(self, payload: Tensor) -> Tensor:
        """fp32 [rows, 1] of payloads, in memory of their own."""
        return payload[:, :_SCALE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.float32)

    def codes(self, payload: Tensor, numel: int, order: Tensor | None = None) -> Tensor:
        """The FP8 numbers [rows, numel] of payloads, in memory of their own; `order`: int64 [rows], of the rows."""
        codes = payload[:, _HEADER : _HEADER + numel]
        codes = codes.clone(memory_format=torch.contiguous_format) if order is None else codes.index_select(0, order)
        return codes.view(self.dtype)

    @torch.no_grad()
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        # Not torch.empty, which under deepspeed.zero.Init gives 16 bits where fp32 is asked for.
        decoded = payload.new_empty(payload.shape[0], numel, dtype=dtype) if out is None else out
        if numel == 0 or payload.shape[0] == 0:
            return decoded
        scales, largest = self.decode_scales(payload), torch.finfo(decoded.dtype).max
        for start in range(0, numel, _CHUNK):
            part = decoded[:, start : start + _CHUNK]
            codes = payload[:, _HEADER + start :]
            numbers = self._codes.decode_rows(codes, part.shape[1], torch.float32)
            part.copy_(numbers.mul_(scales).clamp_(-largest, largest))
        return decoded
