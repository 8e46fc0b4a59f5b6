"""A storage of the tests' own: what the gatherer is to know of one is what this one says."""

from __future__ import annotations

import math
from unittest import mock

import torch
from models import batches, section
from running import Spec, evaluate, on_engine, run, step
from torch import Tensor

from zeropp_fp8.comm.all_gather import start_level
from zeropp_fp8.zero import offload
from zeropp_fp8.zero.gather.sliced import Sliced
from zeropp_fp8.zero.gather.units import Arrived, Unit

MASK = 0x5A


class Masked(Sliced):
    """Matrices whose bytes travel with some of their bits turned over. They rest as slices: the rest is inherited."""

    def __init__(self, route):
        super().__init__(route)
        self.calls = []

    def takes(self, param):
        return len(param.ds_shape) >= 2


class MaskedUnit(Unit):
    """Slices one after the other, a row per rank."""

    def bytes_in(self, wire_format, param):
        return param.ds_tensor.numel() * param.ds_tensor.element_size()

    def lay_out(self):
        self.storage.calls.append("lay_out")

    @property
    def _row_bytes(self) -> int:
        return sum(self.bytes_of(p) for p in self.params)

    @property
    def held_bytes(self):
        return self.route.reached * self._row_bytes

    @property
    def gathered_bytes(self):
        return self.route.world_size * self._row_bytes

    def first_hops(self, held):
        self.storage.calls.append("first_hops")
        row = torch.cat([p.ds_tensor.data.view(torch.uint8) for p in self.params]) ^ MASK
        levels = [level for level in self.route.before if level.size > 1]
        for level in levels:
            result = held if level is levels[-1] else row.new_empty(level.size * row.numel())
            work = start_level(result, row, level, self.route.session.ledger)
            if level is levels[-1]:
                return [work]
            work.wait()
            row = result
        held.copy_(row)
        return []

    def last_hop(self, held, gathered):
        self.storage.calls.append("last_hop")
        return [start_level(gathered, held, self.route.last, self.route.session.ledger)]

    def decode(self, gathered: Tensor) -> Arrived:
        rows = gathered.view(self.route.world_size, -1)[self.route.rows_in_rank_order] ^ MASK
        values, start = [], 0
        for param in self.params:
            size = self.bytes_of(param)
            flat = rows[:, start : start + size].reshape(-1).view(param.ds_tensor.dtype)
            values.append((param, flat[: math.prod(param.ds_shape)].view(param.ds_shape), True))
            start += size
        return Arrived(values, [])

    def changed(self, by_step=False):
        super().changed(by_step)
        self.storage.calls.append("changed")


Masked.unit_class = MaskedUnit


def trained(node_size, secondary, granularity, own):
    """Training with or without it, an evaluation at its end; and what was called of it."""
    made, called = [], []

    def storages_of(route):
        made.extend([Masked(route), Sliced(route)])
        return made

    fields = {"secondary": {"scope": "node"}} if secondary else {}
    the_section = section("lossless", ranks_per_node=node_size, gather_granularity=granularity, **fields)
    look = on_engine(lambda engine: called.extend(made[0].calls if made else ()))
    with mock.patch.object(offload, "storages_of", storages_of if own else offload.storages_of):
        spec = Spec(the_section, config={"gradient_accumulation_steps": 2})
        trace = run(spec, [*[step] * 6, evaluate(next(batches(1, 0))), look], ("weights", "bytes"))
    return trace, set(called)


def trained_each(cases):
    """{case: `trained` with a storage of the tests' own, and without}."""
    return {case: tuple(trained(*case, own) for own in (True, False)) for case in cases}
