"""NVFP4: 4-bit floats in blocks of 16 with an FP8 scale each, and an fp32 scale per tensor, of which ranks keep parts.

    tensor scale T = max(largest finite magnitude / (448 * 6), 2^-120); 1 where all is 0
    block scale  S = E4M3(clamp((largest magnitude of the block / 6) / T, 2^-6, 448)), to nearest, ties to even
    code           = E2M1(value * (1 / (S * T))), to nearest, ties to even, within +-6
    value          = code * (S * T)

Source: NVIDIA's description of NVFP4 (Transformer Engine, cuBLAS); 2^-6, the smallest normal number of E4M3, is
torchao's lower end. A block that holds NaN or Inf has the scale NaN and decodes to NaN throughout; it does not count in
T. Payload of a row of n elements, with nb = ceil(n / 16):

    [ fp32 T | nb bytes S | zeros up to a multiple of 16 | codes, ceil(n / 2) bytes | zeros up to a multiple of 16 ]
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.base import part_of
from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.mini_float import NAN_CODE, MiniFloatElement
from zeropp_fp8.formats.scales import MIN_SCALE, divide_

NVFP4_BLOCK = 16
_LARGEST_SCALE, _SMALLEST_SCALE = 448.0, 2.0**-6
_TENSOR_BYTES = 4
_CHUNK = 1 << 22  # elements of a row whose magnitudes are in memory at once


class _Scale:
    """The bytes of block scales; the tensor's scale is the format's business."""

    name = "nvfp4"
    num_bytes = 1


class NVFP4Format(BlockScaledFormat):
    """A scale per row, or, where rows are parts of a tensor, per tensor, and one per block of 16.

    Args:
        block_size, hadamard: 16 and False; there for the options of all formats to be the same.

    Raises:
        ValueError: another block size, or the rotation.
    """

    def __init__(self, block_size: int = NVFP4_BLOCK, hadamard: bool = False) -> None:
        if type(block_size) is not int or block_size != NVFP4_BLOCK:
            raise ValueError(f"nvfp4: block_size is {NVFP4_BLOCK}, got {block_size!r}")
        if hadamard:
            raise ValueError("nvfp4: has no rotation; leave hadamard out, or use int4")
        super().__init__("nvfp4", MiniFloatElement(2, 1, 6.0), NVFP4_BLOCK, scale=_Scale())

    def __repr__(self) -> str:
        return "nvfp4"

    def options(self) -> dict[str, Any]:
        return {"name": self.name}

    def kernel_spec(self) -> None:
        return None

    def scale_bytes(self, numel: int) -> int:
        return _TENSOR_BYTES + self.blocks(numel)[0] if numel else 0

    def granule_runs(self, numel: int) -> list[tuple[int, int]]:
        return [(_TENSOR_BYTES, 1), (self._codes_start(numel), NVFP4_BLOCK // 2)]

    def shared_bytes(self, numel: int) -> slice:
        return slice(0, _TENSOR_BYTES)

    def encode_into(self, matrix: Tensor, scales: Tensor, codes: Tensor) -> None:
        self._encode_scaled(matrix, self._tensor_scales(matrix), scales, codes)

    def _encode_part(self, flat: Tensor, first: int, numel: int, out: Tensor) -> None:
        scales, codes = self._places(numel)
        out[:, scales.stop : codes.start] = 0
        out[:, codes.stop :] = 0
        tensor_scale = self._tensor_scales(flat.view(1, -1))
        self._encode_scaled(part_of(flat, first, numel), tensor_scale, out[:, scales], out[:, codes])

    def _tensor_scales(self, matrix: Tensor) -> Tensor:
        """fp32 [rows, 1]."""
        amax = matrix.new_zeros(matrix.shape[0], 1, dtype=torch.float32)
        for start in range(0, matrix.shape[1], _CHUNK):
            magnitudes = matrix[:, start : start + _CHUNK].abs()
            magnitudes.masked_fill_(magnitudes.isfinite().logical_not_(), 0.0)
            torch.maximum(amax, magnitudes.amax(dim=1, keepdim=True).float(), out=amax)
        # Divided by a tensor: CUDA would multiply by a Python number's reciprocal, which rounds otherwise.
        scales = amax / torch.full_like(amax, _LARGEST_SCALE * self.element.largest)
        return scales.clamp_min_(MIN_SCALE / _SMALLEST_SCALE).masked_fill_(amax == 0, 1.0)

    def _encode_scaled(self, matrix: Tensor, tensor_scales: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write scales and codes of `matrix` [rows, n] with fp32 scales [rows, 1] of the tensors of its rows."""
        scales[:, :_TENSOR_BYTES] = tensor_scales.contiguous().view(torch.uint8)

        def scale_(blocks: Tensor, row: slice, block: slice, scratch: Scratch) -> None:
            amax = torch.abs(blocks, out=scratch("magnitudes", blocks.shape)).amax(dim=-1)
            own = tensor_scales[row]
            wanted = (amax / torch.full_like(amax, self.element.largest)) / own
            chosen = wanted.nan_to_num(0.0, 0.0, 0.0).clamp_(_SMALLEST_SCALE, _LARGEST_SCALE)
            chosen = chosen.to(torch.float8_e4m3fn)
            found = chosen.view(torch.uint8).masked_fill_((amax < math.inf).logical_not_(), NAN_CODE)
            scales[row, _TENSOR_BYTES + block.start : _TENSOR_BYTES + block.stop] = found
            divide_(blocks, found.view(torch.float8_e4m3fn).float() * own)

        self._encode_codes(matrix, codes, scale_)

    def _decode_scales(self, scale_bytes: Tensor, numel: int) -> Tensor:
        tensor_scales = scale_bytes[:, :_TENSOR_BYTES].clone(memory_format=torch.contiguous_format)
        codes = scale_bytes[:, _TENSOR_BYTES:].clone(memory_format=torch.contiguous_format)
        return codes.view(torch.float8_e4m3fn).float() * tensor_scales.view(torch.float32)
