"""FP8 codes with a scale that all ranks share: the format, the amax history its scales come from, and the kernels."""

import numpy as np
import pytest
import torch
from triton_process import run

from zeropp_fp8.formats import SharedScaleFormat, amax_history
from zeropp_fp8.formats.amax_history import AmaxHistory

ELEMENTS = {"fp8_e4m3": (3, 7, 448.0), "fp8_e5m2": (2, 15, 57344.0)}  # mantissa bits, bias, largest
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# -- an oracle in numpy: the table of all codes, and the nearest of them -----------------------------------------------


def numbers(name):
    """float64 [256]: the number of every code; NaN where it is none."""
    mantissa_bits, bias, largest = ELEMENTS[name]
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> mantissa_bits
    fraction = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    values = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    values = np.where(codes & 0x80, -values, values)
    return np.where(np.abs(values) > largest, np.nan, values)


def nearest_codes(name, values):
    """uint8 codes of float64 values: to nearest, ties to the even code, cut off at the largest, not finite: 0x7F."""
    table = numbers(name)
    positive = np.flatnonzero(np.isfinite(table) & (np.arange(256) < 128))
    magnitudes = np.minimum(np.abs(np.where(np.isfinite(values), values, 0.0)), table[positive].max())
    upper = np.searchsorted(table[positive], magnitudes)  # the first code whose number is not smaller
    lower = np.maximum(upper - 1, 0)
    down, up = magnitudes - table[positive][lower], table[positive][upper] - magnitudes
    chosen = np.where((down < up) | ((down == up) & (lower % 2 == 0)), lower, upper)
    codes = np.where(np.signbit(values), chosen | 0x80, chosen)
    return np.where(np.isfinite(values), codes, 0x7F).astype(np.uint8)


