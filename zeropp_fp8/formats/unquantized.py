"""The tensor's own bytes: the `none` of the configuration, and the carrier of norms and biases."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.formats.base import KernelSpec, WireFormat, align_up, check_encodable

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class UnquantizedFormat(WireFormat):
    """Numbers as they are, in one 16- or 32-bit dtype. NaN, Inf and every bit survive when the dtypes agree."""

    scales = "none"

    def __init__(self, dtype: torch.dtype = torch.bfloat16, name: str = "none") -> None:
        self.dtype = dtype
        self.name = name

    def __repr__(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def options(self) -> dict[str, Any]:
        return {"name": "none", "dtype": self.dtype}

    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(_NAMES[self.dtype], 8 * self.dtype.itemsize)

    @property
    def bits_per_element(self) -> float:
        return 8.0 * self.dtype.itemsize

    def payload_bytes(self, numel: int) -> int:
        return align_up(numel * self.dtype.itemsize)

    @property
    def granule(self) -> int:
        return 1

    def granule_runs(self, numel: int) -> list[tuple[int, int]]:
        return [(0, self.dtype.itemsize)]

    @torch.no_grad()
    def encode_rows(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        check_encodable(matrix, self.name)
        raw = matrix.to(self.dtype).contiguous().as_strided(matrix.shape, (matrix.shape[1], 1)).view(torch.uint8)
        if out is None:
            return F.pad(raw, (0, self.payload_bytes(matrix.shape[1]) - raw.shape[1]))
        out[:, : raw.shape[1]] = raw
        out[:, raw.shape[1] :] = 0
        return out

    @torch.no_grad()
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        if numel == 0:
            return torch.empty(payload.shape[0], 0, dtype=dtype, device=payload.device) if out is None else out
        raw = payload[:, : numel * self.dtype.itemsize].clone(memory_format=torch.contiguous_format)
        values = raw.view(self.dtype)
        return values.to(dtype) if out is None else out.copy_(values)
