"""Kernels against the torch code of formats/ in payloads of several tensors: the same bytes, the same values.

A check takes a device: a CPU, where Triton interprets the kernels, or a GPU. `INTERPRETED` has the cases of the first,
by their ids.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from conformance import CPU, DOUBLE, DTYPES, ENTRIES, EXACT, MX, WHOLE, assert_same, awkward, make, same
from thinning import thinned

from zeropp_fp8.comm.error_feedback import ErrorFeedback
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat
from zeropp_fp8.formats.scale_table import SharedScales
from zeropp_fp8.kernels.wire.launch_tables import ELEMENTS

# Kernels do not know one scale for all, nor these elements.
UNKNOWN = [e for e, given in ENTRIES.items() if given["name"] not in (*EXACT, *ELEMENTS)]
BY_TORCH = [e for e, given in ENTRIES.items() if e in WHOLE or "scales" in given or e in UNKNOWN]
# NF4 and quantized scales are of weights, which kernels decode; the rest they encode and sum too.
DECODED = [e for e, given in ENTRIES.items() if e not in BY_TORCH and (given["name"] == "nf4" or e in DOUBLE)]
ENCODED = [e for e in ENTRIES if e not in BY_TORCH + DECODED]
GRADIENTS = [e for e in ENCODED if e not in EXACT + MX]  # with error feedback
TILE = 1024


def layouts(wire_format, slice_numels, dtype, device, partner=None):
    """(torch code on the CPU, kernels on `device`) for the same payload."""
    count = len(slice_numels)
    partners = [partner] * count if partner else None
    formats, dtypes = [wire_format] * count, [dtype] * count
    return (
        PayloadLayout(slice_numels, formats, dtypes, CPU, partners, use_kernels=False),
        PayloadLayout(slice_numels, formats, dtypes, device, partners, use_kernels=True),
    )


def slices_of(numels, world):
    return [-(-n // world) for n in numels]


def assert_bytes(actual, expected, *what):
    differing = (actual.cpu() != expected).nonzero().tolist()
    assert not differing, (*what, len(differing), differing[:5])


def assert_numbers(actual, expected, wire_format, *what):
    """The same bytes, but for NaN among numbers that travel as they are: a cast gives it other bits on each device."""
    if not wire_format.is_exact:
        assert_bytes(actual, expected, *what)
        return
    actual, expected = actual.cpu().view(wire_format.dtype), expected.view(wire_format.dtype)
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan), what
    assert_bytes(actual[~nan].view(torch.uint8), expected[~nan].view(torch.uint8), *what)


def new_tensors(numels, dtype, value, *devices):
    return [[torch.full((n,), value, dtype=dtype, device=device) for n in numels] for device in devices]


def check_travel(entry, dtype, numels, world, slices, device, outputs):
    """There and back, with slices in another order and only some of them; nothing is written beyond a tensor."""
    wire_format, tensors = make(entry, dtype), awkward(numels, dtype)
    reference, kernels = layouts(wire_format, slices_of(numels, world), dtype, device)
    for group in kernels._groups:
        known = group.segments is not None, group.decoded_segments is not None
        said = f"{entry}: {known} are (encoded, decoded) by kernels; launch_tables.py and {__file__} differ"
        assert known == (entry in ENCODED, entry not in BY_TORCH), said
    order, device_order = SliceOrder(slices, CPU), SliceOrder(slices, device)
    expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
    reference.encode(tensors, order, expected)
    actual = torch.full_like(expected, 255, device=device)
    kernels.encode([t.to(device) for t in tensors], device_order, actual)
    assert_numbers(actual, expected, wire_format, entry, dtype, numels, slices, kernels.offsets)
    for output in outputs:
        wanted, got = new_tensors(numels, output, 7.0, CPU, device)
        reference.decode(expected, order, wanted)
        kernels.decode(expected.to(device), device_order, got)
        for a, b in zip(got, wanted):
            assert_same(a.cpu(), b, entry, output, numels, slices)


def check_largest_parts(entry, device=CPU):
    """Scales at the end of fp32, in every dtype, and payloads that encode_part makes."""
    fmt = make(entry)
    values = torch.linspace(-1, 1, 1000) * torch.finfo(torch.float32).max
    values[::3] *= 1e-3
    values[500:700] = 0
    if entry == "nf4-double":  # ten blocks: the largest scale is decoded as a sum beyond fp32
        values = torch.zeros(640)
        values[0] = torch.finfo(torch.float32).max
    numel = -(-1000 // fmt.granule) * fmt.granule
    for output in DTYPES.values():
        reference, kernels = layouts(fmt, [numel], output, device)
        payload = torch.empty(1, reference.row_bytes, dtype=torch.uint8)
        fmt.encode_part(values, 0, numel, payload[0])
        (wanted,), (got,) = new_tensors([len(values)], output, 7.0, CPU, device)
        reference.decode(payload, SliceOrder([0], CPU), [wanted])
        kernels.decode(payload.to(device), SliceOrder([0], device), [got])
        assert wanted.isfinite().all()
        assert_same(got.cpu(), wanted, entry, output)


def messages(numels, dtype):
    """Three after the other, with NaN and Inf in the second."""
    for step in range(3):
        tensors = awkward(numels, dtype, step)
        yield tensors if step == 1 else [tensor.nan_to_num(1.0, 2.0, -2.0) for tensor in tensors]


def check_feed_back(entry, dtype, numels, world, slices, device):
    """Three messages of one key: the same bytes sent and kept."""
    from zeropp_fp8.kernels import can_feed_back

    wire_format, slice_numels = make(entry), slices_of(numels, world)
    reference, kernels = layouts(wire_format, slice_numels, dtype, device)
    order, device_order = SliceOrder(slices, CPU), SliceOrder(slices, device)
    keys = [str(i) for i in range(len(numels))]
    feedback, feedback_there = (ErrorFeedback(wire_format.block_size) for _ in range(2))
    for step, tensors in enumerate(messages(numels, dtype)):
        kept = feedback.of(keys, slice_numels, len(slices), CPU)
        kept_there = feedback_there.of(keys, slice_numels, len(slices), device)
        assert all(
            group.segments is not None and can_feed_back(group.segments, kernels._residual_table(index, kept_there))
            for index, group in enumerate(kernels._groups)
        ), f"{entry}: the torch code would be compared with itself"
        expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
        reference.encode(tensors, order, expected, residuals=kept)
        actual = torch.full_like(expected, 255, device=device)
        kernels.encode([t.to(device) for t in tensors], device_order, actual, residuals=kept_there)
        assert_bytes(actual, expected, "sent", step, entry, dtype, numels, slices)
        assert_bytes(kept_there.rows, kept.rows, "kept", step, entry, dtype, numels, slices)
    assert kept.rows.any(), "nothing was kept"


def largest(numels, dtype, seed=0):
    """Numbers that products of scale and element may round up beyond the dtype's largest; signs differ by rank."""
    return [torch.full((numel,), torch.finfo(dtype).max * (-1) ** seed, dtype=dtype) for numel in numels]


