"""Number formats against written-out references, signal-to-noise figures and properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import (
    CODE_BITS,
    GROUP,
    LARGEST_CODE,
    SMALLEST_SCALE,
    bfloat16_at_least,
    error_bound,
    float8_value,
    integer_reference,
    payload_size,
    signal_samples,
    signal_to_noise_db,
    sylvester_matrix,
)

from zeropp_fp8.formats import FORMAT_NAMES, HALF_STEP_NAMES, chunks, make_format
from zeropp_fp8.formats.chunks import Scratch
from zeropp_fp8.formats.hadamard import rotate_, rotate_back_

QUANTIZED = tuple(CODE_BITS)
FLOAT8 = ("fp8_e4m3", "fp8_e5m2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROTATION = pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
EVERY_QUANTIZED = pytest.mark.parametrize("name", QUANTIZED)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through(fmt, tensor):
    """Encode and decode."""
    return fmt.decode(fmt.encode(tensor), tensor.shape, tensor.dtype)


# --- signal-to-noise --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples():
    return signal_samples()


@pytest.mark.parametrize(
    ("name", "block_size", "hadamard", "normal_db", "student_t_db"),
    [
        ("int8", 128, False, 43.8, 39.3),
        ("int8", 2048, False, 41.7, 33.1),
        ("int8", 8192, False, 40.9, 30.0),
        ("int4", 32, False, 20.3, 17.6),
        ("int4", 128, False, 18.6, 14.3),
        ("int4", 2048, False, 16.5, 8.5),
        ("int4", 128, True, 18.6, 18.6),
        ("fp8_e4m3", None, False, 31.5, 31.6),
        ("fp8_e4m3", 128, False, 31.8, 32.4),
        ("fp8_e5m2", None, False, 25.6, 25.6),
    ],
)
def test_signal_to_noise(samples, name, block_size, hadamard, normal_db, student_t_db):
    fmt = make_format(name, block_size=block_size, hadamard=hadamard)
    for distribution, expected in (("normal", normal_db), ("student_t", student_t_db)):
        measured = signal_to_noise_db(samples[distribution], through(fmt, samples[distribution]))
        assert measured >= expected - 0.5, f"{distribution}: {measured:.2f} dB"


def test_signal_to_noise_helper():
    reference = torch.tensor([3.0, -4.0])
    assert signal_to_noise_db(reference, reference) == math.inf
    assert signal_to_noise_db(reference, torch.tensor([3.5, -4.0])) == pytest.approx(20.0)


# --- written-out references -------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 7, 128, 300, 1001])
@pytest.mark.parametrize("block_size", [2, 34, 128])
@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_integers_match_the_reference_byte_for_byte(name, bits, block_size, numel):
    values = normal(numel, seed=numel) * torch.logspace(-4, 4, numel)
    values[::11] = 0
    fmt = make_format(name, block_size=block_size)
    payload, decoded = integer_reference(values.double().tolist(), bits, block_size)
    assert bytes(fmt.encode(values).tolist()) == payload
    assert fmt.decode(fmt.encode(values), (numel,), torch.float32).double().tolist() == decoded


def test_rotated_integers_match_the_reference():
    values = normal(320, seed=3)
    rotation = sylvester_matrix()
    rotated = (values.double().view(-1, GROUP) @ rotation / GROUP).view(-1)
    _, decoded = integer_reference(rotated.tolist(), bits=4, block_size=64)
    expected = (torch.tensor(decoded, dtype=torch.float64).view(-1, GROUP) @ rotation).view(-1)
    actual = through(make_format("int4", block_size=64, hadamard=True), values).double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


def one_block_payload(codes):
    """A payload of one block: scale 1.0 in bf16, padded to 16 bytes, then the code bytes."""
    payload = bytes([0x80, 0x3F]) + bytes(14) + bytes(codes)
    return torch.tensor(list(payload + bytes(-len(payload) % 16)), dtype=torch.uint8)


@pytest.mark.parametrize("name", FLOAT8)
def test_every_float8_code_decodes_by_the_formula(name):
    payload = one_block_payload(range(256))
    decoded = make_format(name, block_size=256).decode(payload, (256,), torch.float32)
    expected = torch.tensor([float8_value(code, name) for code in range(256)])
    largest = torch.finfo(torch.float32).max  # the Inf codes of E5M2 are never written; decoding clamps them
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert torch.equal(decoded.nan_to_num(0.0), expected.clamp(-largest, largest).nan_to_num(0.0))


@EVERY_QUANTIZED
def test_every_code_round_trips(name):
    if name in FLOAT8:
        codes = [code for code in range(256) if math.isfinite(float8_value(code, name))]
        codes.remove(0x80)  # minus zero may lose its sign
        values = [float8_value(code, name) for code in codes]
        packed = codes
    else:
        largest = int(LARGEST_CODE[name])
        values = [float(code) for code in range(-largest, largest + 1)]
        nibbles = [int(v) % (1 << CODE_BITS[name]) for v in values]
        packed = nibbles if name == "int8" else [a + 16 * b for a, b in zip(nibbles[0::2], [*nibbles[1::2], 0])]
    fmt = make_format(name, block_size=256)
    tensor = torch.tensor(values)
    assert tensor.abs().max() == LARGEST_CODE[name]
    payload = fmt.encode(tensor)
    assert torch.equal(payload, one_block_payload(packed))
    assert torch.equal(fmt.decode(payload, tensor.shape, torch.float32), tensor)


@EVERY_QUANTIZED
def test_scale_is_the_next_bfloat16_above(name):
    fmt = make_format(name, block_size=2)
    for amax in [*normal(200, seed=5).abs().tolist(), torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149]:
        scale = fmt.encode(torch.tensor([amax, 0.0]))[:2].view(torch.bfloat16).item()
        assert scale == bfloat16_at_least(max(amax / LARGEST_CODE[name], SMALLEST_SCALE))


def test_rotation_is_the_sylvester_matrix():
    values = normal(3, 64)
    matrix = sylvester_matrix()
    assert torch.equal(matrix @ matrix, GROUP * torch.eye(GROUP, dtype=torch.float64))
    expected = (values.double().view(3, 2, GROUP) @ matrix).view(3, 64)
    scratch = Scratch(values.device)
    rotated = rotate_(values.clone(), scratch)
    torch.testing.assert_close(rotate_back_(values.clone(), scratch).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotated.double(), expected / GROUP, rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate_back_(rotated, scratch), values, rtol=0, atol=1e-5)
    columns = rotate_back_(torch.eye(GROUP), scratch)
    assert torch.equal(columns.double(), matrix)


# --- properties -------------------------------------------------------------------------------------------------

shapes = st.one_of(
    st.sampled_from([(), (0,), (1,), (7,), (0, 3), (3, 0), (1, 1, 1), (31,), (33,), (127,), (129,)]),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.integers(0, 700).map(lambda n: (n,)),
)


@st.composite
def tensors(draw):
    """A finite tensor of any shape and encodable dtype, between subnormal and the dtype's largest number."""
    shape, dtype = draw(shapes), draw(st.sampled_from(DTYPES))
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    numel = math.prod(shape)
    kind = draw(st.sampled_from(["normal", "mixed", "largest", "subnormal", "sparse", "zeros", "equal"]))
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    uniform = torch.rand(numel, generator=generator, dtype=torch.float64)
    if kind == "mixed":  # every binade of the dtype
        low, high = math.log2(info.smallest_normal) - 6, math.log2(info.max)
        values = values.sign() * torch.exp2(low + uniform * (high - low))
    elif kind == "largest":
        values = values.sign() * info.max * torch.where(uniform < 0.5, 1.0, uniform)
    elif kind == "subnormal":
        values = values.sign() * info.smallest_normal * uniform
    elif kind == "sparse":
        values = values * (uniform < 0.05)
    elif kind == "zeros":
        values = torch.zeros(numel, dtype=torch.float64)
    elif kind == "equal":
        values = torch.full((numel,), draw(st.sampled_from([1.0, -3.0, info.max, -info.max, info.tiny])))
    return values.clamp(info.min, info.max).to(dtype).view(shape)


