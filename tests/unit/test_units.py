"""The parts of the pipeline, each by itself on the CPU: units, their order, fetching, buffers and payload rows."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import error_bound, integer_reference
from torch import nn

from zeropp_fp8.comm.all_gather import rank_of_rows
from zeropp_fp8.comm.lanes import BufferRing, Lane, after, mark
from zeropp_fp8.comm.ledger import OUTSIDE, WireLedger
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder, slices_of
from zeropp_fp8.formats import make_format
from zeropp_fp8.formats.noise import Seed
from zeropp_fp8.zero.coordinator import UnitCoordinator
from zeropp_fp8.zero.order import reduction_units
from zeropp_fp8.zero.trace import FetchTrace
from zeropp_fp8.zero.units import GatherUnit, build_units

CPU = torch.device("cpu")
PLENTY = 10**9


# -- units of a gather


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class Net(nn.Module):
    """Two blocks between an embedding and a head that share one parameter, and a parameter of the model's own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embed.weight


def zero3_net(persistent=()):
    """A Net whose parameters carry what ZeRO-3 puts on them."""
    net = Net()
    for index, (name, param) in enumerate(net.named_parameters()):
        param.ds_id, param.ds_numel = index, param.numel()
        param.ds_persist = name in persistent
    return net


def named_units(net, units):
    names = {id(p): name for name, p in net.named_parameters()}
    return [[names[id(p)] for p in unit.params] for unit in units]


def of_block(index):
    return [f"blocks.{index}.{name}" for name in ("fc.weight", "fc.bias", "norm.weight", "norm.bias")]


def test_units_of_blocks():
    net = zero3_net()
    units = build_units(net, list(net.blocks), "block")
    tied_to_the_first = [["scale"], ["embed.weight"], of_block(0), of_block(1)]
    assert named_units(net, units) == [*tied_to_the_first, ["norm.weight", "norm.bias"], ["head.bias"]]
    assert [unit.numel for unit in units] == [1, 24, 28, 28, 8, 6]
    assert not any(unit.persistent or unit.live or unit.in_flight for unit in units)


def test_units_of_modules_and_of_parameters():
    net = zero3_net()
    modules = [name for index in range(2) for name in (of_block(index)[:2], of_block(index)[2:])]
    outside = [["scale"], ["embed.weight"]], [["norm.weight", "norm.bias"], ["head.bias"]]
    assert named_units(net, build_units(net, [], "module")) == [*outside[0], *modules, *outside[1]]
    each = [[name] for name, _ in net.named_parameters()]
    assert named_units(net, build_units(net, [], "parameter")) == each


def test_persistent_parameters_are_one_unit():
    small = [name for name, p in Net().named_parameters() if p.dim() < 2]
    net = zero3_net(persistent=small)
    first, *others = build_units(net, list(net.blocks), "block")
    assert first.persistent and named_units(net, [first]) == [small]
    assert not any(unit.persistent for unit in others)
    assert named_units(net, others) == [["embed.weight"], ["blocks.0.fc.weight"], ["blocks.1.fc.weight"]]
    net = zero3_net(persistent=[name for name, _ in net.named_parameters()])
    assert len(build_units(net, [], "parameter")) == 1


def test_a_leaf_module_is_one_unit():
    net = zero3_net()
    net.blocks[1]._z3_leaf = True
    assert named_units(net, build_units(net, [], "module"))[-3:] == [
        of_block(1),
        ["norm.weight", "norm.bias"],
        ["head.bias"],
    ]
    net._z3_leaf = True
    assert named_units(net, build_units(net, [], "module")) == [[name for name, _ in net.named_parameters()]]


def test_a_block_that_shares_a_parameter_leaves_it_to_the_first():
    net = zero3_net()
    net.blocks[1].fc.weight = net.blocks[0].fc.weight
    units = named_units(net, build_units(net, list(net.blocks), "block"))
    assert units[2] == of_block(0) and units[3] == of_block(1)[1:]


