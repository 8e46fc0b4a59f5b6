"""Linear layers in FP8 and MX against float64, written-out formulas and each other."""

import contextlib
import copy
import gc
import math
import types
import weakref

import pytest
import torch
from numerics import SMALLEST_SCALE, float8_value, signal_to_noise_db, student_t
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeropp_fp8.compute import casts, convert_linear_layers, restore_linear_layers
from zeropp_fp8.compute import scaling as scaling_module
from zeropp_fp8.compute.gemm import matmul_nt
from zeropp_fp8.compute.linear import GATHERED_OPERAND
from zeropp_fp8.compute.operand import Float8Operand

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
NAMES = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}
MX_NAMES = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
FP8_CASES = [("fp8", s) for s in ("current", "delayed", "per_channel", "block")]
# Scaling by blocks has no GEMM for E5M2.
HYBRID_CASES = [("fp8_hybrid", s) for s in ("current", "delayed", "per_channel")]
MX_CASES = [(name, "mx") for name in MX_NAMES]
CASES = FP8_CASES + HYBRID_CASES + MX_CASES
# One MX format of each way to treat NaN: its own code, Inf kept, a spoiled block.
FEW_CASES = FP8_CASES + HYBRID_CASES[:1] + [("mxfp8_e4m3", "mx"), ("mxfp8_e5m2", "mx"), ("mxfp4", "mx")]
NO_GRADIENTS = pytest.param(
    {"weights": "mxfp4", "activations": "mxfp4", "gradients": "none"}, "mx", id="no gradients-mx"
)
# Signal-to-noise of one operand in MX, dB: the less of normal and Student-t data, with scales rounded down and up.
# Up costs MXFP4 0.6 dB: an amax between 6 and 8 times a power of two leaves half of its few numbers unused.
MX_OPERAND_DB = {
    "mxfp8_e4m3": {"floor": 29.9, "rceil": 31.5},
    "mxfp8_e5m2": {"floor": 25.6, "rceil": 25.6},
    "mxfp6_e2m3": {"floor": 30.0, "rceil": 30.0},
    "mxfp6_e3m2": {"floor": 25.2, "rceil": 25.2},
    "mxfp4": {"floor": 17.7, "rceil": 17.1},
    "mxint8": {"floor": 39.1, "rceil": 39.1},
}


def make_layer(compute_format, scaling, features_in=160, features_out=128, dtype=torch.float32, bias=True, **fields):
    """(an nn.Linear computing in low precision, its scaling, a plain copy of it)."""
    plain = nn.Linear(features_in, features_out, bias=bias, dtype=dtype)
    layer = copy.deepcopy(plain)
    report = convert_linear_layers(
        layer, {"format": compute_format, "scaling": scaling, "min_features": 1, "skip_modules": [], **fields}
    )
    assert report.converted == {"": layer}
    return layer, report.scaling, plain


def features(scaling):
    """(in, out) that a scaling takes; for MX they are no multiples of 32."""
    return {"block": (384, 256), "mx": (200, 104)}.get(scaling, (208, 112))


def draw(data, *shape, seed=0):
    """fp32 numbers: normal, Student-t with 4 degrees of freedom, or normal with one in 1000 a thousand times larger."""
    generator = torch.Generator().manual_seed(seed)
    if data == "student_t":
        return student_t(math.prod(shape), 4, generator).view(shape)
    numbers = torch.randn(shape, generator=generator)
    if data == "outliers":
        numbers.view(-1)[seed % 7 :: 1000] *= 1000
    return numbers


