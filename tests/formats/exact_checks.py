"""Rows of exact differences by kernels beside the torch code: the same bytes, and what they make of what is held."""

from __future__ import annotations

import torch

from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat, exact, make_format
from zeropp_fp8.zero.gather.difference import Rows

SHAPES = ([1], [1024], [5, 1500, 1024, 2049], [7, 3000])
# How far numbers are from what is held of them, or which bits they have.
KINDS = (0, 1e-6, 1e-5, 1e-4, 1e-3, 1.0, "any bits", "any bits of a few", "one unit")


INTEGERS = {1: torch.int8, 2: torch.int16}
# Of codes, whose scales, if there are any, are bytes like others.
FORMATS = {torch.float8_e4m3fn: SharedScaleFormat("fp8_e4m3"), torch.int8: make_format("int8", block_size=16)}


def any_bits(numels, rows, dtype, generator):
    lowest = 2 ** (8 * dtype.itemsize - 1)
    bits = [torch.randint(-lowest, lowest, (rows, n), generator=generator) for n in numels]
    return [each.to(INTEGERS[dtype.itemsize]).view(dtype) for each in bits]


def tensors_of(kind, numels, rows, dtype):
    """(numbers, what is held of them), [rows, numel] each; `kind`: of KINDS."""
    generator, integers = torch.Generator().manual_seed(sum(numels)), INTEGERS[dtype.itemsize]
    if kind == "any bits":
        return any_bits(numels, rows, dtype, generator), any_bits(numels, rows, dtype, generator)
    scale = {1: 25.0, 2: 0.02}[dtype.itemsize]
    weights = [scale * torch.randn(rows, numel, generator=generator) for numel in numels]
    held = [each.clamp(-127, 127).to(dtype) for each in weights]
    if kind == "any bits of a few":
        others = any_bits(numels, rows, dtype, generator)
        for old, new in zip(held, others):
            new.view(integers).copy_(
                old.view(integers).where(torch.arange(new.shape[1]) % 301 != 5, new.view(integers))
            )
        return others, held
    if kind == "one unit":
        held = [torch.ones_like(each, dtype=torch.float32).to(dtype) for each in held]
        return [(each.view(integers) + 1).view(dtype) for each in held], held
    changed = (each + 50 * scale * kind * torch.randn(each.shape, generator=generator) for each in weights)
    numbers = [each.clamp(-127, 127).to(dtype) for each in changed]
    if kind == 0:
        numbers = held
    if kind == 1e-5 and dtype.is_floating_point:
        held[0][0, 0], numbers[-1][0, -1], numbers[0][-1, 0] = torch.nan, torch.inf, torch.nan
    return numbers, held


def payload_of(tensors, formats):
    """uint8 [rows, bytes]."""
    rows = []
    for each, form in zip(tensors, formats):
        if each.dtype.itemsize == 1:
            codes = each.view(torch.uint8)
            rows.append(torch.nn.functional.pad(codes, (0, form.payload_bytes(codes.shape[1]) - codes.shape[1])))
        else:
            rows.append(form.encode_rows(each))
    return torch.cat(rows, dim=1)


def check(kind, numels, dtype, device, rows=2):
    """Of tensors at odd places, beside one that is sent as it is; each rank holds its own new payload already."""
    numbers, held = tensors_of(kind, numels, rows, dtype)
    form = FORMATS.get(dtype) or UnquantizedFormat(dtype)
    formats = [UnquantizedFormat(torch.float32), *[form] * len(numels)]
    beside = torch.arange(6.0).repeat(rows, 1)
    old, new = payload_of([beside, *held], formats), payload_of([-beside, *numbers], formats)
    by_torch = Rows(formats, [6, *numels], torch.device("cpu"), use_kernels=False)
    by_kernels = Rows(formats, [6, *numels], device, use_kernels=True)
    sent, there = [], (old.to(device), new.to(device))
    for rank in range(rows):
        mine = slice(rank, rank + 1)
        expected, found = by_torch.measure(new[mine], old[mine]), by_kernels.measure(there[1][mine], there[0][mine])
        for one, of_kernels in zip(expected, found):
            assert torch.equal(one, of_kernels.cpu()), (kind, numels, dtype)
        payload = torch.full((1, int(expected.row_bytes)), 255, dtype=torch.uint8)
        made = payload.to(device)
        by_torch.encode(new[mine], old[mine], expected, payload)
        by_kernels.encode(there[1][mine], there[0][mine], found, made)
        assert torch.equal(payload, made.cpu()), (kind, numels, dtype)
        sent.append(payload)
    longest = max(payload.shape[1] for payload in sent)
    brought = torch.zeros(rows, longest, dtype=torch.uint8)
    for rank, payload in enumerate(sent):
        brought[rank, : payload.shape[1]] = payload
    for own in (None, *range(rows)):
        expected, found = old.clone(), there[0].clone()
        if own is not None:
            expected[own], found[own] = new[own], there[1][own]
        by_torch.add(brought, expected, own)
        by_kernels.add(brought.to(device), found, own)
        assert torch.equal(expected, new) and torch.equal(found.cpu(), new), (kind, numels, dtype, own)


def check_all(device):
    for dtype in exact.MANTISSA:
        for kind in KINDS:
            check(kind, SHAPES[2], dtype, device)
        for numels in SHAPES:
            check(1e-5, numels, dtype, device, rows=3)