@st.composite
def quantized_formats(draw):
    """(format, its options) over every name, block size and rotation."""
    name, hadamard = draw(st.sampled_from(QUANTIZED)), draw(st.booleans())
    block_size = draw(st.sampled_from([None, 32, 128, 2048] if hadamard else [None, 2, 6, 32, 128, 2048]))
    options = {"block_size": block_size, "hadamard": hadamard}
    return make_format(name, **options), {"name": name, **options}


@settings(max_examples=400, derandomize=True)
@given(tensors(), quantized_formats())
def test_any_tensor_comes_back_within_its_error_bound(tensor, chosen):
    fmt, options = chosen
    payload = fmt.encode(tensor)
    numel, name = tensor.numel(), options["name"]
    assert payload.dtype == torch.uint8 and payload.dim() == 1
    assert payload.numel() == fmt.payload_bytes(numel)
    assert payload.numel() == payload_size(numel, CODE_BITS[name], options["block_size"], options["hadamard"])
    assert payload.numel() % 16 == 0
    decoded = fmt.decode(payload, tensor.shape, tensor.dtype)
    assert decoded.shape == tensor.shape and decoded.dtype == tensor.dtype and decoded.is_contiguous()
    assert decoded.isfinite().all()
    if numel:
        error = (decoded.double() - tensor.double()).abs().reshape(-1)
        bound = error_bound(tensor, dtype=tensor.dtype, **options)
        worst = (error - bound).argmax()
        assert (error <= bound).all(), f"error {error[worst]} over bound {bound[worst]}"
    if not tensor.any():
        assert not decoded.any()


