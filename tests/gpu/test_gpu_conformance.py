"""Every format natively on a GPU: its torch code against the CPU's and the NumPy reference, its kernels against both.

A kernel is compiled once for each format, dtype and alignment, which takes half a second; all products of these, which
tests/formats goes through in Triton's interpreter, would take 20 minutes. Between reading and writing a value is fp32
whatever the tensor's dtype, so here they are paired:

    travel        every format from bf16 to fp32, at odd offsets; one of each layout of codes at aligned offsets, with
                  the dtypes in turn; other dtypes at odd offsets, where LIMIT and Inf matter; those that are only
                  decoded at odd and at aligned offsets, to a dtype each
    feed_back     each family of elements with scales in bf16
    reduce        each pair of formats in one dtype, every element first or next
    round_trip    every format from bf16, with sides divisible by 16 (scales rounded up) or not (floor); every element
                  with one other dtype; single axes, and sides of 1, on few
"""

import exact_checks
import payload_checks as checks
import pytest
import torch
from conformance import (
    CPU,
    DTYPES,
    ENTRIES,
    MX,
    QUANTIZED,
    WHOLE,
    awkward,
    check_mean,
    check_nan,
    make,
    same,
)
from conformance import check_reference as check_numpy_reference
from payload_checks import DECODED, ENCODED, TILE

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import SharedScaleFormat, exact, make_format
from zeropp_fp8.formats.scale_table import SharedScales

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SMALL = [33, 500, 1001]
FLOAT8 = pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])