def check_reduce(first, then, dtype, numels, nodes, ranks, device, outputs, values=awkward):
    """The mean over ranks, encoded for the next hop (same bytes), then written and added to tensors (same values)."""
    then_format = make(then, dtype)
    slice_numels = slices_of(numels, nodes * ranks)
    reference, kernels = layouts(make(first, dtype), slice_numels, dtype, device, then_format)
    reference_then, kernels_then = layouts(then_format, slice_numels, dtype, device, make(first, dtype))
    received = torch.zeros(ranks, nodes, reference.row_bytes, dtype=torch.uint8)
    for rank in range(ranks):
        reference.encode(values(numels, dtype, seed=rank), SliceOrder(range(nodes), CPU), received[rank])
    expected = torch.zeros(nodes, reference_then.row_bytes, dtype=torch.uint8)
    reference.reduce_to_payload(received, reference_then, expected)
    actual = torch.full_like(expected, 255, device=device)
    kernels.reduce_to_payload(received.to(device), kernels_then, actual)
    if isinstance(then_format, UnquantizedFormat):  # NaN has other bits on each device: compare values
        for i, numel in enumerate(slice_numels):
            rows = [reference_then._part(payload, i) for payload in (actual.cpu(), expected)]
            assert_same(*(then_format.decode_rows(row, numel, torch.float32) for row in rows), first, then, numels)
    else:
        assert_bytes(actual, expected, first, then, numels, kernels_then.offsets)
    own = [max(0, n - 3) for n in slice_numels]  # a last slice without its padding
    for output in outputs:
        for accumulate in (False, True):
            wanted, got = new_tensors(own, output, 0.25, CPU, device)
            reference_then.reduce_to_tensors(expected, wanted, accumulate)
            kernels_then.reduce_to_tensors(expected.to(device), got, accumulate)
            for a, b in zip(got, wanted):
                assert_same(a.cpu(), b, output, accumulate)


