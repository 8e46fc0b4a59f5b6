"""Scaling: how the operands of a linear layer's three GEMMs are quantized, and what that remembers between steps.

    current      one scale per tensor, from this tensor's amax
    delayed      one scale per tensor, from the amax of earlier steps: one pass less over the data
    per_channel  one scale per row of each operand
    block        1 x 128 blocks of activations and gradients, 128 x 128 tiles of weights
    mx           32 elements share a power of two (OCP Microscaling)

Quantizing and transposing do not commute: `quantize` gives an operand for the GEMM that sums over a matrix's columns,
and another for the one that sums over its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from zeropp_fp8.compute import casts
from zeropp_fp8.compute.operand import Float8Operand, Granularity
from zeropp_fp8.compute.rounded import rounded_operands
from zeropp_fp8.config import MX_FORMATS, ComputeConfig, operand_formats
from zeropp_fp8.formats import make_format
from zeropp_fp8.formats.amax_history import AmaxHistory

Role = Literal["activations", "weights", "gradients"]
ROLES: tuple[Role, ...] = ("activations", "weights", "gradients")
_OPERANDS, _OF_A_LAYER = {role: place for place, role in enumerate(ROLES)}, len(ROLES)  # places in tables
# Which copies of a role, plain and transposed, GEMMs take as their second operands (products.py).
_RIGHT = {"activations": (False, True), "weights": (True, True), "gradients": (False, False)}
Operand = Float8Operand | Tensor
SCALE_STRIDE = 4  # cuBLAS wants scales at multiples of 16 bytes
FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Scaling:
    """Shared by all layers of one conversion.

    Attributes:
        granularity: what shares a scale in operands of activations and gradients; "rounded": see rounded.py.
    """

    granularity: Granularity | Literal["rounded"] = "tensor"

    def __init__(self, compute: ComputeConfig) -> None:
        self.compute = compute
        self.formats = operand_formats(compute)
        self._input: tuple | None = None
        self._layers = 0

    def add_layer(self) -> int:
        """A number for a new layer, its first argument to `quantize`."""
        self._layers += 1
        return self._layers - 1

    def quantize(
        self,
        layer: int,
        role: Role,
        matrix: Tensor,
        plain: bool,
        transposed: bool,
        scale: Tensor | None = None,
        training: bool = True,
        own_scale: bool = False,
    ) -> tuple[Operand | None, Operand | None]:
        """Quantize [R, C] for a GEMM that sums over C (`plain`: [R, C]) or over R (`transposed`: [C, R]), or both.

        Args:
            layer: a number that `add_layer` gave.
            scale: that of an operand of the same numbers, quantized before, if it has one for all of them.
            training: whether a backward pass follows or runs; evaluation leaves no trace.
            own_scale: the operands' scale is in memory of its own: neither `scale` nor a view of a table.
        """
        raise NotImplementedError

    def quantize_input(
        self, layer: int, x: Tensor, plain: bool, transposed: bool, training: bool
    ) -> tuple[Operand | None, Operand | None]:
        """Operands of a layer's input [..., K]; layers with the same input one after the other (q, k, v) share them.

        The last input is kept alive so that its memory, by which it is recognized, cannot become another tensor's.
        """
        key, known = _key(x, training), self._input
        if known is not None and known[0] == key:
            pair = known[2]
            if (pair[0] is not None or not plain) and (pair[1] is not None or not transposed):
                return pair
        matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        pair = self.quantize(layer, "activations", matrix, plain, transposed, training=training)
        self._input = None if key is None else (key, x.untyped_storage(), pair)
        return pair

    def offer_input(self, x: Tensor, pair: tuple[Operand, Operand | None], training: bool) -> None:
        """The operands of `x`, made together with it, for the layer that gets it next."""
        key = _key(x, training)
        self._input = None if key is None else (key, x.untyped_storage(), pair)

    def __getstate__(self) -> dict:
        """A copy (copy.deepcopy of a model) begins without an input: it would not keep that memory alive.

        Neither does it have what looks on while a step is sampled (numerics/sample.py).
        """
        return {name: value for name, value in self.__dict__.items() if not callable(value)} | {"_input": None}

    def forget_input(self) -> None:
        """Let go of the last input."""
        self._input = None

    def end_step(
        self,
        largest_of_all: Callable[[Tensor], None] | None = None,
        device=None,
        overflow: bool = False,
        loss_scale_change: float = 1.0,
    ) -> None:
        """After an optimizer step: take over what the step has shown. Collective where `largest_of_all` is.

        Args:
            largest_of_all: makes each element of a tensor the largest of all ranks, in place; None: one rank.
            device: that of the model; a rank that has used no layer yet must take part, too.
            overflow: the step was skipped, because gradients were not finite.
            loss_scale_change: the new loss scale of fp16 over that of the step.
        """

    def state_dict(self) -> dict:
        """The state that the next steps depend on."""
        return {}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict`'s result; an empty one starts afresh."""


