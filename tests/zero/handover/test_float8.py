"""Which linear layers an engine in FP8 gets as codes."""

import itertools

import pytest
import torch
import transformers

from zeropp_fp8.compute.convert import routers
from zeropp_fp8.zero.export.weights import groups
from zeropp_fp8.zero.handover.float8 import Float8Weights

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize("kind", ["Afmoe", "Qwen3Moe"])
def test_routers_are_sent_as_values(kind):
    """A router that is a linear layer, and one that is a module of its own kind."""
    more = {"num_dense_layers": 1, "num_shared_experts": 1} if kind == "Afmoe" else {}
    config = getattr(transformers, f"{kind}Config")(
        num_hidden_layers=2, num_key_value_heads=1, **SIZES, **EXPERTS, **more
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    parts = list(itertools.chain.from_iterable(groups(model)))
    chosen = Float8Weights(parts, None, ["lm_head"], routers(model))
    by_name = dict(model.named_modules())
    sent = {name for name, module in by_name.items() if module in chosen}
    assert "model.layers.1.self_attn.q_proj" in sent and "lm_head" not in sent
    assert not any("router" in name or name.endswith("mlp.gate") for name in sent)
    assert {"lm_head", *(["model.layers.1.mlp.router.gate"] if kind == "Afmoe" else [])} <= {
        *chosen.quantization_config()["ignore"]
    }
