"""Matrices to FP8 operands, with a scale per tensor, row, block of 1 x 128 or tile of 128 x 128.

A matrix [R, C] is wanted in up to two copies: plain [R, C] for GEMMs that sum over C, and transposed [C, R] for those
that sum over R (Hopper's FP8 GEMMs take operands with the summed axis contiguous only). Every cast makes both at once.
Per group of values that share a scale:

    amax    = largest finite magnitude of the group
    scale   = max(amax / largest, 2^-126); 1 where amax is 0
    code    = FP8(clamp(x * (1 / scale), -largest, largest)), to nearest, ties to even; NaN and Inf become NaN, 0x7F

largest is 448 (E4M3) or 57344 (E5M2); both divisions are rounded correctly, and everything is fp32. Scaling per tensor
and per row: "FP8 Formats for Deep Learning" (2022), section 3; blocks and tiles: the DeepSeek-V3 report (2024), section
3.3. On a GPU kernels/ makes the same bytes. Nothing waits for the device: a CUDA graph can capture every cast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.compute.operand import ALIGNMENT, BLOCK, TILE_SCALES, Float8Operand, Granularity, uses_kernels
from zeropp_fp8.formats.float8 import MATRIX_DTYPES, scale_of_amax
from zeropp_fp8.formats.shapes import is_matrix

FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
NAN_CODE = 0x7F  # NaN in both formats; without it, CPU and GPU would write different ones of E5M2's
Operands = tuple[Float8Operand | None, Float8Operand | None]
OperandsAndValues = tuple[Float8Operand | None, Float8Operand | None, Tensor]


def amax_of(matrix: Tensor, use_kernels: bool | None = None) -> Tensor:
    """fp32 [1]: the largest finite magnitude of a matrix, 0 where there is none."""
    matrix = _checked(matrix)
    if _with_kernels(matrix, use_kernels):
        from zeropp_fp8.kernels.casts.cast_tensor import partial_amax

        return partial_amax(matrix).amax(dim=0, keepdim=True)
    return _finite_magnitudes(matrix).amax().view(1)


# -- casts ----------------------------------------------------------------------------------------------------------


def cast_per_tensor(
    matrix: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    plain: bool = True,
    transposed: bool = True,
    use_kernels: bool | None = None,
) -> Operands:
    """One scale for the matrix, shared by both copies.

    Args:
        matrix: bf16, fp16 or fp32 [R, C].
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale: fp32 [1] on the matrix' device, positive: delayed scaling, one pass; values beyond scale * largest
            saturate. None: the matrix' own scale, which takes a pass for its amax.
        amax_out: fp32 [1], becomes max(amax_out, the matrix' largest finite magnitude).
        plain, transposed: which copies to make.
        use_kernels: Triton kernels instead of torch operations; None: on a GPU.

    Returns:
        (operand [R, C], operand [C, R]), None for a copy that is not wanted. K is padded to a multiple of 16.

    Raises:
        TypeError, ValueError: a dtype or shape that is not one of the above.
    """
    matrix = _checked(matrix, dtype)
    _check_scalars(matrix, scale=scale, amax_out=amax_out)
    return per_tensor(matrix, dtype, scale, amax_out, plain, transposed, use_kernels)


def per_tensor(
    matrix: Tensor,
    dtype: torch.dtype,
    scale: Tensor | None,
    amax_out: Tensor | None,
    plain: bool,
    transposed: bool,
    use_kernels: bool | None = None,
    right: tuple[bool, bool] = (False, False),
    own_scale: bool = False,
) -> Operands:
    """`cast_per_tensor` where no history of the matrix is written, of arguments that are as they should be.

    Args:
        right: which of the two copies a GEMM takes as its second operand: kernels make them so.
        own_scale: the operands have a copy of `scale`.
    """
    if (plain or transposed) and (uses_kernels(matrix) if use_kernels is None else _with_kernels(matrix, use_kernels)):
        from zeropp_fp8.kernels.casts.cast_tensor import cast_tensor

        codes, codes_t, scale = cast_tensor(
            matrix.contiguous(), dtype, plain, transposed, scale, amax_out, right, own_scale
        )
        return _operands(matrix, codes, scale, codes_t, scale, "tensor", right)
    if scale is None or amax_out is not None:
        amax = amax_of(matrix, use_kernels)
        if scale is None:
            scale, own_scale = scale_of_amax(amax, dtype), False
        if amax_out is not None:
            torch.maximum(amax_out, amax, out=amax_out)
    if not (plain or transposed):
        return None, None
    quantized = _codes(_checked(matrix, dtype).float(), scale, dtype)
    codes = _padded(quantized, ALIGNMENT) if plain else None
    codes_t = _padded(quantized.t(), ALIGNMENT) if transposed else None
    scale = scale.clone() if own_scale else scale
    return _operands(matrix, codes, scale, codes_t, scale, "tensor")


def cast_groups(
    granularity: Granularity,
    matrix: Tensor,
    dtype: torch.dtype,
    plain: bool = True,
    transposed: bool = True,
    use_kernels: bool | None = None,
) -> Operands:
    """A scale for each group of values, found on the way.

    Args:
        granularity: "row": a scale per row of [R, C] for the plain copy, and a row of [C, R] (a column) for the
            transposed one. "block": per 1 x 128 elements along C for the plain copy, along R for the transposed one.
            "tile": per 128 x 128, shared by both copies (the transposed copy's scales are transposed too).
        others, result, errors: see `cast_per_tensor`; K is padded to a multiple of 16 for rows, else of 128.
    """
    matrix = _checked(matrix, dtype)
    if _with_kernels(matrix, use_kernels):
        from zeropp_fp8.kernels.casts.cast_blocks import cast_blocks
        from zeropp_fp8.kernels.casts.cast_rows import cast_rows

        if granularity == "row":
            codes, codes_t, scale, scale_t = cast_rows(matrix, dtype, plain, transposed)
        else:
            codes, codes_t, scale, scale_t = cast_blocks(matrix, dtype, plain, transposed, granularity == "tile")
        return _operands(matrix, codes, scale, codes_t, scale_t, granularity)
    if granularity == "tile":
        return _tiles_operands(matrix, dtype, plain, transposed)
    values, operand = matrix.float(), _rows_operand if granularity == "row" else _blocks_operand
    return operand(values, dtype) if plain else None, operand(values.t(), dtype) if transposed else None


cast_per_row = functools.partial(cast_groups, "row")
cast_blocks = functools.partial(cast_groups, "block")
cast_tiles = functools.partial(cast_groups, "tile")


@torch.no_grad()
def codes_of(matrix: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 codes [R, C] of a matrix, with given multipliers of decoding (fp32, [1] or broadcasting to [R, C])."""
    if scale.numel() == 1 and matrix.numel():
        operand, _ = cast_per_tensor(matrix, dtype, scale=scale.view(1), transposed=False)
        return operand.codes[:, : matrix.shape[1]]
    return _codes(matrix.float(), scale, dtype)


def swiglu(gate: Tensor, up: Tensor, *wanted) -> OperandsAndValues:
    """silu(gate) * up, rounded to the inputs' dtype after each, then cast per tensor.

    Args:
        gate, up: bf16, fp16 or fp32 [R, C], contiguous, of one dtype, whose history is not written.
        wanted: dtype, scale (None: a cast after the result is made), amax_out, plain, transposed and use_kernels, as
            they should be: see `per_tensor`.

    Returns:
        (operand [R, C], operand [C, R], result [R, C] in the inputs' dtype), None for a copy that is not wanted.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {gate.dtype} {tuple(gate.shape)}, up is {up.dtype} {tuple(up.shape)}")
    return _fused((gate, up, None), lambda: F.silu(gate) * up, *wanted)


def inverse_rms(matrix: Tensor, epsilon: float, use_kernels: bool | None = None) -> Tensor:
    """fp32 [R]: 1 / root of (mean square + epsilon) of each row of a bf16, fp16 or fp32 matrix [R, C]."""
    matrix = _checked(matrix)
    if _with_kernels(matrix, use_kernels):
        from zeropp_fp8.kernels.casts.fused_casts import inverse_rms as with_kernel

        return with_kernel(matrix, epsilon)
    return torch.rsqrt(matrix.float().pow(2).mean(dim=1) + epsilon)


def rms_norm(matrix: Tensor, weight: Tensor, inverse_rms: Tensor, *wanted) -> OperandsAndValues:
    """weight * (matrix / root mean square of each row), then cast per tensor.

    Rounds as LlamaRMSNorm of transformers does: normalization in fp32, its result and the product to the matrix' dtype.

    Args:
        matrix: bf16, fp16 or fp32 [R, C], contiguous; weight: [C], of its dtype. Their history is not written.
        inverse_rms: fp32 [R], 1 / root mean square of each row, as the function of that name gives it.
        wanted, result: see `swiglu`.
    """
    if weight.shape != matrix.shape[1:] or weight.dtype != matrix.dtype:
        raise ValueError(f"weight must be {matrix.dtype} [{matrix.shape[1]}], not {weight.dtype} {list(weight.shape)}")
    inputs = matrix, weight, inverse_rms
    return _fused(inputs, lambda: weight * (matrix.float() * inverse_rms.view(-1, 1)).to(matrix.dtype), *wanted)


def _fused(
    inputs: tuple[Tensor, Tensor, Tensor | None],
    values_of: Callable[[], Tensor],
    dtype: torch.dtype,
    scale: Tensor | None,
    amax_out: Tensor | None,
    plain: bool,
    transposed: bool,
    use_kernels: bool | None = None,
) -> OperandsAndValues:
    """A cast of what `values_of` gives, in one pass over `inputs` (see the kernel) where its scale is known."""
    matrix = inputs[0]
    if scale is None or not ((plain or transposed) and _with_kernels(matrix, use_kernels)):
        values = values_of()
        return *per_tensor(values, dtype, scale, amax_out, plain, transposed, use_kernels), values
    from zeropp_fp8.kernels.casts.fused_casts import fused_cast

    codes, codes_t, values = fused_cast(*inputs, dtype, plain, transposed, scale, amax_out)
    return *_operands(matrix, codes, scale, codes_t, scale, "tensor", (False, True)), values


# -- torch reference ------------------------------------------------------------------------------------------------


def _finite_magnitudes(values: Tensor) -> Tensor:
    """fp32 |values|, 0 where NaN or Inf."""
    return values.float().abs().nan_to_num_(nan=0.0, posinf=0.0)


def _codes(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 codes of fp32 `values`, with multipliers of decoding that broadcast to them."""
    scaled = values * (torch.ones_like(scale) / scale)
    scaled.masked_fill_(values.isfinite().logical_not_(), torch.nan)
    codes = scaled.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    codes.view(torch.uint8).masked_fill_(scaled.isnan(), NAN_CODE)
    return codes


def _rows_operand(values: Tensor, dtype: torch.dtype) -> Float8Operand:
    """The operand of fp32 [rows, K] with a scale per row."""
    scale = scale_of_amax(_finite_magnitudes(values).amax(dim=1, keepdim=True), dtype)
    return Float8Operand(_padded(_codes(values, scale, dtype), ALIGNMENT), scale, tuple(values.shape), "row")


def _blocks_operand(values: Tensor, dtype: torch.dtype) -> Float8Operand:
    """The operand of fp32 [rows, K] with a scale per 1 x 128 elements."""
    rows, summed = values.shape
    blocks = _padded(values, BLOCK).view(rows, _blocks(summed), BLOCK)
    scale = scale_of_amax(_finite_magnitudes(blocks).amax(dim=2), dtype)
    codes = _codes(blocks, scale.unsqueeze(2), dtype).view(rows, -1)
    # cloned, not contiguous(): with a single block the strides would not be those of a matrix
    scale = scale.t().clone(memory_format=torch.contiguous_format).t()
    return Float8Operand(codes, scale, (rows, summed), "block")


def _tiles_operands(matrix: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> Operands:
    """Both operands with a scale per 128 x 128 elements."""
    tiles = (_blocks(matrix.shape[0]), _blocks(matrix.shape[1]))
    values = _padded(matrix.float(), BLOCK, rows_too=True).view(tiles[0], BLOCK, tiles[1], BLOCK)
    scale = scale_of_amax(_finite_magnitudes(values).amax(dim=(1, 3)), dtype)
    quantized = _codes(values, scale[:, None, :, None], dtype).view(tiles[0] * BLOCK, tiles[1] * BLOCK)
    codes = _padded(quantized[: matrix.shape[0]], BLOCK) if plain else None
    codes_t = _padded(quantized[:, : matrix.shape[1]].t(), BLOCK) if transposed else None
    scale, scale_t = (_padded(s, TILE_SCALES, fill=1.0)[:, : s.shape[1]] for s in (scale, scale.t()))
    return _operands(matrix, codes, scale, codes_t, scale_t, "tile")


def _padded(values: Tensor, multiple: int, rows_too: bool = False, fill: float = 0) -> Tensor:
    """[rows, columns rounded up] with `fill` beyond the end, new memory; the rows rounded up as well if asked for."""
    rows, columns = values.shape
    shape = rows + (-rows % multiple if rows_too else 0), columns + -columns % multiple
    if values.dtype in FLOAT8_DTYPES:  # as bytes: torch fills and copies few things in float8
        return _padded(values.view(torch.uint8), multiple, rows_too).view(values.dtype)
    padded = torch.full(shape, fill, dtype=values.dtype, device=values.device)
    padded[:rows, :columns] = values
    return padded


# -- shapes ---------------------------------------------------------------------------------------------------------


def _checked(matrix: Tensor, dtype: torch.dtype = FLOAT8_DTYPES[0]) -> Tensor:
    """The matrix, contiguous and without a history: no gradient goes through a cast."""
    if dtype not in FLOAT8_DTYPES:
        raise TypeError(f"casts are to {FLOAT8_DTYPES}, not to {dtype}")
    if matrix.dtype not in MATRIX_DTYPES:
        raise TypeError(f"casts take matrices of {MATRIX_DTYPES}, not of {matrix.dtype}")
    if not is_matrix(matrix.shape) or 0 in matrix.shape:
        raise ValueError(f"casts take a matrix [R, C] with R, C >= 1, not a tensor of shape {tuple(matrix.shape)}")
    return (matrix.detach() if matrix.requires_grad else matrix).contiguous()


def _check_scalars(matrix: Tensor, **tensors: Tensor | None) -> None:
    device = matrix.device
    for name in tensors:
        tensor = tensors[name]
        if tensor is None or (tensor.shape == (1,) and tensor.dtype == torch.float32 and tensor.device == device):
            continue
        raise ValueError(
            f"{name} must be fp32 [1] on {device}, not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def _with_kernels(matrix: Tensor, use_kernels: bool | None) -> bool:
    return uses_kernels(matrix) if use_kernels is None else use_kernels and matrix.shape[1] != 1


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def _operands(
    matrix: Tensor,
    codes: Tensor | None,
    scale: Tensor | None,
    codes_t: Tensor | None,
    scale_t: Tensor | None,
    granularity: Granularity,
    right: tuple[bool, bool] = (False, False),
) -> Operands:
    rows, columns = matrix.shape
    plain = transposed = None
    if codes is not None:
        own = scale, (rows, columns), granularity
        plain = Float8Operand(None, *own, codes) if right[0] else Float8Operand(codes, *own)
    if codes_t is not None:
        own = scale_t, (columns, rows), granularity
        transposed = Float8Operand(None, *own, codes_t) if right[1] else Float8Operand(codes_t, *own)
    return plain, transposed
