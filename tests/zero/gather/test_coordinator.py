"""The learned order of fetches, and when units are fetched, fetched ahead and released."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from fake_units import as_block, fake_unit
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import OUTSIDE, WireLedger
from zeropp_fp8.zero.gather.coordinator import UnitCoordinator
from zeropp_fp8.zero.gather.trace import FetchTrace
from zeropp_fp8.zero.gather.units import PendingGather

CPU = torch.device("cpu")
PLENTY = 10**9


# -- the order of fetches


def fetch_all(trace, order, kind="weights_forward"):
    trace.start_pass()
    for units in order:
        trace.fetched(units, kind)


def expected_from(trace, start=0):
    return [(position, unit) for position, unit, _ in trace.coming(start)]


def test_a_pass_is_known_from_the_next_one_on():
    a, b, c = (fake_unit(numel) for numel in (1, 2, 4))
    trace = FetchTrace()
    order = [(a,), (b, c), (a,)]
    fetch_all(trace, order)
    assert trace.position == 3 and expected_from(trace) == [] and trace.numel_until(a) is None
    trace.start_pass()
    assert trace.position == 0
    assert expected_from(trace) == [(0, a), (1, b), (1, c), (2, a)]
    assert expected_from(trace, 2) == [(2, a)] and expected_from(trace, 3) == []
    assert trace.first_order() == [a, b, c]
    assert [trace.numel_until(unit) for unit in (a, b, c)] == [0, 1, 1]
    trace.fetched((a,), "weights_forward")
    assert [trace.numel_until(unit) for unit in (a, b, c)] == [6, 0, 0]
    trace.fetched((b, c), "weights_forward")
    assert [trace.numel_until(unit) for unit in (a, b, c)] == [0, None, None]
    trace.forget()
    assert trace.first_order() == [] and expected_from(trace) == [] and trace.position == 0


def test_kinds_are_those_of_the_known_pass():
    a, b = fake_unit(1), fake_unit(1)
    trace = FetchTrace()
    trace.start_pass()
    trace.fetched((a,), "weights_forward")
    trace.fetched((b,), "weights_backward")
    trace.start_pass()
    assert [kind for _, _, kind in trace.coming(0)] == ["weights_forward", "weights_backward"]


def test_a_forward_alone_keeps_the_order_of_the_whole_step():
    a, b = fake_unit(1), fake_unit(2)
    step = [(a,), (b,), (b,), (a,)]
    trace = FetchTrace()
    fetch_all(trace, step)
    for _ in range(2):
        fetch_all(trace, step[:2])
        assert trace.numel_until(a) == 2, "an evaluation still expects the backward"
    trace.start_pass()
    assert expected_from(trace) == list(enumerate([a, b, b, a]))


def test_a_longer_pass_replaces_a_forward_alone():
    a, b = fake_unit(1), fake_unit(2)
    trace = FetchTrace()
    fetch_all(trace, [(a,), (b,)])
    fetch_all(trace, [(a,), (b,), (b,), (a,)])
    assert expected_from(trace, 0) == [], "the known order has ended"
    trace.start_pass()
    assert [unit for _, unit in expected_from(trace)] == [a, b, b, a]


def test_a_pass_that_goes_another_way_replaces_the_known_one():
    a, b, c = (fake_unit(numel) for numel in (1, 2, 4))
    trace = FetchTrace()
    fetch_all(trace, [(a,), (b,), (c,)])
    fetch_all(trace, [(a,), (c,)])
    assert expected_from(trace) == [] and trace.numel_until(b) is None, "nothing is expected after leaving the order"
    trace.fetched((b,), "weights_forward")
    assert expected_from(trace) == [], "and the order is not taken up again in the middle"
    trace.start_pass()
    assert [unit for _, unit in expected_from(trace)] == [a, c, b] == trace.first_order()
    trace.start_pass()
    assert [unit for _, unit in expected_from(trace)] == [a, c, b], "a pass without fetches teaches nothing"


@settings(max_examples=60)
@given(st.data())
def test_distances_against_a_count_by_hand(data):
    units = [fake_unit(numel) for numel in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))]
    fetches = st.sets(st.sampled_from(range(len(units))), min_size=1, max_size=2)
    order = [
        tuple(units[i] for i in sorted(members)) for members in data.draw(st.lists(fetches, min_size=1, max_size=8))
    ]
    trace = FetchTrace()
    fetch_all(trace, order)
    trace.start_pass()
    for done in range(len(order) + 1):
        for unit in units:
            again = next((j for j in range(done, len(order)) if unit in order[j]), None)
            expected = None if again is None else sum(u.numel for members in order[done:again] for u in members)
            assert trace.numel_until(unit) == expected
        assert expected_from(trace, done) == [(j, u) for j in range(done, len(order)) for u in order[j]]
        if done < len(order):
            trace.fetched(order[done], "weights_forward")


# -- fetching, fetching ahead and releasing


class FakeGatherer:
    """Moves units between their states and writes down who asked for what."""

    def __init__(self, units, device="cuda"):
        self.units, self.ownership, self.hops = list(units), self, self
        self.device = torch.device(device)
        self.session = SimpleNamespace(ledger=WireLedger(2, 2))
        self.live_numel = 0
        self.calls = []  # (what, unit)
        self.ahead = []  # (unit, elements in flight before, elements live, kind)
        self.stuck = set()  # id of parameters that cannot be released

    @property
    def pending_numel(self):
        return sum(unit.numel for unit in self.units if unit.is_pending)

    def names(self, what):
        """Indices of the units of all calls of one kind so far, in order; forgets every call."""
        found = [self.units.index(unit) for name, unit in self.calls if name == what]
        self.calls.clear()
        return found

    def has(self, param):
        return any(param is own for unit in self.units for own in unit.params)

    def start_first(self, unit):
        self.calls.append(("first hops", unit))

    def start(self, unit, ahead=False):
        if unit.is_pending:
            return
        assert not unit.live, "gathered twice"
        if ahead:
            pending = sum(u.numel for u in self.units if u.is_pending)
            self.ahead.append((unit, pending, self.live_numel, self.session.ledger.kind))
        self.calls.append(("ahead" if ahead else "start", unit))
        unit.pending = PendingGather(unit, asked_for=True)

    def finish(self, unit):
        if unit.live:
            return
        assert unit.is_pending
        self.calls.append(("finish", unit))
        unit.pending = None
        unit.live = True
        self.live_numel += unit.numel
        for param in unit.params:
            param.data = torch.empty(param.ds_numel)
            param.ds_status = ZeroParamStatus.AVAILABLE

    def release(self, unit):
        self.calls.append(("release", unit))
        for param in unit.params:
            kept = id(param) in self.stuck or param.ds_id in unit.looked_at
            if not (kept or param.ds_active_sub_modules):
                param.data = torch.empty(0)
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if unit.live:
            unit.live = False
            self.live_numel -= unit.numel

    def cancel(self, unit):
        self.calls.append(("cancel", unit))
        unit.pending = None


_ids = itertools.count()


def module_of(*params):
    """A module with these parameters, with what DeepSpeed puts on it."""
    module = as_block(params)
    module.ds_id, module._external_params = next(_ids), {}
    return module


class Pipeline:
    """A coordinator over units of the given sizes, one module each, and the calls of DeepSpeed's hooks."""

    def __init__(self, numels, prefetch=0, live=PLENTY, reuse=0, device="cuda", kept=(), persistent=()):
        units = [fake_unit(numel) for numel in numels]
        for index in kept:
            units[index].keeps_secondary = True
        for index in persistent:
            units[index].persistent = True
        self.units = units
        self.modules = [module_of(*unit.params) for unit in units]
        self.gatherer = FakeGatherer(units, device)
        self.coordinator = UnitCoordinator(self.gatherer, prefetch, live, reuse)

    def fetch(self, index, forward=True, kind=None):
        kind = kind or ("weights_forward" if forward else "weights_backward")
        with self.gatherer.session.ledger.counting(kind):
            self.coordinator.fetch_sub_module(self.modules[index], forward)

    def release(self, index, forward=True):
        self.coordinator.release_sub_module(self.modules[index], forward)

    def visit(self, index, forward=True, kind=None):
        self.fetch(index, forward, kind)
        self.release(index, forward)

    def step(self, order=None):
        order = list(range(len(self.units))) if order is None else order
        self.coordinator.reset_step()
        for index in order:
            self.visit(index)
        for index in reversed(order):
            self.visit(index, forward=False)

    def learned(self):
        """Itself, after one step, with an empty list of calls."""
        self.step()
        self.gatherer.calls.clear()
        self.coordinator.reset_step()
        return self

    def indices(self, state):
        return [index for index, unit in enumerate(self.units) if getattr(unit, state)]


