"""A weight that lies as codes: which bytes of which payload rows hold which of its elements.

W [N, K] is cut as a flat tensor into R equal slices of S elements, slice s from element s * S on; the last ones may
reach beyond its end. Slice s is encoded (formats/) in a row of a payload matrix, the same bytes of each row:

    payload[row_of_slice[s], offset : offset + wire_format.payload_bytes(S)]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats import BlockScaledFormat, MXFormat
from zeropp_fp8.formats.base import PAYLOAD_ALIGNMENT, align_up

ELEMENTS = ("int4", "int8", "nf4")
WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_multiply(wire_format: object) -> bool:
    """Whether `quantized_linear` takes weights in this format: int4, int8 or nf4 with scales of blocks.

    Double-quantized scales included, the rotation not: it would have to be undone for each element.
    """
    return (
        isinstance(wire_format, BlockScaledFormat)
        and not isinstance(wire_format, MXFormat)
        and wire_format.name in ELEMENTS
        and wire_format.block_size is not None
        and not wire_format.hadamard
    )


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight that lies as codes.

    Attributes:
        payload: uint8 [R, row bytes], adjacent bytes adjacent in memory; on a GPU rows start at multiples of 16 bytes.
        offset: the byte of each row at which this weight's payload starts, a multiple of 16.
        wire_format: of the codes, with scales of blocks.
        slice_numel: elements of a slice, a multiple of the block size.
        shape: (N, K): outputs and inputs of a linear layer.
        dtype: of the values that codes stand for: what `number * scale` is rounded to.
        row_of_slice: int32 [R] on the payload's device: which row holds slice s. None: row s.

    Raises:
        TypeError: a dtype that is not one of these.
        ValueError: sizes, places or devices that do not fit together.
    """

    payload: Tensor
    offset: int
    wire_format: BlockScaledFormat
    slice_numel: int
    shape: tuple[int, int]
    dtype: torch.dtype
    row_of_slice: Tensor | None = None

    def __post_init__(self) -> None:
        payload, name = self.payload, getattr(self.wire_format, "name", self.wire_format)
        if payload.dtype != torch.uint8:
            raise TypeError(f"a quantized weight's payload is uint8, not {payload.dtype}")
        if self.dtype not in WEIGHT_DTYPES:
            raise TypeError(f"a quantized weight stands for values in one of {WEIGHT_DTYPES}, not in {self.dtype}")
        if payload.dim() != 2 or payload.stride(1) != 1:
            raise ValueError(
                f"a quantized weight's payload is [rows, bytes] with adjacent bytes adjacent in memory, not "
                f"{list(payload.shape)} with strides {list(payload.stride())}"
            )
        if not isinstance(self.wire_format, BlockScaledFormat) or self.wire_format.block_size is None:
            raise ValueError(f"a quantized weight has scales of blocks, which {name} has not")
        if self.slice_numel < 1 or self.slice_numel % self.wire_format.block_size:
            raise ValueError(
                f"slices of {self.slice_numel} elements are not cut at blocks of {self.wire_format.block_size}"
            )
        rows, row_bytes = payload.shape
        if rows * self.slice_numel < self.numel:
            raise ValueError(f"{rows} slices of {self.slice_numel} elements are less than {list(self.shape)}")
        end = self.offset + self.wire_format.payload_bytes(self.slice_numel)
        if self.offset < 0 or self.offset % PAYLOAD_ALIGNMENT or end > row_bytes:
            raise ValueError(
                f"a payload of bytes {self.offset} to {end} must start at a multiple of {PAYLOAD_ALIGNMENT} and lie in "
                f"rows of {row_bytes}"
            )
        if payload.device.type == "cuda" and (payload.data_ptr() % 16 or (rows > 1 and payload.stride(0) % 16)):
            raise ValueError(
                f"rows of a payload on a GPU start at multiples of 16 bytes, not at address {payload.data_ptr()} with "
                f"stride {payload.stride(0)}"
            )
        order = self.row_of_slice
        if order is not None and (
            order.dtype != torch.int32 or order.shape != (rows,) or order.device != payload.device
        ):
            raise ValueError(
                f"row_of_slice must be int32 [{rows}] on {payload.device}, not {order.dtype} {list(order.shape)} on "
                f"{order.device}"
            )

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def device(self) -> torch.device:
        return self.payload.device

    @property
    def codes_start(self) -> int:
        """The byte of a slice's payload at which its codes start, behind the scales."""
        return align_up(self.wire_format.scale_bytes(self.slice_numel))

    @torch.no_grad()
    def dequantize(self) -> Tensor:
        """[N, K] in `dtype`, by the torch code of the format."""
        payload = self.payload[:, self.offset : self.offset + self.wire_format.payload_bytes(self.slice_numel)]
        slices = self.wire_format.decode_rows(payload, self.slice_numel, self.dtype)
        if self.row_of_slice is not None:
            slices = slices.index_select(0, self.row_of_slice)
        return slices.view(-1)[: self.numel].view(self.shape)