def test_parameters_of_a_unit_lie_in_one_aligned_buffer():
    shapes = [(5,), (3, 3), (0,), (4, 2, 2), (3, 1)]
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32]
    shards = [SimpleNamespace(dtype=dtype) for dtype in dtypes]
    params = [SimpleNamespace(ds_numel=math.prod(s), ds_shape=s, ds_tensor=t) for s, t in zip(shapes, shards)]
    unit = GatherUnit(params)
    for _ in range(2):  # laid out again: the same places
        unit.lay_out("a layout", ("its signature",))
        tensors = unit.empty_parameters(CPU)
        assert (unit.layout, unit.signature, unit.numel) == ("a layout", ("its signature",), 33)
        assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == list(zip(shapes, dtypes))
        for dtype in set(dtypes):
            of_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            starts = [tensor.storage_offset() * dtype.itemsize for tensor in of_dtype]
            ends = [start + tensor.numel() * dtype.itemsize for start, tensor in zip(starts, of_dtype)]
            assert len({tensor.untyped_storage().data_ptr() for tensor in of_dtype}) == 1
            assert all(start % 16 == 0 for start in starts)
            assert all(end <= following for end, following in zip(ends, starts[1:]))
            assert ends[-1] <= of_dtype[0].untyped_storage().nbytes() <= ends[-1] + 15


# -- units of a reduction


def fake_parameters(numels, vectors=()):
    """Matrices of these sizes, but for the indices of `vectors`."""
    params = [nn.Parameter(torch.zeros(1)) for _ in numels]
    for index, (param, numel) in enumerate(zip(params, numels)):
        param.ds_numel = numel
        param.ds_shape = torch.Size((numel,) if index in vectors else (1, numel))
    return params


def as_block(params):
    block = nn.Module()
    for index, param in enumerate(params):
        block.register_parameter(f"p{index}", param)
    return block


def positions(units, params):
    place = {id(p): index for index, p in enumerate(params)}
    return [[place[id(p)] for p in unit] for unit in units]


def test_reduction_runs_from_the_last_to_the_first():
    params = fake_parameters([10, 5, 5, 5, 5, 8, 9])
    blocks = [as_block(params[1:3]), as_block(params[3:5])]
    assert positions(reduction_units(params, blocks), params) == [[6], [5], [3, 4], [1, 2], [0]]


def test_neighbours_outside_blocks_are_joined_up_to_the_limit():
    params = fake_parameters([3, 4, 5, 50, 50, 6, 7, 8])
    blocks = [as_block(params[3:4]), as_block(params[4:5])]

    def joined(numel):
        return positions(reduction_units(params, blocks, numel), params)

    assert joined(21) == [[7, 6, 5], [4], [3], [2, 1, 0]]
    assert joined(15) == [[7, 6], [5], [4], [3], [2, 1, 0]]
    assert joined(14) == [[7], [6, 5], [4], [3], [2, 1, 0]]
    assert joined(9) == [[7], [6], [5], [4], [3], [2, 1], [0]]
    assert joined(PLENTY) == joined(21), "blocks are never joined, not with each other nor with what is outside"


def test_vectors_of_blocks_travel_together_at_the_end():
    """Only where units are joined at all; those outside blocks are neighbours like any other."""
    params = fake_parameters([10, 5, 1, 5, 2, 3, 8], vectors=(2, 4, 5))
    blocks = [as_block(params[1:3]), as_block(params[3:5])]

    def joined(numel):
        return positions(reduction_units(params, blocks, numel), params)

    assert joined(0) == [[6], [5], [3, 4], [1, 2], [0]]
    assert joined(12) == [[6, 5], [3], [1], [0], [2, 4]]
    assert joined(13) == [[6, 5], [3], [1], [0, 2, 4]], "with what comes last, as far as it fits"


