"""The products of a stack of matrices with rows in groups, one per matrix.

    rows   y_s = x_s W_e^T         for each row s of group e: forward and, with W^T, the gradient of the input
    sums   dW_e = g_e^T x_e        over the rows of group e

Hopper multiplies FP8 operands so with a scale per row (torch._scaled_grouped_mm); one scale for all is that of each
row. Elsewhere codes are multiplied in fp32, a group at a time, and numbers in 16 or 32 bits by torch's grouped_mm.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.compute.operand import ALIGNMENT, Float8Operand

Operand = Float8Operand | Tensor


@functools.cache
def has_grouped_gemm(device: torch.device) -> bool:
    """Whether the device multiplies groups of FP8 rows itself: capability 9.0."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


@dataclass(frozen=True)
class Groups:
    """Rows in groups, one per matrix of a stack.

    Attributes:
        matrices: of the stack.
        ends: int32 [matrices], where each group ends: multiples of 16, none of them empty, for sums over FP8 rows; the
            last is the number of rows.
        row_of: int64 [rows given]: where each row that was given stands. Others are zeros.
        given_of: int64 [rows]: which one stands there, or the number of those given.
    """

    matrices: int
    ends: Tensor
    row_of: Tensor
    given_of: Tensor

    @property
    def rows(self) -> int:
        """Their number."""
        return self.given_of.numel()

    @classmethod
    def of(cls, matrix_of: Tensor, matrices: int) -> Groups:
        """Groups of rows that go through `matrix_of`, int64 [rows given]. Waits for no device."""
        device, given = matrix_of.device, matrix_of.numel()
        in_order, order = matrix_of.to(torch.int16).sort(stable=True)  # two passes instead of eight
        ends_given = torch.searchsorted(in_order, torch.arange(matrices, dtype=torch.int16, device=device), right=True)
        numbers = ends_given.diff(prepend=ends_given.new_zeros(1))
        padded = (numbers.clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        ends = padded.cumsum(0)
        shift = (ends - padded) - (ends_given - numbers)
        rows = given + ALIGNMENT * matrices
        rows += -rows % ALIGNMENT
        places = torch.arange(given, device=device) + shift[in_order.long()]
        ends[-1] = rows
        row_of = torch.empty_like(order).scatter_(0, order, places)
        return cls(matrices, ends.int(), row_of, torch.full((rows,), given, device=device).scatter_(0, places, order))

    def spread(self, given: Tensor) -> Tensor:
        """[rows, ...] of [rows given, ...], with zeros between groups."""
        return given.new_zeros(self.rows, *given.shape[1:]).index_copy(0, self.row_of, given)

    def product(self, a: Operand, b: Operand, dtype: torch.dtype, fast_accumulation: bool = False) -> Tensor:
        """[rows, N] of `dtype`: each row of a[rows, K] times its matrix, [K, N].

        `b`: the stack, as [matrices * N, K], or as [N, matrices * K].
        """
        if isinstance(a, Tensor):
            return F.grouped_mm(a.to(dtype), self._stack(b.to(dtype), a.shape[1]), offs=self.ends)
        stack, by_matrix = self._stack(b.codes, a.shape[1]), b.codes.shape[1] == a.shape[1]
        scale = b.scale.view(self.matrices, -1) if by_matrix and b.scale.numel() > 1 else b.scale.view(1, -1)
        scales = a.scale.view(-1), scale.expand(self.matrices, stack.shape[2])
        if self._on_tensor_cores(dtype, a.codes.device):
            wanted = scales[0].expand(self.rows).contiguous(), scales[1].contiguous()
            return torch._scaled_grouped_mm(
                a.codes, stack, *wanted, offs=self.ends, out_dtype=dtype, use_fast_accum=fast_accumulation
            )
        values = a.dequantize()
        found = [values[own] @ (stack[e].float() * scales[1][e]) for e, own in self._each()]
        return torch.cat(found).to(dtype)

    def sum(self, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        """[matrices, M, N] of `dtype`: a[M, rows] @ b[N, rows]^T over the rows of each group."""
        if isinstance(a, Tensor):
            return F.grouped_mm(a.to(dtype), b.to(dtype).t(), offs=self.ends)
        if self._on_tensor_cores(dtype, a.codes.device):
            wanted = [each.scale.view(-1).expand(each.shape[0]).repeat(self.matrices) for each in (a, b)]
            return torch._scaled_grouped_mm(a.codes, b.codes.t(), *wanted, offs=self.ends, out_dtype=dtype)
        left, right = a.dequantize(), b.dequantize()
        return torch.stack([left[:, own] @ right[:, own].t() for _, own in self._each()]).to(dtype)

    def _stack(self, matrix: Tensor, summed: int) -> Tensor:
        """The stack as a view [matrices, K, N]."""
        if matrix.shape[1] == summed:
            return matrix.unflatten(0, (self.matrices, -1)).transpose(1, 2)
        return matrix.unflatten(1, (self.matrices, summed)).permute(1, 2, 0)

    def _on_tensor_cores(self, dtype: torch.dtype, device: torch.device) -> bool:
        return dtype == torch.bfloat16 and has_grouped_gemm(device)

    def _each(self) -> list[tuple[int, slice]]:
        ends = self.ends.tolist()
        return [(e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends], ends))]
