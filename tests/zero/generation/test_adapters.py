"""LoRA layers in one forward, beside PEFT's own: the same sums, no less exact; and which layers are merged."""

import warnings

import pytest
import torch
from error_bounds import UNIT_ROUNDOFF
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import nn
from transformers.pytorch_utils import Conv1D

from zeropp_fp8.zero.generation.adapters import direct_forward, with_adapters
from zeropp_fp8.zero.generation.layers import layers_to_merge, lora_layers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    def __init__(self, inputs=40, outputs=24, bias=True, conv=False):
        super().__init__()
        self.proj = Conv1D(outputs, inputs) if conv else nn.Linear(inputs, outputs, bias=bias)

    def forward(self, x):
        return self.proj(x)


def layer_of(adapters, dtype=torch.float32, adapter_dtype=None, seed=0, net=None, **options):
    """(the PEFT model, its LoRA layer): an adapter for each (rank, alpha), all of them active, with random matrices."""
    torch.manual_seed(seed)
    model = (Net() if net is None else net).to(dtype)
    for i, (rank, alpha) in enumerate(adapters):
        config = LoraConfig(
            r=rank,
            lora_alpha=alpha,
            target_modules=["proj"],
            lora_dropout=0.5 * (i % 2),
            init_lora_weights=False,
            **options,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, config, f"a{i}") if i == 0 else (model.add_adapter(f"a{i}", config), model)[1]
    layer = model.base_model.model.proj
    layer.set_adapter([f"a{i}" for i in range(len(adapters))])
    for name in layer.lora_A:
        for part in (layer.lora_A[name], layer.lora_B[name]):
            part.to(dtype if adapter_dtype is None else adapter_dtype)
            part.weight.data.normal_(std=part.weight.shape[1] ** -0.5)
    return model.eval(), layer


def linear(module, adapters):
    """As a linear layer's forward in generation."""
    weight, bias = module.weight.data, None if module.bias is None else module.bias.data
    return with_adapters(lambda x: torch.ops.aten.linear.default(x, weight, bias), adapters)


def in_float64(layer, x):
    """base(x) + sum of scaling * (B (A x) + bias), with the numbers of the layer."""
    base = layer.base_layer
    weight = base.weight.double().t() if isinstance(base, nn.Linear) else base.weight.double()
    wanted = x.double() @ weight + (0 if base.bias is None else base.bias.double())
    for name in layer.active_adapters:
        lora_A, lora_B = layer.lora_A[name], layer.lora_B[name]
        product = x.double() @ lora_A.weight.double().t() @ lora_B.weight.double().t()
        product += 0 if lora_B.bias is None else lora_B.bias.double()
        wanted += layer.scaling[name] * product
    return wanted


@given(
    adapters=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 8, 17, 64]), st.sampled_from([1, 3, 16, 64])), min_size=1, max_size=3
    ),
    dtype=st.sampled_from(sorted(DTYPES)),
    fp32_adapters=st.booleans(),
    bias=st.booleans(),
    lora_bias=st.booleans(),
    rslora=st.booleans(),
    conv=st.booleans(),
    rows=st.integers(0, 5),
    seed=st.integers(0, 2**20),
)
@settings(derandomize=True, max_examples=80, deadline=None)
def test_no_less_exact_than_peft(adapters, dtype, fp32_adapters, bias, lora_bias, rslora, conv, rows, seed):
    dtype = DTYPES[dtype]
    net = Net(bias=bias, conv=conv)
    options = {"use_rslora": rslora, "lora_bias": lora_bias and (bias or conv), "fan_in_fan_out": conv}
    _, layer = layer_of(adapters, dtype, torch.float32 if fp32_adapters else None, seed, net, **options)
    forward = direct_forward(layer, linear)
    x = torch.randn(2, rows, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with torch.no_grad():
        got, peft, wanted = forward(x), layer(x), in_float64(layer, x)
    assert got.dtype == peft.dtype == dtype and got.shape == peft.shape == (2, rows, 24)
    if rows:
        error, of_peft = ((y.double() - wanted).norm() / wanted.norm() for y in (got, peft))
        assert error <= 1.2 * of_peft + UNIT_ROUNDOFF[dtype], (error, of_peft)
        assert error < (len(adapters) + 3) * UNIT_ROUNDOFF[dtype]


def test_base_alone():
    """Disabled or merged adapters, and none of the active names in the layer: the base layer's product."""
    for change in (
        lambda layer: layer.enable_adapters(False),
        lambda layer: layer.merge(),
        lambda layer: layer.set_adapter("other"),
    ):
        _, layer = layer_of([(4, 8)])
        change(layer)
        given, x = [], torch.randn(3, 40)
        forward = direct_forward(
            layer, lambda module, adapters, given=given: given.append(adapters) or linear(module, adapters)
        )
        with torch.no_grad():
            assert torch.equal(forward(x), layer(x)) and torch.equal(layer(x), layer.base_layer(x)) and given == [[]]


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"alora_invocation_tokens": [1]}], ids=lambda options: next(iter(options))
)
def test_variants_are_left_to_peft(options):
    model, layer = layer_of([(4, 8)], **options)
    assert list(lora_layers(model)) == [layer] and direct_forward(layer, linear) is None


