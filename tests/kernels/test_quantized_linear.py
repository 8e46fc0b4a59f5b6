"""Products with weights that lie as codes: torch code and kernels against float64 and against the torch decoding.

Kernels run in Triton's interpreter, in processes of their own (whether Triton interprets or compiles is decided when it
is imported); their inline assembly in numpy (ptx.py); and they are compiled for sm_80 and sm_90 without a GPU.
"""

import numpy as np
import ptx
import pytest
import torch
from error_bounds import UNIT_ROUNDOFF
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_process import run

pytest.importorskip("triton")

from quantized_cases import (
    DTYPES,
    FORMATS,
    check_each_number,
    check_spoiled,
    lora_of,
    make,
    normal,
    weight_of,
)

from zeropp_fp8.formats import make_format
from zeropp_fp8.formats.nf4 import NF4_LEVELS
from zeropp_fp8.kernels.linear import code_words
from zeropp_fp8.kernels.linear.quantized_linear import Launch, Lora, QuantizedLinear, launch_of, quantized_linear
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight, can_multiply

# -- kernels in the interpreter --------------------------------------------------------------------------------------


def test_products_in_the_interpreter():
    """Every format, in slices that end inside rows; then sums of several steps, of few and many rows of x."""
    script = """
from quantized_cases import DTYPES, FORMATS, check_each_number, check_product, make, normal, weight_of

done = 0
for name in mine(FORMATS):
    fmt = make(name)
    columns = fmt.block_size * max(1, 192 // fmt.block_size)
    rows = [0, 1, columns // 2, columns - 2, columns - 1]
    check_each_number(weight_of(normal(33, columns), fmt, 4, 1), rows)
    done += 1
for name, count, dtype in mine((
    ("int4", 1, "bf16"), ("int4", 33, "bf16"), ("int4-96", 5, "bf16"), ("int8", 9, "bf16"), ("nf4-double", 17, "bf16"),
    ("int4-34", 2, "bf16"), ("int8-3", 3, "fp16"), ("int8-16", 5, "fp32"), ("nf4", 10, "fp32"),
)):
    fmt = make(name)
    columns = fmt.block_size * (1280 // fmt.block_size)
    weight = weight_of(normal(17, columns, dtype=DTYPES[dtype]), fmt, 6)
    bias = normal(17, dtype=DTYPES[dtype], seed=2, scale=30) if count % 2 else None
    check_product(weight, normal(count, columns, dtype=DTYPES[dtype], seed=1), bias)
    done += 1
print(done)
"""
    assert sum(map(int, run(script, interpret=True, processes=2).split())) == len(FORMATS) + 9


def test_lora_in_the_interpreter():
    """Any ranks, also beyond what a step of all warps takes; dtypes of adapters; scalings; few and many rows."""
    script = """
from quantized_cases import (
    DTYPES, check_lora_beside_large_scales, check_lora_spoils, check_product, lora_of, make, normal, weight_of
)

for name, count, dtype, rank, of_lora, scaling in mine((
    ("nf4-double", 1, "bf16", 16, "bf16", 2.0), ("nf4-double", 9, "bf16", 130, "bf16", 0.3),
    ("nf4", 33, "bf16", 8, "bf16", -1.0), ("int4", 8, "bf16", 64, "fp32", 1 / 3), ("int4", 16, "fp16", 1, "fp16", 4.0),
    ("int8", 2, "fp32", 7, "fp32", 1.7), ("int8-3", 3, "bf16", 4, "bf16", 2.0), ("int4-34", 17, "fp16", 17, "fp32", 2),
    ("nf4-8", 5, "fp32", 129, "fp32", 0.5), ("int4-double", 4, "bf16", 3, "fp16", 2.0),
)):
    fmt = make(name)
    columns = fmt.block_size * (512 // fmt.block_size)
    weight = weight_of(normal(17, columns, dtype=DTYPES[dtype]), fmt, 6)
    bias = normal(17, dtype=DTYPES[dtype], seed=2, scale=30) if count % 2 else None
    x = normal(count, columns, dtype=DTYPES[dtype], seed=1)
    check_product(weight, x, bias, lora=lora_of(weight, rank, scaling, DTYPES[of_lora]))
for name in mine(("nf4-double", "int8-3", "int4")):
    check_lora_spoils(weight_of(normal(18, 384), make(name), 3))
    check_lora_beside_large_scales(make(name))
if turn():
    weight = weight_of(normal(9, 256), make("int4"), 2)
    x = normal(6, 512, seed=1)
    for some in (x[:, ::2], x.view(-1)[1:1537].view(6, 256), x[:, :256].reshape(2, 3, 256), x[0, :256], x[:0, :256]):
        check_product(weight, some, lora=lora_of(weight, 4))
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_stacks_in_the_interpreter():
    """Of each matrix the rows that go through it: alone and with others, once or more per row of x, matrices unused."""
    script = """