def test_a_block_cut_by_the_optimizers_groups_stays_whole():
    params = fake_parameters([4, 4, 1, 1])  # matrices of both blocks, then their biases
    blocks = [as_block([params[0], params[2]]), as_block([params[1], params[3]])]
    assert positions(reduction_units(params, blocks), params) == [[1, 3], [0, 2]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.sampled_from([None, None, 0, 1, 2])), max_size=12),
    st.integers(0, 50),
)
def test_reduction_units_are_a_greedy_partition(described, limit):
    params = fake_parameters([numel for numel, _ in described])
    members = {b: [i for i, (_, block) in enumerate(described) if block == b] for b in range(3)}
    units = positions(
        reduction_units(params, [as_block([params[i] for i in members[b]]) for b in members], limit), params
    )
    assert sorted(i for unit in units for i in unit) == list(range(len(params)))
    for before, unit in zip([None, *units], units):
        block = described[unit[0]][1]
        if block is not None:
            assert unit == members[block]
            continue
        assert all(described[i][1] is None for i in unit) and unit == sorted(unit, reverse=True)
        numels = [described[i][0] for i in unit]
        assert len(unit) == 1 or sum(numels) <= limit
        if before is not None and described[before[0]][1] is None:
            assert sum(described[i][0] for i in before) + numels[0] > limit, "one more would have fitted"


# -- the order of fetches


def fake_unit(numel):
    """A unit of one parameter that has not been gathered."""
    param = nn.Parameter(torch.empty(0))
    param.ds_numel, param.ds_active_sub_modules, param.is_external_param = numel, set(), False
    param.ds_summary = lambda: {"numel": numel}
    return GatherUnit([param])


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


@settings(max_examples=60, deadline=None)
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

    def __init__(self, units, device="cuda", secondary_ranks=None):
        self.units = list(units)
        self.device = torch.device(device)
        self.session = SimpleNamespace(ledger=WireLedger(2, 2), secondary_ranks=secondary_ranks)
        self.live_numel = 0
        self.calls = []  # (what, unit)
        self.ahead = []  # (unit, elements in flight before, elements live, kind)
        self.stuck = set()  # id of parameters that cannot be released

    def names(self, what):
        """Indices of the units of all calls of one kind so far, in order; forgets every call."""
        found = [self.units.index(unit) for name, unit in self.calls if name == what]
        self.calls.clear()
        return found

    def units_of(self, params):
        return tuple({id(u): u for p in params for u in self.units if any(p is q for q in u.params)}.values())

    def start_first_hops(self, unit):
        self.calls.append(("first hops", unit))

    def start(self, unit, ahead=False):
        if unit.in_flight:
            return
        assert not unit.live, "gathered twice"
        if ahead:
            in_flight = sum(u.numel for u in self.units if u.in_flight)
            self.ahead.append((unit, in_flight, self.live_numel, self.session.ledger.kind))
        self.calls.append(("ahead" if ahead else "start", unit))
        unit.gathered = torch.empty(0, dtype=torch.uint8)

    def finish(self, unit):
        if unit.live:
            return
        assert unit.in_flight
        self.calls.append(("finish", unit))
        unit.gathered = None
        unit.live = True
        self.live_numel += unit.numel
        for param in unit.params:
            param.data = torch.empty(param.ds_numel)

    def release(self, unit):
        self.calls.append(("release", unit))
        for param in unit.params:
            if id(param) not in self.stuck and not param.ds_active_sub_modules:
                param.data = torch.empty(0)
        if unit.live:
            unit.live = False
            self.live_numel -= unit.numel

    def cancel(self, unit):
        self.calls.append(("cancel", unit))
        unit.gathered = None


_ids = itertools.count()


def module_of(*params):
    """A module with these parameters, with what DeepSpeed puts on it."""
    module = as_block(params)
    module.ds_id, module._external_params = next(_ids), {}
    return module


class Pipeline:
    """A coordinator over units of the given sizes, one module each, and the calls of DeepSpeed's hooks."""

    def __init__(self, numels, prefetch=0, live=PLENTY, reuse=0, device="cuda", secondary_ranks=None, persistent=()):
        units = [fake_unit(numel) for numel in numels]
        for index in persistent:
            units[index].persistent = True
        self.units = units
        self.modules = [module_of(*unit.params) for unit in units]
        self.gatherer = FakeGatherer(units, device, secondary_ranks)
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
    assert pipeline.indices("in_flight") == [1]
    pipeline.release(0)
    pipeline.fetch(1)
    assert pipeline.indices("in_flight") == [2] and pipeline.indices("live") == [1]
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
    assert pipeline.indices("in_flight") == expected
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
    assert pipeline.indices("in_flight") == [1]
    pipeline.release(0)
    pipeline.fetch(1)
    assert pipeline.indices("in_flight") == [0, 2] and pipeline.indices("live") == [1]


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


