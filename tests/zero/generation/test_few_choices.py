"""The forward of packed experts for few tokens, with stacks of ordinary numbers, beside transformers' own."""

import expert_models
import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from zeropp_fp8.kernels.linear.quantized_linear import FEW_CHOICES
from zeropp_fp8.zero.generation.few_choices import few_choices

EXPERTS, SIZES = 5, {"hidden_size": 32, "intermediate_size": 48}
MAKERS = {
    "gate": (MixtralExperts, MixtralConfig(**SIZES, num_local_experts=EXPERTS)),
    "gate and biases": (GptOssExperts, GptOssConfig(**SIZES, num_local_experts=EXPERTS)),
    "no gate": (NemotronHExperts, NemotronHConfig(**SIZES, moe_intermediate_size=48, n_routed_experts=EXPERTS)),
}


class Stack:
    """A projection as QuantizedStack has it: a row of x per choice, or per token."""

    def __init__(self, weight):
        self.weight = weight

    def __call__(self, x, expert_of):
        assert expert_of.dtype == torch.int32
        rows = x.repeat_interleave(len(expert_of) // len(x), dim=0)
        return torch.einsum("sk,snk->sn", rows, self.weight[expert_of])


def made(kind):
    module = expert_models.made(MAKERS[kind])
    first = "gate_up_proj" if module.has_gate else "up_proj"
    weights = [getattr(module, name).detach() for name in (first, "down_proj")]
    return module, [Stack(w.transpose(1, 2) if module.is_transposed else w) for w in weights]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dropped", [0.0, 0.4])
@torch.no_grad()
def test_few(kind, dropped):
    """Also with choices of no expert, which transformers has as choices without a weight."""
    module, stacks = made(kind)
    forward = few_choices(module, stacks, None)
    x, weights = torch.randn(7, 32), torch.rand(7, 2)
    index = torch.rand(7, EXPERTS).argsort(dim=1)[:, :2]
    gone = torch.rand(7, 2) < dropped
    torch.testing.assert_close(
        forward(x, index.masked_fill(gone, EXPERTS), weights), module(x, index, weights.masked_fill(gone, 0.0))
    )


def test_many_and_other_dtypes_are_decoded():
    module, stacks = made("gate")
    forward = few_choices(module, stacks, lambda *given: "decoded")
    for tokens, dtype in ((FEW_CHOICES, torch.float32), (1, torch.bfloat16)):
        index = torch.zeros(tokens, 2, dtype=torch.long)
        assert forward(torch.zeros(tokens, 32, dtype=dtype), index, torch.ones(tokens, 2)) == "decoded"