from quantized_cases import DTYPES, check_stack, make

for name, matrices, outputs, slices, tokens, each, dtype in mine((
    ("int4", 3, 17, 4, 2, 2, "bf16"), ("nf4-double", 5, 16, 3, 3, 1, "bf16"), ("int8", 2, 33, 6, 1, 4, "fp16"),
    ("int8-3", 4, 5, 7, 2, 3, "bf16"), ("int4-34", 2, 9, 1, 3, 2, "fp32"), ("nf4", 6, 40, 1, 4, 2, "bf16"),
)):
    check_stack(make(name), matrices, outputs, slices, tokens, each, dtype=DTYPES[dtype])
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_slices_in_the_interpreter():
    """Slices of whole rows and parts of them, shorter than a row, in order or not, partly and wholly beyond the end.

    All numbers of two weights: the identity then has several programs' rows, and the weight more rows than a program.
    """
    script = """
import random
from quantized_cases import FORMATS, check_each_number, make, normal, weight_of

draw = random.Random(0)
for _ in range(16):
    fmt = make(draw.choice(sorted(FORMATS)))
    columns = fmt.block_size * draw.randint(1, max(2, 256 // fmt.block_size))
    outputs, slices = draw.choice([1, 2, 3, 15, 16, 17, 40]), draw.choice([1, 2, 3, 4, 6, 8])
    weight = weight_of(normal(outputs, columns), fmt, slices, draw.choice([0, 0, 1, 2]), ordered=draw.random() < 0.7)
    rows = sorted(draw.sample(range(columns), min(columns, 4)))
    if turn():
        check_each_number(weight, rows)
for columns, name in mine(((64, "int4-32"), (39, "int8-3"))):
    check_each_number(weight_of(normal(35, columns), make(name), 2))
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_extreme_numbers_in_the_interpreter():
    """Blocks with NaN, numbers at both ends of their dtype's range, x of any shape, what lies behind the results."""
    script = """
import torch
from quantized_cases import check_bounds, check_each_number, check_product, check_spoiled, make, normal, weight_of
from zeropp_fp8.kernels.linear.quantized_linear import quantized_linear

for name in mine(("int4", "int8-3")):
    check_bounds(make(name))
for name in mine(("int4", "int4-34", "int8-double", "nf4-32")):
    fmt = make(name)
    columns = 2 * fmt.block_size
    check_spoiled(normal(9, columns), fmt, 2, 5 * columns + fmt.block_size)
    largest = torch.full((9, columns), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    largest[1::2] *= -0.9
    largest[4:6] = 2.0**-126
    largest[6] = 0
    check_each_number(weight_of(largest, fmt, 2), rows=[0, columns - 1])
weight = weight_of(normal(9, 256), make("int4"), 2)
assert quantized_linear(torch.zeros(0, 256, dtype=torch.bfloat16), weight, use_kernel=True).shape == (0, 9)
x = normal(6, 512, seed=1)
for some in mine((x[:, ::2], x.view(-1)[1:1537].view(6, 256), x[:, :256].reshape(2, 3, 256), x[0, :256])):
    check_product(weight, some)
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


# -- inline assembly -------------------------------------------------------------------------------------------------


def numbers_of(words, element):
    """fp32 [numbers of a word, words]: what its codes stand for, the lowest bits first."""
    bits = 8 if element == "int8" else 4
    codes = np.stack([words >> (bits * i) & (2**bits - 1) for i in range(32 // bits)]).astype(np.int64)
    if element == "nf4":
        return np.array(NF4_LEVELS, np.float32)[codes]
    return np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes).astype(np.float32)


def assembled(element, scale, words, scales, clamp):
    """The pairs of words, as the PTX for the format makes them."""
    if scale == "bf16":
        block = {"int4": code_words._int4_times_bf16, "int8": code_words._int8_times_bf16}[element](clamp)
        bits = scales.view(np.uint32) >> 16
        inputs = {"$4" if element == "int4" else "$2": words, "$5" if element == "int4" else "$3": bits | bits << 16}
        out = ptx.run(block, inputs)
    elif element == "int8":
        out = ptx.run(code_words._int8_times_fp32(clamp), {"$2": words, "$3": scales.view(np.uint32)})
    else:
        levels = NF4_LEVELS if element == "nf4" else code_words._INT4_LEVELS
        made = ptx.run(code_words._numbers_of_block(levels, clamp), {"$8": scales.view(np.uint32)})
        out = ptx.run(code_words._looked_up(), {"$4": words, **{f"${5 + i}": made[f"${i}"] for i in range(8)}})
    return [out[f"${i}"] for i in range(2 if element == "int8" else 4)]


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize(
    "element, scale", [("int4", "bf16"), ("int8", "bf16"), ("int4", "double"), ("int8", "double"), ("nf4", "fp32")]
)
def test_inline_assembly(element, scale, clamp):
    """The same bits as fp32 products, clamped and rounded by torch: any codes, scales of all sizes, zeros and NaN.

    Without a clamp scales end where a kernel begins to use one.
    """
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**32, 2000, dtype=np.uint32)
    smallest = -126 if scale == "bf16" else -149
    scales = np.ldexp(1 + generator.random(2000), generator.integers(smallest, 128 if clamp else 120, 2000))
    scales = scales.astype(np.float32)
    scales[::50], scales[1::50] = np.nan, 0
    scales[2::50] = np.array(code_words.SAFE_SCALE.value, np.uint32).view(np.float32)
    if scale == "bf16":
        scales = (scales.view(np.uint32) & 0xFFFF0000).view(np.float32)
    limit = torch.finfo(torch.bfloat16).max
    numbers = (torch.from_numpy(numbers_of(words, element)) * torch.from_numpy(scales)).clamp(-limit, limit).bfloat16()
    pairs = len(numbers) // 2
    for i, got in enumerate(assembled(element, scale, words, scales, clamp)):
        by_halves = code_words.pairing(element, scale) == "halves"
        for half, place in enumerate((i, i + pairs) if by_halves else (2 * i, 2 * i + 1)):
            bits = (got >> (16 * half) & 0xFFFF).astype(np.uint16).view(np.int16)
            finite = ~numbers[place].isnan()
            assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16).isnan(), ~finite)
            assert torch.equal(torch.from_numpy(bits)[finite], numbers[place].view(torch.int16)[finite])


# -- compiling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    """In the loops over codes: 16-byte loads of codes and x, tensor cores, and neither shared memory nor a barrier.

    With LoRA they are the same loops, and no more registers are spilled.
    """
    script = f"""
