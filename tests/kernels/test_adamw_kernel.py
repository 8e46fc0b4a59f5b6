"""The AdamW kernel: the codes and scales of optim/adamw.py in Triton's interpreter, and code for sm_90 without a GPU.

Both run in processes of their own: whether Triton interprets or compiles is decided when it is imported.
"""

import pytest
from triton_process import run

pytest.importorskip("triton")


def test_kernel_in_the_interpreter():
    """Every format in every place, every kind of gradient; ragged, empty and whole segments, NaN, Inf."""
    script = """
import numpy as np
np.seterr(all="ignore")  # the interpreter computes in numpy, which warns of the Inf that are asked for
from optim_cases import KERNEL_CASES, check_kernel

cases = mine(KERNEL_CASES)
for formats, grads, weights, options in cases:
    try:
        check_kernel(formats, grads, weights, **options)
    except AssertionError as error:
        raise AssertionError((formats, grads, weights, options)) from error
print(len(cases))
"""
    assert sum(map(int, run(script, interpret=True, processes=2).split())) == 24


def test_properties_in_the_interpreter():
    """Any sizes, formats and options."""
    script = """
import random
import numpy as np
np.seterr(all="ignore")
import torch
from optim_cases import BF16, FP16, FP32, GRIDS, StateFormats, check_kernel

draw = random.Random(0)
names = list(GRIDS)
for _ in range(40):
    formats = StateFormats(draw.choice(names), draw.choice(names), draw.choice(names),
                           draw.choice(["tensor", "block"]), draw.choice([16, 32, 64, 128, 256, 512, 1024]))
    numels = [draw.choice([0, 1, 2, 1023, 1024, 1025, draw.randint(1, 3000)]) for _ in range(4)] + [1300]
    numels[0] = 1300
    numels[3] = 1024
    grads = draw.choice([BF16, FP16, FP32, ("fp8_e4m3", "tensor", 128), ("fp8_e5m2", "block", draw.choice([16, 128]))])
    weights = draw.choice([BF16, FP16, FP32, None])
    odd, spoil = draw.random() < 0.5, draw.random() < 0.2
    if turn():
        check_kernel(formats, grads, weights, numels=numels, steps=2, odd=odd, spoil=spoil)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_without_a_gpu_the_kernel_is_refused():
    script = """
import pytest, torch
from optim_cases import BF16, BLOCK, run_steps
with pytest.raises(ValueError, match="needs a CUDA device or TRITON_INTERPRET=1"):
    run_steps(True, BLOCK, BF16, BF16)
print("done")
"""
    assert run(script, interpret=False).strip() == "done"


def test_compiles_without_a_gpu():
    """16 bytes of each 16-bit tensor at a time, 8 FP8 codes; nothing is spilled, and nothing fused but on purpose."""
    script = """
import re
import triton
from ptxas import said_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.kernels.optimizer.adamw import NUM_WARPS, Form, adamw_kernel

CODES = {"fp32": "*fp32", "bf16": "*bf16", "fp16": "*fp16", "fp8_e4m3": "*u8", "fp8_e5m2": "*u8"}
USUAL = {"GRAD": "tensors", "GRAD_BLOCK": 0, "MASTER": "fp16", "EXP_AVG": "fp8_e4m3", "EXP_AVG_SQ": "fp16",
         "ALIGNED_GRADS": True, "ALIGNED_WEIGHTS": True, "PASS": "only", "PER_BLOCK": True, "L2": False,
         "NATIVE_FP8": True, "FAST": True, "INTERPRETED": False, "ROWS": 8, "WIDTH": 128}
PER_TENSOR = {"PER_BLOCK": False, "ROWS": 1, "WIDTH": 1024}

