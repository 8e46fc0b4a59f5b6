"""FP8 codes whose scale is not in the payload: one per tensor, which all ranks know beforehand.

FP8-LM (arXiv 2310.18313), section 2.1: when every rank encodes a tensor with the same scale, codes can be added as they
are and no scale is sent. With m the multiplier of a tensor

    code = FP8(clamp(x * m, -largest, largest)), to nearest, ties to even;    value = number(code) / m

NaN and Inf become the NaN code 0x7F. `counts` gathers how many codes lie at the largest magnitude (values that may have
been cut off) and how many numbers became zero. 1 / m = amax / largest of the tensor keeps everything in range.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.base import KernelSpec, WireFormat, align_up, check_encodable
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.float8 import ELEMENTS, scale_of_amax

NAN_CODE = 0x7F  # in both formats
LARGEST_CODE = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B}
# A factor of 2^24 above or below it (mu, the number of ranks) is still a normal fp32 number, as is its inverse.
SMALLEST_SCALE = 2.0**-100


class SharedScaleFormat(WireFormat):
    """One byte per element, of "fp8_e4m3" or "fp8_e5m2"; scales are the caller's business."""

    scales = "caller"

    def __init__(self, name: str) -> None:
        self.name = name
        self.element = ELEMENTS[name]
        self.dtype = self.element.dtype

    def __repr__(self) -> str:
        return f"{self.name} (a shared scale per tensor)"

    def options(self) -> dict[str, Any]:
        return {"name": self.name}  # `make_format` makes none: without a caller's scale its codes say nothing

    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(self.name, 8, largest=self.element.largest, scale="shared")

    @property
    def bits_per_element(self) -> float:
        return 8.0

    def payload_bytes(self, numel: int) -> int:
        return align_up(numel)

    @property
    def granule(self) -> int:
        return 1

    def scale_of_amax(self, amax: Tensor) -> Tensor:
        """fp32 amax / largest, of the shape of fp32 `amax`; 1 where amax is 0, so that nothing is divided by zero."""
        return scale_of_amax(amax, self.dtype, SMALLEST_SCALE)

    def encode_rows(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """Not available: these codes mean nothing without a multiplier."""
        raise TypeError(f"{self.name} with a shared scale: use encode_scaled, which takes the tensor's multiplier")

    @torch.no_grad()
    def encode_scaled(self, matrix: Tensor, multiplier: Tensor, out: Tensor, counts: Tensor | None = None) -> None:
        """Write the codes of fp32, bf16 or fp16 `matrix` [rows, n] to uint8 `out` [rows, at least n], zeros after them.

        Args:
            multiplier: fp32 [1] on the matrix' device.
            counts: int64 [2]; the codes at the largest magnitude and the numbers that became zero are added.
        """
        check_encodable(matrix, self.name)
        numel = matrix.shape[1]
        out[:, numel:] = 0
        if numel == 0:
            return
        values = matrix.float()
        largest = self.element.largest
        codes = (values * multiplier).clamp_(-largest, largest).to(self.dtype).view(torch.uint8)
        codes = codes.masked_fill_(values.isfinite().logical_not_(), NAN_CODE)
        out[:, :numel] = codes
        if counts is not None:
            magnitudes = codes & 0x7F
            counts[0] += (magnitudes == LARGEST_CODE[self.name]).sum()
            counts[1] += ((magnitudes == 0) & (values != 0)).sum()

    @torch.no_grad()
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """The numbers of the codes, not divided by any multiplier: [rows, numel]."""
        codes = payload[:, :numel].clone(memory_format=torch.contiguous_format)
        numbers = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        if numbers.numel():
            self.element.dequantize(codes, numbers, Scratch(codes.device))
        return numbers.to(dtype) if out is None else out.copy_(numbers)

    def sum_of_rows(self, payloads: Tensor, numel: int) -> Tensor:
        """fp32 [rows, numel]: 0 + the numbers of each rank in uint8 [ranks, rows, bytes], added in their order."""
        total = torch.zeros(payloads.shape[1], numel, dtype=torch.float32, device=payloads.device)
        for payload in payloads:
            total += self.decode_rows(payload, numel, torch.float32)
        return total
