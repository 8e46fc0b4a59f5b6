"""MX formats against a float64 reference written from the specification, signal-to-noise figures and properties."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import (
    MX_BITS,
    MX_EMAX,
    MX_HOLDS_SPECIAL,
    MX_LARGEST,
    mx_code_value,
    mx_grid,
    mx_payload,
    mx_reference,
    mx_round,
    mx_shared_exponent,
    signal_samples,
    signal_to_noise_db,
)

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import MX_NAMES, BlockScaledFormat, chunks, make_format

NAMES = tuple(MX_BITS)
SPOILED = tuple(name for name in NAMES if name not in MX_HOLDS_SPECIAL)
MODES = ("rceil", "floor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32_MAX = torch.finfo(torch.float32).max
EVERY_NAME = pytest.mark.parametrize("name", NAMES)
EVERY_MODE = pytest.mark.parametrize("scale_mode", MODES)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through(fmt, tensor):
    """Encode and decode."""
    return fmt.decode(fmt.encode(tensor), tensor.shape, tensor.dtype)


def block_scales(fmt, blocks):
    """X of fp32 blocks [..., 32]."""
    rows, scale_bytes = blocks.reshape(1, -1, 32).clone(), torch.empty(1, blocks.numel() // 32, dtype=torch.uint8)
    fmt.scale.scale_(rows, scale_bytes, chunks.Scratch(blocks.device))
    return fmt.scale.decode(scale_bytes).view(blocks.shape[:-1])


def round_to_element(fmt, scaled):
    """P of fp32 values / X, through the codes."""
    scratch = chunks.Scratch(scaled.device)
    rows = torch.nn.functional.pad(scaled.reshape(1, -1), (0, -scaled.numel() % 32))
    codes = torch.empty(1, rows.numel() * fmt.element.bits // 8, dtype=torch.uint8)
    fmt.element.quantize_(rows, codes, scratch)
    fmt.element.dequantize(codes, rows, scratch)
    return rows[0, : scaled.numel()].view(scaled.shape)


def bits_of(tensor):
    """The tensor's bits, NaN in one form."""
    integer = torch.int32 if tensor.dtype == torch.float32 else torch.int16
    return torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor).contiguous().view(integer)