def called(pipeline, *indices):
    """Submodules by themselves, the first as a part of the model that has the others."""
    pipeline.coordinator.submodule_called(pipeline.modules[indices[0]])
    for index in indices:
        pipeline.visit(index)


def test_a_submodule_that_is_called_again_begins_a_pass():
    """As `generate` through a part of the model does: fetched ahead from the second call on, and nothing grows."""
    pipeline = Pipeline([4, 4, 4], prefetch=PLENTY)
    for _ in range(100):
        pipeline.gatherer.calls.clear()
        called(pipeline, 0, 1, 2)
        assert pipeline.coordinator._trace.position == 3
    assert pipeline.gatherer.names("ahead") == [1, 2]


def test_a_head_that_is_called_several_times_belongs_to_the_pass():
    """A loss in chunks; then backward."""
    pipeline = Pipeline([4, 4, 4], prefetch=PLENTY)
    for _ in range(3):
        pipeline.gatherer.calls.clear()
        called(pipeline, 0, 1)
        for _ in range(4):
            called(pipeline, 2)
        for index in (2, 1, 0):
            pipeline.visit(index, forward=False)
        assert pipeline.coordinator._trace.position == 9
    assert 1 in pipeline.gatherer.names("ahead")


def test_a_loop_over_a_submodule_after_a_pass_of_the_whole_model():
    pipeline = Pipeline([4, 4, 4], prefetch=PLENTY)
    pipeline.step()
    longest = 0
    for _ in range(100):
        pipeline.gatherer.calls.clear()
        called(pipeline, 1, 2)
        longest = max(longest, pipeline.coordinator._trace.position)
    assert longest == 6 + 16 * 2 and pipeline.coordinator._trace.position == 2
    assert pipeline.gatherer.names("ahead") == [2]
    pipeline.step()
    assert pipeline.coordinator._trace.position == 6


