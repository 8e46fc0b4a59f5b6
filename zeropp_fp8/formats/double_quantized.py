"""Double quantization: the scales of blocks are quantized themselves, to 8 bits with an fp32 scale per 256 of them.

QLoRA (arXiv 2305.14314), section 3, as in bitsandbytes' `compress_statistics`. With s the exact scales of a row's nb
blocks (largest magnitude / largest code), G = 256 and everything in fp32:

    offset         = mean of s over the whole tensor
    group_scale[g] = largest |s - offset| of the blocks g * G ... g * G + G - 1
    q[b]           = code of the level of the signed dynamic type (dynamic_map.py) nearest to
                     (s[b] - offset) * (1 / group_scale[b // G])
    scale of block b that decoding uses = level[q[b]] * group_scale[b // G] + offset, not below 0

The product is rounded, then the sum. Payload of a row of n elements, ng = ceil(nb / 256):

    [ nb bytes q | zeros up to a multiple of 16 | ng fp32 group scales | fp32 offset | zeros up to a multiple of 16 |
      codes | zeros up to a multiple of 16 ]

Codes of NF4 are chosen with the exact scale, as bitsandbytes does, which costs 0.02 dB; others with the scale that
decoding uses, and cut off at the largest code (int8 in blocks of 64 would lose 0.5 dB of normal numbers).

All 256 codes are in use, so the group of a block with NaN or Inf is marked by the sign of its group scale, -0 included.
There code 127, whose level is 0, stands for NaN, and finite blocks that would have it take 128, 5.5e-7 of the group
scale away. Exactly that block decodes to NaN; offset and group scales are those of the finite blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.config.sections import DOUBLE_QUANTIZED_NAMES
from zeropp_fp8.formats.base import WireFormat, align_up, part_of
from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.dynamic_map import ZERO_CODE, dynamic_levels, nearest_dynamic
from zeropp_fp8.formats.nf4 import NF4Format
from zeropp_fp8.formats.scales import divide_
from zeropp_fp8.formats.tables import fp32_table

SCALE_GROUP = 256
_LARGEST = torch.finfo(torch.float32).max


class DoubleQuantizedScale:
    """The bytes of a row's scales: [nb codes | zeros to 16 | ng fp32 group scales | fp32 offset]."""

    name = "double"

    def num_bytes(self, num_blocks: int) -> int:
        return align_up(num_blocks) + 4 * (_groups(num_blocks) + 1)

    def offset_of(self, scales: Tensor) -> Tensor:
        """fp32 [rows, 1]: the mean of the finite ones of fp32 `scales` [rows, nb]; 0 where there is none.

        Added in fp64, pairwise in a fixed order: torch's own sum depends on the device and the number of threads, and
        the ranks that hold parts of a tensor must have the same offset.
        """
        finite = scales.isfinite()
        total = scales.double().masked_fill_(finite.logical_not(), 0.0)
        while total.shape[1] > 1:
            total = F.pad(total, (0, total.shape[1] % 2)).unflatten(1, (2, -1))
            total = total[:, 0] + total[:, 1]
        return (total / finite.sum(dim=1, keepdim=True).clamp_min_(1)).float()

    def encode(self, scales: Tensor, offset: Tensor, num_blocks: int, scale_bytes: Tensor) -> None:
        """Write fp32 scales [rows, blocks], not negative, and offsets [rows, 1] to uint8 [rows, num_bytes(num_blocks)].

        There may be fewer scales than blocks: the others, which lie beyond the end of the tensor and hold zeros, get
        the code of the level 0 and do not count in their group.
        """
        rows, groups = scales.shape[0], _groups(num_blocks)
        beyond = (0, groups * SCALE_GROUP - scales.shape[1])
        spoiled = (scales < math.inf).logical_not()
        deviations = F.pad((scales - offset).masked_fill_(spoiled, 0.0), beyond).view(rows, groups, SCALE_GROUP)
        spoiled = F.pad(spoiled, beyond).view(rows, groups, SCALE_GROUP)
        marked = spoiled.any(dim=2)
        group_scales = deviations.abs().amax(dim=2)
        divide_(deviations, group_scales)
        codes = nearest_dynamic(deviations)
        codes += (codes == ZERO_CODE) & marked.unsqueeze(2)
        codes.masked_fill_(spoiled, ZERO_CODE)
        group_scales = torch.where(marked, -group_scales, group_scales)

        start = align_up(num_blocks)
        scale_bytes[:, :num_blocks] = codes.view(rows, -1)[:, :num_blocks]
        scale_bytes[:, num_blocks:start] = 0
        scale_bytes[:, start:] = torch.cat([group_scales, offset], dim=1).view(torch.uint8)

    def decode(self, scale_bytes: Tensor, num_blocks: int) -> Tensor:
        """fp32 [rows, num_blocks] of uint8 [rows, num_bytes(num_blocks)]; NaN for a block that had NaN or Inf."""
        codes = scale_bytes[:, :num_blocks].to(torch.int32)
        numbers = scale_bytes[:, align_up(num_blocks) :].clone(memory_format=torch.contiguous_format)
        numbers = numbers.view(torch.float32)
        group_scales = numbers[:, :-1].repeat_interleave(SCALE_GROUP, dim=1)[:, :num_blocks]
        scales = fp32_table(dynamic_levels(), codes.device)[codes] * group_scales.abs()
        # Upwards the sum may pass the largest number by a rounding error, if that is the tensor's largest.
        scales = (scales + numbers[:, -1:]).clamp_(0.0, _LARGEST)
        return scales.masked_fill_(group_scales.signbit() & (codes == ZERO_CODE), math.nan)