def draw(count, dtype, seed=0):
    """Values over all of the formats' range, with ties, zeros, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * torch.logspace(-6, 4, count)[torch.randperm(count)]
    values[::11] = 0.0
    values[1::23] = -0.0
    grid = torch.from_numpy(numbers("fp8_e4m3"))[torch.randint(1, 126, (count // 4,), generator=generator)]
    values[2 : 2 + len(grid)] = (grid * 1.0625).float()  # halfway between two codes, for all but subnormals
    values = values.to(dtype)
    values[5], values[6], values[7] = float("nan"), float("inf"), -float("inf")
    return values


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("multiplier", [1.0, 0.37, 1e-3, 3000.0])
def test_codes_and_counts(name, dtype, multiplier):
    values = draw(3001, dtype)
    out = torch.full((1, 3016), 0xAB, dtype=torch.uint8)
    counts = torch.tensor([10, 20])
    SharedScaleFormat(name).encode_scaled(values.view(1, -1), torch.tensor([multiplier]), out, counts)
    # The product is rounded to fp32 before it is rounded to FP8.
    scaled = (values.float().numpy() * np.float32(multiplier)).astype(np.float64)
    expected = nearest_codes(name, scaled)
    assert np.array_equal(out[0, :3001].numpy(), expected)
    assert not out[0, 3001:].any(), "padding is zero"
    assert (expected[5:8] == 0x7F).all()
    largest = nearest_codes(name, np.array([1e9]))[0]
    zeros = (expected & 0x7F == 0) & (values.float().numpy() != 0)
    assert counts.tolist() == [10 + int((expected & 0x7F == largest).sum()), 20 + int(zeros.sum())]
    if multiplier == 1e-3:
        assert zeros.sum() > 100 and counts[1] > 120
    if multiplier == 3000.0:
        assert counts[0] > 200


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_decodes_to_its_number(name):
    wire_format = SharedScaleFormat(name)
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    decoded = wire_format.decode_rows(codes, 128, torch.float32)
    table = numbers(name).reshape(2, 128)
    finite = np.isfinite(table)
    assert np.array_equal(decoded.numpy()[finite].astype(np.float64), table[finite])
    assert not np.isfinite(decoded.numpy()[~finite]).any()
    out = torch.zeros(2, 100, dtype=torch.bfloat16)
    assert wire_format.decode_rows(codes, 100, torch.bfloat16, out) is out
    assert torch.equal(out.float().nan_to_num(), decoded[:, :100].nan_to_num().bfloat16().float())


@pytest.mark.parametrize("name", ELEMENTS)
def test_sum_over_ranks(name):
    """In fp32 and in the ranks' order; a rank's NaN is everybody's."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 0x60, (5, 3, 64), generator=generator, dtype=torch.uint8)
    codes[2, 1, 7] = 0x7F
    total = SharedScaleFormat(name).sum_of_rows(codes, 50)
    expected = np.zeros((3, 50), dtype=np.float32)
    for rank in codes.numpy():
        expected = expected + numbers(name)[rank[:, :50]].astype(np.float32)
    assert np.isnan(expected[1, 7]) and np.isnan(total.numpy()[1, 7])
    assert np.array_equal(total.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", ELEMENTS)
def test_scale_of_amax(name):
    wire_format = SharedScaleFormat(name)
    amax = torch.tensor([448.0, 1.0, 3e38, 0.0, 1e-42])
    scales = wire_format.scale_of_amax(amax)
    assert scales[:3].tolist() == pytest.approx((amax[:3].double() / ELEMENTS[name][2]).tolist(), rel=1e-7)
    # Nothing is divided by zero, and neither mu (2^-24 to 2^24) nor its inverse leaves the normal numbers.
    assert scales[3] == 1 and (scales[4] / 2**24) >= torch.finfo(torch.float32).smallest_normal
    assert (2**24 / scales).isfinite().all()
    # The largest magnitude lies at the largest code, and nothing is cut off.
    values = torch.randn(1, 999) * 7
    scale = wire_format.scale_of_amax(values.abs().amax().view(1))
    out = torch.empty(1, 999, dtype=torch.uint8)
    wire_format.encode_scaled(values, 1 / scale, out)
    decoded = wire_format.decode_rows(out, 999, torch.float32) * scale
    assert decoded.abs().max() == pytest.approx(values.abs().max().item(), rel=1e-6)


def test_what_the_format_is_and_refuses():
    wire_format = SharedScaleFormat("fp8_e4m3")
    assert wire_format.payload_bytes(1) == 16 and wire_format.payload_bytes(33) == 48
    assert repr(wire_format) == "fp8_e4m3 (a shared scale a tensor)" and wire_format.bits_per_element == 8
    with pytest.raises(TypeError, match="use encode_scaled"):
        wire_format.encode_rows(torch.ones(1, 4))
    with pytest.raises(TypeError, match="fp8_e4m3"):
        wire_format.encode_scaled(torch.ones(1, 4, dtype=torch.float64), torch.ones(1), torch.empty(1, 4).byte())
    with pytest.raises(KeyError):
        SharedScaleFormat("int8")
    nothing = torch.full((2, 16), 7, dtype=torch.uint8)
    wire_format.encode_scaled(torch.ones(2, 0), torch.ones(1), nothing)
    assert not nothing.any()


# -- amax history ------------------------------------------------------------------------------------------------------


def history_of(steps, monkeypatch):
    monkeypatch.setattr(amax_history, "STEPS", steps)
    return AmaxHistory(3, torch.device("cpu"))


def feed(history, rows):
    for row in rows:
        history.current.copy_(torch.maximum(history.current, torch.tensor(row)))
        history.end_step()


ROWS = [[1.0, 8.0, 0.0], [3.0, 0.0, 0.0], [2.0, 4.0, 0.0], [1.0, 2.0, 0.0], [0.5, 0.0, 5.0]]


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_the_largest_of_the_last_steps(length, monkeypatch):
    history = history_of(length, monkeypatch)
    seen = []
    for row in ROWS:
        # A tensor that a step does not show keeps its newest entry.
        seen.append([new or (seen[-1][i] if seen else 0.0) for i, new in enumerate(row)])
        feed(history, [row])
        assert not history.current.any() and history.newest.tolist() == seen[-1]
        assert history.largest().tolist() == [max(column) for column in zip(*seen[-length:])]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("saved", [1, 3, 4])
@pytest.mark.parametrize("steps", range(len(ROWS) + 1))
def test_history_continues_from_a_checkpoint_of_any_length(length, saved, steps, monkeypatch):
    """Of an earlier version, for example, which had them as an option."""
    first = history_of(saved, monkeypatch)
    feed(first, ROWS[:steps])
    state = first.oldest_first()
    assert state.shape == (saved, 3) and state.device.type == "cpu"
    again = history_of(length, monkeypatch)
    feed(again, [[9.0, 9.0, 9.0]] * 2)
    again.current.fill_(100.0)
    again.load(state)
    assert not again.current.any()
    assert again.newest.tolist() == first.newest.tolist()
    expected = first.oldest_first()[-length:].amax(dim=0)
    assert torch.equal(again.largest(), expected)
    if length == saved:
        for row in ROWS[steps:]:
            feed(first, [row])
            feed(again, [row])
            assert torch.equal(again.largest(), first.largest()) and torch.equal(again.newest, first.newest)


# -- kernels -----------------------------------------------------------------------------------------------------------


def test_kernels_in_the_interpreter():
    """Bytes, amax and counts as those of the torch code; odd sizes, padding, empty slices, many ranks, every dtype."""
    script = """
import torch
from kernel_cases import CPU, DTYPES
from shared_scale_cases import check_encode, check_sums

for name in ("fp8_e4m3", "fp8_e5m2"):
    for dtype in mine(DTYPES.values()):
        check_encode(name, dtype, [33, 1001, 5000], 3, [2, 0, 1], CPU)
    for numels, world, slices in mine((([9, 1, 2, 5], 8, [7, 1]), ([4096, 2048], 1, [0]))):
        check_encode(name, torch.float32, numels, world, slices, CPU)
    if turn():
        check_encode(name, torch.bfloat16, [700], 4, [0, 1, 2, 3], CPU, multiplier=2.0**-14)
    for nodes, ranks in mine(((2, 3), (1, 1), (3, 17))):
        check_sums(name, [33, 500, 3001], nodes, ranks, CPU, DTYPES.values())
if turn():
    check_sums("fp8_e4m3", [2048 * 2, 100], 2, 2, CPU, [torch.float32])
print("done")
"""
    assert run(script, interpret=True, processes=2).split() == ["done"] * 2


def test_squares_in_the_interpreter():
    script = """
from kernel_cases import CPU
from shared_scale_cases import check_squares

for name in ("fp8_e4m3", "fp8_e5m2"):
    for tiles in (1, 4, 7, 0):
        check_squares(name, tiles, CPU)
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


def test_layouts_with_other_tensors_in_the_interpreter():
    """Vectors travel between matrices: scales of members that are no neighbours; amax of all comes back."""
    script = """
from kernel_cases import CPU
from shared_scale_cases import check_mixed_layout

check_mixed_layout(CPU)
print("done")
"""
    assert run(script, interpret=True).strip() == "done"


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    """Nothing is spilled; tensors are accessed 16 bytes at a time, codes 8; no product is fused into a sum."""
    script = f"""
from dataclasses import replace

import triton
from kernel_cases import make
from ptxas import said_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeropp_fp8.formats import SharedScaleFormat
from zeropp_fp8.kernels.optimizer.squares import squares_kernel
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat
from zeropp_fp8.kernels.wire.quantize import quantize_kernel
from zeropp_fp8.kernels.wire.reduce import reduce_to_payload_kernel, reduce_to_tensors_kernel

CAPABILITY = {capability}
POINTERS = {{
    **dict.fromkeys(("payload_ptr", "received_ptr", "codes_ptr"), "*u8"),
    **dict.fromkeys(("tensors_ptr", "segments_ptr", "segments_in_ptr", "segments_out_ptr", "counts_ptr"), "*i64"),
    **dict.fromkeys(("multipliers_ptr", "factors_ptr", "amax_ptr", "partial_ptr"), "*fp32"),
    "slices_ptr": "*i32",
    "inverse_ranks": "fp32",
}}

def compile(kernel, base, name, **constants):
    if not turn():
        return
    form = replace(KernelFormat.of(SharedScaleFormat(name)), native_fp8=CAPABILITY >= 89)
    sums = kernel in (reduce_to_payload_kernel, reduce_to_tensors_kernel)
    form_of_sums = form.with_tiles(form.sum_blocks)
    constants = {{"ELEMENT": form.element, "FORMAT": form_of_sums if sums else form, "FORMAT_IN": form_of_sums,
                  "RANKS": 8, "ALIGNED": True, "NATIVE_FP8": CAPABILITY >= 89, "TILE": 1024, "TILES": 4,
                  "ACCUMULATE": False, **constants}}
    constants = {{key: value for key, value in constants.items() if key in kernel.jitted.arg_names}}
    signature, attributes = {{}}, {{}}
    for place, argument in enumerate(kernel.jitted.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
        else:
            signature[argument] = base if argument == "base_ptr" else POINTERS.get(argument, "i32")
            if argument not in ("num_tiles", "inverse_ranks"):
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel.jitted, signature=signature, constexprs=constants, attrs=attributes)
    warps = form.sum_warps if sums else 4 if kernel is squares_kernel else form.num_warps
    code = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32),
                          options={{"num_warps": warps, "enable_fp_fusion": False}}).asm["ptx"]
    what = kernel, base, name, constants
    said = said_of(code)
    assert "0 bytes spill stores, 0 bytes spill loads" in said, (what, said)
    assert ".local" not in code, what
    assert kernel is squares_kernel or "fma.rn.f32" not in code, what
    if kernel is quantize_kernel:
        assert "ld.global.v4.b32" in code and "st.global.v2.b32" in code, what
    if kernel is reduce_to_tensors_kernel and base in ("*fp32", "*bf16"):
        assert "st.global.v4.b32" in code, what
    if kernel is reduce_to_payload_kernel or base == "*u8":
        assert "st.global.v2.b32" in code or "st.global.v4.b32" in code, what
    if sums:
        assert "ld.global.v2.b32" in code or "ld.global.v4.b32" in code, what

for name in ("fp8_e4m3", "fp8_e5m2") if CAPABILITY == 90 else ("fp8_e4m3",):
    compile(quantize_kernel, "*bf16", name)
    compile(reduce_to_payload_kernel, None, name)
    compile(reduce_to_tensors_kernel, "*u8", name)
    compile(squares_kernel, None, name)
compile(quantize_kernel, "*fp32", "fp8_e4m3")
compile(reduce_to_tensors_kernel, "*fp32", "fp8_e4m3", ACCUMULATE=True)
compile(reduce_to_tensors_kernel, "*bf16", "fp8_e4m3", RANKS=64)
print("done")
"""
    assert run(script, interpret=False, processes=2).count("done") == 2
