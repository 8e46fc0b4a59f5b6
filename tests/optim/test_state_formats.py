"""State in each format: against the formats written out in numpy and float64, and what resuming rests on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optim_cases import CPU, GRIDS, SCALED, check_encode_several, heavy_tailed, rounded, scale_of

from zeropp_fp8.optim import FP8Gradients, Segments, StateBuffer, StateFormats, make_state_buffers
from zeropp_fp8.optim.state_formats import TILE

STORAGES = list(GRIDS)
FLOAT8 = ("fp8_e4m3", "fp8_e5m2")


def buffer_of(values, storage, **options):
    """A buffer with one segment of these fp32 values."""
    values = torch.as_tensor(values, dtype=torch.float32)
    buffer = StateBuffer(Segments([values.numel()], CPU), storage, **options)
    buffer.encode_(0, values)
    return buffer


def same_numbers(actual: torch.Tensor, expected) -> bool:
    """Equal, NaN where NaN."""
    return np.array_equal(actual.double().numpy(), np.asarray(expected, dtype=np.float64), equal_nan=True)


SAMPLES = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "heavy tails": heavy_tailed,
    "huge": lambda n, g: 1e30 * torch.randn(n, generator=g),
    "tiny": lambda n, g: 1e-30 * torch.randn(n, generator=g),
    "subnormal": lambda n, g: 1e-39 * torch.randn(n, generator=g),
    "near the largest": lambda n, g: 3.4e38 * (1 - 2 * torch.rand(n, generator=g)),
    "largest codes": lambda n, g: 448.0 * (1 + (torch.rand(n, generator=g) - 0.5) / 64),
    "zeros": lambda n, g: torch.zeros(n),
}


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("storage", STORAGES)
def test_decodes_to_what_numpy_rounds_to(storage, sample):
    generator = torch.Generator().manual_seed(0)
    for numel in (0, 1, 127, 128, 129, 1024, 3001):
        values = SAMPLES[sample](numel, generator)
        for options in ({}, {"scales": "block"}, {"scales": "block", "block_size": 16}):
            block = options.get("block_size", 128) if options else None
            decoded = buffer_of(values, storage, **options).decode(0)
            assert same_numbers(decoded, rounded(values.numpy(), storage, block)), (numel, options)


@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=300),
    st.sampled_from(STORAGES),
    st.sampled_from([None, 16, 64]),
)
@settings(max_examples=150)
def test_any_numbers(values, storage, block):
    """Numpy rounds alike, NaN and Inf with all that shares their scale; and decoded numbers encode to themselves."""
    options = {} if block is None else {"scales": "block", "block_size": block}
    array = np.array(values, dtype=np.float32)
    buffer = buffer_of(torch.from_numpy(array), storage, **options)
    decoded = buffer.decode(0)
    with np.errstate(all="ignore"):
        expected = rounded(array, storage, block)
    assert same_numbers(decoded, expected)
    if np.isinf(expected).any():  # above the largest fp32 number; with a scale it would become NaN
        return
    again = buffer_of(decoded, storage, **options)
    assert same_numbers(again.decode(0), decoded)


@pytest.mark.parametrize("storage", SCALED)
def test_scales_are_powers_of_two_and_tight(storage):
    """Twice as fine a scale would clamp the largest number."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        values = heavy_tailed(50, generator)
        buffer = buffer_of(values, storage)
        scale = 2.0 ** (buffer.scales.item() - 127)
        assert scale == scale_of(values.numpy(), storage)
        assert scale / 2 * GRIDS[storage][2] < values.abs().max().item() <= scale * GRIDS[storage][2]
    assert buffer_of(torch.zeros(5), storage).scales.item() == 0
    assert buffer_of([1.0, math.nan], storage).scales.item() == 255


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("storage", STORAGES)
def test_nan_and_inf_never_become_finite(storage, bad):
    values = torch.ones(300)
    values[140] = bad
    whole = buffer_of(values, storage).decode(0)
    blocks = buffer_of(values, storage, scales="block").decode(0)
    if storage in SCALED:
        assert whole.isnan().all()
        assert blocks[128:256].isnan().all() and (blocks[:128] == 1).all() and (blocks[256:] == 1).all()
    else:
        assert same_numbers(whole, values) and same_numbers(blocks, values)


def test_segments_do_not_touch_each_other():
    """Encoding one leaves all others, and a bad one spoils only itself."""
    numels = [1024, 0, 1, 1500, 7]
    for storage in STORAGES:
        for scales in ("tensor", "block"):
            buffer = StateBuffer(Segments(numels, CPU), storage, scales)
            assert all(not values.any() for values in buffer.decode_all())
            buffer.encode_all_([torch.full((n,), 1.0 + i) for i, n in enumerate(numels)])
            buffer.encode_(2, torch.tensor([math.nan]))
            for i, values in enumerate(buffer.decode_all()):
                assert values.shape == (numels[i],)
                assert values.isnan().all() if i == 2 else (values == 1.0 + i).all()


