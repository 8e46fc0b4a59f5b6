"""AdamW on quantities in any format: decode, update, encode, write the weights, in one pass over 13 bytes an element.

    g = gradient * grad_scale (+ l2 * p)
    m = m + (g - m) rest1,   v = v beta2 + g g rest2
    p = p keep - m / (sqrt(v) root_factor + eps) * step_size
    m, v, p -> codes and scales,   weight = decoded p

(gradient FP8 1 + master FP16 2 + 2 + first moment FP8 1 + 1 + second moment FP16 2 + 2 + weight bf16 2 = 13 bytes.)

State and FP8 gradients are flat buffers in which a segment (a tensor) starts at a multiple of TILE elements. Program i
works on tile i: what lies in flat buffers it reads without asking which segment that is, and without masks, for the
padding is there too. Gradients and weights that are tensors of their own are found in a table of places.

With scales per block one launch does it all. A scale per tensor is known only when the whole tensor has been updated: a
first launch works out the largest magnitudes, the second repeats the update and encodes.

The reference is optim/adamw.py; scales and codes are the same, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats.noise import MIX_1, MIX_2
from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, fp8_codes, narrowed, numbers_of
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.mx_elements import NAN_SCALE, mx_scale_values, power_of_two
from zeropp_fp8.kernels.optimizer.encode_blocks import TILE, largest_bits, scale_bytes

# 8 elements a thread: 16 bytes of 16-bit numbers and 8 of FP8 codes, so that all accesses are shared out alike and
# nothing has to be exchanged between threads.
NUM_WARPS = 4
MISSING = -(1 << 62)  # the place of a gradient that is not there: the segment stays as it is
# The root of the second moment is taken of a number within these bounds; 2^-50 adds no more to an eps of 1e-8 than its
# last bit.
SMALLEST_SQUARE = 2.0**-100
LARGEST_SQUARE = (2 - 2.0**-23) * 2.0**127
CONSTANTS = ("keep", "l2", "rest1", "beta2", "rest2", "step_size", "root_factor", "eps")  # as the kernel takes them

MIX_1 = tl.constexpr(MIX_1)
MIX_2 = tl.constexpr(MIX_2)
TILE_ = tl.constexpr(TILE)
MISSING_ = tl.constexpr(MISSING)
SMALLEST_SQUARE = tl.constexpr(SMALLEST_SQUARE)
LARGEST_SQUARE = tl.constexpr(LARGEST_SQUARE)
QUANTITIES = tl.constexpr(3)  # columns of the table of a segment's largest magnitudes


@dataclass(frozen=True)
class Form:
    """The compile-time constants of a step, which the kernel and its parts take whole.

    Attributes:
        grad, grad_block: "tensors", or the element of FP8 codes and how many of them share a scale (0: a segment).
        weights: whether they are written.
        master, exp_avg, exp_avg_sq: what each is stored as, "fp32", "bf16", "fp16", "fp8_e4m3" or "fp8_e5m2".
        master_in_weights: the weights are the master weights.
        some_missing, aligned_grads, aligned_weights: see `Places`.
        per_block: a scale a row of a tile, not a segment.
        grad_scale, l2, stochastic: whether there are these.
        native_fp8, fast: whether the device has instructions for FP8, and approximations to start from.
        rows, width: of a tile.
    """

    grad: str
    grad_block: int
    weights: bool
    master: str
    exp_avg: str
    exp_avg_sq: str
    master_in_weights: bool
    some_missing: bool
    aligned_grads: bool
    aligned_weights: bool
    per_block: bool
    grad_scale: bool
    l2: bool
    stochastic: bool
    native_fp8: bool
    fast: bool
    interpreted: bool
    rows: int
    width: int


@triton.jit
def row_scales(scales_ptr, tile, segment, PER_BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """int32 [ROWS]: the bytes of a tile's rows, one a block, or the segment's."""
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
def with_sign_of(magnitudes, x):
    """`magnitudes` >= 0 with the signs of `x`, also of -0."""
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (magnitudes.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def mix(x):
    """lowbias32 on uint32."""
    x ^= x >> 16
    x *= MIX_1
    x ^= x >> 15
    x *= MIX_2
    return x ^ (x >> 16)


@triton.jit
def uniform(seed, tensor, places):
    """formats/noise.py `uniform` at some places of a tensor: fp32 in [0, 1)."""
    seed_low, seed_high = seed
    low = (seed_low.to(tl.int64) + tensor) & 0x7FFFFFFF
    key = mix(mix(low.to(tl.uint32)) + seed_high.to(tl.uint32))
    number = mix(places.to(tl.uint32) * (mix(key) | 1) + key) >> 8
    return number.to(tl.int32).to(tl.float32) * (2.0**-24)


@triton.jit
def round_stochastically(x, noise, STORAGE: tl.constexpr):
    """optim/state_formats.py `round_stochastically`: fp32 numbers on the grid of codes."""
    bits = x.to(tl.int32, bitcast=True)
    if STORAGE == "fp32":
        rounded = x
    elif STORAGE == "bf16":
        up = ((bits + (noise * 65536.0).to(tl.int32)) & -0x10000).to(tl.float32, bitcast=True)
        rounded = tl.where((bits & 0x7FFFFFFF) < EXPONENT_OF_INF, up, x)
    else:
        mantissa: tl.constexpr = 10 if STORAGE == "fp16" else 3 if STORAGE == "fp8_e4m3" else 2
        min_exponent: tl.constexpr = -6 if STORAGE == "fp8_e4m3" else -14
        exponents = tl.maximum(((bits >> 23) & 0xFF) - 127, min_exponent) - mantissa
        steps = tl.abs(x) * ((127 - exponents) << 23).to(tl.float32, bitcast=True)
        whole = tl.floor(steps)
        whole += tl.where(noise < steps - whole, 1.0, 0.0)
        rounded = with_sign_of(whole * ((127 + exponents) << 23).to(tl.float32, bitcast=True), x)
    return rounded


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
def store_quantity(
    x,
    noise,
    pointers,
    amax_ptr,
    tile,
    segment,
    before,
    local,
    COLUMN: tl.constexpr,
    STORAGE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FORM: tl.constexpr,
):
    """Encode fp32 [rows, width] of a tile; returns the numbers that its codes stand for.

    `before`: elements of the segment in earlier tiles; where there are none, a scale per tensor is written.
    """
    codes_ptr, _, scales_ptr = pointers
    ROWS: tl.constexpr = FORM.rows
    if STORAGE == "fp32" or STORAGE == "bf16":
        rounded = x
        if STOCHASTIC:
            rounded = round_stochastically(x, noise, STORAGE)
        dtype: tl.constexpr = tl.float32 if STORAGE == "fp32" else tl.bfloat16
        if STORAGE == "bf16":
            stored = narrowed(rounded, dtype, FORM.interpreted)
        else:
            stored = rounded
        tl.store(codes_ptr + tile * TILE_ + local, stored)
        out = stored.to(tl.float32)
    else:
        if FORM.per_block:
            amax = largest_bits(x)
        else:
            zeros = tl.zeros((ROWS,), tl.int32)
            amax = tl.load(amax_ptr + segment * QUANTITIES + COLUMN + zeros)
        bad = amax >= EXPONENT_OF_INF
        scales = scale_bytes(amax, STORAGE)
        scaled = x * power_of_two(254 - scales)[:, None]
        # What the codes of a NaN scale are does not matter.
        scales = tl.where(bad, NAN_SCALE, scales)
        if STOCHASTIC:
            scaled = round_stochastically(scaled, noise, STORAGE)
        if STORAGE == "fp16":
            codes = scaled.to(tl.float16)
            out = codes.to(tl.float32)
        else:
            # Nothing has to be clamped: amax <= X * largest.
            # Master weights are stored and decoded: by integer operations, see `fp8_codes`.
            native: tl.constexpr = FORM.native_fp8 and COLUMN != 0
            codes = fp8_codes(scaled, STORAGE == "fp8_e4m3", native)
            out = scaled
            if COLUMN == 0:  # of the moments only the codes are needed
                out = numbers_of(codes, STORAGE, False, ROWS, FORM.width)
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
def step_tile(
    grads_ptr,
    grad_scales_ptr,
    weights_ptr,
    master,
    exp_avg,
    exp_avg_sq,
    amax_ptr,
    grad_scale_ptr,
    place,
    constants,
    seed,
    PASS: tl.constexpr,
    FORM: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Pass "only" or "second": update and store; "first": update and record the magnitudes.

    Gradients and weights are given at the tile's first element, the three quantities as `load_quantity` takes them.
    """
    tile, segment, start, left, number = place
    keep, l2, rest1, beta2, rest2, step_size, root_factor, eps = constants
    GRAD: tl.constexpr = FORM.grad
    MASTER: tl.constexpr = FORM.master
    EXP_AVG: tl.constexpr = FORM.exp_avg
    EXP_AVG_SQ: tl.constexpr = FORM.exp_avg_sq
    local = tl.arange(0, FORM.rows)[:, None] * FORM.width + tl.arange(0, FORM.width)[None, :]
    inside = local < left
    if GRAD == "tensors":
        if WHOLE:
            g = tl.load(grads_ptr + local).to(tl.float32)
        else:
            g = tl.load(grads_ptr + local, mask=inside, other=0.0).to(tl.float32)
    else:
        codes = tl.load(grads_ptr + local)
        g = numbers_of(codes, GRAD, FORM.native_fp8, FORM.rows, FORM.width)
        if FORM.grad_block == 0:
            g = g * tl.load(grad_scales_ptr + segment)
        elif FORM.grad_block == FORM.width:
            scales = tl.load(grad_scales_ptr + tile * FORM.rows + tl.arange(0, FORM.rows)).to(tl.int32)
            g = g * mx_scale_values(scales)[:, None]
        else:
            blocks = tl.load(grad_scales_ptr + tile * (TILE_ // FORM.grad_block) + local // FORM.grad_block).to(
                tl.int32
            )
            g = g * mx_scale_values(blocks)
    if FORM.master_in_weights:
        if WHOLE:
            p = tl.load(weights_ptr + local).to(tl.float32)
        else:
            p = tl.load(weights_ptr + local, mask=inside, other=0.0).to(tl.float32)
    else:
        p = load_quantity(master, tile, segment, local, MASTER, FORM)
    m = load_quantity(exp_avg, tile, segment, local, EXP_AVG, FORM)
    v = load_quantity(exp_avg_sq, tile, segment, local, EXP_AVG_SQ, FORM)

    if FORM.grad_scale:
        g = g * tl.load(grad_scale_ptr)
    if FORM.l2:
        g = g + p * l2
    m = m + (g - m) * rest1
    v = v * beta2 + (g * g) * rest2
    denominator = square_root(v, FORM.fast) * root_factor + eps
    p = p * keep - quotient(m, denominator, FORM.fast) * step_size
    if not WHOLE:
        # The padding must not reach the magnitudes: with eps = 0 it is 0 / 0, and what FP8 gradients hold there is
        # anything.
        p = tl.where(inside, p, 0.0)
        m = tl.where(inside, m, 0.0)
        v = tl.where(inside, v, 0.0)

    if PASS == "first":
        if not FORM.master_in_weights:
            record_magnitudes(p, amax_ptr, segment, 0, MASTER)
        record_magnitudes(m, amax_ptr, segment, 1, EXP_AVG)
        record_magnitudes(v, amax_ptr, segment, 2, EXP_AVG_SQ)
    else:
        before = tile * TILE_ - start
        store_quantity(m, m, exp_avg, amax_ptr, tile, segment, before, local, 1, EXP_AVG, False, FORM)
        store_quantity(v, v, exp_avg_sq, amax_ptr, tile, segment, before, local, 2, EXP_AVG_SQ, False, FORM)
        noise = p
        if FORM.stochastic:
            noise = uniform(seed, number, before.to(tl.int32) + local)
        if FORM.master_in_weights:
            rounded = p
            if FORM.stochastic:
                rounded = round_stochastically(p, noise, MASTER)
        else:
            rounded = store_quantity(
                p, noise, master, amax_ptr, tile, segment, before, local, 0, MASTER, FORM.stochastic, FORM
            )
        if FORM.weights:
            dtype: tl.constexpr = weights_ptr.dtype.element_ty
            if dtype == tl.float32:
                stored = rounded
            else:
                stored = narrowed(rounded, dtype, FORM.interpreted)
            if WHOLE:
                tl.store(weights_ptr + local, stored)
            else:
                tl.store(weights_ptr + local, stored, mask=inside)


# Seeds are random: specializing on "divisible by 16" would compile the kernel twice.
@Kernel
@triton.jit(do_not_specialize=["seed_low", "seed_high"])
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
    seed_low,
    seed_high,
    PASS: tl.constexpr,
    FORM: tl.constexpr,
):
    """One program: one tile."""
    tile = tl.program_id(0).to(tl.int64)
    segment = tl.load(tile_segments_ptr + tile).to(tl.int64)
    start = tl.multiple_of(tl.load(table_ptr + 3 * segment), TILE_)
    numel = tl.load(table_ptr + 3 * segment + 1)
    number = tl.load(table_ptr + 3 * segment + 2)
    offset = tile * TILE_ - start
    left = tl.minimum(numel - offset, TILE_).to(tl.int32)
    if FORM.grad == "tensors":
        grad_place = tl.load(places_ptr + 2 * segment)
        if FORM.some_missing and grad_place == MISSING_:
            return
        if FORM.aligned_grads:
            grad_place = tl.multiple_of(grad_place, 16 // (grads_ptr.dtype.element_ty.primitive_bitwidth // 8))
        grads_ptr += grad_place + offset
    else:
        grads_ptr += tile * TILE_
    if FORM.weights:
        weight_place = tl.load(places_ptr + 2 * segment + 1)
        if FORM.aligned_weights:
            weight_place = tl.multiple_of(weight_place, 16 // (weights_ptr.dtype.element_ty.primitive_bitwidth // 8))
        weights_ptr += weight_place + offset
    master = (master_ptr, master_in_ptr, master_out_ptr)
    exp_avg = (exp_avg_ptr, exp_avg_in_ptr, exp_avg_out_ptr)
    exp_avg_sq = (exp_avg_sq_ptr, exp_avg_sq_in_ptr, exp_avg_sq_out_ptr)
    place = (tile, segment, start, left, number)
    constants = (keep, l2, rest1, beta2, rest2, step_size, root_factor, eps)
    seed = (seed_low, seed_high)
    # The body is compiled twice, so that a whole tile has no masks.
    if left >= TILE_:
        step_tile(
            grads_ptr, grad_scales_ptr, weights_ptr, master, exp_avg, exp_avg_sq, amax_ptr, grad_scale_ptr, place,
            constants, seed, PASS, FORM, True,
        )  # fmt: skip
    else:
        step_tile(
            grads_ptr, grad_scales_ptr, weights_ptr, master, exp_avg, exp_avg_sq, amax_ptr, grad_scale_ptr, place,
            constants, seed, PASS, FORM, False,
        )  # fmt: skip


@dataclass(frozen=True)
class Places:
    """Where gradients and weights of their own lie: element offsets from the first of them.

    Attributes:
        entries: int64 [segments, 2] on the device: gradient (MISSING: none), weight.
        some_missing: whether a gradient is.
        aligned_grads, aligned_weights: whether all start at multiples of 16 bytes.
    """

    entries: Tensor
    some_missing: bool
    aligned_grads: bool
    aligned_weights: bool

    @classmethod
    def of(cls, grads: list[Tensor | None] | None, weights: list[Tensor] | None, count: int, device) -> Places:
        """The places of `count` segments; they hold as long as the tensors lie where they do."""
        columns, aligned = [], []
        for tensors in (grads, weights):
            base = first_of(tensors)
            if base is None:
                columns.append([MISSING] * count)
                aligned.append(True)
                continue
            size = base.element_size()
            columns.append([MISSING if t is None else (t.data_ptr() - base.data_ptr()) // size for t in tensors])
            aligned.append(all(t is None or t.numel() == 0 or t.data_ptr() % 16 == 0 for t in tensors))
        entries = torch.tensor(columns, dtype=torch.int64, device="cpu").t().contiguous()
        if torch.device(device).type == "cuda":
            # From pinned memory the copy does not wait for the device; torch keeps the memory until it is done.
            entries = entries.pin_memory().to(device, non_blocking=True)
        return cls(entries, grads is not None and any(g is None for g in grads), *aligned)


def no_magnitudes(segments: int, device: torch.device) -> Tensor:
    """int32 [segments, QUANTITIES], for the pass "first": the bits of nothing yet."""
    return torch.zeros(segments, QUANTITIES.value, dtype=torch.int32, device=device)


def first_of(tensors: list[Tensor | None] | None) -> Tensor | None:
    """The first tensor that has elements."""
    return next((t for t in tensors or () if t is not None and t.numel()), None)
