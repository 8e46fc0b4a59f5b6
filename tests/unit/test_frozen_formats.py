"""NF4, double-quantized scales, and parts of a tensor: against references in numpy, the papers, and bitsandbytes."""

import functools
import math
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import signal_samples, signal_to_noise_db
from triton_process import run

from zeropp_fp8.formats import FORMAT_NAMES, DoubleQuantizedFormat, NF4Format, SharedScaleFormat, chunks, make_format
from zeropp_fp8.formats.dynamic_map import dynamic_levels, nearest_dynamic

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DOUBLE = ("int4", "int8", "nf4", "fp8_e4m3")
LARGEST = {"int4": 7, "int8": 127, "nf4": 1, "fp8_e4m3": 448}
BITS = {"int4": 4, "int8": 8, "nf4": 4, "fp8_e4m3": 8}
GROUP = 256
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
# Half of NF4's widest step, and of the dynamic type's.
NF4_HALF_STEP = (PUBLISHED_LEVELS[1] - PUBLISHED_LEVELS[0]) / 2
DYNAMIC_HALF_STEP = 0.9 / 2**6 / 2
EVERY_DOUBLE = pytest.mark.parametrize("name", DOUBLE)
EITHER = pytest.mark.parametrize("double_quantize", [False, True], ids=["plain", "double"])


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through(fmt, tensor, dtype=None):
    return fmt.decode(fmt.encode(tensor), tensor.shape, dtype or tensor.dtype)


def same_bits(a, b):
    """Equal, NaN where NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


# --- signal-to-noise --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def noise_db():
    """Decibels by (name, double_quantize, distribution), blocks of 64."""
    samples = signal_samples()

    @functools.cache
    def measure(name, double_quantize, distribution):
        fmt = make_format(name, block_size=64, double_quantize=double_quantize)
        return signal_to_noise_db(samples[distribution], through(fmt, samples[distribution]))

    return measure


@pytest.mark.parametrize(
    ("name", "normal_db", "student_t_db", "allowed"),
    [("nf4", 20.7, 19.1, 0.5), ("int4", 19.33, 15.88, 0.3), ("int8", 44.42, 40.85, 0.3), ("fp8_e4m3", 32.0, 32.7, 0.3)],
)
def test_signal_to_noise(noise_db, name, normal_db, student_t_db, allowed):
    """Figures of blocks of 64; double quantization is no worse but where a group's largest scale is far off."""
    assert abs(noise_db(name, False, "normal") - normal_db) <= allowed
    assert abs(noise_db(name, False, "student_t") - student_t_db) <= allowed
    assert noise_db(name, True, "normal") >= noise_db(name, False, "normal") - 0.1
    assert noise_db(name, True, "student_t") >= noise_db(name, False, "student_t") - (0.3 if name == "int8" else 0.1)


def test_bytes_an_element():
    numel = 1 << 24
    for name, double_quantize, most in (("int4", True, 0.52), ("nf4", True, 0.52), ("int8", False, 1.04)):
        fmt = make_format(name, block_size=64, double_quantize=double_quantize)
        assert fmt.payload_bytes(numel) / numel <= most
        assert fmt.payload_bytes(numel) * 8 / numel == pytest.approx(fmt.bits_per_element, abs=1e-4)
    assert make_format("nf4").bits_per_element == 4 + 32 / 64
    assert make_format("nf4", double_quantize=True).bits_per_element == 4 + 8 / 64 + 32 / (64 * 256)


# --- NF4 against a written-out reference ------------------------------------------------------------------------


def padded(raw):
    return raw + bytes(-len(raw) % 16)


def nf4_codes(values, scales, block_size):
    """One code an element: how many limits lie below value * (1 / scale), in fp32."""
    codes = []
    for i, value in enumerate(values):
        scale = scales[i // block_size]
        scaled = np.float32(value) * (np.float32(1) / scale) if scale else np.float32(0)
        codes.append(sum(bool(scaled > np.float32(limit)) for limit in PUBLISHED_LIMITS))
    return codes


def nibbles(codes, zero):
    codes = codes + [zero] * (len(codes) % 2)
    return bytes(low % 16 + 16 * (high % 16) for low, high in zip(codes[0::2], codes[1::2]))


@pytest.mark.parametrize("block_size", [2, 64, 96])
@pytest.mark.parametrize("numel", [1, 7, 64, 301, 1000])
def test_nf4_matches_the_reference_byte_for_byte(numel, block_size):
    values = normal(numel, seed=numel) * torch.logspace(-4, 4, numel)
    values[::11] = 0
    if numel > 200:
        values[128:192] = 0
    floats = values.numpy()
    scales = [np.abs(floats[i : i + block_size]).max() for i in range(0, numel, block_size)]
    codes = nf4_codes(floats, scales, block_size)
    fmt = make_format("nf4", block_size=block_size)
    payload = padded(np.array(scales, np.float32).tobytes()) + padded(nibbles(codes, 7))
    assert bytes(fmt.encode(values).tolist()) == payload
    levels = np.array(PUBLISHED_LEVELS, np.float32)
    decoded = levels[codes] * np.repeat(scales, block_size)[:numel]
    assert torch.equal(through(fmt, values), torch.from_numpy(decoded))


def test_every_nf4_code_round_trips():
    fmt = make_format("nf4", block_size=16)
    levels = torch.tensor(PUBLISHED_LEVELS)
    payload = fmt.encode(levels)
    assert payload[16:24].tolist() == [low + 16 * (low + 1) for low in range(0, 16, 2)]
    assert torch.equal(fmt.decode(payload, (16,), torch.float32), levels)


def test_nf4_ties_go_to_the_lower_level():
    limits = torch.tensor(PUBLISHED_LIMITS)
    above = torch.nextafter(limits, torch.tensor(2.0))
    levels = torch.tensor(PUBLISHED_LEVELS)
    middles = (levels[:-1].double() + levels[1:].double()) / 2
    assert torch.equal(limits, middles.float())
    for values, expected in ((limits, levels[:-1]), (above, levels[1:])):
        block = torch.cat([torch.ones(1), values])
        assert torch.equal(through(make_format("nf4", block_size=16), block)[1:], expected)


# --- the dynamic type -------------------------------------------------------------------------------------------


def test_dynamic_levels_are_those_of_the_paper():
    """Within one unit in the last place: where sums and products are rounded is not the paper's business."""
    exact = [Fraction(0), Fraction(1)]
    for zeros in range(7):  # zero bits behind the sign, each a factor of 1/10; a one; then the fraction's bits
        bits = 7 - zeros - 1
        for fraction in range(2**bits):
            magnitude = (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * fraction + 1, 2 ** (bits + 1))) / 10**zeros
            exact += [magnitude, -magnitude]
    levels = dynamic_levels()
    assert len(levels) == len(exact) == 256
    for level, number in zip(levels, sorted(exact)):
        assert level == np.float32(level)
        assert abs(Fraction(level) - number) <= abs(number) * Fraction(1, 2**22)


