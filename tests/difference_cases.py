"""Differences of a unit's weights on a device, against the torch code on a CPU: the same bytes."""

from __future__ import annotations

import torch

from zeropp_fp8.formats import make_format
from zeropp_fp8.zero.gather.difference import Contents, Difference

CPU = torch.device("cpu")
NUMELS = [1000, 64, 4096, 33]  # the second is a vector
RANKS, OWN = 3, 1


def steps_on(device, difference, rest, dtype, steps=4):
    """(what was sent, what is held) after each step, on the CPU; a rank in the middle, whose last slice is padded."""
    generator = torch.Generator().manual_seed(0)
    exact = make_format("none", dtype=dtype)
    held_formats = [exact if index == 1 else make_format(rest, **_options(rest, dtype)) for index in range(len(NUMELS))]
    formats = [exact if index == 1 else make_format(difference, block_size=64) for index in range(len(NUMELS))]
    contents = Contents(NUMELS, held_formats, formats)
    one = Difference(contents, contents, device)
    weights = [torch.randn(RANKS, numel, generator=generator).to(dtype) for numel in NUMELS]
    rows = [wire_format.encode_rows(weight) for wire_format, weight in zip(held_formats, weights)]
    held, found = torch.cat(rows, dim=1).to(device), []
    one.begin()
    for _ in range(steps):
        weights = [w + (0.01 * torch.randn(w.shape, generator=generator)).to(dtype) for w in weights]
        brought = torch.empty(RANKS, contents.row_bytes, dtype=torch.uint8, device=device)
        for rank in range(RANKS):
            shards = [w[rank].to(device) for w in weights]
            shards[-1] = shards[-1][: 20 if rank == OWN else 33]
            one.encode(shards, held[rank : rank + 1], brought[rank : rank + 1])
        one.add(brought, held)
        found.append((brought.cpu(), held.cpu().clone()))
    return found, one.is_due


def _options(rest, dtype):
    return {"dtype": dtype} if rest == "none" else {"block_size": 128}