def run(layer, x, grad, x_requires_grad=True):
    """(y, grad of x, of weight, of bias); old gradients are dropped first."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_(x_requires_grad)
    y = layer(x)
    y.backward(grad)
    bias = getattr(layer, "bias", None)
    return y.detach(), x.grad, layer.weight.grad, None if bias is None else bias.grad


def float64_results(layer, x, grad):
    """What `run` gives, by the formulas in float64."""
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    x, grad = x.double(), grad.double()
    x_2d, grad_2d = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    y = (x_2d @ weight.t() + bias).view(grad.shape)
    return y, (grad_2d @ weight).view(x.shape), grad_2d.t() @ x_2d, grad_2d.sum(0)


def equal_results(a, b):
    return all(torch.equal(one, other) for one, other in zip(a, b))


def noise_of_product_db(*operands_db):
    """The signal-to-noise of a product of two operands: their noise powers add."""
    return -10 * math.log10(sum(10 ** (-db / 10) for db in operands_db))


def bounds_db(compute_format, scaling, scale_mode="rceil"):
    """(forward, grad-input, grad-weight): the least signal-to-noise.

    Two operands in E4M3, 31.5 dB each, have 28.5 dB together. A gradient in E5M2 alone has 25.6 dB, and 25.6 with 31.5
    makes 24.6: no code can reach the 25 dB that E4M3 must.
    """
    if scaling == "mx":
        operand = MX_OPERAND_DB[compute_format][scale_mode]
        return (noise_of_product_db(operand, operand) - 0.5,) * 3
    return (27, 25, 24) if compute_format == "fp8" else (27, 24.2, 24)


# -- signal-to-noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute_format, scaling", CASES)
def test_signal_to_noise(compute_format, scaling, dtype):
    """Forward, grad-input, grad-weight against float64; the bias is in high precision."""
    for data in ("normal", "student_t"):
        layer, scales, _ = make_layer(compute_format, scaling, 512, 384, dtype)
        with torch.no_grad():
            layer.weight.copy_(draw(data, 384, 512, seed=1) / 20)
        x = draw(data, 2, 192, 512, seed=2).to(dtype)
        grad = (draw(data, 2, 192, 384, seed=3) * 1e-5).to(dtype)
        expected = float64_results(layer, x, grad)
        passes = [run(layer, x, grad)]
        if scaling == "delayed":  # once more with the scales of the first step
            scales.end_step()
            passes.append(run(layer, x, grad))
        for results in passes:
            assert all(result.dtype == dtype for result in results)
            measured = [signal_to_noise_db(e, r) for e, r in zip(expected, results)]
            for bound, db in zip(bounds_db(compute_format, scaling), measured):
                assert bound <= db < 60, (data, measured)
            assert measured[3] > (100 if dtype == torch.float32 else 45)


@pytest.mark.parametrize("compute_format, scaling", FP8_CASES + [("mxfp8_e4m3", "mx")])
def test_signal_to_noise_with_outliers(compute_format, scaling):
    """E4M3 spans 448 to 2^-6 with full precision: elements a thousand times larger take none from the others."""
    layer, _, _ = make_layer(compute_format, scaling, 512, 384)
    x, grad = draw("outliers", 384, 512, seed=4), draw("outliers", 384, 384, seed=5)
    expected = float64_results(layer, x, grad)
    for bound, e, result in zip(bounds_db("fp8", "current"), expected, run(layer, x, grad)):
        assert signal_to_noise_db(e, result) >= bound


@pytest.mark.parametrize("name", MX_NAMES)
def test_signal_to_noise_with_scales_rounded_down(name):
    layer, _, _ = make_layer(name, "mx", 512, 384, scale_mode="floor")
    x, grad = draw("student_t", 384, 512, seed=2), draw("student_t", 384, 384, seed=3)
    with torch.no_grad():
        layer.weight.copy_(draw("student_t", 384, 512, seed=1))
    results = run(layer, x, grad)
    for bound, e, result in zip(bounds_db(name, "mx", "floor"), float64_results(layer, x, grad), results):
        assert bound <= signal_to_noise_db(e, result) < bound + 3


def test_signal_to_noise_of_mixed_mx_formats():
    """Gradients have the format of the activations where none is named."""
    layer, scales, _ = make_layer({"weights": "mxfp4", "activations": "mxfp6_e3m2"}, "mx", 512, 384)
    assert scales.formats["gradients"] == "mxfp6_e3m2"
    with torch.no_grad():
        layer.weight.copy_(draw("student_t", 384, 512, seed=1))
    x, grad = draw("student_t", 384, 512, seed=2), draw("student_t", 384, 384, seed=3)
    weight_db, other_db = MX_OPERAND_DB["mxfp4"]["rceil"], MX_OPERAND_DB["mxfp6_e3m2"]["rceil"]
    bounds = [noise_of_product_db(weight_db, other_db)] * 2 + [noise_of_product_db(other_db, other_db)]
    for bound, e, result in zip(bounds, float64_results(layer, x, grad), run(layer, x, grad)):
        assert bound - 0.5 <= signal_to_noise_db(e, result) < bound + 2


def rows_db(reference, actual):
    """The least signal-to-noise of a row."""
    return min(signal_to_noise_db(r, a) for r, a in zip(reference, actual))


def test_scales_per_row_and_block_hold_rows_of_very_different_size():
    """Tokens from 1e-4 to 1e4, features too: one scale a tensor rounds the small ones to zero."""
    sizes_of_tokens, sizes_of_features = torch.logspace(-4, 4, 256)[:, None], torch.logspace(4, -4, 256)
    worst = {}
    for scaling in ("current", "per_channel", "block"):
        layer, _, _ = make_layer("fp8", scaling, 256, 256)
        x, grad = draw("normal", 256, 256, seed=1), draw("normal", 256, 256, seed=2)
        nn.init.zeros_(layer.bias)
        y, grad_input, _, _ = run(layer, x * sizes_of_tokens, grad * sizes_of_tokens.flip(0))
        expected = float64_results(layer, x * sizes_of_tokens, grad * sizes_of_tokens.flip(0))
        sizes_of_weights = sizes_of_features.flip(0)[:, None] * sizes_of_features
        grad_weight = run(layer, x * sizes_of_features, grad * sizes_of_features.flip(0))[2] / sizes_of_weights
        expected_weight = grad.double().t() @ x.double()
        worst[scaling] = [
            rows_db(expected[0], y),
            rows_db(expected[1], grad_input),
            rows_db(expected_weight, grad_weight),
            rows_db(expected_weight.t(), grad_weight.t()),
        ]
    assert max(worst["current"]) < 1  # nothing is left of a row
    assert min(worst["per_channel"]) > 25
    assert min(worst["block"]) > 25


# -- the GEMM --------------------------------------------------------------------------------------------------------


def decoded(operand: Float8Operand) -> torch.Tensor:
    """float64 [rows, K], value = code * scale, from the tables of the formats and each element's own scale."""
    values = torch.tensor([float8_value(code, NAMES[operand.dtype]) for code in range(256)], dtype=torch.float64)
    rows, summed = operand.shape
    row, k = torch.arange(rows)[:, None], torch.arange(summed)[None]
    scale = {
        "tensor": lambda: operand.scale[0],
        "row": lambda: operand.scale[row, 0],
        "block": lambda: operand.scale[row, k // 128],
        "tile": lambda: operand.scale[row // 128, k // 128],
    }[operand.granularity]()
    return values[operand.codes.view(torch.uint8)[:, :summed].int()] * scale.double()


CASTS = {
    "tensor": (casts.cast_per_tensor, casts.cast_per_tensor),
    "row": (casts.cast_per_row, casts.cast_per_row),
    "block": (casts.cast_blocks, casts.cast_blocks),
    "block and tile": (casts.cast_blocks, casts.cast_tiles),
}


@pytest.mark.parametrize("dtype_a", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", list(CASTS))
def test_emulated_gemm_is_the_formula(granularity, dtype_a):
    """out[m, n] = sum_k a[m, k] b[n, k] + bias[n], to the error bound of a sum of K products in fp32."""
    cast_a, cast_b = CASTS[granularity]
    for m, n, k in ((1, 1, 1), (3, 5, 40), (130, 140, 300)):
        a = cast_a(draw("student_t", m, k, seed=1), dtype_a)[0]
        b = cast_b(draw("student_t", n, k, seed=2), E4M3)[0]
        a_values, b_values = decoded(a), decoded(b)
        bias = draw("normal", n, seed=3)
        expected = a_values @ b_values.t() + bias.double()
        out = matmul_nt(a, b, torch.float32, bias)
        bound = (k + 4) * 2.0**-24 * (a_values.abs() @ b_values.abs().t() + bias.double().abs())
        assert out.shape == (m, n) and out.dtype == torch.float32
        assert ((out.double() - expected).abs() <= bound).all()
        half = matmul_nt(a, b, torch.bfloat16)
        assert half.dtype == torch.bfloat16
        expected -= bias.double()
        assert ((half.double() - expected).abs() <= bound + 2.0**-8 * expected.abs()).all()


def fp8_rounded(values, amax, dtype=E4M3):
    """float64 values after rounding to FP8 with the scale of an amax; beyond it they saturate."""
    scale = torch.tensor(max(amax / LARGEST[dtype], SMALLEST_SCALE) if amax else 1.0, dtype=torch.float32)
    inverse = 1 / scale
    codes = (values.detach().float() * inverse).clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    return codes.double() * scale.double()


def amax_of(values):
    return float(values.detach().abs().max())


# (rows, columns) of [R, K] that share a scale, K being summed over: (activations and gradients, weights)
GROUPS = {
    "current": ((10**6, 10**6), (10**6, 10**6)),
    "per_channel": ((1, 10**6), (1, 10**6)),
    "block": ((1, 128), (128, 128)),
}


def rounded_in_groups(matrix, group, dtype):
    """float64 [R, K]: each group of values rounded with its own amax."""
    rounded = [
        torch.cat([fp8_rounded(part, amax_of(part), dtype) for part in rows.split(group[1], dim=1)], dim=1)
        for rows in matrix.detach().split(group[0])
    ]
    return torch.cat(rounded)


@pytest.mark.parametrize("compute_format, scaling", [c for c in FP8_CASES + HYBRID_CASES if c[1] != "delayed"])
def test_what_shares_a_scale(compute_format, scaling):
    """The three GEMMs of operands whose groups are rounded one by one."""
    layer, _, _ = make_layer(compute_format, scaling, 384, 256)
    x, grad = draw("student_t", 200, 384, seed=1), draw("student_t", 200, 256, seed=2)
    weight, bias = layer.weight.detach(), layer.bias.detach().double()
    data, of_weights = GROUPS[scaling]
    grad_dtype = E5M2 if compute_format == "fp8_hybrid" else E4M3
    y, grad_input, grad_weight, _ = run(layer, x, grad)
    expected = [
        rounded_in_groups(x, data, E4M3) @ rounded_in_groups(weight, of_weights, E4M3).t() + bias,
        rounded_in_groups(grad, data, grad_dtype) @ rounded_in_groups(weight.t(), of_weights, E4M3).t(),
        rounded_in_groups(grad.t(), data, grad_dtype) @ rounded_in_groups(x.t(), data, E4M3).t(),
    ]
    for e, actual in zip(expected, (y, grad_input, grad_weight)):
        assert signal_to_noise_db(e, actual) > 120


def test_emulated_gemm_is_exact_where_fp32_is():
    """Small integers and scales that are powers of two: every sum is exact, in any order."""
    for cast_a, cast_b in CASTS.values():
        whole = torch.randint(-8, 9, (40, 256), generator=torch.Generator().manual_seed(0)).float()
        whole[:, ::128], whole[0] = 7.0, 7.0  # with an amax of 7, 448 = 7 * 64 gives each group a scale of 1/64
        whole.clamp_(-7, 7)
        a, b = cast_a(whole, E4M3)[0], cast_b(whole.flip(1), E4M3)[0]
        if cast_a is not casts.cast_per_row:
            assert (a.scale == 2.0**-6).all()
        assert torch.equal(matmul_nt(a, b, torch.float32).double(), decoded(a) @ decoded(b).t())


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_torch_scaled_mm_agrees_with_the_emulation(granularity):
    """torch's own FP8 GEMM, which the GPU path calls with the same arguments."""
    cast = CASTS[granularity][0]
    a, b = cast(draw("normal", 48, 200, seed=1), E4M3)[0], cast(draw("normal", 64, 200, seed=2), E4M3)[0]
    scale_b = b.scale.t() if granularity == "row" else b.scale
    try:
        out = torch._scaled_mm(a.codes, b.codes.t(), a.scale, scale_b, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has no such FP8 GEMM on the CPU: {error}")
    torch.testing.assert_close(matmul_nt(a, b, torch.float32), out, rtol=1e-5, atol=1e-4)


# -- MX: which axis --------------------------------------------------------------------------------------------------

# exponent of the smallest normal number, mantissa bits, largest number
MX_ELEMENTS = {"mxfp8_e4m3": (-6, 3, 448.0), "mxfp4": (0, 1, 6.0), "mxfp6_e3m2": (-2, 2, 28.0)}


def mx_reference(matrix, name, axis):
    """float64: blocks of 32 along an axis; X the smallest power of two with amax <= X * largest, P to nearest even."""
    min_exponent, mantissa_bits, largest = MX_ELEMENTS[name]
    rows = matrix.detach().double().movedim(axis, -1)
    rounded = torch.zeros_like(rows)
    for start in range(0, rows.shape[-1], 32):
        block = rows[..., start : start + 32]
        amax = block.abs().amax(dim=-1, keepdim=True)
        scale = torch.where(amax > 0, 2.0 ** torch.ceil(torch.log2(amax / largest)), 1.0)
        scaled = block / scale
        exponent = torch.floor(torch.log2(scaled.abs().clamp_min(2.0**min_exponent)))
        step = 2.0 ** (exponent - mantissa_bits)
        rounded[..., start : start + 32] = torch.round(scaled / step) * step * scale
    return rounded.movedim(-1, axis)


@pytest.mark.parametrize("weights, activations", [("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp4", "mxfp6_e3m2")])
def test_mx_blocks_lie_along_the_axis_that_a_gemm_sums_over(weights, activations):
    layer, _, _ = make_layer({"weights": weights, "activations": activations}, "mx", 80, 48)
    with torch.no_grad():
        layer.weight.copy_(draw("student_t", 48, 80, seed=1) * torch.logspace(-4, 4, 48)[:, None])
    # Outputs and tokens differ in size so much that blocks across them lose the small ones; in the products it cancels.
    tokens = torch.logspace(-4, 4, 72)[:, None]
    x = draw("student_t", 72, 80, seed=2) * tokens
    grad = draw("student_t", 72, 48, seed=3) / tokens / torch.logspace(-4, 4, 48)
    weight, bias = layer.weight.detach(), layer.bias.detach().double()
    y, grad_input, grad_weight, _ = run(layer, x, grad)

    def close(actual, expected):
        return signal_to_noise_db(expected, actual) > 120

    assert close(y, mx_reference(x, activations, 1) @ mx_reference(weight, weights, 1).t() + bias)
    assert close(grad_input, mx_reference(grad, activations, 1) @ mx_reference(weight, weights, 0))
    assert close(grad_weight, mx_reference(grad, activations, 0).t() @ mx_reference(x, activations, 0))
    # What quantizing once and transposing would give is something else.
    assert not close(grad_input, mx_reference(grad, activations, 1) @ mx_reference(weight, weights, 1))
    assert not close(grad_weight, mx_reference(grad, activations, 1).t() @ mx_reference(x, activations, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_backward_in_high_precision_is_the_plain_backward(dtype):
    formats = {"weights": "mxfp4", "activations": "mxfp6_e3m2", "gradients": "none"}
    layer, _, plain = make_layer(formats, "mx", dtype=dtype)
    x, grad = draw("normal", 2, 36, 160).to(dtype), draw("normal", 2, 36, 128, seed=1).to(dtype)
    results, expected = run(layer, x, grad), run(plain, x, grad)
    assert equal_results(results[1:], expected[1:])
    assert 10 < signal_to_noise_db(expected[0], results[0]) < 25  # forward is quantized


def test_mx_rounding_is_applied():
    """Stochastic rounding draws from torch's generator: seeded the same, another one otherwise; unbiased."""
    layer, _, plain = make_layer("mxfp4", "mx", 64, 64, rounding="stochastic")
    x = draw("normal", 32, 64)

    def seeded(seed):
        torch.manual_seed(seed)
        return run(layer, x, x)

    assert equal_results(seeded(1), seeded(1))
    assert not torch.equal(seeded(1)[0], seeded(2)[0])
    mean = [sum(results) / 100 for results in zip(*(seeded(i) for i in range(100)))]
    expected = run(plain, x, x)
    for one, many, e in zip(seeded(1)[:3], mean, expected):
        assert signal_to_noise_db(e, many) > signal_to_noise_db(e, one) + 15  # 100 draws: 20 dB


# -- delayed scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_format", ["fp8", "fp8_hybrid"])
@pytest.mark.parametrize("reduction", ["max", "most_recent"])
def test_delayed_scaling_uses_the_amax_of_earlier_steps(reduction, compute_format):
    """Against the recipe in plain Python: the history has 3 steps; the first step uses its own amax."""
    grad_dtype = E5M2 if compute_format == "fp8_hybrid" else E4M3
    layer, scales, _ = make_layer(
        compute_format, "delayed", 48, 32, bias=False, amax_history=3, amax_reduction=reduction
    )
    history = {"x": [], "weight": [], "grad": []}
    for step, size in enumerate([1.0, 4.0, 2.0, 0.5, 0.25, 8.0]):
        with torch.no_grad():
            layer.weight.mul_(1.1)
        micro_batches = [
            (draw("normal", 20, 48, seed=2 * step + i) * size, draw("normal", 20, 32, seed=50 + 2 * step + i) * size)
            for i in range(2)
        ]
        seen = {"x": 0.0, "weight": 0.0, "grad": 0.0}
        for x, grad in micro_batches:
            now = {"x": amax_of(x), "weight": amax_of(layer.weight), "grad": amax_of(grad)}
            known = {"max": max, "most_recent": lambda amaxes: amaxes[-1]}[reduction]
            # Both micro-batches of a step are scaled alike, unless there is no history yet.
            amax = {name: known(history[name][-3:]) if step else now[name] for name in now}
            x_r, weight_r = fp8_rounded(x, amax["x"]), fp8_rounded(layer.weight, amax["weight"])
            grad_r = fp8_rounded(grad, amax["grad"], grad_dtype)
            y, grad_input, grad_weight, _ = run(layer, x, grad)
            for actual, expected in (
                (y, x_r @ weight_r.t()),
                (grad_input, grad_r @ weight_r),
                (grad_weight, grad_r.t() @ x_r),
            ):
                assert signal_to_noise_db(expected, actual) > 120, step
            seen = {name: max(seen[name], now[name]) for name in now}
        for name in history:
            history[name].append(seen[name])
        scales.end_step()


def test_delayed_scaling_starts_as_current_scaling():
    torch.manual_seed(0)
    layer, _, plain = make_layer("fp8", "delayed", 48, 32)
    current, _, _ = make_layer("fp8", "current", 48, 32)
    current.load_state_dict(plain.state_dict())
    x, grad = draw("normal", 20, 48), draw("normal", 20, 32, seed=1)
    assert equal_results(run(layer, x, grad), run(current, x, grad))


def test_delayed_scaling_saturates_beyond_the_old_amax():
    layer, scales, plain = make_layer("fp8", "delayed", 48, 32, bias=False)
    x, grad = draw("normal", 20, 48), draw("normal", 20, 32, seed=1)
    run(layer, x, grad)
    scales.end_step()
    old = amax_of(x)
    larger = 10 * x
    y = layer(larger)
    assert y.isfinite().all()
    expected = fp8_rounded(larger.clamp(-old, old), old) @ fp8_rounded(layer.weight, amax_of(layer.weight)).t()
    assert signal_to_noise_db(expected, y) > 120
    scales.end_step()  # the larger amax is taken over
    assert signal_to_noise_db(plain(larger), layer(larger)) > 27


def two_layers(**fields):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(48, 48), nn.Linear(48, 48)])
    report = convert_linear_layers(
        model, {"format": "fp8", "scaling": "delayed", "min_features": 1, "amax_history": 4, **fields}
    )
    return model, report.scaling


def train_steps(model, scales, steps, first=0):
    """All results of some steps, with the optimizer's changes."""
    results = []
    for step in range(first, first + steps):
        x = draw("student_t", 16, 48, seed=step) * (1 + step % 3)
        hidden = model[0](x)
        results.append(model[1](hidden))
        model.zero_grad()
        results[-1].square().sum().backward()
        results += [p.grad.clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p -= 1e-3 * p.grad
        scales.end_step()
    return results


def test_delayed_scaling_of_a_layer_that_a_step_did_not_use():
    """It keeps its newest entry, and the scale with it; first used later, it starts with its current amax."""
    model, scales = two_layers(amax_reduction="most_recent")
    x = draw("normal", 16, 48)
    run(model[0], x, x)
    scales.end_step()
    used = scales.state_dict()["scale"].clone()
    assert scales.state_dict()["known"] == [0, 1, 2]
    run(model[1], 1000 * x, x)
    scales.end_step()
    state = scales.state_dict()
    assert torch.equal(state["scale"][:3], used[:3])
    assert state["known"] == [0, 1, 2, 3, 4, 5]
    assert float(state["scale"][3]) == pytest.approx(1000 * amax_of(x) / 448, rel=1e-6)


def test_delayed_scaling_has_no_history_of_zeros():
    """Gradients that are zero at first (below a layer of zeros) say nothing about how large they will be."""
    layer, scales, plain = make_layer("fp8", "delayed", 48, 32, bias=False)
    x, grad = draw("normal", 20, 48), draw("normal", 20, 32, seed=1) * 1e-6
    run(layer, x, torch.zeros(20, 32))
    scales.end_step()
    for result, expected in zip(run(layer, x, grad)[:3], run(plain, x, grad)):
        assert signal_to_noise_db(expected, result) > 24


def test_delayed_scaling_takes_no_trace_of_evaluation():
    model, scales = two_layers()
    train_steps(model, scales, 2)
    before = copy.deepcopy(scales.state_dict())
    huge = 1e6 * draw("normal", 16, 48)
    with torch.no_grad():
        model[1](model[0](huge))
    with torch.inference_mode():
        model[1](model[0](huge.clone()))
    model.requires_grad_(False)
    model[1](model[0](huge))
    model.requires_grad_(True)
    newest = scales.state_dict()
    assert torch.equal(newest["history"], before["history"]) and torch.equal(newest["scale"], before["scale"])
    expected, expected_scales = two_layers()
    train_steps(expected, expected_scales, 2)
    assert equal_results(train_steps(model, scales, 2, first=2), train_steps(expected, expected_scales, 2, first=2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_delayed_scaling_that_begins_with_an_evaluation(mode):
    model, scales = two_layers()
    with mode():
        model[1](model[0](draw("normal", 4, 48)))
    expected, expected_scales = two_layers()
    assert equal_results(train_steps(model, scales, 3), train_steps(expected, expected_scales, 3))


@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 9])
def test_delayed_scaling_continues_from_its_state(steps):
    model, scales = two_layers()
    train_steps(model, scales, steps)
    resumed, resumed_scales = two_layers()
    train_steps(resumed, resumed_scales, 1)  # something to be forgotten
    resumed.load_state_dict(model.state_dict())
    resumed_scales.load_state_dict(copy.deepcopy(scales.state_dict()))
    assert equal_results(train_steps(model, scales, 6, steps), train_steps(resumed, resumed_scales, 6, steps))
    assert torch.equal(scales.state_dict()["history"], resumed_scales.state_dict()["history"])


@pytest.mark.parametrize("length", [2, 4, 7])
def test_delayed_scaling_continues_with_another_length_of_history(length):
    """The newest entries are kept; the scale follows from them at the next step."""
    model, scales = two_layers()
    train_steps(model, scales, 6)
    state = scales.state_dict()
    other, other_scales = two_layers(amax_history=length)
    other.load_state_dict(model.state_dict())
    other_scales.load_state_dict(state)
    kept = min(length, 4)
    assert torch.equal(other_scales.state_dict()["history"][-kept:], state["history"][-kept:])
    assert not other_scales.state_dict()["history"][:-kept].any()
    assert torch.equal(other_scales.state_dict()["scale"], state["scale"])
    train_steps(other, other_scales, 1, 6)
    history = other_scales.state_dict()["history"]
    assert torch.equal(history[-kept:-1], state["history"][-kept + 1 :])
    torch.testing.assert_close(other_scales.state_dict()["scale"], history.amax(0) / 448, rtol=1e-6, atol=0)


def test_delayed_state_of_another_model_is_refused():
    model, scales = two_layers()
    train_steps(model, scales, 1)
    _, other, _ = make_layer("fp8", "delayed", 48, 48)
    with pytest.raises(ValueError, match=r"of 2 layers, the model has 1"):
        other.load_state_dict(scales.state_dict())


def test_delayed_amax_is_reduced_over_ranks_by_one_collective(monkeypatch):
    """Two ranks, the other one's activations of the second layer are the largest."""
    calls = []

    def all_reduce(tensor, op, group):
        calls.append((tensor.numel() * tensor.element_size(), op, group))
        tensor[3] = torch.maximum(tensor[3], torch.tensor(896.0))

    monkeypatch.setattr(scaling_module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(scaling_module.dist, "get_world_size", lambda group: 2)
    model, scales = two_layers()
    x = draw("normal", 16, 48)
    model[1](model[0](x)).sum().backward()
    assert scales.end_step_bytes() == 2 * 3 * 4
    own = scales._amax.clone()
    scales.end_step(group="the ranks")
    assert calls == [(24, torch.distributed.ReduceOp.MAX, "the ranks")]
    own[3] = 896.0
    torch.testing.assert_close(scales.state_dict()["scale"], own / 448, rtol=1e-6, atol=0)


def test_other_scalings_keep_nothing():
    for compute_format, scaling in (("fp8", "current"), ("fp8", "per_channel"), ("fp8", "block"), ("mxfp4", "mx")):
        layer, scales, _ = make_layer(compute_format, scaling, 128, 128)
        run(layer, torch.randn(4, 128), torch.randn(4, 128))
        scales.end_step()
        assert scales.state_dict() == {} and scales.end_step_bytes() == 0
        scales.load_state_dict({})


# -- what is quantized, and how often --------------------------------------------------------------------------------


@pytest.fixture
def quantized(monkeypatch):
    """[(role, plain, transposed)] of every call of `quantize`, in order."""
    calls = []
    for scaling_class in scaling_module.SCALINGS.values():
        original = scaling_class.quantize

        def recorded(self, layer, role, matrix, plain, transposed, *args, original=original, **kwargs):
            calls.append((role, plain, transposed))
            return original(self, layer, role, matrix, plain, transposed, *args, **kwargs)

        monkeypatch.setattr(scaling_class, "quantize", recorded)
    return calls


def count(calls, role):
    return sum(call[0] == role for call in calls)


def three_layers(compute_format="fp8", scaling="current", features=128):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(features, features) for _ in range(3)])
    report = convert_linear_layers(model, {"format": compute_format, "scaling": scaling, "min_features": 1})
    return model, report.scaling


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_layers_with_the_same_input_share_its_operand(compute_format, scaling, quantized):
    model, scales = three_layers(compute_format, scaling)
    for micro_batch in range(2):
        x = draw("normal", 2, 24, 128, seed=micro_batch).requires_grad_()
        quantized.clear()
        shared = [layer(x) for layer in model]
        assert count(quantized, "activations") == 1
        apart = []
        for layer in model:
            scales.forget_input()
            apart.append(layer(x))
        assert count(quantized, "activations") == 4
        if scaling != "delayed" or micro_batch == 0:  # the layers have amax histories of their own
            assert equal_results(shared, apart)
        sum(shared).sum().backward()
        scales.end_step()


def test_shared_input_is_quantized_again_where_a_layer_needs_more_of_it(quantized):
    model, _ = three_layers()
    model[0].weight.requires_grad_(False)
    x = draw("normal", 24, 128).requires_grad_()
    sum(layer(x) for layer in model).sum().backward()
    assert [call for call in quantized if call[0] == "activations"] == [
        ("activations", True, False),
        ("activations", True, True),
    ]


def plain_y(layer, x):
    """y of a fresh layer with the same weights: nothing to share an input with."""
    fresh = nn.Linear(layer.in_features, layer.out_features)
    fresh.load_state_dict(layer.state_dict())
    convert_linear_layers(fresh, layer.precision.scaling.compute)
    return fresh(x)


def test_changed_input_is_not_shared(quantized):
    model, _ = three_layers()
    x = draw("normal", 128, 128)
    model[0](x)
    x.mul_(3)
    changed = model[1](x)
    assert count(quantized, "activations") == 2
    assert torch.equal(changed, plain_y(model[1], x))
    with torch.no_grad():
        x[0, 0] = 1000.0
    assert torch.equal(model[2](x), plain_y(model[2], x))


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.t(),
        lambda x: x[:64],
        lambda x: x[64:],
        lambda x: x.view(2, 64, 128),
        lambda x: x.view(torch.int32).view(torch.float32).flip(0),
        lambda x: x.bfloat16(),
        lambda x: x.clone(),
    ],
)
def test_another_tensor_of_the_same_memory_is_not_shared(other, quantized):
    model, _ = three_layers()
    x = draw("normal", 128, 128)
    model[0](x)
    second = other(x)
    assert torch.equal(model[1](second), plain_y(model[1], second))
    assert count(quantized, "activations") == 3  # with plain_y's


def test_memory_used_again_is_not_taken_for_the_last_input():
    """Inputs come and go at the same address; also between a model and its copy, which keeps nothing alive."""
    model, scales = three_layers()
    for seed in range(20):
        x = draw("normal", 16, 128, seed=seed)
        with torch.no_grad():
            y = model[seed % 3](x)
            assert torch.equal(y, plain_y(model[seed % 3], x))
        del x
    copied = copy.deepcopy(model)
    assert copied[0].precision.scaling is copied[1].precision.scaling is not scales
    assert copied[0].precision.scaling._input is None
    scales.forget_input()
    assert scales._input is None


def test_backward_lets_go_of_the_last_input():
    model, scales = three_layers()
    x = draw("normal", 16, 128).requires_grad_()
    model[0](x).sum().backward()
    assert scales._input is None


def test_inputs_in_inference_mode(quantized):
    """Their versions are not counted, so they are not shared."""
    model, _ = three_layers()
    outside = draw("normal", 16, 128)
    with torch.inference_mode():
        inside = draw("normal", 16, 128, seed=1)
        first = [layer(inside) for layer in model]
        assert count(quantized, "activations") == 3
        assert equal_results(first, [plain_y(layer, inside) for layer in model])
        inside.mul_(3)
        assert torch.equal(model[0](inside), plain_y(model[0], inside))
        of_outside = [layer(outside) for layer in model]
    # what was made in inference mode serves no backward pass
    x = outside.requires_grad_()
    ys = [layer(x) for layer in model]
    assert equal_results(ys, of_outside)
    sum(ys).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES + [NO_GRADIENTS])
def test_only_what_is_needed_is_quantized(compute_format, scaling, quantized):
    """A frozen weight (the base of LoRA) needs no transpose of x and gets no gradient; a leaf x no grad-input."""
    in_high = isinstance(compute_format, dict)
    layer, scales, _ = make_layer(compute_format, scaling, 128, 128)
    x, grad = torch.randn(8, 128), torch.randn(8, 128)
    full = run(layer, x, grad)
    scales.forget_input()
    quantized.clear()

    layer.weight.requires_grad_(False)
    frozen = run(layer, x, grad)
    assert frozen[2] is None and torch.equal(frozen[1], full[1]) and torch.equal(frozen[3], full[3])
    backward = [] if in_high else [("gradients", True, False), ("weights", False, True)]
    assert quantized == [("activations", True, False), ("weights", True, False), *backward]
    quantized.clear()

    layer.weight.requires_grad_(True)
    leaf = run(layer, x, grad, x_requires_grad=False)
    assert leaf[1] is None and torch.equal(leaf[2], full[2])
    backward = [] if in_high else [("gradients", False, True)]
    assert quantized == [("activations", True, not in_high), ("weights", True, False), *backward]
    quantized.clear()

    layer.weight.requires_grad_(False)  # the bias alone
    bias_only = run(layer, x, grad, x_requires_grad=False)
    assert bias_only[1] is bias_only[2] is None and torch.equal(bias_only[3], full[3])
    assert count(quantized, "gradients") == 0
    quantized.clear()
    scales.forget_input()

    layer.weight.requires_grad_(True)
    with torch.no_grad():
        y = layer(x.requires_grad_())
    assert not y.requires_grad and torch.equal(y, full[0])
    assert quantized == [("activations", True, False), ("weights", True, False)]


# -- NaN, Inf, zeros -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("compute_format, scaling", FEW_CASES + [("mxint8", "mx")])
def test_nan_and_inf_are_never_finite_wrong_numbers(compute_format, scaling, value):
    """Wherever the product in float64 is not finite; elsewhere a shared block may be spoiled, but not all."""
    features_in, features_out = features(scaling)
    for spoiled in ("x", "weight", "grad"):
        layer, scales, _ = make_layer(compute_format, scaling, features_in, features_out)
        x, grad = draw("normal", 40, features_in), draw("normal", 40, features_out, seed=1)
        for warm in (False, True) if scaling == "delayed" else (False,):
            if warm:
                scales.end_step()
            with torch.no_grad():
                {"x": x, "weight": layer.weight, "grad": grad}[spoiled][3, 5] = value
            results, expected = run(layer, x, grad), float64_results(layer, x, grad)
            for result, e in zip(results, expected):
                assert not result[~e.isfinite()].isfinite().any()
            for place in {"x": (0, 2), "weight": (0, 1), "grad": (1, 2)}[spoiled]:
                assert (~expected[place].isfinite()).any()
                assert results[place].isfinite().float().mean() > 0.5
            for place in {"x": (1,), "weight": (2,), "grad": (0,)}[spoiled]:  # the GEMM that it takes no part in
                assert results[place].isfinite().all()


@pytest.mark.parametrize("compute_format, scaling", CASES)
def test_zeros(compute_format, scaling):
    """An amax of zero has no NaN, in any operand, and zeros are zeros."""
    features_in, features_out = features(scaling)
    for zeros in ("x", "weight", "grad", "all"):
        layer, scales, _ = make_layer(compute_format, scaling, features_in, features_out, bias=False)
        x, grad = draw("normal", 24, features_in), draw("normal", 24, features_out, seed=1)
        for name, tensor in (("x", x), ("weight", layer.weight), ("grad", grad)):
            if zeros in (name, "all"):
                with torch.no_grad():
                    tensor.zero_()
        for _ in range(3):
            results = run(layer, x, grad)[:3]
            for result, operands in zip(results, (("x", "weight"), ("grad", "weight"), ("x", "grad"))):
                assert result.isfinite().all()
                assert bool(result.any()) == (zeros not in (*operands, "all"))
            scales.end_step()


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30])
@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_very_small_and_very_large_inputs(compute_format, scaling, size):
    """Scales reach as far as fp32 does (1e-38 is at its end: only that nothing becomes NaN or Inf)."""
    features_in, features_out = features(scaling)
    layer, _, _ = make_layer(compute_format, scaling, features_in, features_out, bias=False)
    nn.init.normal_(layer.weight)
    x = draw("normal", 24, features_in) * size
    y = layer(x)
    assert y.isfinite().all()
    if size != 1e-38:
        bound = bounds_db(compute_format, scaling)[0]
        assert signal_to_noise_db(x.double() / size @ layer.weight.double().t(), y.double() / size) > bound