def check_round_trip(entry, dtype, shape, device, axes=((True, False), (False, True), (True, True))):
    """kernels.round_trip against MXFormat.round_trip bit for bit, along each (rows, columns) of `axes`."""
    from zeropp_fp8.kernels.casts.round_trip import round_trip

    mx_format, matrix = make(entry), awkward([shape[0] * shape[1]], dtype)[0].view(shape)
    matrix.view(-1)[5::97] = -0.3
    if matrix.numel() > 400:
        matrix.view(-1)[300] = float("nan")
        matrix.view(-1)[-77:-70] = torch.finfo(dtype).max
        matrix.view(-1)[-60] = -torch.finfo(dtype).smallest_normal / 2
    wanted = mx_format.round_trip(matrix), mx_format.round_trip(matrix.t())
    for along in axes:
        for asked, a, b in zip(along, round_trip(matrix.to(device), mx_format, *along), wanted):
            assert asked is (a is not None)
            if asked:
                assert a.is_contiguous()
                assert_same(a.cpu(), b, entry, dtype, shape, along)


def check_round_trip_refusals():
    import pytest

    from zeropp_fp8.kernels.casts.round_trip import round_trip

    for wrong in (torch.ones(4), torch.ones(2, 2, 2), torch.ones(4, 6).t()):
        with pytest.raises(ValueError, match="contiguous matrix"):
            round_trip(wrong, make("mxfp4"))
    with pytest.raises(TypeError, match="mxfp4: can encode"):
        round_trip(torch.ones(4, 4, dtype=torch.float64), make("mxfp4"))
    assert round_trip(torch.ones(4, 4), make("mxfp4"), along_rows=False) == (None, None)


def check_any_sizes(seed):
    """Any sizes, any number of ranks, any slices."""
    draw = random.Random(seed)
    world = draw.choice([1, 2, 3, 4, 6])
    numels = [draw.choice([1, 2, 3, draw.randint(1, 70), draw.randint(1, 600)]) for _ in range(draw.randint(1, 4))]
    slices = draw.sample(range(world), draw.choice([1, world]))
    check_travel(draw.choice(ENCODED), torch.float32, numels, world, slices, CPU, [torch.float32])


