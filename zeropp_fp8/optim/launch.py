"""adamw_step in one launch of kernels/optimizer/adamw.py (two with scales per tensor)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp_fp8.formats.noise import Seed
from zeropp_fp8.kernels.optimizer.adamw import (
    CONSTANTS,
    NUM_WARPS,
    Form,
    Places,
    adamw_kernel,
    first_of,
    no_magnitudes,
)
from zeropp_fp8.kernels.optimizer.adamw import TILE as KERNEL_TILE
from zeropp_fp8.kernels.wire.launch_tables import interpreted, native_float8
from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer
from zeropp_fp8.optim.state_formats import TILE, storage_of_dtype

assert TILE == KERNEL_TILE
# Sets of tensors whose places a layout remembers. Gradients that are allocated anew every step mostly come to lie where
# they lay before.
_REMEMBERED = 8


def kernel_step(
    segments: Segments,
    master: StateBuffer | None,
    exp_avg: StateBuffer,
    exp_avg_sq: StateBuffer,
    grads: Sequence[Tensor | None] | FP8Gradients,
    weights_out: Sequence[Tensor] | None,
    constants: dict[str, float],
    grad_scale: Tensor | None,
    seed: Seed | None,
) -> None:
    """See `adamw_step`, which has checked the arguments; `constants` are those of `Hyper`.

    Raises:
        ValueError: the quantities have scales of different kinds, or there is neither a GPU nor Triton's interpreter.
    """
    if segments.device.type != "cuda" and not interpreted():
        raise ValueError(f"the kernel needs a CUDA device or TRITON_INTERPRET=1, the state is on {segments.device}")
    buffers = [buffer for buffer in (master, exp_avg, exp_avg_sq) if buffer is not None]
    kinds = {buffer.block_size if buffer.per_block else None for buffer in buffers}
    if len(kinds) != 1:
        raise ValueError(f"the kernel takes scales of one kind, got blocks of {sorted(map(str, kinds))}")
    block_size = kinds.pop()
    unused = segments.tile_segments  # a pointer that is not followed

    def given(tensor: Tensor | None) -> Tensor:
        return unused if tensor is None else tensor

    grad_scales, grad_block, listed = None, 0, None
    if isinstance(grads, FP8Gradients):
        base, grad_scales = grads.codes.view(torch.uint8), grads.multipliers
        if grad_scales is None:
            grad_scales, grad_block = grads.block_scales, grads.block_size
    else:
        listed = [None if g is None else g.detach() for g in grads]
        base = first_of(listed)
        if base is None:
            return
    weights = None if weights_out is None else [w.detach() for w in weights_out]
    first_weight, places = first_of(weights), _places(segments, listed, weights)
    # With a scale a segment, its first tile writes the new one while other tiles still read the old one.
    per_tensor = block_size is None and any(buffer.scales is not None for buffer in buffers)
    amax = no_magnitudes(len(segments), segments.device) if per_tensor else exp_avg.codes

    def pointers(buffer: StateBuffer) -> list[Tensor]:
        before = buffer.scales.clone() if per_tensor and buffer.scales is not None else buffer.scales
        return [buffer.codes, given(before), given(buffer.scales)]

    quantities = [first_weight, unused, unused] if master is None else pointers(master)
    quantities += [*pointers(exp_avg), *pointers(exp_avg_sq)]
    width = block_size or TILE
    form = Form(
        grad=grads.element if listed is None else "tensors",
        grad_block=grad_block,
        weights=first_weight is not None,
        master=(storage_of_dtype(first_weight.dtype) if master is None else master.storage).name,
        exp_avg=exp_avg.storage.name,
        exp_avg_sq=exp_avg_sq.storage.name,
        master_in_weights=master is None,
        some_missing=places.some_missing,
        aligned_grads=places.aligned_grads,
        aligned_weights=places.aligned_weights,
        per_block=block_size is not None,
        grad_scale=grad_scale is not None,
        l2=constants["l2"] != 0,
        stochastic=seed is not None,
        native_fp8=native_float8(segments.device),
        fast=segments.device.type == "cuda" and torch.version.hip is None and not interpreted(),
        interpreted=interpreted(),
        rows=TILE // width,
        width=width,
    )
    for step in ("first", "second") if per_tensor else ("only",):
        adamw_kernel[(segments.num_tiles,)](
            base,
            given(grad_scales),
            given(first_weight),
            *quantities,
            segments.tile_segments,
            segments.table,
            places.entries,
            amax,
            given(grad_scale),
            *(constants[name] for name in CONSTANTS),
            *((0, 0) if seed is None else (seed.low, seed.high)),
            PASS=step,
            FORM=form,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


def _places(segments: Segments, grads: list[Tensor | None] | None, weights: list[Tensor] | None) -> Places:
    key = tuple(
        None if tensors is None else tuple(None if t is None else t.data_ptr() for t in tensors)
        for tensors in (grads, weights)
    ) + tuple(None if tensors is None else first_of(tensors).dtype for tensors in (grads, weights))
    known = segments.pointer_tables
    if key not in known:
        while len(known) >= _REMEMBERED:
            known.pop(next(iter(known)))
        known[key] = Places.of(grads, weights, len(segments), segments.device)
    return known[key]