# -- shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_shapes(compute_format, scaling):
    """1-D to 4-D, token counts that are no multiple of 16, one token; strides of every kind give the same bits."""
    features_in, features_out = features(scaling)
    layer, _, plain = make_layer(compute_format, scaling, features_in, features_out)
    for shape in ((), (1,), (17,), (3, 1, 5), (2, 3, 4, 1), (131,)):
        x, grad = draw("normal", *shape, features_in), draw("normal", *shape, features_out, seed=1)
        results, expected = run(layer, x, grad), run(plain, x, grad)
        for result, e in zip(results, expected):
            assert result.shape == e.shape and signal_to_noise_db(e, result) > (12 if compute_format == "mxfp4" else 20)
    x, grad = draw("normal", 6, 10, features_in), draw("normal", 6, 10, features_out, seed=1)
    results = run(layer, x, grad)
    for strided_x, strided_grad in (
        (x.transpose(0, 1).contiguous().transpose(0, 1), grad.permute(2, 1, 0).contiguous().permute(2, 1, 0)),
        (x.repeat_interleave(2, dim=-1)[..., ::2], grad.repeat_interleave(3, dim=1)[:, ::3]),
    ):
        assert not strided_x.is_contiguous() and not strided_grad.is_contiguous()
        assert equal_results(run(layer, strided_x, strided_grad), results)
    expanded = torch.full((1, 1, 1), 2.0).expand(6, 10, features_out)  # as the gradient of a sum comes
    assert equal_results(run(layer, x, expanded), run(layer, x, expanded.contiguous()))


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_no_tokens(compute_format, scaling):
    """An expert that got no token: gradients of zeros, so that every rank has one; and then some tokens."""
    layer, scales, _ = make_layer(compute_format, scaling, 128, 256)
    for shape in ((0,), (2, 0), (0, 3)):
        y, grad_input, grad_weight, grad_bias = run(layer, torch.zeros(*shape, 128), torch.zeros(*shape, 256))
        assert y.shape == (*shape, 256) and grad_input.shape == (*shape, 128)
        assert not grad_weight.any() and not grad_bias.any()
    scales.end_step()
    x, grad = draw("normal", 8, 128), draw("normal", 8, 256, seed=1)
    results = run(layer, x, grad)
    for expected, result in zip(float64_results(layer, x, grad), results):
        assert signal_to_noise_db(expected, result) > 12


