"""A linear layer whose weight lies as codes, and LoRA beside it, by the kernel of quantized_linear_kernel.py."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from zeropp_fp8.formats import BlockScaledFormat
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.kernels.launching import Plan
from zeropp_fp8.kernels.linear.code_words import pairing
from zeropp_fp8.kernels.linear.quantized_linear_kernel import Form, quantized_linear_kernel
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight, can_multiply
from zeropp_fp8.kernels.wire.dequantize import SCALE_GROUP
from zeropp_fp8.kernels.wire.launch_tables import interpreted, lookup_table

# Up to so many rows the kernel reads a weight once and is faster than decoding it for a matrix product: on an H200 with
# 16 rows and 4096 x 14336 weights 28 to 38 us against 75 to 91.
FEW_ROWS = 32
# Of a stack its rows of y, each of which reads a matrix anew: 128 matrices of 1536 x 2048 and 256 rows take an H200
# 193 to 293 us, where decoding and torch's grouped product take 495 to 594; 512 rows of 2048 x 768 take longer so.
FEW_CHOICES = 256


@dataclass(frozen=True)
class Launch:
    """How the kernel is cut into programs.

    Attributes:
        warps: of a program; they share the sum over k.
        row_groups: weight rows of a program, in groups of 8; at least 2, for a tensor core takes 16.
        groups: rows of x of a program, in groups of 8.
        times: 16-byte loads of a thread's span of codes, where blocks are long enough: 1 or 2.
        max_registers: of a thread.
    """

    warps: int
    row_groups: int
    groups: int
    times: int
    max_registers: int


def launch_of(count: int, outputs: int, stacked: bool = False) -> Launch:
    """The launch for `count` rows of x and a weight of `outputs` rows.

    Up to 8 rows of x, what matters is that enough loads are under way: 16 rows a program make 256 programs of the 4096
    outputs of a model's smaller matrices, two for each of an H200's 132 multiprocessors, which hold two programs of 256
    threads with 128 registers. Fewer outputs take more warps each. With more rows of x, decoded numbers must be used
    more often than they are loaded: 32 weight rows for 16 or 32 rows of x, at a third of the threads.
    Of a stack a program has one row of x, and there are many programs: 4 warps take a row of 2048 in two steps.
    """
    if stacked:
        return Launch(warps=4, row_groups=2, groups=1, times=2, max_registers=128)
    if count <= 8:
        return Launch(warps=16 if outputs <= 2048 else 8, row_groups=2, groups=1, times=2, max_registers=128)
    return Launch(warps=8, row_groups=4, groups=2 if count <= 16 else 4, times=1, max_registers=255)


# Byte by byte, and where fp32 numbers are multiplied without tensor cores, all is in registers several times over.
_SMALL = Launch(warps=8, row_groups=2, groups=1, times=1, max_registers=128)


@functools.cache
def _has_ptx(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and not interpreted() and torch.cuda.get_device_capability(device) >= (8, 0)


def _loads_of(block_bytes: int, times: int) -> int:
    """The most loads of 16 bytes, up to `times`, that blocks can be cut into; 0 if not even one."""
    return next((t for t in range(times, 0, -1) if block_bytes % (16 * t) == 0), 0)


@functools.cache
def _form_of(
    wire_format: BlockScaledFormat,
    launch: Launch,
    times: int,
    dtype: torch.dtype,
    device: torch.device,
    ordered: bool,
    biased: bool,
    rank_steps: int,
    stacked: bool,
) -> Form:
    bits, scale = wire_format.element.bits, wire_format.scale.name
    block_bytes = wire_format.block_size * bits // 8
    return Form(
        element=wire_format.name,
        scale=scale,
        pairs=16 // bits,
        pairing=pairing(wire_format.name, scale),
        times=times,
        block=block_bytes if times == 0 else block_bytes // (16 * times),
        ordered=ordered,
        biased=biased,
        rank_steps=rank_steps,
        stacked=stacked,
        limit=torch.finfo(dtype).max,
        words=dtype.itemsize == 2,
        ptx=_has_ptx(device) and dtype == torch.bfloat16,
        settle=_has_ptx(device) and dtype.itemsize == 2,
        interpreted=interpreted(),
        warps=launch.warps,
        row_groups=launch.row_groups,
        groups=launch.groups,
    )


class Lora(NamedTuple):
    """An adapter beside a weight [N, K], both matrices in one dtype: scaling * (x A^T) B^T.

    Attributes:
        lora_A: [r, K].
        lora_B: [N, r], contiguous.
        scaling: a factor.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: float


