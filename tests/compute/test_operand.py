"""Linear layers: operands and how often each is made, and weights that ZeRO-3 gathers, as values or as codes."""

import copy
import math

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from error_bounds import signal_to_noise_db
from linear_cases import (
    E4M3,
    FEW_CASES,
    FP8_CASES,
    HYBRID_CASES,
    NO_GRADIENTS,
    draw,
    equal_results,
    make_layer,
    run,
    three_layers,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from zeropp_fp8 import sharded
from zeropp_fp8.compute import casts, convert_linear_layers
from zeropp_fp8.compute import scaling as scaling_module

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


# -- weights that ZeRO-3 gathers -------------------------------------------------------------------------------------


def gather_as_operand(layer, reference):
    """Gather a weight that travels as codes as ZeRO-3 does: codes are an attribute, and values are NaN."""
    cast = {"per_channel": casts.cast_per_row, "block": casts.cast_tiles}.get(
        layer.precision.scaling.compute.scaling, casts.cast_per_tensor
    )
    operand = cast(reference.weight.detach(), E4M3)[0]
    layer.weight.ds_status = ZeroParamStatus.AVAILABLE
    sharded.remember(layer.weight, operand=operand)
    layer.weight.data = torch.full((1,), math.nan).expand(layer.weight.shape)
    return operand


@pytest.mark.parametrize("checkpointed", [None, True, False])
@pytest.mark.parametrize("compute_format, scaling", FP8_CASES + HYBRID_CASES)
def test_gathered_codes_are_the_operand(compute_format, scaling, checkpointed):
    """The same bits as from the values; with a scale per row, the other axis is quantized from the decoded codes."""
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


@pytest.mark.parametrize("scaling", ["current", "delayed", "per_channel", "block"])
def test_gathered_codes_are_decoded_for_a_gemm_in_high_precision(scaling):
    """That GEMM alone multiplies the decoded weight; the codes stay the operand of the other one."""
    x, grad = draw("normal", 24, 256), draw("normal", 24, 128, seed=1)

    def results(*high):
        torch.manual_seed(0)
        layer, _, plain = make_layer("fp8", scaling, 256, 128, high_precision_gemms=list(high))
        plain.weight.data = gather_as_operand(layer, plain).dequantize()
        return run(layer, x, grad), run(plain, x, grad)

    low, decoded = results()
    for gemm, own in (("output", 0), ("grad_input", 1)):
        found, _ = results(gemm)
        assert [torch.equal(a, b) for a, b in zip(found, low)] == [own != 0, own != 1, True, True], gemm
        assert torch.equal(found[own], decoded[own])


class _Partitioned:
    """A ZeRO-3 parameter's methods, for a weight that was released between forward and backward."""

    def __init__(self, weight):
        self.weight, self.values, self.calls = weight, weight.data, []
        weight.ds_status = ZeroParamStatus.AVAILABLE

    def release(self):
        self.calls.append("partition")
        sharded.set_dropped(self.weight, torch.empty(0))

    def gather(self):
        self.calls.append("gather")
        sharded.set_full(self.weight, self.values)


@pytest.mark.parametrize("compute_format, scaling", FEW_CASES + [NO_GRADIENTS])
def test_released_weight_is_gathered_for_backward(compute_format, scaling):
    """And released again; where it is not needed (x wants no gradient), it is not gathered."""
    layer, scales, _ = make_layer(compute_format, scaling, 256, 128)
    x, grad = draw("normal", 24, 256), draw("normal", 24, 128, seed=1)
    expected = run(layer, x, grad)
    scales.forget_input()
    zero = _Partitioned(layer.weight)
    layer.weight.all_gather, layer.weight.partition = zero.gather, zero.release
    for wanted in (True, False):
        sharded.set_full(layer.weight, zero.values)
        zero.calls = []
        layer.zero_grad()
        x = x.detach().requires_grad_(wanted)
        y = layer(x)
        zero.release()
        grads = torch.autograd.grad(y, [layer.bias, *([x] if wanted else [])], grad)
        assert torch.equal(grads[0], expected[3])
        assert not wanted or torch.equal(grads[1], expected[1])
        assert zero.calls == (["partition", "gather", "partition"] if wanted else ["partition"])
