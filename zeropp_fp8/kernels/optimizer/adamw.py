"""AdamW on quantities in any format: decode, update, encode, write the weights, in one pass over 13 bytes per element.

    g = gradient * grad_scale (+ l2 * p)
    m = m + (g - m) rest1,   v = v beta2 + g g rest2
    p = p keep - m / (sqrt(v) root_factor + eps) * step_size
    m, v, p -> codes and scales,   weight = decoded p

(gradient FP8 1 + master FP16 2 + 2 + first moment FP8 1 + 1 + second moment FP16 2 + 2 + weight bf16 2 = 13 bytes.)
State and FP8 gradients are flat buffers in which a segment (a tensor) starts at a multiple of TILE elements. Program i
works on tile i of them, without masks. Gradients and weights that are tensors are found in a table of places.

With scales per block one launch does it all. For scales per tensor a first launch works out the largest magnitudes, and
the second repeats the update and encodes. The reference is optim/adamw.py: scales and codes are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, fp8_codes, narrowed, numbers_of
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.mx_elements import NAN_SCALE, mx_scale_values, power_of_two
from zeropp_fp8.kernels.optimizer.encode_blocks import TILE, largest_bits, scale_bytes

# 8 elements per thread: 16 bytes of 16-bit numbers and 8 of FP8 codes, so that all accesses are shared out alike and
# nothing has to be exchanged between threads.
NUM_WARPS = 4
# The root of the second moment is taken of a number within these bounds; 2^-50 adds no more to an eps of 1e-8 than its
# last bit.
SMALLEST_SQUARE = 2.0**-100
LARGEST_SQUARE = (2 - 2.0**-23) * 2.0**127
CONSTANTS = ("keep", "l2", "rest1", "beta2", "rest2", "step_size", "root_factor", "eps")  # as the kernel takes them

TILE_ = tl.constexpr(TILE)
SMALLEST_SQUARE = tl.constexpr(SMALLEST_SQUARE)
LARGEST_SQUARE = tl.constexpr(LARGEST_SQUARE)
QUANTITIES = tl.constexpr(3)  # columns of the table of a segment's largest magnitudes


@dataclass(frozen=True)
class Form:
    """The compile-time constants of a step, which the kernel and its parts take whole.

    Attributes:
        grad, grad_block: "tensors", or the element of FP8 codes and how many of them share a scale (0: a segment).
        master, exp_avg, exp_avg_sq: what each is stored as, "fp32", "bf16", "fp16", "fp8_e4m3" or "fp8_e5m2".
        aligned_grads, aligned_weights: see `Places`.
        per_block: a scale per row of a tile, not a segment.
        l2: whether weight decay is part of the gradient.
        native_fp8, fast: whether the device has instructions for FP8, and approximations to start from.
        rows, width: of a tile.
    """

    grad: str
    grad_block: int
    master: str
    exp_avg: str
    exp_avg_sq: str
    aligned_grads: bool
    aligned_weights: bool
    per_block: bool
    l2: bool
    native_fp8: bool
    fast: bool
    interpreted: bool
    rows: int
    width: int


@triton.jit
def row_scales(scales_ptr, tile, segment, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """int32 [ROWS]: the bytes of a tile's rows, one per block, or the segment's."""
    if PER_BLOCK:
        out = tl.load(scales_ptr + tile * ROWS + tl.arange(0, ROWS)).to(tl.int32)
    else:
        out = tl.load(scales_ptr + segment + tl.zeros((ROWS,), tl.int32)).to(tl.int32)
    return out


@triton.jit
def load_quantity(pointers, tile, segment, local, STORAGE: tl.constexpr, FORM: tl.constexpr):
    """fp32 [rows, width] of a tile; `pointers`: codes, scales before the step, and after it."""
    codes_ptr, scales_ptr, _ = pointers
    ROWS: tl.constexpr = FORM.rows
    codes = tl.load(codes_ptr + tile * TILE_ + local)
    if STORAGE == "fp8_e4m3" or STORAGE == "fp8_e5m2":
        numbers = numbers_of(codes, STORAGE, FORM.native_fp8, ROWS, FORM.width)
    else:
        numbers = codes.to(tl.float32)
    if STORAGE != "fp32" and STORAGE != "bf16":
        scales = row_scales(scales_ptr, tile, segment, FORM.per_block, ROWS)
        numbers = numbers * mx_scale_values(scales)[:, None]
    return numbers


@triton.jit
def square_root(v, FAST: tl.constexpr):
    """sqrt of v kept within [2^-100, largest fp32], correctly rounded; NaN stays NaN.

    `sqrt.rn` has a branch an element for numbers beyond these bounds. FAST: its other side alone.
    """
    x = tl.maximum(v, SMALLEST_SQUARE, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, LARGEST_SQUARE, propagate_nan=tl.PropagateNan.ALL)
    if FAST:
        r = tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        root = x * r
        # Times -1, which becomes a sign of the fused operation: Triton negates as 0 - x.
        root = tl.fma(tl.fma(root * -1.0, root, x), r * 0.5, root)
    else:
        root = tl.sqrt_rn(x)
    return root


@triton.jit
def quotient(m, denominator, FAST: tl.constexpr):
    """m / denominator, correctly rounded, NaN where m is Inf; the denominator within [2^-50, 2^80] or NaN.

    `div.rn` checks each pair and has a branch for those at the ends of the range. FAST: without; quotients that are
    fp32 subnormals may then be one bit off.
    """
    if FAST:
        r = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [denominator], tl.float32, is_pure=True, pack=1
        )
        minus = denominator * -1.0
        r = tl.fma(tl.fma(minus, r, 1.0), r, r)
        q = m * r
        q = tl.fma(tl.fma(minus, q, m), r, q)
        q = tl.fma(tl.fma(minus, q, m), r, q)
    else:
        q = tl.div_rn(m, denominator)
        q = tl.where(tl.abs(m) < float("inf"), q, float("nan"))
    return q


@triton.jit
def codes_of(scaled, COLUMN: tl.constexpr, STORAGE: tl.constexpr, FORM: tl.constexpr):
    """Codes of scaled numbers, and what they stand for before scaling; of FP8 moments only the codes are needed."""
    if STORAGE == "fp16":
        codes = scaled.to(tl.float16)
        out = codes.to(tl.float32)
    else:
        # Nothing has to be clamped: amax <= X * largest.
        # Master weights are stored and decoded: by integer operations, see `fp8_codes`.
        native: tl.constexpr = FORM.native_fp8 and COLUMN != 0
        codes = fp8_codes(scaled, STORAGE == "fp8_e4m3", native)
        out = scaled
        if COLUMN == 0:
            out = numbers_of(codes, STORAGE, False, FORM.rows, FORM.width)
    return codes, out


@triton.jit
def store_quantity(x, pointers, amax_ptr, place, COLUMN: tl.constexpr, STORAGE: tl.constexpr, FORM: tl.constexpr):
    """Encode fp32 [rows, width] of a tile; returns the numbers that its codes stand for.

    `place`: tile, segment, elements of the segment in earlier tiles, places in the tile. Only a segment's first tile
    writes a scale per tensor.
    """
    tile, segment, before, local = place
    codes_ptr, _, scales_ptr = pointers
    ROWS: tl.constexpr = FORM.rows
    if STORAGE == "fp32" or STORAGE == "bf16":
        if STORAGE == "bf16":
            codes = narrowed(x, tl.bfloat16, FORM.interpreted)
        else:
            codes = x
        tl.store(codes_ptr + tile * TILE_ + local, codes)
        out = codes.to(tl.float32)
    else:
        if FORM.per_block:
            amax = largest_bits(x)
        else:
            amax = tl.load(amax_ptr + segment * QUANTITIES + COLUMN + tl.zeros((ROWS,), tl.int32))
        scales = scale_bytes(amax, STORAGE)
        codes, out = codes_of(x * power_of_two(254 - scales)[:, None], COLUMN, STORAGE, FORM)
        # What the codes of a NaN scale are does not matter.
        scales = tl.where(amax >= EXPONENT_OF_INF, NAN_SCALE, scales)
        tl.store(codes_ptr + tile * TILE_ + local, codes)
        rows = tl.arange(0, ROWS)
        if FORM.per_block:
            tl.store(scales_ptr + tile * ROWS + rows, scales.to(tl.uint8))
        else:
            tl.store(scales_ptr + segment + rows, scales.to(tl.uint8), mask=rows + before == 0)
        if COLUMN == 0:
            out = out * mx_scale_values(scales)[:, None]
    return out


@triton.jit
def record_magnitudes(x, amax_ptr, segment, COLUMN: tl.constexpr, STORAGE: tl.constexpr):
    """Raise a segment's largest magnitude to the tile's; in any order of programs the same."""
    if STORAGE != "fp32" and STORAGE != "bf16":
        place = amax_ptr + segment * QUANTITIES + COLUMN
        bits = tl.max(largest_bits(x), axis=0)
        # Few tiles raise what is already there. The others need no atomic operation, for which all would queue up.
        tl.atomic_max(place, bits, mask=bits > tl.load(place), sem="relaxed")


@triton.jit
def load_gradient(grads, tile, segment, local, left, WHOLE: tl.constexpr, FORM: tl.constexpr):
    """fp32 [rows, width] of a tile, scaled; `grads`: its first element, scales, and the scale of all gradients."""
    grads_ptr, scales_ptr, grad_scale_ptr = grads
    GRAD: tl.constexpr = FORM.grad
    if GRAD == "tensors":
        if WHOLE:
            g = tl.load(grads_ptr + local).to(tl.float32)
        else:
            g = tl.load(grads_ptr + local, mask=local < left, other=0.0).to(tl.float32)
    else:
        g = numbers_of(tl.load(grads_ptr + local), GRAD, FORM.native_fp8, FORM.rows, FORM.width)
        if FORM.grad_block == 0:
            g = g * tl.load(scales_ptr + segment)
        elif FORM.grad_block == FORM.width:
            scales = tl.load(scales_ptr + tile * FORM.rows + tl.arange(0, FORM.rows)).to(tl.int32)
            g = g * mx_scale_values(scales)[:, None]
        else:
            blocks = tl.load(scales_ptr + tile * (TILE_ // FORM.grad_block) + local // FORM.grad_block).to(tl.int32)
            g = g * mx_scale_values(blocks)
    return g * tl.load(grad_scale_ptr)


@triton.jit
def updated(p, m, v, g, constants, FORM: tl.constexpr):
    """optim/adamw.py `update`."""
    keep, l2, rest1, beta2, rest2, step_size, root_factor, eps = constants
    if FORM.l2:
        g = g + p * l2
    m = m + (g - m) * rest1
    v = v * beta2 + (g * g) * rest2
    denominator = square_root(v, FORM.fast) * root_factor + eps
    p = p * keep - quotient(m, denominator, FORM.fast) * step_size
    return p, m, v


@triton.jit
def store_weights(weights_ptr, numbers, local, left, WHOLE: tl.constexpr, FORM: tl.constexpr):
    """The model's weights of a tile, rounded to their dtype."""
    dtype: tl.constexpr = weights_ptr.dtype.element_ty
    if dtype == tl.float32:
        weights = numbers
    else:
        weights = narrowed(numbers, dtype, FORM.interpreted)
    if WHOLE:
        tl.store(weights_ptr + local, weights)
    else:
        tl.store(weights_ptr + local, weights, mask=local < left)


