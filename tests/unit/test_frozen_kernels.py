"""Kernels that decode weights at rest: in Triton's interpreter, by their PTX, and compiled without a GPU."""

import numpy as np
import pytest
import torch
from frozen_format_cases import DOUBLE, PUBLISHED_LEVELS
from triton_process import run

from zeropp_fp8.formats import FORMAT_NAMES, SharedScaleFormat, make_format


def test_kernels_decode_in_the_interpreter():
    """The values of the torch code; odd sizes, slices out of order, slices beyond the end, NaN and Inf."""
    pytest.importorskip("triton")
    script = """
import torch
from kernel_cases import CPU, DTYPES, FROZEN_FORMATS, check_decoded_only, make

for name in mine(FROZEN_FORMATS):
    check_decoded_only(make(name), torch.float32, [33, 1001], 3, [2, 0, 1], CPU, DTYPES.values())
for name in mine(("nf4-double", "int8-double")):
    check_decoded_only(make(name), torch.bfloat16, [40000, 33], 2, [1, 0], CPU, [torch.bfloat16])
    check_decoded_only(make(name), torch.float32, [9, 1, 2, 5], 8, [7, 1], CPU, [torch.float32])
if turn():
    check_decoded_only(make("nf4"), torch.float32, [2048, 2040, 1], 1, [0], CPU, [torch.float32])
for blocks in mine((768, 1024)):  # 3 group scales and the offset fill 16 bytes, 4 do not
    check_decoded_only(make("nf4-2-double"), torch.float32, [2 * blocks], 1, [0], CPU, [torch.float32])
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_kernels_decode_the_largest_numbers_and_parts_in_the_interpreter():
    """Scales at the end of fp32 in every dtype, and the payloads that encode_part makes."""
    pytest.importorskip("triton")
    script = """
import torch
from kernel_cases import CPU, DTYPES, FROZEN_FORMATS, SliceOrder, layouts, make, same

for name in mine(FROZEN_FORMATS):
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
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_which_formats_kernels_decode():
    pytest.importorskip("triton")
    from zeropp_fp8 import kernels

    for name in FORMAT_NAMES:
        made = make_format(name)
        assert kernels.supports(made) == (name not in ("nf4", "nvfp4")) and kernels.decodes(made) == (name != "nvfp4")
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


def test_ptx_picks_the_levels():
    """Every byte in each of four places: the two levels of its codes, bit for bit."""
    pytest.importorskip("triton")
    import ptx

    from zeropp_fp8.kernels.nf4_levels import _levels_of_bytes

    levels = np.array(PUBLISHED_LEVELS, np.float32).view(np.uint32)
    codes = np.stack([np.roll(np.arange(256, dtype=np.uint32), 61 * place) for place in range(4)])
    words = codes[0] | codes[1] << 8 | codes[2] << 16 | codes[3] << 24
    out = ptx.run(_levels_of_bytes(), {"$8": words})
    for place in range(4):
        assert np.array_equal(out[f"${place}"], levels[codes[place] & 15])
        assert np.array_equal(out[f"${place + 4}"], levels[codes[place] >> 4])


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    """NF4: one load from the table an element, or none with PTX; no way through shared memory, nothing is fused."""
    pytest.importorskip("triton")
    script = f"""
from dataclasses import replace

import triton
from kernel_cases import make
from ptxas import said_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.kernels.wire.dequantize import dequantize_kernel as kernel
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat

CAPABILITY = {capability}
POINTERS = {{"base_ptr": "*bf16", "payload_ptr": "*u8", "slices_ptr": "*i32", "tensors_ptr": "*i64",
             "segments_ptr": "*i64", "tile_starts_ptr": "*i32", "lookup_ptr": "*fp32"}}
LOADS = {{"nf4": "b32", "int4": "b32", "int8": "v2.b32", "fp8_e4m3": "v2.b32"}}
for name in mine(("nf4", "nf4-double", "int4-double", "int8-double", "fp8_e4m3-double")):
    form = replace(KernelFormat.of(make(name)), native_fp8=CAPABILITY >= 89)
    constants = {{"LIMIT": 3.38e38, "FORMAT": form, "ALIGNED": True, "STARTS": 8}}
    names = kernel.jitted.arg_names
    signature = {{a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in names}}
    attributes = {{(i,): [["tt.divisibility", 16]] for i, a in enumerate(names) if a not in constants}}
    source = ASTSource(fn=kernel.jitted, signature=signature, constexprs=constants, attrs=attributes)
    options = {{"num_warps": form.num_warps, "enable_fp_fusion": False}}
    code = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options).asm["ptx"]
    assert ".local" not in code and "fma.rn.f32" not in code and ".shared" not in code, name
    assert "ld.global." + LOADS[form.element] in code and "st.global.v4.b32" in code, name
    if form.element == "nf4":
        # A tile is 2048 elements for 64 threads, in both bodies, and takes a few loads of other things.
        looked_up, picked = code.count("ld.global.b32"), code.count("prmt.b32")
        assert (looked_up <= 24 and picked >= 320) if CAPABILITY >= 89 else (64 <= looked_up <= 64 + 24), looked_up
        said = said_of(code)
        assert "0 bytes spill stores, 0 bytes spill loads" in said, (name, said)
print("done")
"""
    assert run(script, interpret=False, processes=2).count("done") == 2
