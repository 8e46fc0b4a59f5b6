"""The emulated FP8 GEMM against the formula in float64, and against torch's own."""

import pytest
import torch
from error_bounds import float8_value
from linear_cases import E4M3, E5M2, draw

from zeropp_fp8.compute import casts
from zeropp_fp8.compute.gemm import matmul_nt
from zeropp_fp8.compute.operand import Float8Operand

NAMES = {E4M3: "fp8_e4m3", E5M2: "fp8_e5m2"}


def decoded(operand: Float8Operand) -> torch.Tensor:
    """float64 [rows, K], value = code * scale, from the tables of the formats and each element's own scale."""
    values = torch.tensor([float8_value(code, NAMES[operand.dtype]) for code in range(256)], dtype=torch.float64)
    rows, summed = operand.shape
    row, k = torch.arange(rows)[:, None], torch.arange(summed)[None]
    scale = {
        "tensor": lambda: operand.scale[0],
        "row": lambda: operand.scale[row, 0],
        "block": lambda: operand.scale[row, k // 128],
        "tile": lambda: operand.scale[row // 128, k // 128],
    }[operand.granularity]()
    return values[operand.codes.view(torch.uint8)[:, :summed].int()] * scale.double()


CASTS = {
    "tensor": (casts.cast_per_tensor, casts.cast_per_tensor),
    "row": (casts.cast_per_row, casts.cast_per_row),
    "block": (casts.cast_blocks, casts.cast_blocks),
    "block and tile": (casts.cast_blocks, casts.cast_tiles),
}


@pytest.mark.parametrize("dtype_a", [E4M3, E5M2])
@pytest.mark.parametrize("granularity", list(CASTS))
def test_emulated_gemm_is_the_formula(granularity, dtype_a):
    """out[m, n] = sum_k a[m, k] b[n, k] + bias[n], to the error bound of a sum of K products in fp32."""
    cast_a, cast_b = CASTS[granularity]
    for m, n, k in ((1, 1, 1), (3, 5, 40), (130, 140, 300)):
        a = cast_a(draw("student_t", m, k, seed=1), dtype_a)[0]
        b = cast_b(draw("student_t", n, k, seed=2), E4M3)[0]
        a_values, b_values = decoded(a), decoded(b)
        bias = draw("normal", n, seed=3)
        expected = a_values @ b_values.t() + bias.double()
        out = matmul_nt(a, b, torch.float32, bias)
        bound = (k + 4) * 2.0**-24 * (a_values.abs() @ b_values.abs().t() + bias.double().abs())
        assert out.shape == (m, n) and out.dtype == torch.float32
        assert ((out.double() - expected).abs() <= bound).all()
        half = matmul_nt(a, b, torch.bfloat16)
        assert half.dtype == torch.bfloat16
        expected -= bias.double()
        assert ((half.double() - expected).abs() <= bound + 2.0**-8 * expected.abs()).all()


def test_emulated_gemm_is_exact_where_fp32_is():
    """Small integers and scales that are powers of two: every sum is exact, in any order."""
    for cast_a, cast_b in CASTS.values():
        whole = torch.randint(-8, 9, (40, 256), generator=torch.Generator().manual_seed(0)).float()
        whole[:, ::128], whole[0] = 7.0, 7.0  # with an amax of 7, 448 = 7 * 64 gives each group a scale of 1/64
        whole.clamp_(-7, 7)
        a, b = cast_a(whole, E4M3)[0], cast_b(whole.flip(1), E4M3)[0]
        if cast_a is not casts.cast_per_row:
            assert (a.scale == 2.0**-6).all()
        assert torch.equal(matmul_nt(a, b, torch.float32).double(), decoded(a) @ decoded(b).t())


@pytest.mark.parametrize("granularity", ["tensor", "row"])
def test_torch_scaled_mm_agrees_with_the_emulation(granularity):
    """torch's own FP8 GEMM, which the GPU path calls with the same arguments."""
    cast = CASTS[granularity][0]
    a, b = cast(draw("normal", 48, 200, seed=1), E4M3)[0], cast(draw("normal", 64, 200, seed=2), E4M3)[0]
    scale_b = b.scale.t() if granularity == "row" else b.scale
    try:
        out = torch._scaled_mm(a.codes, b.codes.t(), a.scale, scale_b, out_dtype=torch.float32)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has no such FP8 GEMM on the CPU: {error}")
    torch.testing.assert_close(matmul_nt(a, b, torch.float32), out, rtol=1e-5, atol=1e-4)