def test_first_hops_of_all_units_start_with_the_forward():
    pipeline = Pipeline([4, 4, 4], secondary_ranks=2)
    pipeline.step([2, 0, 1])
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
    pipeline = Pipeline([4, 4, 4], secondary_ranks=2, reuse=PLENTY).learned()
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
    assert pipeline.indices("in_flight") == [1] and pipeline.indices("live") == [0, 3]
    pipeline.coordinator.release_and_reset_all(nn.Module())
    assert pipeline.indices("in_flight") == pipeline.indices("live") == [] and pipeline.gatherer.live_numel == 0
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


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_limits_hold_in_every_order(data):
    numels = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    order = data.draw(st.lists(st.integers(0, len(numels) - 1), min_size=1, max_size=8))
    prefetch, live, reuse = (data.draw(st.sampled_from([0, 1, 12, 30, PLENTY])) for _ in range(3))
    device = data.draw(st.sampled_from(["cpu", "cuda"]))
    pipeline = Pipeline(numels, prefetch, live, reuse, device, data.draw(st.sampled_from([None, 2])))
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
                assert following.live or following.in_flight, "the next unit is on its way"
            before = gatherer.live_numel
            pipeline.release(index, forward)
            again = next((j for j in range(done, len(visits)) if visits[j][0] == index), None)
            near = again is not None and sum(numels[i] for i, _ in visits[done:again]) < reuse
            assert units[index].live == (known and near and before <= live)
        assert not pipeline.indices("live") and not pipeline.indices("in_flight")
        assert known or not gatherer.ahead
        for unit, in_flight, live_numel, _ in gatherer.ahead:
            fits = in_flight + unit.numel <= prefetch and live_numel + in_flight + unit.numel <= live
            # On a CPU the unit that is needed now is in flight too, and does not count.
            assert prefetch > 0 and (device == "cpu" or in_flight == 0 or fits)


# -- buffers and lanes


def test_a_ring_hands_its_buffers_out_in_turn():
    ring = BufferRing(CPU, 2)
    seen = []
    for _ in range(6):
        buffer = ring.take(64)
        assert buffer.dtype == torch.uint8 and buffer.shape == (64,) and buffer.is_contiguous()
        seen.append(buffer)
        ring.give_back(buffer)
    places = [buffer.data_ptr() for buffer in seen]
    assert len(set(places)) == 2 and places == places[:2] * 3
    assert ring.num_bytes() == 128


def test_a_ring_never_hands_out_a_buffer_twice():
    ring = BufferRing(CPU, 2)
    taken = [ring.take(32) for _ in range(4)]  # more than it has: they are made
    assert len({buffer.data_ptr() for buffer in taken}) == 4 and ring.num_bytes() == 0
    ring.give_back(taken[2])
    assert ring.take(32).data_ptr() == taken[2].data_ptr()


def test_a_ring_grows_with_what_is_asked_for():
    ring = BufferRing(CPU, 1)
    small = ring.take(10)
    ring.give_back(small)
    large = ring.take(100)
    assert large.numel() == 100
    ring.give_back(large)
    assert ring.num_bytes() == 100, "the small one is gone"
    part = ring.take(30)
    assert part.numel() == 30 and part.data_ptr() == large.data_ptr()
    ring.give_back(part)
    assert ring.num_bytes() == 100, "the part stands for the whole"
    ring.clear()
    assert ring.num_bytes() == 0
    assert ring.take(0).numel() == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.lists(st.one_of(st.integers(0, 50), st.just("back")), max_size=20))
def test_rings_under_any_use(count, uses):
    ring, taken, ever = BufferRing(CPU, count), [], []
    most = 0
    for use in uses:
        if use != "back":
            taken.append(ring.take(use))
            ever.append(taken[-1])
            taken[-1].fill_(len(ever) % 251)
            most = max(most, len(taken))
        elif taken:
            ring.give_back(taken.pop(0))
        for buffer in taken:
            assert buffer.numel() == 0 or (buffer == buffer[0]).all()
        assert len({int(buffer[0]) for buffer in taken if buffer.numel()}) == sum(b.numel() > 0 for b in taken)
        assert len(ring._free) + len(taken) <= max(count, most)


