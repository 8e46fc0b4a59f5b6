"""Direct cast: a trained model evaluated in any format, with no calibration and no training.

Every linear layer gets the weight that the format would store, and its input is rounded to the same format on the way
in. Both are rounded along the axis that the matrix product sums over, in blocks of one row, as hardware that multiplies
the codes would need them. Products and sums stay in the model's dtype: this measures what a format costs in accuracy,
not how fast it is.

    report = direct_cast(model.eval(), "mxfp6_e3m2")
    print(report)                       # what was cast, what was not, and why
    loss = evaluate(model)
    restore(model)                      # the original Parameters, bit for bit

The original weights are kept beside the rounded ones, so a cast model holds its linear weights twice.
Source: "direct-cast inference" of B. Rouhani et al., "Microscaling Data Formats for Deep Learning" (arXiv 2310.10537).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from zeropp_fp8.formats import WireFormat, make_format

_CAST = "_zeropp_fp8_cast"  # the attribute under which a cast model keeps its ModelCast


@dataclass(frozen=True)
class CastLayer:
    """One linear layer that was cast.

    Attributes:
        name: the module's name in the model.
        in_features: length of the axis that the matrix product sums over.
        out_features: the other one.
        weight_db: signal-to-noise ratio of the rounded weight in dB; inf where rounding changed nothing.
        direct_error: error diffusion only: squared error of the layer's output over the calibration data, as a share
            of the squared output, had the weight been rounded directly.
        error: error diffusion only: the same with the weight it was given.
        remark: what was done otherwise than for other layers, and why.
    """

    name: str
    in_features: int
    out_features: int
    weight_db: float
    direct_error: float | None = None
    error: float | None = None
    remark: str = ""

    def __str__(self) -> str:
        line = f"{self.name:<40} {self.in_features:>6} -> {self.out_features:<6} weight {self.weight_db:5.1f} dB"
        if self.error is not None:
            line += f"  output error {self.error:.3e}, directly rounded {self.direct_error:.3e}"
        return f"{line}  {self.remark}".rstrip()


@dataclass
class CastReport:
    """A cast's effect on a model; `str()` makes a table of it.

    Attributes:
        number_format: the format, as its repr.
        activations: whether the inputs of the layers are rounded too.
        layers: the layers that were cast.
        skipped: name -> reason, for every module that has parameters of its own and kept them. Biases of cast layers
            stay as they are too.
    """

    number_format: str
    activations: bool
    layers: list[CastLayer] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "weights and activations" if self.activations else "weights"
        lines = [f"{what} of {len(self.layers)} linear layers in {self.number_format}"]
        lines += [f"  {layer}" for layer in self.layers]
        lines += [f"  {name or '(the model itself)'}: not cast: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


@torch.no_grad()
def direct_cast(
    model: nn.Module,
    format_name: str,
    *,
    activations: bool = True,
    skip_modules: Sequence[str] = ("lm_head",),
    **format_options,
) -> CastReport:
    """Replace the weights of all linear layers of `model` by what the format makes of them, and round their inputs.

    Cast are torch.nn.Linear and the Conv1D of transformers. Embeddings, norms, biases and everything else stay.

    Args:
        model: in evaluation mode; it raises a RuntimeError when it is run in training mode while it is cast.
        format_name: any name that make_format knows.
        activations: round the input of each cast layer too, along its last axis.
        skip_modules: a layer whose name contains one of these is left alone.
        **format_options: of make_format: `block_size` (None: one scale per row) and so on; `scale_mode` for MX.

    Returns:
        What was cast and what was not.

    Raises:
        RuntimeError: the model is in training mode, or is cast already.
        ValueError: no such format, no layer to cast, or weights that are partitioned by ZeRO-3 or on the meta device.
    """
    number_format = make_format(format_name, **format_options)
    layers, skipped = layers_to_cast(model, skip_modules)
    report = CastReport(repr(number_format), activations, skipped=skipped)
    cast = ModelCast(model, number_format if activations else None)
    try:
        for name, layer in layers.items():
            report.layers.append(cast.round_directly(name, layer, number_format))
    except BaseException:
        restore(model)  # no half-cast model
        raise
    return report


def restore(model: nn.Module) -> None:
    """Undo `direct_cast` or `error_diffusion`: the same Parameter objects as before, bit for bit, and no hooks.

    A model that was moved to another device or dtype in between gets its original weights there.

    Raises:
        RuntimeError: the model is not cast.
    """
    cast = vars(model).pop(_CAST, None)
    if cast is None:
        raise RuntimeError("restore: this model is not cast")
    cast.undo()


def round_rows(tensor: Tensor, number_format: WireFormat) -> Tensor:
    """`tensor` [..., n], encoded and decoded; blocks lie along the last axis and never cross rows."""
    matrix = tensor.detach().reshape(-1, tensor.shape[-1])
    payload = number_format.encode_rows(matrix)
    return number_format.decode_rows(payload, matrix.shape[1], tensor.dtype).view(tensor.shape)


def is_transposed(layer: nn.Module) -> bool:
    """Whether the layer keeps its weight as [in_features, out_features]: the Conv1D of transformers' GPT-2."""
    return not isinstance(layer, nn.Linear)


