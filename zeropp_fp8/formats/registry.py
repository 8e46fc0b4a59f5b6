"""Formats by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from zeropp_fp8.formats import float8
from zeropp_fp8.formats.base import WireFormat
from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.double_quantized import DoubleQuantizedFormat
from zeropp_fp8.formats.integer import IntegerElement
from zeropp_fp8.formats.mx import MX_NAMES, MXFormat
from zeropp_fp8.formats.nf4 import NF4Format
from zeropp_fp8.formats.tensor_scaled import TensorScaledFormat
from zeropp_fp8.formats.unquantized import UnquantizedFormat

# What makes each: a new format is its file and a line here. Arguments are the options of `make_format`.
_MAKE: dict[str, Callable[..., WireFormat]] = {
    "none": UnquantizedFormat,
    "fp16": partial(UnquantizedFormat, torch.float16, name="fp16"),
    **{f"int{bits}": partial(BlockScaledFormat, f"int{bits}", IntegerElement(bits)) for bits in (8, 4)},
    **{name: partial(BlockScaledFormat, name, element) for name, element in float8.ELEMENTS.items()},
    "nf4": NF4Format,
    **{name: partial(MXFormat, name) for name in MX_NAMES},
}
FORMAT_NAMES = tuple(_MAKE)


def make_format(
    name: str, double_quantize: bool = False, scales: Literal["block", "tensor"] = "block", **options
) -> WireFormat:
    """A format object by name.

    Args:
        name: one of FORMAT_NAMES.
        double_quantize: quantize the scales of blocks as well (double_quantized.py); for DOUBLE_QUANTIZED_NAMES, not
            with `hadamard` or one scale per tensor.
        scales: "tensor": an fp32 scale for a whole tensor, which its parts share (tensor_scaled.py); for "fp8_e4m3",
            without other options.
        **options: for "none" `dtype` (torch.bfloat16 unless told); for the quantized formats `block_size` (128, in NF4
            64; None for one scale per tensor; always 32 in MX formats) and `hadamard` (False; not with NF4 and MX
            formats); for MX formats `scale_mode` ("rceil", "floor").

    Raises:
        ValueError: an unknown name, an option value that does not exist, or options that exclude each other.
        TypeError: an unknown option.
    """
    if scales == "tensor":
        if name != TensorScaledFormat.name or double_quantize or options:
            raise ValueError(
                f'{name}: scales "tensor" is there for {TensorScaledFormat.name}, without double_quantize and other '
                "options"
            )
        return TensorScaledFormat()
    if name not in _MAKE:
        raise ValueError(f"unknown format {name!r}; formats are {', '.join(FORMAT_NAMES)}")
    plain = _MAKE[name](**options)
    return DoubleQuantizedFormat(plain) if double_quantize else plain
