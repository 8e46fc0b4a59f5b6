"""Post-training quantization by error diffusion: round a weight so that it makes up for the rounding before it.

A linear layer's output is a sum over its input features. They are quantized one after the other; what rounding one
weight adds to the output over the calibration data is carried on to the next feature, whose weight is chosen to cancel
as much of it as it can. Layers are treated in the order in which the model calls them, and a layer sees the inputs that
the quantized layers before it produce, so that it also makes up for their errors.

    X_t, Xq_t : feature t of the layer's input over all calibration tokens, in the original model, and in the quantized
                one (rounded to the format, when activations are quantized)
    w_t, q_t  : the original and the quantized weight of that feature (for one output)

    u_0 = 0
    q_t = Q(<Xq_t, u_(t-1) + w_t X_t> / ||Xq_t||^2)
    u_t = u_(t-1) + w_t X_t - q_t Xq_t

That is GPFQ (J. Zhang, Y. Zhou, R. Saab, "Post-training Quantization for Neural Networks with Provable Guarantees",
2022), which the error diffusion of the Microscaling paper (arXiv 2310.10537) is derived from. Q rounds to the block's
grid: scales are those of the original weights and do not change while a block is quantized, and values beyond the
grid's end are clamped to it.

u has one entry per calibration token. Written out, it is a sum over earlier features, so that only inner products are
needed, and the memory does not depend on how much data there is:

    <Xq_t, u_(t-1) + w_t X_t> = sum_(s <= t) w_s C[s, t] - sum_(s < t) q_s G[s, t],   C = X^T Xq,   G = Xq^T Xq

Cost: layers called one after the other on the same tensor (query, key and value; gate and up) share C and G. For each
such group every calibration batch runs twice, through the original and through the quantized model, up to the group
and no further: in all about as many whole forward passes over the data as there are groups, 4 a block of a Llama. The
memory beyond the model's is its linear weights once more, one batch, and C and G in float64 (16 * in_features^2 bytes).
The same data gives the same weights.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quantize.direct_cast import (
    CastLayer,
    CastReport,
    ModelCast,
    layers_to_cast,
    restore,
    round_rows,
    weight_rows,
)
from zeropp_fp8.formats import BlockScaledFormat, DoubleQuantizedFormat, WireFormat, make_format
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.scales import MIN_SCALE

CHUNK = 64  # features whose error reaches later ones in one matrix product instead of one by one
_WHOLE_CODES = 32  # elements of any width that can be packed

Batch = Tensor | Mapping[str, Tensor]


@torch.no_grad()
def error_diffusion(
    model: nn.Module,
    calibration_batches: Iterable[Batch],
    format_name: str,
    *,
    activations: bool = True,
    skip_modules: Sequence[str] = ("lm_head",),
    **format_options,
) -> CastReport:
    """Quantize the weights of all linear layers by error diffusion, and round their inputs to the same format.

    `restore` of direct_cast undoes it. The layers are those that `direct_cast` would cast. Two cases differ, and the
    report remarks on them: a layer that the first batch does not reach is rounded directly; and where the quantized
    model gives a layer another number of tokens than the original (an expert that a router chooses), X is the input in
    the quantized model before it is rounded.

    Args:
        model: in evaluation mode.
        calibration_batches: what the model is called with, `model(batch)` for tensors and `model(**batch)` for
            mappings, on its device. They are kept in memory. Padding counts like any other token, so use none.
        format_name, activations, skip_modules, **format_options: as for `direct_cast`; a quantized format, without
            `hadamard`.

    Returns:
        What was cast, with the error of each layer's output beside that of direct rounding, and what was not.

    Raises:
        RuntimeError: the model is in training mode, or is cast already.
        ValueError: no such format, one that is not meant for this, no calibration data, no layer to cast, weights or
            inputs with NaN or Inf, or weights that are partitioned by ZeRO-3 or on the meta device.
    """
    number_format = make_format(format_name, **format_options)
    _check_format(number_format)
    batches = list(calibration_batches)
    if not batches:
        raise ValueError("error_diffusion: there are no calibration batches")
    layers, skipped = layers_to_cast(model, skip_modules)
    groups = _groups_in_call_order(model, batches[0], layers)
    report = CastReport(f"{number_format!r}, error diffusion", activations, skipped=skipped)
    cast = ModelCast(model, number_format if activations else None)
    try:
        for group in groups:
            products = _inner_products(model, batches, group, cast, number_format if activations else None)
            for name in group.layers:
                report.layers.append(_quantize(name, layers.pop(name), products, cast, number_format))
        for name, layer in layers.items():
            remark = "rounded directly: the first calibration batch does not reach it"
            report.layers.append(cast.round_directly(name, layer, number_format, remark=remark))
    except BaseException:
        restore(model)  # no half-quantized model
        raise
    return report


def diffuse_errors(weight: Tensor, cross_gram: Tensor, gram: Tensor, number_format: BlockScaledFormat) -> Tensor:
    """The recursion above for all outputs of one layer.

    Args:
        weight: [out_features, in_features], fp32, bf16 or fp16, finite.
        cross_gram: C = X^T Xq, float64 [in_features, in_features].
        gram: G = Xq^T Xq, float64 [in_features, in_features].
        number_format: a block-scaled or MX format without rotation.

    Returns:
        The quantized weight, decoded, in the shape and dtype of `weight`. A feature that is zero in all calibration
        data (G[t, t] = 0) carries no error; its weights are rounded plainly.
    """
    outputs, features = weight.shape
    grid = _Grid(weight, number_format)
    norms = gram.diagonal().tolist()  # one wait for the device instead of one a feature
    original = weight.t().double()
    wanted = cross_gram.triu().t() @ original  # [t, output]: sum over s <= t of w_s C[s, t]
    quantized = torch.zeros(features, outputs, dtype=torch.float64, device=weight.device)
    for start in range(0, features, CHUNK):
        stop = min(start + CHUNK, features)
        wanted[start:stop] -= gram[:start, start:stop].t() @ quantized[:start]
        for t in range(start, stop):
            if norms[t] > 0:
                target = (wanted[t] - gram[start:t, t] @ quantized[start:t]) / norms[t]
            else:
                target = original[t]
            quantized[t] = grid.round(target, t)
    return quantized.t().to(weight.dtype)


class _Grid:
    """The numbers that a weight's blocks can hold, with the scales of the original weight.

    Args:
        weight: [out_features, in_features].
        number_format: a block-scaled or MX format.
    """

    def __init__(self, weight: Tensor, number_format: BlockScaledFormat) -> None:
        outputs, features = weight.shape
        self.dtype = weight.dtype
        self.element = number_format.element
        self.block_size = number_format.block_size or features
        self._scratch = Scratch(weight.device)
        blocks = nn.functional.pad(weight.float(), (0, -features % self.block_size)).view(outputs, -1, self.block_size)
        self._is_zero = (blocks == 0).all(dim=-1).t().contiguous()
        scale_bytes = torch.empty(
            outputs, blocks.shape[1] * number_format.scale.num_bytes, dtype=torch.uint8, device=weight.device
        )
        number_format.scale.scale_(blocks.clone(), scale_bytes, self._scratch)
        self._scales = number_format.scale.decode(scale_bytes).t().clamp_min(MIN_SCALE)  # [blocks, outputs]

    def round(self, target: Tensor, feature: int) -> Tensor:
        """float64 [out_features]: the numbers nearest to `target`, as the weight's dtype holds them."""
        block, count = feature // self.block_size, target.numel()
        largest = self.element.largest
        # Through the codes, as a row of the format: what the format would decode, whatever its elements are.
        row = self._scratch("row", (1, count + -count % _WHOLE_CODES)).zero_()
        torch.div(target.float(), self._scales[block], out=row[0, :count]).clamp_(-largest, largest)
        codes = self._scratch("row codes", (1, row.shape[1] * self.element.bits // 8), torch.uint8)
        self.element.quantize_(row, codes, self._scratch)
        self.element.dequantize(codes, row, self._scratch)
        values = (row[0, :count] * self._scales[block]).masked_fill_(self._is_zero[block], 0.0)
        return values.to(self.dtype).double()


def _check_format(number_format: WireFormat) -> None:
    name = number_format.name
    if not isinstance(number_format, BlockScaledFormat):
        raise ValueError(f"error_diffusion: {name} does not quantize; use direct_cast, or a block-scaled or MX format")
    if isinstance(number_format, DoubleQuantizedFormat):
        raise ValueError("error_diffusion: scales of blocks are not quantized here; double_quantize=False")
    if number_format.hadamard:
        raise ValueError("error_diffusion: it rounds weights one by one, which a rotated block has not; hadamard=False")


# -- calibration ----------------------------------------------------------------------------------------------------


@dataclass
class _Group:
    """Layers that share their input, and how often the model calls them."""

    layers: dict[str, nn.Module]
    calls: int

    @property
    def first(self) -> nn.Module:
        return next(iter(self.layers.values()))


@dataclass
class _InnerProducts:
    """Calibration's result for a group's inputs.

    Attributes:
        cross_gram: C, float64 [in_features, in_features].
        gram: G, float64 [in_features, in_features].
        squared_outputs: name -> ||X W^T||^2, the squared output of the original layer (its bias left out).
        remark: what is special about them.
    """

    cross_gram: Tensor
    gram: Tensor
    squared_outputs: dict[str, Tensor]
    remark: str = ""


class _Reached(Exception):
    """No error: ends a forward pass that has nothing more to tell."""


def _run(model: nn.Module, batch: Batch) -> None:
    with contextlib.suppress(_Reached):
        model(**batch) if isinstance(batch, Mapping) else model(batch)


def _groups_in_call_order(model: nn.Module, batch: Batch, layers: dict[str, nn.Module]) -> list[_Group]:
    """Run the model once; layers that are called one after the other, once each, on the same tensor are a group."""
    calls: Counter[str] = Counter()
    shares_input: dict[str, bool] = {}  # in call order: whether it was called on the tensor of the layer before
    last: list[tuple[Tensor, int]] = []  # holds the tensor: a freed one's place in memory may be used again

    def note(name: str) -> Callable:
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            value = _input_of(args, kwargs)
            # The version tells whether a tensor was written to in between; inference tensors have none.
            version = -1 if value.is_inference() else value._version
            same = bool(last) and last[0][0] is value and last[0][1] == version >= 0
            shares_input.setdefault(name, same)
            calls[name] += 1
            last[:] = [(value, version)]

        return hook

    with contextlib.ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(note(name), with_kwargs=True).remove)
        _run(model, batch)
    groups: list[_Group] = []
    for name, same in shares_input.items():
        if same and calls[name] == 1 == groups[-1].calls:
            groups[-1].layers[name] = layers[name]
        else:
            groups.append(_Group({name: layers[name]}, calls[name]))
    return groups


def _input_of(args: tuple, kwargs: dict) -> Tensor:
    """Return what a linear layer is called on; it takes one tensor, by place or by name."""
    return args[0] if args else next(iter(kwargs.values()))


def _inputs(model: nn.Module, batch: Batch, group: _Group) -> list[Tensor]:
    """The group's inputs in a forward pass, which ends there."""
    inputs: list[Tensor] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        inputs.append(_input_of(args, kwargs).clone())  # a model may write to it later
        if len(inputs) == group.calls:
            raise _Reached

    handle = group.first.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        _run(model, batch)
    finally:
        handle.remove()
    return inputs


def _inner_products(
    model: nn.Module, batches: list[Batch], group: _Group, cast: ModelCast, input_format: WireFormat | None
) -> _InnerProducts:
    """C and G of a group over all calibration data."""
    products = _accumulate(model, batches, group, cast, input_format, with_original=True)
    if products is None:
        products = _accumulate(model, batches, group, cast, input_format, with_original=False)
        products.remark = "the quantized model gives it other inputs: errors from before it are not made up for"
    if not (products.cross_gram.isfinite().all() and products.gram.isfinite().all()):
        names = ", ".join(group.layers)
        raise ValueError(f"error_diffusion: NaN or Inf in the input of {names} on the calibration data")
    return products


def _accumulate(
    model: nn.Module,
    batches: list[Batch],
    group: _Group,
    cast: ModelCast,
    input_format: WireFormat | None,
    with_original: bool,
) -> _InnerProducts | None:
    """`_inner_products` with X of the original model or of the quantized one, before rounding.

    None where the two models give the group another number of inputs, so that X_t and Xq_t are not of the same tokens.
    """
    rows = {name: weight_rows(layer, layer.weight.detach()).double() for name, layer in group.layers.items()}
    some = next(iter(rows.values()))
    cross_gram, gram = (some.new_zeros(some.shape[1], some.shape[1]) for _ in range(2))
    squared_outputs = {name: some.new_zeros(()) for name in rows}
    for batch in batches:
        mixed = _inputs(model, batch, group)
        originals = mixed
        if with_original:
            cast.show(original=True)
            originals = _inputs(model, batch, group)
            cast.show(original=False)
            if [value.shape for value in originals] != [value.shape for value in mixed]:
                return None
        for x, xq in zip(originals, mixed):
            xq = xq if input_format is None else round_rows(xq, input_format)
            x, xq = (value.reshape(-1, value.shape[-1]).to(some) for value in (x, xq))  # float64, the weight's device
            cross_gram.addmm_(x.t(), xq)
            gram.addmm_(xq.t(), xq)
            for name, weight in rows.items():
                squared_outputs[name] += (x @ weight.t()).square().sum()
    return _InnerProducts(cross_gram, gram, squared_outputs)


def _quantize(
    name: str, layer: nn.Module, products: _InnerProducts, cast: ModelCast, number_format: WireFormat
) -> CastLayer:
    """Give one layer its weight."""
    rows = weight_rows(layer, layer.weight.detach())
    if not rows.isfinite().all():
        raise ValueError(f"error_diffusion: NaN or Inf in the weight of {name}")

    def error(chosen: Tensor) -> float:
        """||X W^T - Xq Q^T||^2 / ||X W^T||^2, from inner products alone."""
        w, q = rows.double(), chosen.double()
        crossed, own = ((w @ products.cross_gram) * q).sum(), ((q @ products.gram) * q).sum()
        squared = products.squared_outputs[name]
        return ((squared - 2 * crossed + own).clamp_min(0.0) / squared).item() if squared > 0 else 0.0

    quantized = diffuse_errors(rows, products.cross_gram, products.gram, number_format)
    return cast.replace(
        name,
        layer,
        quantized,
        direct_error=error(round_rows(rows, number_format)),
        error=error(quantized),
        remark=products.remark,
    )