def test_the_first_step_fetches_each_unit_when_it_is_needed():
    pipeline = Pipeline([4, 4, 4], prefetch=PLENTY)
    pipeline.step()
    assert pipeline.gatherer.ahead == []
    assert pipeline.gatherer.names("start") == [0, 1, 2, 2, 1, 0]
    assert pipeline.indices("live") == [] and pipeline.gatherer.live_numel == 0


def test_nothing_is_fetched_ahead_when_the_limit_is_zero():
    pipeline = Pipeline([4, 4, 4], prefetch=0).learned()
    pipeline.step()
    assert pipeline.gatherer.ahead == []
    assert pipeline.gatherer.names("start") == [0, 1, 2, 2, 1, 0]


def test_at_least_the_next_unit_is_fetched_ahead():
    """Also where it alone exceeds both limits; and not more than it then."""
    pipeline = Pipeline([40, 50, 60], prefetch=1, live=1).learned()
    pipeline.fetch(0)
    assert pipeline.indices("is_pending") == [1]
    pipeline.release(0)
    pipeline.fetch(1)
    assert pipeline.indices("is_pending") == [2] and pipeline.indices("live") == [1]
    assert pipeline.gatherer.names("start") == [0]


@pytest.mark.parametrize(
    ("prefetch", "live", "expected"),
    [
        (13, PLENTY, [1]),
        (14, PLENTY, [1, 2]),
        (18, PLENTY, [1, 2]),
        (19, PLENTY, [1, 2, 3]),
        (PLENTY, 23, [1]),
        (PLENTY, 24, [1, 2]),
    ],
)
def test_both_limits_hold(prefetch, live, expected):
    pipeline = Pipeline([10, 7, 7, 5, 30], prefetch=prefetch, live=live).learned()
    pipeline.fetch(0)
    assert pipeline.indices("is_pending") == expected
    assert pipeline.gatherer.names("ahead") == expected


