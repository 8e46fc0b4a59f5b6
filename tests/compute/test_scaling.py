"""Which values share a scale, and what delayed scaling remembers, against the recipes written out."""

import copy

import pytest
import torch
from error_bounds import SMALLEST_SCALE, signal_to_noise_db
from linear_cases import (
    E4M3,
    E5M2,
    FP8_CASES,
    HYBRID_CASES,
    draw,
    equal_results,
    make_layer,
    run,
    three_layers,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeropp_fp8.compute import convert_linear_layers
from zeropp_fp8.formats import amax_history

LARGEST = {E4M3: 448.0, E5M2: 57344.0}


# -- FP8: groups of values -------------------------------------------------------------------------------------------


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


# -- delayed scaling -------------------------------------------------------------------------------------------------


@pytest.fixture
def steps_of_history(monkeypatch):
    """steps_of_history(n): what is made afterwards remembers n steps."""
    monkeypatch.setattr(amax_history, "STEPS", 4)
    return lambda steps: monkeypatch.setattr(amax_history, "STEPS", steps)


@pytest.mark.parametrize("compute_format", ["fp8", "fp8_hybrid"])
def test_delayed_scaling_uses_the_amax_of_earlier_steps(compute_format, steps_of_history):
    """Against the recipe in plain Python: the history has 3 steps; the first step uses its own amax."""
    steps_of_history(3)
    grad_dtype = E5M2 if compute_format == "fp8_hybrid" else E4M3
    layer, scales, _ = make_layer(compute_format, "delayed", 48, 32, bias=False)
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
            # Both micro-batches of a step are scaled alike, unless there is no history yet.
            amax = {name: max(history[name][-3:]) if step else now[name] for name in now}
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
    report = convert_linear_layers(model, {"format": "fp8", "scaling": "delayed", "min_features": 1, **fields})
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
    model, scales = two_layers()
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
def test_delayed_scaling_continues_from_its_state(steps, steps_of_history):
    model, scales = two_layers()
    train_steps(model, scales, steps)
    resumed, resumed_scales = two_layers()
    train_steps(resumed, resumed_scales, 1)  # something to be forgotten
    resumed.load_state_dict(model.state_dict())
    resumed_scales.load_state_dict(copy.deepcopy(scales.state_dict()))
    assert equal_results(train_steps(model, scales, 6, steps), train_steps(resumed, resumed_scales, 6, steps))
    assert torch.equal(scales.state_dict()["history"], resumed_scales.state_dict()["history"])


@pytest.mark.parametrize("length", [2, 4, 7])
def test_delayed_scaling_continues_with_another_length_of_history(length, steps_of_history):
    """Of an earlier version. The newest entries are kept; the scale follows from them at the next step."""
    model, scales = two_layers()
    train_steps(model, scales, 6)
    state = scales.state_dict()
    steps_of_history(length)
    other, other_scales = two_layers()
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


def test_delayed_amax_is_reduced_over_ranks_by_one_collective():
    """Two ranks, the other one's activations of the second layer are the largest."""
    calls = []

    def largest_of_all(tensor):
        calls.append(tensor.numel() * tensor.element_size())
        tensor[3] = torch.maximum(tensor[3], torch.tensor(896.0))

    model, scales = two_layers()
    x = draw("normal", 16, 48)
    model[1](model[0](x)).sum().backward()
    own = scales._amax.clone()
    scales.end_step(largest_of_all)
    assert calls == [2 * 3 * 4]
    own[3] = 896.0
    torch.testing.assert_close(scales.state_dict()["scale"], own / 448, rtol=1e-6, atol=0)


def test_other_scalings_keep_nothing():
    for compute_format, scaling in (("fp8", "current"), ("fp8", "per_channel"), ("fp8", "block"), ("mxfp4", "mx")):
        layer, scales, _ = make_layer(compute_format, scaling, 128, 128)
        run(layer, torch.randn(4, 128), torch.randn(4, 128))
        scales.end_step()
        assert scales.state_dict() == {}
        scales.load_state_dict({})


def test_delayed_scaling_sees_frozen_layers_that_are_recomputed():
    """Reentrant: the first forward leaves no trace, the second one must, also where it finds the input quantized."""
    model, scales = three_layers("fp8", "delayed")
    model[0].weight.requires_grad_(False)
    x = draw("normal", 16, 128).requires_grad_()
    checkpoint(model[0], x, use_reentrant=True).sum().backward()
    scales.end_step()
    assert scales.state_dict()["known"] == [0, 1, 2]
