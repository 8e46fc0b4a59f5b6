"""Formats by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from zeropp_fp8.formats import float8
from zeropp_fp8.formats.base import WireFormat
from zeropp_fp8.formats.block_scaled import BlockScaledFormat, Element
from zeropp_fp8.formats.double_quantized import DoubleQuantizedFormat
from zeropp_fp8.formats.half_steps import HALF_STEP_NAMES, HalfStepFormat
from zeropp_fp8.formats.integer import IntegerElement
from zeropp_fp8.formats.mx import MX_NAMES, MXFormat
from zeropp_fp8.formats.nf4 import NF4Format
from zeropp_fp8.formats.tensor_scaled import TensorScaledFormat
from zeropp_fp8.formats.unquantized import UnquantizedFormat

_BF16_SCALED: dict[str, Callable[[], Element]] = {
    "int8": lambda: IntegerElement(8),
    "int4": lambda: IntegerElement(4),
    "fp8_e4m3": float8.e4m3,
    "fp8_e5m2": float8.e5m2,
}

FORMAT_NAMES = ("none", "fp16", *_BF16_SCALED, *HALF_STEP_NAMES, "nf4", *MX_NAMES)


def make_format(
    name: str, double_quantize: bool = False, scales: Literal["block", "tensor"] = "block", **options
) -> WireFormat:
    """A format object by name.

    Args:
        name: "none", "fp16", "int8", "int4", "fp8_e4m3", "fp8_e5m2", "int2", "int3", "nf4", "mxfp8_e4m3", "mxfp8_e5m2",
            "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4" or "mxint8".
        double_quantize: quantize the scales of blocks as well (double_quantized.py); for "int4", "int8", "nf4" and
            "fp8_e4m3", not with `hadamard` or one scale per tensor.
        scales: "tensor": an fp32 scale for a whole tensor, which its parts share (tensor_scaled.py); for "fp8_e4m3",
            without other options.
        **options: for "none" `dtype` (torch.bfloat16 unless told); for the quantized formats `block_size` (128, in NF4,
            INT2 and INT3 64; None for one scale per tensor; always 32 in MX formats) and `hadamard` (False; not with
            NF4 and MX formats); for MX formats `scale_mode` ("rceil", "floor").

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
    plain = _plain_format(name, options)
    return DoubleQuantizedFormat(plain) if double_quantize else plain


def _plain_format(name: str, options: dict) -> WireFormat:
    if name == "none":
        return UnquantizedFormat(**options)
    if name == "fp16":
        return UnquantizedFormat(torch.float16, name="fp16", **options)
    if name in _BF16_SCALED:
        return BlockScaledFormat(name, _BF16_SCALED[name](), **options)
    if name in HALF_STEP_NAMES:
        return HalfStepFormat(name, **options)
    if name == "nf4":
        return NF4Format(**options)
    if name in MX_NAMES:
        return MXFormat(name, **options)
    raise ValueError(f"unknown format {name!r}; formats are {', '.join(FORMAT_NAMES)}")