class DoubleQuantizedFormat(BlockScaledFormat):
    """A block-scaled format whose scales are quantized, see above.

    Args:
        plain: the same format with scales as they are: its elements and block size are taken over.

    Raises:
        ValueError: `plain` is not one of DOUBLE_QUANTIZED_NAMES, rotates, or has one scale for all elements.
    """

    def __init__(self, plain: WireFormat) -> None:
        name = plain.name
        if name not in DOUBLE_QUANTIZED_NAMES:
            raise ValueError(f"{name}: double_quantize is there for {', '.join(DOUBLE_QUANTIZED_NAMES)}")
        if plain.hadamard:
            raise ValueError(f"{name}: double_quantize cannot be combined with hadamard")
        if plain.block_size is None:
            raise ValueError(f"{name}: double_quantize cannot be combined with block_size=None, which has one scale")
        super().__init__(name, plain.element, plain.block_size, scale=DoubleQuantizedScale())
        self._exact_codes = isinstance(plain, NF4Format)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, double-quantized scales)"

    def options(self) -> dict[str, Any]:
        return {"name": self.name, "block_size": self.block_size, "double_quantize": True}

    @property
    def bits_per_element(self) -> float:
        return self.element.bits + (8 + 32 / SCALE_GROUP) / self.block_size

    @property
    def granule(self) -> int:
        return self.block_size * SCALE_GROUP

    def scale_bytes(self, numel: int) -> int:
        return self.scale.num_bytes(self.blocks(numel)[0])

    def granule_runs(self, numel: int) -> list[tuple[int, int]]:
        groups = numel // self.granule  # of blocks: a code for each block, and an fp32 number
        return [
            (0, SCALE_GROUP),
            (groups * SCALE_GROUP, 4),
            (self._codes_start(numel), self.code_bytes(numel) // groups),
        ]

    def shared_bytes(self, numel: int) -> slice:
        end = self.scale_bytes(numel)
        return slice(end - 4, end)  # the offset

    def _decode_scales(self, scale_bytes: Tensor, numel: int) -> Tensor:
        return self.scale.decode(scale_bytes, self.blocks(numel)[0])

    def encode_into(self, matrix: Tensor, scales: Tensor, codes: Tensor) -> None:
        exact = self._exact_scales(matrix)
        self._encode_scaled(matrix, exact, self.scale.offset_of(exact), scales, codes)

    def _encode_part(self, flat: Tensor, first: int, numel: int, out: Tensor) -> None:
        exact = self._exact_scales(part_of(flat, 0, max(1, flat.numel())))  # an empty tensor is as one of a zero
        first_block = first // self.block_size
        own = exact[:, first_block : first_block + numel // self.block_size]
        scales, codes = self._places(numel)
        out[:, scales.stop : codes.start] = 0  # there is nothing after the codes of whole granules
        part = part_of(flat, first, numel)
        self._encode_scaled(part, own, self.scale.offset_of(exact), out[:, scales], out[:, codes])

    def _exact_scales(self, matrix: Tensor) -> Tensor:
        """fp32 [rows, blocks]: largest magnitude / largest code of the blocks of [rows, n]; not finite where it is not.

        No copy of the matrix is made: it may be a whole tensor of which this rank stores a part.
        """
        whole = matrix.shape[1] // self.block_size * self.block_size
        amax = [_amax(matrix[:, :whole].unflatten(1, (-1, self.block_size)))] if whole else []
        if whole < matrix.shape[1]:
            amax.append(_amax(matrix[:, None, whole:]))
        amax = torch.cat(amax, dim=1)
        return amax / torch.full_like(amax, self.element.largest)

    def _encode_scaled(self, matrix: Tensor, exact: Tensor, offset: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write the scales and codes of `matrix` [rows, n], of whose blocks the first have the scales `exact`."""
        num_blocks = self.blocks(matrix.shape[1])[0]
        self.scale.encode(exact, offset, num_blocks, scales)
        if self._exact_codes:
            divisors = F.pad(exact, (0, num_blocks - exact.shape[1]))
        else:
            divisors = self.scale.decode(scales, num_blocks)
        largest = self.element.largest

        def scale_(blocks: Tensor, row: slice, block: slice, scratch: Scratch) -> None:
            own = divisors[row, block]
            divide_(blocks, own)
            blocks.clamp_(-largest, largest).masked_fill_((own == 0).unsqueeze(-1), 0.0)

        self._encode_codes(matrix, codes, scale_)


def _groups(num_blocks: int) -> int:
    return -(-num_blocks // SCALE_GROUP)


def _amax(blocks: Tensor) -> Tensor:
    """fp32 [rows, blocks]: the largest magnitudes of [rows, blocks, elements], never -0."""
    lowest, highest = torch.aminmax(blocks, dim=2)
    return torch.maximum(highest, -lowest).float().abs_()
