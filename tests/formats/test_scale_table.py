"""Selections of scales: where they lie, what they say, and that what is recorded in them is not lost."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.formats.scale_table import ScaleTable

TENSORS = 6
SELECTIONS = st.lists(st.lists(st.integers(0, TENSORS - 1), max_size=8).map(tuple), min_size=1, max_size=4)


def made():
    return ScaleTable(torch.zeros(TENSORS), torch.zeros(3, 2, dtype=torch.int64))


def addresses(scales):
    return [tensor.data_ptr() for tensor in (scales.encode, scales.decode, scales.amax)]


@given(st.lists(SELECTIONS, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_selections_follow_the_table_and_amax_is_the_largest(steps, random):
    """Whatever is asked for, in whichever step: cut tensors (twice), neighbours, all."""
    table = made()
    encode = decode = torch.ones(TENSORS)
    for selections in steps:
        expected = torch.zeros(TENSORS)
        for places in selections:
            scales = table.at(places)
            assert scales is table.at(places) and scales.places == places and scales.table is table
            assert torch.equal(scales.encode, encode[list(places)]) and torch.equal(scales.decode, decode[list(places)])
            for column, place in enumerate(places):
                number = random.choice([0.0, 1.0, 2.0, 3.0])
                scales.amax[column] = torch.maximum(scales.amax[column], torch.tensor(number))
                expected[place] = max(expected[place], number)
        table.collect()
        assert torch.equal(table.amax, expected)
        table.amax.zero_()  # as the history does when it takes it over
        encode, decode = torch.rand(TENSORS), torch.rand(TENSORS)
        table.update(encode, decode)


def test_selections_stay_where_they_are():
    """A lane may read them long after the host has gone on."""
    table = made()
    selections = [table.at(places) for places in ((4, 1), (0, 1, 2), (5, 5, 3))]
    table.update(torch.rand(TENSORS), torch.rand(TENSORS))
    before = [addresses(scales) for scales in selections]
    start = min(before[0][0], before[2][0])
    assert (before[0][0] - start) % 16 == (before[2][0] - start) % 16 == 0  # of copies, by which kernels are compiled
    for _ in range(3):
        table.collect()
        table.update(torch.rand(TENSORS), torch.rand(TENSORS))
        assert [addresses(table.at(scales.places)) for scales in selections] == before


def test_what_is_under_way_keeps_its_scales():
    table = made()
    copied, shared = table.at((4, 1)), table.at((0, 1, 2))
    later = table.changed(torch.tensor([1]), torch.tensor([8.0]), torch.tensor([0.125]))
    assert copied.encode.tolist() == [1, 1] and shared.decode.tolist() == [1, 1, 1]
    assert later.at((4, 1)).encode.tolist() == [1, 8] and later.at((0, 1, 2)).decode.tolist() == [1, 0.125, 1]
    copied.amax.fill_(3.0)
    later.at((1, 1)).amax.copy_(torch.tensor([5.0, 2.0]))
    for each in (table, later):
        each.collect()
    assert table.amax is later.amax and later.amax.tolist() == [0, 5, 0, 0, 3, 0]