# -- inside a training step ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """q, k and v of one input, and two layers after them; the first of which is used twice."""

    def __init__(self, width=128):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.up, self.down = (nn.Linear(width, width) for _ in range(5))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = self.norm(x)
        h = torch.tanh(self.q(h)) * self.k(h) + self.v(h)
        return x + self.down(torch.relu(self.up(self.up(h))))


def make_blocks(compute_format, scaling, blocks=2, **fields):
    model = nn.ModuleList([Block() for _ in range(blocks)])
    report = convert_linear_layers(model, {"format": compute_format, "scaling": scaling, **fields})
    assert len(report.converted) == 5 * blocks
    return model, report.scaling


def train_blocks(model, scales, apply=None, steps=2, context=contextlib.nullcontext):
    """Gradients of a few steps with two micro-batches each; `apply(block, x)` calls a block."""
    apply = apply or (lambda block, x: block(x))
    torch.manual_seed(1)
    results = []
    for step in range(steps):
        model.zero_grad()
        for micro_batch in range(2):
            x = draw("normal", 2, 12, 128, seed=2 * step + micro_batch).requires_grad_()
            with context():
                h = x
                for block in model:
                    h = apply(block, h)
            h.float().square().sum().backward()
            results += [h.detach(), x.grad]
        results += [p.grad.clone() for p in model.parameters()]
        scales.end_step()
    return results


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compute_format, scaling", FEW_CASES + [("stochastic", "mx")])
def test_activation_checkpointing_changes_no_bit(compute_format, scaling, reentrant):
    fields = {}
    if compute_format == "stochastic":
        compute_format, fields = "mxfp8_e4m3", {"rounding": "stochastic"}
    plain = train_blocks(*make_blocks(compute_format, scaling, **fields))
    recomputed = train_blocks(
        *make_blocks(compute_format, scaling, **fields), lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    )
    assert equal_results(plain, recomputed)