@settings(max_examples=100, derandomize=True)
@given(tensors(), quantized_formats())
def test_the_same_tensor_gives_the_same_bytes(tensor, chosen):
    fmt, _ = chosen
    payloads = [fmt.encode(tensor) for _ in range(2)]
    assert torch.equal(*payloads)


@settings(max_examples=60, derandomize=True)
@given(tensors())
def test_none_keeps_every_bit(tensor):
    fmt = make_format("none", dtype=tensor.dtype)
    payload = fmt.encode(tensor)
    assert payload.numel() == fmt.payload_bytes(tensor.numel())
    assert payload.numel() == math.ceil(tensor.numel() * tensor.dtype.itemsize / 16) * 16
    assert torch.equal(fmt.decode(payload, tensor.shape, tensor.dtype), tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_none_keeps_nan_and_inf_bits(dtype):
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    tensor = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 1.0], dtype=dtype)
    tensor.view(integer)[0] += 1  # a NaN with another payload
    decoded = through(make_format("none", dtype=dtype), tensor)
    assert torch.equal(decoded.view(integer), tensor.view(integer))


def test_fp16_is_ieee_half_precision():
    values = normal(101)
    fmt = make_format("fp16")
    assert fmt.payload_bytes(101) == 208 and fmt.bits_per_element == 16
    assert torch.equal(through(fmt, values), values.half().float())


def test_finite_numbers_near_the_largest_do_not_become_nan():
    """Undoing the rotation adds 32 decoded values; rounding errors must not push a partial sum to Inf, then NaN.

    The first group of the block sets the scale to max / 7. The second is chosen in rotated space as 0.52 and -0.48
    scales, which round to 1 and 0: its partial sums exceed the largest number although no element of it does.
    """
    largest = torch.finfo(torch.float32).max
    signs = "+---++++-+---+-+++-+--+++----+-+"
    rotated = torch.tensor([0.522 if sign == "+" else -0.482 for sign in signs], dtype=torch.float64)
    tensor = torch.zeros(128)
    tensor[:32] = largest
    tensor[32:64] = (sylvester_matrix() @ rotated * largest / 7).float()
    assert tensor.isfinite().all()
    assert through(make_format("int4", block_size=128, hadamard=True), tensor).isfinite().all()


# --- NaN and Inf ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@ROTATION
@EVERY_QUANTIZED
def test_exactly_the_block_with_a_special_value_becomes_nan(name, hadamard, special, dtype):
    fmt = make_format(name, block_size=64, hadamard=hadamard)
    clean = normal(300, dtype=dtype)
    for position, (start, end) in {0: (0, 64), 100: (64, 128), 299: (256, 300)}.items():
        tensor = clean.clone()
        tensor[position] = special
        decoded = through(fmt, tensor)
        inside = torch.zeros(300, dtype=torch.bool)
        inside[start:end] = True
        assert torch.equal(decoded.isnan(), inside)
        assert torch.equal(decoded[~inside], through(fmt, clean)[~inside])


