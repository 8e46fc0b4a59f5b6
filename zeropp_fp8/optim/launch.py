"""adamw_step in one launch of kernels/optimizer/adamw.py (two with scales per tensor)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp_fp8.formats.noise import Seed
from zeropp_fp8.kernels.optimizer.adamw import TILE as KERNEL_TILE
from zeropp_fp8.kernels.optimizer.adamw import Places, Quantity, adamw, first_of
from zeropp_fp8.kernels.wire.launch_tables import interpreted
from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer
from zeropp_fp8.optim.state_formats import TILE

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
    options = {}
    if isinstance(grads, FP8Gradients):
        base, listed = grads.codes.view(torch.uint8), None
        per_segment = grads.multipliers is not None
        options["grad_element"] = grads.element
        options["grad_scales"] = grads.multipliers if per_segment else grads.block_scales
        options["grad_block"] = 0 if per_segment else grads.block_size
    else:
        listed = [None if g is None else g.detach() for g in grads]
        base = first_of(listed)
        if base is None:
            return
    weights = None if weights_out is None else [w.detach() for w in weights_out]
    adamw(
        segments.tile_segments,
        segments.table,
        _places(segments, listed, weights),
        None if master is None else _quantity(master),
        _quantity(exp_avg),
        _quantity(exp_avg_sq),
        base,
        first_of(weights),
        constants,
        block_size=block_size,
        grad_scale=grad_scale,
        seed=None if seed is None else (seed.low, seed.high),
        **options,
    )


def _quantity(buffer: StateBuffer) -> Quantity:
    return Quantity(buffer.storage.name, buffer.codes, buffer.scales, buffer.exponents)


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
