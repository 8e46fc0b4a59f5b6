"""The kernels, natively on a GPU, against the torch code on the CPU: same bytes, same values.

A kernel is compiled once for each format, dtype and alignment, which takes half a second; all products of
these, which tests/unit/test_kernels.py goes through in Triton's interpreter, would take 20 minutes. Between reading and
writing a value is fp32 whatever the tensor's dtype, so here they are paired:

    quantize, dequantize    every format from bf16 to fp32, at odd offsets; one of each layout of codes at aligned
                            offsets, with the dtypes in turn; other dtypes at odd offsets, where LIMIT and Inf matter
    NF4, double-quantized   only decoded: every format, at odd and at aligned offsets, to a dtype each
    error feedback          each family of elements with scales in bf16
    reduce                  each pair of formats in one dtype, every element first or next
    round_trip              every format from bf16, with sides divisible by 16 (scales rounded up) or not (floor);
                            every element with one other dtype; single axes, and sides of 1, on few
"""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    FORMATS,
    FROZEN_FORMATS,
    check_decoded_only,
    check_feed_back,
    check_quantize_and_dequantize,
    check_reduce,
    check_round_trip,
    largest,
    make,
)

from zeropp_fp8.formats import make_format

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", list(FORMATS))
def test_quantize_and_dequantize(name):
    """Slices that start at odd places, small ones and ones of many tiles."""
    outputs = [] if name.endswith("-floor") else [torch.float32]  # decoding is the same for both scale modes
    for numels, slices in (([33, 500, 1001], [2, 0, 1]), ([100003], [0, 1, 2, 3])):
        check_quantize_and_dequantize(make(name), torch.bfloat16, numels, len(slices), slices, CUDA, outputs)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("int4-hadamard", "bf16"),
        ("int4-34", "fp16"),
        ("int8", "bf16"),
        ("int8-8192", "fp32"),
        ("fp8_e4m3", "bf16"),
        ("fp8_e5m2", "fp32"),
        ("int3", "bf16"),
        ("int3-hadamard-96", "fp32"),
        ("int2", "bf16"),
    ],
)
def test_error_feedback(name, dtype):
    """Small and odd, aligned with many tiles, and slices beyond a tensor's end."""
    for numels, slices in (([33, 500, 1001], [2, 0, 1]), ([1 << 18, 100003], [3, 1, 0, 2]), ([9, 1, 2, 5], [7, 1])):
        world = max(slices) + 1
        check_feed_back(make(name), DTYPES[dtype], numels, world, slices, CUDA)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("int8", "bf16"),
        ("int8-96", "fp32"),
        ("int3", "bf16"),
        ("int4-hadamard", "fp16"),
        ("fp8_e4m3", "fp32"),
        ("mxfp8_e5m2", "fp16"),
        ("mxfp6_e3m2", "bf16"),
        ("mxfp4", "fp32"),
    ],
)
def test_aligned_slices(name, dtype):
    """Accessed 16 bytes at a time; whole tiles and a tail."""
    dtype = DTYPES[dtype]
    numels = [1 << 16, 3 * 4096 + 64]
    check_quantize_and_dequantize(make(name), dtype, numels, 4, [3, 1, 0, 2], CUDA, [dtype])


@pytest.mark.parametrize("name", list(FROZEN_FORMATS))
def test_formats_that_are_only_decoded(name):
    """Slices of many groups of scales, some beyond a tensor's end."""
    outputs = list(DTYPES.values())
    check_decoded_only(make(name), torch.float32, [33, 500, 100003], 3, [2, 0, 1], CUDA, outputs)
    output = outputs[list(FROZEN_FORMATS).index(name) % 3]
    check_decoded_only(make(name), output, [1 << 18, 3 * 4096 + 64], 4, [3, 1, 0, 2], CUDA, [output])
    check_decoded_only(make(name), output, [9, 1, 2, 5], 8, [7, 1], CUDA, [output])


@pytest.mark.parametrize(
    "name, dtype, outputs",
    [
        ("int8", "fp32", ["bf16", "fp16"]),
        ("int4-hadamard-96", "fp16", ["fp16"]),
        ("mxfp8_e5m2", "fp32", ["bf16", "fp16"]),
        ("mxfp6_e2m3", "fp16", ["bf16"]),
    ],
)
def test_other_dtypes(name, dtype, outputs):
    outputs = [DTYPES[output] for output in outputs]
    check_quantize_and_dequantize(make(name), DTYPES[dtype], [33, 500, 10001], 3, [2, 0, 1], CUDA, outputs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_unquantized(dtype):
    fmt = make("none", dtype=dtype)
    check_quantize_and_dequantize(fmt, dtype, [33, 500, 3001, 1 << 16], 4, [2, 0, 1, 3], CUDA, [dtype])


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
        ("int8", "int3", "bf16"),
        ("int3-24", "int3-24", "fp32"),
        ("int2-hadamard-96", "int2-hadamard-96", "bf16"),
    ],
)
def test_reduce(first, then, dtype):
    dtype = DTYPES[dtype]
    formats = make(first, dtype=dtype), make(then, dtype=dtype)
    check_reduce(*formats, dtype, [33, 500, 1001, 1 << 15], 2, 3, CUDA, [dtype])


def test_reduce_of_many_ranks():
    """Above 16 ranks the sum is a loop."""
    fmt = make("mxfp8_e4m3")
    check_reduce(fmt, fmt, torch.float32, [70, 10001], 1, 17, CUDA, [torch.float32])


@pytest.mark.parametrize("name, ranks", [("mxfp8_e4m3", 1), ("mxfp8_e5m2", 2), ("mxfp6_e2m3", 3)])
def test_sums_of_the_largest_numbers(name, ranks):
    check_reduce(make(name), make(name), torch.float32, [100, 5000], 1, ranks, CUDA, [torch.float32], largest)


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("mx")])
def test_round_trip(name):
    for shape in ((70, 33), (1001, 257)) if name.endswith("-floor") else ((128, 192), (1024, 1024)):
        check_round_trip(make(name), torch.bfloat16, shape, CUDA, [(True, True)])


@pytest.mark.parametrize(
    "name, dtype",
    [("mxfp8_e4m3", "fp32"), ("mxfp8_e5m2", "fp16"), ("mxfp6_e2m3", "fp32"), ("mxfp6_e3m2", "fp16"), ("mxfp4", "fp32")]
    + [("mxint8", "fp16")],
)
def test_round_trip_with_other_dtypes(name, dtype):
    """Rows as few or many tokens have them, columns as features."""
    for shape in ((70, 96), (1001, 256)):
        check_round_trip(make(name), DTYPES[dtype], shape, CUDA, [(True, True)])


@pytest.mark.parametrize("name", ["mxfp8_e5m2", "mxint8"])
def test_round_trip_along_one_axis(name):
    check_round_trip(make(name), torch.bfloat16, (128, 192), CUDA, [(True, False), (False, True)])


def test_round_trip_of_one_row_or_column():
    """Triton compiles a size of 1 into the kernel."""
    for shape in ((1, 1), (1, 1000), (1000, 1)):
        check_round_trip(make("mxfp8_e4m3"), torch.bfloat16, shape, CUDA, [(True, True)])


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
    from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder

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