@EVERY_QUANTIZED
def test_a_special_value_anywhere_spoils_a_tensor_with_one_scale(name):
    tensor = normal(100)
    tensor[3] = math.inf
    assert through(make_format(name, block_size=None), tensor).isnan().all()


# --- rounding ---------------------------------------------------------------------------------------------------


# (value halfway between two grid points, the even one, the outer one)
TIES = {
    "int8": [(0.5, 0.0, 1.0), (1.5, 2.0, 2.0), (2.5, 2.0, 3.0), (90.5, 90.0, 91.0)],
    "int4": [(0.5, 0.0, 1.0), (1.5, 2.0, 2.0), (2.5, 2.0, 3.0), (5.5, 6.0, 6.0)],
    "fp8_e4m3": [(8.5, 8.0, 9.0), (9.5, 10.0, 10.0), (17.0, 16.0, 18.0), (2.0**-10, 0.0, 2.0**-9)],
    "fp8_e5m2": [(4.5, 4.0, 5.0), (5.5, 6.0, 6.0), (9.0, 8.0, 10.0), (2.0**-17, 0.0, 2.0**-16)],
}
EVERY_TIE = pytest.mark.parametrize(
    ("name", "value", "even", "outer"), [(name, *tie) for name, ties in TIES.items() for tie in ties]
)


def rounded(name, value):
    """What `value` and its negative become with scale 1."""
    tensor = torch.tensor([LARGEST_CODE[name], 0.0, value, -value])
    return through(make_format(name, block_size=4), tensor)[2:].tolist()


@EVERY_TIE
def test_ties(name, value, even, outer):
    assert rounded(name, value) == [even, -even]


@EVERY_TIE
def test_beside_a_tie_the_nearer_point_is_taken(name, value, even, outer):
    tie, inner = torch.tensor(value), 2 * value - outer
    below, above = (torch.nextafter(tie, torch.tensor(towards)).item() for towards in (0.0, math.inf))
    assert rounded(name, below) == [inner, -inner]
    assert rounded(name, above) == [outer, -outer]


# --- rows, sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 7, 33, 200])
@ROTATION
@EVERY_QUANTIZED
def test_rows_are_encoded_independently(name, hadamard, numel):
    for block_size in (64, None):
        fmt = make_format(name, block_size=block_size, hadamard=hadamard)
        matrix = normal(5, numel) * torch.logspace(-3, 3, 5)[:, None]
        together = fmt.encode_rows(matrix)
        assert together.shape == (5, fmt.payload_bytes(numel))
        assert torch.equal(together, torch.stack([fmt.encode(row) for row in matrix]))
        decoded = fmt.decode_rows(together, numel, torch.bfloat16)
        rows = [fmt.decode(payload, (numel,), torch.bfloat16) for payload in together]
        assert torch.equal(decoded, torch.stack(rows))
    assert fmt.encode_rows(normal(0, numel)).shape == (0, fmt.payload_bytes(numel))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (7,), (1, 7)])
@pytest.mark.parametrize("name", [name for name in FORMAT_NAMES if name not in HALF_STEP_NAMES])
def test_small_and_empty_tensors(name, shape, dtype):
    """Equal numbers sit at the largest code, where only the rounding of the scale is left."""
    tensor = torch.full(shape, 4.0, dtype=dtype)
    decoded = through(make_format(name), tensor)
    assert decoded.shape == shape and decoded.dtype == dtype
    torch.testing.assert_close(decoded, tensor, rtol=0.01, atol=0)


