"""Differences of a unit's weights on a device, against the torch code on a CPU: the same bytes."""

from __future__ import annotations

import torch
from kernel_cases import awkward, layouts, make, same

from zeropp_fp8.comm.payload import Held, SliceOrder, _can_add
from zeropp_fp8.formats import UnquantizedFormat, make_format
from zeropp_fp8.zero.gather.difference import Contents, Difference

CPU = torch.device("cpu")
NUMELS = [1000, 64, 4096, 33]  # the second is a vector
RANKS, OWN = 3, 1


def steps_on(device, difference, rest, dtype, steps=4, at_once=RANKS, **options):
    """(what was sent, what is held) after each step, on the CPU; a rank in the middle, whose last slice is padded.

    `at_once`: rows that are added together; `options` of the format of differences.
    """
    generator = torch.Generator().manual_seed(0)
    exact = make_format("none", dtype=dtype)
    held_formats = [exact if index == 1 else make_format(rest, **_options(rest, dtype)) for index in range(len(NUMELS))]
    formats = [
        exact if index == 1 else make_format(difference, **{"block_size": 64, **options})
        for index in range(len(NUMELS))
    ]
    contents = Contents(NUMELS, held_formats, formats)
    ranks = [Difference(contents, contents, device) for _ in range(RANKS)]
    weights = [torch.randn(RANKS, numel, generator=generator).to(dtype) for numel in NUMELS]
    rows = [wire_format.encode_rows(weight) for wire_format, weight in zip(held_formats, weights)]
    held, found = torch.cat(rows, dim=1).to(device), []
    ranks[OWN].begin()
    for _ in range(steps):
        weights = [w + (0.01 * torch.randn(w.shape, generator=generator)).to(dtype) for w in weights]
        brought = torch.empty(RANKS, contents.row_bytes, dtype=torch.uint8, device=device)
        for rank in range(RANKS):
            shards = [w[rank].to(device) for w in weights]
            shards[-1] = shards[-1][: 20 if rank == OWN else 33]
            ranks[rank].encode(shards, held[rank : rank + 1], brought[rank : rank + 1])
        for some_brought, some_held in zip(brought.split(at_once), held.split(at_once)):
            ranks[OWN].add(some_brought, some_held)
        ranks[OWN]._all_fits.bring_to_host()
        found.append((brought.cpu(), held.cpu().clone()))
    return found, ranks[OWN].is_due


# (difference, what it is to): every element, with and without the rotation; blocks of one size, of others, long ones
KERNEL_CASES = (
    ("int4", "none"),
    ("int4-hadamard", "int8-hadamard"),
    ("int3", "int8"),
    ("int3-hadamard-96", "none"),
    ("int2", "int8-8192"),
    ("int2-hadamard-96", "int8-96"),
    ("int8", "none"),
    ("none", "none"),
)


def check_kernels(difference, rest, numels, slices, device):
    """The same bytes sent and held, and the same largest magnitudes; with NaN and Inf in some slices."""
    dtype, order, device_order = torch.bfloat16, SliceOrder(slices, CPU), SliceOrder(slices, device)
    slice_numels = [-(-n // (max(slices) + 1)) for n in numels]
    mine, kept = make(difference, dtype=dtype), make(rest, dtype=dtype)
    by_torch, kernels = layouts(mine, slice_numels, dtype, device, kept)
    held_by_torch, held_kernels = layouts(kept, slice_numels, dtype, device, mine)
    assert all(map(_can_add, kernels._groups, held_kernels._groups)), "the torch code would be compared with itself"
    rows = torch.zeros(len(slices), held_by_torch.row_bytes, dtype=torch.uint8)
    held_by_torch.encode(awkward(numels, dtype), order, rows)
    rows_there = rows.clone().to(device)
    held, held_there = Held(held_by_torch, rows), Held(held_kernels, rows_there)
    for step in range(3):
        tensors = awkward(numels, dtype, step)
        if step != 1:
            tensors = [tensor.nan_to_num(1.0, 2.0, -2.0) for tensor in tensors]
        expected = torch.zeros(len(slices), by_torch.row_bytes, dtype=torch.uint8)
        by_torch.encode(tensors, order, expected, held=held)
        actual = torch.full_like(expected, 255, device=device)
        kernels.encode([t.to(device) for t in tensors], device_order, actual, held=held_there)
        assert torch.equal(actual.cpu(), expected), (difference, rest, numels, slices)
        largest, largest_there = by_torch.add(expected, held), kernels.add(actual, held_there)
        assert same(largest_there, largest), (difference, rest, largest, largest_there)
        if isinstance(kept, UnquantizedFormat):  # NaN has other bits on each device
            assert same(rows_there.view(dtype), rows.view(dtype)), (difference, rest, numels)
        else:
            assert torch.equal(rows_there.cpu(), rows), (difference, rest, numels)


def _options(rest, dtype):
    return {"dtype": dtype} if rest == "none" else {"block_size": 128}
