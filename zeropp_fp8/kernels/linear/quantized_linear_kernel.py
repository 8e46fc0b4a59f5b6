"""y = x @ W^T + bias + LoRA with W as codes: a weight is read once, in 4 or 8 bits, and never stored in 16.

    y[m, n] = sum over k of x[m, k] * w[n, k] + bias[n] + scaling * sum over r of (x A^T)[m, r] * B[n, r]
    w = decode(codes) rounded to the weight's dtype,    x A^T rounded to A's    (https://arxiv.org/abs/2106.09685)

Sums are fp32, over the same 16-bit numbers as those of `dequantize` and a matrix product, in another order. For few
rows of x, as generation has them, the time is that of reading the weight.

A program makes 8 * ROW_GROUPS outputs for all rows of x. Its warps share the sum over k: in each step, a warp takes the
next 4 spans of 16 or 32 bytes of codes of each of its weight rows, a thread one per row. Numbers are decoded in the
registers into which their codes were loaded, which tensor cores then read; x is loaded in the order in which codes lie.
Shared memory and barriers serve only the sum over warps at the end, in a fixed order: the same bits on every run. The
codes of the next step are loaded while those of this one are multiplied. LoRA's warps share the sum over r.

Of a stack of matrices, such as packed experts, each row of y has a matrix of its own, y[m] = x[m // each] W[of[m]]^T,
and a program makes outputs of one row: codes of matrices that no row goes through are not read.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from zeropp_fp8.kernels.elements import narrowed
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.linear.code_words import (
    SAFE_SCALE,
    halves_of,
    numbers_of_codes,
    pair_of_words,
    repeated,
    words_of_pairs_with_ptx,
)
from zeropp_fp8.kernels.wire.dequantize import LARGEST_FP32, NF4_LEVELS, SCALE_GROUP, ZERO_CODE


@dataclass(frozen=True)
class Form:
    """The compile-time constants of a product, which the kernel and its parts take whole.

    Attributes:
        element, scale: of the format.
        pairs, pairing: pairs of numbers in a word of codes, and which two make one (code_words.py).
        times: loads of 16 bytes that make a span of codes; 0: byte by byte.
        block: spans of a block; byte by byte its bytes.
        ordered, biased: whether there are an order of slices and a bias.
        rank_steps: steps of 16 ranks a warp that LoRA's product takes; 0: no LoRA.
        stacked: the weight is a stack of matrices.
        limit: the largest finite number of the weight's dtype.
        words: numbers of x have 16 bits.
        ptx, settle: whether codes are decoded by PTX, and operands kept as 16-bit numbers.
        warps, row_groups, groups: see `Launch`.
    """

    element: str
    scale: str
    pairs: int
    pairing: str
    times: int
    block: int
    ordered: bool
    biased: bool
    rank_steps: int
    stacked: bool
    limit: float
    words: bool
    ptx: bool
    settle: bool
    interpreted: bool
    warps: int
    row_groups: int
    groups: int


# -- rows ------------------------------------------------------------------------------------------------------------


@triton.jit
def rows_from(place, count, FORM: tl.constexpr):
    """The row of y at a place of the 8 * groups of a program; `count` and beyond: none. Of a stack it has one."""
    if FORM.stacked:
        return tl.program_id(1) + place * count
    else:
        return tl.program_id(1) * (8 * FORM.groups) + place


@triton.jit
def row_of_x(m, each, FORM: tl.constexpr):
    """int64: the row of x that goes into a row of y."""
    if FORM.stacked:
        m = m // each
    return m.to(tl.int64)


# -- codes and scales -----------------------------------------------------------------------------------------------


@triton.jit
def load_scale_parts(payload_ptrs, block, group_start, offset_start, mask, SCALE: tl.constexpr):
    """The input of `scales_of` for some blocks, as their slices' payloads have it: three tensors of block's shape."""
    if SCALE == "bf16":
        scale = tl.load((payload_ptrs + 2 * block).to(tl.pointer_type(tl.int16)), mask=mask, other=0)
        return scale, scale, scale
    elif SCALE == "fp32":
        scale = tl.load((payload_ptrs + 4 * block).to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
        return scale, scale, scale
    else:
        code = tl.load(payload_ptrs + block, mask=mask, other=0)
        group_ptrs = (payload_ptrs + (group_start + 4 * (block // SCALE_GROUP))).to(tl.pointer_type(tl.int32))
        offset_ptrs = (payload_ptrs + offset_start).to(tl.pointer_type(tl.float32))
        return code, tl.load(group_ptrs, mask=mask, other=0), tl.load(offset_ptrs, mask=mask, other=0.0)


@triton.jit
def scales_of(first, second, third, lookup_ptr, SCALE: tl.constexpr):
    """Scales, in bf16 where the format has them so, else fp32; the formula is that of formats/double_quantized.py.

    `lookup_ptr`: fp32, the levels of NF4, then those of the dynamic type.
    """
    if SCALE == "bf16":
        return first.to(tl.bfloat16, bitcast=True)
    elif SCALE == "fp32":
        return first
    else:
        code = first.to(tl.int32)
        group_scale = (second & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        scale = tl.load(lookup_ptr + NF4_LEVELS + code) * group_scale + third
        scale = tl.minimum(tl.maximum(scale, 0.0), LARGEST_FP32)
        return tl.where((second < 0) & (code == ZERO_CODE), float("nan"), scale)


@triton.jit
def in_fp32(scales):
    """Scales in fp32, from bf16 by their bits: Triton's interpreter does not cast bf16 right."""
    if scales.dtype == tl.bfloat16:
        return (scales.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return scales


@triton.jit
def row_of(rows_ptr, slice_index, ORDERED: tl.constexpr):
    """int64: the payload row that holds a slice."""
    if ORDERED:
        return tl.load(rows_ptr + slice_index).to(tl.int64)
    else:
        return slice_index.to(tl.int64)


@triton.jit
def load_spans(first_ptrs, second_ptrs, start, span, spans, slice_spans, parts, FORM: tl.constexpr):
    """Span number `span` of each of R rows: (words int32 [TIMES * R, 4], three parts of scales [R]); zeros at the end.

    Args:
        first_ptrs, second_ptrs: [R] the payloads of the slice in which a row starts, and of the next one.
        start: int32 [R], the row's first span in its slice.
        parts: where codes, scales of groups and the offset of scales start in a slice's payload.
    """
    codes_start, group_start, offset_start = parts
    scale: tl.constexpr = FORM.scale
    TIMES: tl.constexpr = FORM.times
    inside = span < spans
    place = start + span
    in_second = place >= slice_spans
    place = tl.where(in_second, place - slice_spans, place)
    payload_ptrs = tl.where(in_second, second_ptrs, first_ptrs)
    a, b, c = load_scale_parts(payload_ptrs, place // FORM.block, group_start, offset_start, inside, scale)
    codes_ptrs = repeated(payload_ptrs + tl.multiple_of(codes_start + 16 * TIMES * place, 16), TIMES)
    sixteenth = tl.arange(0, codes_ptrs.shape[0]) // span.shape[0]
    words_ptrs = tl.multiple_of(codes_ptrs + (16 * sixteenth)[:, None], (16, 16)).to(tl.pointer_type(tl.int32))
    words = tl.load(words_ptrs + tl.arange(0, 4)[None, :], mask=repeated(inside, TIMES), other=0)
    return words, a, b, c


@triton.jit
def load_byte(weight, lookup_ptr, n, byte, row_bytes, slice_bytes, FORM: tl.constexpr):
    """Byte `byte` of the codes of row n, wherever it lies: (the byte as int32, its block's scale in fp32)."""
    payload_ptr, rows_ptr, _, row_stride, codes_start, group_start, offset_start = weight
    scale: tl.constexpr = FORM.scale
    inside = byte < row_bytes
    place = n.to(tl.int64) * row_bytes + byte
    slice_index = tl.where(inside, place // slice_bytes, 0)
    place -= slice_index * slice_bytes
    payload_ptrs = payload_ptr + row_of(rows_ptr, slice_index, FORM.ordered) * row_stride
    a, b, c = load_scale_parts(payload_ptrs, place // FORM.block, group_start, offset_start, inside, scale)
    code = tl.load(payload_ptrs + codes_start + place, mask=inside, other=0).to(tl.int32)
    return code, in_fp32(scales_of(a, b, c, lookup_ptr, scale))


# -- operands of the products ---------------------------------------------------------------------------------------


@triton.jit
def settled(numbers, SETTLE: tl.constexpr):
    """The same numbers of 16 bits, and nothing is done.

    Triton looks for the narrowest load behind an operand of a dot, through all that is pure, and has each thread hold
    its numbers accordingly; it depends on its version. It does not look through this: they are kept as 16-bit ones.
    """
    if SETTLE:
        numbers = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [numbers], numbers.dtype, is_pure=False, pack=2)
    return numbers


@triton.jit
def as_left(numbers, WARPS: tl.constexpr, ROW_GROUPS: tl.constexpr, TIMES: tl.constexpr):
    """A pair of words, [(sixteenth, row group, warp, 8 rows, 4 spans), 4 words, 2] or 8 numbers -> [warp, rows, k].

    Of 8 neighbours in a row of k a thread has two: it is what tensor cores read, so nothing moves.
    """
    numbers = tl.reshape(numbers, (TIMES, ROW_GROUPS, WARPS, 8, 4, 4, 2))
    return tl.reshape(tl.permute(numbers, (2, 1, 3, 0, 5, 4, 6)), (WARPS, ROW_GROUPS * 8, TIMES * 32))


@triton.jit
def as_right(numbers, WARPS: tl.constexpr, GROUPS: tl.constexpr, TIMES: tl.constexpr, PAIRS: tl.constexpr):
    """The same pair of x, [(sixteenth, part, group, warp, 8 rows, 4 spans), 4 / PAIRS words, 2] -> [warp, k, rows]."""
    numbers = tl.reshape(numbers, (TIMES, PAIRS, GROUPS, WARPS, 8, 4, 4 // PAIRS, 2))
    return tl.reshape(tl.permute(numbers, (3, 0, 1, 6, 5, 7, 2, 4)), (WARPS, TIMES * 32, GROUPS * 8))


@triton.jit
def pair_of_x(words, PAIR: tl.constexpr, PAIRS: tl.constexpr, PAIRING: tl.constexpr, DTYPE: tl.constexpr):
    """Pair number PAIR of x, DTYPE [R, 4 / PAIRS, 2] or [R, 8 / PAIRS], from words of two 16-bit numbers int32 [R, 4].

    There are PAIRS words of x to a word of codes.
    """
    rows: tl.constexpr = words.shape[0]
    if PAIRS == 2:
        return (words >> (16 * PAIR)).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        even, odd = tl.split(tl.reshape(words, (rows, 2, 2)))
        if PAIRING == "halves":
            return ((odd if PAIR >= 2 else even) >> (16 * (PAIR % 2))).to(tl.int16).to(DTYPE, bitcast=True)
        else:
            first, second = tl.split(odd if PAIR % 2 else even)
            return halves_of(second if PAIR >= 2 else first, DTYPE)


@triton.jit
def product(left, right, sums, INTERPRETED: tl.constexpr):
    """sums + left @ right in fp32. Triton's interpreter multiplies the bits of bf16 numbers."""
    if INTERPRETED and left.dtype == tl.bfloat16:
        left = (left.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        right = (right.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


# -- sums -----------------------------------------------------------------------------------------------------------


@triton.jit
def starts_of_rows(weight, first_row, outputs, spans, slice_spans, place, FORM: tl.constexpr):
    """The payloads of two slices with the weight's row at each of the places, and its first span in the first."""
    payload_ptr, rows_ptr, _, row_stride, _, _, _ = weight
    n = tl.program_id(0) * (8 * FORM.row_groups) + place // (32 * FORM.warps) * 8 + place // 4 % 8
    # Rows beyond the last one repeat it and are not stored.
    start = (first_row + tl.minimum(n, outputs - 1)) * spans
    slice_index = start // slice_spans
    start -= slice_index * slice_spans
    first_ptrs = payload_ptr + row_of(rows_ptr, slice_index, FORM.ordered) * row_stride
    next_slice = tl.minimum(slice_index + 1, ((first_row + outputs) * spans - 1) // slice_spans)
    second_ptrs = payload_ptr + row_of(rows_ptr, next_slice, FORM.ordered) * row_stride
    return first_ptrs, second_ptrs, start


@triton.jit
def starts_of_x(x_ptr, count, columns, each, place, FORM: tl.constexpr):
    """(pointers [R, 4] to words or [R, 8 / PAIRS] to numbers of x's first span, the row of y at each of the places)."""
    PAIRS: tl.constexpr = FORM.pairs
    m = rows_from(place // (32 * FORM.warps) % FORM.groups * 8 + place // 4 % 8, count, FORM)
    part = place // (32 * FORM.warps * FORM.groups)  # of the PAIRS * TIMES parts of 16 bytes, if x has 16 bits
    # 64 bits: rows times columns may not fit 32.
    if FORM.words:
        x_ptrs = x_ptr.to(tl.pointer_type(tl.int32)) + (row_of_x(m, each, FORM) * (columns // 2) + 4 * part)
        x_ptrs = tl.multiple_of(x_ptrs, 16)[:, None] + tl.arange(0, 4)[None, :]
    else:
        x_ptrs = x_ptr + (row_of_x(m, each, FORM) * columns + 8 * part)
        # The two numbers of pair 0 in the words of codes that the part is about.
        i = tl.arange(0, 8 // PAIRS)
        between: tl.constexpr = PAIRS if FORM.pairing == "halves" else 1
        x_ptrs = x_ptrs[:, None] + (i // 2 * (2 * PAIRS) + i % 2 * between)[None, :]
    return x_ptrs, m


@triton.jit
def sums_of_spans(x_ptr, weight, lookup_ptr, sizes, DTYPE: tl.constexpr, CLAMP: tl.constexpr, FORM: tl.constexpr):
    """A program's sums by warp, fp32 [WARPS, 8 * ROW_GROUPS, 8 * GROUPS], and the bits of the largest scale it met."""
    _, _, slice_numel, _, codes_start, group_start, offset_start = weight
    count, outputs, columns, first_row, each = sizes
    parts = (codes_start, group_start, offset_start)
    element: tl.constexpr = FORM.element
    scale: tl.constexpr = FORM.scale
    PAIRING: tl.constexpr = FORM.pairing
    TIMES: tl.constexpr = FORM.times
    PAIRS: tl.constexpr = FORM.pairs
    WARPS: tl.constexpr = FORM.warps
    ROW_GROUPS: tl.constexpr = FORM.row_groups
    GROUPS: tl.constexpr = FORM.groups
    span_numbers: tl.constexpr = TIMES * 8 * PAIRS
    spans = columns // span_numbers
    slice_spans = slice_numel // span_numbers
    place = tl.arange(0, ROW_GROUPS * WARPS * 32)
    own_span = place // 32 % WARPS * 4 + place % 4
    first_ptrs, second_ptrs, start = starts_of_rows(weight, first_row, outputs, spans, slice_spans, place, FORM)
    x_place = tl.arange(0, TIMES * PAIRS * GROUPS * WARPS * 32)
    x_span = x_place // 32 % WARPS * 4 + x_place % 4
    x_ptrs, m = starts_of_x(x_ptr, count, columns, each, x_place, FORM)
    sums = tl.zeros((WARPS, 8 * ROW_GROUPS, 8 * GROUPS), tl.float32)
    largest = tl.zeros((ROW_GROUPS * WARPS * 32,), tl.int32)
    words, a, b, c = load_spans(first_ptrs, second_ptrs, start, own_span, spans, slice_spans, parts, FORM)
    for first in tl.range(0, spans, 4 * WARPS, num_stages=1):
        next_words, next_a, next_b, next_c = load_spans(
            first_ptrs, second_ptrs, start, own_span + (first + 4 * WARPS), spans, slice_spans, parts, FORM
        )
        scales = scales_of(a, b, c, lookup_ptr, scale)
        x_mask = ((m < count) & (x_span + first < spans))[:, None]
        x_offset = ((x_span + first) * span_numbers)[:, None]
        if FORM.words:
            x_words = tl.load(x_ptrs + x_offset // 2, mask=x_mask, other=0)
        if FORM.ptx:
            p0, p1, p2, p3 = words_of_pairs_with_ptx(words, scales, TIMES, element, CLAMP)
            largest = tl.maximum(largest, in_fp32(scales).to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        for pair in tl.static_range(PAIRS):
            if FORM.ptx:
                left = halves_of(p0 if pair == 0 else (p1 if pair == 1 else (p2 if pair == 2 else p3)), DTYPE)
            else:
                times_scales = repeated(in_fp32(scales), TIMES)
                left = pair_of_words(
                    words, times_scales, lookup_ptr, pair, PAIRING, element, DTYPE, FORM.limit, FORM.interpreted
                )
            if FORM.words:
                right = pair_of_x(x_words, pair, PAIRS, PAIRING, DTYPE)
            else:
                x_pair = x_offset + (pair if PAIRING == "halves" else 2 * pair)
                right = tl.load(x_ptrs + x_pair, mask=x_mask, other=0.0)
            sums = product(
                as_left(settled(left, FORM.settle), WARPS, ROW_GROUPS, TIMES),
                as_right(settled(right, FORM.settle), WARPS, GROUPS, TIMES, PAIRS),
                sums,
                FORM.interpreted,
            )
        words, a, b, c = next_words, next_a, next_b, next_c
    return sums, largest


@triton.jit
def sums_of_bytes(x_ptr, weight, lookup_ptr, sizes, DTYPE: tl.constexpr, FORM: tl.constexpr):
    """`sums_of_spans` for any block size and slices shorter than a row: each byte finds its slice and its scale."""
    count, outputs, columns, first_row, each = sizes
    _, _, slice_numel, _, _, _, _ = weight
    element: tl.constexpr = FORM.element
    PAIRS: tl.constexpr = FORM.pairs
    WARPS: tl.constexpr = FORM.warps
    ROW_GROUPS: tl.constexpr = FORM.row_groups
    GROUPS: tl.constexpr = FORM.groups
    byte_numbers: tl.constexpr = PAIRS // 2
    row_bytes = columns // byte_numbers
    slice_bytes = slice_numel // byte_numbers
    place = tl.arange(0, ROW_GROUPS * WARPS * 32)
    byte = (place // 32 % WARPS * 4 + place % 4) * 16
    byte = byte[:, None] + 2 * tl.arange(0, 8)[None, :]
    n = tl.program_id(0) * (8 * ROW_GROUPS) + place // (32 * WARPS) * 8 + place // 4 % 8
    n = (first_row + tl.minimum(n, outputs - 1))[:, None]

    x_place = tl.arange(0, PAIRS * GROUPS * WARPS * 32)
    m = rows_from(x_place // (32 * WARPS) % GROUPS * 8 + x_place // 4 % 8, count, FORM)[:, None]
    x_byte = (x_place // 32 % WARPS * 4 + x_place % 4) * 16 + x_place // (32 * WARPS * GROUPS) * (16 // PAIRS)
    x_byte = x_byte[:, None] + 2 * tl.arange(0, 8 // PAIRS)[None, :]
    x_ptrs = x_ptr + row_of_x(m, each, FORM) * columns

    sums = tl.zeros((WARPS, 8 * ROW_GROUPS, 8 * GROUPS), tl.float32)
    for first in tl.range(0, row_bytes, 64 * WARPS, num_stages=1):
        for odd in tl.static_range(2):
            codes, scales = load_byte(weight, lookup_ptr, n, byte + (first + odd), row_bytes, slice_bytes, FORM)
            for nibble in tl.static_range(byte_numbers):
                left = numbers_of_codes(
                    codes >> (4 * nibble), scales, lookup_ptr, element, DTYPE, FORM.limit, FORM.interpreted
                )
                k = (x_byte + (first + odd)) * byte_numbers + nibble
                right = tl.load(x_ptrs + k, mask=(m < count) & (k < columns), other=0.0)
                left = as_left(left, WARPS, ROW_GROUPS, 1)
                sums = product(left, as_right(right, WARPS, GROUPS, 1, PAIRS), sums, FORM.interpreted)
    return sums


@triton.jit
def sums_of_lora(lora, sizes, FORM: tl.constexpr):
    """scaling * (x A^T) B^T as sums by warp, fp32 [WARPS, 8 * ROW_GROUPS, 8 * GROUPS]; a warp takes 16 ranks a step."""
    reduced_ptr, lora_B_ptr, scaling, rank = lora
    count, outputs, _, _, _ = sizes
    WARPS: tl.constexpr = FORM.warps
    STEPS: tl.constexpr = FORM.rank_steps
    warp = tl.arange(0, WARPS)[:, None, None]
    n = tl.program_id(0) * (8 * FORM.row_groups) + tl.arange(0, 8 * FORM.row_groups)[None, :, None]
    m = tl.program_id(1) * (8 * FORM.groups) + tl.arange(0, 8 * FORM.groups)[None, None, :]
    sums = tl.zeros((WARPS, 8 * FORM.row_groups, 8 * FORM.groups), tl.float32)
    for step in tl.static_range(STEPS):
        first = (step * WARPS + warp) * 16
        left, right = first + tl.arange(0, 16)[None, None, :], first + tl.arange(0, 16)[None, :, None]
        lora_B = tl.load(lora_B_ptr + (n.to(tl.int64) * rank + left), (n < outputs) & (left < rank), other=0.0)
        reduced = tl.load(reduced_ptr + (m.to(tl.int64) * rank + right), (m < count) & (right < rank), other=0.0)
        sums = product(lora_B, reduced, sums, FORM.interpreted)
    return sums * scaling


# Compiled once a format and launch, not once a shape: what Triton would find out from sizes is said in the kernel.
@Kernel
@triton.jit(
    do_not_specialize=[
        "rank",
        "count",
        "outputs",
        "columns",
        "slice_numel",
        "row_stride",
        "codes_start",
        "group_start",
        "offset_start",
    ]
)
def quantized_linear_kernel(
    x_ptr,
    beside_ptr,
    out_ptr,
    payload_ptr,
    rows_ptr,
    lookup_ptr,
    bias_ptr,
    lora_B_ptr,
    scaling,
    rank,
    count,
    outputs,
    columns,
    slice_numel,
    row_stride,
    codes_start,
    group_start,
    offset_start,
    FORM: tl.constexpr,
):
    """One program: 8 * row_groups outputs of 8 * groups rows of x, of a stack of one row.

    `beside_ptr`: x A^T of LoRA; of a stack int32 [count], the matrix of each row of y, `rank` of which go through a row
    of x.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = (payload_ptr, rows_ptr, slice_numel, row_stride, codes_start, group_start, offset_start)
    if FORM.stacked:
        first_row = tl.load(beside_ptr + tl.program_id(1)) * outputs
    else:
        first_row = 0
    sizes = (count, outputs, columns, first_row, rank)
    if FORM.times == 0:
        sums = sums_of_bytes(x_ptr, weight, lookup_ptr, sizes, dtype, FORM)
    else:
        sums, largest = sums_of_spans(x_ptr, weight, lookup_ptr, sizes, dtype, False, FORM)
        if FORM.ptx:
            overflow = tl.max(largest, axis=0) > SAFE_SCALE
            # A clamp would take an instruction per code, of three. Instead the sums are made again, with it, where a
            # scale is above 2^120 or NaN.
            if overflow:
                sums, largest = sums_of_spans(x_ptr, weight, lookup_ptr, sizes, dtype, True, FORM)
    if FORM.rank_steps:
        sums += sums_of_lora((beside_ptr, lora_B_ptr, scaling, rank), sizes, FORM)
    y = tl.sum(sums, axis=0)
    n = tl.program_id(0) * (8 * FORM.row_groups) + tl.arange(0, 8 * FORM.row_groups)
    m = rows_from(tl.arange(0, 8 * FORM.groups), count, FORM)
    if FORM.biased:
        y += in_fp32(tl.load(bias_ptr + n, mask=n < outputs, other=0.0))[:, None].to(tl.float32)
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * outputs + n[:, None]
    tl.store(out_ptrs, narrowed(y, dtype, FORM.interpreted), mask=(n < outputs)[:, None] & (m < count)[None, :])