@pytest.mark.parametrize("block_size", [34, 64, None])
@ROTATION
@EVERY_QUANTIZED
def test_bytes_do_not_depend_on_the_size_of_the_pieces(name, hadamard, block_size, monkeypatch):
    """Several rows a piece, several pieces a row, one block a piece; the last block is cut short."""
    if hadamard and block_size == 34:
        block_size = 32
    numel = 1001
    matrix = normal(7, numel) * torch.logspace(-3, 3, 7)[:, None]
    matrix[2, 500], matrix[4, 0] = -math.nan, math.inf
    fmt = make_format(name, block_size=block_size, hadamard=hadamard)
    seen = []
    for piece in (1 << 18, 3 * numel, 200, 1):
        monkeypatch.setattr(chunks, "PIECE", piece)
        payload = fmt.encode_rows(matrix)
        decoded = fmt.decode_rows(payload, numel, torch.bfloat16)
        mean = fmt.mean_of_rows([payload, payload.flip(0)], numel)
        seen.append([payload, decoded.view(torch.int16), mean.view(torch.int32)])
    assert all(torch.equal(a, b) for others in seen[1:] for a, b in zip(seen[0], others))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_out_is_written_and_nothing_beside_it(name):
    fmt, matrix = make_format(name), normal(3, 301)
    payload = fmt.encode_rows(matrix)
    size = payload.shape[1]
    around = torch.full((3, size + 32), 77, dtype=torch.uint8)
    part = around[:, 16 : 16 + size]
    assert fmt.encode_rows(matrix, part) is part and torch.equal(part, payload)
    assert (around[:, :16] == 77).all() and (around[:, 16 + size :] == 77).all()
    for dtype in DTYPES:
        values = torch.full((3, 310), 77, dtype=dtype)
        part = values[:, 5:306]
        assert fmt.decode_rows(payload, 301, dtype, part) is part
        assert torch.equal(part, fmt.decode_rows(payload, 301, dtype))
        assert (values[:, :5] == 77).all() and (values[:, 306:] == 77).all()


def test_strided_input_is_encoded_by_its_values():
    matrix = normal(40, 60)
    for name in ("none", *QUANTIZED):
        fmt = make_format(name)
        assert torch.equal(fmt.encode(matrix.t()), fmt.encode(matrix.t().contiguous()))


@pytest.mark.parametrize("block_size", [32, 128, 2048, None])
@ROTATION
@EVERY_QUANTIZED
def test_bits_per_element(name, hadamard, block_size):
    fmt = make_format(name, block_size=block_size, hadamard=hadamard)
    assert fmt.bits_per_element == CODE_BITS[name] + (16 / block_size if block_size else 0)
    numel = 1 << 24
    assert fmt.payload_bytes(numel) * 8 / numel == pytest.approx(fmt.bits_per_element, abs=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_per_element_of_none(dtype):
    fmt = make_format("none", dtype=dtype)
    assert fmt.bits_per_element == 8 * dtype.itemsize == fmt.payload_bytes(1 << 10) * 8 / (1 << 10)


# --- errors -----------------------------------------------------------------------------------------------------


def test_unknown_format_lists_the_names():
    with pytest.raises(ValueError, match="unknown format 'int5'") as error:
        make_format("int5")
    assert all(name in str(error.value) for name in FORMAT_NAMES)


@pytest.mark.parametrize(
    ("name", "block_size", "hadamard", "multiple"),
    [
        ("int8", 0, False, 1),
        ("int8", -128, False, 1),
        ("int4", 3, False, 2),
        ("int4", 0, False, 2),
        ("fp8_e4m3", 0, False, 1),
        ("int4", 48, True, 32),
        ("fp8_e5m2", 100, True, 32),
    ],
)
def test_bad_block_size_names_the_multiple(name, block_size, hadamard, multiple):
    with pytest.raises(ValueError, match=rf"{name}: block_size must be a.* multiple of {multiple}\b"):
        make_format(name, block_size=block_size, hadamard=hadamard)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bool])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_wrong_dtype(name, dtype):
    with pytest.raises(TypeError, match=rf"{name}: can encode float32, bfloat16 and float16 tensors, got {dtype}"):
        make_format(name).encode(torch.ones(4, dtype=dtype))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_payload_of_another_size_or_dtype(name):
    fmt = make_format(name)
    payload = fmt.encode(torch.ones(100))
    for wrong in (payload[:-16], torch.cat([payload, payload]), payload.view(torch.int8)):
        with pytest.raises(ValueError, match=rf"{name}: a payload for shape \(4, 25\) is {payload.numel()} bytes"):
            fmt.decode(wrong, (4, 25), torch.float32)


def test_unknown_option():
    with pytest.raises(TypeError, match="blocksize"):
        make_format("int8", blocksize=128)


def test_what_each_format_is_for():
    """The configuration's table and the registry name the same formats; MX blocks and NVFP4's are the formats' own."""
    from zeropp_fp8.config.sections import FIXED_BLOCKS, USES

    assert set(USES) == set(FORMAT_NAMES)
    for name, block_size in FIXED_BLOCKS.items():
        assert make_format(name).block_size == block_size
