"""Packed experts that lie as codes: for few tokens those that are chosen are multiplied with as they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

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

    first, second = stacks
    biases = ("gate_up_proj_bias" if module.has_gate else "up_proj_bias", "down_proj_bias") if module.has_bias else None

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if top_k_index.numel() > FEW_CHOICES or hidden_states.dtype != first.weight.dtype:
            return decoded(hidden_states, top_k_index, top_k_weights)
        expert_of = top_k_index.reshape(-1).to(torch.int32)  # as the kernel reads it, once for both
        x = first(hidden_states, expert_of)
        if biases is not None:
            x = x + getattr(module, biases[0])[expert_of]
        x = second(module._apply_gate(x) if module.has_gate else module.act_fn(x), expert_of)
        if biases is not None:
            x = x + getattr(module, biases[1])[expert_of]
        weighted = x.unflatten(0, top_k_index.shape) * top_k_weights.unsqueeze(-1)
        return weighted.sum(1).to(hidden_states.dtype)

    return forward
