"""SwiGLU that hands the codes of its result to the linear layer after it: silu(gate) * up -> FP8 in one pass.

Only with delayed scaling, whose scale is known beforehand, and on a GPU. Elsewhere, in the first step and in graphs of
torch.compile the module computes as it was written. The result itself is written too, so that whatever looks at it sees
it; the layer finds its operands by the memory of its input (scaling.py), and casts the input where it does not.

In 16 bits the unfused way moves 14 bytes per element in forward (with the cast) and 18 in backward, this 8 and 10.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zeropp_fp8.compute import casts
from zeropp_fp8.compute.differentiable_once import applied, differentiable_once
from zeropp_fp8.compute.fused_module import FusedModule, fuse, scales_are_known, takes_codes, takes_transposed_codes
from zeropp_fp8.compute.linear import LowPrecisionLinear
from zeropp_fp8.compute.source import says

# What transformers' Llama, Mistral, Qwen2 and Qwen3 compute; a module that says anything else stays as it is.
_FORWARD = "return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, down: LowPrecisionLinear, training: bool):
        precision = down.precision
        transposed = takes_transposed_codes(down, training) and not precision.weight_is_transposed
        flat = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
        values, pair = precision.scaling.made_input(precision.layer, casts.swiglu, flat, transposed, training)
        if training:
            ctx.save_for_backward(gate, up)
        values = values.view(gate.shape)
        precision.scaling.offer_input(values, pair, training)
        return values

    @staticmethod
    @differentiable_once
    def backward(ctx, grad: Tensor):
        from zeropp_fp8.kernels.casts.swiglu import swiglu_backward

        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        return *swiglu_backward(grad.contiguous(), gate, up), None, None


_apply = applied(_SwiGLU)


class _SwiGLUModule(FusedModule):
    """A gated feed-forward module of transformers, with its product fused."""

    def forward(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        down = self.down_proj
        if takes_codes(down, gate, up.dtype):
            bias_trains = down.bias is not None and down.bias.requires_grad
            trains = gate.requires_grad or up.requires_grad or down.weight_requires_grad or bias_trains
            training = torch.is_grad_enabled() and trains
            return down(_apply(gate, up, down, training))
        return down(self.act_fn(gate) * up)


@torch.no_grad()
def _is_silu(activation) -> bool:
    probe = torch.linspace(-4, 4, 9)
    # transformers has a class of its own for it; a module with parameters is something else.
    plain = isinstance(activation, nn.Module) and next(activation.parameters(), None) is None
    return plain and torch.equal(activation(probe), F.silu(probe))


def fuse_swiglu(model: nn.Module) -> list[nn.Module]:
    """Let the gated feed-forward modules of a converted model hand FP8 codes on; returns those modules. In place."""
    fused = []
    for module in model.modules():
        down, activation = getattr(module, "down_proj", None), getattr(module, "act_fn", None)
        if scales_are_known(down) and _is_silu(activation) and says(type(module).forward, "x", _FORWARD):
            fuse(module, _SwiGLUModule)
            fused.append(module)
    return fused
