"""A weight's codes -> codes in FP8 with one scale: the operand of an FP8 GEMM, without the 16-bit weight in between.

    codes[n, k] = FP8(clamp(w[n, k] * multiplier)),    w = decode(codes) rounded to the weight's dtype

which are the bytes of compute/casts.py's cast with the scale 1 / multiplier: what lies beyond the largest number
becomes it, NaN and Inf become the NaN code. An int4 weight costs 1.5 bytes per number to move; written in 16 bits and
cast it would cost 5.5.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.casts.matrices import LARGEST_CODE, codes_of, numbers_of
from zeropp_fp8.kernels.elements import narrowed
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight
from zeropp_fp8.kernels.wire.dequantize import decode_tile
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat, decodes, interpreted, lookup_table, native_float8

FLOAT8 = torch.float8_e4m3fn
ALIGNMENT = 16  # of a row in bytes, for FP8 GEMMs
_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def fp8_tile(
    payload_ptr,
    lookup_ptr,
    multiplier,
    codes_ptr,
    tile,
    first,
    numel,
    columns,
    codes_stride,
    slice_numel,
    num_blocks,
    code_bytes,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write a tile of a slice whose first element is element `first` of the weight."""
    values = decode_tile(
        payload_ptr, lookup_ptr, tile, slice_numel, num_blocks, code_bytes, LIMIT, FORMAT, WHOLE
    )  # fmt: skip
    codes = codes_of(numbers_of(narrowed(values, DTYPE, FORMAT.interpreted)), multiplier, LARGEST, NATIVE_FP8)
    column = tl.arange(0, FORMAT.width)[None, :]
    local = tl.arange(0, FORMAT.tile_blocks)[:, None] * FORMAT.block_size + column
    place = first + tile * FORMAT.tile_numel + local
    if WHOLE and not PADDED and FORMAT.width == FORMAT.block_size:
        tl.store(codes_ptr + place, codes)
    else:
        mask = (column < FORMAT.block_size) & (place < numel) & (tile * FORMAT.tile_numel + local < slice_numel)
        if PADDED:
            place = place // columns * codes_stride + place % columns
        tl.store(codes_ptr + place, codes, mask=mask)


@Kernel
@triton.jit(do_not_specialize_on_alignment=["multiplier_ptr"])
def quantized_to_fp8_kernel(
    payload_ptr,
    rows_ptr,
    lookup_ptr,
    multiplier_ptr,
    codes_ptr,
    numel,
    columns,
    codes_stride,
    slice_numel,
    num_blocks,
    code_bytes,
    row_stride,
    DTYPE: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    ORDERED: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE_FP8: tl.constexpr,
):
    """One program: one tile (axis 0) of one slice (axis 1)."""
    tile = tl.program_id(0).to(tl.int64)
    slice_index = tl.program_id(1)
    first = slice_index.to(tl.int64) * slice_numel
    end = tl.minimum(slice_numel, numel - first)
    if tile * FORMAT.tile_numel >= end:
        return
    row = tl.load(rows_ptr + slice_index) if ORDERED else slice_index
    payload_ptr += tl.multiple_of(row.to(tl.int64) * row_stride, 16)
    multiplier = tl.load(multiplier_ptr)
    # The body is compiled twice, so that a whole tile has neither masks nor branches.
    if end - tile * FORMAT.tile_numel >= FORMAT.tile_numel:
        fp8_tile(
            payload_ptr, lookup_ptr, multiplier, codes_ptr, tile, first, numel, columns, codes_stride, slice_numel,
            num_blocks, code_bytes, DTYPE, LIMIT, FORMAT, PADDED, LARGEST, NATIVE_FP8, True,
        )  # fmt: skip
    else:
        fp8_tile(
            payload_ptr, lookup_ptr, multiplier, codes_ptr, tile, first, numel, columns, codes_stride, slice_numel,
            num_blocks, code_bytes, DTYPE, LIMIT, FORMAT, PADDED, LARGEST, NATIVE_FP8, False,
        )  # fmt: skip