def check_plans(entry):
    """A launch is looked at once wherever tensors lie, also with another table of slices each time: plans would keep
    them all."""
    reference, layout = (
        PayloadLayout([600, 33], [make(entry)] * 2, [torch.float32] * 2, CPU, use_kernels=kernels)
        for kernels in (False, True)
    )
    kept = []
    for gap in (0, 7, 64):
        whole = torch.randn(600 + gap + 33)
        tensors, order = [whole[:600], whole[600 + gap :]], SliceOrder([0], CPU)
        rows, expected = (torch.zeros(1, layout.row_bytes, dtype=torch.uint8) for _ in range(2))
        layout.encode(tensors, order, rows)
        reference.encode(tensors, order, expected)
        assert torch.equal(rows, expected), (entry, gap)
        out = [torch.zeros(600), torch.zeros(33)]
        layout.decode(rows, order, out)
        kept += [tensors, order, rows, out]  # so that nothing comes to lie where it was
    plans = layout._groups[0].segments.plans
    assert len({key[0] for key in plans}) == 2 and len(plans) <= 4, list(plans)  # aligned or not


# -- FP8 codes with a scale that all ranks share ----------------------------------------------------------------------

AMAX_BEFORE = [0.5, 1e30, 0.0, 0.0, 0.0]


def scales_of(multipliers, device):
    """SharedScales of tensors with these multipliers; amax and counts begin at what has been seen before."""
    encode = torch.tensor(multipliers, dtype=torch.float32)
    amax, counts = torch.tensor(AMAX_BEFORE[: len(multipliers)]), torch.arange(6).view(3, 2)
    return SharedScales(*(t.to(device) for t in (encode, 1 / encode, amax, counts)))


def assert_same_scales(actual, expected):
    assert torch.equal(actual.amax.cpu(), expected.amax), (actual.amax, expected.amax)
    assert torch.equal(actual.counts.cpu(), expected.counts), (actual.counts, expected.counts)


def check_shared_encode(name, dtype, numels, world, slices, device, multiplier=0.3):
    """Same bytes, amax and counts; each tensor has a multiplier of its own."""
    tensors, sizes = awkward(numels, dtype), slices_of(numels, world)
    multipliers = [multiplier * 4**i for i in range(len(numels))]
    reference, kernels = layouts(SharedScaleFormat(name), sizes, dtype, device)
    assert all(group.segments is not None for group in kernels._groups)
    expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
    of_reference, of_kernels = scales_of(multipliers, CPU), scales_of(multipliers, device)
    reference.encode(tensors, SliceOrder(slices, CPU), expected, shared=of_reference)
    actual = torch.full_like(expected, 255, device=device)
    kernels.encode([t.to(device) for t in tensors], SliceOrder(slices, device), actual, shared=of_kernels)
    assert_bytes(actual, expected, name, dtype, numels, slices, kernels.offsets)
    assert_same_scales(of_kernels, of_reference)
    assert of_reference.counts[0, 1] > 1 or multiplier > 0.1, "nothing became zero"
    for i, (tensor, size) in enumerate(zip(tensors, sizes)):  # amax over the slices that were encoded
        used = torch.cat([tensor[s * size : (s + 1) * size] for s in slices]).float()
        assert of_reference.amax[i] == max([AMAX_BEFORE[i], *used[used.isfinite()].abs().tolist()])


