"""Compiled kernels of formats, for GPUs that need not be there: `COMPILED` has the cases by their ids.

Each code path once: tensors are accessed 16 bytes at a time, codes 8 at a time; nothing is spilled. The 24 bytes of 32
codes of 6 bits are accessed 4 bytes at a time. sm_80 has no instructions for FP8: only what becomes other code there is
compiled for it, and a format of integers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import triton
from conformance import make
from ptxas import said_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zeropp_fp8.formats import SharedScaleFormat
from zeropp_fp8.formats.e8m0 import SCALE_MODES
from zeropp_fp8.formats.exact import MANTISSA, bits_of
from zeropp_fp8.kernels.casts.round_trip import round_trip_kernel
from zeropp_fp8.kernels.optimizer.squares import squares_kernel
from zeropp_fp8.kernels.wire.dequantize import dequantize_kernel
from zeropp_fp8.kernels.wire.exact import add_exact_kernel, encode_exact_kernel, make_headers_kernel
from zeropp_fp8.kernels.wire.feed_back import feed_back_kernel
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat
from zeropp_fp8.kernels.wire.quantize import quantize_kernel
from zeropp_fp8.kernels.wire.reduce import reduce_to_payload_kernel, reduce_to_tensors_kernel

POINTERS = {
    **dict.fromkeys(("payload_ptr", "received_ptr", "codes_ptr", "residual_ptr", "held_ptr", "brought_ptr"), "*u8"),
    "row_ptr": "*u8",
    **dict.fromkeys(("tensors_ptr", "segments_ptr", "segments_in_ptr", "segments_out_ptr"), "*i64"),
    **dict.fromkeys(("residual_segments_ptr", "counts_ptr"), "*i64"),
    **dict.fromkeys(("multipliers_ptr", "factors_ptr", "amax_ptr", "partial_ptr", "lookup_ptr"), "*fp32"),
    **dict.fromkeys(("slices_ptr", "tile_starts_ptr", "headers_ptr", "ends_ptr", "body_ptr"), "*i32"),
    "inverse_ranks": "fp32",
}
SHARED_SCALES = ("multipliers_ptr", "amax_ptr", "counts_ptr", "factors_ptr")
EXACT = (make_headers_kernel, encode_exact_kernel, add_exact_kernel)
SUMS = (reduce_to_payload_kernel, reduce_to_tensors_kernel)
SOURCES = (quantize_kernel, feed_back_kernel)
MATRICES = ("base_ptr", "matrix_ptr", "rows_ptr", "columns_ptr")
CONSTANTS = {"ALIGNED": True, "LIMIT": 3.38e38, "RANKS": 8, "ALONG_ROWS": True, "ALONG_COLUMNS": True, "SIDE": 64}
CONSTANTS |= {"STARTS": 16, "TILE": 1024, "TILES": 4}
CODES = {"int8": "v2.b32", "fp8_e4m3": "v2.b32", "fp8_e5m2": "v2.b32", "int4": "b32", "bf16": "v4.b32"}
CODES |= {"mxfp8_e4m3": "v2.b32", "mxfp8_e5m2": "v2.b32", "mxfp6_e2m3": "b32", "mxfp6_e3m2": "b32", "mxfp4": "b32"}
CODES |= {"mxint8": "v2.b32", "nf4": "b32"}


def ptx_of(kernel, capability, base, num_warps, constants):
    """The code of a kernel whose matrices have elements of type `base`."""
    names = kernel.jitted.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: base if name in MATRICES else POINTERS.get(name, "i32") for name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if name not in constants and name not in ("inverse_ranks", "num_tiles", "chunks")
    }
    source = ASTSource(fn=kernel.jitted, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
    assert ".local" not in code
    return code


def assert_nothing_spilled(code):
    said = said_of(code)
    assert "0 bytes spill stores, 0 bytes spill loads" in said, said


def check_code(capability, kernel, base, name, first=None, **constants):
    """A kernel of tensors with scales in their payload."""
    form = KernelFormat.of(make(name), KernelFormat.of(make("int8")))
    first = KernelFormat.of(make(first or name), form)
    form, first = (replace(each, native_fp8=capability >= 89) for each in (form, first))
    num_warps = 4 if kernel is round_trip_kernel else form.num_warps
    if kernel in SUMS:
        tile = max(first, form, key=lambda form: form.sum_blocks)
        num_warps = tile.sum_warps
        form, first = form.with_tiles(tile.sum_blocks), first.with_tiles(tile.sum_blocks)
    if kernel is feed_back_kernel:
        num_warps, form = form.sum_warps, form.with_tiles(form.sum_blocks)
        constants["RESIDUAL"] = KernelFormat.of(make("int8")).with_tiles(form.sum_blocks)
    constants = {**CONSTANTS, "ACCUMULATE": True, **dict.fromkeys(SHARED_SCALES), **constants}
    code = ptx_of(kernel, capability, base, num_warps, constants | {"FORMAT": form, "FORMAT_IN": first})
    if capability == 90 and (form.scale in SCALE_MODES or kernel is feed_back_kernel):
        assert_nothing_spilled(code)
    if kernel is round_trip_kernel:
        assert "fma.rn.f32" not in code
        # 16 bytes at a time for a whole tile: nothing is accessed otherwise.
        assert code.count("ld.global") == code.count("ld.global.v4.b32") > 0
        assert code.count("st.global") == code.count("st.global.v4.b32") > 0
        return
    if kernel is feed_back_kernel:
        assert all(f"{way}.global.v2.b32" in code for way in ("ld", "st")), "the residuals"
        assert code.count("bar.sync") > 1, "all threads read before one writes"
    assert f"{'st' if kernel in SOURCES else 'ld'}.global." + CODES[first.element] in code
    if base:
        assert ("ld" if kernel in SOURCES else "st") + ".global.v4.b32" in code
    # A fused product is rounded once, and bytes would differ; only the sum fuses on purpose, where products are exact.
    assert ("fma.rn.f32" in code) == (kernel in SUMS and first.scale == "bf16")


def check_decoding_code(capability, entry):
    """NF4 and scales of scales: one load from the table an element, or none with PTX; no way through shared memory,
    nothing is fused."""
    form = replace(KernelFormat.of(make(entry)), native_fp8=capability >= 89)
    code = ptx_of(dequantize_kernel, capability, "*bf16", form.num_warps, CONSTANTS | {"FORMAT": form})
    assert "fma.rn.f32" not in code and ".shared" not in code
    assert "ld.global." + CODES[form.element] in code and "st.global.v4.b32" in code
    if form.element == "nf4":
        # A tile is 2048 elements for 64 threads, in both bodies, and takes a few loads of other things.
        looked_up, picked = code.count("ld.global.b32"), code.count("prmt.b32")
        assert (looked_up <= 24 and picked >= 320) if capability >= 89 else (64 <= looked_up <= 64 + 24), looked_up
        assert_nothing_spilled(code)


def check_shared_code(capability, kernel, base, name, **constants):
    """A kernel of FP8 codes with scales that ranks share: no product is fused into a sum."""
    form = replace(KernelFormat.of(SharedScaleFormat(name)), native_fp8=capability >= 89)
    sums = form.with_tiles(form.sum_blocks)
    constants = {**CONSTANTS, "ACCUMULATE": False, "ELEMENT": form.element, "NATIVE_FP8": capability >= 89, **constants}
    constants |= {"FORMAT": sums if kernel in SUMS else form, "FORMAT_IN": sums}
    del constants["STARTS"], constants["LIMIT"]
    warps = form.sum_warps if kernel in SUMS else 4 if kernel is squares_kernel else form.num_warps
    code = ptx_of(kernel, capability, base, warps, constants)
    assert_nothing_spilled(code)
    assert kernel is squares_kernel or "fma.rn.f32" not in code
    if kernel is quantize_kernel:
        assert "ld.global.v4.b32" in code and "st.global.v2.b32" in code
    if kernel is reduce_to_tensors_kernel and base in ("*fp32", "*bf16"):
        assert "st.global.v4.b32" in code
    if kernel is reduce_to_payload_kernel or base == "*u8":
        assert "st.global.v2.b32" in code or "st.global.v4.b32" in code
    if kernel in SUMS:
        assert "ld.global.v2.b32" in code or "ld.global.v4.b32" in code


def check_exact_code(capability, kernel, dtype):
    """Exact differences; the numbers of whole chunks are read 8 at a time, or 16 bytes."""
    constants = {"BITS": bits_of(dtype), "MANTISSA": MANTISSA[dtype], "STARTS": 16}
    code = ptx_of(kernel, capability, None, 1, constants)
    assert_nothing_spilled(code)
    words = 2 if bits_of(dtype) == 8 and kernel is not make_headers_kernel else 4
    assert f"ld.global.v{words}.b32" in code


def _cases():
    """(capability, check, its arguments, their options)."""
    for capability in (80, 90):
        new = capability == 90

        def code(*arguments, capability=capability, **options):
            return capability, check_code, arguments, options

        for name in ("int8", "fp8_e4m3", "mxfp8_e4m3", "int8-hadamard", "fp8_e5m2", "mxfp8_e5m2-floor"):
            yield code(quantize_kernel, "*bf16", name)
        for base, name in (("*bf16", "int4-hadamard"), ("*fp32", "int8")):
            yield code(feed_back_kernel, base, name)
        for name in ("int8", "fp8_e4m3", "fp8_e5m2", "mxfp8_e5m2"):
            yield code(dequantize_kernel, "*bf16", name)
        for first, then in (("int8", "int4-hadamard"), ("mxfp8_e4m3", "mxfp8_e5m2")):
            yield code(reduce_to_payload_kernel, None, then, first=first)
        for name in ("int8", "fp8_e5m2"):
            yield code(reduce_to_tensors_kernel, "*fp32", name)
        yield code(round_trip_kernel, "*bf16", "mxfp8_e4m3")
        if new:
            for name in ("none", "mxfp6_e3m2", "mxfp4", "mxint8", "int4-hadamard"):
                yield code(quantize_kernel, "*bf16", name)
            for name in ("int4-hadamard", "none", "mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "mxint8"):
                yield code(dequantize_kernel, "*bf16", name)
            for chain in (("int4-hadamard", "none", "int8"), ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp4")):
                for first, then in pairwise(chain):
                    yield code(reduce_to_payload_kernel, None, then, first=first)
            for name in ("int4-hadamard", "none", "mxfp6_e3m2", "mxfp4"):
                yield code(reduce_to_tensors_kernel, "*fp32", name)
            yield code(round_trip_kernel, "*fp32", "mxfp6_e3m2", ALONG_COLUMNS=False)
            yield code(round_trip_kernel, "*fp32", "mxfp8_e5m2-floor", ALONG_ROWS=False)
            yield code(round_trip_kernel, "*bf16", "mxint8")
            for case in product(EXACT, MANTISSA):
                yield capability, check_exact_code, case, {}
        for entry in ("nf4", "nf4-double", "int4-double", "int8-double", "fp8_e4m3-double"):
            yield capability, check_decoding_code, (entry,), {}
        shared = [
            case
            for name in (("fp8_e4m3", "fp8_e5m2") if new else ("fp8_e4m3",))
            for case in (
                (quantize_kernel, "*bf16", name),
                (reduce_to_payload_kernel, None, name),
                (reduce_to_tensors_kernel, "*u8", name),
                (squares_kernel, None, name),
            )
        ]
        for case in (*shared, (quantize_kernel, "*fp32", "fp8_e4m3")):
            yield capability, check_shared_code, case, {}
        for base, options in (("*fp32", {"ACCUMULATE": True}), ("*bf16", {"RANKS": 64})):
            yield capability, check_shared_code, (reduce_to_tensors_kernel, base, "fp8_e4m3"), options


def _id(capability, check, arguments, options):
    kernels = {each: each.jitted.__name__.removesuffix("_kernel") for each in arguments if hasattr(each, "jitted")}
    words = [kernels.get(word, word) for word in arguments]
    shared = ["shared"] if check is check_shared_code else []
    return "-".join([f"sm_{capability}", *map(str, shared + words), *(f"{k}={v}" for k, v in options.items())])


COMPILED = {_id(*case): partial(case[1], case[0], *case[2], **case[3]) for case in _cases()}
assert len(COMPILED) == len(list(_cases())), "two cases of one id"
