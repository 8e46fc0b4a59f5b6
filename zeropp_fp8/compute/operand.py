"""One operand of an FP8 GEMM: the codes of a matrix, and the scales that decode them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ALIGNMENT = 16  # of a row in bytes, for FP8 GEMMs
BLOCK = 128  # elements of a block along the summed axis, and rows of a tile
# cuBLAS reads the scales per tile in rows of a multiple of 4 numbers.
TILE_SCALES = 4
Granularity = Literal["tensor", "row", "block", "tile"]


class Float8Operand:
    """A matrix [rows, K] in FP8, where K is the axis that the GEMM sums over: value = code * scale.

    Hopper's FP8 GEMMs take both operands with K contiguous, out[M, N] = a[M, K] @ b[N, K]^T, so a matrix that takes
    part in sums over both of its axes is kept as two operands, and each is quantized along its own K.

    Attributes:
        codes: float8_e4m3fn or float8_e5m2 [rows, K rounded up], contiguous; zeros beyond K.
        right: codes.t(), as which a GEMM takes its second operand. Of the two, one is given, and the other one is made
            when it is asked for.
        scale: fp32, the multiplier of decoding: [1] per tensor; [rows, 1] per row; [rows, padded K / 128] per block of
            1 x 128, with the rows contiguous, stride (1, rows), as cuBLAS reads it; [ceil(rows / 128), ceil(K / 128)]
            per tile of 128 x 128, with stride(0) rounded up to a multiple of 4, as cuBLAS reads it, and 1 in between.
        shape: (rows, K) without padding.
        granularity: what shares a scale. It cannot be told from the scale's shape: with K = 128 a row is a block.
    """

    __slots__ = ("codes", "granularity", "right", "scale", "shape")

    def __init__(
        self,
        codes: Tensor | None,
        scale: Tensor,
        shape: tuple[int, int],
        granularity: Granularity,
        right: Tensor | None = None,
    ) -> None:
        if right is None:
            self.codes = codes
        else:
            self.right = right
        self.scale, self.shape, self.granularity = scale, shape, granularity

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("codes", "right"):
            raise AttributeError(name)
        made = (self.right if name == "codes" else self.codes).t()
        setattr(self, name, made)
        return made

    @property
    def dtype(self) -> torch.dtype:
        """The FP8 format."""
        return self.codes.dtype

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[rows, K] in `dtype`: code * scale in fp32, rounded once; padding is dropped. For tests and emulation."""
        rows, summed = self.shape
        values = self.codes[:, :summed].float()
        scale = self.scale
        if self.granularity == "tile":
            scale = scale.repeat_interleave(BLOCK, dim=0)[:rows]
        if self.granularity in ("block", "tile"):
            scale = scale.repeat_interleave(BLOCK, dim=1)[:, :summed]
        return values.mul_(scale).to(dtype)

    def transposed(self) -> Float8Operand:
        """The operand for sums over the rows, of the same codes; only where the scales do not depend on the axis.

        Raises:
            ValueError: scales are those of rows or blocks, which belong to one axis.
        """
        if self.granularity not in ("tensor", "tile"):
            raise ValueError(
                f"an operand with a scale per {self.granularity} cannot be transposed: quantize along both axes"
            )
        rows, summed = self.shape
        by_tile, codes = self.granularity == "tile", self.codes
        padded = rows + -rows % (BLOCK if by_tile else ALIGNMENT)
        if codes.shape[1] == summed and uses_kernels(codes):
            from zeropp_fp8.kernels.casts.transpose import transpose

            right = torch.empty_strided((padded, summed), (1, padded), dtype=codes.dtype, device=codes.device)
            transpose(codes, right)
        else:  # as bytes: torch copies few things in float8
            bytes_t = torch.zeros(summed, padded, dtype=torch.uint8, device=codes.device)
            bytes_t[:, :rows] = codes.view(torch.uint8)[:, :summed].t()
            right = bytes_t.view(codes.dtype).t()
        scale = self.scale.t().contiguous() if by_tile else self.scale
        return Float8Operand(None, scale, (summed, rows), self.granularity, right)


def uses_kernels(matrix: Tensor) -> bool:
    """Whether casts of a matrix are left to Triton's kernels."""
    # Triton compiles an argument that is 1 into the kernel. ptxas (CUDA 12.8) crashes on tiles of a single column then,
    # for which torch is good enough.
    return matrix.is_cuda and matrix.shape[1] != 1
