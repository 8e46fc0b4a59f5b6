"""Norms and SwiGLU fused with the cast: which are, and that nothing changes where they are not on a GPU."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from models import llama
from torch import nn
from triton_process import run

from zeropp_fp8.compute import convert_linear_layers, restore_linear_layers
from zeropp_fp8.compute.fused_module import takes_codes
from zeropp_fp8.compute.rms_norm import _RMSNormModule
from zeropp_fp8.compute.swiglu import _SwiGLUModule

DELAYED = {"format": "fp8", "scaling": "delayed"}


def fused_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, _SwiGLUModule)]


def test_llama_is_fused_and_restored():
    model = llama(hidden=64, intermediate=128)
    classes = [type(module) for module in model.modules()]
    names = list(model.state_dict())
    report = convert_linear_layers(model, DELAYED)
    assert fused_of(model) == ["model.layers.0.mlp", "model.layers.1.mlp"] and len(report.fused) == 2 + 4
    assert list(model.state_dict()) == names
    assert isinstance(copy.deepcopy(model).model.layers[0].mlp, _SwiGLUModule)
    restore_linear_layers(model)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_other_families(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    convert_linear_layers(model, DELAYED)
    assert fused_of(model) == ["model.layers.0.mlp"]


class Gated(nn.Module):
    """The known forward, with parts that may be something else."""

    def __init__(self, activation, features=64):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 128), nn.Linear(64, 128)
        self.down_proj = nn.Linear(128, features)
        self.act_fn = activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Doubled(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 2


class Named(Gated):
    def forward(self, x):
        y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Remembering(Gated):
    def forward(self, x):
        self.last = x
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    "module, compute, is_fused",
    [
        (Gated(nn.SiLU()), DELAYED, True),
        (Gated(nn.GELU()), DELAYED, False),
        (Gated(F.silu), DELAYED, False),
        (Gated(nn.SiLU(), features=8), DELAYED, False),  # down_proj stays as it is
        (Gated(nn.SiLU()), {"format": "fp8", "scaling": "current"}, False),
        (Named(nn.SiLU()), DELAYED, True),
        (Doubled(nn.SiLU()), DELAYED, False),
        (Remembering(nn.SiLU()), DELAYED, False),
    ],
)
def test_what_is_fused(module, compute, is_fused):
    model = nn.Sequential(copy.deepcopy(module))
    convert_linear_layers(model, compute)
    assert bool(fused_of(model)) == is_fused


def norms_of(model):
    return {n: m.feeds[0].precision.name for n, m in model.named_modules() if isinstance(m, _RMSNormModule)}


def test_norms_know_whom_they_feed():
    model = llama(hidden=64, intermediate=128, layers=1)
    convert_linear_layers(model, DELAYED)
    assert norms_of(model) == {
        "model.layers.0.input_layernorm": "model.layers.0.self_attn.q_proj",
        "model.layers.0.post_attention_layernorm": "model.layers.0.mlp.gate_proj",
    }
    # The consumer is no submodule of the norm: names and parameters are those of the plain model.
    plain = llama(hidden=64, intermediate=128, layers=1)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    copied = copy.deepcopy(model)
    assert copied.model.layers[0].input_layernorm.feeds[0] is copied.model.layers[0].self_attn.q_proj
    tokens = torch.arange(12).view(2, 6)
    restore_linear_layers(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_another_norm_stays():
    model = llama(hidden=64, intermediate=128, layers=1)

    class Doubled(type(model.model.norm)):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 2

    model.model.layers[0].input_layernorm.__class__ = Doubled
    convert_linear_layers(model, DELAYED)
    assert list(norms_of(model)) == ["model.layers.0.post_attention_layernorm"]


def residual_first(self, hidden_states, **kwargs):
    hidden_states = hidden_states + self.input_layernorm(self.self_attn(hidden_states, **kwargs)[0])
    mlp = self.mlp(hidden_states)
    hidden_states = self.post_attention_layernorm(mlp)
    return hidden_states


def scaled_between(self, hidden_states, **kwargs):
    normed = self.input_layernorm(hidden_states)
    hidden_states = self.self_attn(normed * 2, **kwargs)[0] + hidden_states
    normed = self.post_attention_layernorm(hidden_states)
    return self.mlp(normed) + hidden_states


@pytest.mark.parametrize(
    "forward, fed", [(residual_first, []), (scaled_between, ["model.layers.0.post_attention_layernorm"])]
)
def test_a_norm_that_feeds_something_else_stays(forward, fed):
    """Its result would be counted in the scale of a layer that never gets it."""
    model = llama(hidden=64, intermediate=128, layers=1)
    layer = model.model.layers[0]
    layer.__class__ = type("Other", (type(layer),), {"forward": forward})
    convert_linear_layers(model, DELAYED)
    assert list(norms_of(model)) == fed


@pytest.mark.parametrize("family, fed", [("qwen3", 2), ("granite", 2), ("exaone4", 0)])
def test_norms_of_other_families(family, fed):
    """EXAONE 4 normalizes what attention gives, and adds the residual before the MLP."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    convert_linear_layers(model, DELAYED)
    assert len(norms_of(model)) == fed and fused_of(model) == ["model.layers.0.mlp"]


def test_lora_on_the_last_layer_is_not_fused():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(hidden=64, intermediate=128), LoraConfig(r=4, target_modules=["down_proj"]))
    convert_linear_layers(model, DELAYED)
    assert not fused_of(model)


def test_on_a_cpu_the_module_computes_as_it_was_written():
    torch.manual_seed(0)
    plain, fused = (nn.Sequential(Gated(nn.SiLU())) for _ in range(2))
    fused.load_state_dict(plain.state_dict())
    reports = [convert_linear_layers(model, DELAYED) for model in (plain, fused)]
    plain[0].__class__ = Gated
    for _ in range(3):
        results = []
        for model, report in zip((plain, fused), reports):
            model.zero_grad()
            x = torch.ones(5, 64, requires_grad=True)
            y = model(x)
            y.square().sum().backward()
            results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
            report.scaling.end_step()
        assert all(torch.equal(a, b) for a, b in zip(*results))


def test_graphs_have_modules_as_written(monkeypatch):
    """A tensor on a GPU, which is a stand-in here, is given codes by eager code alone, and once scales are known."""
    model = nn.Sequential(Gated(nn.SiLU()))
    scaling = convert_linear_layers(model, DELAYED).scaling
    x = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"), numel=lambda: 1)
    assert not takes_codes(model[0].down_proj, x, x.dtype)
    model(torch.ones(5, 64)).sum().backward()
    scaling.end_step()
    assert takes_codes(model[0].down_proj, x, x.dtype)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not takes_codes(model[0].down_proj, x, x.dtype)


def test_backward_in_the_interpreter():
    """Against autograd of the two torch operations: the same rounding, so within one unit of the dtype."""
    script = """
import torch
import torch.nn.functional as F
from zeropp_fp8.kernels.casts.swiglu import swiglu_backward

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in mine(((3, 5), (67, 100), (1, 2049))):
        gate, up, grad = ((torch.randn(shape) * 4).to(dtype) for _ in range(3))
        gate.requires_grad_(), up.requires_grad_()
        (F.silu(gate) * up).backward(grad)
        for actual, expected in zip(swiglu_backward(grad, gate.detach(), up.detach()), (gate.grad, up.grad)):
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(actual, expected, rtol=4 * eps if eps > 1e-4 else 1e-5, atol=1e-5)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2
