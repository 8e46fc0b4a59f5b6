"""The kernels, natively on a GPU, against the torch code on the CPU: same bytes, same values."""

import pytest
import torch
from kernel_cases import (
    DTYPES,
    FORMATS,
    check_quantize_and_dequantize,
    check_reduce,
    check_round_trip,
    largest,
    make,
)

from zeropp_fp8.formats import MX_NAMES, ROUNDING_MODES, make_format

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", list(FORMATS))
def test_quantize_and_dequantize(name):
    for dtype in DTYPES.values():
        fmt = make(name)
        check_quantize_and_dequantize(fmt, dtype, [33, 500, 1001], 3, [2, 0, 1], CUDA, DTYPES.values())
        # aligned slices, whole tiles and a tail; and slices that start at odd places
        check_quantize_and_dequantize(fmt, dtype, [1 << 16, 3 * 4096 + 64], 4, [3, 1, 0, 2], CUDA, [dtype])
        check_quantize_and_dequantize(fmt, dtype, [100003], 4, [0, 1, 2, 3], CUDA, [dtype])


@pytest.mark.parametrize("rounding", ["half_away", "stochastic"])
@pytest.mark.parametrize("name", ["int8", "int4-hadamard", "fp8_e4m3", "fp8_e5m2", *MX_NAMES])
def test_other_roundings(name, rounding):
    dtype = torch.bfloat16
    check_quantize_and_dequantize(make(name, rounding), dtype, [33, 500, 10001], 3, [2, 0, 1], CUDA, [])


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_unquantized(dtype):
    fmt = make("none", dtype=dtype)
    check_quantize_and_dequantize(fmt, dtype, [33, 500, 3001, 1 << 16], 4, [2, 0, 1, 3], CUDA, [dtype])


@pytest.mark.parametrize(
    "first, then",
    [
        ("int8", "int4-hadamard"),
        ("int8", "int8"),
        ("int4-hadamard", "int4-hadamard"),
        ("none", "int4"),
        ("int8", "none"),
        ("none", "none"),
        ("fp8_e5m2", "fp8_e4m3"),
        ("int8-96", "int8"),
        ("mxfp8_e5m2", "mxfp6_e3m2"),
        ("mxfp6_e2m3", "mxfp8_e5m2"),
        ("mxfp4", "mxfp4-floor"),
        ("mxint8", "mxfp8_e4m3"),
        ("mxfp6_e3m2", "int8-32"),
        ("none", "mxfp4"),
        ("mxfp8_e4m3", "none"),
        ("mxfp8_e4m3", "int8"),
    ],
)
def test_reduce(first, then):
    for dtype in DTYPES.values():
        formats = make(first, dtype=dtype), make(then, dtype=dtype)
        check_reduce(*formats, dtype, [33, 500, 1001, 1 << 15], 2, 3, CUDA, DTYPES.values())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", MX_NAMES)
def test_sums_of_the_largest_numbers(name, ranks):
    check_reduce(make(name), make(name), torch.float32, [100, 5000], 1, ranks, CUDA, DTYPES.values(), largest)


@pytest.mark.parametrize("rounding", ROUNDING_MODES)
@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("mx")])
def test_round_trip(name, rounding):
    fmt = make(name, rounding)
    for dtype in DTYPES.values():
        for shape in ((1, 1), (70, 33), (128, 192), (1, 1000), (1000, 1), (1001, 257), (1024, 4096)):
            check_round_trip(fmt, dtype, shape, CUDA)


def test_round_trip_of_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    from zeropp_fp8.kernels.round_trip import round_trip

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
