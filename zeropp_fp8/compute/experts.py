"""Packed experts of a mixture: parameters [experts, out, in], or [experts, in, out], as transformers keeps them.

In low precision tokens are sorted by expert, and each projection is one product of groups (grouped.py), as with
transformers' `experts_implementation` "grouped_mm". Router, biases and sums over experts stay in high precision.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute.dispatch import combine, dispatch
from zeropp_fp8.compute.grouped import Groups
from zeropp_fp8.compute.linear import apply_linear, refuse_fp16
from zeropp_fp8.compute.products import LinearPrecision, decode_for_readers
from zeropp_fp8.formats.shapes import is_stack

# Set by transformers' `use_experts_implementation`, whose functions are told by them how a class computes.
_TRAITS = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
_FORWARDS = "transformers.integrations.moe"  # the module whose forward such a class has


def of_experts(index: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Choices and their weights; numbers from the experts' on are choices of none, and have no weight."""
    return index.clamp(max=experts - 1), weights * (index < experts)


def packed_experts(module: nn.Module) -> list[Parameter]:
    """The module's own parameters that are a stack of as many matrices as it says that it has experts.

    A number of experts tells them from position embeddings and the like, which have three dimensions too.
    """
    return list(_packed(module).values())


def _packed(module: nn.Module) -> dict[str, Parameter]:
    numbers = {value for name, value in vars(module).items() if "expert" in name and isinstance(value, int)}
    own = module.named_parameters(recurse=False)
    return {name: p for name, p in own if is_stack(sharded.shape(p)) and sharded.shape(p)[0] in numbers}


def projections_of(module: nn.Module) -> dict[str, Parameter]:
    """The packed weights of experts that can compute in low precision, by name; none of other modules."""
    if not all(hasattr(module, trait) for trait in _TRAITS) or getattr(module, "_is_expert_parallel", False):
        return {}
    forward = getattr(type(module).forward, "__globals__", {}).get("__name__")
    if forward != _FORWARDS and not isinstance(module, LowPrecisionExperts):
        return {}  # a subclass with a forward of its own
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    packed = _packed(module)
    return {name: packed[name] for name in names if name in packed} if packed.keys() == set(names) else {}


@dataclass
class Projection:
    """One packed weight of experts, as a layer of its own.

    Attributes:
        module, name: whose it is, and its name there.
    """

    module: nn.Module
    name: str
    precision: LinearPrecision

    @property
    def weight(self) -> Tensor:
        """The weight, which is not gathered for whoever asks; of one with a parametrization its values."""
        own = self.module._parameters
        return dict.__getitem__(own, self.name) if self.name in own else getattr(self.module, self.name)

    def own_weight(self) -> Tensor:
        """The weight for the product, which takes codes."""
        own = self.module._parameters
        return own[self.name] if self.name in own else self.weight  # noqa: SIM401 (ZeRO-3's dict gathers)

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[rows, out] of x [rows, in]."""
        device_type, weight = x.device.type, self.own_weight()
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        training = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        with torch.autocast(device_type, enabled=False):
            return apply_linear(x, weight, None, self.precision, training, groups)


class LowPrecisionExperts(nn.Module):
    """The base of converted experts; `in_low_precision` makes the classes.

    Attributes:
        projections: by name of the weight.
    """

    projections: dict[str, Projection]

    def compute_in(self, precisions: dict[str, LinearPrecision]) -> None:
        """Compute in low precision from now on."""
        self.projections = {name: Projection(self, name, precision) for name, precision in precisions.items()}

    def compute_as(self) -> None:
        """Be of the plain class again."""
        del self.projections
        self.__class__ = type(self).__bases__[1]

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, hidden] of hidden_states [tokens, hidden], through the experts top_k_index [tokens, k], whose
        results are weighted with top_k_weights [tokens, k] and added up."""
        top_k_index, top_k_weights = of_experts(top_k_index, top_k_weights, self.num_experts)
        chosen, expert_of = top_k_index.shape[-1], top_k_index.reshape(-1)
        groups = Groups.of(expert_of, self.num_experts)
        first, second = self.projections
        x = self._through(first, dispatch(hidden_states, groups, chosen), groups, expert_of)
        x = self._through(second, self._apply_gate(x) if self.has_gate else self.act_fn(x), groups, expert_of)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        return combine(x, top_k_weights, groups).to(hidden_states.dtype)

    def _through(self, name: str, x: Tensor, groups: Groups, expert_of: Tensor) -> Tensor:
        y = self.projections[name](x, groups)
        return y + groups.spread(getattr(self, f"{name}_bias")[expert_of]) if self.has_bias else y

    def __getattr__(self, name: str):
        """A weight, read by anybody else: the values of one that is there as codes are wanted."""
        value = super().__getattr__(name)
        if name in self.__dict__.get("projections", ()):
            decode_for_readers(value)
        return value

    def _apply(self, fn, recurse=True):
        for projection in self.projections.values():
            refuse_fp16(projection.weight, projection.precision, fn)
        return super()._apply(fn, recurse)


@functools.cache
def in_low_precision(plain: type) -> type:
    """The class of experts in low precision."""
    return type(f"LowPrecision{plain.__name__}", (LowPrecisionExperts, plain), {"__module__": __name__})