@triton.jit
def step_tile(grads, weights_ptr, quantities, amax_ptr, place, constants, PASS: tl.constexpr, WHOLE: tl.constexpr, FORM: tl.constexpr):  # fmt: skip  # noqa: E501
    """Pass "only" or "second": update and store; "first": update and record the magnitudes.

    Gradients and weights are given at the tile's first element, the three quantities as `load_quantity` takes them.
    """
    tile, segment, before, left = place
    master, exp_avg, exp_avg_sq = quantities
    MASTER: tl.constexpr = FORM.master
    EXP_AVG: tl.constexpr = FORM.exp_avg
    EXP_AVG_SQ: tl.constexpr = FORM.exp_avg_sq
    local = tl.arange(0, FORM.rows)[:, None] * FORM.width + tl.arange(0, FORM.width)[None, :]
    g = load_gradient(grads, tile, segment, local, left, WHOLE, FORM)
    p = load_quantity(master, tile, segment, local, MASTER, FORM)
    m = load_quantity(exp_avg, tile, segment, local, EXP_AVG, FORM)
    v = load_quantity(exp_avg_sq, tile, segment, local, EXP_AVG_SQ, FORM)
    p, m, v = updated(p, m, v, g, constants, FORM)
    if not WHOLE:
        # The padding must not reach the magnitudes: with eps = 0 it is 0 / 0, and what FP8 gradients hold there is
        # anything.
        inside = local < left
        p, m, v = tl.where(inside, p, 0.0), tl.where(inside, m, 0.0), tl.where(inside, v, 0.0)
    if PASS == "first":
        record_magnitudes(p, amax_ptr, segment, 0, MASTER)
        record_magnitudes(m, amax_ptr, segment, 1, EXP_AVG)
        record_magnitudes(v, amax_ptr, segment, 2, EXP_AVG_SQ)
    else:
        store_place = (tile, segment, before, local)
        store_quantity(m, exp_avg, amax_ptr, store_place, 1, EXP_AVG, FORM)
        store_quantity(v, exp_avg_sq, amax_ptr, store_place, 2, EXP_AVG_SQ, FORM)
        rounded = store_quantity(p, master, amax_ptr, store_place, 0, MASTER, FORM)
        store_weights(weights_ptr, rounded, local, left, WHOLE, FORM)


