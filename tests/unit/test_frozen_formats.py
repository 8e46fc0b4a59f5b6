"""NF4, the dynamic type and double-quantized scales: against references in numpy and the papers."""

import functools
import math
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from frozen_format_cases import DOUBLE, DTYPES, EVERY_DOUBLE, PUBLISHED_LEVELS, PUBLISHED_LIMITS, normal, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import signal_samples, signal_to_noise_db

from zeropp_fp8.formats import FORMAT_NAMES, DoubleQuantizedFormat, NF4Format, chunks, make_format
from zeropp_fp8.formats.dynamic_map import dynamic_levels, nearest_dynamic

LARGEST = {"int4": 7, "int8": 127, "nf4": 1, "fp8_e4m3": 448}
GROUP = 256
# Half of NF4's widest step, and of the dynamic type's.
NF4_HALF_STEP = (PUBLISHED_LEVELS[1] - PUBLISHED_LEVELS[0]) / 2
DYNAMIC_HALF_STEP = 0.9 / 2**6 / 2
EITHER = pytest.mark.parametrize("double_quantize", [False, True], ids=["plain", "double"])


def through(fmt, tensor, dtype=None):
    return fmt.decode(fmt.encode(tensor), tensor.shape, dtype or tensor.dtype)


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


@settings(max_examples=250, derandomize=True)
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


# --- under zero.Init --------------------------------------------------------------------------------------------


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


def test_nf4_has_no_rotation():
    with pytest.raises(ValueError, match="nf4: has no rotation"):
        make_format("nf4", hadamard=True)
    with pytest.raises(ValueError, match="nf4: block_size must be a positive multiple of 2"):
        make_format("nf4", block_size=3)
    fmt = make_format("nf4")
    assert isinstance(fmt, NF4Format) and fmt.block_size == 64 and repr(fmt) == "nf4 (block 64)"


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        *((name, {}, f"{name}: double_quantize is there for int4, int8, nf4, fp8_e4m3") for name in FORMAT_NAMES
          if name not in DOUBLE),
        *((name, {"hadamard": True}, f"{name}: double_quantize cannot be combined with hadamard") for name in DOUBLE
          if name != "nf4"),
        *((name, {"block_size": None}, f"{name}: double_quantize cannot be combined with block_size=None")
          for name in DOUBLE),
        ("int5", {}, "unknown format 'int5'"),
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
