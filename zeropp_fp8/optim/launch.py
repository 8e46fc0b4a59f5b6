"""adamw_step in one launch of kernels/optimizer/adamw.py (two with scales per tensor)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeropp_fp8.kernels.optimizer.adamw import CONSTANTS, NUM_WARPS, Form, Places, adamw_kernel, first_of, no_magnitudes
from zeropp_fp8.kernels.optimizer.adamw import TILE as KERNEL_TILE
from zeropp_fp8.kernels.wire.launch_tables import interpreted, native_float8
from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer
from zeropp_fp8.optim.state_formats import TILE
from zeropp_fp8.optim.update import Owned

assert TILE == KERNEL_TILE
# Sets of tensors whose places a layout remembers. Gradients that are allocated anew every step mostly come to lie where
# they lay before.
_REMEMBERED = 8


def kernel_step(owned: Owned, constants: dict[str, float]) -> None:
    """See `adamw_step`, which has checked the arguments; `constants` are those of `Hyper`.

    Raises:
        ValueError: the quantities have scales of different kinds, or there is neither a GPU nor Triton's interpreter.
    """
    segments = owned.segments
    if segments.device.type != "cuda" and not interpreted():
        raise ValueError(f"the kernel needs a CUDA device or TRITON_INTERPRET=1, the state is on {segments.device}")
    block_size = _block_size(owned)

    def given(tensor: Tensor | None) -> Tensor:
        return segments.tile_segments if tensor is None else tensor  # a pointer that is not followed

    grads, weights = _Gradients.of(owned.grads), [w.detach() for w in owned.weights]
    first_weight, places = first_of(weights), _places(segments, grads.listed, weights)
    # With a scale per segment, its first tile writes the new one while other tiles still read the old one.
    per_tensor = block_size is None and any(buffer.scales is not None for buffer in _buffers(owned))
    amax = no_magnitudes(len(segments), segments.device) if per_tensor else owned.states[0].codes

    def pointers(buffer: StateBuffer) -> list[Tensor]:
        before = buffer.scales.clone() if per_tensor and buffer.scales is not None else buffer.scales
        return [buffer.codes, given(before), given(buffer.scales)]

    quantities = [pointer for buffer in _buffers(owned) for pointer in pointers(buffer)]
    form = _form(owned, grads, places, block_size, l2=constants["l2"] != 0)
    for step in ("first", "second") if per_tensor else ("only",):
        adamw_kernel[(segments.num_tiles,)](
            grads.base,
            given(grads.scales),
            first_weight,
            *quantities,
            segments.tile_segments,
            segments.table,
            places.entries,
            amax,
            owned.grad_scale,
            *(constants[name] for name in CONSTANTS),
            PASS=step,
            FORM=form,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


class _Gradients(NamedTuple):
    """The arguments of a kernel: codes or the first tensor, scales and elements of a block, all tensors."""

    base: Tensor
    name: str
    scales: Tensor | None = None
    block: int = 0
    listed: list[Tensor] | None = None

    @classmethod
    def of(cls, grads: Sequence[Tensor] | FP8Gradients | StateBuffer) -> _Gradients:
        if isinstance(grads, FP8Gradients):
            return cls(grads.codes.view(torch.uint8), grads.element, grads.multipliers)
        if isinstance(grads, StateBuffer):
            scales = grads.scales if grads.per_block else grads.factors()
            return cls(grads.codes, grads.storage.name, scales, grads.block_size if grads.per_block else 0)
        listed = [g.detach() for g in grads]
        return cls(first_of(listed), "tensors", listed=listed)


def _buffers(owned: Owned) -> list[StateBuffer]:
    return [owned.master, *owned.states]


def _block_size(owned: Owned) -> int | None:
    """Elements that share a scale; None: a segment's."""
    kinds = {buffer.block_size if buffer.per_block else None for buffer in _buffers(owned)}
    if len(kinds) != 1:
        raise ValueError(f"the kernel takes scales of one kind, got blocks of {sorted(map(str, kinds))}")
    return kinds.pop()


def _form(owned: Owned, grads: _Gradients, places: Places, block_size: int | None, l2: bool) -> Form:
    """The constants that the kernel is compiled with."""
    device, (exp_avg, exp_avg_sq) = owned.segments.device, owned.states
    width = block_size or TILE
    return Form(
        grad=grads.name,
        grad_block=grads.block,
        master=owned.master.storage.name,
        exp_avg=exp_avg.storage.name,
        exp_avg_sq=exp_avg_sq.storage.name,
        aligned_grads=places.aligned_grads,
        aligned_weights=places.aligned_weights,
        per_block=block_size is not None,
        l2=l2,
        native_fp8=native_float8(device),
        fast=device.type == "cuda" and torch.version.hip is None and not interpreted(),
        interpreted=interpreted(),
        rows=TILE // width,
        width=width,
    )


def _places(segments: Segments, grads: list[Tensor] | None, weights: list[Tensor]) -> Places:
    given = [tensors for tensors in (grads, weights) if tensors is not None]
    key = tuple((first_of(tensors).dtype, *(t.data_ptr() for t in tensors)) for tensors in given)
    known = segments.pointer_tables
    if key not in known:
        while len(known) >= _REMEMBERED:
            known.pop(next(iter(known)))
        known[key] = Places.of(grads, weights, segments.device)
    return known[key]