def test_a_lane_on_a_cpu_is_the_host():
    assert mark(CPU) is None and after(None) is None
    for lane in (Lane(CPU), Lane.here()):
        assert lane.stream is None
        for _ in range(2):
            with lane as entered:
                assert entered is lane
            lane.after_current()
            lane.before_current()
        with pytest.raises(KeyError), lane:
            raise KeyError


# -- payload rows

INT8 = make_format("int8", block_size=32)
INT4_ROTATED = make_format("int4", block_size=32, hadamard=True)
E4M3 = make_format("fp8_e4m3", block_size=64)


def exact(dtype=torch.float32):
    return make_format("none", dtype=dtype)


MIXED_FORMATS = [INT8, exact(), INT4_ROTATED, make_format("int8", block_size=32), exact(torch.bfloat16), E4M3, INT8]
MIXED_DTYPES = [
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.bfloat16,
]
MIXED_NUMELS = [33, 7, 70, 100, 0, 5, 64]


def numbers(numel, dtype=torch.float32, seed=0):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * seed + numel)).to(dtype)


def mixed_tensors(slices, short=0, seed=0):
    """A tensor for each format, `short` elements less than its slices hold."""
    sizes = [max(0, slices * numel - short) for numel in MIXED_NUMELS]
    return [numbers(size, dtype, seed + i) for i, (size, dtype) in enumerate(zip(sizes, MIXED_DTYPES))]


def mixed_layout(formats=None, partners=None):
    return PayloadLayout(MIXED_NUMELS, formats or MIXED_FORMATS, MIXED_DTYPES, CPU, partner_formats=partners)


def own_slice(tensor, index, numel):
    """Slice `index` of a flat tensor, with zeros beyond its end."""
    piece = tensor[index * numel : (index + 1) * numel]
    return torch.cat([piece, torch.zeros(numel - piece.numel(), dtype=tensor.dtype)])


def filled(layout, rows):
    return torch.full((rows, layout.row_bytes), 0xAB, dtype=torch.uint8)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1], [0]])
@pytest.mark.parametrize("short", [0, 4])
def test_a_row_is_each_formats_own_encoding(order, short):
    layout, tensors = mixed_layout(), mixed_tensors(3, short)
    payload = filled(layout, len(order))
    layout.encode(tensors, SliceOrder(order, CPU), payload)
    for row, index in zip(payload, order):
        pieces = [own_slice(tensor, index, numel) for tensor, numel in zip(tensors, MIXED_NUMELS)]
        expected = torch.cat([f.encode(piece) for f, piece in zip(MIXED_FORMATS, pieces)])
        assert torch.equal(row, expected)
    assert layout.row_bytes == sum(f.payload_bytes(n) for f, n in zip(MIXED_FORMATS, MIXED_NUMELS))
    assert layout.sizes[4] == 0 and all(offset % 16 == 0 for offset in layout.offsets)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1]])
@pytest.mark.parametrize("short", [0, 4])
def test_a_row_decodes_to_each_formats_own_decoding(order, short):
    """What no row holds stays as it was, and the padding of the last slice is dropped."""
    layout, tensors = mixed_layout(), mixed_tensors(3, short)
    payload = filled(layout, len(order))
    layout.encode(tensors, SliceOrder(order, CPU), payload)
    results = [torch.full_like(tensor, 7.0) for tensor in tensors]
    layout.decode(payload, SliceOrder(order, CPU), results)
    for wire_format, numel, tensor, result in zip(MIXED_FORMATS, MIXED_NUMELS, tensors, results):
        expected = torch.full_like(tensor, 7.0)
        for index in order:
            piece = own_slice(tensor, index, numel)
            decoded = wire_format.decode(wire_format.encode(piece), piece.shape, tensor.dtype)
            expected[index * numel : (index + 1) * numel] = decoded[: max(0, tensor.numel() - index * numel)]
        assert torch.equal(result, expected)


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 5), st.integers(0, 9), st.integers(0, 8))
def test_slices_in_any_order_come_back(permutation, kept, numel, short):
    slices = permutation[:kept]
    order = SliceOrder(slices, CPU)
    assert order.is_natural == (list(slices) == list(range(kept))) and order.on_device.tolist() == slices
    tensor = numbers(max(0, 5 * numel - short))
    layout = PayloadLayout([numel], [exact()], [torch.float32], CPU)
    payload = filled(layout, kept)
    layout.encode([tensor], order, payload)
    result = torch.full_like(tensor, 7.0)
    layout.decode(payload, order, [result])
    sent = torch.zeros(5 * numel, dtype=torch.bool)
    for index in slices:
        sent[index * numel : (index + 1) * numel] = True
    sent = sent[: tensor.numel()]
    assert torch.equal(result[sent], tensor[sent]) and (result[~sent] == 7.0).all()
    rows = slices_of(tensor, numel, order)
    assert torch.equal(rows, torch.stack([own_slice(tensor, index, numel) for index in slices]))


