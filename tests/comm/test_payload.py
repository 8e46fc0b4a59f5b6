"""Rings and lanes on a CPU, and payload rows of several tensors."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conformance import ENTRIES, make
from error_bounds import error_bound
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import encoded as by_the_reference

from zeropp_fp8.comm import lanes
from zeropp_fp8.comm.all_gather import ranks_held
from zeropp_fp8.comm.error_feedback import ErrorFeedback
from zeropp_fp8.comm.lanes import BufferRing, Lane, after, buffer_for, mark, used_last
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder, slices_of
from zeropp_fp8.formats import make_format

CPU = torch.device("cpu")
PLENTY = 10**9


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


def test_a_ring_grows_with_what_is_asked_for(monkeypatch):
    ring, last = BufferRing(CPU, 1), []
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
    monkeypatch.setattr(lanes, "used_last", last.append)
    ring.clear()
    assert ring.num_bytes() == 0 and [buffer.numel() for buffer in last] == [100], "on whatever stream"
    assert ring.take(0).numel() == 0


@settings(max_examples=60)
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


def test_a_buffer_for_one_gather_is_new_and_the_lane_waits_for_it():
    waits = []
    lane = SimpleNamespace(after_current=lambda: waits.append(len(waits)))
    first, second = buffer_for(lane, 7, CPU), buffer_for(lane, 7, CPU)
    assert waits == [0, 1]
    for buffer in (first, second):
        assert buffer.dtype == torch.uint8 and buffer.shape == (7,) and buffer.untyped_storage().nbytes() == 7
    assert first.data_ptr() != second.data_ptr()
    used_last(first)
    assert buffer_for(Lane(CPU), 0, CPU).numel() == 0


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
    """Rows leave what they do not hold as it was, and the padding of the last slice is dropped."""
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


def test_every_format_in_one_payload():
    formats = [make(entry, torch.float32) for entry in ENTRIES]
    numels = [[33, 100, 7, 0, 64, 500, 31, 40][place % 8] for place in range(len(formats))]
    layout = PayloadLayout(numels, formats, [torch.float32] * len(numels), CPU)
    tensors, payload = [numbers(2 * numel) for numel in numels], filled(layout, 2)
    layout.encode(tensors, SliceOrder([1, 0], CPU), payload)
    decoded = [torch.full_like(tensor, 7.0) for tensor in tensors]
    layout.decode(payload, SliceOrder([1, 0], CPU), decoded)
    for tensor, fmt, numel, actual in zip(tensors, formats, numels, decoded):
        rows = fmt.encode_rows(tensor.view(2, numel))
        assert torch.equal(actual, fmt.decode_rows(rows, numel, torch.float32).view(-1))


@settings(max_examples=40)
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
            total += torch.from_numpy(by_the_reference(piece.float().numpy(), "int8", block_size=32)[1])
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
                bound = error_bound(mean, wire_format.name, wire_format.block_size, wire_format.hadamard, torch.float32)
            else:
                bound = mean.abs() * (2.0**-8 if wire_format.dtype == torch.bfloat16 else 2.0**-22) + 1e-7
            assert ((decoded - mean).abs() <= bound + 1e-6).all()
            assert numel == 0 or decoded.abs().sum() > 0


# -- residuals

INT4 = make_format("int4", block_size=32)


def encoded(feedback, keys, tensors):
    """(what is sent of tensors of 64 elements in two slices, their residuals)."""
    layout = PayloadLayout([32] * len(keys), [INT4] * len(keys), [torch.float32] * len(keys), CPU)
    payload, kept = filled(layout, 2), feedback.of(keys, [32] * len(keys), 2, CPU)
    layout.encode(tensors, SliceOrder([0, 1], CPU), payload, residuals=kept)
    return payload, kept


def test_what_is_dropped_is_added_to_the_next():
    feedback, value = ErrorFeedback(32), numbers(64, seed=1)
    payloads = [encoded(feedback, ["a"], [value])[0] for _ in range(50)]
    sent = [INT4.decode_rows(payload, 32, torch.float32).view(-1) for payload in payloads]
    one, mean = ((each - value).norm() / value.norm() for each in (sent[0], sum(sent) / len(sent)))
    assert mean < one / 20


def test_residuals_go_with_their_tensors():
    """Into other messages, and back; what nobody names any more is not kept twice."""
    values = {name: numbers(64, seed=place) for place, name in enumerate("abc")}
    together, apart = ErrorFeedback(32), ErrorFeedback(32)
    for keys in ("abc", "ab", "c", "cba", "abc"):
        payload, kept = encoded(together, list(keys), [values[key] for key in keys])
        singles = {key: encoded(apart, [key], [values[key]]) for key in keys}
        assert torch.equal(payload, torch.cat([singles[key][0] for key in keys], dim=1))
        assert torch.equal(kept.rows, torch.cat([singles[key][1].rows for key in keys], dim=1))
        assert len(together) == len(apart) == 3
    assert len(together._messages) == 1 and len(apart._messages) == 3


def test_what_is_saved_of_residuals_stays_as_it_was():
    feedback, keys, values = ErrorFeedback(32), ["a", "b"], [numbers(64, seed=1), numbers(64, seed=2)]
    encoded(feedback, keys, values)
    saved = feedback.state_dict()
    residuals = saved["residuals"].values()
    assert all(payload.is_contiguous() and payload.untyped_storage().nbytes() == 2 * 48 for payload in residuals)
    second = encoded(feedback, keys, values)[0]
    again = ErrorFeedback(32)
    again.load_state_dict(saved)
    assert torch.equal(encoded(again, keys, values)[0], second), "it was overwritten"
    again.reset()
    assert len(again) == 0 and torch.equal(encoded(again, keys, values)[0], encoded(ErrorFeedback(32), keys, values)[0])


def test_residuals_that_were_saved_in_other_blocks():
    feedback, keys, values = ErrorFeedback(), ["a"], [numbers(64, seed=1)]
    encoded(feedback, keys, values)
    saved, second = feedback.state_dict(), encoded(feedback, keys, values)[0]
    other = ErrorFeedback(64)
    with pytest.raises(ValueError, match=r"residuals are in blocks of 128, gradients\.block_size is 64"):
        other.load_state_dict(saved)
    other.load_state_dict({})
    assert len(other) == 0
    older = ErrorFeedback()
    older.load_state_dict(saved["residuals"])  # as it was saved before
    assert torch.equal(encoded(older, keys, values)[0], second)


# -- whose row is whose


@settings(max_examples=40)
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
        assert list(buffers.values()) == [ranks_held(level_sizes, hop + 1, rank) for rank in range(world)]
    assert all(sorted(buffer) == list(range(world)) for buffer in buffers.values())
