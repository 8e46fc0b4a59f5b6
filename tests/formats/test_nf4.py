"""NF4: its levels, where numbers between them go, and what picks them in a kernel."""

import numpy as np
import pytest
import torch
from conformance import normal, through
from reference import NF4_LEVELS, NF4_LIMITS

from zeropp_fp8.formats import NF4Format, make_format


def test_nf4_ties_go_to_the_lower_level():
    limits = torch.tensor(NF4_LIMITS)
    above = torch.nextafter(limits, torch.tensor(2.0))
    levels = torch.tensor(NF4_LEVELS)
    middles = (levels[:-1].double() + levels[1:].double()) / 2
    assert torch.equal(limits, middles.float())
    for values, expected in ((limits, levels[:-1]), (above, levels[1:])):
        block = torch.cat([torch.ones(1), values])
        assert torch.equal(through(make_format("nf4", block_size=16), block)[1:], expected)


def test_a_spoiled_block_has_one_nan():
    tensor = normal(300)
    tensor[100] = -torch.tensor(float("nan"))
    assert make_format("nf4").encode(tensor)[4:8].view(torch.int32) == 0x7FC00000  # not the bits of the NaN there


def test_nf4_has_no_rotation():
    with pytest.raises(ValueError, match="nf4: has no rotation"):
        make_format("nf4", hadamard=True)
    with pytest.raises(ValueError, match="nf4: block_size must be a positive multiple of 2"):
        make_format("nf4", block_size=3)
    fmt = make_format("nf4")
    assert isinstance(fmt, NF4Format) and fmt.block_size == 64 and repr(fmt) == "nf4 (block 64)"


def test_ptx_picks_the_levels():
    """Every byte in each of four places: the two levels of its codes, bit for bit."""
    pytest.importorskip("triton")
    import ptx

    from zeropp_fp8.kernels.nf4_levels import _levels_of_bytes

    levels = np.array(NF4_LEVELS, np.float32).view(np.uint32)
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint32), 61 * place) for place in range(4)])
    words = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24
    out = ptx.run(_levels_of_bytes(), {"$8": words})
    for place in range(4):
        assert np.array_equal(out[f"${place}"], levels[codes[place] & 15])
        assert np.array_equal(out[f"${place + 4}"], levels[codes[place] >> 4])
