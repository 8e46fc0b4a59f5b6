"""Layers that compute what their class says and nothing else: linear ones, LoRA around them, and packed experts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from torch import nn

from zeropp_fp8.compute.experts import LowPrecisionExperts, projections_of
from zeropp_fp8.compute.linear import LowPrecisionLinear


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer's forward is that of a linear layer."""
    plain = type(layer).forward in (nn.Linear.forward, LowPrecisionLinear.forward)
    return plain and "forward" not in layer.__dict__ and "weight" in layer._parameters


def linear_layers(module: nn.Module) -> Iterator[nn.Linear]:
    """Layers whose forward is that of a linear layer, and nothing else.

    Not those with LoRA on a parameter (PEFT's `target_parameters`), which computes another weight at each call.
    """
    computed = _with_lora_on_parameters(module)
    return (layer for layer in module.modules() if is_linear(layer) and layer not in computed)


def expert_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Packed experts [experts, out, in] without LoRA on them."""
    computed = _with_lora_on_parameters(module)
    for layer in module.modules():
        own = isinstance(layer, LowPrecisionExperts) or "forward" in layer.__dict__ or layer in computed
        if own or not projections_of(layer) or layer.is_transposed or getattr(layer, "has_post_expert_norm", False):
            continue
        yield layer


def _with_lora_on_parameters(module: nn.Module) -> set[nn.Module]:
    wrapper = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())  # an older PEFT has none
    return {layer.get_base_layer() for layer in module.modules() if isinstance(layer, wrapper)}


def lora_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Layers whose forward is PEFT's LoRA around one layer, a linear one or transformers' Conv1D."""
    lora = sys.modules.get("peft.tuners.lora.layer")  # a model that has such layers has imported it
    for layer in module.modules() if lora is not None else ():
        if type(layer).forward is lora.Linear.forward and "forward" not in layer.__dict__:
            yield layer


def layers_to_merge(module: nn.Module) -> list[nn.Module]:
    """Layers whose active LoRA or DoRA PEFT adds to weights that only they read.

    Others compute as in training. PEFT cannot merge some (aLoRA, a bias that the layer lacks), puts other modules or
    weights in their place (LN Tuning, bitsandbytes), and of tied weights the other end would compute with it too.
    """
    lora, users = getattr(sys.modules.get("peft.tuners.lora.layer"), "LoraLayer", ()), _users(module)

    def can_be_merged(layer: nn.Module) -> bool:
        base, active, variants = layer.get_base_layer(), layer.active_adapters, getattr(layer, "lora_variant", {})
        plain = all("Dora" in type(variants[name]).__name__ for name in active if name in variants)
        fits = getattr(base, "groups", 1) == 1 and (
            getattr(base, "bias", None) is not None or not any(layer.lora_bias.get(name) for name in active)
        )
        return plain and fits and all(users[id(p)] == 1 for p in base._parameters.values() if p is not None)

    layers = [m for m in module.modules() if isinstance(m, lora) and type(m).__module__ == lora.__module__]
    return [m for m in layers if not m.merged and not m.disable_adapters and can_be_merged(m)]


def _users(module: nn.Module) -> Counter[int]:
    """By id of a parameter, the modules that have it."""
    return Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)


def multipliable_weights(module: nn.Module) -> set[int]:
    """id of each weight that is read by the forward of one linear layer, or of packed experts, only.

    A PEFT layer reads its adapters' weights. The weight of the layer within it, plain LoRA leaves to that layer; DoRA
    and other adapters read it.
    """
    users, read = _users(module), set()
    for layer in module.modules():
        if hasattr(layer, "get_base_layer"):
            base = layer.get_base_layer()
            is_lora = hasattr(layer, "lora_A") and not getattr(layer, "lora_variant", None)
            read |= {id(m) for m in layer.modules() if m is not base or not is_lora}
    layers = [layer for layer in linear_layers(module) if type(layer) is nn.Linear and id(layer) not in read]
    weights = {id(dict.__getitem__(layer._parameters, "weight")) for layer in layers}
    weights |= {id(weight) for layer in expert_layers(module) for weight in projections_of(layer).values()}
    return {weight for weight in weights if users[weight] == 1}
