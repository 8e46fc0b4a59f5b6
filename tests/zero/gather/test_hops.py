"""Which work of gathers waits for which on a GPU, where streams run beside each other; played without one."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from zeropp_fp8.comm import lanes
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.zero.gather import hops as hops_module
from zeropp_fp8.zero.gather import units as units_module
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.gather.units import Arrived, Unit

UNITS, AHEAD = 8, 2
COMPUTE = "compute"


class Streams:
    """Work that has to be over before the next begins, by stream, and before each work."""

    def __init__(self):
        self.current = COMPUTE
        self.over = defaultdict(frozenset)
        self.before = {}

    def do(self, what, index):
        self.before[what, index] = self.over[self.current]
        self.over[self.current] |= {(what, index)}

    def start(self, what, index):
        """A collective: after what the current stream has, on a stream of its own."""
        issuer, self.current = self.current, f"of {what}"
        self.over[self.current] |= self.over[issuer]
        self.do(what, index)
        over, self.current = self.over[self.current], issuer
        return SimpleNamespace(wait=lambda: lanes.after(over))

    def after(self, event):
        self.over[self.current] |= event or frozenset()


class PlayedLane:
    def __init__(self, streams):
        self.streams, self.stream, self.outer = streams, self, []

    def __enter__(self):
        self.outer.append(self.streams.current)
        self.streams.current = self

    def __exit__(self, *exc):
        self.streams.current = self.outer.pop()

    def wait_stream(self, other):
        self.streams.over[self] |= self.streams.over[other.stream]

    def before_current(self):
        self.streams.after(self.streams.over[self])

    def after_current(self):
        self.streams.over[self] |= self.streams.over[self.streams.current]


class PlayedUnit(Unit):
    """Writes down what it is asked to do, as differences or as a whole."""

    held_bytes = gathered_bytes = brought_bytes = 16  # the unit is its own difference
    sizes = [16]  # agreed on

    def __init__(self, index, streams, route, brings_differences):
        param = SimpleNamespace(ds_id=index, ds_numel=1, ds_status=ZeroParamStatus.NOT_AVAILABLE, requires_grad=True)
        nothing = dict.fromkeys(("check_usable", "check_untouched", "note"), lambda params: None)
        super().__init__([param], SimpleNamespace(route=route, **nothing))
        self.index, self.streams, self.difference, self.is_due = index, streams, self, brings_differences
        self.keeps_secondary, self.secondary = True, torch.empty(16, dtype=torch.uint8)

    def bytes_in(self, wire_format, param):
        return 1.0

    def lay_out(self):
        pass

    def first_hops(self, held):
        self.streams.do("encode", self.index)
        return [self.streams.start("hop", self.index)]

    def send(self, held, brought):
        return self.first_hops(held)

    def add(self, brought, held):
        self.streams.do("add", self.index)

    def last_hop(self, held, gathered):
        return [self.streams.start("last hop", self.index)]

    def decode(self, gathered):
        self.streams.do("decode", self.index)
        return Arrived([], [])


@pytest.fixture(params=[1, 2], ids=["a rank a node", "two ranks"])
def played(request, monkeypatch):
    """Makes (streams, gatherer, units) of one kind."""

    def make(brings_differences):
        streams = Streams()
        monkeypatch.setattr(hops_module, "Lane", lambda device: PlayedLane(streams))
        here = torch.device("cpu")
        monkeypatch.setattr(hops_module, "BufferRing", lambda device, count: lanes.BufferRing(here, count))
        monkeypatch.setattr(hops_module, "buffer_for", lambda lane, size, device: lanes.buffer_for(lane, size, here))
        monkeypatch.setattr(hops_module, "stream_number", lambda device: 0)
        for module in (lanes, hops_module):
            monkeypatch.setattr(module, "mark", lambda device: streams.over[streams.current])
        for module in (lanes, hops_module, units_module):
            monkeypatch.setattr(module, "after", streams.after)
        session = SimpleNamespace(ledger=WireLedger(2, request.param), topology=None)
        route = SimpleNamespace(session=session, device=torch.device("cuda"), world_size=2 * request.param)
        route.last = SimpleNamespace(size=request.param)
        gatherer = Gatherer(route, [])
        units = [PlayedUnit(index, streams, route, brings_differences) for index in range(UNITS)]
        gatherer.ownership.units = units
        gatherer._padded_numel = dict.fromkeys(range(UNITS), 1)
        return streams, gatherer, units

    return make


def forward(gatherer, units):
    """As the coordinator does: all first hops, then unit by unit, with some fetched ahead."""
    for unit in units:
        gatherer.hops.start_first(unit)
    for index, unit in enumerate(units):
        gatherer.hops.start(unit)
        gatherer.finish(unit)
        for later in units[index + 1 : index + 1 + AHEAD]:
            gatherer.hops.start(later, ahead=True)


@pytest.mark.parametrize("differences", [False, True], ids=["all of them", "differences"])
def test_a_unit_waits_for_itself_and_for_those_before_it(played, differences):
    streams, gatherer, units = played(differences)
    forward(gatherer, units)
    for index in range(UNITS):
        before = streams.before["decode", index]
        assert ("hop", index) in before and (("add", index) in before) == differences
        assert max(other for _, other in before) == index, "later ones could still be on their way"
        assert (("last hop", index) in before) == (gatherer.route.last.size > 1)


def test_a_gather_that_is_started_ahead_waits_for_what_is_computed_then(played):
    """Its buffer is of that memory. It does not wait for the unit that is computed while it is on its way."""
    streams, gatherer, units = played(False)
    forward(gatherer, units)
    for index in range(UNITS if gatherer.route.last.size > 1 else 0):
        before = streams.before["last hop", index]
        decoded = max((other for what, other in before if what == "decode"), default=-1)
        assert decoded == (max(index - AHEAD, 0) if index else -1)


def test_differences_are_on_their_way_while_others_are_added(played):
    """And while units are computed with, however late."""
    streams, gatherer, units = played(True)
    forward(gatherer, units)
    for index in range(2, UNITS):
        before = streams.before["hop", index]
        assert not any(what == "decode" for what, _ in before)
        assert max((other for what, other in before if what == "add"), default=-1) <= index - 2
        assert streams.before["add", index] >= {("hop", index), ("add", index - 1)}


@pytest.mark.parametrize("differences", [False, True], ids=["all of them", "differences"])
def test_what_is_held_is_used_when_it_is_there(played, differences):
    """Also where nobody has waited for the gather that brought it."""
    streams, gatherer, units = played(differences)
    for unit in units:
        gatherer.hops.start_first(unit)
    for unit in units:
        gatherer.hops.cancel(unit)
    first = "last hop" if gatherer.route.last.size > 1 else "decode"
    for index, unit in enumerate(units):
        gatherer.finish(unit)
        assert (("add" if differences else "hop"), index) in streams.before[first, index]
