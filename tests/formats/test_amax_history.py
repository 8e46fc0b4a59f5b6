"""The largest magnitudes of the last steps, from which shared scales come."""

import pytest
import torch

from zeropp_fp8.formats import amax_history
from zeropp_fp8.formats.amax_history import AmaxHistory


def history_of(steps, monkeypatch):
    monkeypatch.setattr(amax_history, "STEPS", steps)
    return AmaxHistory(3, torch.device("cpu"))


def feed(history, rows):
    for row in rows:
        history.current.copy_(torch.maximum(history.current, torch.tensor(row)))
        history.end_step()


ROWS = [[1.0, 8.0, 0.0], [3.0, 0.0, 0.0], [2.0, 4.0, 0.0], [1.0, 2.0, 0.0], [0.5, 0.0, 5.0]]


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_the_largest_of_the_last_steps(length, monkeypatch):
    history = history_of(length, monkeypatch)
    seen = []
    for row in ROWS:
        # A tensor that a step does not show keeps its newest entry.
        seen.append([new or (seen[-1][i] if seen else 0.0) for i, new in enumerate(row)])
        feed(history, [row])
        assert not history.current.any() and history.newest.tolist() == seen[-1]
        assert history.largest().tolist() == [max(column) for column in zip(*seen[-length:])]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("saved", [1, 3, 4])
@pytest.mark.parametrize("steps", range(len(ROWS) + 1))
def test_history_continues_from_a_checkpoint_of_any_length(length, saved, steps, monkeypatch):
    """Of an earlier version, for example, which had them as an option."""
    first = history_of(saved, monkeypatch)
    feed(first, ROWS[:steps])
    state = first.oldest_first()
    assert state.shape == (saved, 3) and state.device.type == "cpu"
    again = history_of(length, monkeypatch)
    feed(again, [[9.0, 9.0, 9.0]] * 2)
    again.current.fill_(100.0)
    again.load(state)
    assert not again.current.any()
    assert again.newest.tolist() == first.newest.tolist()
    expected = first.oldest_first()[-length:].amax(dim=0)
    assert torch.equal(again.largest(), expected)
    if length == saved:
        for row in ROWS[steps:]:
            feed(first, [row])
            feed(again, [row])
            assert torch.equal(again.largest(), first.largest()) and torch.equal(again.newest, first.newest)
