"""The casts to FP8, natively on a GPU, against the torch code on the CPU: same bytes. Graphs, and large matrices.

A kernel is compiled once for each pair of dtypes and choice of copies, and by whether sides are divisible by 16, or 1;
tests/compute/test_casts.py goes through all of them in Triton's interpreter. Here they are paired: bf16 goes to
both FP8 formats with sides of either kind; fp16 and fp32 go to one of them with sides divisible by 16, to the other
with odd sides; single copies, single rows and sides of both kinds in one matrix are cast from bf16 to E4M3.
"""

import pytest
import torch
from cast_cases import (
    CASTS,
    COPIES,
    FLOAT8_DTYPES,
    MATRIX_DTYPES,
    awkward_matrix,
    check_amax,
    check_cast,
    check_fused,
    check_fused_with_statistics,
    check_operand,
    check_transpose,
    raw,
)

from zeropp_fp8.compute import casts

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = {
    "divisible by 16": [(128, 256), (512, 1024)],
    "odd": [(17, 300), (131, 129), (300, 33)],
    "one": [(1, 1), (1, 200), (200, 1)],  # a single column is left to torch
}
NAMES = [*CASTS, "delayed"]


@pytest.mark.parametrize(
    "matrix_dtype, dtype, shapes",
    [
        ("bf16", "e4m3", "divisible by 16"),
        ("bf16", "e4m3", "odd"),
        ("bf16", "e4m3", "one"),
        ("bf16", "e5m2", "divisible by 16"),
        ("bf16", "e5m2", "odd"),
        ("fp16", "e4m3", "odd"),
        ("fp16", "e5m2", "divisible by 16"),
        ("fp32", "e4m3", "divisible by 16"),
        ("fp32", "e5m2", "odd"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_casts(name, matrix_dtype, dtype, shapes):
    matrix_dtype, dtype = MATRIX_DTYPES[matrix_dtype], FLOAT8_DTYPES[dtype]
    for shape in SHAPES[shapes]:
        check_cast(name, awkward_matrix(*shape, matrix_dtype), dtype, CUDA)
        check_cast(name, awkward_matrix(*shape, matrix_dtype, 1, whole_groups=False), dtype, CUDA)


@pytest.mark.parametrize("name", NAMES)
def test_copies(name):
    """Each copy alone; and both where only the columns are divisible by 16, as tokens have it."""
    for shape, copies in (((17, 300), COPIES[1:]), ((1024, 512), COPIES[1:]), ((300, 128), COPIES[:1])):
        matrix = awkward_matrix(*shape, torch.bfloat16, whole_groups=False)
        for plain, transposed in copies:
            check_cast(name, matrix, torch.float8_e4m3fn, CUDA, plain, transposed)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES.values(), ids=FLOAT8_DTYPES)
def test_every_bf16_number(dtype):
    """Scale 1: all 65,536 of them, NaN of every kind, ties and saturation among them."""
    matrix = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    expected = casts.cast_per_tensor(matrix, dtype, torch.ones(1))
    for operand, other in zip(casts.cast_per_tensor(matrix.to(CUDA), dtype, torch.ones(1, device=CUDA)), expected):
        check_operand(operand, other)


@pytest.mark.parametrize("name", NAMES)
def test_torch_code_on_the_gpu(name):
    """The reference makes the same bytes on both devices (and rounds its divisions correctly on both)."""
    matrix = awkward_matrix(131, 300, torch.bfloat16, whole_groups=False)
    for dtype in FLOAT8_DTYPES.values():
        if name == "delayed":
            scale = torch.full((1,), 0.37)
            expected = casts.cast_per_tensor(matrix, dtype, scale)
            actual = casts.cast_per_tensor(matrix.to(CUDA), dtype, scale.to(CUDA), use_kernels=False)
        else:
            expected = CASTS[name](matrix, dtype)
            actual = CASTS[name](matrix.to(CUDA), dtype, use_kernels=False)
        for operand, other in zip(actual, expected):
            check_operand(operand, other)


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_of_a_model(name):
    matrix = torch.randn(4096, 3584, generator=torch.Generator().manual_seed(0)).bfloat16()
    check_cast(name, matrix, torch.float8_e4m3fn, CUDA)


def test_long_rows():
    for columns in (16384, 16385, 40001):
        matrix = awkward_matrix(5, columns, torch.bfloat16)
        check_cast("row", matrix, torch.float8_e4m3fn, CUDA, transposed=False)


def test_amax():
    for shape in ((1, 1), (33, 65), (2048, 4097)):
        check_amax(awkward_matrix(*shape, torch.bfloat16, whole_groups=False), CUDA)
    check_amax(torch.full((64, 64), torch.nan), CUDA)


def test_transpose():
    for rows, columns in ((17, 300), (129, 255), (1, 208), (1024, 512)):
        check_transpose(rows, columns, rows, CUDA)
        check_transpose(rows, columns, -(-rows // 128) * 128, CUDA)


def test_fused_casts():
    """SwiGLU is bit-equal to torch's two kernels."""
    for matrix_dtype in (torch.bfloat16, torch.float16):
        for rows, columns in ((131, 70), (1, 1), (512, 1024), (33, 5000)):
            check_fused(rows, columns, matrix_dtype, torch.float8_e4m3fn, CUDA, exact=True)
            if columns > 1:  # a single column is left to torch
                check_fused_with_statistics(rows, columns, matrix_dtype, CUDA)
    for plain, transposed in COPIES:
        check_fused(300, 256, torch.bfloat16, torch.float8_e5m2, CUDA, True, plain, transposed)


def test_every_gate_in_bf16():
    """silu of all bf16 numbers as torch rounds it."""
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256).to(CUDA)
    gate = torch.where(gate.isfinite(), gate, 0)
    wanted = torch.float8_e4m3fn, torch.ones(1, device=CUDA), None, True, True
    values = casts.swiglu(gate, torch.ones_like(gate), *wanted)[2]
    assert torch.equal(values, torch.nn.functional.silu(gate))


def every_cast(matrix, scale, record):
    """All operands that can be made of a matrix, with what they need."""
    weight = torch.ones(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    wanted = torch.float8_e4m3fn, scale, record, True, True
    return {
        **{name: lambda cast=cast: cast(matrix, torch.float8_e4m3fn) for name, cast in CASTS.items()},
        "row, plain": lambda: casts.cast_per_row(matrix, torch.float8_e4m3fn, transposed=False),
        "delayed": lambda: casts.cast_per_tensor(matrix, torch.float8_e5m2, scale, record),
        "swiglu": lambda: casts.swiglu(matrix, matrix, *wanted)[:2],
        "rms norm": lambda: casts.rms_norm(matrix, weight, casts.inverse_rms(matrix, 1e-5), *wanted)[:2],
    }


def test_graph_capture():
    """Each cast captured in a graph works on what lies in the matrix at replay."""
    first, second = (
        torch.randn(640, 416, generator=torch.Generator().manual_seed(seed)).bfloat16().to(CUDA) * (1 + 9 * seed)
        for seed in (0, 1)
    )
    matrix, scale, record = first.clone(), torch.full((1,), 0.05, device=CUDA), torch.zeros(1, device=CUDA)
    for name, cast in every_cast(matrix, scale, record).items():
        cast()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = cast()
        matrix.copy_(second)
        scale.fill_(0.1)
        record.zero_()
        graph.replay()
        recorded = record.clone()
        record.zero_()
        for operand, expected in zip(captured, cast()):
            check_operand(operand, expected, name)
        assert torch.equal(record, recorded), name
        matrix.copy_(first)
        scale.fill_(0.05)


def test_nothing_waits_for_the_device():
    matrix = torch.randn(256, 320, device=CUDA).bfloat16()
    scale, record = torch.ones(1, device=CUDA), torch.zeros(1, device=CUDA)
    for cast in every_cast(matrix, scale, record).values():
        cast()
        torch.cuda.set_sync_debug_mode("error")
        try:
            cast()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_elements():
    """The last rows of a matrix of 2.2e9 elements are cast as they are alone."""
    columns, last = 2048, 256
    rows = (1 << 20) + (1 << 15) + last
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("needs 20 GB of free GPU memory")
    matrix = torch.zeros(rows, columns, dtype=torch.bfloat16, device=CUDA)
    matrix[-last:] = torch.randn(last, columns, device=CUDA).bfloat16()
    scale = torch.full((1,), 0.01, device=CUDA)
    for name in ("delayed", "row", "block", "tile"):
        if name == "delayed":

            def cast(part):
                return casts.cast_per_tensor(part, torch.float8_e4m3fn, scale)
        else:

            def cast(part, name=name):
                return CASTS[name](part, torch.float8_e4m3fn)

        operand, operand_t = cast(matrix)
        alone, alone_t = cast(matrix[-last:])
        assert torch.equal(raw(operand.codes[-last:]), raw(alone.codes)), name
        assert torch.equal(raw(operand_t.codes[:, -last:].contiguous()), raw(alone_t.codes)), name
        assert not operand.codes.view(torch.uint8)[:-last].any(), name
        assert not operand_t.codes.view(torch.uint8)[:, :-last].any(), name
        del operand, operand_t
    assert torch.equal(casts.amax_of(matrix), matrix[-last:].abs().max().float().view(1))