@triton.jit
def tensor_at(first_ptr, place_ptr, ALIGNED: tl.constexpr):
    """Where a tensor of its own starts; `place_ptr`: its place from the first of them."""
    place = tl.load(place_ptr)
    if ALIGNED:
        place = tl.multiple_of(place, 16 // (first_ptr.dtype.element_ty.primitive_bitwidth // 8))
    return first_ptr + place


@Kernel
@triton.jit
def adamw_kernel(
    grads_ptr,
    grad_scales_ptr,
    weights_ptr,
    master_ptr,
    master_in_ptr,
    master_out_ptr,
    exp_avg_ptr,
    exp_avg_in_ptr,
    exp_avg_out_ptr,
    exp_avg_sq_ptr,
    exp_avg_sq_in_ptr,
    exp_avg_sq_out_ptr,
    tile_segments_ptr,
    table_ptr,
    places_ptr,
    amax_ptr,
    grad_scale_ptr,
    keep,
    l2,
    rest1,
    beta2,
    rest2,
    step_size,
    root_factor,
    eps,
    PASS: tl.constexpr,
    FORM: tl.constexpr,
):
    """One program: one tile."""
    tile = tl.program_id(0).to(tl.int64)
    segment = tl.load(tile_segments_ptr + tile).to(tl.int64)
    before = tile * TILE_ - tl.multiple_of(tl.load(table_ptr + 2 * segment), TILE_)
    left = tl.minimum(tl.load(table_ptr + 2 * segment + 1) - before, TILE_).to(tl.int32)
    if FORM.grad == "tensors":
        grads_ptr = tensor_at(grads_ptr, places_ptr + 2 * segment, FORM.aligned_grads) + before
    else:
        grads_ptr += tile * TILE_
    weights_ptr = tensor_at(weights_ptr, places_ptr + 2 * segment + 1, FORM.aligned_weights) + before
    grads = (grads_ptr, grad_scales_ptr, grad_scale_ptr)
    master = (master_ptr, master_in_ptr, master_out_ptr)
    exp_avg = (exp_avg_ptr, exp_avg_in_ptr, exp_avg_out_ptr)
    exp_avg_sq = (exp_avg_sq_ptr, exp_avg_sq_in_ptr, exp_avg_sq_out_ptr)
    quantities = (master, exp_avg, exp_avg_sq)
    place = (tile, segment, before, left)
    constants = (keep, l2, rest1, beta2, rest2, step_size, root_factor, eps)
    # The body is compiled twice, so that a whole tile has no masks.
    if left >= TILE_:
        step_tile(grads, weights_ptr, quantities, amax_ptr, place, constants, PASS, True, FORM)
    else:
        step_tile(grads, weights_ptr, quantities, amax_ptr, place, constants, PASS, False, FORM)


@dataclass(frozen=True)
class Places:
    """Where gradients and weights of their own lie: element offsets from the first of them.

    Attributes:
        entries: int64 [segments, 2] on the device: gradient, weight.
        aligned_grads, aligned_weights: whether all start at multiples of 16 bytes.
    """

    entries: Tensor
    aligned_grads: bool
    aligned_weights: bool

    @classmethod
    def of(cls, grads: list[Tensor] | None, weights: list[Tensor], device) -> Places:
        """The places of these tensors, while the tensors lie where they do. `grads`: None where they are codes."""
        columns, aligned = [], []
        for tensors in (weights if grads is None else grads, weights):
            base = first_of(tensors)
            columns.append([(t.data_ptr() - base.data_ptr()) // base.element_size() for t in tensors])
            aligned.append(all(t.numel() == 0 or t.data_ptr() % 16 == 0 for t in tensors))
        entries = torch.tensor(columns, dtype=torch.int64, device="cpu").t().contiguous()
        if torch.device(device).type == "cuda":
            # From pinned memory the copy does not wait for the device; torch keeps the memory until it is done.
            entries = entries.pin_memory().to(device, non_blocking=True)
        return cls(entries, *aligned)


def no_magnitudes(segments: int, device: torch.device) -> Tensor:
    """int32 [segments, QUANTITIES], for the pass "first": the bits of nothing yet."""
    return torch.zeros(segments, QUANTITIES.value, dtype=torch.int32, device=device)


def first_of(tensors: list[Tensor]) -> Tensor:
    """The first tensor that has elements."""
    return next(t for t in tensors if t.numel())
