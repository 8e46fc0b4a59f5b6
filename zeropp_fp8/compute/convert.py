"""Finding the linear layers of a model and letting them compute in low precision.

A layer keeps its identity: its class changes, its Parameters, its name and its state_dict do not. It is done before
ZeRO-3 puts its hooks on modules, and works on parameters that zero.Init has partitioned already.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute.experts import LowPrecisionExperts, Projection, in_low_precision, packed_experts, projections_of
from zeropp_fp8.compute.fused_module import restore_fused
from zeropp_fp8.compute.linear import LowPrecisionLinear, _LowPrecisionModule
from zeropp_fp8.compute.operand import ALIGNMENT, BLOCK
from zeropp_fp8.compute.products import HighPrecision, LinearPrecision
from zeropp_fp8.compute.rms_norm import fuse_rms_norms
from zeropp_fp8.compute.scaling import SCALINGS, Scaling
from zeropp_fp8.compute.swiglu import fuse_swiglu
from zeropp_fp8.config import GEMMS, ComputeConfig, checked_compute, high_precision_gemms, operand_formats
from zeropp_fp8.config.compute import matches

MX_BLOCK = 32  # elements along either axis
ROUTER = "a router: as many outputs as there are experts beside it"
# Layers of one module that get the same input, in Llama and its relatives.
_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Where PEFT keeps what it wraps: with adapters around it, or beside a copy that is trained (modules_to_save).
WRAPPED_BASES = ("base_layer", "original_module")


@dataclass
class ConversionReport:
    """The outcome of `convert_linear_layers`.

    Attributes:
        scaling: shared by all converted layers; its `end_step` is to be called after each optimizer step.
        converted: name -> module, or projection of packed experts.
        skipped: name -> reason, of the linear layers and experts that stay as they are.
        adapted: names of converted ones whose weight PEFT's `target_parameters` adds to in each forward.
        fused: norms and gated feed-forward modules whose result is cast as it is made (rms_norm.py, swiglu.py).
    """

    scaling: Scaling
    converted: dict[str, nn.Module | Projection] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    adapted: list[str] = field(default_factory=list)
    fused: list[nn.Module] = field(default_factory=list)

    def multiplied_as_they_are(self) -> dict[int, LinearPrecision]:
        """By id, the weights that may arrive as operands; what is added to needs values."""
        layers = [layer for name, layer in self.converted.items() if name not in self.adapted]
        return {id(layer.weight): layer.precision for layer in layers}

    def restore(self) -> None:
        """Give the converted modules the classes back that they had; those of a later conversion stay as they are."""
        modules = [layer.module if isinstance(layer, Projection) else layer for layer in self.converted.values()]
        own = [module for module in modules if any(p.scaling is self.scaling for p in _precisions(module))]
        for module in (*own, *(self.fused if own else ())):
            _restore(module)

    def __str__(self) -> str:
        reasons = Counter(self.skipped.values())
        skipped = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
        return f"{len(self.converted)} linear layers converted" + (f"; left as they are: {skipped}" if skipped else "")


def linear_classes() -> tuple[type, ...]:
    """nn.Linear, and transformers' Conv1D where a model can have one: its class is imported then."""
    made = sys.modules.get("transformers.pytorch_utils")  # importing it takes seconds
    return (nn.Linear,) if made is None else (nn.Linear, made.Conv1D)


def routers(model: nn.Module) -> set[int]:
    """id of linear layers that choose experts: beside packed ones, as many outputs, no other shape in their module."""
    modules, found = dict(model.named_modules()), set()
    for name, module in modules.items():
        counts = {sharded.shape(param)[0] for param in packed_experts(module)}
        while name.rpartition(".")[2] in WRAPPED_BASES:
            name = name.rpartition(".")[0]
        for near in (module, modules[name.rpartition(".")[0]]) if counts else ():
            counts.add(getattr(near, "num_experts", 0))  # of experts that lie on several ranks, those of all
            for child in near.children():
                layers = [m for n, m in child.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n]
                sizes = {(layer.in_features, layer.out_features) for layer in layers}
                several_squares = len(layers) > 1 and all(inputs == outputs for inputs, outputs in sizes)
                if len(sizes) == 1 and sizes.pop()[1] in counts and not several_squares:
                    found.update(map(id, layers))
    return found


@functools.cache
def _in_low_precision(conv1d: type) -> type:
    """transformers' Conv1D in low precision."""

    class LowPrecisionConv1D(_LowPrecisionModule, conv1d):
        """transformers' Conv1D, whose weight is [in, out], with its GEMMs in FP8 or MX."""

        __repr__ = nn.Module.__repr__  # Conv1D's own does not call extra_repr

        def forward(self, x: Tensor) -> Tensor:
            return self._multiply(x)

        def extra_repr(self) -> str:
            return f"nf={self.nf}, nx={self.nx}, {self.precision}"

    return LowPrecisionConv1D


def _reason_to_skip(name: str, module: nn.Module, compute: ComputeConfig, owners: Counter) -> str | None:
    if matches(name, compute.skip_modules):
        return "named in skip_modules"
    if high_precision_gemms(compute, name) == set(GEMMS):
        return "all of its GEMMs are named in high_precision_gemms"
    if type(module) not in linear_classes():
        return f"a {type(module).__name__}, which has a forward of its own"
    if owners[id(module.weight)] > 1:
        return "its weight is shared with another module"
    shape = sharded.shape(module.weight)
    if min(shape) < compute.min_features:
        return f"fewer than {compute.min_features} features"
    alignment = BLOCK if compute.scaling == "block" else ALIGNMENT  # of both features, for FP8 GEMMs
    if compute.scaling != "mx" and any(size % alignment for size in shape):
        return f"features are not multiples of {alignment}"
    return None