def test_delayed_scaling_sees_frozen_layers_that_are_recomputed():
    """Reentrant: the first forward leaves no trace, the second one must, also where it finds the input quantized."""
    model, scales = three_layers("fp8", "delayed")
    model[0].weight.requires_grad_(False)
    x = draw("normal", 16, 128).requires_grad_()
    checkpoint(model[0], x, use_reentrant=True).sum().backward()
    scales.end_step()
    assert scales.state_dict()["known"] == [0, 1, 2]


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_checkpointed_layers_keep_no_operand(compute_format, scaling, monkeypatch):
    """Between forward and backward; without checkpointing one operand a layer input, the transposed one, is kept."""
    made = []
    for scaling_class in scaling_module.SCALINGS.values():
        original = scaling_class.quantize

        def recorded(self, *args, original=original, **kwargs):
            pair = original(self, *args, **kwargs)
            made.extend(weakref.ref(o.codes if isinstance(o, Float8Operand) else o) for o in pair if o is not None)
            return pair

        monkeypatch.setattr(scaling_class, "quantize", recorded)
    alive = {}
    for checkpointed in (False, True):
        model, scales = make_blocks(compute_format, scaling, blocks=1)
        made.clear()
        x = draw("normal", 2, 12, 128).requires_grad_()
        y = checkpoint(model[0], x, use_reentrant=False) if checkpointed else model[0](x)
        scales.forget_input()
        gc.collect()
        alive[checkpointed] = sum(codes() is not None for codes in made)
        y.sum().backward()
        del y
    assert alive == {False: 4, True: 0}  # of q, k and v together, of both uses of up, and of down


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_layer_used_twice(compute_format, scaling):
    """Gradients are the sums of those of two copies of the layer."""
    layer, _, _ = make_layer(compute_format, scaling, 128, 128)
    one, other = copy.deepcopy(layer), copy.deepcopy(layer)
    x = draw("normal", 16, 128)
    layer(layer(x)).sum().backward()
    other(one(x)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, one.weight.grad + other.weight.grad)
    torch.testing.assert_close(layer.bias.grad, one.bias.grad + other.bias.grad)


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_autocast(compute_format, scaling):
    """fp32 weights under autocast: the layer computes in autocast's dtype, gradients of weights are fp32."""
    layer, _, plain = make_layer(compute_format, scaling, 128, 128)
    reference, _, _ = make_layer(compute_format, scaling, 128, 128)
    reference.load_state_dict(plain.state_dict())
    x, grad = draw("normal", 16, 128), draw("normal", 16, 128, seed=1).bfloat16()
    x_1, x_2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x_1)
    y.backward(grad)
    expected = reference(x_2.bfloat16())
    expected.backward(grad)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    assert x_1.grad.dtype == layer.weight.grad.dtype == torch.float32
    assert torch.equal(x_1.grad, x_2.grad) and torch.equal(layer.weight.grad, reference.weight.grad)
    assert signal_to_noise_db(plain(x), y) > (27 if scaling != "mx" else 12)


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES + [NO_GRADIENTS])
def test_backward_under_autocast(compute_format, scaling):
    """A backward pass that is called inside autocast's context does not compute in another precision for that."""
    layer, _, _ = make_layer(compute_format, scaling, 128, 128)
    x, grad = draw("normal", 16, 128), draw("normal", 16, 128, seed=1)
    outside = run(layer, x, grad)
    layer.zero_grad()
    x = x.requires_grad_()
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y.backward(grad)
    assert equal_results((x.grad, layer.weight.grad, layer.bias.grad), outside[1:])


