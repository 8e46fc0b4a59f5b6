"""The number formats of the optimizer's quantities, and the choice among them.

    name        bytes  value of a code                      scale
    fp32        4      the code                             none
    bf16        2      the code                             none
    fp16        2      X * code, codes up to 65504          X = 2^(byte - 127), one byte per tensor or block
    fp8_e4m3    1      X * code, codes up to 448            the same
    fp8_e5m2    1      X * code, codes up to 57344          the same

X is the smallest power of two with amax <= X * largest code (formats/e8m0.py, `rceil`): what is decoded encodes to the
same numbers again, so a checkpoint of decoded fp32 states resumes bit for bit. A tensor or block that holds NaN or Inf
has the byte 255 and decodes to NaN. FP16 with a scale for the master weight and the second moment, FP8 E4M3 for the
first: FP8-LM (arXiv 2310.18313), section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.e8m0 import E8M0Scale

SCALE_CHOICES = ("tensor", "block")
# Segments start at multiples of it. A kernel's program works on one tile.
TILE = 1024
_INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class Storage:
    """One number format.

    Attributes:
        dtype: of the codes; FP8 codes are kept as uint8.
        element: the dtype whose numbers the codes are.
        largest: the largest code; the scale brings amax to it. None: no scale.
    """

    name: str
    dtype: torch.dtype
    element: torch.dtype
    largest: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of a code."""
        return self.dtype.itemsize

    @property
    def scaled(self) -> bool:
        return self.largest is not None

    @property
    def is_float8(self) -> bool:
        return self.dtype == torch.uint8

    @property
    def scale(self) -> E8M0Scale:
        """The rule of the scale: `carry` and `emax` of formats/e8m0.py."""
        return E8M0Scale(self.largest, "rceil", spoiled_by_special=True)

    def scale_bytes(self, amax_bits: Tensor) -> Tensor:
        """int32 E8M0 bytes, 255 for NaN and Inf, of the bits (int32) of the largest magnitudes."""
        scale = self.scale
        exponents = (amax_bits + scale.carry >> 23).sub_(scale.emax).clamp_(0, 254)
        return exponents.masked_fill_(amax_bits >= _INFINITY_BITS, 255)

    def codes_of(self, scaled: Tensor) -> Tensor:
        """Codes of fp32 numbers with |v| <= largest, rounded to nearest."""
        if self.scaled:
            scaled = scaled.clamp(-self.largest, self.largest)
        codes = scaled.to(self.element)
        return codes.view(torch.uint8) if self.is_float8 else codes

    def numbers_of(self, codes: Tensor) -> Tensor:
        """fp32 numbers of codes, before scaling. A view of the codes where they are fp32."""
        return (codes.view(self.element) if self.is_float8 else codes).to(torch.float32)


STORAGES = {
    storage.name: storage
    for storage in (
        Storage("fp32", torch.float32, torch.float32),
        Storage("bf16", torch.bfloat16, torch.bfloat16),
        Storage("fp16", torch.float16, torch.float16, 65504.0),
        Storage("fp8_e4m3", torch.uint8, torch.float8_e4m3fn, 448.0),
        Storage("fp8_e5m2", torch.uint8, torch.float8_e5m2, 57344.0),
    )
}
STORAGE_NAMES = tuple(STORAGES)
# The options of an optimizer that say what states are stored as, in the order of the fields of StateFormats.
OPTIONS = ("master_format", "exp_avg_format", "exp_avg_sq_format", "scales", "block_size")


def storage_of(name: str, what: str = "format") -> Storage:
    """The format with this name.

    Raises:
        ValueError: there is none; `what` says whose name it was.
    """
    if name not in STORAGES:
        raise ValueError(f"{what} must be one of {', '.join(STORAGE_NAMES)}, got {name!r}")
    return STORAGES[name]


def check_scales(scales: str, block_size: int) -> None:
    """Refuse scales other than per tensor or per block, and blocks that a tile of 1024 is no multiple of."""
    if scales not in SCALE_CHOICES:
        raise ValueError(f"scales must be one of {', '.join(SCALE_CHOICES)}, got {scales!r}")
    allowed = [16 << shift for shift in range(7)]
    if block_size not in allowed:
        raise ValueError(f"block_size must be one of {allowed}, got {block_size!r}")


@dataclass(frozen=True)
class StateFormats:
    """The formats of master weight and moments.

    Args:
        master, exp_avg, exp_avg_sq: names of STORAGE_NAMES.
        scales: one scale per "tensor" or "block"; for the formats that have scales.
        block_size: elements of a block, a power of two from 16 to 1024.

    Raises:
        ValueError: an unknown name, or a block size other than these.
    """

    master: str = "fp16"
    exp_avg: str = "fp8_e4m3"
    exp_avg_sq: str = "fp16"
    scales: str = "tensor"
    block_size: int = 128

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> StateFormats:
        """The formats that the fields of an "optimizer" section name."""
        return cls(**{name.removesuffix("_format"): options[name] for name in OPTIONS if name in options})

    def __post_init__(self) -> None:
        for name in ("master", "exp_avg", "exp_avg_sq"):
            storage_of(getattr(self, name), f"{name} format")
        check_scales(self.scales, self.block_size)

    def bytes_per_parameter(self, moments: Iterable[str] = ("exp_avg", "exp_avg_sq")) -> float:
        """Bytes of master weight and these moments for each parameter.

        Scales per block are counted, those per tensor and the padding of segments to tiles are not.
        """
        total = 0.0
        for name in (self.master, *(getattr(self, moment) for moment in moments)):
            total += STORAGES[name].num_bytes
            if STORAGES[name].scaled and self.scales == "block":
                total += 1 / self.block_size
        return total
