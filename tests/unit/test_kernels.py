"""Triton kernels: the bytes of formats/ in Triton's interpreter, and code for sm_80 and sm_90 without a GPU.

Both run in processes of their own: whether Triton interprets or compiles is decided when it is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parent.parent


def run(script: str, interpret: bool) -> str:
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1" if interpret else "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quantize_and_dequantize_in_the_interpreter():
    """Every element, dtype and rounding; odd sizes, slices out of order, empty slices at a tensor's end."""
    script = """
import torch
from kernel_cases import CPU, DTYPES, FORMATS, check_quantize_and_dequantize, make

done = 0
for name in FORMATS:
    for rounding in ("nearest", "half_away", "stochastic"):
        for dtype in DTYPES if rounding == "nearest" else ("fp32",):
            check_quantize_and_dequantize(
                make(name, rounding), DTYPES[dtype], [33, 500, 1001], 3, [2, 0, 1], CPU,
                DTYPES.values() if (rounding, dtype) == ("nearest", "fp32") else (),
            )
            done += 1
for dtype in DTYPES.values():
    check_quantize_and_dequantize(make("none", dtype=dtype), dtype, [33, 500, 3001], 3, [2, 0, 1], CPU, [dtype])
    done += 1
# one slice of several, sizes of which the last slices are empty, a single element, and a whole tile
check_quantize_and_dequantize(make("int8"), torch.float32, [9, 1, 2, 5], 8, [7, 1], CPU, [torch.float32])
check_quantize_and_dequantize(make("int4-hadamard"), torch.float32, [1, 8192], 1, [0], CPU, [torch.float32])
print(done)
"""
    assert int(run(script, interpret=True)) == 11 * 5 + 3


def test_reduce_in_the_interpreter():
    script = """
import torch
from kernel_cases import CPU, DTYPES, check_reduce, make

for first, then in (("int8", "int4-hadamard"), ("int8", "int8"), ("int4-hadamard", "int4-hadamard"),
                    ("none", "int4"), ("int8", "none"), ("none", "none"), ("fp8_e5m2", "fp8_e4m3"),
                    ("int8-96", "int8")):
    check_reduce(make(first), make(then), torch.bfloat16, [33, 500, 1001], 2, 3, CPU, DTYPES.values())
check_reduce(make("int8", "stochastic"), make("int4", "stochastic"), torch.float32, [500, 1001], 2, 2, CPU,
             [torch.float32])
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
    rounding = draw.choice(["nearest", "half_away", "stochastic"])
    check_quantize_and_dequantize(make(name, rounding), torch.float32, numels, world, slices, CPU, [torch.float32])
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    """Every element compiles; tensors are accessed 16 bytes at a time, codes 8 at a time; nothing is spilled."""
    script = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.kernels.dequantize import dequantize_kernel
from zeropp_fp8.kernels.quantize import quantize_kernel
from zeropp_fp8.kernels.reduce import reduce_to_payload_kernel, reduce_to_tensors_kernel

CAPABILITY = {capability}
POINTERS = {{"payload_ptr": "*u8", "received_ptr": "*u8", "slices_ptr": "*i32", "tensors_ptr": "*i64",
             "segments_ptr": "*i64", "segments_in_ptr": "*i64", "segments_out_ptr": "*i64"}}
TILE = {{"BLOCK_SIZE": 128, "WIDTH": 128, "TILE_BLOCKS": 32, "INTERPRETED": False, "NATIVE_FP8": CAPABILITY >= 89}}

CODES = {{"int8": "v2.b32", "fp8_e4m3": "v2.b32", "fp8_e5m2": "v2.b32", "int4": "b32", "bf16": "v4.b32"}}

def compile(kernel, base, constants):
    constants = {{**TILE, **constants}}
    constants = {{name: value for name, value in constants.items() if name in kernel.arg_names}}
    signature, attributes = {{}}, {{}}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name == "inverse_ranks":
            signature[name] = "fp32"
        else:
            signature[name] = base if name == "base_ptr" else POINTERS.get(name, "i32")
            if "seed" not in name:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {{"num_warps": 4, "enable_fp_fusion": False}}
    code = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options).asm["ptx"]
    codes_in = "st" if kernel is quantize_kernel else "ld"
    coded = constants.get("ELEMENT_IN", constants["ELEMENT"])
    assert f"{{codes_in}}.global." + CODES[coded] in code, (kernel, constants)
    if base:
        assert ("ld" if kernel is quantize_kernel else "st") + ".global.v4.b32" in code, (kernel, constants)
    # A fused product is rounded once, and bytes would differ; only the sum fuses on purpose, where products are exact.
    assert ("fma.rn.f32" in code) == ("RANKS" in constants and coded != "bf16"), (kernel, constants)
    assert ".local" not in code

ELEMENTS = {{"int8": 127.0, "int4": 7.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "bf16": 0.0}}
for element, largest in ELEMENTS.items():
    for hadamard in (False, True) if largest else (False,):
        for rounding in ("nearest", "stochastic") if largest else ("nearest",):
            compile(quantize_kernel, "*bf16", dict(ELEMENT=element, LARGEST=largest, HADAMARD=hadamard,
                                                   ROUNDING=rounding, ALIGNED=True))
        compile(dequantize_kernel, "*bf16", dict(ELEMENT=element, HADAMARD=hadamard, ALIGNED=True, LIMIT=3.38e38))
    compile(reduce_to_payload_kernel, None, dict(ELEMENT_IN="int8", HADAMARD_IN=False, ELEMENT=element, HADAMARD=False,
                                                 ROUNDING="nearest", LARGEST=largest, RANKS=8))
    compile(reduce_to_tensors_kernel, "*fp32", dict(ELEMENT=element, HADAMARD=False, ALIGNED=True, RANKS=8,
                                                    ACCUMULATE=True))
print("done")
"""
    assert run(script, interpret=False).strip().endswith("done")