def test_on_a_cpu_the_next_units_are_on_their_way_before_it_waits():
    pipeline = Pipeline([10, 7, 7], prefetch=17, device="cpu").learned()
    pipeline.fetch(0)
    assert [(what, pipeline.units.index(unit)) for what, unit in pipeline.gatherer.calls] == [
        ("start", 0),
        ("ahead", 1),
        ("ahead", 2),
        ("finish", 0),
    ]


def test_fetching_ahead_waits_for_a_unit_that_must_be_released_first():
    """Unit 0 runs, comes again after unit 1, and is not to be kept until then: nothing passes it."""
    pipeline = Pipeline([4, 4, 4], prefetch=PLENTY)
    pipeline.step([0, 1, 0, 2])
    pipeline.coordinator.reset_step()
    pipeline.fetch(0)
    assert pipeline.indices("is_pending") == [1]
    pipeline.release(0)
    pipeline.fetch(1)
    assert pipeline.indices("is_pending") == [0, 2] and pipeline.indices("live") == [1]


def test_reuse_keeps_what_is_needed_soon():
    """Forward 0 1 2, backward 2 1 0: when unit 1 has run, 4 + 4 elements are fetched before it comes back."""
    for reuse, kept in ((0, []), (1, [2]), (8, [2]), (9, [1, 2]), (17, [0, 1, 2])):
        pipeline = Pipeline([4, 4, 4], reuse=reuse).learned()
        for index in range(3):
            pipeline.visit(index)
        assert pipeline.indices("live") == kept, reuse
        for index in reversed(range(3)):
            pipeline.visit(index, forward=False)
        assert pipeline.indices("live") == [] and pipeline.gatherer.live_numel == 0


def test_reuse_ends_where_too_much_is_live():
    pipeline = Pipeline([4, 4, 4], reuse=PLENTY, live=8).learned()
    for index in range(3):
        pipeline.visit(index)
    assert pipeline.indices("live") == [0, 1], "the third would have made 12 of 8"


def test_bytes_fetched_ahead_count_for_the_pass_that_needs_them():
    pipeline = Pipeline([4, 4], prefetch=PLENTY, reuse=1).learned()
    pipeline.visit(0)
    pipeline.visit(1)
    kinds = [(pipeline.units.index(unit), kind) for unit, _, _, kind in pipeline.gatherer.ahead]
    assert kinds == [(1, "weights_forward"), (0, "weights_backward")]


def test_an_evaluation_counts_as_what_it_is():
    pipeline = Pipeline([4, 4], prefetch=PLENTY, reuse=1).learned()
    for index in range(2):
        pipeline.visit(index, kind=OUTSIDE)
    assert [kind for *_, kind in pipeline.gatherer.ahead] == [OUTSIDE, OUTSIDE]


def test_first_hops_of_what_is_kept_start_with_the_forward():
    pipeline = Pipeline([4, 4, 4, 4], kept=(0, 1, 2))
    pipeline.step([2, 0, 3, 1])
    assert pipeline.gatherer.names("first hops") == [], "the order is not known yet"
    pipeline.coordinator.reset_step()
    pipeline.fetch(2)
    assert pipeline.gatherer.calls[:3] == [("first hops", pipeline.units[index]) for index in (2, 0, 1)]
    pipeline.gatherer.calls.clear()
    pipeline.release(2)
    pipeline.fetch(0)
    assert pipeline.gatherer.names("first hops") == [], "once a forward"
    without = Pipeline([4, 4]).learned()
    without.step()
    assert without.gatherer.names("first hops") == [], "they are part of the gather"


