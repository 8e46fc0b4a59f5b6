"""DeepSpeed's FLOPs profiler counts converted layers as it counts the plain ones; afterwards all is as it was."""

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from models import llama

from zeropp_fp8.compute import convert_linear_layers, swiglu
from zeropp_fp8.compute import linear as linear_module

TOKENS = torch.arange(24).view(2, 12)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=32))


@pytest.fixture
def profile(monkeypatch):
    from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile

    from zeropp_fp8.plugin.flops import counting_start, ending_stop

    monkeypatch.setattr(FlopsProfiler, "start_profile", counting_start(inspect.unwrap(FlopsProfiler.start_profile)))
    monkeypatch.setattr(FlopsProfiler, "stop_profile", ending_stop(inspect.unwrap(FlopsProfiler.stop_profile)))
    inputs = {"input_ids": TOKENS, "use_cache": False}
    return lambda model: get_model_profile(model, kwargs=inputs, print_profile=False, as_string=False)


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "compute",
    [
        {"format": "fp8", "scaling": "current"},
        {"format": "fp8", "scaling": "per_channel"},
        {"format": "mxfp4", "scaling": "mx"},
    ],
)
def test_counts_are_those_of_the_plain_model(make, compute, profile):
    plain = make()
    converted = copy.deepcopy(plain)
    report = convert_linear_layers(converted, {**compute, "min_features": 16})
    assert len(report.converted) >= 8
    before = F.linear, linear_module._LowPrecisionModule._multiply, swiglu._SwiGLU.apply
    found, expected = profile(converted), profile(plain)
    assert found == expected
    assert before == (F.linear, linear_module._LowPrecisionModule._multiply, swiglu._SwiGLU.apply)
    assert "apply" not in swiglu._SwiGLU.__dict__


def test_experts_count_the_tokens_that_they_get(profile):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=64, num_key_value_heads=2, num_local_experts=4, **sizes)
    plain = MixtralForCausalLM(config)
    plain.set_experts_implementation("eager")
    converted = copy.deepcopy(plain)
    report = convert_linear_layers(converted, {"format": "fp8", "scaling": "current", "min_features": 16})
    assert "model.layers.1.mlp.experts.down_proj" in report.converted
    (_, found, _), (_, expected, _) = profile(converted), profile(plain)
    assert found == expected


def test_a_fused_product_counts_its_activation(profile, monkeypatch):
    """On a GPU SwiGLU and the cast are one pass; here its place is taken by what it computes."""
    model = llama()
    expected = profile(model)
    report = convert_linear_layers(model, {"format": "fp8", "scaling": "delayed", "min_features": 16})
    assert report.fused
    monkeypatch.setattr(swiglu, "takes_codes", lambda *args: True)
    monkeypatch.setattr(swiglu._SwiGLU, "apply", lambda gate, up, *args: F.silu(gate) * up, raising=False)
    assert profile(model) == expected
