"""Differences of weights: the bytes that a rank sends, the weights that all make of them, and when they are due."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.formats import UnquantizedFormat
from zeropp_fp8.zero.gather.difference import Difference, Rows

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def row_of(tensors, dtypes):
    """uint8 [1, bytes]: what is held of flat tensors."""
    return torch.cat([UnquantizedFormat(d).encode_rows(t.view(1, -1).to(d)) for t, d in zip(tensors, dtypes)], dim=1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(DTYPES)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([0, 1e-6, 1e-4, 1]),
    st.integers(0, 40),
)
def test_all_hold_what_each_has(tensors, ranks, change, missing):
    """Of tensors of any dtypes and sizes, of which the last ones may lack zeros at their ends, in two steps."""
    torch.manual_seed(len(tensors))
    numels, dtypes = [n for n, _ in tensors], [dtype for _, dtype in tensors]
    rows = Rows(numels, dtypes, CPU)
    weights = [[0.02 * torch.randn(numel) for numel in numels] for _ in range(ranks)]
    for mine in weights:
        mine[-1][max(0, numels[-1] - missing) :] = 0
    held = torch.cat([row_of(mine, dtypes) for mine in weights])
    for _ in range(2):
        sent = []
        for rank, mine in enumerate(weights):
            for each in mine:
                each += change * torch.randn(each.shape)
            mine[-1][max(0, numels[-1] - missing) :] = 0
            own = [each.to(dtype) for each, dtype in zip(mine, dtypes)]
            own[-1] = own[-1][: max(0, numels[-1] - missing)]
            measured = rows.measure(own, held[rank : rank + 1])
            sent.append(torch.full((1, int(measured.row_bytes)), 7, dtype=torch.uint8))
            rows.encode(own, held[rank : rank + 1], measured, sent[-1])
        longest = max(payload.shape[1] for payload in sent)
        assert longest % 16 == 0
        brought = torch.cat([torch.nn.functional.pad(payload, (0, longest - payload.shape[1])) for payload in sent])
        rows.add(brought, held)
        assert torch.equal(held, torch.cat([row_of(mine, dtypes) for mine in weights]))


def test_rows_without_numbers_of_16_bits():
    rows = Rows([5, 0], [torch.float32, torch.bfloat16], CPU)
    held, own = row_of([torch.zeros(5)], [torch.float32]), [torch.arange(5.0), torch.empty(0, dtype=torch.bfloat16)]
    measured = rows.measure(own, held)
    out = torch.empty(1, int(measured.row_bytes), dtype=torch.uint8)
    rows.encode(own, held, measured, out)
    rows.add(out, held)
    assert out.shape == (1, 32) and torch.equal(held, row_of(own[:1], [torch.float32]))


class Unit(SimpleNamespace):
    """One matrix of 64 numbers, which two ranks have one after the other; they are sent as whole rows."""

    def __init__(self, **fields):
        formats = SimpleNamespace(differs=True)
        route = SimpleNamespace(session=SimpleNamespace(formats=formats), held_ranks=[1, 0])
        super().__init__(route=route, persistent=False, keeps_secondary=True, may_differ=True, **fields)
        self.secondary, self.secondary_is_current = torch.zeros(2, 128, dtype=torch.uint8), False
        self.weight = torch.zeros(64, dtype=torch.bfloat16)

    def difference_rows(self):
        rows = Rows([64], [torch.bfloat16], CPU)
        return rows, [rows]

    def shards(self):
        return [self.weight]

    def held_rows(self, held):
        return [held]

    def own_held_row(self, held):
        return held[:1]

    def agreed(self, sizes):
        return [max(sizes)] * len(sizes)

    def own_row_of_differences(self, brought, sizes):
        return brought.view(2, -1)[:1]

    def rows_of_differences(self, brought, sizes):
        return [brought.view(2, -1)]

    def bring_differences(self, brought, sizes):
        brought.view(2, -1)[1] = brought.view(2, -1)[0]  # the other rank has the same
        return []


def step(unit, difference, change):
    unit.weight += change
    difference.changed(by_step=True)
    assert difference.is_due and difference.is_unknown
    difference.agree([int(difference.measure())] * 2)
    assert not difference.is_unknown and difference.brought_bytes == sum(difference.sizes)
    brought = torch.empty(difference.brought_bytes, dtype=torch.uint8)
    difference.send(unit.secondary, brought)
    difference.add(brought, unit.secondary)


def test_when_differences_are_due():
    unit = Unit()
    difference = Difference(unit)
    assert not difference.is_due and not difference.is_unknown, "no copy exists"
    difference.begin()
    for place in range(3):
        step(unit, difference, 0.5)
        assert difference.steps == place + 1
        assert torch.equal(unit.secondary[1].view(torch.bfloat16), unit.weight)
    unit.secondary_is_current = True
    assert not difference.is_unknown, "nothing is to come"
    unit.secondary_is_current = False
    difference.changed(by_step=False)
    assert not difference.is_due, "somebody has written"
    difference.begin()
    assert difference.is_due and difference.steps == 0
    difference.forget()
    assert not difference.is_due


@pytest.mark.parametrize(
    "field, value", [("persistent", True), ("keeps_secondary", False), ("may_differ", False), ("differs", False)]
)
def test_units_that_are_always_sent_as_a_whole(field, value):
    unit = Unit()
    setattr(unit.route.session.formats if field == "differs" else unit, field, value)
    difference = Difference(unit)
    difference.begin()
    assert not difference.is_on and not difference.is_due
