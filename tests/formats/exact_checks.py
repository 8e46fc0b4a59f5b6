"""Rows of exact differences by kernels beside the torch code: the same bytes, and what they make of what is held."""

from __future__ import annotations

import torch

from zeropp_fp8.formats import UnquantizedFormat
from zeropp_fp8.zero.gather.difference import Rows

SHAPES = ([1], [1024], [5, 1500, 1024, 2049], [7, 3000])
# How far numbers are from what is held of them, or which bits they have.
KINDS = (0, 1e-6, 1e-5, 1e-4, 1e-3, 1.0, "any bits", "any bits of a few", "one unit")


def any_bits(numels, rows, dtype, generator):
    return [torch.randint(-(2**15), 2**15, (rows, n), generator=generator).to(torch.int16).view(dtype) for n in numels]


def tensors_of(kind, numels, rows, dtype):
    """(numbers, what is held of them), [rows, numel] each; `kind`: of KINDS."""
    generator = torch.Generator().manual_seed(sum(numels))
    if kind == "any bits":
        return any_bits(numels, rows, dtype, generator), any_bits(numels, rows, dtype, generator)
    weights = [0.02 * torch.randn(rows, numel, generator=generator) for numel in numels]
    held = [each.to(dtype) for each in weights]
    if kind == "any bits of a few":
        others = any_bits(numels, rows, dtype, generator)
        return [old.where(torch.arange(n) % 301 != 5, new) for n, old, new in zip(numels, held, others)], held
    if kind == "one unit":
        held = [torch.ones_like(each) for each in held]
        return [(each.view(torch.int16) + 1).view(dtype) for each in held], held
    numbers = [(each + kind * torch.randn(each.shape, generator=generator)).to(dtype) for each in weights]
    if kind == 0:
        numbers = held
    if kind == 1e-5:
        held[0][0, 0], numbers[-1][0, -1], numbers[0][-1, 0] = torch.nan, torch.inf, torch.nan
    return numbers, held


def check(kind, numels, dtype, device, rows=2, missing=0):
    """Of tensors at odd places. `missing`: numbers that the last rank's last tensor has no more; zeros are held."""
    numbers, held = tensors_of(kind, numels, rows, dtype)
    if missing:
        numbers[-1][-1, -missing:] = 0
        held[-1][-1, -missing:] = 0
    form, other = UnquantizedFormat(dtype), UnquantizedFormat(torch.float32)
    beside = torch.arange(6.0).repeat(rows, 1)  # a tensor that is sent as it is
    row = torch.cat([*(form.encode_rows(each) for each in held), other.encode_rows(-beside)], dim=1).to(device)
    places = [*numels, 6], [*[dtype] * len(numels), torch.float32], device
    by_torch = Rows(*places[:2], torch.device("cpu"), use_kernels=False)
    sent = []
    for rank in range(rows):
        by_kernels = Rows(*places, use_kernels=True)  # each rank's own: sizes of its tensors do not change
        mine = [*(each[rank] for each in numbers), beside[rank]]
        if missing and rank == rows - 1:
            mine[-2] = mine[-2][:-missing]
        there = torch.cat([torch.zeros(1, dtype=dtype), *mine[:-1]]).to(device)[1:]
        there = [*there.split([each.numel() for each in mine[:-1]]), mine[-1].to(device)]
        own = row[rank : rank + 1]
        expected, found = by_torch.measure(mine, own.cpu()), by_kernels.measure(there, own)
        for one, of_kernels in zip(expected, found):
            assert torch.equal(one, of_kernels.cpu()), (kind, numels, dtype)
        payload = torch.full((1, int(expected.row_bytes)), 255, dtype=torch.uint8)
        made = payload.to(device)
        by_torch.encode(mine, own.cpu(), expected, payload)
        by_kernels.encode(there, own, found, made)
        assert torch.equal(payload, made.cpu()), (kind, numels, dtype)
        sent.append(payload)
    longest = max(payload.shape[1] for payload in sent)
    brought = torch.zeros(rows, longest, dtype=torch.uint8)
    for rank, payload in enumerate(sent):
        brought[rank, : payload.shape[1]] = payload
    expected, found = row.cpu().clone(), row.clone()
    by_torch.add(brought, expected)
    by_kernels.add(brought.to(device), found)
    wanted = torch.cat([*(form.encode_rows(each) for each in numbers), other.encode_rows(beside)], dim=1)
    assert torch.equal(expected, wanted) and torch.equal(found.cpu(), wanted), (kind, numels, dtype)


def check_all(device):
    for dtype in (torch.bfloat16, torch.float16):
        for kind in KINDS:
            check(kind, SHAPES[2], dtype, device, missing=3)
        for numels in SHAPES:
            check(1e-5, numels, dtype, device, rows=3)