def test_each_tensor_of_a_payload_has_its_own_seed():
    stochastic = make_format("int8", block_size=32, rounding="stochastic")
    other = make_format("int4", block_size=32, rounding="stochastic")
    formats, numels = [stochastic, exact(), other, stochastic], [64, 8, 64, 64]
    layout = PayloadLayout(numels, formats, [torch.float32] * 4, CPU)
    same = numbers(2 * 64)
    tensors = [same, numbers(16), same, same]
    payload, seed = filled(layout, 2), Seed(123, 456)
    layout.encode(tensors, SliceOrder([0, 1], CPU), payload, seed)
    parts = [payload[:, o : o + s] for o, s in zip(layout.offsets, layout.sizes)]
    assert not torch.equal(parts[0], parts[3]), "equal tensors, other noise"
    for i, place in ((0, 0), (2, 0), (3, 1)):  # their places among the tensors of their format
        assert torch.equal(parts[i], formats[i].encode_rows_seeded(same.view(2, 64), seed.of_tensor(place)))
    again = filled(layout, 2)
    layout.encode(tensors, SliceOrder([0, 1], CPU), again, seed)
    assert torch.equal(again, payload)
    layout.encode(tensors, SliceOrder([0, 1], CPU), again, Seed(124, 456))
    assert not torch.equal(again, payload)


def test_a_seed_is_drawn_only_where_one_is_needed():
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    assert mixed_layout().draw_seed(generator) is None and torch.equal(generator.get_state(), state)
    stochastic = make_format("int8", rounding="stochastic")
    layout = PayloadLayout([8, 8], [exact(), stochastic], [torch.float32] * 2, CPU)
    first, second = layout.draw_seed(generator), layout.draw_seed(generator)
    assert first != second and layout.draw_seed(generator.manual_seed(5)) == first


def contributions(layout, ranks, rows, short=0):
    """(uint8 [ranks, rows, row bytes], each rank's tensors)."""
    tensors = [mixed_tensors(rows, short, seed=10 * rank + 1) for rank in range(ranks)]
    received = torch.stack([filled(layout, rows) for _ in range(ranks)])
    for own, payload in zip(tensors, received):
        layout.encode(own, SliceOrder(range(rows), CPU), payload)
    return received, tensors