@torch.no_grad()
def quantized_to_fp8(weight: QuantizedWeight, multiplier: Tensor, use_kernel: bool | None = None) -> Tensor:
    """The codes of a weight in E4M3.

    The transposed ones, for the gradient of a layer's input, are made from them: `Float8Operand.transposed`.

    Args:
        weight: [N, K], in any format that kernels decode.
        multiplier: fp32, one number on the weight's device: 1 / scale, correctly rounded, as compute/casts.py has it.
        use_kernel: the Triton kernel instead of torch operations; None: on a GPU. Both make the same bytes.

    Returns:
        float8_e4m3fn [N, K rounded up to a multiple of 16], zeros beyond K.

    Raises:
        ValueError: a multiplier that is not as above, or a format that kernels do not decode.
    """
    if multiplier.numel() != 1 or multiplier.dtype != torch.float32 or multiplier.device != weight.device:
        raise ValueError(
            f"multiplier must be one fp32 number on {weight.device}, not {multiplier.dtype} {list(multiplier.shape)} "
            f"on {multiplier.device}"
        )
    if not decodes(weight.wire_format):
        raise ValueError(f"kernels do not decode the format {weight.wire_format}")
    outputs, columns = weight.shape
    length = -(-columns // ALIGNMENT) * ALIGNMENT
    codes = weight.payload.new_zeros if length > columns else weight.payload.new_empty
    codes = codes(outputs, length, dtype=torch.uint8)
    if codes.numel() == 0:
        return codes.view(FLOAT8)
    if weight.device.type == "cuda" if use_kernel is None else use_kernel:
        _launch(weight, multiplier, codes)
    else:
        codes[:, :columns] = _codes(weight.dequantize(), multiplier)
    return codes.view(FLOAT8)


def _codes(values: Tensor, multiplier: Tensor) -> Tensor:
    """uint8 codes of a matrix, in torch: the rule of compute/casts.py with the scale's reciprocal given."""
    scaled = values.float() * multiplier.view(1)
    scaled.masked_fill_(values.isfinite().logical_not_(), torch.nan)
    largest = LARGEST_CODE[FLOAT8]
    codes = scaled.clamp_(-largest, largest).to(FLOAT8).view(torch.uint8)
    return codes.masked_fill_(scaled.isnan(), 0x7F)


def _launch(weight: QuantizedWeight, multiplier: Tensor, codes: Tensor) -> None:
    # FP8 elements are decoded by integer operations: Triton 3.6 loses casts from FP8 and to it in one kernel.
    form = replace(KernelFormat.of(weight.wire_format), interpreted=interpreted())
    order = weight.row_of_slice
    slices = triton.cdiv(weight.numel, weight.slice_numel)
    tiles = triton.cdiv(min(weight.numel, weight.slice_numel), form.tile_blocks * form.block_size)
    quantized_to_fp8_kernel[(tiles, slices)](
        weight.payload[:, weight.offset :],
        weight.payload if order is None else order,
        lookup_table(codes.device),
        multiplier,
        codes,
        weight.numel,
        weight.shape[1],
        codes.shape[1],
        weight.slice_numel,
        weight.wire_format.blocks(weight.slice_numel)[0],
        weight.wire_format.code_bytes(weight.slice_numel),
        weight.payload.stride(0),
        DTYPE=_TRITON_DTYPES[weight.dtype],
        LIMIT=torch.finfo(weight.dtype).max,
        FORMAT=form,
        ORDERED=order is not None,
        PADDED=codes.shape[1] > weight.shape[1],
        LARGEST=LARGEST_CODE[FLOAT8],
        NATIVE_FP8=native_float8(codes.device),
        num_warps=form.num_warps,
        enable_fp_fusion=False,
    )
