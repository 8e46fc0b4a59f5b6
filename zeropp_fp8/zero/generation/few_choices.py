"""Packed experts that lie as codes: for few tokens those that are chosen are multiplied with as they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeropp_fp8.compute.experts import of_experts

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_linear import QuantizedStack  # needs Triton, which is loaded on first use


def few_choices(module: nn.Module, stacks: Sequence[QuantizedStack], decoded: Callable) -> Callable:
    """The forward of packed experts (transformers' `use_experts_implementation`).

    Args:
        module: whose biases and activation these are.
        stacks: the first and the second projection.
        decoded: the forward for more tokens, and for another dtype.
    """
    from zeropp_fp8.kernels.linear.quantized_linear import FEW_CHOICES

    first, names = stacks[0], ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if top_k_index.numel() > FEW_CHOICES or hidden_states.dtype != first.weight.dtype:
            return decoded(hidden_states, top_k_index, top_k_weights)
        top_k_index, top_k_weights = of_experts(top_k_index, top_k_weights, module.num_experts)
        x, expert_of = hidden_states, top_k_index.reshape(-1).to(torch.int32)  # as the kernel reads it, once for both
        for stack, name in zip(stacks, names):
            if stack is not first:
                x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
            x = stack(x, expert_of)
            if module.has_bias:
                x = x + getattr(module, f"{name}_bias")[expert_of]
        weighted = x.unflatten(0, top_k_index.shape) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    return forward
