"""The tables of one launch: its tensors, places in them, and places in the payload.

A unit (a transformer block) has several tensors. Each is cut into slices of equal size; row r of a payload holds slice
slices[r] of every tensor, one after the other. A program of a kernel handles one tile of one tensor's slice in one
row; it finds its place in two small integer tables on the device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.formats import MX_NAMES, WireFormat
from zeropp_fp8.formats.base import KernelSpec
from zeropp_fp8.formats.dynamic_map import dynamic_levels
from zeropp_fp8.formats.e8m0 import SCALE_MODES
from zeropp_fp8.formats.nf4 import NF4_LEVELS
from zeropp_fp8.formats.tables import fp32_table
from zeropp_fp8.kernels.launching import Plan

# Elements of a program: 32 per thread at 2 warps. Of 1024 to 8192 elements at 2 to 8 warps this moves most bytes a
# second on an H200: int8 quantization 92 % of a copy (4096 at 4 warps: 84 %, 4096 at 8: 78 %).
TILE = 2048
# A sum reads the same tile of every rank, so it has enough loads under way with fewer elements of each: the sum of 8 x
# int8 into fp32 moves 87 % of a copy's bytes per second at 512 elements, 70 % at 2048.
SUM_TILE = 512
# 16 codes of 6 bits fill three words, so a thread must have 16 of them: with 8 the compiler exchanges codes between
# threads, a hundred accesses to shared memory for a sum of 8 ranks.
SIX_BIT_SUM_TILE = 1024
MIN_STARTS = 16  # kernels are compiled anew for each length of `tile_starts`; a block of Llama has 9 tensors
LARGEST_BLOCK = 16384
_UNQUANTIZED_WIDTH = 1024
SEGMENT_COLUMNS = 5


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1), which works on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def native_float8(device: torch.device) -> bool:
    """Whether the device has the instructions for both FP8 formats (compute capability 8.9 and later)."""
    nvidia = device.type == "cuda" and torch.version.hip is None  # AMD's FP8 instructions know other formats
    return nvidia and not interpreted() and torch.cuda.get_device_capability(device) >= (8, 9)


# Scales of weights that are encoded once and decoded in every step: there is no kernel that encodes or sums them.
DECODED_ONLY = ("fp32", "double")
# A format with another one has the torch code alone, on GPUs too.
ELEMENTS = ("fp32", "bf16", "fp16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "nf4", *MX_NAMES)


def supports(wire_format: WireFormat) -> bool:
    """Whether all kernels handle the format: encoding, decoding and sums.

    They do not with scales per tensor, blocks above 16,384 elements, NF4 and double-quantized scales.
    """
    spec = wire_format.kernel_spec()
    return spec is not None and _is_known(spec) and spec.scale not in DECODED_ONLY


def decodes(wire_format: WireFormat) -> bool:
    """Whether `dequantize` handles the format: those that `supports` names, NF4 and double-quantized scales.

    Codes with a shared scale are operands as they come, or sums (reduce.py).
    """
    spec = wire_format.kernel_spec()
    return spec is not None and _is_known(spec) and spec.scale != "shared"


def _is_known(spec: KernelSpec) -> bool:
    if spec.element not in ELEMENTS:
        return False
    return spec.scale in ("none", "shared") or (spec.block_size is not None and spec.block_size <= LARGEST_BLOCK)


@functools.cache
def lookup_table(device: torch.device) -> Tensor:
    """fp32 [272] on the device: the 16 levels of NF4, then the 256 of the dynamic type."""
    return fp32_table((*NF4_LEVELS, *dynamic_levels()), device)


@dataclass(frozen=True)
class KernelFormat:
    """The compile-time constants of a format, which kernels and their parts take whole."""

    element: str
    block_size: int
    width: int  # block_size rounded up to a power of two: the columns of a tile
    tile_blocks: int  # the rows of a tile
    sum_blocks: int  # the same for sums
    hadamard: bool
    largest: float
    # "bf16", for MX formats one of SCALE_MODES, "shared" outside the payload, "none" where unquantized; DECODED_ONLY
    scale: str
    native_fp8: bool = False  # whether the device converts FP8 by instructions
    interpreted: bool = False

    @classmethod
    def of(cls, wire_format: WireFormat, like: KernelFormat | None = None) -> KernelFormat:
        """The constants of a supported format; an unquantized one takes over the tiles of `like`."""
        spec = wire_format.kernel_spec()
        block_size = width = _UNQUANTIZED_WIDTH
        if wire_format.scales == "payload":
            block_size = spec.block_size
            width = max(triton.next_power_of_2(block_size), 32 if spec.hadamard else 2)
        elif wire_format.is_exact and like is not None and like.width == like.block_size:
            block_size = width = like.width
        sum_tile = SIX_BIT_SUM_TILE if spec.bits == 6 else SUM_TILE
        return cls(
            element=spec.element,
            block_size=block_size,
            width=width,
            tile_blocks=max(1, TILE // width),
            sum_blocks=max(1, sum_tile // width),
            hadamard=spec.hadamard,
            largest=spec.largest,
            scale=spec.scale,
        )

    def on(self, device: torch.device) -> KernelFormat:
        """The same for kernels on a device; one object for equal ones, which a launch then need not compare."""
        return _one_of_equals(replace(self, native_fp8=native_float8(device), interpreted=interpreted()))

    @functools.cache  # noqa: B019 (formats are few, and live as long as the kernels that are compiled for them)
    def with_tiles(self, blocks: int) -> KernelFormat:
        """The same with other tiles: in sums they have `sum_blocks`."""
        return replace(self, tile_blocks=blocks)

    @property
    def packed(self) -> int:
        """Codes that share a byte."""
        return 2 if self.element in ("int4", "mxfp4", "nf4") else 1

    @property
    def dtype(self) -> tl.dtype:
        """The dtype of an unquantized element."""
        return {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[self.element]

    @property
    def fills_padding(self) -> bool:
        """Whether decoding leaves numbers beyond a slice's end.

        The rotation does, in its last group, and an MX block whose scale is NaN.
        """
        return self.hadamard or self.scale in SCALE_MODES

    @property
    def tile_numel(self) -> int:
        """Elements of a tile."""
        return self.tile_blocks * self.block_size

    @property
    def num_warps(self) -> int:
        """2 for the usual tile (1 if it is rotated: no barriers, 1.3 times as fast on H200), more for long blocks."""
        numel = self.tile_blocks * self.width
        return 1 if self.hadamard and numel <= TILE else min(16, max(2, numel // 1024))

    @property
    def sum_warps(self) -> int:
        """2 for the usual tile of a sum, more for long blocks."""
        return min(16, max(2, self.sum_blocks * self.width // 512))


_one_of_equals = functools.cache(lambda form: form)


class SegmentTable:
    """Where the tensors of one format lie in a payload row.

    Args:
        wire_format: a format that `supports` or `decodes` names.
        slice_numels: elements of a slice, for each tensor.
        offsets: the byte in the row at which each tensor's payload starts, multiples of 16.
        device: where the tables live.
        like: a format whose tiles an unquantized format takes over, so that `reduce_to_payload` can join the two.
    """

    def __init__(
        self,
        wire_format: WireFormat,
        slice_numels: Sequence[int],
        offsets: Sequence[int],
        device: torch.device,
        like: WireFormat | None = None,
    ) -> None:
        self.format = KernelFormat.of(wire_format, None if like is None else KernelFormat.of(like)).on(device)
        segments = []
        for numel, offset in zip(slice_numels, offsets):
            if wire_format.scales == "payload":
                num_blocks = wire_format.blocks(numel)[0]
                code_bytes = wire_format.code_bytes(numel)
            else:
                num_blocks = 0
                code_bytes = numel * wire_format.dtype.itemsize
            segments.append((offset, numel, num_blocks, code_bytes, wire_format.payload_bytes(numel)))
        self.slice_numels = tuple(slice_numels)
        self.largest_numel = max(slice_numels)
        rows = torch.tensor(segments, dtype=torch.int64, device="cpu").view(-1, SEGMENT_COLUMNS)
        self.decoded_segments = rows.to(device)
        self.lookup = lookup_table(device)
        self._device = device
        self._tile_starts: dict[int, tuple[Tensor, int]] = {}
        self.plans: dict[Hashable, Plan] = {}  # by the kernel and what a launch depends on but the tensors' places

    @property
    def segments(self) -> Tensor:
        """int64 [tensors, SEGMENT_COLUMNS] on the device, for kernels that encode or sum.

        `dequantize` reads `decoded_segments`, which is the same.

        Raises:
            ValueError: a format that is only decoded by kernels, whose codes others would take for something else.
        """
        if self.format.scale in DECODED_ONLY:
            raise ValueError(
                f"{self.format.element} with {self.format.scale!r} scales: kernels only decode this format; "
                "encode and sum it with the torch code of formats/"
            )
        return self.decoded_segments

    def grid(self, rows: int, blocks: int) -> tuple[int, int, int]:
        """Programs of a launch with tiles of `blocks` blocks.

        Those beyond a small tensor's end leave at once; they cost less than a table of tiles, which every program would
        have to read before it knows what else to read.
        """
        tiles = -(-self.largest_numel // (blocks * self.format.block_size))
        return tiles, rows, len(self.slice_numels)

    def tile_starts(self, blocks: int) -> tuple[Tensor, int]:
        """(int32 [power of two]: the number of each tensor's first tile; how many tiles of `blocks` blocks there are).

        For launches without idle programs. In a block of Llama-3-8B, where three of seven weights are 14 times as large
        as two others, half of `grid`'s programs are idle: decoding INT4 then moves 65 % of a copy's bytes per second,
        where one large tensor reaches 93 %.
        """
        if blocks not in self._tile_starts:
            tiles = [-(-numel // (blocks * self.format.block_size)) for numel in self.slice_numels]
            starts = [sum(tiles[:index]) for index in range(len(tiles))]
            length = max(MIN_STARTS, triton.next_power_of_2(len(starts)))
            beyond = [torch.iinfo(torch.int32).max] * (length - len(starts))
            table = torch.tensor(starts + beyond, dtype=torch.int32, device="cpu").to(self._device)
            self._tile_starts[blocks] = table, sum(tiles)
        return self._tile_starts[blocks]


class TensorTable:
    """Places of the tensors of one launch, as element offsets from the first of them, and their sizes.

    The tensors must be contiguous and of one dtype. The table fits any tensors with the same `key`, so it is made once
    for views of a buffer, wherever the buffer lies. It does not keep them alive.
    """

    def __init__(self, tensors: Sequence[Tensor], segments: SegmentTable, device: torch.device) -> None:
        base = tensors[0]
        itemsize = base.element_size()
        for tensor in tensors:
            if tensor.dtype != base.dtype or not tensor.is_contiguous():
                raise ValueError("the tensors of one launch must be contiguous and of one dtype")
        rows = [((t.data_ptr() - base.data_ptr()) // itemsize, t.numel()) for t in tensors]
        entries = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 2)
        # From pinned memory the copy does not wait for the device; torch keeps the memory until it is done.
        self.entries = entries.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else entries
        self.aligned = all(t.data_ptr() % 16 == 0 for t in tensors) and all(
            (numel * itemsize) % 16 == 0 or tensor.numel() <= numel
            for numel, tensor in zip(segments.slice_numels, tensors)
        )


def table_key(tensors: Sequence[Tensor]) -> tuple:
    """The key of a TensorTable: dtype, places relative to the first tensor, and the first one's alignment and size.

    Other sizes are not part of it: in one role they never change, but for that of a layout of single tokens.
    """
    base = tensors[0].data_ptr()
    return (tensors[0].dtype, base % 16, tensors[0].numel(), *[t.data_ptr() - base for t in tensors])