def convert_linear_layers(model: nn.Module, compute: ComputeConfig | Mapping[str, Any]) -> ConversionReport:
    """Let the linear layers of a model compute in the precision of a "compute" section. In place.

    nn.Linear and transformers' Conv1D are converted, wherever they stand (the base layer of a LoRA wrapper too). Norms,
    softmax, attention and activations are not touched.

    Args:
        compute: a ComputeConfig, or its fields, e.g. {"format": "fp8", "scaling": "current"}.

    Returns:
        The report. Without DeepSpeed, call `report.scaling.end_step()` after each optimizer step if scaling is delayed.

    Raises:
        ConfigError: fields that cannot work together.
        ValueError: the format is "none", or the model was converted before.
    """
    compute = checked_compute(compute)
    if compute.format == "none":
        raise ValueError('convert_linear_layers: "format" is "none"; name a format such as "fp8"')
    for name, module in model.named_modules():
        if _precisions(module):
            name = name or "the layer"
            raise ValueError(f"convert_linear_layers: {name} was converted before; call restore_linear_layers first")
    report = ConversionReport(SCALINGS[compute.scaling](compute))
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    routing = routers(model)
    for name, module in model.named_modules():
        if not isinstance(module, linear_classes()):
            _convert_experts(name, module, compute, owners, report)
            continue
        reason = ROUTER if id(module) in routing else _reason_to_skip(name, module, compute, owners)
        if reason is not None:
            report.skipped[name] = reason
            continue
        is_conv1d = type(module) is not nn.Linear
        module.__class__ = _in_low_precision(type(module)) if is_conv1d else LowPrecisionLinear
        high = HighPrecision(**dict.fromkeys(high_precision_gemms(compute, name), True))
        module.compute_in(LinearPrecision(report.scaling, report.scaling.add_layer(), name, is_conv1d, high))
        report.converted[name] = module
    adapters = [each for each in model.modules() if hasattr(each, "parameter_name") and hasattr(each, "get_base_layer")]
    adapted = {(id(each.get_base_layer()), each.parameter_name) for each in adapters}
    for name, layer in report.converted.items():
        module, weight = (layer.module, layer.name) if isinstance(layer, Projection) else (layer, "weight")
        if (id(module), weight) in adapted:
            report.adapted.append(name)
    _share_casts(model)
    report.fused = fuse_swiglu(model) + fuse_rms_norms(model)
    return report


def _convert_experts(
    name: str, module: nn.Module, compute: ComputeConfig, owners: Counter, report: ConversionReport
) -> None:
    if not packed_experts(module):
        return
    weights = {f"{name}.{key}": weight for key, weight in projections_of(module).items()}
    reasons = [_reason_to_skip_experts(full_name, weight, compute) for full_name, weight in weights.items()]
    if not weights:
        reasons = [
            f"a {type(module).__name__}, which is none of transformers' experts with a choice of implementations"
        ]
    elif all(high_precision_gemms(compute, full_name) == set(GEMMS) for full_name in weights):
        reasons = ["all of its GEMMs are named in high_precision_gemms"]
    elif any(owners[id(weight)] > 1 for weight in weights.values()):
        reasons = ["its weight is shared with another module"]
    for reason in filter(None, reasons):
        report.skipped[name] = reason
        return
    precisions = {}
    for full_name in weights:
        high = HighPrecision(**dict.fromkeys(high_precision_gemms(compute, full_name), True))
        layer = report.scaling.add_layer()
        key = full_name.rpartition(".")[2]
        precisions[key] = LinearPrecision(report.scaling, layer, full_name, module.is_transposed, high)
    module.__class__ = in_low_precision(type(module))
    module.compute_in(precisions)
    report.converted |= dict(zip(weights, module.projections.values()))


def _reason_to_skip_experts(name: str, weight: Parameter, compute: ComputeConfig) -> str | None:
    if matches(name, compute.skip_modules):
        return "named in skip_modules"
    if compute.scaling == "block":
        return "experts have no product with scales of blocks"
    if "fp8_e5m2" in operand_formats(compute).values():
        return "experts have no product with E5M2"
    features = sharded.shape(weight)[1:]
    if min(features) < compute.min_features:
        return f"fewer than {compute.min_features} features"
    alignment = MX_BLOCK if compute.scaling == "mx" else ALIGNMENT
    return f"features are not multiples of {alignment}" if any(size % alignment for size in features) else None


def _precisions(module: nn.Module) -> list[LinearPrecision]:
    """The precisions of a module that was converted."""
    if isinstance(module, LowPrecisionExperts):
        return [projection.precision for projection in module.projections.values()]
    return [module.precision] if isinstance(module, _LowPrecisionModule) else []


def _share_casts(model: nn.Module) -> None:
    """Let layers that get the same input, by their names, cast it by the scale of the first, as eager code finds out.

    Where they get different ones after all, these share a scale.
    """
    for module in model.modules():
        for names in _SAME_INPUT:
            layers = [layer for name in names if type(layer := getattr(module, name, None)) is LowPrecisionLinear]
            for layer in layers[1:]:
                layer.casts_input = (layers[0],)


def restore_linear_layers(model: nn.Module) -> None:
    """Undo `convert_linear_layers`."""
    for module in model.modules():
        _restore(module)


def _restore(module: nn.Module) -> None:
    restore_fused(module)
    if isinstance(module, LowPrecisionExperts):
        module.compute_as()
    if isinstance(module, _LowPrecisionModule):
        module.compute_as(nn.Linear if isinstance(module, nn.Linear) else linear_classes()[-1])