import re
import ptxas
import triton
from quantized_cases import make
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.kernels.linear.code_words import pairing
from zeropp_fp8.kernels.linear.quantized_linear import launch_of
from zeropp_fp8.kernels.linear.quantized_linear_kernel import Form, quantized_linear_kernel

CAPABILITY = {capability}
POINTERS = {{"payload_ptr": "*u8", "rows_ptr": "*i32", "lookup_ptr": "*fp32", "x_ptr": "*bf16", "beside_ptr": "*bf16",
             "bias_ptr": "*bf16", "lora_B_ptr": "*bf16", "out_ptr": "*bf16"}}
TYPES = {{**POINTERS, "scaling": "fp32"}}

def compiled(kernel, constants, warps, **options):
    signature, attributes = {{}}, {{}}
    for place, argument in enumerate(kernel.jitted.arg_names):
        signature[argument] = "constexpr" if argument in constants else TYPES.get(argument, "i32")
        if argument in POINTERS:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel.jitted, signature=signature, constexprs=constants, attrs=attributes)
    options = {{"num_warps": warps, "enable_fp_fusion": False, **options}}
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options).asm["ptx"]

def loops(code):
    lines = code.splitlines()
    labels = {{line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L")}}
    for i, line in enumerate(lines):
        target = re.search(r"bra(?:\\.uni)?\\s+(\\$L\\w+)", line)
        if target and labels[target[1]] < i:
            yield "\\n".join(lines[labels[target[1]] : i + 1])

def spilled(code):
    return int(re.search(r"(\\d+) bytes spill stores", ptxas.said_of(code))[1])

def check_lora(name, count):
    plain, with_lora = (check_linear(name, count, steps) for steps in (0, 1))
    assert spilled(with_lora) <= spilled(plain) + 16, (name, count, spilled(with_lora), spilled(plain))

def check_linear(name, count, rank_steps=0, stacked=False):
    fmt = make(name)
    launch = launch_of(count, 4096, stacked)
    TYPES["beside_ptr"] = "*i32" if stacked else "*bf16"
    bits = fmt.element.bits
    scale = fmt.scale.name
    form = Form(
        element=fmt.name, scale=scale, pairs=16 // bits, pairing=pairing(fmt.name, scale), times=launch.times,
        block=fmt.block_size * bits // 128 // launch.times, ordered=True, biased=True, rank_steps=rank_steps,
        stacked=stacked, limit=3.38e38, words=True, ptx=True, settle=True, interpreted=False, warps=launch.warps,
        row_groups=launch.row_groups, groups=launch.groups,
    )
    constants = dict(FORM=form)
    code = compiled(quantized_linear_kernel, constants, launch.warps, maxnreg=launch.max_registers)
    found = [loop for loop in loops(code) if "mma.sync" in loop]
    assert len(found) == 2, (name, len(found))  # the second one clamps
    for loop in found:
        for word in ("shared", "bar.sync", "shfl", ".local"):
            assert word not in loop, (name, word)
        codes, x = launch.times * launch.row_groups, launch.times * launch.groups * 16 // bits
        assert loop.count("ld.global.v4.b32") == codes + x, (name, loop.count("ld.global.v4.b32"), codes, x)
        numbers = launch.times * launch.row_groups * 128 // bits
        assert loop.count("mma.sync") * 8 == numbers * launch.groups, (name, loop.count("mma.sync"))
    return code

checks = [(check_lora, "int4", 1)]
if CAPABILITY == 90:
    checks += [(check_linear, "int8", 1), (check_lora, "nf4-double", 32), (check_lora, "nf4-double", 8)]
    checks += [(check_linear, "nf4-double", 64, 0, True)]
for check, *arguments in mine(checks):
    check(*arguments)
print("done")
"""
    assert run(script, interpret=False, processes=2).count("done") == 2


def test_launches():
    """Few outputs have more warps, more rows of x more weight rows; nothing beyond 32 rows of x a program."""
    assert launch_of(1, 4096) == launch_of(8, 14336) == Launch(8, 2, 1, 2, 128)
    assert launch_of(1, 1024).warps == 16
    assert launch_of(9, 4096).groups == 2 and launch_of(16, 4096).groups == 2
    assert launch_of(17, 4096).groups == launch_of(1000, 4096).groups == 4


# -- torch code ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_torch_code(name):
    fmt = make(name)
    values = normal(33, 4 * fmt.block_size)
    weight = weight_of(values, fmt, 3, 1)
    assert torch.equal(weight.dequantize(), torch.cat([weight_of(values, fmt, 3).dequantize()]))
    check_each_number(weight, use_kernel=None)
    check_spoiled(values, fmt, 2, 3 * 4 * fmt.block_size, use_kernel=None)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    outputs=st.integers(1, 20),
    blocks=st.integers(1, 5),
    slices=st.integers(1, 8),
    extra=st.integers(0, 2),
    count=st.integers(0, 5),
    dtype=st.sampled_from(sorted(DTYPES)),
    seed=st.integers(0, 2**20),
)
@settings(derandomize=True, max_examples=60)
def test_properties(name, outputs, blocks, slices, extra, count, dtype, seed):
    """The elements of any slices are those of the matrix, and the product is theirs."""
    fmt = make(name)
    values = normal(outputs, blocks * fmt.block_size, dtype=DTYPES[dtype], seed=seed)
    weight = weight_of(values, fmt, slices, extra, seed=seed)
    flat = torch.zeros(-(-values.numel() // weight.slice_numel) * weight.slice_numel, dtype=values.dtype)
    flat[: values.numel()] = values.view(-1)
    parts = [fmt.decode(fmt.encode(part), part.shape, part.dtype) for part in flat.split(weight.slice_numel)]
    assert torch.equal(weight.dequantize(), torch.cat(parts)[: values.numel()].view(values.shape))
    x, bias = normal(count, values.shape[1], dtype=values.dtype), normal(outputs, dtype=values.dtype)
    got = quantized_linear(x, weight, bias).double()
    wanted = x.double() @ weight.dequantize().double().t() + bias.double()
    sums = x.double().abs() @ weight.dequantize().double().abs().t() + bias.double().abs()
    # torch may round between the product and the bias.
    assert ((got - wanted).abs() <= 3 * UNIT_ROUNDOFF[values.dtype] * sums + 1e-6 * sums).all()


def test_no_numbers():
    """No rows of x, no inputs (the bias is left), no outputs."""
    payload = torch.zeros(1, 64, dtype=torch.uint8)
    for outputs, columns, count in ((5, 0, 2), (0, 32, 2), (1, 32, 0)):
        weight = QuantizedWeight(payload, 0, make("int4-32"), 32, (outputs, columns), torch.bfloat16)
        x, bias = normal(count, columns), normal(outputs, seed=1)
        for use_kernel in (None, True):  # nothing is launched
            got = quantized_linear(x, weight, bias, use_kernel)
            assert got.shape == (count, outputs) and (columns or torch.equal(got, bias.expand(count, outputs)))


def test_what_a_weight_refuses():
    fmt = make("int4-32")
    weight = weight_of(normal(4, 64), fmt, 2)
    good = {
        "payload": weight.payload,
        "offset": 48,
        "wire_format": fmt,
        "slice_numel": 128,
        "shape": (4, 64),
        "dtype": torch.bfloat16,
        "row_of_slice": weight.row_of_slice,
    }
    assert torch.equal(QuantizedWeight(**good).dequantize(), weight.dequantize())
    for error, message, changes in (
        (TypeError, "payload is uint8, not torch.int8", {"payload": weight.payload.view(torch.int8)}),
        (TypeError, "not in torch.float64", {"dtype": torch.float64}),
        (ValueError, r"\[rows, bytes\] with adjacent bytes", {"payload": weight.payload.t()}),
        (ValueError, r"\[rows, bytes\] with adjacent bytes", {"payload": weight.payload[0]}),
        (ValueError, "which int8 has not", {"wire_format": make_format("int8", block_size=None)}),
        (ValueError, "which none has not", {"wire_format": make_format("none")}),
        (ValueError, "slices of 100 elements are not cut at blocks of 32", {"slice_numel": 100}),
        (ValueError, "slices of 0 elements", {"slice_numel": 0}),
        (ValueError, r"2 slices of 128 elements are less than \[5, 64\]", {"shape": (5, 64)}),
        (ValueError, "bytes 40 to 120 must start at a multiple of 16", {"offset": 40}),
        (ValueError, "must start at a multiple of 16 and lie in rows of", {"offset": 96}),
        (ValueError, r"row_of_slice must be int32 \[2\]", {"row_of_slice": weight.row_of_slice.long()}),
        (ValueError, r"row_of_slice must be int32 \[2\]", {"row_of_slice": weight.row_of_slice[:1]}),
        (ValueError, "on cpu, not torch.int32", {"row_of_slice": weight.row_of_slice.to("meta")}),
    ):
        with pytest.raises(error, match=message):
            QuantizedWeight(**{**good, **changes})


def test_what_products_refuse():
    weight = weight_of(normal(4, 64), make("int4-32"), 2)
    x = normal(3, 64)
    for error, message, arguments in (
        (TypeError, "input is torch.float16, the weight stands for torch.bfloat16", (x.half(), weight)),
        (ValueError, r"last side must be 64, as the weight's \[4, 64\], not \[3, 32\]", (x[:, :32], weight)),
        (ValueError, "last side must be 64", (x[0, 0], weight)),
        (ValueError, "the input is on meta, the weight on cpu", (x.to("meta"), weight)),
        (ValueError, r"bias must be torch.bfloat16 \[4\] on cpu, not torch.bfloat16 \[5\]", (x, weight, normal(5))),
        (ValueError, r"bias must be torch.bfloat16 \[4\]", (x, weight, normal(4).float())),
        (ValueError, "has no gradient: call it under torch.no_grad", (x.clone().requires_grad_(), weight)),
        (ValueError, "has no gradient", (x, weight, normal(4).requires_grad_())),
    ):
        with pytest.raises(error, match=message):
            quantized_linear(*arguments)
    lora_A, lora_B, _ = lora_of(weight, 3)
    for changed in (
        (lora_A[:2], lora_B),
        (lora_A[:, :32], lora_B),
        (lora_A, lora_B[:3]),
        (lora_A.float(), lora_B),
        (lora_A.to("meta"), lora_B),
        (lora_A, lora_B.t().contiguous().t()),
    ):
        with pytest.raises(
            ValueError, match=r"LoRA must be A \[r, 64\] and B \[4, r\], contiguous, in one dtype on cpu"
        ):
            QuantizedLinear(weight, None, Lora(*changed, 1.0))
    with pytest.raises(ValueError, match="has no gradient"):
        QuantizedLinear(weight, None, Lora(lora_A, lora_B.clone().requires_grad_(), 1.0))(x)
    with torch.no_grad():
        assert not quantized_linear(x.clone().requires_grad_(), weight).requires_grad
    straddling = weight_of(normal(4, 48), make("int4-32"), 2)
    with pytest.raises(ValueError, match="48 inputs are no multiple of blocks of 32"):
        quantized_linear(normal(3, 48), straddling)
    for fmt in (
        make_format("int4", hadamard=True),
        make_format("fp8_e4m3"),
        make_format("mxfp4"),
        make_format("fp8_e4m3", double_quantize=True),
    ):
        assert not can_multiply(fmt)
        with pytest.raises(ValueError, match=f"weights in the format {fmt.name}"):
            quantized_linear(normal(3, 128), weight_of(normal(4, 128), fmt, 1))
    assert all(can_multiply(make(name)) for name in FORMATS) and not can_multiply(make_format("none"))
    assert not can_multiply(make_format("int8", block_size=None))


def test_sizes_beyond_the_kernel():
    """Refused before anything is launched; no weight of that size is made for it."""
    fmt = make("int8")
    payload = torch.empty(1, fmt.payload_bytes(2**31), dtype=torch.uint8, device="meta")
    weight = QuantizedWeight(payload, 0, fmt, 2**31, (2**20, 2**11), torch.bfloat16)
    x = torch.empty(1, 2**11, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match=r"slices below 2\^31 bytes and weights below 2\^35"):
        quantized_linear(x, weight, use_kernel=True)
