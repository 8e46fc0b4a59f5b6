"""The harness of jobs on ranks: what compares two traces must see every difference."""

import copy
from dataclasses import fields

import pytest
import torch
from running import (
    Running,
    Trace,
    accumulated,
    backward,
    boundary,
    changed,
    differing,
    equal,
    forward,
    freezing,
    on_engine,
    resumed,
    run,
    same,
    scaled,
    see,
    step,
    within,
)

TRACE = Trace(
    [1.0, 0.5], [[]], {"w": torch.ones(3)}, {"w": torch.ones(3)}, {"gradients": {"inter": 8.0}}, {"m": torch.ones(3)}
)
OTHER = Trace([1.0, 0.25], [["left"]], {"w": torch.zeros(3)}, {"w": torch.full((3,), 1 + 2**-23)}, {}, {})


def test_the_same():
    assert differing(TRACE, copy.deepcopy(TRACE)) == {} and same(TRACE.weights, {"w": torch.ones(3)})


@pytest.mark.parametrize("name", [each.name for each in fields(Trace)])
def test_each_part_that_differs(name):
    """By a bit, by a name, or because one trace does not have it."""
    nothing = getattr(Trace(), name)
    for value in (getattr(OTHER, name), nothing, {} if name in ("weights", "masters", "moments") else nothing):
        other = copy.deepcopy(TRACE)
        setattr(other, name, value)
        assert differing(TRACE, other).keys() == differing(other, TRACE).keys() == {name}
        assert differing(TRACE, other, but=[name]) == {}


def test_names_on_one_side():
    assert changed({"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.zeros(1), "c": torch.ones(1)}) == [
        "a",
        "b",
        "c",
    ]


def test_tensors_inside_of_what_was_seen():
    one = [{"w": torch.ones(2)}, (1, None)]
    assert equal(one, copy.deepcopy(one)) and differing(Trace(seen=one), Trace(seen=copy.deepcopy(one))) == {}
    for unlike in (
        [{"w": torch.zeros(2)}, (1, None)],
        [{"w": 1.0}, (1, None)],
        one[:1],
        [{"w": torch.ones(2)}, (1, 2)],
    ):
        assert not equal(one, unlike) and differing(Trace(seen=one), Trace(seen=unlike)).keys() == {"seen"}


class Engine:
    """Writes down what it is asked to do."""

    def __init__(self):
        self.log = []

    def __call__(self, x):
        self.log.append(f"forward {x}")
        return torch.tensor(float(x))

    def backward(self, loss):
        self.log.append(f"backward {loss.item():g}")

    def step(self):
        self.log.append("step")

    def set_gradient_accumulation_boundary(self, last):
        self.log.append(f"last: {last}")

    def save_checkpoint(self, folder, tag):
        self.log.append(f"save {folder}/{tag}")

    def load_checkpoint(self, folder, tag):
        self.log.append(f"load {folder}/{tag}")
        return f"{folder}/{tag}", {}

    def destroy(self):
        self.log.append("end")

    def __enter__(self):
        self.log.append("in")

    def __exit__(self, *raised):
        self.log.append("out")


def happen(*events):
    running = Running(Engine(), iter([(2,), (4,), (8,)]))
    for event in events:
        event(running)
    return running.engine.log, running.trace


def test_events_happen_in_their_order():
    log, trace = happen(step, boundary(True), within(lambda engine: engine, forward), see(lambda engine, x: x, 7))
    assert log == ["forward 2", "backward 2", "step", "last: True", "in", "forward 4", "out"]
    assert trace.losses == [2.0, 4.0] and trace.seen == [7]
    log, trace = happen(forward, scaled(0.5), backward)
    assert log == ["forward 2", "backward 1"] and trace.losses == [2.0]
    assert happen(on_engine(lambda engine, what: engine.log.append(what), "own"))[0] == ["own"]


def test_a_step_of_several_micro_batches():
    assert happen(*accumulated(2))[0] == ["forward 2", "backward 2", "step", "forward 4", "backward 4", "step"]
    assert happen(*accumulated(2, "unmanaged"))[0] == ["forward 2", "backward 1", "forward 4", "backward 2", "step"]
    log, trace = happen(*accumulated(2, "set boundary"))
    assert log[:3] == ["last: False", "forward 2", "backward 1"] and log[3:] == [
        "last: True",
        "forward 4",
        "backward 2",
        "step",
    ]
    assert trace.losses == [2.0, 4.0], "of the forward, not of the mean"


def test_parameters_that_do_not_train_are_named_by_parts():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    assert freezing("0.", "bias")(model) is model
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["1.weight"]
    assert all(p.requires_grad for p in freezing()(model).parameters()), "of nothing, all train"


class Engines:
    """A spec of these."""

    def __init__(self):
        self.made = []

    def engine(self, model=None):
        self.made.append(Engine())
        return self.made[-1]


def test_a_run_that_resumes():
    """The events after the checkpoint happen to both engines, on the same micro-batches."""
    spec, data = Engines(), [(2,), (4,), (8,)]
    until, *both = resumed(spec, [step], [step, forward], again=spec, data=data, folder="f", tag="t")
    assert until.losses == [2.0] and [trace.losses for trace in both] == [[4.0, 8.0]] * 2
    after = ["forward 4", "backward 4", "step", "forward 8", "end"]
    assert spec.made[0].log == ["forward 2", "backward 2", "step", "save f/t", *after]
    assert spec.made[1].log == ["load f/t", *after]


def test_an_event_that_raises_is_told_at_once():
    """Ending an engine may wait for ranks to which nothing has happened."""
    spec = Engines()
    with pytest.raises(StopIteration):
        run(spec, [forward, forward], data=[(2,)])
    assert spec.made[0].log == ["forward 2"]