def test_flat_and_listed_values_are_the_same():
    segments = Segments([5, 2000, 3], CPU)
    flat = torch.randn(segments.padded_numel)
    listed, joined = (StateBuffer(segments, "fp16", "block") for _ in range(2))
    joined.encode_all_(flat)
    listed.encode_all_([segments.view(flat, i) for i in range(3)])
    assert torch.equal(joined.codes, listed.codes) and torch.equal(joined.scales, listed.scales)


def test_layout():
    segments = Segments([1500, 0, 1, 1024], CPU)
    assert segments.starts == (0, 2048, 2048, 3072)
    assert segments.padded_numel == 4096 and segments.num_tiles == 4 and TILE == 1024
    assert segments.tile_segments.tolist() == [0, 0, 2, 3]
    assert segments.table.tolist() == [[0, 1500], [2048, 0], [2048, 1], [3072, 1024]]
    assert len(segments) == 4 and len(Segments([], CPU)) == 0 and Segments([], CPU).padded_numel == 0
    with pytest.raises(ValueError, match="0 or more elements"):
        Segments([3, -1], CPU)


def test_bytes():
    """As in FP8-LM, per parameter: master 2, first moment 1, second 2."""
    assert StateFormats().bytes_per_parameter() == 5
    assert StateFormats("fp32", "fp32", "fp32").bytes_per_parameter() == 12
    assert StateFormats(scales="block").bytes_per_parameter() == 5 + 3 / 128
    assert StateFormats("fp32").bytes_per_parameter(["exp_avg"]) == 5  # of Muon
    segments = Segments([1 << 20, 3 << 10], CPU)
    for formats in (StateFormats(), StateFormats(scales="block"), StateFormats("fp32", "bf16", "fp8_e5m2")):
        held = sum(buffer.num_bytes() for buffer in make_state_buffers(segments, formats))
        expected = formats.bytes_per_parameter() * sum(segments.numels)
        per_tensor = 3 * 2 if formats.scales == "tensor" else 0
        assert expected <= held <= expected + per_tensor
    # What padding adds to a layer's norm of 4096: nothing; to a bias of 10: a tile.
    assert StateBuffer(Segments([4096, 10], CPU), "fp16").num_bytes() == 2 * (4096 + 1024) + 2


def test_unknown_choices_are_refused():
    for options in ({"master": "int8"}, {"exp_avg": "none"}, {"exp_avg_sq": "fp8"}):
        with pytest.raises(ValueError, match="format must be one of fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"):
            StateFormats(**options)
    with pytest.raises(ValueError, match="scales must be one of tensor, block"):
        StateFormats(scales="row")
    for size in (0, 8, 96, 2048):
        with pytest.raises(ValueError, match="block_size must be one of"):
            StateFormats(scales="block", block_size=size)
    with pytest.raises(ValueError, match="segment 0 takes 4 fp32 numbers"):
        StateBuffer(Segments([4], CPU), "fp16").encode_(0, torch.ones(1))
    with pytest.raises(ValueError, match="segment 0 takes 4 fp32 numbers"):
        StateBuffer(Segments([4], CPU), "fp16").encode_(0, torch.ones(4).bfloat16())


# -- gradients -----------------------------------------------------------------------------------------------------


def test_fp8_gradients_decode_with_any_multiplier():
    """code * multiplier, a number of the caller's, not a power of two; both dtypes of codes."""
    segments = Segments([300, 5], CPU)
    values = torch.randn(segments.padded_numel).to(torch.float8_e5m2)
    multipliers = torch.tensor([0.3, 7.0])
    for codes in (values, values.view(torch.uint8)):
        gradients = FP8Gradients(segments, codes, "fp8_e5m2", multipliers)
        for i in range(2):
            expected = segments.view(values, i).float() * multipliers[i]
            assert torch.equal(gradients.decode(i), expected)


def test_fp8_gradients_that_do_not_fit_are_refused():
    codes, ones = torch.zeros(1024, dtype=torch.uint8), torch.ones(1)
    segments = Segments([3], CPU)
    for wrong, message in (
        ((codes, "fp16", ones), "fp8_e4m3 or fp8_e5m2"),
        ((codes.float(), "fp8_e4m3", ones), "uint8 or float8"),
        ((codes[:7], "fp8_e4m3", ones), "gradient codes"),
        ((codes, "fp8_e4m3", torch.ones(2)), "multipliers must be"),
        ((codes, "fp8_e4m3", ones.double()), "multipliers must be"),
    ):
        with pytest.raises(ValueError, match=message):
            FP8Gradients(segments, *wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [16, 128, 1024])
@pytest.mark.parametrize("element", FLOAT8)
def test_segments_encoded_at_once(element, block, dtype):
    check_encode_several(element, block, dtype, CPU)