def test_second_derivatives_are_refused():
    """They would be wrong: quantization has none."""
    layer, _, _ = make_layer("fp8", "current")
    x = draw("normal", 4, 160).requires_grad_()
    (grad_input,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad_input.sum().backward()


def test_weight_changed_before_backward_is_an_error():
    """As in nn.Linear: the backward pass reads the weight again, and not the bias."""
    layer, _, _ = make_layer("fp8", "current")
    y = layer(draw("normal", 4, 160).requires_grad_())
    with torch.no_grad():
        layer.bias.add_(1)
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_evaluate_in_high_precision():
    layer, _, plain = make_layer("fp8", "current", evaluate_in="high_precision")
    x = draw("normal", 4, 160)
    assert not torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain(x))
    assert not torch.equal(layer.train()(x), plain(x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("compute_format, scaling", [("fp8", "delayed"), ("fp8", "block"), ("mxfp8_e4m3", "mx")])
def test_torch_compile_leaves_the_layer_as_it_is(compute_format, scaling, backend):
    """The block around the layers is compiled, with breaks at them; the numbers are the same bits."""
    torch._dynamo.reset()
    expected = train_blocks(*make_blocks(compute_format, scaling, blocks=1))
    model, scales = make_blocks(compute_format, scaling, blocks=1)
    compiled = torch.compile(model[0], backend=backend)
    actual = train_blocks(model, scales, lambda block, x: compiled(x))
    for a, e in zip(actual, expected):
        assert signal_to_noise_db(e, a) > 100


def test_restored_layers_are_plain_again():
    model, scales = make_blocks("fp8", "current")
    restore_linear_layers(model)
    plain = nn.ModuleList([Block() for _ in range(2)])
    assert equal_results(train_blocks(model, scales), train_blocks(plain, scales))


# -- weights that ZeRO-3 gathers -------------------------------------------------------------------------------------


def gather_as_operand(layer, reference):
    """What ZeRO-3 does to a weight that travels as codes: it has them as an attribute, and NaN as values."""
    cast = {"per_channel": casts.cast_per_row, "block": casts.cast_tiles}.get(
        layer.precision.scaling.compute.scaling, casts.cast_per_tensor
    )
    operand = cast(reference.weight.detach(), E4M3)[0]
    layer.weight.ds_status = types.SimpleNamespace(name="AVAILABLE")
    setattr(layer.weight, GATHERED_OPERAND, operand)
    layer.weight.data = torch.full((1,), math.nan).expand(layer.weight.shape)
    return operand


@pytest.mark.parametrize("checkpointed", [None, True, False])
@pytest.mark.parametrize("compute_format, scaling", FP8_CASES + HYBRID_CASES)
def test_gathered_codes_are_the_operand(compute_format, scaling, checkpointed):
    """The same bits as from the values; with a scale a row, the other axis is quantized from the decoded codes."""
    layer, scales, plain = make_layer(compute_format, scaling, 256, 128)
    x, grad = draw("normal", 24, 256), draw("normal", 24, 128, seed=1)
    expected = run(layer, x, grad)
    scales.forget_input()
    operand = gather_as_operand(layer, plain)

    def forward(x):
        return layer(x) if checkpointed is None else checkpoint(layer, x, use_reentrant=checkpointed)

    layer.zero_grad()
    x.requires_grad_()
    y = forward(x)
    y.backward(grad)
    if scaling == "per_channel":
        assert signal_to_noise_db(grad.double() @ operand.dequantize().double(), x.grad) > 24
        assert signal_to_noise_db(expected[1], x.grad) > 24
        x.grad = expected[1]
    assert equal_results((y.detach(), x.grad, layer.weight.grad, layer.bias.grad), expected)
    assert layer(x[:0]).shape == (0, 128)


def test_gathered_codes_are_read_where_evaluation_is_in_high_precision():
    layer, _, plain = make_layer("fp8", "current", 256, 128, evaluate_in="high_precision")
    operand = gather_as_operand(layer, plain)
    x = draw("normal", 24, 256)
    assert torch.equal(layer.eval()(x), nn.functional.linear(x, operand.dequantize(), layer.bias))


class _Partitioned:
    """A ZeRO-3 parameter's methods, for a weight that was released between forward and backward."""

    def __init__(self, weight):
        self.weight, self.values, self.calls = weight, weight.data, []
        self.status = types.SimpleNamespace(name="AVAILABLE")

    def release(self):
        self.calls.append("partition")
        self.weight.data = torch.empty(0)
        self.status.name = "NOT_AVAILABLE"

    def gather(self):
        self.calls.append("gather")
        self.weight.data = self.values
        self.status.name = "AVAILABLE"


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES + [NO_GRADIENTS])
def test_released_weight_is_gathered_for_backward(compute_format, scaling):
    """And released again; where it is not needed (x wants no gradient), it is not gathered."""
    layer, scales, _ = make_layer(compute_format, scaling, 256, 128)
    x, grad = draw("normal", 24, 256), draw("normal", 24, 128, seed=1)
    expected = run(layer, x, grad)
    scales.forget_input()
    zero = _Partitioned(layer.weight)
    layer.weight.ds_status, layer.weight.all_gather, layer.weight.partition = zero.status, zero.gather, zero.release
    for wanted in (True, False):
        layer.weight.data, zero.status.name, zero.calls = zero.values, "AVAILABLE", []
        layer.zero_grad()
        x = x.detach().requires_grad_(wanted)
        y = layer(x)
        zero.release()
        grads = torch.autograd.grad(y, [layer.bias, *([x] if wanted else [])], grad)
        assert torch.equal(grads[0], expected[3])
        assert not wanted or torch.equal(grads[1], expected[1])
        assert zero.calls == (["partition", "gather", "partition"] if wanted else ["partition"])


# -- a public implementation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe, scaling", [("tensorwise", "current"), ("rowwise", "per_channel")])
def test_agrees_with_torchao(recipe, scaling):
    """torchao's float8 linear, emulated: the same recipe but for how it rounds scales and adds up."""
    float8 = pytest.importorskip("torchao.float8")
    import dataclasses

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 128))
    x, grad = torch.randn(64, 256), torch.randn(64, 128)
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    theirs = float8.convert_to_float8_training(copy.deepcopy(plain), config=config)
    ours = copy.deepcopy(plain)
    compute_format = "fp8_hybrid" if recipe == "tensorwise" else "fp8"
    convert_linear_layers(ours, {"format": compute_format, "scaling": scaling})
    results = []
    for model in (theirs, ours):
        inputs = x.clone().requires_grad_()
        y = model(inputs)
        y.backward(grad)
        results.append((y.detach(), inputs.grad, model[0].weight.grad))
    for their, our in zip(*results):
        # Scales that are rounded otherwise move values to the other side of a rounding: as good, not the same.
        assert signal_to_noise_db(their, our) > 24