def test_first_hops_of_live_units_are_not_repeated():
    pipeline = Pipeline([4, 4, 4], kept=range(3), reuse=PLENTY).learned()
    pipeline.visit(0)
    pipeline.gatherer.calls.clear()
    pipeline.coordinator.reset_step()
    pipeline.fetch(1)
    assert pipeline.gatherer.names("first hops") == [1, 2]


def test_a_unit_of_two_running_modules_goes_with_the_second():
    pipeline = Pipeline([4])
    inner = module_of(*pipeline.units[0].params)
    pipeline.modules.append(inner)
    pipeline.coordinator.reset_step()
    pipeline.fetch(0)
    pipeline.fetch(1)
    pipeline.release(1)
    assert pipeline.indices("live") == [0] and pipeline.units[0].params[0].ds_active_sub_modules
    pipeline.release(0)
    assert pipeline.indices("live") == [] and not pipeline.units[0].params[0].ds_active_sub_modules


def test_tied_units_are_fetched_for_each_module():
    """Embedding and head share a parameter: two fetches of one unit in a forward, kept only where reuse says so."""
    for reuse, gathers in ((0, 4), (1, 3), (4, 3), (5, 1)):
        pipeline = Pipeline([4, 4], reuse=reuse)
        pipeline.modules.append(module_of(*pipeline.units[0].params))
        pipeline.step([0, 1, 2])
        pipeline.gatherer.calls.clear()
        pipeline.step([0, 1, 2])
        assert pipeline.gatherer.names("start").count(0) == gathers
        assert pipeline.gatherer.live_numel == 0


def test_external_parameters_that_appear_while_a_module_runs():
    pipeline = Pipeline([4, 4])
    pipeline.coordinator.reset_step()
    pipeline.fetch(0)
    pipeline.modules[0]._external_params = {0: pipeline.units[1].params[0]}
    pipeline.fetch(0)
    assert pipeline.indices("live") == [0, 1]
    pipeline.units[1].params[0].is_external_param = True
    pipeline.release(0)
    assert pipeline.indices("live") == [1], "only its user's parent may drop an external parameter"


def test_a_module_without_parameters_moves_nothing():
    pipeline = Pipeline([4])
    pipeline.modules.append(module_of())
    pipeline.coordinator.reset_step()
    pipeline.visit(1)
    assert pipeline.gatherer.calls == []


def test_persistent_units_stay_and_are_not_part_of_the_order():
    pipeline = Pipeline([4, 4], prefetch=PLENTY, persistent=[0])
    pipeline.step()
    pipeline.step()
    assert pipeline.indices("live") == [0] and pipeline.gatherer.live_numel == 4
    starts = [pipeline.units.index(unit) for what, unit in pipeline.gatherer.calls if what in ("start", "ahead")]
    assert starts == [0, 1, 1, 1, 1]
    assert pipeline.coordinator._trace.first_order() == [pipeline.units[1]]


def test_leftovers_of_the_backward_are_released():
    pipeline = Pipeline([4, 4, 4], reuse=PLENTY, persistent=[2]).learned()
    for index in (1, 2):
        pipeline.fetch(index, forward=False)
    pipeline.fetch(0)
    pipeline.coordinator.release_backward_leftovers()
    assert pipeline.indices("live") == [0, 2], "what is not of the backward, and what persists"
    assert not pipeline.units[1].active_modules and not pipeline.units[2].active_modules
    pipeline.gatherer.calls.clear()
    pipeline.visit(0, forward=False)
    pipeline.gatherer.calls.clear()
    pipeline.coordinator.release_backward_leftovers()
    assert pipeline.gatherer.calls == [], "a module whose hook came is no leftover"