def check_shared_sums(name, numels, nodes, ranks, device, outputs):
    """Sums over ranks as codes for the next hop, as numbers written and added to tensors, and as stored codes."""
    slice_numels = slices_of(numels, nodes * ranks)
    multipliers = [(0.2 if "e4m3" in name else 25.0) * 4**i for i in range(len(numels))]
    reference, kernels = layouts(SharedScaleFormat(name), slice_numels, torch.float32, device)
    received = torch.zeros(ranks, nodes, reference.row_bytes, dtype=torch.uint8)
    for rank in range(ranks):
        tensors = awkward(numels, torch.float32, seed=rank)
        order = SliceOrder(range(nodes * ranks - nodes, nodes * ranks), CPU)  # the last ones, of the largest numbers
        reference.encode(tensors, order, received[rank], shared=scales_of(multipliers, CPU))
    of_reference, of_kernels = scales_of(multipliers, CPU), scales_of(multipliers, device)
    expected = torch.zeros(nodes, reference.row_bytes, dtype=torch.uint8)
    reference.reduce_to_payload(received, reference, expected, shared=of_reference)
    actual = torch.full_like(expected, 255, device=device)
    kernels.reduce_to_payload(received.to(device), kernels, actual, shared=of_kernels)
    assert_bytes(actual, expected, name, numels, nodes, ranks)
    assert_same_scales(of_kernels, of_reference)

    own = [max(0, n - 3) for n in slice_numels]  # a last slice without its padding, which is zeros
    for i, numel in enumerate(own):
        reference._part(expected, i)[:, numel:] = 0
    for output in (*outputs, torch.uint8):
        for accumulate in (False, True) if output != torch.uint8 else (False,):
            wanted, got = new_tensors(own, output, 3, CPU, device)
            reference.reduce_to_tensors(expected, wanted, accumulate, shared=of_reference)
            kernels.reduce_to_tensors(expected.to(device), got, accumulate, shared=of_kernels)
            for a, b in zip(got, wanted):
                assert same(a.float(), b.float()), (output, accumulate)
    assert_same_scales(of_kernels, of_reference)
    assert of_reference.counts[2, 0] > 4, "nothing was cut off"
    # The numbers written are the sum of the codes' numbers times the factor.
    wanted = [torch.empty(n) for n in own]
    reference.reduce_to_tensors(expected, wanted, shared=of_reference)
    for i, tensor in enumerate(wanted):
        rows = reference._part(expected, i)[:, : own[i]].view(SharedScaleFormat(name).dtype)
        total = rows.double().sum(dim=0) * of_reference.decode[i].double()
        torch.testing.assert_close(tensor.double(), total, rtol=1e-6, atol=0, equal_nan=True)


def check_squares(name, tiles, device):
    from zeropp_fp8.kernels.optimizer.squares import squares_of_tiles

    generator = torch.Generator().manual_seed(tiles)
    codes = torch.randint(0, 256, (tiles * TILE,), generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F >= (0x7F if "e4m3" in name else 0x7C)] = 0x12
    if tiles > 4:
        codes[4 * TILE + 5] = 0x7F
    expected = codes.view(SharedScaleFormat(name).dtype).double().square().view(tiles, TILE).sum(dim=1)
    actual = squares_of_tiles(codes.to(device), name, TILE).cpu().double()
    assert actual.shape == (tiles,) and actual.isnan().sum() == (tiles > 4)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0, equal_nan=True)


