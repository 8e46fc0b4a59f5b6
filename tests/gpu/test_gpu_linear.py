"""Linear layers in FP8 and MX on a GPU: its FP8 GEMMs against the emulation, CUDA graphs, torch.compile."""

import copy
import math

import pytest
import torch
from error_bounds import signal_to_noise_db
from linear_cases import check_each_product
from torch import nn

from zeropp_fp8.compute import casts, convert_linear_layers, gemm
from zeropp_fp8.compute.gemm import has_fp8_gemm, matmul_nt
from zeropp_fp8.compute.operand import Float8Operand

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASTS = {
    "tensor": (casts.cast_per_tensor, casts.cast_per_tensor),
    "row": (casts.cast_per_row, casts.cast_per_row),
    "block": (casts.cast_blocks, casts.cast_blocks),
    "block and tile": (casts.cast_blocks, casts.cast_tiles),
}
FP8_CASES = [("fp8", s) for s in ("current", "delayed", "per_channel", "block")]
HYBRID_CASES = [("fp8_hybrid", s) for s in ("current", "delayed", "per_channel")]
MX_CASES = [("mxfp8_e4m3", "mx"), ("mxfp6_e3m2", "mx"), ("mxfp4", "mx"), ("mxint8", "mx")]
CASES = FP8_CASES + HYBRID_CASES + MX_CASES


@pytest.fixture
def only_native(monkeypatch):
    """On Hopper with CUDA 12.9 every FP8 GEMM is the device's own: the emulation is not to be called."""
    granularities = ("tensor", "row", "block", "tile")
    missing = [g for g in granularities if not has_fp8_gemm(CUDA, g)]
    if torch.cuda.get_device_capability(CUDA) == (9, 0) and torch.version.cuda >= "12.9":
        assert not missing
    if missing:
        pytest.skip(f"this device has no FP8 GEMM with a scale per {', per '.join(missing)}")
    emulated = gemm._emulated

    def refuse(a, b):
        assert a.codes.device.type == "cpu", "emulated on a device that has the GEMM"
        return emulated(a, b)

    monkeypatch.setattr(gemm, "_emulated", refuse)
    return emulated


@pytest.mark.parametrize("compute_format, scaling", [*FP8_CASES, ("mxfp8_e4m3", "mx")])
def test_each_product_in_high_precision_by_itself(compute_format, scaling):
    check_each_product(compute_format, scaling, torch.bfloat16, CUDA)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def least_row_db(reference, actual):
    """The least signal-to-noise of a row: one wrong scale spoils one row or block only."""
    return min(signal_to_noise_db(r, a) for r, a in zip(reference.cpu(), actual.cpu()))


def on_cpu(operand):
    return Float8Operand(operand.codes.cpu(), operand.scale.cpu(), operand.shape, operand.granularity)


