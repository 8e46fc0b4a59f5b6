"""MX formats: the rounding that computing needs, along any axis, and what they are beside torchao."""

import math

import pytest
import torch
from conformance import assert_same, normal, tensors, through
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ELEMENTS, HOLDS_SPECIAL, shared_exponent

from zeropp_fp8.formats import MX_NAMES, BlockScaledFormat, chunks, make_format

MODES = ("rceil", "floor")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP32_MAX = torch.finfo(torch.float32).max
EVERY_NAME = pytest.mark.parametrize("name", MX_NAMES)
EVERY_MODE = pytest.mark.parametrize("scale_mode", MODES)


def block_scales(fmt, blocks):
    """X of fp32 blocks [..., 32]."""
    rows, scale_bytes = blocks.reshape(1, -1, 32).clone(), torch.empty(1, blocks.numel() // 32, dtype=torch.uint8)
    fmt.scale.scale_(rows, scale_bytes, chunks.Scratch(blocks.device))
    return fmt.scale.decode(scale_bytes).view(blocks.shape[:-1])


def test_the_names_are_those_of_the_specification():
    assert set(MX_NAMES) == {name for name in ELEMENTS if name.startswith("mx")}


@EVERY_MODE
@EVERY_NAME
def test_the_scale_is_exact_at_every_exponent(name, scale_mode):
    """Around powers of two, and around the largest number times them, where the exponent changes."""
    fmt = make_format(name, scale_mode=scale_mode)
    amax = []
    for exponent in range(-126, 128):
        for start in (2.0**exponent, 2 * math.frexp(ELEMENTS[name].largest)[0] * 2.0**exponent):
            number = torch.tensor(start)
            amax += [
                torch.nextafter(number, torch.tensor(0.0)),
                number,
                torch.nextafter(number, torch.tensor(math.inf)),
            ]
    amax = [a.item() for a in amax if 2.0**-126 <= a <= FP32_MAX] + [2.0**-126, FP32_MAX]
    blocks = torch.zeros(len(amax), 32)
    blocks[:, 7] = -torch.tensor(amax)
    expected = [shared_exponent(a, name, scale_mode) for a in amax]
    scales = block_scales(fmt, blocks)
    assert scales.double().tolist() == [2.0**e for e in expected]
    assert fmt.encode_rows(blocks)[:, 0].tolist() == [e + 127 for e in expected]
    if scale_mode == "rceil" and name != "mxint8":  # INT8's would be 2^128 at the top
        assert (blocks.double().abs() <= ELEMENTS[name].largest * scales.double()[:, None]).all()


@pytest.mark.parametrize("name", HOLDS_SPECIAL)
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
    first_code_byte = 0 if name == "mxint8" else {4: 0b10001000, 6: 0b00100000, 8: 0b10000000}[ELEMENTS[name].bits]
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


@settings(max_examples=150, derandomize=True)
@given(
    tensors().filter(lambda tensor: tensor.dim() > 0),
    st.sampled_from(MX_NAMES),
    st.sampled_from(MODES),
    st.sampled_from([None, math.nan, math.inf, -math.inf]),
    st.integers(-4, 3),
)
def test_any_tensor_along_any_axis(tensor, name, scale_mode, special, axis):
    fmt, axis = make_format(name, scale_mode=scale_mode), axis % tensor.dim()
    if special is not None and tensor.numel():
        tensor.view(-1)[tensor.numel() // 3] = special
    moved = tensor.movedim(axis, -1).contiguous()
    numel = moved.shape[-1]
    rows = moved.reshape(math.prod(moved.shape[:-1]), numel)
    payload = fmt.encode_rows(rows)
    expected = fmt.decode_rows(payload, numel, tensor.dtype).view(moved.shape).movedim(-1, axis).contiguous()
    for same_axis in (axis, axis - tensor.dim()):
        rounded = fmt.round_trip(tensor, same_axis)
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
def test_round_trips_do_not_depend_on_the_size_of_the_pieces(name, monkeypatch):
    matrix = normal(7, 1001) * torch.logspace(-3, 3, 7)[:, None]
    matrix[2, 500], matrix[4, 0] = -math.nan, math.inf
    expected = make_format(name).round_trip(matrix)
    for piece in (3003, 200, 1):
        monkeypatch.setattr(chunks, "PIECE", piece)
        assert_same(make_format(name).round_trip(matrix), expected)


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
    if ELEMENTS[name].bits == 6:  # there a byte each
        codes = sum(code << 6 * i for i, code in enumerate(codes)).to_bytes(4096 * 6 // 8, "little")
    assert bytes(payload[128:].tolist()) == codes