def test_everything_can_be_released():
    pipeline = Pipeline([4, 4, 4, 4], prefetch=4, persistent=[3]).learned()
    pipeline.fetch(0)
    assert pipeline.indices("is_pending") == [1] and pipeline.indices("live") == [0, 3]
    pipeline.coordinator.release_and_reset_all(nn.Module())
    assert pipeline.indices("is_pending") == pipeline.indices("live") == [] and pipeline.gatherer.live_numel == 0
    assert pipeline.gatherer.names("cancel") == [1]
    assert not any(unit.active_modules or unit.params[0].ds_active_sub_modules for unit in pipeline.units)


def test_what_could_not_be_released_is_named():
    pipeline = Pipeline([4, 7])
    pipeline.visit(0)
    pipeline.fetch(1)
    pipeline.gatherer.stuck.add(id(pipeline.units[1].params[0]))
    with pytest.raises(RuntimeError, match=r"expected to be released: .*7"):
        pipeline.coordinator.release_and_reset_all(nn.Module())


def test_new_hooks_make_it_learn_anew():
    pipeline = Pipeline([4, 4], prefetch=PLENTY).learned()
    pipeline.coordinator._invalidate_trace()
    pipeline.step()
    assert pipeline.gatherer.ahead == []
    pipeline.step()
    assert pipeline.gatherer.ahead != []


@settings(max_examples=80)
@given(st.data())
def test_limits_hold_in_every_order(data):
    numels = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    order = data.draw(st.lists(st.integers(0, len(numels) - 1), min_size=1, max_size=8))
    prefetch, live, reuse = (data.draw(st.sampled_from([0, 1, 12, 30, PLENTY])) for _ in range(3))
    device = data.draw(st.sampled_from(["cpu", "cuda"]))
    pipeline = Pipeline(numels, prefetch, live, reuse, device, data.draw(st.sets(st.sampled_from(range(len(numels))))))
    gatherer, units = pipeline.gatherer, pipeline.units
    visits = [(i, True) for i in order] + [(i, False) for i in reversed(order)]
    for known in (False, True, True):
        gatherer.ahead.clear()
        pipeline.coordinator.reset_step()
        for done, (index, forward) in enumerate(visits, start=1):
            pipeline.fetch(index, forward)
            assert units[index].live and gatherer.live_numel == sum(u.numel for u in units if u.live)
            following = units[visits[done][0]] if done < len(visits) else None
            if known and prefetch and device == "cuda" and live == reuse == PLENTY and following:
                assert following.live or following.is_pending, "the next unit is on its way"
            before = gatherer.live_numel
            pipeline.release(index, forward)
            again = next((j for j in range(done, len(visits)) if visits[j][0] == index), None)
            near = again is not None and sum(numels[i] for i, _ in visits[done:again]) < reuse
            assert units[index].live == (known and near and before <= live)
        assert not pipeline.indices("live") and not pipeline.indices("is_pending")
        assert known or not gatherer.ahead
        for unit, pending, live_numel, _ in gatherer.ahead:
            fits = pending + unit.numel <= prefetch and live_numel + pending + unit.numel <= live
            # On a CPU the unit that is needed now is in flight too, and does not count.
            assert prefetch > 0 and (device == "cpu" or pending == 0 or fits)


def test_a_run_that_only_saves_keeps_its_units_until_their_backward_is_over():
    pipeline = Pipeline([4, 4])
    pipeline.step()
    pipeline.coordinator.reset_step()
    for index in (0, 1):
        pipeline.visit(index)
    pipeline.fetch(1, forward=False)
    for index in (0, 1):  # recomputed inside of the backward of 1
        pipeline.fetch(index, forward=False)
        pipeline.release(index, forward=True)
    assert pipeline.indices("live") == [0, 1]
    pipeline.release(1, forward=False)
    assert pipeline.indices("live") == [0]
    pipeline.visit(0, forward=False)
    assert pipeline.indices("live") == []