def test_what_the_dynamic_levels_are():
    levels = dynamic_levels()
    assert list(levels) == sorted(set(levels))
    assert levels[127] == 0.0 and levels[255] == 1.0 and levels[0] == pytest.approx(-0.99296875)
    assert [-level for level in levels[:127]] == list(levels[128:255])[::-1]
    assert levels[128] == pytest.approx(5.5e-7)
    # Stored weights are decoded by this table: no bit of it may change.
    assert zlib.crc32(np.array(levels, np.float32).tobytes()) == 0x1B137AEB


def test_the_nearest_dynamic_level():
    levels = np.array(dynamic_levels(), np.float32)
    assert nearest_dynamic(torch.from_numpy(levels)).tolist() == list(range(256))
    values = np.concatenate([np.linspace(-1, 1, 5001), np.geomspace(1e-8, 1, 1000), -np.geomspace(1e-8, 1, 1000)])
    values = values.astype(np.float32)
    distances = np.abs(values.astype(np.float64)[:, None] - levels.astype(np.float64))
    codes = nearest_dynamic(torch.from_numpy(values)).numpy()
    taken = distances[np.arange(len(values)), codes]
    # The limits are fp32 numbers too.
    assert (taken <= distances.min(axis=1) + 2.0**-25).all()
    middles = torch.from_numpy(((levels[1:].astype(np.float64) + levels[:-1]) / 2).astype(np.float32))
    assert nearest_dynamic(middles).tolist() == list(range(255))
    assert nearest_dynamic(torch.nextafter(middles, torch.tensor(2.0))).tolist() == list(range(1, 256))


# --- double quantization against a written-out reference --------------------------------------------------------


def double_reference(values, name, block_size):
    """(scale bytes, scales that decoding uses, scales that codes are chosen with) of finite fp32 numbers, in numpy."""
    f32 = np.float32
    amax = [np.abs(values[i : i + block_size]).max() for i in range(0, len(values), block_size)]
    exact = np.array(amax, f32) / f32(LARGEST[name])
    offset = f32(math.fsum(exact.tolist()) / len(exact))
    deviations = exact - offset
    levels = np.array(dynamic_levels(), f32)
    limits = ((levels[1:].astype(np.float64) + levels[:-1]) / 2).astype(f32)
    codes, group_scales, decoded = [], [], []
    for start in range(0, len(exact), GROUP):
        group = deviations[start : start + GROUP]
        group_scale = np.abs(group).max()
        reciprocal = f32(1) / max(group_scale, f32(2.0**-126))
        own = [int(np.searchsorted(limits, deviation * reciprocal, side="left")) for deviation in group]
        codes += own
        group_scales.append(group_scale)
        decoded += [max(f32(0), levels[code] * group_scale + offset) for code in own]
    raw = padded(bytes(codes)) + np.array([*group_scales, offset], f32).tobytes()
    return padded(raw), np.array(decoded, f32), exact if name == "nf4" else np.array(decoded, f32)


@EVERY_DOUBLE
@pytest.mark.parametrize(("numel", "block_size"), [(1, 4), (301, 4), (4096, 8), (5001, 8), (3000, 64)])
def test_double_quantization_matches_the_reference_byte_for_byte(name, numel, block_size):
    values = normal(numel, seed=numel) * torch.logspace(-2, 1, numel)
    values[:: 3 * block_size + 1] = 0
    floats = values.numpy()
    scale_bytes, decoded_scales, divisors = double_reference(floats, name, block_size)
    fmt = make_format(name, block_size=block_size, double_quantize=True)
    payload = fmt.encode(values)
    assert bytes(payload[: len(scale_bytes)].tolist()) == scale_bytes
    each = np.repeat(divisors, block_size)[:numel]
    reciprocals = np.float32(1) / np.maximum(each, np.float32(2.0**-126))
    scaled = np.where(each > 0, floats * reciprocals, np.float32(0))
    scaled = np.clip(scaled, -LARGEST[name], LARGEST[name])
    if name == "nf4":
        codes = nf4_codes(scaled, [np.float32(1)], numel)
        numbers = np.array(PUBLISHED_LEVELS, np.float32)[codes]
        code_bytes = nibbles(codes, 7)
    elif name == "fp8_e4m3":
        as_float8 = torch.from_numpy(scaled).to(torch.float8_e4m3fn)
        numbers, code_bytes = as_float8.float().numpy(), bytes(as_float8.view(torch.uint8).tolist())
    else:
        numbers = np.rint(scaled)
        codes = [int(code) for code in numbers]
        code_bytes = nibbles(codes, 0) if name == "int4" else bytes(code % 256 for code in codes)
    assert bytes(payload[len(scale_bytes) :].tolist()) == padded(code_bytes)
    decoded = numbers * np.repeat(decoded_scales, block_size)[:numel]
    assert torch.equal(fmt.decode(payload, (numel,), torch.float32), torch.from_numpy(decoded))


