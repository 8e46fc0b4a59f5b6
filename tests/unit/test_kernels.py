"""Triton kernels: the bytes of formats/ in Triton's interpreter, and code for sm_80 and sm_90 without a GPU.

Both run in processes of their own: whether Triton interprets or compiles is decided when it is imported.
"""

import pytest
from kernel_cases import FORMATS
from triton_process import run

pytest.importorskip("triton")


def test_quantize_and_dequantize_in_the_interpreter():
    """Every format and dtype; odd sizes, slices out of order, empty slices at a tensor's end."""
    script = """
import torch
from kernel_cases import CPU, DTYPES, FORMATS, check_quantize_and_dequantize, make
from thinning import thinned

done = 0
cases = thinned(FORMATS, DTYPES)
cases += [("int8", dtype) for dtype in DTYPES]
for name, dtype in mine(sorted(set(cases))):
    outputs = DTYPES.values() if name == "int8" else [DTYPES[dtype]]
    check_quantize_and_dequantize(make(name), DTYPES[dtype], [33, 1001], 3, [2, 0, 1], CPU, outputs)
    done += 1
for dtype in mine(DTYPES.values()):
    check_quantize_and_dequantize(make("none", dtype=dtype), dtype, [33, 500, 3001], 3, [2, 0, 1], CPU, [dtype])
    done += 1
# one slice of several, sizes of which the last slices are empty, a single element, and a whole tile
for name, numels, world, slices in mine((
    ("int8", [9, 1, 2, 5], 8, [7, 1]), ("int4-hadamard", [1, 8192], 1, [0]), ("mxfp6_e3m2", [9, 1, 2, 5], 8, [7, 1]),
    ("mxfp6_e2m3", [1, 4096], 1, [0]), ("mxfp4", [2048, 2040], 1, [0]),
)):
    check_quantize_and_dequantize(make(name), torch.float32, numels, world, slices, CPU, [torch.float32])
    done += 1
print(done)
"""
    done = map(int, run(script, interpret=True, processes=2).split())
    assert sum(done) >= len(FORMATS) + 3 + 5


def test_reduce_in_the_interpreter():
    script = """
import torch
from kernel_cases import CPU, DTYPES, check_reduce, largest, make

for first, then in mine((
    ("int8", "int4-hadamard"), ("int8", "int8"), ("int4-hadamard", "int4-hadamard"), ("none", "int4"), ("int8", "none"),
    ("none", "none"), ("fp8_e5m2", "fp8_e4m3"), ("int8-96", "int8"), ("mxfp8_e5m2", "mxfp6_e3m2"),
    ("mxfp6_e2m3", "mxfp8_e5m2"), ("mxfp4", "none"), ("mxint8", "mxfp8_e4m3-floor"), ("mxfp6_e3m2", "int8-32"),
    ("none", "mxfp4"), ("mxfp8_e4m3", "int8"), ("int2", "int2"), ("int8", "int2-hadamard-96"),
    ("int2-12", "int2-12"), ("int3-24", "int3-24"), ("int3", "int8"), ("int3-hadamard-96", "int3-hadamard-96"),
)):
    check_reduce(make(first), make(then), torch.bfloat16, [33, 500, 1001], 2, 3, CPU, DTYPES.values())
for first, then in mine((("int8", "int4"), ("mxfp6_e3m2", "mxfp4"))):
    check_reduce(make(first), make(then), torch.float32, [500, 1001], 2, 2, CPU,
                 [torch.float32])
if turn():
    check_reduce(make("mxfp8_e4m3"), make("mxfp8_e4m3"), torch.float32, [70, 1001], 1, 17, CPU, [torch.float32])
for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3"):
    for ranks in mine((1, 2, 3)):
        check_reduce(make(name), make(name), torch.float32, [100], 1, ranks, CPU, DTYPES.values(), largest)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_error_feedback_in_the_interpreter():
    """Every format of gradients with scales in bf16; odd sizes, slices out of order or beyond an end."""
    script = """
import torch
from kernel_cases import CPU, DTYPES, FORMATS, check_feed_back, make
from thinning import thinned