def assert_same(actual, expected):
    """Equal bit for bit, zeros with their signs."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    different = (bits_of(actual) != bits_of(expected)).nonzero()
    assert not len(different), (different[:5].tolist(), actual[bits_of(actual) != bits_of(expected)][:5])


def finite_clamped(decoded, dtype):
    """float64 numbers in `dtype`, finite ones within its range."""
    largest = torch.finfo(dtype).max
    decoded = torch.from_numpy(np.where(np.isfinite(decoded), np.clip(decoded, -largest, largest), decoded))
    return decoded.to(dtype)


def wide(numel, dtype, seed=0):
    """Numbers over most of a dtype's exponents, blocks of one magnitude and of many, signed zeros, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal), math.log2(info.max)
    exponents = low + torch.rand(numel, generator=generator, dtype=torch.float64) * (high - low - 0.01)
    exponents[: numel // 2] = (exponents[0] + 8 * torch.rand(numel // 2, generator=generator)).clamp(max=high - 0.01)
    values = torch.exp2(exponents) * torch.randn(numel, generator=generator).sign()
    values[::7] = 0.0
    values[3::14] = -0.0
    values[5::31] = -info.smallest_normal / 3
    return values.to(dtype)


# --- signal-to-noise --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples():
    return signal_samples()


@pytest.mark.parametrize(
    ("name", "scale_mode", "normal_db", "student_t_db"),
    [
        ("mxfp8_e4m3", "floor", 30.7, 29.9),
        ("mxfp8_e4m3", "rceil", 31.5, 31.5),
        ("mxfp8_e5m2", "rceil", 25.5, 25.6),
        ("mxfp6_e2m3", "floor", 30.9, 30.0),
        ("mxfp6_e2m3", "rceil", 30.9, 30.0),
        ("mxfp6_e3m2", "floor", 25.4, 25.2),
        ("mxfp6_e3m2", "rceil", 25.4, 25.2),
        ("mxfp4", "floor", 18.8, 17.7),
        # E2M1's largest number is 1.5 * 4, so that one block in three has its numbers moved down to a coarser step:
        # more than half of a block's error, where one number is much larger than the others.
        ("mxfp4", "rceil", 18.8, 17.1),
        ("mxint8", "floor", 41.3, 39.1),
        ("mxint8", "rceil", 41.3, 39.1),
    ],
)
def test_signal_to_noise(samples, name, scale_mode, normal_db, student_t_db):
    fmt = make_format(name, scale_mode=scale_mode)
    for distribution, expected in (("normal", normal_db), ("student_t", student_t_db)):
        measured = signal_to_noise_db(samples[distribution], through(fmt, samples[distribution]))
        assert measured >= expected - 0.5, f"{distribution}: {measured:.2f} dB"


# --- the reference ----------------------------------------------------------------------------------------------


def test_the_names_are_those_of_the_specification():
    assert MX_NAMES == NAMES


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_MODE
@EVERY_NAME
def test_bytes_and_values_match_the_reference(name, scale_mode, dtype):
    fmt = make_format(name, scale_mode=scale_mode)
    for rows, numel in ((3, 1), (2, 31), (1, 32), (3, 100), (2, 1001)):
        matrix = wide(rows * numel, dtype, seed=numel).view(rows, numel)
        if numel == 1001:
            matrix[0, 40], matrix[0, 200], matrix[1, 500], matrix[1, 1000] = math.nan, -math.nan, math.inf, -math.inf
            matrix[1, 600] = torch.finfo(dtype).max
        scales, codes, decoded = mx_reference(matrix.double().numpy(), name, scale_mode)
        payload = fmt.encode_rows(matrix)
        assert payload.shape == (rows, fmt.payload_bytes(numel))
        for row in range(rows):
            assert bytes(payload[row].tolist()) == mx_payload(scales[row], codes[row], name)
        for output in DTYPES:
            expected = finite_clamped(decoded, output)
            assert_same(fmt.decode_rows(payload, numel, output), expected)
        assert_same(fmt.round_trip(matrix), finite_clamped(decoded, dtype))


@EVERY_MODE
@EVERY_NAME
def test_the_scale_is_exact_at_every_exponent(name, scale_mode):
    """Around powers of two, and around the largest number times them, where the exponent changes."""
    fmt = make_format(name, scale_mode=scale_mode)
    amax = []
    for exponent in range(-126, 128):
        for start in (2.0**exponent, MX_LARGEST[name] * 2.0 ** (exponent - MX_EMAX[name])):
            number = torch.tensor(start)
            amax += [
                torch.nextafter(number, torch.tensor(0.0)),
                number,
                torch.nextafter(number, torch.tensor(math.inf)),
            ]
    amax = [a.item() for a in amax if 2.0**-126 <= a <= FP32_MAX] + [2.0**-126, FP32_MAX]
    blocks = torch.zeros(len(amax), 32)
    blocks[:, 7] = -torch.tensor(amax)
    expected = [mx_shared_exponent(a, name, scale_mode) for a in amax]
    scales = block_scales(fmt, blocks)
    assert scales.double().tolist() == [2.0**e for e in expected]
    assert fmt.encode_rows(blocks)[:, 0].tolist() == [e + 127 for e in expected]
    if scale_mode == "rceil" and name != "mxint8":  # INT8's would be 2^128 at the top
        assert (blocks.double().abs() <= MX_LARGEST[name] * scales.double()[:, None]).all()


@EVERY_NAME
def test_every_code_decodes_with_every_scale(name):
    """256 scales times all codes, among them those that encoding never writes, into each dtype."""
    fmt, bits = make_format(name), MX_BITS[name]
    codes = list(range(1 << bits)) * (2 if bits == 4 else 1)
    numbers = np.array([mx_code_value(name, code) for code in codes])
    blocks = len(codes) // 32
    payload = [mx_payload(np.full(blocks, byte), np.array(codes), name) for byte in range(256)]
    payload = torch.tensor([list(row) for row in payload], dtype=torch.uint8)
    factors = np.array([2.0 ** (byte - 127) for byte in range(255)] + [math.nan])
    for dtype in DTYPES:
        decoded = fmt.decode_rows(payload, len(codes), dtype)
        assert_same(decoded, finite_clamped(numbers * factors[:, None], dtype))


@EVERY_MODE
@EVERY_NAME
def test_every_code_comes_back(name, scale_mode):
    """decode -> encode gives the same bytes, at scales where nothing is an fp32 subnormal nor beyond fp32."""
    fmt, bits = make_format(name, scale_mode=scale_mode), MX_BITS[name]
    largest = 127 if name == "mxint8" else len(mx_grid(name)) - 1
    codes = [code for code in range(1 << bits) if not math.isnan(mx_code_value(name, code))]
    if name == "mxint8":
        codes.remove(0x80)
    if name in MX_HOLDS_SPECIAL:
        codes.append(0x7F)
    codes = list(itertools.chain.from_iterable([largest, *codes[i : i + 31]] for i in range(0, len(codes), 31)))
    codes += [0] * (-len(codes) % 32)
    blocks = len(codes) // 32
    for byte in (30, 100, 126, 127, 128, 200, 254 - MX_EMAX[name]):
        payload = mx_payload(np.full(blocks, byte), np.array(codes), name)
        payload = torch.tensor(list(payload), dtype=torch.uint8)
        tensor = fmt.decode(payload, (len(codes),), torch.float32)
        assert torch.equal(fmt.encode(tensor), payload), byte
        assert_same(through(fmt, tensor), tensor)


@EVERY_NAME
def test_round_to_element_searches_the_grid(name):
    """Every grid point, every midpoint and their fp32 neighbours, small numbers, large ones; both signs."""
    grid = mx_grid(name)
    points = torch.from_numpy(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [1e-30, 2.0**-126, grid[-1] * 1.99]]))
    points = points.float()
    below, above = (torch.nextafter(points, torch.tensor(end)) for end in (0.0, math.inf))
    scaled = torch.cat([points, below, above])
    scaled = torch.cat([scaled, -scaled])
    fmt = make_format(name)
    rounded = round_to_element(fmt, scaled.view(2, -1))
    expected = grid[mx_round(scaled.abs().double().numpy(), name)]
    expected = torch.copysign(torch.from_numpy(expected).float(), scaled)
    if name == "mxint8":
        expected += 0.0
    assert_same(rounded, expected.view(2, -1))
    if name in MX_HOLDS_SPECIAL:
        special = round_to_element(fmt, torch.tensor([math.nan, math.inf, -math.inf]))
        assert special.isnan().tolist() == ([True, False, False] if name == "mxfp8_e5m2" else [True] * 3)
        if name == "mxfp8_e5m2":
            assert special[1:].tolist() == [math.inf, -math.inf]


