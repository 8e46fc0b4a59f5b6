"""Differences of weights: the bytes that a rank sends, and the weights that all make of them."""

import math

import pytest
import torch
from conformance import CPU
from payload_checks import RANKS, steps_on

from zeropp_fp8.formats import make_format
from zeropp_fp8.zero.gather.difference import Contents, Difference, Fits

INT4, EXACT = make_format("int4", block_size=32), make_format("none", dtype=torch.float32)


def pair(numel=64, **options):
    """A difference of one matrix in fp32, and a payload that holds ones."""
    contents = Contents([numel], [EXACT], [INT4])
    one = Difference(contents, [contents], [INT4.payload_bytes(numel)] * 2, CPU, **options)
    one.begin()
    return one, EXACT.encode_rows(torch.ones(2, numel))


def send(one, held, weights):
    brought = torch.empty(2, one.sizes[0], dtype=torch.uint8)
    for rank in range(2):
        one.encode([weights[rank]], held[rank : rank + 1], brought[rank : rank + 1])
    one.add([brought], [held])
    return EXACT.decode_rows(held, weights.shape[1], torch.float32)


def test_what_is_held_comes_as_near_as_the_format_is():
    one, held = pair()
    weights = torch.ones(2, 64) + 0.1 * torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    error = math.inf
    for _ in range(4):  # the weights stay: each difference is what the last one lacked
        now = (send(one, held, weights) - weights).abs().max().item()
        assert now < error / 5
        error = now
    assert one.steps == 4 and one.is_due


def test_padding_is_zero_whatever_a_difference_brings():
    numel = 64
    one, held = pair(numel)
    held = EXACT.encode_rows(torch.zeros(2, numel))
    for step in range(20):
        brought = torch.empty(2, one.sizes[0], dtype=torch.uint8)
        for rank in range(2):
            one.encode([torch.full((40,), 0.1 * step)], held[rank : rank + 1], brought[rank : rank + 1])
        one.add([brought], [held])
    assert EXACT.decode_rows(held, numel, torch.float32)[:, 40:].abs().max() < 0.05


def test_one_that_does_not_fit():
    one, held = pair()
    send(one, held, torch.full((2, 64), 1.2))
    assert one.is_due
    send(one, held, torch.full((2, 64), 1.6))
    assert not one.is_due and one.state() == {"steps": 2, "too large": True}
    one.begin()
    assert one.is_due and one.steps == 0
    send(one, held, torch.full((2, 64), math.nan))
    assert not one.is_due, "NaN fits nowhere"


def test_the_host_gets_what_was_found_of_all_units_at_once():
    all_fits = Fits()
    small, large = (pair(all_fits=all_fits) for _ in range(2))
    begun_again, _ = pair(all_fits=all_fits)
    for (one, held), weight in ((small, 1.1), (large, 1.6)):
        send(one, held, torch.full((2, 64), weight))
    send(begun_again, EXACT.encode_rows(torch.ones(2, 64)), torch.full((2, 64), 1.6))
    begun_again.begin()
    all_fits.bring_to_host()
    assert small[0].fits.data_ptr() == large[0].fits.data_ptr() - 1, "one copy"
    assert small[0].is_due and not large[0].is_due and begun_again.is_due
    send(*small, torch.full((2, 64), 1.1))
    all_fits.bring_to_host()
    assert small[0].is_due and not large[0].is_due


def test_when_everything_is_due():
    one, held = pair()
    for _ in range(5):
        assert one.is_due
        send(one, held, torch.ones(2, 64))
    one.forget()
    assert not one.is_due
    one.continue_from({"steps": 1, "too large": False})
    assert one.is_due
    one.continue_from({"steps": 1, "too large": True})
    assert not one.is_due


@pytest.mark.parametrize("difference", ["int4", "int2", "int3", "int8"])
@pytest.mark.parametrize("rest, dtype", [("none", torch.bfloat16), ("none", torch.float32), ("int8", torch.bfloat16)])
def test_bytes_do_not_depend_on_how_many_rows_are_added_at_once(difference, rest, dtype):
    expected, due = steps_on(CPU, difference, rest, dtype)
    assert due
    for at_once in (1, 2):
        found, _ = steps_on(CPU, difference, rest, dtype, at_once=at_once)
        for (sent, held), (other_sent, other_held) in zip(found, expected):
            assert torch.equal(sent, other_sent) and torch.equal(held, other_held) and len(held) == RANKS