def compile(tensors="*bf16", capability=90, **changes):
    constants = {**USUAL, **changes}
    pointers = {
        "grads_ptr": tensors if constants["GRAD"] == "tensors" else "*u8", "weights_ptr": tensors,
        "grad_scales_ptr": "*u8" if constants["GRAD_BLOCK"] else "*fp32", "master_ptr": CODES[constants["MASTER"]],
        "exp_avg_ptr": CODES[constants["EXP_AVG"]], "exp_avg_sq_ptr": CODES[constants["EXP_AVG_SQ"]],
        "tile_segments_ptr": "*i32", "table_ptr": "*i64", "places_ptr": "*i64", "amax_ptr": "*i32",
        "grad_scale_ptr": "*fp32"}
    form = Form(**{name.lower(): value for name, value in constants.items() if name != "PASS"})
    constants = {"PASS": constants["PASS"], "FORM": form}
    signature, attributes = {}, {}
    for place, argument in enumerate(adamw_kernel.jitted.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_ptr"):
            signature[argument] = pointers.get(argument, "*u8")
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "fp32"
    source = ASTSource(fn=adamw_kernel.jitted, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    said = said_of(code)
    assert "0 bytes spill stores, 0 bytes spill loads" in said, (changes, said)
    return code

def accesses(code, kind, width):
    return code.count(f"{kind}.global.{width}")

# Two bodies, of whole tiles and of a tensor's last. There only gradient and weight have masks.
if turn():
    code = compile()
    assert accesses(code, "ld", "v4.b32") == 5 and accesses(code, "ld", "v2.b32") == 2  # grad, 2 x (p, v); 2 x m
    assert accesses(code, "st", "v4.b32") == 5 and accesses(code, "st", "v2.b32") == 2
    assert accesses(code, "ld", "b16") == 8 and accesses(code, "st", "b16") == 8
    # A root takes two fused operations, a quotient six; of 8 elements, in two bodies.
    assert code.count("fma.rn.f32") == 2 * 8 * 8
    assert "sqrt.rn" not in code and "div.rn" not in code
if turn():
    code = compile(GRAD="fp8_e4m3")
    assert accesses(code, "ld", "v2.b32") == 4 and accesses(code, "ld", "b16") == 0
if turn():
    code = compile(PASS="first", **PER_TENSOR)
    assert "st.global" not in code and len(re.findall(r"(?:atom|red)\\.global", code)) == 6
for tensors, changes in mine((
    ("*bf16", {"GRAD": "fp8_e5m2", "GRAD_BLOCK": 128}),
    ("*bf16", {"GRAD": "fp8_e5m2", "GRAD_BLOCK": 32}),
    ("*bf16", {"PASS": "second", **PER_TENSOR}),
    ("*fp32", {"MASTER": "fp32", "EXP_AVG": "fp32", "EXP_AVG_SQ": "fp32", **PER_TENSOR}),
    ("*bf16", {"MASTER": "bf16", "EXP_AVG": "bf16", "EXP_AVG_SQ": "bf16", "L2": True,
               "ALIGNED_GRADS": False, "ALIGNED_WEIGHTS": False, **PER_TENSOR}),
    ("*bf16", {"MASTER": "fp8_e4m3", "EXP_AVG": "fp8_e5m2", "EXP_AVG_SQ": "fp8_e4m3"}),
    ("*fp16", {"capability": 80, "NATIVE_FP8": False}),
)):
    compile(tensors, **changes)
print("done")
"""
    assert run(script, interpret=False, processes=2).count("done") == 2


def test_segments_encoded_at_once_in_the_interpreter():
    script = """
import torch
from optim_cases import CPU, check_encode_several
from zeropp_fp8.kernels.optimizer.encode_blocks import encode_blocks

def encode(buffer, segments, values, in_place):
    tiles = buffer._tiles_of(tuple(segments), in_place)
    encode_blocks(values, buffer.codes, buffer.scales, tiles, buffer.storage.name, buffer.block_size)

for element in ("fp8_e4m3", "fp8_e5m2"):
    for block, dtype in mine([(16, torch.float32), (128, torch.float32), (1024, torch.float16), (256, torch.bfloat16)]):
        check_encode_several(element, block, dtype, CPU, encode)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2