@pytest.mark.parametrize(
    "numel, size",
    [(0, 0), (1, 16 + 16 + 16), (64, 16 + 16 + 32), (65, 16 + 16 + 48), (64 * 256, 256 + 16 + 64 * 128)]
    + [(64 * 257, 272 + 16 + 64 * 257 // 2), (64 * 256 * 4, 1024 + 32 + 64 * 128 * 4)],
)
def test_double_quantized_payload_sizes(numel, size):
    for name in ("nf4", "int4"):
        fmt = make_format(name, block_size=64, double_quantize=True)
        assert fmt.payload_bytes(numel) == size == fmt.encode(torch.ones(numel)).numel()


# --- properties -------------------------------------------------------------------------------------------------


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


def bound_of_errors(tensor, name, block_size, double_quantize):
    """float64 [n]: the largest error that an element may have.

    With s a block's exact scale and d the most by which the one that is decoded with may differ from it, NF4 (codes
    chosen with s) adds d to half of its widest step; integers and FP8 (chosen with the other) lose up to largest * d at
    the largest code, and their step is up to d wider.
    """
    numel = tensor.numel()
    x = torch.zeros(math.ceil(numel / block_size) * block_size, dtype=torch.float64)
    x[:numel] = tensor.double()
    scale = x.view(-1, block_size).abs().amax(dim=1) / LARGEST[name]
    off = torch.zeros_like(scale)
    if double_quantize:
        spread = torch.nn.functional.pad((scale - scale.mean()).abs(), (0, -len(scale) % GROUP))
        off = DYNAMIC_HALF_STEP * spread.view(-1, GROUP).amax(dim=1).repeat_interleave(GROUP)[: len(scale)]
        off += 2.0**-22 * (scale + scale.mean())
    scale, off = (t.repeat_interleave(block_size)[:numel] for t in (scale, off))
    wide = (scale + off).clamp_min(2.0**-126)
    if name == "nf4":
        step = NF4_HALF_STEP * scale.clamp_min(2.0**-126)
    elif name == "fp8_e4m3":
        step = torch.maximum(tensor.double().abs() * 2.0**-4, wide * 2.0**-10)
    else:
        step = wide / 2
    bound = step + LARGEST[name] * off + 2.0**-20 * tensor.double().abs() + 2.0**-126
    roundoff = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[tensor.dtype]
    return bound + roundoff * (tensor.double().abs() + bound) + 2.0**-25 * (tensor.dtype == torch.float16)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(tensors(), st.sampled_from(DOUBLE), st.sampled_from([2, 64, 96]), st.booleans())
def test_any_tensor_comes_back_within_its_error_bound(tensor, name, block_size, double_quantize):
    if name != "nf4" and not double_quantize:
        double_quantize = True  # the others are test_formats.py's
    fmt = make_format(name, block_size=block_size, double_quantize=double_quantize)
    payload = fmt.encode(tensor)
    assert payload.dtype == torch.uint8 and payload.numel() == fmt.payload_bytes(tensor.numel())
    assert payload.numel() % 16 == 0
    decoded = fmt.decode(payload, tensor.shape, tensor.dtype)
    assert decoded.isfinite().all()
    if tensor.numel():
        error = (decoded.double() - tensor.double()).abs()
        bound = bound_of_errors(tensor, name, block_size, double_quantize)
        worst = (error - bound).argmax()
        assert (error <= bound).all(), f"error {error[worst]} over bound {bound[worst]}"
    if not tensor.any():
        assert not decoded.any()


@EVERY_DOUBLE
def test_a_zero_block_is_zeros_among_others(name):
    """Its scale decodes to a number beside zero, its codes are zeros."""
    tensor = normal(64 * 20)
    tensor[64:128] = 0
    decoded = through(make_format(name, block_size=64, double_quantize=True), tensor)
    assert not decoded[64:128].any() and decoded[:64].any()


def test_a_scale_that_decodes_to_zero_or_below_gives_zero_codes():
    """One block far above the others: theirs decode to offset - level * group scale, which is cut off at zero."""
    tensor = torch.full((64 * 200,), 1e-4)
    tensor[:64] = 1000.0
    for name in ("int8", "int4", "fp8_e4m3"):
        fmt = make_format(name, block_size=64, double_quantize=True)
        payload = fmt.encode(tensor)
        scales = fmt._parts(payload.view(1, -1), tensor.numel())[0][0]
        assert (scales >= 0).all() and (scales[1:] == 0).any()
        codes = payload[fmt._places(tensor.numel())[1]].view(200, -1)
        assert not codes[scales == 0].any()
        assert codes[0].any()


def test_a_scale_that_rounds_beyond_the_largest_number_is_cut_off():
    """(max - max / 10) + max / 10 is Inf in fp32, and the codes' level 0 times it would be NaN."""
    largest = torch.finfo(torch.float32).max
    tensor = torch.zeros(640)
    tensor[0] = largest
    assert (largest - tensor[0] / 10 + tensor[0] / 10).isinf()
    decoded = through(make_format("nf4", block_size=64, double_quantize=True), tensor)
    assert decoded[0] == largest and not decoded[1:].any()


def test_rows_have_offsets_of_their_own():
    for name in DOUBLE:
        fmt = make_format(name, block_size=32, double_quantize=True)
        matrix = normal(5, 1001) * torch.logspace(-3, 3, 5)[:, None]
        together = fmt.encode_rows(matrix)
        assert torch.equal(together, torch.stack([fmt.encode(row) for row in matrix]))
        decoded = fmt.decode_rows(together, 1001, torch.bfloat16)
        assert torch.equal(decoded, torch.stack([fmt.decode(payload, (1001,), torch.bfloat16) for payload in together]))
        mean = fmt.mean_of_rows([together, together.flip(0)], 1001)
        values = fmt.decode_rows(together, 1001, torch.float32)
        assert torch.equal(mean, (values + values.flip(0)) * 0.5)


@EVERY_DOUBLE
@EITHER
def test_bytes_do_not_depend_on_the_size_of_the_pieces(name, double_quantize, monkeypatch):
    matrix = normal(7, 1001) * torch.logspace(-3, 3, 7)[:, None]
    matrix[2, 500], matrix[4, 0] = -math.nan, math.inf
    fmt = make_format(name, block_size=34, double_quantize=double_quantize)
    seen = []
    for piece in (1 << 18, 3003, 200, 1):
        monkeypatch.setattr(chunks, "PIECE", piece)
        payload = fmt.encode_rows(matrix)
        seen.append([payload, fmt.decode_rows(payload, 1001, torch.bfloat16).view(torch.int16)])
    assert all(torch.equal(a, b) for others in seen[1:] for a, b in zip(seen[0], others))


def test_the_offset_does_not_depend_on_the_number_of_threads():
    fmt = make_format("int8", block_size=1, double_quantize=True)
    tensor = normal(1 << 16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = fmt.encode(tensor)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(two, fmt.encode(tensor))


# --- NaN and Inf ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_exactly_the_nf4_block_with_a_special_value_becomes_nan(special, dtype):
    fmt, clean = make_format("nf4"), normal(300, dtype=dtype)
    for position, (start, end) in {0: (0, 64), 100: (64, 128), 299: (256, 300)}.items():
        tensor = clean.clone()
        tensor[position] = special
        inside = torch.zeros(300, dtype=torch.bool)
        inside[start:end] = True
        decoded = through(fmt, tensor)
        assert torch.equal(decoded.isnan(), inside)
        assert torch.equal(decoded[~inside], through(fmt, clean)[~inside])
        scales = fmt.encode(tensor)[: 5 * 4].view(torch.int32)
        assert scales[position // 64] == 0x7FC00000  # not the bits of the NaN that was there


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_DOUBLE
def test_exactly_the_blocks_with_special_values_become_nan(name, dtype):
    """Also with double-quantized scales; the other blocks keep to their error bound."""
    block = 4
    numel = block * 600 + 3
    tensor = normal(numel, dtype=dtype)
    special = {0: math.nan, 9: math.inf, 1500: -math.inf, numel - 1: math.nan}
    inside = torch.zeros(numel, dtype=torch.bool)
    for place, value in special.items():
        tensor[place] = value
        inside[place // block * block : place // block * block + block] = True
    fmt = make_format(name, block_size=block, double_quantize=True)
    decoded = through(fmt, tensor)
    assert torch.equal(decoded.isnan(), inside)
    finite = tensor.masked_fill(inside, 0.0)
    # The bound's mean counts the blocks as zeros, and with them the spread is at least as wide.
    bound = bound_of_errors(finite, name, block, True)
    assert ((decoded.double() - finite.double()).abs() <= bound)[~inside].all()


@EVERY_DOUBLE
def test_blocks_at_the_mean_beside_a_spoiled_one_are_not_taken_for_it(name):
    """Equal blocks have the deviation 0, whose code stands for NaN in a marked group; its group scale may be 0."""
    for spread in (0.0, 1.0):
        tensor = torch.ones(64 * 300)
        tensor[64 : 64 * 2] += spread
        tensor[64 * 2 : 64 * 3] -= spread / 2
        tensor[64 * 3 : 64 * 4] -= spread / 2
        tensor[64 * 5 + 1] = math.nan
        decoded = through(make_format(name, block_size=64, double_quantize=True), tensor)
        spoiled = torch.arange(64 * 300) // 64 == 5
        assert torch.equal(decoded.isnan(), spoiled)
        rest = ~spoiled & (tensor == 1)
        assert rest.sum() > 64 * 250
        torch.testing.assert_close(decoded[rest], tensor[rest], rtol=1e-5, atol=0)


@EVERY_DOUBLE
def test_a_tensor_of_nan(name):
    assert through(make_format(name, block_size=32, double_quantize=True), torch.full((100,), math.nan)).isnan().all()


# --- parts of a tensor ------------------------------------------------------------------------------------------

PART_FORMATS = [
    ("none", {}), ("fp16", {}), ("int8", {"block_size": 34}), ("int4", {"block_size": 2}), ("fp8_e4m3", {}),
    ("fp8_e5m2", {"block_size": 32}), ("int4", {"block_size": 64, "hadamard": True}), ("nf4", {"block_size": 6}),
    ("nf4", {}), ("mxfp4", {}), ("mxfp6_e3m2", {}), ("mxfp8_e5m2", {"scale_mode": "floor"}), ("mxint8", {}),
    ("int8", {"block_size": 3, "double_quantize": True}), ("int4", {"block_size": 2, "double_quantize": True}),
    ("nf4", {"block_size": 2, "double_quantize": True}), ("fp8_e4m3", {"block_size": 1, "double_quantize": True}),
]  # fmt: skip


def encode_parts(fmt, tensor, world):
    """[world, bytes of a part]: equal parts, as short as whole granules allow."""
    numel = max(1, math.ceil(tensor.numel() / world / fmt.granule)) * fmt.granule
    out = torch.full((world, fmt.payload_bytes(numel)), 0xAB, dtype=torch.uint8)
    for rank in range(world):
        fmt.encode_part(tensor, rank * numel, numel, out[rank])
    return out, numel


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    tensors(),
    st.sampled_from(PART_FORMATS),
    st.sampled_from([1, 2, 3, 4, 7]),
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([math.nan, math.inf])), max_size=3),
)
def test_parts_have_the_codes_and_scales_of_the_whole(tensor, chosen, world, specials):
    name, options = chosen
    options = options | ({"dtype": tensor.dtype} if name == "none" else {})
    fmt = make_format(name, **options)
    for place, special in specials:
        if tensor.numel():
            tensor[place % tensor.numel()] = special
    whole = fmt.encode(tensor)
    parts, numel = encode_parts(fmt, tensor, world)
    decoded = fmt.decode_rows(parts, numel, tensor.dtype).view(-1)
    assert same_bits(decoded[: tensor.numel()], fmt.decode(whole, tensor.shape, tensor.dtype))
    if not specials and not options.get("hadamard"):  # rotated zeros come back as small numbers
        assert not decoded[tensor.numel() :].any()
    if name in ("none", "fp16") or not tensor.numel():
        return
    (whole_scales, whole_codes), (scales, codes) = fmt._places(tensor.numel()), fmt._places(numel)
    code_bytes = parts[:, codes].reshape(-1)
    assert torch.equal(code_bytes[: whole[whole_codes].numel()], whole[whole_codes])
    blocks, count = numel // fmt.block_size, math.ceil(tensor.numel() / fmt.block_size)
    scale_size = 1 if options.get("double_quantize") else fmt.scale.num_bytes
    scale_bytes = parts[:, scales.start : scales.start + blocks * scale_size].reshape(-1)
    assert torch.equal(scale_bytes[: count * scale_size], whole[whole_scales][: count * scale_size])
    if options.get("double_quantize"):
        whole_numbers = whole[whole_scales][math.ceil(count / 16) * 16 :].clone().view(torch.int32)
        numbers = parts[:, scales][:, math.ceil(blocks / 16) * 16 :].clone().view(torch.int32)
        assert (numbers[:, -1] == whole_numbers[-1]).all()
        assert torch.equal(numbers[:, :-1].reshape(-1)[: len(whole_numbers) - 1], whole_numbers[:-1])


@pytest.mark.parametrize(("name", "options"), PART_FORMATS, ids=lambda value: str(value))
def test_a_payload_of_a_part_is_one_like_any_other(name, options):
    """Zeros between scales, codes and end; a part beyond the end, a shaped tensor, and a part of nothing."""
    fmt = make_format(name, **options)
    tensor = normal(3, 171)
    granule = fmt.granule
    numel = math.ceil(513 / granule) * granule
    out = torch.full((fmt.payload_bytes(numel),), 0xAB, dtype=torch.uint8)
    fmt.encode_part(tensor, 0, numel, out)
    padded_tensor = torch.nn.functional.pad(tensor.view(-1), (0, numel - 513))
    if not options.get("double_quantize"):
        assert torch.equal(out, fmt.encode(padded_tensor))
    else:
        scales, codes = fmt._places(numel)
        blocks = numel // fmt.block_size
        assert not out[scales.stop : codes.start].any() and not out[codes.stop :].any()
        assert not out[blocks : math.ceil(blocks / 16) * 16].any()
    out.fill_(0xAB)
    fmt.encode_part(tensor, numel, numel, out)
    assert not fmt.decode(out, (numel,), torch.float32).any()
    fmt.encode_part(tensor, 0, 0, torch.empty(0, dtype=torch.uint8))
    fmt.encode_part(torch.empty(0), 0, numel, out)
    assert not fmt.decode(out, (numel,), torch.float32).any()


def test_granules():
    expected = {"none": 1, "fp16": 1, "nf4": 64, **dict.fromkeys(("int8", "int4", "fp8_e4m3", "fp8_e5m2"), 128)}
    assert {name: make_format(name).granule for name in FORMAT_NAMES} == {
        **expected,
        **{name: 32 for name in FORMAT_NAMES if name.startswith("mx")},
    }
    assert make_format("int4", block_size=96, hadamard=True).granule == 96
    assert make_format("nf4", double_quantize=True).granule == 64 * 256
    assert SharedScaleFormat("fp8_e4m3").granule == 1


def test_weights_under_zero_init(monkeypatch):
    """DeepSpeed's zero.Init lets torch's constructors return 16 bits; neither tables nor payloads may change by it."""
    from zeropp_fp8.formats import dynamic_map, nf4

    tensor = normal(3000)
    formats = [make_format(name, block_size=4, double_quantize=double) for name in DOUBLE for double in (False, True)]
    expected = [fmt.encode(tensor) for fmt in formats]
    values = [fmt.decode(payload, (3000,), torch.float32) for fmt, payload in zip(formats, expected)]

    def in_16_bits(constructor):
        def wrapped(*args, **kwargs):
            made = constructor(*args, **kwargs)
            return made.to(torch.bfloat16) if made.is_floating_point() else made

        return wrapped

    for cached in (dynamic_map.dynamic_map, dynamic_map._limits, nf4._limits, nf4._pairs_of_levels):
        cached.cache_clear()
    dynamic_levels.cache_clear()
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn"):
        monkeypatch.setattr(torch, name, in_16_bits(getattr(torch, name)))
    for fmt, payload, decoded in zip(formats, expected, values):
        assert torch.equal(fmt.encode(tensor), payload)
        part = payload.new_empty(fmt.payload_bytes(8 * fmt.granule))
        fmt.encode_part(tensor, 0, 8 * fmt.granule, part)
        restored = fmt.decode(payload, (3000,), torch.float32)
        assert restored.dtype == torch.float32 and torch.equal(restored, decoded)


# --- errors -----------------------------------------------------------------------------------------------------


def test_nf4_has_one_rounding_and_no_rotation():
    for rounding in ("half_away", "stochastic", "up"):
        with pytest.raises(ValueError, match=f"nf4: rounding must be \"nearest\", got '{rounding}'"):
            make_format("nf4", rounding=rounding)
    with pytest.raises(ValueError, match="nf4: has no rotation"):
        make_format("nf4", hadamard=True)
    with pytest.raises(ValueError, match="nf4: block_size must be a positive multiple of 2"):
        make_format("nf4", block_size=3)
    fmt = make_format("nf4")
    assert isinstance(fmt, NF4Format) and fmt.block_size == 64 and repr(fmt) == "nf4 (block 64)"
    assert not fmt.needs_seed


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        *((name, {}, f"{name}: double_quantize is there for int4, int8, nf4, fp8_e4m3") for name in FORMAT_NAMES
          if name not in DOUBLE),
        *((name, {"hadamard": True}, f"{name}: double_quantize cannot be combined with hadamard") for name in DOUBLE
          if name != "nf4"),
        *((name, {"block_size": None}, f"{name}: double_quantize cannot be combined with block_size=None")
          for name in DOUBLE),
        *((name, {"rounding": "stochastic"}, f"{name}: double_quantize cannot be combined with stochastic")
          for name in DOUBLE if name != "nf4"),
        ("nf4", {"rounding": "stochastic"}, "nf4: rounding must be"),
        ("int3", {}, "unknown format 'int3'"),
    ],
)  # fmt: skip
def test_what_double_quantization_refuses(name, options, match):
    with pytest.raises(ValueError, match=match):
        make_format(name, double_quantize=True, **options)


