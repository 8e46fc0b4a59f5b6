"""Differences of weights: the bytes that a rank sends, the weights that all make of them, and when they are due."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.formats import UnquantizedFormat, make_format
from zeropp_fp8.zero.gather.difference import Difference, Rows

CPU = torch.device("cpu")
FORMATS = {
    "bf16": UnquantizedFormat(torch.bfloat16),
    "fp16": UnquantizedFormat(torch.float16),
    "fp32": UnquantizedFormat(torch.float32),
    "fp8": make_format("fp8_e4m3", block_size=128),
    "int8": make_format("int8", block_size=256),
    "int4": make_format("int4", block_size=128, hadamard=True),
}


def row_of(tensors, formats):
    """uint8 [1, bytes]: a payload of flat tensors."""
    return torch.cat([form.encode_rows(each.view(1, -1)) for each, form in zip(tensors, formats)], dim=1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(list(FORMATS))), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from([0, 1e-6, 1e-4, 1]),
    st.booleans(),
)
def test_all_hold_what_each_has(tensors, ranks, change, has_own):
    """Of tensors of any formats and sizes, in two steps; the holder's own payload may be there already."""
    torch.manual_seed(len(tensors))
    numels, formats = [n for n, _ in tensors], [FORMATS[name] for _, name in tensors]
    rows = Rows(formats, numels, CPU)
    weights = [[0.02 * torch.randn(numel) for numel in numels] for _ in range(ranks)]
    held = torch.cat([row_of(mine, formats) for mine in weights])
    for _ in range(2):
        sent = []
        for rank, mine in enumerate(weights):
            for each in mine:
                each += change * torch.randn(each.shape)
            new, old = row_of(mine, formats), held[rank : rank + 1]
            measured = rows.measure(new, old)
            sent.append(torch.full((1, int(measured.row_bytes)), 7, dtype=torch.uint8))
            rows.encode(new, old, measured, sent[-1])
        longest = max(payload.shape[1] for payload in sent)
        assert longest % 16 == 0
        brought = torch.cat([torch.nn.functional.pad(payload, (0, longest - payload.shape[1])) for payload in sent])
        expected, own = torch.cat([row_of(mine, formats) for mine in weights]), ranks - 1 if has_own else None
        if has_own:
            held[own] = expected[own]
        rows.add(brought, held, own)
        assert torch.equal(held, expected)


def test_rows_without_coded_numbers():
    formats = [FORMATS["fp32"], FORMATS["bf16"]]
    rows = Rows(formats, [5, 0], CPU)
    held, own = row_of([torch.zeros(5)], formats), row_of([torch.arange(5.0)], formats)
    measured = rows.measure(own, held)
    out = torch.empty(1, int(measured.row_bytes), dtype=torch.uint8)
    rows.encode(own, held, measured, out)
    rows.add(out, held)
    assert out.shape == (1, 32) and torch.equal(held, own)


def test_one_kind_of_numbers_is_coded():
    """That of which the payload has most bytes: the others cross as they are, whatever has changed in them."""
    formats, numels = [FORMATS["bf16"], FORMATS["fp8"], FORMATS["bf16"]], [64, 4096, 0]
    rows, numbers = Rows(formats, numels, CPU), [torch.randn(numel) for numel in numels]
    held = row_of(numbers, formats)
    sizes = [int(rows.measure(row_of([first * numbers[0], numbers[1]], formats), held).row_bytes) for first in (1, 2)]
    # 64 numbers of 2 bytes, 5 headers of 4 with padding, for 4 chunks of codes and one of scales, and a word.
    assert sizes == [128 + 32 + 16] * 2
    halved = int(rows.measure(row_of([numbers[0], numbers[1] + 0.05], formats), held).row_bytes)
    assert sizes[0] < halved < held.numel()


class Unit(SimpleNamespace):
    """One matrix of 64 numbers, which two ranks have one after the other; they are sent as whole rows."""

    def __init__(self, **fields):
        formats = SimpleNamespace(differs=True)
        session = SimpleNamespace(formats=formats, topology=SimpleNamespace(rank=1))
        route = SimpleNamespace(session=session, held_ranks=[1, 0])
        super().__init__(route=route, persistent=False, keeps_secondary=True, may_differ=True, **fields)
        self.secondary, self.secondary_is_current = torch.zeros(2, 128, dtype=torch.uint8), False
        self.weight = torch.zeros(64, dtype=torch.bfloat16)

    def difference_rows(self):
        rows = Rows([FORMATS["bf16"]], [64], CPU)
        return rows, [rows]

    def own_payload(self):
        return row_of([self.weight], [FORMATS["bf16"]])

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
