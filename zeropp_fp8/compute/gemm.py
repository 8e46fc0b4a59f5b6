"""The one GEMM of this folder: out[M, N] = a[M, K] @ b[N, K]^T, both operands with K contiguous.

Hopper multiplies FP8 matrices in this layout only. Where the device has no FP8 GEMM for an operand's scales the same
products are formed in fp32, from the same codes: results agree to the rounding of the output.

Measured (torch 2.11, H200, at 8192 x 4096 x 4096, against 811 TFLOP/s in bf16): a scale per tensor 1505, a scale per
row 1529, blocks x tiles 1095, blocks x blocks 812 TFLOP/s.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.compute.operand import Float8Operand, Granularity

ROW_ALIGNMENT = 4  # rows of an operand with scales of blocks


@functools.cache
def has_fp8_gemm(device: torch.device, granularity: Granularity) -> bool:
    """Whether the device multiplies FP8 operands with such scales itself.

    A scale per tensor needs compute capability 8.9, a scale per row 9.0, blocks and tiles exactly 9.0 and CUDA 12.9.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    capability = torch.cuda.get_device_capability(device)
    if granularity == "tensor":
        return capability >= (8, 9)
    if granularity == "row":
        return capability >= (9, 0)
    cuda = tuple(int(part) for part in torch.version.cuda.split(".")[:2])
    return capability == (9, 0) and cuda >= (12, 9) and hasattr(F, "scaled_mm")


def execution(device: torch.device, scaling: str) -> str:
    """How the GEMMs of a kind of scaling run on a device, in words."""
    if scaling == "mx":
        return "MX is emulated: operands are rounded, the GEMM runs in the tensors' own 16 or 32 bits"
    granularity = {"per_channel": "row", "block": "block"}.get(scaling, "tensor")
    if has_fp8_gemm(device, granularity):
        return "FP8 tensor cores"
    return f"emulated in fp32: no FP8 GEMM for scales per {granularity} on this device ({device.type})"


def matmul_nt(
    a: Float8Operand | Tensor,
    b: Float8Operand | Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
) -> Tensor:
    """a[M, K] @ b[N, K]^T + bias, [M, N] of `out_dtype`.

    Args:
        a, b: FP8 operands of the same kind of scales (blocks also with tiles), or tensors: numbers as they are, or
            rounded values (MX, which no GPU before Blackwell can multiply itself).
        bias: [N].
        fast_accumulation: let tensor cores add partial sums with about 14 bits; 6 % faster.
    """
    if isinstance(a, Tensor):
        a, b_t = a.to(out_dtype), b.to(out_dtype).t()  # MX's rounded values have at most 8 significant bits
        return torch.mm(a, b_t) if bias is None else torch.addmm(bias.to(out_dtype), a, b_t)
    codes, granularity = a.codes, a.granularity
    if not has_fp8_gemm(codes.device, granularity):  # blocks are multiplied where tiles are
        out = _emulated(a, b).to(out_dtype)
    elif granularity == "tensor":
        # cuBLAS adds a bias in 16 bits only.
        fused = bias if bias is not None and bias.dtype == out_dtype != torch.float32 else None
        out = torch._scaled_mm(
            codes, b.right, a.scale, b.scale, fused, out_dtype=out_dtype, use_fast_accum=fast_accumulation
        )
        bias = bias if fused is None else None
    elif granularity == "row":
        scales = a.scale, b.scale.t()
        out = torch._scaled_mm(codes, b.right, *scales, out_dtype=out_dtype, use_fast_accum=fast_accumulation)
    else:
        out = _blockwise(a, b, out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def _emulated(a: Float8Operand, b: Float8Operand) -> Tensor:
    """fp32 [M, N]. Codes are exact in TF32 too, so it does not matter what torch may multiply fp32 with."""
    if a.granularity in ("tensor", "row"):
        k = a.shape[1]
        product = a.codes[:, :k].float() @ b.codes[:, :k].float().t()
        return product.mul_(a.scale).mul_(b.scale.t() if b.granularity == "row" else b.scale)
    return a.dequantize() @ b.dequantize().t()


def _blockwise(a: Float8Operand, b: Float8Operand, out_dtype: torch.dtype) -> Tensor:
    rows = a.codes.shape[0]
    a = _with_whole_rows(a)
    scale_a, recipe_a = _block_scale(a)
    scale_b, recipe_b = _block_scale(b)
    out = F.scaled_mm(
        a.codes,
        b.right,
        scale_a=scale_a,
        scale_recipe_a=recipe_a,
        scale_b=scale_b,
        scale_recipe_b=recipe_b,
        output_dtype=out_dtype,
    )
    return out[:rows]


def _with_whole_rows(operand: Float8Operand) -> Float8Operand:
    """Rows padded with zeros to a multiple of 4: scales of blocks have rows contiguous, and cuBLAS wants 16 bytes.

    Numbers of tokens that are no multiple of 4 are those of generation; its operands are small.
    """
    rows = operand.codes.shape[0]
    padding = -rows % ROW_ALIGNMENT
    if not padding or operand.granularity != "block":
        return operand
    codes = F.pad(operand.codes.view(torch.uint8), (0, 0, 0, padding)).view(operand.dtype)
    scale = F.pad(operand.scale.t(), (0, padding)).t()
    return Float8Operand(codes, scale, (rows + padding, operand.shape[1]), "block")


def _block_scale(operand: Float8Operand):
    """(scale as cuBLAS reads it, its name): of tiles [K / 128 rounded up to 4, rows / 128] with K contiguous."""
    if operand.granularity == "block":
        return operand.scale, F.ScalingType.BlockWise1x128
    scale = operand.scale
    columns = scale.shape[1] + -scale.shape[1] % 4
    if scale.stride() == (columns, 1):  # casts.py leaves the gap for it
        scale = scale.as_strided((scale.shape[0], columns), (columns, 1))
    else:
        scale = F.pad(scale, (0, columns - scale.shape[1]))
    return scale.t(), F.ScalingType.BlockWise128x128