def test_the_next_forward_releases_what_an_interrupted_backward_left():
    pipeline = Pipeline([4, 4])
    pipeline.step()
    for index in (0, 1):
        pipeline.fetch(index, forward=False)
    pipeline.coordinator.reset_step()
    pipeline.visit(0)
    assert pipeline.indices("live") == [] and not any(unit.active_modules for unit in pipeline.units)


def test_a_forward_of_the_whole_model_inside_of_a_backward_releases_nothing():
    """Activation checkpointing of the whole model."""
    pipeline, live = Pipeline([4]), []
    x = torch.zeros(1, requires_grad=True)

    def again(grad):
        pipeline.coordinator.reset_step()
        live.extend(pipeline.indices("live"))

    y = x * 2
    y.register_hook(again)
    pipeline.fetch(0, forward=False)
    y.sum().backward()
    assert live == [0]


# -- what somebody has gathered, which a rank may run by itself


def gathered(pipeline, *indices):
    """As GatheredParameters leaves units: there, without a fetch."""
    for index in indices:
        for param in pipeline.units[index].params:
            param.data, param.ds_status = torch.empty(param.ds_numel), ZeroParamStatus.AVAILABLE
            pipeline.units[index].looked_at.add(param.ds_id)


def dropped(pipeline, *indices):
    for index in indices:
        for param in pipeline.units[index].params:
            param.data, param.ds_status = torch.empty(0), ZeroParamStatus.NOT_AVAILABLE
        pipeline.units[index].looked_at.clear()
        pipeline.units[index].live = False


@settings(max_examples=60)
@given(st.data())
def test_what_runs_on_gathered_units_asks_for_nothing_and_is_not_learned(data):
    """Two ranks go the same way, but for what one of them runs by itself in between."""
    count = data.draw(st.integers(1, 4))
    limits = {"prefetch": data.draw(st.sampled_from([0, 5, PLENTY])), "reuse": data.draw(st.sampled_from([0, PLENTY]))}
    kept = data.draw(st.sets(st.integers(0, count - 1)))
    both = [Pipeline([4] * count, device=data.draw(st.sampled_from(["cpu", "cuda"])), kept=kept, **limits)]
    both.append(Pipeline([4] * count, device=both[0].gatherer.device, kept=kept, **limits))
    alone = both[1]

    def excursion():
        if not data.draw(st.booleans()):
            return
        for pipeline in both:
            gathered(pipeline, *range(count))
        called_before = len(alone.gatherer.calls)
        order = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))
        if data.draw(st.booleans()):
            alone.coordinator.reset_step()
        else:
            alone.coordinator.submodule_called(alone.modules[order[0]])
        for index in order * data.draw(st.sampled_from([1, 20])):
            alone.visit(index)
        assert {what for what, _ in alone.gatherer.calls[called_before:]} <= {"release"}
        for pipeline in both:
            dropped(pipeline, *range(count))

    def asked(pipeline):
        return [(what, pipeline.units.index(unit)) for what, unit in pipeline.gatherer.calls if what != "release"]

    for _ in range(3):
        excursion()
        for pipeline in both:
            pipeline.coordinator.reset_step()
        for index in range(count):
            for pipeline in both:
                pipeline.visit(index)
        excursion()
        with mock.patch.object(torch._C, "_current_graph_task_id", lambda: 1):
            for index in reversed(range(count)):
                for pipeline in both:
                    pipeline.visit(index, forward=False)
    assert asked(both[0]) == asked(both[1])


def test_a_unit_that_is_gathered_in_part_is_fetched():
    pipeline = Pipeline([4, 4])
    second = fake_unit(4).params[0]
    sharded.known(second).wire.unit = pipeline.units[0]
    pipeline.units[0].params.append(second)
    pipeline.modules[0].register_parameter("second", second)
    gathered(pipeline, 0)
    second.data, second.ds_status = torch.empty(0), ZeroParamStatus.NOT_AVAILABLE
    pipeline.coordinator.reset_step()
    pipeline.fetch(0)
    assert pipeline.gatherer.names("start") == [0] and pipeline.coordinator._trace.position == 1
