"""RMSNorm that hands the codes of its result to the linear layers after it: normalize, weight and cast in one pass.

As for SwiGLU (swiglu.py): with delayed scaling, on a GPU, where the modules are transformers' own; the result itself is
written too. Which layer's scale it is, the decoder layer tells: its first norm feeds q_proj (k_proj and v_proj share
the operands), its second one gate_proj (and up_proj).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zeropp_fp8.compute import casts
from zeropp_fp8.compute.differentiable_once import applied, differentiable_once
from zeropp_fp8.compute.fused_module import FusedModule, fuse, scales_are_known, takes_codes, takes_transposed_codes
from zeropp_fp8.compute.linear import LowPrecisionLinear
from zeropp_fp8.compute.source import hands_on, says

# transformers' LlamaRMSNorm, of which Mistral, Qwen2 and Qwen3 have copies.
_FORWARD = """
input_dtype = hidden_states.dtype
hidden_states = hidden_states.to(torch.float32)
variance = hidden_states.pow(2).mean(-1, keepdim=True)
hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
return self.weight * hidden_states.to(input_dtype)
"""
# norm of a decoder layer -> the linear layer whose input it makes
_CONSUMERS = {"input_layernorm": ("self_attn", "q_proj"), "post_attention_layernorm": ("mlp", "gate_proj")}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, epsilon: float, linear: LowPrecisionLinear, training: bool):
        precision = linear.precision
        flat = x.reshape(-1, x.shape[-1])
        transposed = takes_transposed_codes(linear, training)
        inverse_rms = casts.inverse_rms(flat, epsilon)
        inputs = flat, weight, inverse_rms
        values, pair = precision.scaling.made_input(precision.layer, casts.rms_norm, inputs, transposed, training)
        if training:
            # A copy: ZeRO-3 may drop the Parameter's values before backward, and they are few.
            ctx.save_for_backward(x, weight.detach().clone(), inverse_rms.view(*x.shape[:-1], 1))
        values = values.view(x.shape)
        precision.scaling.offer_input(values, pair, training)
        return values

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: Tensor):
        return *gradients_of_rms_norm(grad, *ctx.saved_tensors, ctx.needs_input_grad[:2]), None, None, None


_apply = applied(_RMSNorm)


def gradients_of_rms_norm(
    grad: Tensor, x: Tensor, weight: Tensor, inverse_rms: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """(gradient of x, gradient of weight) of weight * (x * inverse_rms), by the kernel of torch's own backward.

    Args:
        grad, x: bf16, fp16 or fp32 [..., C], on a GPU: torch has the operator for no CPU.
        weight: [C].
        inverse_rms: fp32 [..., 1].
        needed: which of them are asked for; None for the other.
    """
    found = torch.ops.aten._fused_rms_norm_backward.default(grad, x, weight.shape, inverse_rms, weight, list(needed))
    return tuple(gradient if asked else None for gradient, asked in zip(found, needed))


class _RMSNormModule(FusedModule):
    """RMSNorm of transformers; `feeds` is (the linear layer after it,), in a tuple so that it is no submodule."""

    def forward(self, hidden_states):
        (linear,) = self.feeds
        if not takes_codes(linear, hidden_states, self.weight.dtype):
            return super().forward(hidden_states)
        trains = hidden_states.requires_grad or self.weight.requires_grad or linear.weight_requires_grad
        training = torch.is_grad_enabled() and trains
        return _apply(hidden_states, self.weight, self.variance_epsilon, linear, training)


def fuse_rms_norms(model: nn.Module) -> list[nn.Module]:
    """Let the norms of a converted model's decoder layers hand FP8 codes on; returns those norms. In place."""
    fused = []
    for layer in model.modules():
        for name, (part, consumer) in _CONSUMERS.items():
            norm, linear = getattr(layer, name, None), getattr(getattr(layer, part, None), consumer, None)
            if norm is None or not scales_are_known(linear) or not hands_on(type(layer).forward, name, part):
                continue
            if says(type(norm).forward, "hidden_states", _FORWARD):
                fuse(norm, _RMSNormModule)
                norm.feeds = (linear,)
                fused.append(norm)
    return fused