@EVERY_NAME
def test_scaling_and_rounding_make_the_round_trip(name):
    fmt = make_format(name)
    blocks = wide(6 * 32, torch.float32).view(2, 3, 32)
    blocks[blocks.abs() < 2.0**-126] = 0.0
    scales = block_scales(fmt, blocks)
    numbers = round_to_element(fmt, blocks / scales.unsqueeze(-1))
    assert torch.equal((numbers * scales.unsqueeze(-1)).clamp(-FP32_MAX, FP32_MAX), fmt.round_trip(blocks))


# --- special and extreme numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_MODE
@EVERY_NAME
def test_nan_and_inf(name, scale_mode, dtype):
    fmt = make_format(name, scale_mode=scale_mode)
    clean = normal(100, dtype=dtype)
    expected = through(fmt, clean)
    for special, place in itertools.product((math.nan, math.inf, -math.inf), (0, 40, 99)):
        tensor = clean.clone()
        # Not the block's amax, so that the scale of its neighbours stays.
        assert clean[place].abs() < clean[place // 32 * 32 : place // 32 * 32 + 32].abs().max()
        tensor[place] = special
        decoded = through(fmt, tensor)
        changed = torch.zeros(100, dtype=torch.bool)
        if name in MX_HOLDS_SPECIAL:
            changed[place] = True
            kept = name == "mxfp8_e5m2" and math.isinf(special)
            assert decoded[place].item() == special if kept else decoded[place].isnan()
        else:
            changed[place // 32 * 32 : place // 32 * 32 + 32] = True
            assert decoded[changed].isnan().all()
        assert_same(decoded[~changed], expected[~changed])
        assert_same(fmt.round_trip(tensor), decoded)
        scale = block_scales(fmt, torch.nn.functional.pad(tensor.float(), (0, 28)).view(4, 32))
        assert scale.isnan().sum() == (name in SPOILED)


@pytest.mark.parametrize("name", MX_HOLDS_SPECIAL)
def test_a_block_of_nothing_but_specials(name):
    decoded = through(make_format(name), torch.full((32,), -math.inf))
    assert (decoded == -math.inf).all() if name == "mxfp8_e5m2" else decoded.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_MODE
@EVERY_NAME
def test_extremes_stay_finite(name, scale_mode, dtype):
    """The dtype's largest numbers; X * P may lie beyond them, also beyond fp32."""
    fmt, info = make_format(name, scale_mode=scale_mode), torch.finfo(dtype)
    tensor = torch.tensor([info.max, -info.max, info.max / 2, info.smallest_normal, 0.0], dtype=dtype)
    decoded = through(fmt, tensor)
    assert decoded.isfinite().all()
    assert decoded[0] == -decoded[1] and decoded[0] >= 0.9 * info.max if scale_mode == "rceil" else decoded[0] > 0
    assert decoded[4] == 0
    assert_same(fmt.round_trip(tensor), decoded)


@EVERY_NAME
def test_zeros_and_subnormals(name):
    """An all-zero block has the smallest scale; fp32 subnormals are zeros, with their sign where there is one."""
    for tensor in (torch.zeros(40), torch.full((40,), 2.0**-127), torch.full((40,), 2.0**-149)):
        payload = make_format(name).encode(tensor)
        assert not payload.any()
    payload = make_format(name).encode(torch.full((32,), -(2.0**-130)))
    first_code_byte = 0 if name == "mxint8" else {4: 0b10001000, 6: 0b00100000, 8: 0b10000000}[MX_BITS[name]]
    assert payload[0] == 0 and payload[16] == first_code_byte
    decoded = through(make_format(name), torch.tensor([-0.0, 0.0, 1.0, -(2.0**-140)]))
    assert decoded.tolist() == [0.0, 0.0, 1.0, 0.0]
    assert decoded.signbit().tolist() == [name != "mxint8", False, False, name != "mxint8"]


@EVERY_MODE
@EVERY_NAME
def test_subnormals_beside_small_numbers(name, scale_mode):
    """Where an fp32 subnormal is within reach of the grid, it must be a zero, not the nearest code."""
    fmt = make_format(name, scale_mode=scale_mode)
    for exponent in range(-126, -60):
        tensor = torch.full((32,), -(2.0**-126 - 2.0**-149))
        tensor[3] = 1.75 * 2.0**exponent
        decoded = through(fmt, tensor)
        assert decoded[3] != 0 and decoded.count_nonzero() == 1


# --- axes, shapes -----------------------------------------------------------------------------------------------

shapes = st.one_of(
    st.sampled_from([(0,), (1,), (7,), (0, 3), (3, 0), (1, 1, 1), (31,), (33,), (64, 65), (40, 1)]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
)


@st.composite
def quantized_tensors(draw):
    """(format, tensor, axis) over all formats and options, any shape and dtype, NaN and Inf now and then."""
    fmt = make_format(draw(st.sampled_from(NAMES)), scale_mode=draw(st.sampled_from(MODES)))
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    numel, seed = math.prod(shape), draw(st.integers(0, 2**31))
    kind = draw(st.sampled_from(["normal", "wide", "largest", "special"]))
    tensor = wide(numel, dtype, seed) if kind == "wide" and numel else normal(numel, seed=seed, dtype=dtype)
    if kind == "largest":
        tensor = tensor.sign() * torch.finfo(dtype).max
    if kind == "special" and numel:
        tensor[seed % numel] = draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    return fmt, tensor.view(shape), draw(st.integers(-len(shape), len(shape) - 1))


@settings(max_examples=300, derandomize=True)
@given(quantized_tensors())
def test_any_tensor_along_any_axis(chosen):
    fmt, tensor, axis = chosen
    moved = tensor.movedim(axis, -1).contiguous()
    numel = moved.shape[-1]
    rows = moved.reshape(math.prod(moved.shape[:-1]), numel)
    payload = fmt.encode_rows(rows)
    expected = fmt.decode_rows(payload, numel, tensor.dtype).view(moved.shape).movedim(-1, axis).contiguous()
    rounded = fmt.round_trip(tensor, axis)
    assert rounded.is_contiguous()
    assert_same(rounded, expected)


@EVERY_NAME
def test_the_axis_matters(name):
    matrix = normal(64, 96) * torch.logspace(-9, 9, 64)[:, None]
    fmt = make_format(name)
    assert_same(fmt.round_trip(matrix, axis=0), fmt.round_trip(matrix.t()).t().contiguous())
    assert not torch.equal(fmt.round_trip(matrix, axis=0), fmt.round_trip(matrix, axis=1))


def test_a_tensor_that_requires_grad_is_rounded_without_one():
    weight = normal(4, 40).requires_grad_()
    assert not make_format("mxfp4").round_trip(weight).requires_grad


@EVERY_NAME
def test_bytes_do_not_depend_on_the_size_of_the_pieces(name, monkeypatch):
    matrix = normal(7, 1001) * torch.logspace(-3, 3, 7)[:, None]
    matrix[2, 500], matrix[4, 0] = -math.nan, math.inf
    fmt, seen = make_format(name), []
    for piece in (1 << 18, 3003, 200, 1):
        monkeypatch.setattr(chunks, "PIECE", piece)
        payload = fmt.encode_rows(matrix)
        mean = fmt.mean_of_rows([payload, payload.flip(0)], 1001)
        values = fmt.decode_rows(payload, 1001, torch.bfloat16), fmt.round_trip(matrix), mean
        seen.append([payload, *map(bits_of, values)])
    assert all(torch.equal(a, b) for others in seen[1:] for a, b in zip(seen[0], others))


# --- payloads ---------------------------------------------------------------------------------------------------


@EVERY_NAME
def test_sizes(name):
    fmt, bits = make_format(name), MX_BITS[name]
    assert fmt.bits_per_element == bits + 8 / 32
    for numel in (0, 1, 31, 32, 33, 512, 513, 1000):
        blocks = math.ceil(numel / 32)
        expected = math.ceil(blocks / 16) * 16 + math.ceil(blocks * 4 * bits / 16) * 16
        assert fmt.payload_bytes(numel) == expected
    assert fmt.payload_bytes(1 << 24) * 8 / (1 << 24) == pytest.approx(fmt.bits_per_element, abs=1e-4)


@EVERY_NAME
def test_the_mean_of_rows(name):
    """fp32 sums of what the payloads decode to, in their order; NaN and Inf go through."""
    fmt = make_format(name)
    tensors = [normal(3, 200, seed=seed) for seed in range(4)]
    tensors[1][2, 150] = math.inf
    payloads = [fmt.encode_rows(tensor) for tensor in tensors]
    total = torch.zeros(3, 200)
    for payload in payloads:
        total = total + fmt.decode_rows(payload, 200, torch.float32)
    mean = fmt.mean_of_rows(payloads, 200)
    assert torch.equal(mean.isnan(), total.isnan()) and torch.equal(mean.nan_to_num(), (total * 0.25).nan_to_num())
    assert mean[2, 150].isnan() or (name == "mxfp8_e5m2" and mean[2, 150] == math.inf)


def test_layouts_tell_scale_modes_apart():
    options = [{}, {"scale_mode": "floor"}]
    formats = [make_format(name, **chosen) for name in NAMES for chosen in options]
    assert len({fmt.key for fmt in formats}) == len(formats)
    assert make_format("mxfp4").key == make_format("mxfp4", scale_mode="rceil", block_size=32).key
    assert make_format("int8", block_size=32).key != make_format("mxint8").key


def test_all_formats_in_one_payload():
    formats = [make_format(name) for name in NAMES] + [make_format("mxfp4", scale_mode="floor"), make_format("int8")]
    numels = [33, 100, 7, 0, 64, 500, 31, 40]
    layout = PayloadLayout(numels, formats, [torch.bfloat16] * len(numels), torch.device("cpu"))
    order = SliceOrder([1, 0], torch.device("cpu"))
    tensors = [normal(2 * numel, seed=numel, dtype=torch.bfloat16) for numel in numels]
    payload = torch.full((2, layout.row_bytes), 0xAB, dtype=torch.uint8)
    layout.encode(tensors, order, payload)
    decoded = [torch.empty_like(tensor) for tensor in tensors]
    layout.decode(payload, order, decoded)
    for tensor, fmt, actual in zip(tensors, formats, decoded):
        rows = tensor.view(2, -1)
        assert_same(actual, fmt.decode_rows(fmt.encode_rows(rows), rows.shape[1], torch.bfloat16).view(-1))


# --- options ----------------------------------------------------------------------------------------------------


@EVERY_NAME
def test_options(name):
    fmt = make_format(name)
    assert isinstance(fmt, BlockScaledFormat) and fmt.block_size == 32 and not fmt.hadamard
    assert fmt.scale_mode == "rceil"
    assert repr(fmt) == f"{name} (rceil)"
    assert repr(make_format(name, scale_mode="floor")) == f"{name} (floor)"
    make_format(name, block_size=32, hadamard=False)
    for block_size in (16, 64, 0, None, 32.0, True):
        with pytest.raises(ValueError, match=f"{name}: block_size is 32 in every MX format"):
            make_format(name, block_size=block_size)
    with pytest.raises(ValueError, match=f"{name}: MX formats have no rotation"):
        make_format(name, hadamard=True)
    with pytest.raises(ValueError, match=rf"{name}: scale_mode must be one of .*'rceil', 'floor'.* got 'ceil'"):
        make_format(name, scale_mode="ceil")


@EVERY_NAME
def test_what_cannot_be_quantized(name):
    fmt = make_format(name)
    for call in (fmt.encode, fmt.round_trip):
        with pytest.raises(TypeError, match=f"{name}: can encode float32, bfloat16 and float16"):
            call(torch.ones(4, dtype=torch.float64))
    with pytest.raises(IndexError, match="axis 2 of a tensor with 2 axes"):
        fmt.round_trip(torch.ones(2, 2), 2)
    with pytest.raises(IndexError, match="axis -1 of a tensor with 0 axes"):
        fmt.round_trip(torch.tensor(1.0))


# --- another implementation -------------------------------------------------------------------------------------


@EVERY_MODE
@EVERY_NAME
def test_the_values_of_torchao(name, scale_mode):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    element = {
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp4": torch.float4_e2m1fn_x2,
    }.get(name)
    if element is None:
        pytest.skip("torchao has no MXINT8")
    values = normal(4096, seed=1) * torch.logspace(-6, 6, 4096)
    mode = getattr(config.ScaleCalculationMode, scale_mode.upper())
    scales, codes = mx_tensor.to_mx(values.view(-1, 32), element, 32, mode)
    payload = make_format(name, scale_mode=scale_mode).encode(values)
    assert torch.equal(payload[:128], scales.view(torch.uint8).view(-1))
    codes = bytes(codes.view(torch.uint8).reshape(-1).tolist())
    if MX_BITS[name] == 6:  # there a byte each
        codes = sum(code << 6 * i for i, code in enumerate(codes)).to_bytes(4096 * 6 // 8, "little")
    assert bytes(payload[128:].tolist()) == codes