def test_double_quantize_is_off_unless_asked_for():
    for name in FORMAT_NAMES:
        assert not isinstance(make_format(name, double_quantize=False), DoubleQuantizedFormat)
    fmt = make_format("int4", block_size=64, double_quantize=True)
    assert isinstance(fmt, DoubleQuantizedFormat)
    assert repr(fmt) == "int4 (block 64, double-quantized scales)"


def test_a_part_must_fit():
    fmt = make_format("nf4", double_quantize=True)
    granule = 64 * 256
    out = torch.empty(fmt.payload_bytes(granule), dtype=torch.uint8)
    for first, numel in ((1, granule), (0, granule - 64), (-granule, granule), (0, -granule)):
        with pytest.raises(ValueError, match=f"nf4: a part begins and ends at multiples of {granule} elements"):
            fmt.encode_part(torch.ones(granule), first, numel, out)
    for wrong in (out[:-16], out.view(1, -1), out.view(torch.int8)):
        with pytest.raises(ValueError, match=f"nf4: the payload of {granule} elements is"):
            fmt.encode_part(torch.ones(granule), 0, granule, wrong)
    for tensor in (torch.ones(granule).double(), torch.ones(0, dtype=torch.int32)):
        with pytest.raises(TypeError, match="nf4: can encode float32, bfloat16 and float16"):
            fmt.encode_part(tensor, 0, granule, out)