# -- the torch code ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", QUANTIZED)
def test_bytes_and_values_are_those_of_the_cpu(entry, dtype):
    """Also of parts, whose offset is a mean over the whole tensor, in an order that no device changes."""
    fmt, dtype = make(entry), DTYPES[dtype]
    for numel in (0, 1, 7, 33, 128, 4099, 1 << 16):
        (x,) = awkward([numel], dtype)
        x[::9] = -0.0
        if numel > 1000 and entry in MX:
            x[[900, 901, 1000]] = torch.tensor([-torch.inf, torch.finfo(dtype).max, -torch.nan], dtype=dtype)
        payload = fmt.encode(x)
        on_gpu = fmt.encode(x.to(CUDA))
        assert torch.equal(on_gpu.cpu(), payload), numel
        assert same(fmt.decode(on_gpu, x.shape, dtype), fmt.decode(payload, x.shape, dtype))
        if entry in MX:
            assert same(fmt.round_trip(x.to(CUDA)), fmt.round_trip(x))
            matrix = x[: numel // 4 * 4].view(-1, 4)
            assert all(same(fmt.round_trip(matrix.to(CUDA), axis), fmt.round_trip(matrix, axis)) for axis in (0, 1))
        if entry in WHOLE or not numel:
            continue
        size = -(-numel // (3 * fmt.granule)) * fmt.granule
        for first in (0, size, 2 * size):
            parts = [torch.full((fmt.payload_bytes(size),), 255, dtype=torch.uint8, device=d) for d in (CPU, CUDA)]
            for part in parts:
                fmt.encode_part(x.to(part.device), first, size, part)
            assert torch.equal(parts[1].cpu(), parts[0]), (numel, first)


@pytest.mark.parametrize("entry", MX)
def test_reference(entry):
    check_numpy_reference(entry, torch.bfloat16, CUDA)


@pytest.mark.parametrize("entry", QUANTIZED)
def test_nan_and_inf(entry):
    check_nan(entry, torch.bfloat16, CUDA)


@pytest.mark.parametrize("entry", ENTRIES)
def test_mean(entry):
    check_mean(entry, CUDA)


# -- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ENCODED)
def test_travel(entry):
    """Slices that start at odd places, small ones and ones of many tiles."""
    outputs = [] if entry.endswith("-floor") else [torch.float32]  # decoding is the same for both scale modes
    for numels, slices in ((SMALL, [2, 0, 1]), ([100003], [0, 1, 2, 3])):
        checks.check_travel(entry, torch.bfloat16, numels, len(slices), slices, CUDA, outputs)


@pytest.mark.parametrize(
    "entry, dtype",
    [
        ("int8", "bf16"),
        ("int8-96", "fp32"),
        ("int4-hadamard", "fp16"),
        ("fp8_e4m3", "fp32"),
        ("mxfp8_e5m2", "fp16"),
        ("mxfp6_e3m2", "bf16"),
        ("mxfp4", "fp32"),
    ],
)
def test_travel_of_aligned_slices(entry, dtype):
    """Accessed 16 bytes at a time; whole tiles and a tail."""
    numels, dtype = [1 << 16, 3 * 4096 + 64], DTYPES[dtype]
    checks.check_travel(entry, dtype, numels, 4, [3, 1, 0, 2], CUDA, [dtype])


@pytest.mark.parametrize("entry", DECODED)
def test_travel_of_what_is_only_decoded(entry):
    """Slices of many groups of scales, some beyond a tensor's end."""
    outputs = list(DTYPES.values())
    checks.check_travel(entry, torch.float32, [33, 500, 100003], 3, [2, 0, 1], CUDA, outputs)
    output = outputs[DECODED.index(entry) % 3]
    checks.check_travel(entry, output, [1 << 18, 3 * 4096 + 64], 4, [3, 1, 0, 2], CUDA, [output])
    checks.check_travel(entry, output, [9, 1, 2, 5], 8, [7, 1], CUDA, [output])
    checks.check_largest_parts(entry, CUDA)


@pytest.mark.parametrize(
    "entry, dtype, outputs",
    [
        ("int8", "fp32", ["bf16", "fp16"]),
        ("int4-hadamard-96", "fp16", ["fp16"]),
        ("mxfp8_e5m2", "fp32", ["bf16", "fp16"]),
        ("mxfp6_e2m3", "fp16", ["bf16"]),
    ],
)
def test_travel_of_other_dtypes(entry, dtype, outputs):
    case = [33, 500, 10001], 3, [2, 0, 1], CUDA, [DTYPES[output] for output in outputs]
    checks.check_travel(entry, DTYPES[dtype], *case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_travel_unquantized(dtype):
    case = [33, 500, 3001, 1 << 16], 4, [2, 0, 1, 3], CUDA, [DTYPES[dtype]]
    checks.check_travel("none", DTYPES[dtype], *case)


@pytest.mark.parametrize(
    "entry, dtype",
    [
        ("int4-hadamard", "bf16"),
        ("int4-34", "fp16"),
        ("int8", "bf16"),
        ("int8-8192", "fp32"),
        ("fp8_e4m3", "bf16"),
        ("fp8_e5m2", "fp32"),
        ("int4-hadamard-96", "fp32"),
    ],
)
def test_feed_back(entry, dtype):
    """Small and odd, aligned with many tiles, and slices beyond a tensor's end."""
    for numels, slices in ((SMALL, [2, 0, 1]), ([1 << 18, 100003], [3, 1, 0, 2]), ([9, 1, 2, 5], [7, 1])):
        checks.check_feed_back(entry, DTYPES[dtype], numels, max(slices) + 1, slices, CUDA)


@pytest.mark.parametrize(
    "first, then, dtype",
    [
        ("int8", "int4-hadamard", "bf16"),
        ("int8", "int8", "fp32"),
        ("int4-hadamard", "int4-hadamard", "fp16"),
        ("none", "int4", "fp32"),
        ("int8", "none", "bf16"),
        ("none", "none", "fp16"),
        ("fp8_e5m2", "fp8_e4m3", "bf16"),
        ("int8-96", "int8", "fp32"),
        ("mxfp8_e5m2", "mxfp6_e3m2", "fp32"),
        ("mxfp6_e2m3", "mxfp8_e5m2", "fp16"),
        ("mxfp4", "mxfp4-floor", "bf16"),
        ("mxint8", "mxfp8_e4m3", "bf16"),
        ("mxfp6_e3m2", "int8-32", "fp16"),
        ("none", "mxfp4", "bf16"),
        ("mxfp8_e4m3", "none", "fp32"),
        ("mxfp8_e4m3", "int8", "fp32"),
        ("int4-34", "int4-34", "fp32"),
        ("int4-hadamard-96", "int4-hadamard-96", "bf16"),
    ],
)
def test_reduce(first, then, dtype):
    dtype = DTYPES[dtype]
    checks.check_reduce(first, then, dtype, [*SMALL, 1 << 15], 2, 3, CUDA, [dtype])


def test_reduce_of_many_ranks():
    """Above 16 ranks the sum is a loop."""
    checks.check_reduce("mxfp8_e4m3", "mxfp8_e4m3", torch.float32, [70, 10001], 1, 17, CUDA, [torch.float32])


@pytest.mark.parametrize("entry, ranks", [("mxfp8_e4m3", 1), ("mxfp8_e5m2", 2), ("mxfp6_e2m3", 3)])
def test_reduce_of_the_largest_numbers(entry, ranks):
    case = torch.float32, [100, 5000], 1, ranks, CUDA, [torch.float32], checks.largest
    checks.check_reduce(entry, entry, *case)


@pytest.mark.parametrize("entry", MX)
def test_round_trip(entry):
    for shape in ((70, 33), (1001, 257)) if entry.endswith("-floor") else ((128, 192), (1024, 1024)):
        checks.check_round_trip(entry, torch.bfloat16, shape, CUDA, [(True, True)])


@pytest.mark.parametrize(
    "entry, dtype",
    [("mxfp8_e4m3", "fp32"), ("mxfp8_e5m2", "fp16"), ("mxfp6_e2m3", "fp32"), ("mxfp6_e3m2", "fp16"), ("mxfp4", "fp32")]
    + [("mxint8", "fp16")],
)
def test_round_trip_with_other_dtypes(entry, dtype):
    """Rows as few or many tokens have them, columns as features."""
    for shape in ((70, 96), (1001, 256)):
        checks.check_round_trip(entry, DTYPES[dtype], shape, CUDA, [(True, True)])


@pytest.mark.parametrize("entry", ["mxfp8_e5m2", "mxint8"])
def test_round_trip_along_one_axis(entry):
    checks.check_round_trip(entry, torch.bfloat16, (128, 192), CUDA, [(True, False), (False, True)])


def test_round_trip_of_one_row_or_column():
    """Triton compiles a size of 1 into the kernel."""
    for shape in ((1, 1), (1, 1000), (1000, 1)):
        checks.check_round_trip("mxfp8_e4m3", torch.bfloat16, shape, CUDA, [(True, True)])


def test_round_trip_of_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    from zeropp_fp8.kernels.casts.round_trip import round_trip

    matrix = torch.zeros(1 << 17, (1 << 14) + 64, dtype=torch.bfloat16, device=CUDA)
    assert matrix.numel() > 1 << 31
    matrix[-64:, -64:] = torch.randn(64, 64, device=CUDA)
    rows, columns = round_trip(matrix, make_format("mxfp8_e4m3"), along_columns=True)
    for result in (rows, columns.t()):
        assert not result[:-64].any() and not result[-64:, :-64].any()
        torch.testing.assert_close(result[-64:, -64:], matrix[-64:, -64:], rtol=0.07, atol=0.01)


def test_more_than_two_to_the_31_elements():
    """Offsets beyond 32 bits: the last elements of a tensor of 2.2e9 survive the way there and back."""
    numel = (1 << 31) + (1 << 27)
    if torch.cuda.mem_get_info()[0] < 14e9:
        pytest.skip("needs 14 GB of free GPU memory")
    fmt = make("int8")
    layout = PayloadLayout([numel], [fmt], [torch.bfloat16], CUDA)
    tensor = torch.zeros(numel, dtype=torch.bfloat16, device=CUDA)
    tensor[-1000:] = torch.randn(1000, device=CUDA).bfloat16()
    order = SliceOrder([0], CUDA)
    payload = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=CUDA)
    layout.encode([tensor], order, payload)
    back = torch.full_like(tensor, 3.0)
    layout.decode(payload, order, [back])
    assert not back[:-1000].any()
    torch.testing.assert_close(back[-1000:].float(), tensor[-1000:].float(), rtol=0, atol=0.03)


# -- exact differences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", exact_checks.KINDS)
@pytest.mark.parametrize("dtype", exact.MANTISSA, ids=str)
def test_exact_differences(kind, dtype):
    """Odd sizes, empty tensors, single numbers, whole chunks, and many of them; one row and several."""
    for numels, rows in (([1, 1023, 0, 1025], 3), ([4096], 1), ([1 << 18, 100003], 2), ([1], 2)):
        exact_checks.check(kind, numels, dtype, CUDA, rows)


# -- FP8 codes with a scale that all ranks share ----------------------------------------------------------------------


@FLOAT8
@pytest.mark.parametrize("dtype", DTYPES)
def test_shared_encode(name, dtype):
    checks.check_shared_encode(name, DTYPES[dtype], [33, 1001, 50_001], 3, [2, 0, 1], CUDA)
    checks.check_shared_encode(name, DTYPES[dtype], [1 << 16, 3 * 4096 + 64], 4, [3, 1, 0, 2], CUDA)
    checks.check_shared_encode(name, DTYPES[dtype], [9, 1, 2, 5], 8, [7, 1], CUDA)


@FLOAT8
@pytest.mark.parametrize("nodes, ranks", [(1, 1), (2, 2), (2, 8), (3, 17)])
def test_shared_sums(name, nodes, ranks):
    checks.check_shared_sums(name, [33, 500, 30_001], nodes, ranks, CUDA, DTYPES.values())
    checks.check_shared_sums(name, [1 << 16, 4096], nodes, ranks, CUDA, [torch.float32])


@FLOAT8
@pytest.mark.parametrize("tiles", [0, 1, 7, 1000])
def test_squares(name, tiles):
    checks.check_squares(name, tiles, CUDA)


def test_shared_beside_others():
    checks.check_shared_beside_others(CUDA)


def test_counts_do_not_lose_what_many_programs_add():
    """64M numbers, all cut off or all vanished: integer atomics, so the counts are exact and the same in every run."""
    numel = 1 << 26
    layout = PayloadLayout([numel], [SharedScaleFormat("fp8_e4m3")], [torch.bfloat16], CUDA)
    payload = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=CUDA)
    x = torch.full((numel,), 3.0, dtype=torch.bfloat16, device=CUDA)
    for multiplier, place in ((1e4, 0), (1e-6, 1)):
        encode = torch.full((1,), multiplier, device=CUDA)
        counts = torch.zeros(3, 2, dtype=torch.int64, device=CUDA)
        layout.encode([x], SliceOrder([0], CUDA), payload, shared=SharedScales(encode, 1 / encode, encode * 0, counts))
        expected = torch.zeros(3, 2, dtype=torch.int64)
        expected[0, place] = numel
        assert torch.equal(counts.cpu(), expected)


def test_gradient_store_of_sums():
    """Sums over micro-batches become the same codes and multipliers as on the CPU; so does their norm."""
    from gradient_store_cases import filled_store

    stores = [filled_store(device) for device in (CPU, CUDA)]
    for store in stores:
        store.close()
    for on_cpu, on_gpu in zip(stores[0].groups, stores[1].groups):
        expected, actual = stores[0].of(on_cpu), stores[1].of(on_gpu)
        if on_cpu.matrices:
            assert torch.equal(actual.multipliers.cpu(), expected.multipliers)
            for k in range(len(on_cpu.params)):
                view = on_cpu.segments.view
                assert torch.equal(view(actual.codes.cpu(), k), view(expected.codes, k))
            assert on_cpu.segments.padded_numel % TILE == 0
    sums = [store.square_sum(0).item() for store in stores]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6) and sums[0] > 0