def _key(x: Tensor, training: bool) -> tuple | None:
    """The identity of a tensor while its memory is alive; None for inference tensors, which do not count changes."""
    if x.is_inference():
        return None
    memory = x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype
    return (*memory, x._version, training)  # evaluation records no amax: its operands do not serve training


class CurrentScaling(Scaling):
    """Each operand is scaled by its own amax, found in a pass of its own."""

    def quantize(self, layer, role, matrix, plain, transposed, scale=None, training=True, own_scale=False):
        dtype = FP8_DTYPES[self.formats[role]]
        return casts.per_tensor(matrix, dtype, scale, None, plain, transposed, None, _RIGHT[role], own_scale)


class PerChannelScaling(Scaling):
    """A scale for each row of each operand: each token, each output feature, ..."""

    granularity = "row"

    def quantize(self, layer, role, matrix, plain, transposed, scale=None, training=True, own_scale=False):
        return casts.cast_per_row(matrix, FP8_DTYPES[self.formats[role]], plain, transposed)


class BlockScaling(Scaling):
    """128 elements along the summed axis share a scale; of weights 128 x 128, which serves both GEMMs."""

    granularity = "block"

    def quantize(self, layer, role, matrix, plain, transposed, scale=None, training=True, own_scale=False):
        cast = casts.cast_tiles if role == "weights" else casts.cast_blocks
        return cast(matrix, FP8_DTYPES[self.formats[role]], plain, transposed)


class MXScaling(Scaling):
    """Blocks of 32 with a power-of-two scale. The operands are the rounded values themselves (see gemm.py)."""

    granularity = "rounded"

    def __init__(self, compute: ComputeConfig) -> None:
        super().__init__(compute)
        self._mx = {role: make_format(name) for role, name in self.formats.items() if name in MX_FORMATS}

    def quantize(self, layer, role, matrix, plain, transposed, scale=None, training=True, own_scale=False):
        return rounded_operands(matrix, self._mx[role], plain, transposed)