def test_merged_and_disabled_is_left_to_peft():
    """It takes the adapter out of the weight at the next call."""
    _, layer = layer_of([(4, 8)])
    layer.merge()
    layer.enable_adapters(False)
    assert direct_forward(layer, linear) is None


def test_only_layers_of_that_class():
    """A class of its own, and a forward that somebody has put on a layer, are not looked into."""

    class Other(LoraLinear):
        def forward(self, x):
            return super().forward(x) + 1

    model, layer = layer_of([(4, 8)])
    layer.forward = lambda x: x
    assert list(lora_layers(model)) == []
    del layer.forward
    layer.__class__ = Other
    assert list(lora_layers(model)) == []


CHANGES = {
    "another adapter": lambda layer: layer.set_adapter("a1"),
    "fewer, in the same list": lambda layer: layer._active_adapter.pop(),
    "disabled": lambda layer: layer.enable_adapters(False),
    "merged": lambda layer: layer.merge(),
    "scaled": lambda layer: layer.set_scale("a0", 3.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later(change):
    """Is seen at the next call."""
    _, layer = layer_of([(4, 8), (3, 5)])
    layer.forward = direct_forward(layer, linear)
    x = torch.randn(3, 40)
    with torch.no_grad():
        before = layer(x)
        CHANGES[change](layer)
        got = layer(x)
        del layer.forward
        assert torch.equal(got, layer(x))
        assert change == "merged" or not torch.allclose(got, before, atol=1e-3)


def test_an_adapter_for_each_sample():
    """`adapter_names`, as PEFT hands them to its layers."""
    model, layer = layer_of([(4, 8), (3, 5)])
    names, x = ["a0", "__base__", "a1"], torch.randn(3, 40)
    with torch.no_grad():
        wanted = model(x, adapter_names=names)
        layer.forward = direct_forward(layer, linear)
        assert torch.equal(model(x, adapter_names=names), wanted)
        assert not torch.allclose(model(x), wanted, atol=1e-3)


def test_hooks_within():
    """Of the base layer, of A, B and dropout: they are called, also those that come later."""
    _, layer = layer_of([(4, 8), (3, 5)])
    x = torch.randn(3, 40)
    with torch.no_grad():
        wanted = layer(x)
        forward = direct_forward(layer, linear)
        for module in (layer.base_layer, layer.lora_A["a0"], layer.lora_B["a1"], layer.lora_dropout["a1"]):
            calls = []
            handle = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            assert torch.equal(forward(x), wanted) and calls == [1]
            handle.remove()
            assert torch.allclose(forward(x), wanted, atol=1e-5) and calls == [1]


def test_dropout_when_training():
    _, layer = layer_of([(4, 8), (3, 5)])
    forward, x = direct_forward(layer, linear), torch.randn(3, 40)
    with torch.no_grad():
        assert torch.equal(forward(x), forward(x))
        layer.train()
        assert not torch.equal(forward(x), forward(x))


class Quantized(LoraLinear):
    """Merges as PEFT's layers of bitsandbytes do: the base layer gets another parameter."""

    def merge(self, *_, **__):
        raise AssertionError("this would stay")


def test_layers_of_other_libraries_are_left_alone():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
    assert layers_to_merge(model) == adapted and len(adapted) == 4
    adapted[1].__class__ = Quantized
    assert layers_to_merge(model) == [adapted[0], *adapted[2:]]


def test_what_is_merged_or_disabled_already():
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    first, second, *others = layers_to_merge(model)
    first.merge()
    second.enable_adapters(False)
    assert layers_to_merge(model) == others