names = [name for name in FORMATS if not name.startswith("mx")]
for name, dtype in mine(thinned(names, DTYPES)):
    check_feed_back(make(name), DTYPES[dtype], [33, 1001], 3, [2, 0, 1], CPU)
for name, numels, world, slices in mine((
    ("int4-hadamard", [4096, 9000], 2, [0, 1]), ("int8", [9, 1, 2, 5], 8, [7, 1]), ("int4", [8192], 1, [0]),
    ("int4-hadamard", [300, 5000], 4, [3, 1, 0, 2]), ("int3", [9, 1, 2, 5], 8, [7, 1]), ("int2", [8192], 1, [0]),
)):
    check_feed_back(make(name), torch.bfloat16, numels, world, slices, CPU)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_round_trip_in_the_interpreter():
    """Every MX element, scale mode and dtype; ragged tiles and blocks, one row, one column, nothing."""
    script = """
import torch
from kernel_cases import CPU, DTYPES, FORMATS, check_round_trip, make
from thinning import thinned

names = [name for name in FORMATS if name.startswith("mx")]
for name, dtype in mine(thinned(names, DTYPES.values())):
    check_round_trip(make(name), dtype, (70, 33), CPU)
for shape in mine(((1, 130), (130, 1), (64, 64), (31, 97), (0, 5), (5, 0))):
    check_round_trip(make("mxfp8_e5m2"), torch.float32, shape, CPU)
    check_round_trip(make("mxint8"), torch.bfloat16, shape, CPU)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_what_round_trip_refuses():
    script = """
import pytest, torch
from kernel_cases import make
from zeropp_fp8.kernels.casts.round_trip import round_trip

for wrong in (torch.ones(4), torch.ones(2, 2, 2), torch.ones(4, 6).t()):
    with pytest.raises(ValueError, match="contiguous matrix"):
        round_trip(wrong, make("mxfp4"))
with pytest.raises(TypeError, match="mxfp4: can encode"):
    round_trip(torch.ones(4, 4, dtype=torch.float64), make("mxfp4"))
assert round_trip(torch.ones(4, 4), make("mxfp4"), along_rows=False) == (None, None)
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


def test_properties_in_the_interpreter():
    """Any sizes, any number of ranks, any slices: the same bytes and values."""
    script = """
import random, torch
from kernel_cases import CPU, FORMATS, check_quantize_and_dequantize, make

draw = random.Random(0)
for _ in range(40):
    world = draw.choice([1, 2, 3, 4, 6])
    numels = [draw.choice([1, 2, 3, draw.randint(1, 70), draw.randint(1, 600)]) for _ in range(draw.randint(1, 4))]
    slices = [draw.randrange(world) for _ in range(draw.randint(1, 3))] if draw.random() < 0.3 else (
        draw.sample(range(world), world))
    if len(set(slices)) < len(slices):
        slices = slices[:1]
    name = draw.choice(sorted(FORMATS))
    if turn():
        check_quantize_and_dequantize(make(name), torch.float32, numels, world, slices, CPU, [torch.float32])
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_a_launch_is_looked_at_once_wherever_tensors_lie():
    """Also with another table of slices each time: plans would keep them all."""
    script = """
import torch
from kernel_cases import CPU, make
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder

for name in ("int8", "int4-hadamard") if turn() else ():
    layout = PayloadLayout([600, 33], [make(name)] * 2, [torch.float32] * 2, CPU, use_kernels=True)
    reference = PayloadLayout([600, 33], [make(name)] * 2, [torch.float32] * 2, CPU, use_kernels=False)
    kept = []
    for gap in (0, 7, 64):
        whole = torch.randn(600 + gap + 33)
        tensors, order = [whole[:600], whole[600 + gap :]], SliceOrder([0], CPU)
        rows, expected = (torch.zeros(1, layout.row_bytes, dtype=torch.uint8) for _ in range(2))
        layout.encode(tensors, order, rows)
        reference.encode(tensors, order, expected)
        assert torch.equal(rows, expected), (name, gap)
        out = [torch.zeros(600), torch.zeros(33)]
        layout.decode(rows, order, out)
        kept += [tensors, order, rows, out]  # so that nothing comes to lie where it was
    plans = layout._groups[0].segments.plans
    assert len({key[0] for key in plans}) == 2 and len(plans) <= 4, list(plans)  # aligned or not
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    """Each code path once: tensors are accessed 16 bytes at a time, codes 8 at a time; nothing is spilled.

    The 24 bytes of 32 codes of 6 bits are accessed 4 bytes at a time, the 3 bytes of 8 codes of 3 bits singly. sm_80
    has no instructions for FP8: only what becomes other code there is compiled for it, and a format of integers.
    """
    script = f"""
from dataclasses import replace

import triton
from kernel_cases import make
from ptxas import said_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.formats.e8m0 import SCALE_MODES
from zeropp_fp8.kernels.wire.dequantize import dequantize_kernel
from zeropp_fp8.kernels.wire.differences import add_differences_kernel, quantize_differences_kernel, with_equal_tiles
from zeropp_fp8.kernels.wire.feed_back import feed_back_kernel
from zeropp_fp8.kernels.wire.quantize import quantize_kernel
from zeropp_fp8.kernels.wire.reduce import reduce_to_payload_kernel, reduce_to_tensors_kernel
from zeropp_fp8.kernels.casts.round_trip import round_trip_kernel
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat

CAPABILITY = {capability}
POINTERS = {{"payload_ptr": "*u8", "received_ptr": "*u8", "slices_ptr": "*i32", "tensors_ptr": "*i64",
             "segments_ptr": "*i64", "segments_in_ptr": "*i64", "segments_out_ptr": "*i64",
             "tile_starts_ptr": "*i32", "residual_ptr": "*u8", "residual_segments_ptr": "*i64",
             "held_ptr": "*u8", "held_segments_ptr": "*i64", "largest_ptr": "*fp32"}}
DIFFERENCES = (add_differences_kernel, quantize_differences_kernel)
MATRICES = ("base_ptr", "matrix_ptr", "rows_ptr", "columns_ptr")
BASE = {{"ALIGNED": True, "LIMIT": 3.38e38, "RANKS": 8, "ACCUMULATE": True, "ALONG_ROWS": True, "ALONG_COLUMNS": True,
         "SIDE": 64, "STARTS": 8, **dict.fromkeys(("multipliers_ptr", "amax_ptr", "counts_ptr", "factors_ptr"))}}
CODES = {{"int8": "v2.b32", "fp8_e4m3": "v2.b32", "fp8_e5m2": "v2.b32", "int4": "b32", "bf16": "v4.b32",
          "mxfp8_e4m3": "v2.b32", "mxfp8_e5m2": "v2.b32", "mxfp6_e2m3": "b32", "mxfp6_e3m2": "b32", "mxfp4": "b32",
          "mxint8": "v2.b32", "int2": "b16", "int3": "b8"}}

def assert_nothing_spilled(code, what):
    said = said_of(code)
    assert "0 bytes spill stores, 0 bytes spill loads" in said, (what, said)

def compile(kernel, base, name, first=None, **constants):
    if not turn():
        return
    form = KernelFormat.of(make(name), KernelFormat.of(make("int8")))
    first = KernelFormat.of(make(first or name), form)
    form, first = (replace(each, native_fp8=CAPABILITY >= 89) for each in (form, first))
    num_warps = 4 if kernel is round_trip_kernel else form.num_warps
    if "RANKS" in kernel.jitted.arg_names:
        tile = max(first, form, key=lambda form: form.sum_blocks)
        num_warps = tile.sum_warps
        form, first = form.with_tiles(tile.sum_blocks), first.with_tiles(tile.sum_blocks)
    if kernel is feed_back_kernel:
        num_warps, form = form.sum_warps, form.with_tiles(form.sum_blocks)
        constants["RESIDUAL"] = KernelFormat.of(make("int8")).with_tiles(form.sum_blocks)
    if kernel in DIFFERENCES:
        form, constants["HELD"], num_warps = with_equal_tiles(form, first)
        first = form
    constants = {{**BASE, "FORMAT": form, "FORMAT_IN": first, **constants}}
    constants = {{name: value for name, value in constants.items() if name in kernel.jitted.arg_names}}
    signature, attributes = {{}}, {{}}
    for place, argument in enumerate(kernel.jitted.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument == "inverse_ranks":
            signature[argument] = "fp32"
        else:
            signature[argument] = base if argument in MATRICES else POINTERS.get(argument, "i32")
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel.jitted, signature=signature, constexprs=constants, attrs=attributes)
    options = {{"num_warps": num_warps, "enable_fp_fusion": False}}
    code = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options).asm["ptx"]
    what = kernel, constants
    if CAPABILITY == 90 and (form.scale in SCALE_MODES or kernel in (feed_back_kernel, *DIFFERENCES)):
        assert_nothing_spilled(code, what)
    assert ".local" not in code, what
    if kernel is round_trip_kernel:
        assert "fma.rn.f32" not in code, what
        # 16 bytes at a time for a whole tile: nothing is accessed otherwise.
        assert code.count("ld.global") == code.count("ld.global.v4.b32") > 0, what
        assert code.count("st.global") == code.count("st.global.v4.b32") > 0, what
        return
    sources = (quantize_kernel, feed_back_kernel, quantize_differences_kernel)
    codes_in = "st" if kernel in sources else "ld"
    if kernel is feed_back_kernel:
        assert all(f"{{way}}.global.v2.b32" in code for way in ("ld", "st")), what  # the residuals
    if kernel is feed_back_kernel or (kernel is add_differences_kernel and name != "none"):
        assert code.count("bar.sync") > 1, "all threads read before one writes"
    assert f"{{codes_in}}.global." + CODES[first.element] in code, what
    if base:
        assert ("ld" if kernel in sources else "st") + ".global.v4.b32" in code, what
    # A fused product is rounded once, and bytes would differ; only the sum fuses on purpose, where products are exact.
    assert ("fma.rn.f32" in code) == ("RANKS" in constants and first.scale == "bf16"), what

def quantize(*names, **options):
    for name in names:
        compile(quantize_kernel, "*bf16", name, **options)

def dequantize(*names):
    for name in names:
        compile(dequantize_kernel, "*bf16", name)

def reduce(*names):
    for name, then in zip(names, names[1:]):
        compile(reduce_to_payload_kernel, None, then, first=name)

def reduce_to_tensors(*names):
    for name in names:
        compile(reduce_to_tensors_kernel, "*fp32", name)

quantize("int8", "fp8_e4m3", "mxfp8_e4m3")
compile(feed_back_kernel, "*bf16", "int4-hadamard")
compile(feed_back_kernel, "*fp32", "int8")
compile(feed_back_kernel, "*bf16", "int3")
quantize("int8-hadamard", "fp8_e5m2", "mxfp8_e5m2-floor")
dequantize("int8", "fp8_e4m3", "fp8_e5m2", "mxfp8_e5m2")
reduce("int8", "int4-hadamard")
reduce("mxfp8_e4m3", "mxfp8_e5m2")
reduce_to_tensors("int8", "fp8_e5m2")
compile(round_trip_kernel, "*bf16", "mxfp8_e4m3")
compile(quantize_differences_kernel, "*bf16", "int4", first="none")
compile(add_differences_kernel, None, "int4", first="none")
if CAPABILITY == 90:
    quantize("none", "mxfp6_e3m2", "mxfp4", "mxint8", "int2", "int3")
    quantize("int4-hadamard")
    dequantize("int4-hadamard", "none", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8", "int2", "int3")
    reduce("int4-hadamard", "none", "int8", "int3", "int3")
    reduce("mxfp8_e5m2", "mxfp6_e2m3", "mxfp4")
    reduce_to_tensors("int4-hadamard", "none", "mxfp6_e3m2", "mxfp4")
    compile(round_trip_kernel, "*fp32", "mxfp6_e3m2", ALONG_COLUMNS=False)
    for name, held in (("int4-hadamard", "int8-hadamard"), ("int2", "int8"), ("int3", "none"), ("none", "none")):
        if name != "none":
            compile(quantize_differences_kernel, "*bf16", name, first=held)
        compile(add_differences_kernel, None, name, first=held)
    compile(round_trip_kernel, "*fp32", "mxfp8_e5m2-floor", ALONG_ROWS=False)
    compile(round_trip_kernel, "*bf16", "mxint8")
print("done")
"""
    assert run(script, interpret=False, processes=2).count("done") == 2