class DelayedScaling(Scaling):
    """Scales from the amax of earlier steps, which the casts record on the way.

    The amax of all operands is one small tensor on the device, reduced over ranks in one collective per step. An
    operand that has no history yet (the first step, an expert that was never used, nothing but zeros so far) is
    scaled by its current amax.
    """

    def __init__(self, compute: ComputeConfig) -> None:
        super().__init__(compute)
        self._seen: set[int] = set()  # operands recorded since the last step
        self._known: set[int] = set()  # operands with a history
        self._recorded: AmaxHistory | None = None
        self._scale: Tensor | None = None  # fp32 [operands, 4], of which the first is used
        self._entries: list[tuple[Tensor, Tensor]] = []  # views of the tables: an operand's scale and amax, fp32 [1]

    @property
    def _amax(self) -> Tensor | None:
        """fp32 [operands], since the last step."""
        return None if self._recorded is None else self._recorded.current

    @torch.inference_mode(False)  # what an evaluation in inference mode makes, training could not change
    def _place_tables(self, device: torch.device) -> None:
        """Make the tables, or let them follow the model."""
        count = self._layers * len(ROLES)
        if self._recorded is not None:
            self._recorded.to(device)
            self._scale = self._scale.to(device)
        else:
            self._recorded = AmaxHistory(count, device)
            self._scale = torch.ones(count, SCALE_STRIDE, dtype=torch.float32, device=device)
        # Made once, and not in each of some 500 casts a step of 24 blocks.
        self._entries = [(self._scale[index, :1], self._amax[index : index + 1]) for index in range(count)]

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_entries": []}

    def _entry(
        self, layer: int, role: Role, device: torch.device, training: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(scale, if the operand has a history; amax to record, in training) of an operand, fp32 [1] each."""
        index = _OPERANDS[role] + layer * _OF_A_LAYER
        if not self._entries or self._scale.device != device:  # a copy, or moved, or a checkpoint was loaded
            self._place_tables(device)
        if training:
            self._seen.add(index)
        scale, amax = self._entries[index]
        return scale if index in self._known else None, amax if training else None

    def quantize(self, layer, role, matrix, plain, transposed, scale=None, training=True, own_scale=False):
        known, amax = self._entry(layer, role, matrix.device, training)
        scale = scale if known is None else known
        dtype = FP8_DTYPES[self.formats[role]]
        return casts.per_tensor(matrix, dtype, scale, amax, plain, transposed, None, _RIGHT[role], own_scale)

    def knows_input(self, layer: int) -> bool:
        """Whether a layer's input has a history, so that it can be cast as it is made."""
        return _OPERANDS["activations"] + layer * _OF_A_LAYER in self._known

    def made_input(
        self, layer: int, make: Callable, inputs: tuple[Tensor, ...], transposed: bool, training: bool
    ) -> tuple[Tensor, tuple[Operand, Operand | None]]:
        """(a layer's input [R, C] that casts.swiglu or casts.rms_norm makes of inputs; its operands).

        One pass where the input has a history.
        """
        scale, amax = self._entry(layer, "activations", inputs[0].device, training)
        dtype = FP8_DTYPES[self.formats["activations"]]
        *pair, values = make(*(each.contiguous() for each in inputs), dtype, scale, amax, True, transposed)
        return values, tuple(pair)

    @torch.no_grad()
    def end_step(self, largest_of_all=None, device=None, overflow=False, loss_scale_change=1.0) -> None:
        self.forget_input()
        if self._amax is None and device is None:
            return
        if self._amax is None:
            # This rank has used no layer (no token for its experts), others may have: the reduction is everybody's.
            self._place_tables(device)
        if largest_of_all is not None:
            largest_of_all(self._amax)
        recorded = self._recorded
        of_gradients = slice(ROLES.index("gradients"), None, len(ROLES))
        if overflow:
            recorded.current[of_gradients] = 0.0  # of what was finite: it says nothing about the next step
        recorded.end_step()
        if loss_scale_change != 1.0:  # gradients grow and shrink with it; twice the scale would saturate them
            recorded.table[:, of_gradients] *= loss_scale_change
        new = self._seen - self._known
        if new:
            # Zeros (gradients below a layer of zeros) say nothing about the next step. Looking waits for the device;
            # operands are new in the first step, and seldom later.
            has_history = recorded.newest.gt(0).tolist()
            self._known |= {index for index in new if has_history[index]}
        amax = recorded.largest()
        for place, role in enumerate(ROLES):
            own = slice(place, None, len(ROLES))
            self._scale[own, 0] = casts.scale_of_amax(amax[own], FP8_DTYPES[self.formats[role]])
        self._seen.clear()

    def state_dict(self) -> dict:
        if self._amax is None:
            return {}
        history = self._recorded.oldest_first()
        return {"known": sorted(self._known), "history": history, "scale": self._scale[:, 0].cpu()}

    def load_state_dict(self, state: dict) -> None:
        """Continue from `state_dict`'s result, also with another length of history; an empty one starts afresh.

        Raises:
            ValueError: it belongs to another number of layers.
        """
        self._known, self._seen = set(), set()
        device = self._amax.device if self._amax is not None else torch.device("cpu")
        self._recorded, self._entries = None, []
        if not state:
            return
        operands = self._layers * len(ROLES)
        if state["scale"].numel() != operands:
            raise ValueError(
                f"the amax history is of {state['scale'].numel() // len(ROLES)} layers, the model has {self._layers}"
            )
        self._place_tables(device)
        self._recorded.load(state["history"])
        self._scale[:, 0] = state["scale"].to(device)
        self._known = set(state["known"])


SCALINGS: dict[str, type[Scaling]] = {
    "current": CurrentScaling,
    "delayed": DelayedScaling,
    "per_channel": PerChannelScaling,
    "block": BlockScaling,
    "mx": MXScaling,
}
