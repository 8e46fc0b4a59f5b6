"""Formats by name: what there is, what options each has, what it is for, and which kernels know it."""

import dataclasses
from unittest import mock

import pytest
import torch
from conformance import EXACT
from reference import block_of

from zeropp_fp8.formats import DOUBLE_QUANTIZED_NAMES as DOUBLE
from zeropp_fp8.formats import FORMAT_NAMES, DoubleQuantizedFormat, SharedScaleFormat, TensorScaledFormat, make_format


def test_unknown_format_lists_the_names():
    with pytest.raises(ValueError, match="unknown format 'nonesuch'") as error:
        make_format("nonesuch")
    assert all(name in str(error.value) for name in FORMAT_NAMES)
    with pytest.raises(ValueError, match="unknown format 'nonesuch'"):
        make_format("nonesuch", double_quantize=True)


def test_unknown_option():
    with pytest.raises(TypeError, match="blocksize"):
        make_format("int8", blocksize=128)


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


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        *((name, {}, f"{name}: double_quantize is there for {', '.join(DOUBLE)}$") for name in FORMAT_NAMES
          if name not in DOUBLE),
        *((name, {"hadamard": True}, f"{name}: double_quantize cannot be combined with hadamard") for name in DOUBLE
          if name != "nf4"),
        *((name, {"block_size": None}, f"{name}: double_quantize cannot be combined with block_size=None")
          for name in DOUBLE),
    ],
)  # fmt: skip
def test_what_double_quantization_refuses(name, options, match):
    with pytest.raises(ValueError, match=match):
        make_format(name, double_quantize=True, **options)


@pytest.mark.parametrize(
    "name, options",
    [("int8", {}), ("fp8_e5m2", {}), ("fp8_e4m3", {"double_quantize": True}), ("fp8_e4m3", {"block_size": 64})],
)
def test_what_goes_with_one_scale_for_a_tensor(name, options):
    assert isinstance(make_format("fp8_e4m3", scales="tensor"), TensorScaledFormat)
    with pytest.raises(ValueError, match=f'{name}: scales "tensor" is there for fp8_e4m3'):
        make_format(name, scales="tensor", **options)


def test_double_quantize_is_off_unless_asked_for():
    for name in FORMAT_NAMES:
        assert not isinstance(make_format(name, double_quantize=False), DoubleQuantizedFormat)
    fmt = make_format("int4", block_size=64, double_quantize=True)
    assert isinstance(fmt, DoubleQuantizedFormat)
    assert repr(fmt) == "int4 (block 64, double-quantized scales)"


def test_formats_that_make_other_bytes_have_other_keys():
    assert make_format("mxfp4").key == make_format("mxfp4", scale_mode="rceil", block_size=32).key
    made = [make_format(name) for name in FORMAT_NAMES]
    made += [make_format(name, scale_mode="floor") for name in FORMAT_NAMES if name.startswith("mx")]
    made += [make_format(name, double_quantize=True) for name in DOUBLE]
    made += [make_format("int8", block_size=32), make_format("int8", hadamard=True), SharedScaleFormat("fp8_e4m3")]
    made += [make_format("fp8_e4m3", scales="tensor"), make_format("none", dtype=torch.float32)]
    assert len({fmt.key for fmt in made}) == len(made)


def test_granules():
    """Stored weights are cut at them: no new version may have others."""
    blocks = {name: 1 if name in EXACT else block_of(name, {}) for name in FORMAT_NAMES}
    assert {name: make_format(name).granule for name in blocks} == blocks
    assert make_format("int4", block_size=96, hadamard=True).granule == 96
    assert make_format("nf4", double_quantize=True).granule == 64 * 256
    assert make_format("fp8_e4m3", scales="tensor").granule == 16
    assert SharedScaleFormat("fp8_e4m3").granule == 1


def test_what_each_format_is_for():
    """The configuration's table and the registry name the same formats; MX blocks are the formats' own."""
    from zeropp_fp8.config.sections import FIXED_BLOCKS, USES

    unused = [name for name in FORMAT_NAMES if name not in USES]
    assert not unused, f"{unused}: add a line to USES of config/sections.py"
    assert set(USES) == set(FORMAT_NAMES)
    for name, block_size in FIXED_BLOCKS.items():
        assert make_format(name).block_size == block_size


def test_which_formats_kernels_know():
    pytest.importorskip("triton")
    from zeropp_fp8 import kernels
    from zeropp_fp8.kernels.wire.launch_tables import ELEMENTS

    for name in DOUBLE:
        fmt = make_format(name, double_quantize=True)
        assert kernels.decodes(fmt) == (name in ELEMENTS) and not kernels.supports(fmt)
        for block_size in (None, 32768):
            assert not kernels.decodes(make_format(name, block_size=block_size))
    shared = SharedScaleFormat("fp8_e4m3")
    assert kernels.supports(shared) and not kernels.decodes(shared)


def test_kernels_know_no_element_but_their_own():
    """A new format runs by torch code until a kernel knows it: others would take its codes for FP8."""
    pytest.importorskip("triton")
    from zeropp_fp8 import kernels

    known = make_format("int8")
    spec = dataclasses.replace(known.kernel_spec(), element="int6", bits=6)
    with mock.patch.object(type(known), "kernel_spec", lambda self: spec):
        assert not kernels.supports(known) and not kernels.decodes(known)
    assert kernels.supports(known)