# -- the GEMM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["4-4", "5-4", "4-5"])
@pytest.mark.parametrize("granularity", list(CASTS))
def test_fp8_gemm_agrees_with_the_emulation(granularity, dtypes, out_dtype, only_native):
    """Rows, and blocks along K, differ in size by up to 2^16, so that a scale at a wrong place shows.

    bf16's own rounding leaves about 57 dB; tensor cores add up with 14 bits.
    """
    if "block" in granularity and E5M2 in dtypes:
        pytest.skip("its GEMM takes E4M3 only; config.py refuses the combination")
    cast_a, cast_b = CASTS[granularity]
    for m, n, k in ((1, 16, 16), (1, 256, 128), (24, 48, 1000), (1000, 272, 384), (130, 128, 640), (4096, 512, 1024)):
        if "block" in granularity:
            n = math.ceil(n / 128) * 128
        sizes_m, sizes_n = (2.0 ** (torch.arange(size) % 17 - 8)[:, None] for size in (m, n))
        sizes_k = 2.0 ** (torch.arange(k) // 128 % 7)
        a = cast_a((draw(m, k, seed=1) * sizes_m * sizes_k).to(CUDA, torch.bfloat16), dtypes[0])[0]
        b = cast_b((draw(n, k, seed=2) * sizes_n / sizes_k).to(CUDA, torch.bfloat16), dtypes[1])[0]
        bias = draw(n, seed=3).to(CUDA, out_dtype)
        expected = only_native(on_cpu(a), on_cpu(b))
        for fast in (False, True):
            out = matmul_nt(a, b, out_dtype, fast_accumulation=fast)
            assert out.shape == (m, n) and out.dtype == out_dtype and out.is_contiguous()
            if out_dtype == torch.float16:  # its range is small: compare what fits
                fits = (expected.abs() < 6e4) & (expected.abs() > 1e-3)
                assert signal_to_noise_db(expected[fits], out.cpu()[fits]) > (40 if fast else 45), (m, n, k)
            else:
                assert least_row_db(expected, out) > (35 if fast else 45), (m, n, k, fast)
        with_bias = matmul_nt(a, b, torch.float32 if out_dtype == torch.float32 else torch.bfloat16, bias)
        assert least_row_db(expected + bias.cpu().float(), with_bias) > 40


@pytest.mark.parametrize("granularity", list(CASTS))
def test_nan_in_an_operand_shows_in_the_product(granularity, only_native):
    cast_a, cast_b = CASTS[granularity]
    a_values, b_values = draw(24, 256, seed=1).to(CUDA), draw(128, 256, seed=2).to(CUDA)
    a_values[3, 200], b_values[70, 5] = math.nan, math.inf
    out = matmul_nt(cast_a(a_values, E4M3)[0], cast_b(b_values, E4M3)[0], torch.bfloat16)
    expected = torch.zeros(24, 128, dtype=torch.bool, device=CUDA)
    expected[3], expected[:, 70] = True, True
    assert torch.equal(out.isnan(), expected)


# -- layers ----------------------------------------------------------------------------------------------------------


def make_layers(compute_format, scaling, dtype, features_in=384, features_out=256):
    """((layer on the GPU, its scaling), (the same on the CPU, its scaling), a plain one in float64 on the CPU)."""
    torch.manual_seed(0)
    plain = nn.Linear(features_in, features_out).to(dtype)
    made = []
    for device in (CUDA, "cpu"):
        layer = copy.deepcopy(plain).to(device)
        report = convert_linear_layers(layer, {"format": compute_format, "scaling": scaling})
        made.append((layer, report.scaling))
    return *made, copy.deepcopy(plain).double()


def run(layer, x, grad):
    """(y, grad of x, of weight, of bias) on the CPU; old gradients are dropped first."""
    layer.zero_grad(set_to_none=True)
    weight = layer.weight
    x = x.detach().to(weight.device).requires_grad_()
    y = layer(x)
    y.backward(grad.to(weight.device))
    return [result.detach().cpu() for result in (y, x.grad, weight.grad, layer.bias.grad)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compute_format, scaling", CASES)
def test_layers_agree_with_the_cpu(compute_format, scaling, dtype, only_native):
    """The same codes, so the same results but for the order of sums; over several steps, with few and many tokens.

    A single token, and tokens divisible by 16, for which Triton compiles kernels anew, in bf16 only.
    """
    (layer, scales), (reference, reference_scales), exact = make_layers(compute_format, scaling, dtype)
    for step, tokens in enumerate((1000, 24, 1, 128) if dtype == torch.bfloat16 else (1000, 24)):
        x, grad = draw(tokens, 384, seed=step).to(dtype), (draw(tokens, 256, seed=10 + step) * 1e-4).to(dtype)
        results = run(layer, x, grad)
        for actual, expected in zip(results, run(reference, x, grad)):
            assert actual.dtype == dtype and signal_to_noise_db(expected, actual) > 40, (tokens, step)
        for actual, expected in zip(results, run(exact, x.double(), grad.double())):
            assert signal_to_noise_db(expected, actual) > (12 if compute_format == "mxfp4" else 21)
        scales.end_step()
        reference_scales.end_step()
        state, expected_state = scales.state_dict(), reference_scales.state_dict()
        assert state.keys() == expected_state.keys()
        if state:
            torch.testing.assert_close(state["history"], expected_state["history"], rtol=0, atol=0)
            torch.testing.assert_close(state["scale"], expected_state["scale"], rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("compute_format, scaling", CASES)
def test_nan_and_inf_are_never_finite_wrong_numbers(compute_format, scaling, value):
    for spoiled in ("x", "weight", "grad"):
        (layer, _), _, exact = make_layers(compute_format, scaling, torch.bfloat16)
        x, grad = draw(24, 384).bfloat16(), draw(24, 256, seed=1).bfloat16()
        with torch.no_grad():
            {"x": x, "weight": layer.weight, "grad": grad}[spoiled][3, 5] = value
            exact.weight.copy_(layer.weight)
        for actual, expected in zip(run(layer, x, grad), run(exact, x.double(), grad.double())):
            assert not actual[~expected.isfinite()].isfinite().any()


@pytest.mark.parametrize("compute_format, scaling", CASES)
def test_no_tokens_and_zeros(compute_format, scaling):
    (layer, scales), _, _ = make_layers(compute_format, scaling, torch.bfloat16)
    for tokens in (0, 16):
        zeros = torch.zeros(tokens, 384, dtype=torch.bfloat16), torch.zeros(tokens, 256, dtype=torch.bfloat16)
        y, grad_input, grad_weight, grad_bias = run(layer, *zeros)
        assert torch.equal(y, layer.bias.detach().cpu().expand(tokens, 256))
        assert not grad_input.any() and not grad_weight.any() and not grad_bias.any()
        scales.end_step()


# -- CUDA graphs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute_format, scaling", [*FP8_CASES, ("fp8_hybrid", "delayed"), ("mxfp8_e4m3", "mx")])
def test_forward_and_backward_in_a_cuda_graph(compute_format, scaling):
    """Replayed with new data, and for delayed scaling with new scales: the same as the steps without a graph."""
    (layer, scales), _, _ = make_layers(compute_format, scaling, torch.bfloat16)
    x = torch.zeros(64, 384, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    grad = torch.zeros(64, 256, dtype=torch.bfloat16, device=CUDA)

    def fill(step):
        with torch.no_grad():
            x.copy_(draw(64, 384, seed=step) * (1 + step))
            grad.copy_(draw(64, 256, seed=100 + step) * (1 + step))

    def forward_and_backward():
        y = layer(x)
        return y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], grad)

    fill(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled, and delayed scaling gets its history
        for _ in range(3):
            forward_and_backward()
    torch.cuda.current_stream().wait_stream(side)
    scales.end_step()
    twin, twin_scales = copy.deepcopy((layer, scales))
    assert twin.precision.scaling is twin_scales
    scales.forget_input()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward_and_backward()
    for step in range(1, 5):
        fill(step)
        graph.replay()
        expected = run(twin, x, grad)
        for actual, e in zip(captured, expected):
            assert signal_to_noise_db(e, actual.cpu()) > 45, step  # cuBLAS may choose another order of sums
        scales.end_step()
        twin_scales.end_step()
    if scaling == "delayed":
        assert torch.equal(scales.state_dict()["history"], twin_scales.state_dict()["history"])


def test_nothing_waits_for_the_device():
    """Neither a step's forward and backward nor, once all operands have a history, its end."""
    for compute_format, scaling in FP8_CASES + [("mxfp8_e4m3", "mx")]:
        (layer, scales), _, _ = make_layers(compute_format, scaling, torch.bfloat16)
        x = draw(64, 384).to(CUDA, torch.bfloat16).requires_grad_()
        for step in range(3):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                layer(x).sum().backward()
                scales.end_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


# -- torch.compile ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.up, self.down = (nn.Linear(width, width) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = self.norm(x)
        h = torch.tanh(self.q(h)) * self.k(h)
        return x + self.down(torch.relu(self.up(h)))


@pytest.mark.parametrize("compute_format, scaling", [*FP8_CASES, ("mxfp8_e4m3", "mx")])
def test_torch_compile(compute_format, scaling):
    """Inductor's own kernels round otherwise in the last bit, which moves few codes."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        model = Block().to(CUDA)
        report = convert_linear_layers(model, {"format": compute_format, "scaling": scaling})
        call = torch.compile(model) if compiled else model
        for step in range(2):
            model.zero_grad()
            x = draw(2, 36, 256, seed=step).to(CUDA).requires_grad_()
            y = call(x)
            y.square().mean().backward()
            report.scaling.end_step()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for eager, actual in zip(*results):
        assert signal_to_noise_db(eager, actual) > 30
