"""Formats of weights at rest: parts of a tensor, which ranks encode by themselves, against the whole tensor."""

import math

import pytest
import torch
from frozen_format_cases import normal, tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.formats import FORMAT_NAMES, SharedScaleFormat, make_format

PART_FORMATS = [
    ("none", {}), ("fp16", {}), ("int8", {"block_size": 34}), ("int4", {"block_size": 2}), ("fp8_e4m3", {}),
    ("fp8_e5m2", {"block_size": 32}), ("int4", {"block_size": 64, "hadamard": True}), ("nf4", {"block_size": 6}),
    ("nf4", {}), ("mxfp4", {}), ("mxfp6_e3m2", {}), ("mxfp8_e5m2", {"scale_mode": "floor"}), ("mxint8", {}),
    ("int8", {"block_size": 3, "double_quantize": True}), ("int4", {"block_size": 2, "double_quantize": True}),
    ("nf4", {"block_size": 2, "double_quantize": True}), ("fp8_e4m3", {"block_size": 1, "double_quantize": True}),
    ("fp8_e4m3", {"scales": "tensor"}),
]  # fmt: skip


def same_bits(a, b):
    """Equal, NaN where NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def encode_parts(fmt, tensor, world):
    """[world, bytes of a part]: equal parts, as short as whole granules allow."""
    numel = max(1, math.ceil(tensor.numel() / world / fmt.granule)) * fmt.granule
    out = torch.full((world, fmt.payload_bytes(numel)), 0xAB, dtype=torch.uint8)
    for rank in range(world):
        fmt.encode_part(tensor, rank * numel, numel, out[rank])
    return out, numel


@settings(max_examples=250, derandomize=True)
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
    if "scales" in options:
        assert (parts[:, :4] == whole[:4]).all()  # a scale a tensor, in all its parts
        codes, whole_codes = (
            fmt.codes(*each).view(torch.uint8) for each in ((parts, numel), (whole[None], tensor.numel()))
        )
        assert torch.equal(codes.view(-1)[: tensor.numel()], whole_codes[0, : tensor.numel()])
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
    expected = {
        "none": 1,
        "fp16": 1,
        "nf4": 64,
        "nvfp4": 16,
        **dict.fromkeys(("int8", "int4", "fp8_e4m3", "fp8_e5m2"), 128),
    }
    assert {name: make_format(name).granule for name in FORMAT_NAMES} == {
        **expected,
        **{"int2": 64, "int3": 64},
        **{name: 32 for name in FORMAT_NAMES if name.startswith("mx")},
    }
    assert make_format("int4", block_size=96, hadamard=True).granule == 96
    assert make_format("nf4", double_quantize=True).granule == 64 * 256
    assert make_format("fp8_e4m3", scales="tensor").granule == 16
    assert SharedScaleFormat("fp8_e4m3").granule == 1


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
    with pytest.raises(TypeError, match="with a shared scale"):
        SharedScaleFormat("fp8_e4m3").encode_part(torch.ones(16), 0, 16, torch.empty(16, dtype=torch.uint8))