def weight_rows(layer: nn.Module, weight: Tensor) -> Tensor:
    """A weight of `layer` as [out_features, in_features], so that a matrix product sums along rows."""
    return weight.t() if is_transposed(layer) else weight


def layers_to_cast(model: nn.Module, skip_modules: Sequence[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """({name: linear layer to cast}, {name: why a module's own parameters are left alone}), in registration order.

    Raises:
        RuntimeError, ValueError: see `direct_cast`.
    """
    if _CAST in vars(model):
        raise RuntimeError("this model is cast already: call restore(model) first")
    if model.training:
        raise RuntimeError("a cast is for evaluation: call model.eval() first")
    layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        for parameter in own:
            _check_whole(name, parameter)
        if not own:
            continue
        reason = _why_not(name, module, skip_modules)
        if reason:
            skipped[name] = reason
        else:
            layers[name] = module
    if not layers:
        raise ValueError(f"no linear layer to cast; left alone: {skipped or 'nothing, there are no parameters'}")
    return layers, skipped


def _check_whole(name: str, parameter: nn.Parameter) -> None:
    if hasattr(parameter, "ds_id"):
        raise ValueError(
            f"{name}: its parameters are partitioned by ZeRO-3, so this rank does not have the weights; cast a whole "
            "model, loaded outside deepspeed.zero.Init from a checkpoint or a 16-bit export"
        )
    if parameter.is_meta:
        raise ValueError(f"{name}: its parameters are on the meta device: load the weights first")


def _why_not(name: str, module: nn.Module, skip_modules: Sequence[str]) -> str:
    """Why a module is not cast; empty if it is."""
    is_conv1d = type(module).__module__ == "transformers.pytorch_utils" and type(module).__name__ == "Conv1D"
    if not isinstance(module, nn.Linear) and not is_conv1d:
        return f"{type(module).__name__}: only linear layers are cast"
    for pattern in skip_modules:
        if pattern in name:
            return f"skip_modules has {pattern!r}"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "torch.nn.MultiheadAttention reads this weight without calling the layer"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.is_floating_point():
        return f"its weight is {weight.dtype}, so it is quantized already"
    return ""


class InputRounding:
    """A forward pre-hook that rounds the input of a cast layer, and refuses training.

    Args:
        name: the layer's name, for the error.
        number_format: None leaves the input as it is.
    """

    def __init__(self, name: str, number_format: WireFormat | None) -> None:
        self.name = name
        self.number_format = number_format
        self.active = True

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if not self.active:
            return None
        if module.training:
            raise RuntimeError(
                f"{self.name}: this model is cast for evaluation; call restore(model) before training it further"
            )
        if self.number_format is None:
            return None
        # A linear layer takes one tensor, by place or by name.
        return (
            tuple(round_rows(value, self.number_format) for value in args),
            {key: round_rows(value, self.number_format) for key, value in kwargs.items()},
        )


class ModelCast:
    """The changes to a model, layer by layer, and the way back. It is kept by the model itself.

    Weights are exchanged as Parameter objects, not overwritten: a weight that is tied to one outside the cast (an
    embedding) leaves that one alone, and undoing cannot change a bit.

    Args:
        model: whole, in evaluation mode and not cast yet.
        input_format: what inputs are rounded to; None for not at all.
    """

    def __init__(self, model: nn.Module, input_format: WireFormat | None) -> None:
        self.input_format = input_format
        self._layers: list[tuple[nn.Module, nn.Parameter, nn.Parameter, InputRounding]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        setattr(model, _CAST, self)

    def replace(self, name: str, layer: nn.Module, rows: Tensor, **figures) -> CastLayer:
        """Give a layer a weight of `rows` [out_features, in_features], and start to round its input."""
        original = layer.weight
        weight_db = signal_to_noise_db(weight_rows(layer, original), rows)
        values = weight_rows(layer, rows).to(original.dtype).contiguous()
        rounded = nn.Parameter(values, requires_grad=False)
        hook = InputRounding(name, self.input_format)
        self._handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        self._layers.append((layer, original, rounded, hook))
        layer._parameters["weight"] = rounded
        return CastLayer(name, rows.shape[1], rows.shape[0], weight_db, **figures)

    def round_directly(self, name: str, layer: nn.Module, number_format: WireFormat, **figures) -> CastLayer:
        """Give a layer the weight that the format makes of its own."""
        rows = weight_rows(layer, layer.weight.detach())
        return self.replace(name, layer, round_rows(rows, number_format), **figures)

    def show(self, original: bool) -> None:
        """Make the model its original self for a while, or the cast one again."""
        for layer, before, rounded, hook in self._layers:
            layer._parameters["weight"] = before if original else rounded
            hook.active = not original

    def undo(self) -> None:
        """The model as it was."""
        for layer, original, _, _ in self._layers:
            now = layer.weight
            if (now.device, now.dtype) != (original.device, original.dtype):
                original.data = original.data.to(now.device, now.dtype)
            layer._parameters["weight"] = original
        for handle in self._handles:
            handle.remove()


def signal_to_noise_db(reference: Tensor, rounded: Tensor) -> float:
    """10 log10(sum reference^2 / sum (reference - rounded)^2), in float64; inf where they are equal."""
    reference = reference.detach().double()
    noise = (reference - rounded.detach().double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(max(reference.square().sum().item(), 1e-300) / noise)