def check_shared_beside_others(device):
    """Matrix, vector, matrix: the middle one keeps its amax, and the others' come back to their places."""
    shared, exact = SharedScaleFormat("fp8_e4m3"), UnquantizedFormat(torch.float32)
    numels, dtypes, formats = [300, 40, 700], [torch.float32] * 3, [shared, exact, shared]
    tensors = [t.nan_to_num(0, 0, 0) for t in awkward(numels, torch.float32)]
    payloads, scales = [], []
    for place, kernels in ((CPU, False), (device, True)):
        layout = PayloadLayout([n // 2 for n in numels], formats, dtypes, place, use_kernels=kernels)
        mine = scales_of([0.2, 5.0, 0.7], place)
        payload = torch.full((2, layout.row_bytes), 99, dtype=torch.uint8, device=place)
        layout.encode([t.to(place) for t in tensors], SliceOrder([0, 1], place), payload, shared=mine)
        payloads.append(payload.cpu())
        scales.append(mine)
        results = [torch.empty(n // 2, device=place) for n in numels]
        layout.reduce_to_tensors(payload, results, shared=mine)
        rounded = tensors[0].mul(0.2).clamp(-448, 448).to(torch.float8_e4m3fn).float() / torch.tensor(0.2)
        torch.testing.assert_close(results[0].cpu(), rounded[:150] + rounded[150:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[1].cpu(), (tensors[1][:20] + tensors[1][20:]) / 2)
    assert torch.equal(*payloads)
    assert_same_scales(scales[1], scales[0])
    assert scales[0].amax.tolist() == [tensors[0].abs().max(), torch.tensor(1e30), tensors[2].abs().max()]


# -- the cases in Triton's interpreter --------------------------------------------------------------------------------


def _interpreted():
    """(id, check) of every case: an id names the check, the format and the dtype or sizes."""
    small = ([33, 1001], 3, [2, 0, 1], CPU)
    every = list(DTYPES.values())
    for entry, dtype in sorted({*thinned(ENCODED, DTYPES), *(("int8", dtype) for dtype in DTYPES)}):
        outputs = every if entry == "int8" else [DTYPES[dtype]]
        yield f"travel-{entry}-{dtype}", partial(check_travel, entry, DTYPES[dtype], *small, outputs)
    for dtype in DTYPES:
        case = DTYPES[dtype], [33, 500, 3001], 3, [2, 0, 1], CPU, [DTYPES[dtype]]
        yield f"travel-none-{dtype}-long", partial(check_travel, "none", *case)
    for entry in DECODED + BY_TORCH:
        yield f"travel-{entry}", partial(check_travel, entry, torch.float32, *small, every)
    for entry, numels, world, slices in (
        # one slice of several, sizes of which the last slices are empty, a single element, and a whole tile
        ("int8", [9, 1, 2, 5], 8, [7, 1]),
        ("int4-hadamard", [1, 8192], 1, [0]),
        ("mxfp6_e3m2", [9, 1, 2, 5], 8, [7, 1]),
        ("mxfp6_e2m3", [1, 4096], 1, [0]),
        ("mxfp4", [2048, 2040], 1, [0]),
        ("nf4", [2048, 2040, 1], 1, [0]),
        # slices of more than 256 blocks, for a group of scales to have more than one program
        ("nf4-double", [40000, 33], 2, [1, 0]),
        ("int8-double", [40000, 33], 2, [1, 0]),
        ("nf4-double", [9, 1, 2, 5], 8, [7, 1]),
        ("int8-double", [9, 1, 2, 5], 8, [7, 1]),
        # 3 group scales and the offset fill 16 bytes, 4 do not
        ("nf4-2-double", [1536], 1, [0]),
        ("nf4-2-double", [2048], 1, [0]),
    ):
        dtype = torch.bfloat16 if numels[0] == 40000 else torch.float32
        case = dtype, numels, world, slices, CPU, [dtype]
        yield f"travel-{entry}-{'+'.join(map(str, numels))}", partial(check_travel, entry, *case)
    for seed in range(40):
        yield f"any_sizes-{seed}", partial(check_any_sizes, seed)
    for entry in ("int8", "int4-hadamard"):
        yield f"plans-{entry}", partial(check_plans, entry)
    for entry in DECODED:
        yield f"largest_parts-{entry}", partial(check_largest_parts, entry)
    for first, then in (
        ("int8", "int4-hadamard"), ("int8", "int8"), ("int4-hadamard", "int4-hadamard"), ("none", "int4"),
        ("int8", "none"), ("none", "none"), ("fp8_e5m2", "fp8_e4m3"), ("int8-96", "int8"),
        ("mxfp8_e5m2", "mxfp6_e3m2"), ("mxfp6_e2m3", "mxfp8_e5m2"), ("mxfp4", "none"), ("mxint8", "mxfp8_e4m3-floor"),
        ("mxfp6_e3m2", "int8-32"), ("none", "mxfp4"), ("mxfp8_e4m3", "int8"),
        ("int8", "int4-hadamard-96"), ("int4-34", "int4-34"), ("int4-hadamard-96", "int4-hadamard-96"),
    ):  # fmt: skip
        case = torch.bfloat16, [33, 500, 1001], 2, 3, CPU, every
        yield f"reduce-{first}-{then}", partial(check_reduce, first, then, *case)
    for first, then in (("int8", "int4"), ("mxfp6_e3m2", "mxfp4")):
        case = torch.float32, [500, 1001], 2, 2, CPU, [torch.float32]
        yield f"reduce-{first}-{then}-fp32", partial(check_reduce, first, then, *case)
    # By torch code, as kernels only decode one of the two.
    for first, then in (("nf4", "nf4"), ("int8-double", "int4"), ("int8", "nf4-double"), ("none", "nf4")):
        case = torch.float32, [33, 1001], 2, 2, CPU, [torch.float32]
        yield f"reduce-{first}-{then}-fp32", partial(check_reduce, first, then, *case)
    case = torch.float32, [70, 1001], 1, 17, CPU, [torch.float32]
    yield "reduce-mxfp8_e4m3-17 ranks", partial(check_reduce, "mxfp8_e4m3", "mxfp8_e4m3", *case)
    for entry in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3"):
        for ranks in (1, 2, 3):
            case = torch.float32, [100], 1, ranks, CPU, every, largest
            yield f"reduce-{entry}-largest-{ranks} ranks", partial(check_reduce, entry, entry, *case)
    for entry, dtype in thinned(GRADIENTS, DTYPES):
        yield f"feed_back-{entry}-{dtype}", partial(check_feed_back, entry, DTYPES[dtype], *small)
    for entry, numels, world, slices in (
        ("int4-hadamard", [4096, 9000], 2, [0, 1]), ("int8", [9, 1, 2, 5], 8, [7, 1]), ("int4", [8192], 1, [0]),
        ("int4-hadamard", [300, 5000], 4, [3, 1, 0, 2]), ("int4-34", [9, 1, 2, 5], 8, [7, 1]),
    ):  # fmt: skip
        case = torch.bfloat16, numels, world, slices, CPU
        yield f"feed_back-{entry}-{'+'.join(map(str, numels))}", partial(check_feed_back, entry, *case)
    for entry, dtype in thinned(MX, DTYPES):
        yield f"round_trip-{entry}-{dtype}", partial(check_round_trip, entry, DTYPES[dtype], (70, 33), CPU)
    for shape in ((1, 130), (130, 1), (64, 64), (31, 97), (0, 5), (5, 0)):
        for entry, dtype in (("mxfp8_e5m2", torch.float32), ("mxint8", torch.bfloat16)):
            yield f"round_trip-{entry}-{shape}", partial(check_round_trip, entry, dtype, shape, CPU)
    yield "round_trip-refusals", check_round_trip_refusals
    for name in ("fp8_e4m3", "fp8_e5m2"):
        for dtype in DTYPES:
            case = DTYPES[dtype], [33, 1001, 5000], 3, [2, 0, 1], CPU
            yield f"shared_encode-{name}-{dtype}", partial(check_shared_encode, name, *case)
        for numels, world, slices in (([9, 1, 2, 5], 8, [7, 1]), ([4096, 2048], 1, [0])):
            case = torch.float32, numels, world, slices, CPU
            yield f"shared_encode-{name}-{world} slices", partial(check_shared_encode, name, *case)
        case = torch.bfloat16, [700], 4, [0, 1, 2, 3], CPU, 2.0**-14
        yield f"shared_encode-{name}-small", partial(check_shared_encode, name, *case)
        for nodes, ranks in ((2, 3), (1, 1), (3, 17)):
            case = [33, 500, 3001], nodes, ranks, CPU, every
            yield f"shared_sums-{name}-{nodes} x {ranks}", partial(check_shared_sums, name, *case)
        for tiles in (1, 4, 7, 0):
            yield f"squares-{name}-{tiles}", partial(check_squares, name, tiles, CPU)
    case = [2048 * 2, 100], 2, 2, CPU, [torch.float32]
    yield "shared_sums-fp8_e4m3-aligned", partial(check_shared_sums, "fp8_e4m3", *case)
    yield "shared_beside_others", partial(check_shared_beside_others, CPU)


INTERPRETED = dict(_interpreted())
assert len(INTERPRETED) == len(list(_interpreted())), "two cases of one id"