def test_what_has_no_parts():
    out = torch.empty(0, dtype=torch.uint8)
    for name in ("int8", "fp8_e5m2", "nf4"):
        fmt = make_format(name, block_size=None)
        with pytest.raises(ValueError, match=f"{name}: one scale for the whole tensor"):
            fmt.encode_part(torch.ones(4), 0, 0, out)
    for name in ("int4", "mxfp4"):
        with pytest.raises(ValueError, match=f"{name}: parts of a tensor cannot be rounded stochastically"):
            make_format(name, rounding="stochastic").encode_part(torch.ones(4), 0, 0, out)
    with pytest.raises(TypeError, match="with a shared scale"):
        SharedScaleFormat("fp8_e4m3").encode_part(torch.ones(16), 0, 16, torch.empty(16, dtype=torch.uint8))


# --- bitsandbytes -----------------------------------------------------------------------------------------------

WEIGHTS = [
    ((256, 512), 0, torch.float32),
    ((1024, 512), 1, torch.bfloat16),
    ((3, 64), 2, torch.float16),
    ((333, 770), 3, torch.float32),  # the last block has 42 elements
]


@pytest.fixture
def functional():
    return pytest.importorskip("bitsandbytes").functional


def unpacked(packed):
    """bitsandbytes' codes in order: it keeps the first of two in the high nibble."""
    packed = packed.view(-1)
    return torch.stack([packed >> 4, packed & 0xF], dim=1).view(-1)


