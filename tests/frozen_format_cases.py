"""What tests of formats for weights at rest share: names, the published numbers of NF4, tensors of every kind."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DOUBLE = ("int4", "int8", "nf4", "fp8_e4m3")
EVERY_DOUBLE = pytest.mark.parametrize("name", DOUBLE)
# arXiv 2305.14314, appendix E.
PUBLISHED_LEVELS = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
# The numbers that bitsandbytes' kernels compare with; the code is how many of them lie below a number.
PUBLISHED_LIMITS = [
    -0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544, -0.23460740596055984,
    -0.13791173323988914, -0.045525018125772476, 0.03979014977812767, 0.1202552504837513, 0.2035212516784668,
    0.2920137718319893, 0.3893125355243683, 0.5016634166240692, 0.6427869200706482, 0.8614784181118011,
]  # fmt: skip


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def tensors(draw, longest=3000):
    """Finite tensors of any length and dtype; some with magnitudes from subnormal to the largest."""
    numel = draw(st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 511, 512, 513]), st.integers(0, longest)))
    dtype = draw(st.sampled_from(DTYPES))
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    uniform = torch.rand(numel, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "mixed", "largest", "subnormal", "sparse", "zeros", "equal", "steps"]))
    if kind == "mixed":
        low, high = math.log2(info.smallest_normal) - 6, math.log2(info.max)
        values = values.sign() * torch.exp2(low + uniform * (high - low))
    elif kind == "largest":
        values = values.sign() * info.max * torch.where(uniform < 0.01, 1.0, uniform)
    elif kind == "subnormal":
        values = values.sign() * info.smallest_normal * uniform
    elif kind == "sparse":
        values = values * (uniform < 0.01)
    elif kind == "zeros":
        values = values * 0
    elif kind == "equal":
        values = torch.full((numel,), draw(st.sampled_from([1.0, -3.0, info.max, info.tiny])), dtype=torch.float64)
    elif kind == "steps":
        values = values * torch.exp2(torch.arange(numel) // 200 % 30 - 20).double()
    return values.clamp(info.min, info.max).to(dtype)
