"""The MX formats (OCP Microscaling v1.0): 32 elements share a power of two.

value = X * P with the block's scale X in E8M0 (e8m0.py) and elements P in FP8, FP6, FP4 or INT8 (mini_float.py).

                 P                                        largest    NaN and Inf
    mxfp8_e4m3   1 sign, 4 exponent, 3 mantissa bits      448        become NaN, the block's other elements stay
    mxfp8_e5m2   1, 5, 2                                  57344      are kept
    mxfp6_e2m3   1, 2, 3                                  7.5        make the block's X, and so all of it, NaN
    mxfp6_e3m2   1, 3, 2                                  28         the same
    mxfp4        1, 2, 1                                  6          the same
    mxint8       two's complement / 64, without -128      127 / 64   the same

Payload of a row of n elements, nb = ceil(n / 32); the last block is filled up with zeros:

    [ nb scales | zeros up to a multiple of 16 | codes of nb * 32 elements | zeros up to a multiple of 16 ]

Decoding clamps X * P to the finite range of the target dtype. `mean_of_rows` does not: where a product lies beyond
fp32's range, the mean is Inf.

The axis matters: rounding and transposing do not commute, so a matrix that is summed over both axes (a weight in
forward and backward) is quantized along each. GPUs before Blackwell have no arithmetic on these formats: there they are
for storage and transport, and `round_trip` is how computing with them is imitated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats.base import check_encodable
from zeropp_fp8.formats.block_scaled import BlockScaledFormat, copy_blocks, padded_blocks
from zeropp_fp8.formats.chunks import Scratch, pieces
from zeropp_fp8.formats.e8m0 import SCALE_MODES, E8M0Scale
from zeropp_fp8.formats.mini_float import FixedPointElement, MiniFloatElement
from zeropp_fp8.formats.noise import Seed, draw_seed

MX_BLOCK = 32

_ELEMENTS = {
    "mxfp8_e4m3": lambda: MiniFloatElement(4, 3, 448.0, special="nan"),
    "mxfp8_e5m2": lambda: MiniFloatElement(5, 2, 57344.0, special="ieee"),
    "mxfp6_e2m3": lambda: MiniFloatElement(2, 3, 7.5),
    "mxfp6_e3m2": lambda: MiniFloatElement(3, 2, 28.0),
    "mxfp4": lambda: MiniFloatElement(2, 1, 6.0),
    "mxint8": FixedPointElement,
}
MX_NAMES = tuple(_ELEMENTS)


class MXFormat(BlockScaledFormat):
    """An MX format: a wire format, and the rounding that computing with it needs.

    Args:
        name: one of MX_NAMES.
        scale_mode: "rceil" (nothing is clamped) or "floor" (the Microscaling paper's); see e8m0.py.
        rounding: of the elements, one of ROUNDING_MODES.
        block_size: 32, the only one there is.
        hadamard: False; there for the options of all formats to be the same.

    Raises:
        ValueError: an option value that does not exist.
    """

    def __init__(
        self,
        name: str,
        scale_mode: str = "rceil",
        rounding: str = "nearest",
        block_size: int = MX_BLOCK,
        hadamard: bool = False,
    ) -> None:
        if scale_mode not in SCALE_MODES:
            raise ValueError(f"{name}: scale_mode must be one of {SCALE_MODES}, got {scale_mode!r}")
        if type(block_size) is not int or block_size != MX_BLOCK:
            raise ValueError(f"{name}: block_size is {MX_BLOCK} in every MX format, got {block_size!r}")
        if hadamard:
            raise ValueError(f"{name}: MX formats have no rotation; leave hadamard out, or use int8 or int4")
        element = _ELEMENTS[name]()
        scale = E8M0Scale(element.largest, scale_mode, spoiled_by_special=not element.holds_special)
        super().__init__(name, element, MX_BLOCK, rounding=rounding, scale=scale)
        self.scale_mode = scale_mode

    def __repr__(self) -> str:
        extras = [self.scale_mode] if self.rounding == "nearest" else [self.scale_mode, self.rounding]
        return f"{self.name} ({', '.join(extras)})"

    def code_count(self, numel: int) -> int:
        """Whole blocks, filled up with zeros."""
        return -(-numel // MX_BLOCK) * MX_BLOCK

    # -- the two steps of quantizing ----------------------------------------------------------------------------------

    @torch.no_grad()
    def block_scales(self, blocks: Tensor) -> Tensor:
        """X of fp32 `blocks` [..., 32] as fp32 [...]: a power of two, or NaN for a block spoiled by a NaN or Inf."""
        rows = blocks.detach().float().reshape(1, -1, MX_BLOCK).clone()
        scale_bytes = torch.empty(1, rows.shape[1], dtype=torch.uint8, device=blocks.device)
        if rows.numel():
            self.scale.scale_(rows, scale_bytes, Scratch(blocks.device))
        return self.scale.decode(scale_bytes).view(blocks.shape[:-1])

    @torch.no_grad()
    def round_to_element(self, scaled: Tensor, noise: Tensor | None = None) -> Tensor:
        """P of fp32 `scaled` [...], which are values / X: rounded to the element's grid, clamped to its largest number.

        NaN stays NaN. Inf stays in E5M2 and becomes NaN elsewhere.

        Args:
            noise: fp32 in [0, 1) of the same shape, for stochastic rounding.

        Raises:
            ValueError: the rounding is stochastic and there is no noise.
        """
        if self.needs_seed and noise is None:
            raise ValueError(f"{self.name}: stochastic rounding needs noise")
        rows = scaled.detach().float().reshape(1, -1).clone()
        noise = noise.reshape(1, -1) if self.needs_seed else None
        return self.element.round_(rows, self.rounding, noise, Scratch(scaled.device)).view(scaled.shape)

    # -- whole tensors, along any axis --------------------------------------------------------------------------------

    @torch.no_grad()
    def quantize(self, tensor: Tensor, axis: int = -1, generator: torch.Generator | None = None) -> MXTensor:
        """Quantize in blocks of 32 along `axis`; the last block is filled up with zeros.

        Args:
            tensor: fp32, bf16 or fp16 of any shape but a scalar's, also empty.
            generator: source of the seed for stochastic rounding, a CPU generator.

        Raises:
            TypeError: another dtype.
            IndexError: an axis that the tensor does not have.
        """
        check_encodable(tensor, self.name)
        matrix, axis = _as_rows(tensor, axis)
        rows, numel = matrix.shape
        num_blocks = self.blocks(numel)[0]
        scales = torch.empty(rows, num_blocks, dtype=torch.uint8, device=tensor.device)
        codes = torch.empty(rows, self.code_bytes(numel), dtype=torch.uint8, device=tensor.device)
        if matrix.numel():
            self.encode_into(matrix, draw_seed(generator) if self.needs_seed else None, scales, codes)
        outer = tensor.shape[:axis] + tensor.shape[axis + 1 :]
        return MXTensor(self, codes.view(*outer, codes.shape[1]), scales.view(*outer, num_blocks), tensor.shape, axis)

    @torch.no_grad()
    def round_trip(self, tensor: Tensor, axis: int = -1, seed: Seed | None = None) -> Tensor:
        """`quantize` and `dequantize` to the tensor's own dtype, without packing codes in between.

        Args:
            seed: for stochastic rounding; None: drawn from torch's default generator.

        Returns:
            a new contiguous tensor of the same shape and dtype.

        Raises:
            TypeError, IndexError: as `quantize`.
        """
        check_encodable(tensor, self.name)
        matrix, axis = _as_rows(tensor, axis)
        rounded = torch.empty_like(matrix, memory_format=torch.contiguous_format)
        if matrix.numel():
            self._round_into(matrix, draw_seed(None) if self.needs_seed and seed is None else seed, rounded)
        outer = tensor.shape[:axis] + tensor.shape[axis + 1 :]
        return rounded.view(*outer, tensor.shape[axis]).movedim(-1, axis).contiguous()

    def _round_into(self, matrix: Tensor, seed: Seed | None, rounded: Tensor) -> None:
        rows, numel = matrix.shape
        num_blocks = self.blocks(numel)[0]
        limit = torch.finfo(matrix.dtype).max
        scratch = Scratch(matrix.device)
        for row, block in pieces(rows, num_blocks, MX_BLOCK, matrix.device):
            blocks = padded_blocks(matrix[row], block, MX_BLOCK, scratch)
            scale_bytes = scratch("scale bytes", blocks.shape[:-1], torch.uint8)
            self.scale.scale_(blocks, scale_bytes, scratch)
            scaled = blocks.view(blocks.shape[0], -1)
            noise = self._noise(seed, row, block.start * MX_BLOCK, scaled, scratch)
            self.element.round_(scaled, self.rounding, noise, scratch)
            scales = self.scale.decode(scale_bytes)
            piece_limit = limit if self._may_exceed(scales, limit, rotated=False) else None
            copy_blocks(self._times_scales(blocks, scales, piece_limit), rounded[row], block)


@dataclass(frozen=True)
class MXTensor:
    """A tensor quantized by `MXFormat.quantize`.

    The axis that blocks lie along comes last in `codes` and `scales`; the others keep their order before it.

    Attributes:
        mx_format: the format that made it.
        codes: uint8 [*other axes, blocks * 4 * bits of an element], packed; whole blocks.
        scales: uint8 E8M0 [*other axes, blocks].
        shape: of the tensor.
        axis: not negative.
    """

    mx_format: MXFormat
    codes: Tensor
    scales: Tensor
    shape: torch.Size
    axis: int

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The values, contiguous, of `shape` and `dtype` (fp32, bf16 or fp16); finite ones clamped to its range."""
        outer = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        rows, numel = math.prod(outer), self.shape[self.axis]
        values = torch.empty(rows, numel, dtype=dtype, device=self.codes.device)
        if values.numel():
            scales = self.mx_format.scale.decode(self.scales.reshape(rows, -1))
            self.mx_format.decode_into(scales, self.codes.reshape(rows, -1), values)
        return values.view(*outer, numel).movedim(-1, self.axis).contiguous()

    def num_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.numel() + self.scales.numel()


def _as_rows(tensor: Tensor, axis: int) -> tuple[Tensor, int]:
    """([product of the other axes, length of `axis`], the axis counted from the front)."""
    if not -tensor.dim() <= axis < tensor.dim():
        raise IndexError(f"axis {axis} of a tensor with {tensor.dim()} axes")
    axis %= tensor.dim()
    moved = tensor.detach().movedim(axis, -1)
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1]), axis
