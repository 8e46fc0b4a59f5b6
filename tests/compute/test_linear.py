"""Linear layers in FP8 and MX against float64 and plain layers: accuracy, special values, shapes, inside training."""

import contextlib
import copy
import gc
import math
import weakref

import pytest
import torch
from error_bounds import signal_to_noise_db
from linear_cases import (
    CASES,
    FEW_CASES,
    FP8_CASES,
    NO_GRADIENTS,
    draw,
    equal_results,
    features,
    float64_results,
    make_layer,
    run,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeropp_fp8.compute import convert_linear_layers, restore_linear_layers
from zeropp_fp8.compute import scaling as scaling_module
from zeropp_fp8.compute.operand import Float8Operand

# Signal-to-noise of one operand in MX, dB: the less of normal and Student-t data, with scales rounded up.
MX_OPERAND_DB = {
    "mxfp8_e4m3": 31.5,
    "mxfp8_e5m2": 25.6,
    "mxfp6_e2m3": 30.0,
    "mxfp6_e3m2": 25.2,
    "mxfp4": 17.1,
    "mxint8": 39.1,
}


def noise_of_product_db(*operands_db):
    """The signal-to-noise of a product of two operands: their noise powers add."""
    return -10 * math.log10(sum(10 ** (-db / 10) for db in operands_db))


def bounds_db(compute_format, scaling):
    """(forward, grad-input, grad-weight): the least signal-to-noise.

    Two operands in E4M3, 31.5 dB each, have 28.5 dB together. A gradient in E5M2 alone has 25.6 dB, and 25.6 with 31.5
    makes 24.6: no code can reach the 25 dB that E4M3 must.
    """
    if scaling == "mx":
        operand = MX_OPERAND_DB[compute_format]
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


def test_signal_to_noise_of_mixed_mx_formats():
    """Gradients have the format of the activations where none is named."""
    layer, scales, _ = make_layer({"weights": "mxfp4", "activations": "mxfp6_e3m2"}, "mx", 512, 384)
    assert scales.formats["gradients"] == "mxfp6_e3m2"
    with torch.no_grad():
        layer.weight.copy_(draw("student_t", 384, 512, seed=1))
    x, grad = draw("student_t", 384, 512, seed=2), draw("student_t", 384, 384, seed=3)
    weight_db, other_db = MX_OPERAND_DB["mxfp4"], MX_OPERAND_DB["mxfp6_e3m2"]
    bounds = [noise_of_product_db(weight_db, other_db)] * 2 + [noise_of_product_db(other_db, other_db)]
    for bound, e, result in zip(bounds, float64_results(layer, x, grad), run(layer, x, grad)):
        assert bound - 0.5 <= signal_to_noise_db(e, result) < bound + 2


def rows_db(reference, actual):
    """The least signal-to-noise of a row."""
    return min(signal_to_noise_db(r, a) for r, a in zip(reference, actual))


def test_scales_per_row_and_block_hold_rows_of_very_different_size():
    """Tokens from 1e-4 to 1e4, features too: one scale per tensor rounds the small ones to zero."""
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
    torch.manual_seed(0)  # of a hundred other weights one has less than the bound
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
@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_activation_checkpointing_changes_no_bit(compute_format, scaling, reentrant):
    plain = train_blocks(*make_blocks(compute_format, scaling))
    recomputed = train_blocks(
        *make_blocks(compute_format, scaling), lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
    )
    assert equal_results(plain, recomputed)


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES)
def test_checkpointed_layers_keep_no_operand(compute_format, scaling, monkeypatch):
    """Between forward and backward; without checkpointing one operand a layer input, the transposed one, is kept."""
    made = []
    for scaling_class in scaling_module.SCALINGS.values():
        original = scaling_class.quantize

        def recorded(self, *args, original=original, **kwargs):
            pair = original(self, *args, **kwargs)
            codes = [o.codes if isinstance(o, Float8Operand) else o for o in pair if o is not None]
            made.extend(weakref.ref(tensor.untyped_storage()) for tensor in codes)
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
        alive[checkpointed] = sum(memory() is not None for memory in made)
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