def own_codes(fmt, payload, numel):
    packed = payload[fmt._places(numel)[1]]
    return torch.stack([packed & 0xF, packed >> 4], dim=1).view(-1)[:numel]


def weight_of(shape, seed, dtype):
    return (normal(*shape, seed=seed) * 0.02).to(dtype)


def test_the_tables_are_those_of_bitsandbytes(functional):
    assert torch.equal(functional.create_dynamic_map(), torch.tensor(dynamic_levels()))
    assert functional.get_4bit_type("nf4", device="cpu").tolist() == PUBLISHED_LEVELS


@pytest.mark.parametrize(("shape", "seed", "dtype"), WEIGHTS)
def test_nf4_is_that_of_bitsandbytes(functional, shape, seed, dtype):
    weight = weight_of(shape, seed, dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    fmt, numel = make_format("nf4", block_size=64), weight.numel()
    payload = fmt.encode(weight)
    assert torch.equal(own_codes(fmt, payload, numel), unpacked(packed)[:numel])
    assert torch.equal(payload[fmt._places(numel)[0]].view(torch.float32), state.absmax)
    assert_within_one_unit(fmt.decode(payload, shape, dtype), functional.dequantize_4bit(packed, state).view(shape))


def assert_within_one_unit(actual, expected):
    """Equal up to one unit in the last place of their dtype."""
    assert actual.dtype == expected.dtype
    integer = torch.int32 if actual.dtype == torch.float32 else torch.int16
    apart = (actual.view(integer).long() - expected.view(integer).long()).abs()
    assert ((apart <= 1) | (actual == expected)).all()  # also where zeros have other signs


@pytest.mark.parametrize(("shape", "seed", "dtype"), WEIGHTS)
def test_double_quantization_is_that_of_bitsandbytes(functional, shape, seed, dtype):
    """Scale codes are bitsandbytes' own, and by them the decoded numbers.

    In quantize_4bit its CPU code searches less precisely: where a number lies within 2^-15 of a limit the other level
    may be taken, and up to 0.3 % of the codes differ. Its portable code, which does as its CUDA kernels do, differs in
    none.
    """
    weight = weight_of(shape, seed, dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    fmt, numel = make_format("nf4", block_size=64, double_quantize=True), weight.numel()
    payload = fmt.encode(weight)
    assert torch.equal(own_codes(fmt, payload, numel), unpacked(packed)[:numel])
    blocks = math.ceil(numel / 64)
    scale_codes = payload[:blocks]
    numbers = payload[fmt._places(numel)[0]][math.ceil(blocks / 16) * 16 :].view(torch.float32)
    torch.testing.assert_close(numbers[-1], state.offset, rtol=2.0**-22, atol=0)
    torch.testing.assert_close(numbers[:-1], state.state2.absmax, rtol=1e-5, atol=0)

    absmax = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")[1].absmax
    deviations = absmax - numbers[-1]
    quantize = torch.ops.bitsandbytes.quantize_blockwise.default
    portable = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    expected, _ = quantize.redispatch(portable, deviations, functional.create_dynamic_map(), 256)
    assert (scale_codes == expected).double().mean() >= 0.999
    agree = scale_codes == state.absmax
    assert agree.double().mean() >= 0.99
    levels = torch.tensor(dynamic_levels())
    scaled = deviations / numbers[:-1].repeat_interleave(256)[:blocks]
    further = (levels[state.absmax.int()] - scaled).abs() - (levels[scale_codes.int()] - scaled).abs()
    assert (further.abs() <= 2.0**-14).all()

    elements = agree.repeat_interleave(64)[:numel].view(shape)
    decoded = fmt.decode(payload, shape, dtype)
    assert_within_one_unit(decoded[elements], functional.dequantize_4bit(packed, state).view(shape)[elements])


# --- kernels ----------------------------------------------------------------------------------------------------


def test_kernels_decode_in_the_interpreter():
    """The values of the torch code; odd sizes, slices out of order, slices beyond the end, NaN and Inf."""
    pytest.importorskip("triton")
    script = """
import torch
from kernel_cases import CPU, DTYPES, FROZEN_FORMATS, check_decoded_only, make

for name in FROZEN_FORMATS:
    check_decoded_only(make(name), torch.float32, [33, 1001], 3, [2, 0, 1], CPU, DTYPES.values())
for name in ("nf4-double", "int8-double"):
    check_decoded_only(make(name), torch.bfloat16, [40000, 33], 2, [1, 0], CPU, [torch.bfloat16])
    check_decoded_only(make(name), torch.float32, [9, 1, 2, 5], 8, [7, 1], CPU, [torch.float32])
check_decoded_only(make("nf4"), torch.float32, [2048, 2040, 1], 1, [0], CPU, [torch.float32])
for blocks in (768, 1024):  # 3 group scales and the offset fill 16 bytes, 4 do not
    check_decoded_only(make("nf4-2-double"), torch.float32, [2 * blocks], 1, [0], CPU, [torch.float32])
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


def test_kernels_decode_the_largest_numbers_and_parts_in_the_interpreter():
    """Scales at the end of fp32 in every dtype, and the payloads that encode_part makes."""
    pytest.importorskip("triton")
    script = """
import torch
from kernel_cases import CPU, DTYPES, FROZEN_FORMATS, SliceOrder, layouts, make, same

for name in FROZEN_FORMATS:
    fmt = make(name)
    values = torch.linspace(-1, 1, 1000) * torch.finfo(torch.float32).max
    values[::3] *= 1e-3
    values[500:700] = 0
    if name == "nf4-double":  # ten blocks: the largest scale is decoded as a sum beyond fp32
        values = torch.zeros(640)
        values[0] = torch.finfo(torch.float32).max
    numel = -(-1000 // fmt.granule) * fmt.granule
    for output in DTYPES.values():
        reference, kernels = layouts(fmt, [numel], output, CPU)
        payload = torch.empty(1, reference.row_bytes, dtype=torch.uint8)
        fmt.encode_part(values, 0, numel, payload[0])
        got, wanted = (torch.full((len(values),), 7.0, dtype=output) for _ in range(2))
        reference.decode(payload, SliceOrder([0], CPU), [wanted])
        kernels.decode(payload, SliceOrder([0], CPU), [got])
        assert wanted.isfinite().all() and same(got, wanted), (name, output)
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


def test_which_formats_kernels_decode():
    pytest.importorskip("triton")
    from zeropp_fp8 import kernels

    for name in FORMAT_NAMES:
        assert kernels.supports(make_format(name)) == (name != "nf4")
        assert kernels.decodes(make_format(name))
    for name in DOUBLE:
        fmt = make_format(name, double_quantize=True)
        assert kernels.decodes(fmt) and not kernels.supports(fmt)
        for block_size in (None, 32768):
            assert not kernels.decodes(make_format(name, block_size=block_size))
    shared = SharedScaleFormat("fp8_e4m3")
    assert kernels.supports(shared) and not kernels.decodes(shared)


def test_kernels_that_encode_or_sum_refuse_what_they_would_take_for_something_else():
    pytest.importorskip("triton")
    from zeropp_fp8 import kernels

    cpu, numel = torch.device("cpu"), 1024
    tensor, slices = torch.ones(numel), torch.zeros(1, dtype=torch.int32)
    int8 = kernels.SegmentTable(make_format("int8", block_size=64), [numel], [0], cpu)
    for options in ({"name": "nf4"}, {"name": "int8", "block_size": 64, "double_quantize": True}):
        fmt = make_format(**options)
        table = kernels.SegmentTable(fmt, [numel], [0], cpu)
        places = kernels.TensorTable([tensor], table, cpu)
        payload = fmt.encode(tensor).view(1, -1)
        with pytest.raises(ValueError, match=f"{options['name']} with '.*' scales: kernels only decode"):
            kernels.quantize(tensor, places, table, slices, payload)
        with pytest.raises(ValueError, match="kernels only decode"):
            kernels.reduce_to_tensors(payload, table, tensor, places)
        for pair in ((table, int8), (int8, table)):
            with pytest.raises(ValueError, match="kernels only decode"):
                kernels.reduce_to_payload(payload.view(1, 1, -1), *pair, payload)


def test_layouts_sum_by_torch_code_what_kernels_only_decode():
    pytest.importorskip("triton")
    script = """
import torch
from kernel_cases import CPU, check_reduce, make

for first, then in (("nf4", "nf4"), ("int8-double", "int4"), ("int8", "nf4-double"), ("none", "nf4")):
    check_reduce(make(first), make(then), torch.float32, [33, 1001], 2, 2, CPU, [torch.float32])
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    """One load from the table for an NF4 element, and no way through shared memory; no product is fused to a sum."""
    pytest.importorskip("triton")
    script = f"""
import os, subprocess
import triton
from kernel_cases import make
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.kernels.dequantize import dequantize_kernel as kernel
from zeropp_fp8.kernels.tables import KernelFormat

CAPABILITY = {capability}
POINTERS = {{"base_ptr": "*bf16", "payload_ptr": "*u8", "slices_ptr": "*i32", "tensors_ptr": "*i64",
             "segments_ptr": "*i64", "tile_starts_ptr": "*i32", "lookup_ptr": "*fp32"}}
LOADS = {{"nf4": "b32", "int4": "b32", "int8": "v2.b32", "fp8_e4m3": "v2.b32"}}
for name in ("nf4", "nf4-double", "int4-double", "int8-double", "fp8_e4m3-double"):
    form = KernelFormat.of(make(name))
    constants = {{
        "LIMIT": 3.38e38, "ELEMENT": form.element, "BLOCK_SIZE": form.block_size, "WIDTH": form.width,
        "TILE_BLOCKS": form.tile_blocks, "HADAMARD": False, "SCALE": form.scale, "ALIGNED": True,
        "NATIVE_FP8": CAPABILITY >= 89, "INTERPRETED": False, "STARTS": 8}}
    signature = {{a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in kernel.arg_names}}
    attributes = {{(i,): [["tt.divisibility", 16]] for i, a in enumerate(kernel.arg_names) if a not in constants}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {{"num_warps": form.num_warps, "enable_fp_fusion": False}}
    code = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options).asm["ptx"]
    assert ".local" not in code and "fma.rn.f32" not in code and ".shared" not in code, name
    assert "ld.global." + LOADS[form.element] in code and "st.global.v4.b32" in code, name
    if form.element == "nf4":
        # One look-up an element: 2048 for 64 threads, in both bodies, and a few loads a tile.
        assert 64 <= code.count("ld.global.b32") <= 64 + 24, code.count("ld.global.b32")
        ptxas = [triton.knobs.nvidia.ptxas.path, "-v", f"-arch=sm_{{CAPABILITY}}", "-o", os.devnull, "/dev/stdin"]
        said = subprocess.run(ptxas, input=code.replace("sm_90a", "sm_90"), capture_output=True, text=True, check=True)
        assert "0 bytes spill stores, 0 bytes spill loads" in said.stderr, (name, said.stderr)
print("done")
"""
    assert run(script, interpret=False).strip().endswith("done")