class QuantizedLinear:
    """A linear layer whose weight lies as codes, and LoRA beside it, by the kernel.

    Made for up to 64 rows; more of them have the weight read and decoded again every 32 rows. It takes one launch, with
    LoRA torch's product x A^T before it. What never changes in a layer is looked at once.

    Args:
        weight: [N, K] in int4, int8 or nf4, also with double-quantized scales, in any blocks that divide K. Blocks of a
            multiple of 16 bytes of codes, in slices of at least K elements, are fast; others are read byte by byte.
        bias: [N] in the weight's dtype, or None.
        lora: an adapter, in any dtype, or None. It is read where it lies: what is written there counts at once.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, blocks that do not divide K, another format, or sizes
            beyond the kernel's.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, lora: Lora | None = None) -> None:
        _check_layer(weight, bias, lora)
        self.weight, self.lora, self._bias = weight, lora, None if bias is None else bias.contiguous()
        self._reducing = None if lora is None else lora.lora_A.t()
        wire_format, payload = weight.wire_format, weight.payload[:, weight.offset :]
        blocks = weight.slice_numel // wire_format.block_size
        group_start = align_up(blocks)
        self._fixed = (
            payload,
            payload if weight.row_of_slice is None else weight.row_of_slice,
            lookup_table(weight.device),
            payload if bias is None else self._bias,
            payload if lora is None else lora.lora_B,
            1.0 if lora is None else float(lora.scaling),
            0 if lora is None else lora.lora_B.shape[1],
        )
        self._places = (
            weight.slice_numel,
            payload.stride(0),
            weight.codes_start,
            group_start,
            group_start + 4 * triton.cdiv(blocks, SCALE_GROUP.value),
        )
        self._plans: dict[int | tuple[int, int], Plan] = {}  # by rows of x, of a stack by those of y and of each of x

    def __call__(self, input: Tensor) -> Tensor:
        """[..., K] in the weight's dtype -> [..., N]: summed in fp32 and rounded once, the same bits on every run.

        Raises:
            TypeError: the input has another dtype than the weight.
            ValueError: a shape or device that does not fit, or a gradient that would be asked for.
        """
        lora, rows = self.lora, self._rows(input)
        out = input.new_empty((*input.shape[:-1], self.weight.shape[0]))
        if out.numel():
            self.launch(rows, rows if lora is None else self._reduced(rows, lora.lora_A.dtype), out)
        return out

    def _rows(self, input: Tensor) -> Tensor:
        """The input as the kernel reads it, [M, K]."""
        _check_input(input, self.weight, self._bias, self.lora)
        rows = input.reshape(-1, self.weight.shape[1]).contiguous()
        return rows.clone() if rows.data_ptr() % 16 else rows  # words of two numbers are loaded four at a time

    def _reduced(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """x A^T in LoRA's dtype. `to` takes a microsecond also where there is nothing to do."""
        reduced = torch.mm(rows if rows.dtype == dtype else rows.to(dtype), self._reducing)
        return reduced if reduced.dtype == dtype else reduced.to(dtype)  # autocast has its own mind

    def launch(self, rows: Tensor, reduced: Tensor, out: Tensor) -> None:
        """Write the product of rows [M, K] to out [..., N]; `reduced`: x A^T [M, r], without LoRA anything."""
        count = rows.shape[0]
        if count not in self._plans:
            self._plans[count] = self._plan(rows, count, self.weight.shape[0], self._fixed)
        self._plans[count](rows, reduced, out)

    def _plan(self, rows: Tensor, count: int, outputs: int, fixed: tuple, stacked: bool = False) -> Plan:
        """The launch for rows of x and `count` rows of y."""
        weight, columns = self.weight, rows.shape[1]
        block_bytes = weight.wire_format.block_size * weight.wire_format.element.bits // 8
        by_bytes = weight.slice_numel < columns or not _loads_of(block_bytes, 1)
        launch = _SMALL if by_bytes or weight.dtype == torch.float32 else launch_of(count, outputs, stacked)
        form = _form_of(
            weight.wire_format,
            launch,
            0 if by_bytes else _loads_of(block_bytes, launch.times),
            weight.dtype,
            rows.device,
            weight.row_of_slice is not None,
            self._bias is not None,
            0 if self.lora is None else triton.cdiv(self.lora.lora_B.shape[1], 16 * launch.warps),
            stacked,
        )
        constants = {"FORM": form, "num_warps": launch.warps, "enable_fp_fusion": False}
        if torch.version.hip is None:
            constants["maxnreg"] = launch.max_registers
        grid = triton.cdiv(outputs, 8 * launch.row_groups), count if stacked else triton.cdiv(count, 8 * launch.groups)
        last = (*fixed, count, outputs, columns, *self._places)
        return Plan(quantized_linear_kernel, grid, last, constants)