def written_out_mean(tensors, i, index):
    """float64 mean over ranks of what slice `index` of tensor i is after its format; integers element by element."""
    numel, wire_format = MIXED_NUMELS[i], MIXED_FORMATS[i]
    total = torch.zeros(numel, dtype=torch.float64)
    for own in tensors:
        piece = own_slice(own[i], index, numel)
        if wire_format.name == "int8":
            total += torch.tensor(integer_reference(piece.double().tolist(), 8, 32)[1], dtype=torch.float64)
        else:
            total += wire_format.decode(wire_format.encode(piece), piece.shape, torch.float32).double()
    return total / len(tensors)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mean_of_a_payload(ranks):
    layout = mixed_layout()
    received, tensors = contributions(layout, ranks, rows=2)
    for i, numel in enumerate(MIXED_NUMELS):
        mean = layout.mean(received, i)
        assert mean.dtype == torch.float32 and mean.shape == (2, numel)
        for index in range(2):
            torch.testing.assert_close(mean[index].double(), written_out_mean(tensors, i, index), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("result_dtype", [torch.float32, torch.bfloat16])
def test_reduce_to_tensors(accumulate, result_dtype):
    """Into results shorter than the slices too, and into views of a larger buffer."""
    layout = mixed_layout()
    received, tensors = contributions(layout, ranks=3, rows=1)
    sizes = [max(0, numel - short) for numel, short in zip(MIXED_NUMELS, itertools.cycle([0, 3]))]
    results = [numbers(size, result_dtype, seed=77) for size in sizes]
    before = [result.clone() for result in results]
    layout.reduce_to_tensors(received[:, 0], results, accumulate)
    for i, (result, old) in enumerate(zip(results, before)):
        mean = written_out_mean(tensors, i, 0)[: result.numel()]
        expected = mean + old.double() if accumulate else mean
        tolerance = 1e-6 if result_dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=4 * tolerance)


SECOND_HOPS = {
    "each as before": MIXED_FORMATS,
    "integers get shorter": [INT4_ROTATED if f is INT8 else f for f in MIXED_FORMATS[:3]] + MIXED_FORMATS[3:],
    "all exact": [exact() for _ in MIXED_FORMATS],
}


@pytest.mark.parametrize("formats", SECOND_HOPS.values(), ids=SECOND_HOPS)
def test_reduce_to_payload(formats):
    within, between = mixed_layout(partners=formats), mixed_layout(formats, partners=MIXED_FORMATS)
    received, tensors = contributions(within, ranks=2, rows=3)
    payload = filled(between, 3)
    within.reduce_to_payload(received, between, payload)
    for i, (wire_format, numel) in enumerate(zip(formats, MIXED_NUMELS)):
        part = payload[:, between.offsets[i] : between.offsets[i] + between.sizes[i]]
        for index in range(3):
            mean = written_out_mean(tensors, i, index)
            decoded = wire_format.decode(part[index].contiguous(), (numel,), torch.float32).double()
            if hasattr(wire_format, "block_size") and numel:
                bound = error_bound(
                    mean, wire_format.name, wire_format.block_size, wire_format.hadamard, "nearest", torch.float32
                )
            else:
                bound = mean.abs() * (2.0**-8 if wire_format.dtype == torch.bfloat16 else 2.0**-22) + 1e-7
            assert ((decoded - mean).abs() <= bound + 1e-6).all()
            assert numel == 0 or decoded.abs().sum() > 0


def test_reduce_to_payload_uses_the_seed():
    stochastic = make_format("int4", block_size=32, rounding="stochastic")
    within = PayloadLayout([64, 64], [INT8, INT8], [torch.float32] * 2, CPU, [stochastic] * 2)
    between = PayloadLayout([64, 64], [stochastic] * 2, [torch.float32] * 2, CPU, [INT8] * 2)
    received = torch.stack([filled(within, 2) for _ in range(2)])
    for rank, payload in enumerate(received):
        within.encode([numbers(128, seed=rank)] * 2, SliceOrder([0, 1], CPU), payload)
    payload, seed = filled(between, 2), Seed(3, 4)
    within.reduce_to_payload(received, between, payload, seed)
    for i in range(2):
        expected = stochastic.encode_rows_seeded(within.mean(received, i), seed.of_tensor(i))
        assert torch.equal(payload[:, between.offsets[i] : between.offsets[i] + between.sizes[i]], expected)


# -- whose row is whose


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_rows_of_a_gather_by_simulation(level_sizes):
    """Every rank gathers from those that differ from it in one digit only, level by level."""
    world = math.prod(level_sizes)
    places = list(itertools.product(*map(range, level_sizes)))  # digits of each rank, the first hop's first
    buffers = {place: [rank] for rank, place in enumerate(places)}
    for hop, size in enumerate(level_sizes):
        buffers = {
            place: [row for digit in range(size) for row in buffers[(*place[:hop], digit, *place[hop + 1 :])]]
            for place in places
        }
    expected = rank_of_rows(level_sizes)
    assert sorted(expected) == list(range(world))
    assert all(buffer == expected for buffer in buffers.values())