class QuantizedStack(QuantizedLinear):
    """A stack of matrices that lies as codes, as packed experts do: each row of x goes through some of them.

    One launch, which reads the codes of matrices that rows go through, once per row.

    Args:
        weight: [matrices * N, K], as that of QuantizedLinear.
        matrices: how many.
    """

    def __init__(self, weight: QuantizedWeight, matrices: int) -> None:
        super().__init__(weight)
        self.outputs = weight.shape[0] // matrices

    def __call__(self, input: Tensor, matrix_of: Tensor) -> Tensor:
        """[rows, N] of input [M, K]: row i is input[i // (rows / M)] times matrix `matrix_of[i]`, int [rows].

        Raises:
            TypeError, ValueError: as QuantizedLinear's; rows that are no multiple of M.
        """
        rows, count = self._rows(input), matrix_of.numel()
        each = count // max(1, rows.shape[0])
        if each * rows.shape[0] != count:
            raise ValueError(f"{count} rows of a stack's product are no multiple of the input's {rows.shape[0]}")
        out = input.new_empty((count, self.outputs))
        if out.numel():
            if (count, each) not in self._plans:
                fixed = (*self._fixed[:-1], each)
                self._plans[count, each] = self._plan(rows, count, self.outputs, fixed, stacked=True)
            self._plans[count, each](rows, matrix_of.to(torch.int32), out)
        return out


def _check_layer(weight: QuantizedWeight, bias: Tensor | None, lora: Lora | None) -> None:
    (outputs, columns), wire_format = weight.shape, weight.wire_format
    if not can_multiply(wire_format):
        raise ValueError(f"a product with weights in the format {wire_format} is not there; dequantize it")
    if columns % wire_format.block_size:
        raise ValueError(
            f"a product needs rows of whole blocks: {columns} inputs are no multiple of blocks of "
            f"{wire_format.block_size}"
        )
    bits, slice_bytes = wire_format.element.bits, wire_format.payload_bytes(weight.slice_numel)
    if max(slice_bytes, outputs * (columns * bits // 8) // 16) >= 2**31:
        raise ValueError(
            f"the kernel takes slices below 2^31 bytes and weights below 2^35, not {list(weight.shape)} in {bits} bits "
            f"in slices of {slice_bytes} bytes"
        )
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != weight.dtype or bias.device != weight.device):
        raise ValueError(
            f"the bias must be {weight.dtype} [{outputs}] on {weight.device}, not {bias.dtype} {list(bias.shape)} on "
            f"{bias.device}"
        )
    if lora is None:
        return
    lora_A, lora_B, _ = lora
    rank = lora_A.shape[0]
    fits = lora_A.shape == (rank, columns) and lora_B.shape == (outputs, rank) and lora_B.is_contiguous()
    if not fits or lora_A.dtype != lora_B.dtype or {lora_A.device, lora_B.device} != {weight.device}:
        raise ValueError(
            f"LoRA must be A [r, {columns}] and B [{outputs}, r], contiguous, in one dtype on {weight.device}, not "
            f"{lora_A.dtype} {list(lora_A.shape)} on {lora_A.device} and {lora_B.dtype} {list(lora_B.shape)} with "
            f"strides {lora_B.stride()} on {lora_B.device}"
        )


def _check_input(input: Tensor, weight: QuantizedWeight, bias: Tensor | None, lora: Lora | None) -> None:
    if input.dtype != weight.dtype:
        raise TypeError(f"the input is {input.dtype}, the weight stands for {weight.dtype}")
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"the input's last side must be {weight.shape[1]}, as the weight's {list(weight.shape)}, not "
            f"{list(input.shape)}"
        )
    if input.device != weight.device:
        raise ValueError(f"the input is on {input.device}, the weight on {weight.device}")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (input, bias, *(lora or ())[:2]) if t is not None):
        raise ValueError("quantized_linear has no gradient: call it under torch.no_grad()")


def quantized_linear(
    input: Tensor, weight: QuantizedWeight, bias: Tensor | None = None, use_kernel: bool | None = None
) -> Tensor:
    """`QuantizedLinear` for one call.

    Args:
        input: [..., K] in the weight's dtype.
        weight, bias: as there.
        use_kernel: the Triton kernel instead of torch operations, which decode the whole weight; None: on a GPU.

    Returns:
        [..., N] in the same dtype: x @ W^T + bias (by torch operations rounded as torch.nn.functional.linear does).

    Raises:
        TypeError, ValueError: as there.
    """
    if weight.shape[1] and (input.device.type == "cuda" if use_kernel is None else use_kernel):
        return QuantizedLinear(weight, bias)(input)
    _check_layer(weight, bias, None)
    _check_input(input, weight, bias, None)
    with torch.no_grad():
        return F.linear(input, weight.dequantize(), bias)
