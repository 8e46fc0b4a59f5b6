"""Numbers into FP8 codes with a scale per block, many segments at once: 5 bytes per element that comes in fp32.

    scale = the smallest 2^e with amax of the block <= largest code * 2^e,   code = number / scale, to nearest

The reference is `StateBuffer.encode_` (optim/state_buffer.py): scales and codes are the same, bit for bit, except the
codes of a block whose scale is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zeropp_fp8.kernels.elements import EXPONENT_OF_INF, fp8_codes
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.kernels.mx_elements import NAN_SCALE, power_of_two
from zeropp_fp8.kernels.wire.launch_tables import interpreted, native_float8

TILE = 1024
COLUMNS = tl.constexpr(3)
TILE_ = tl.constexpr(TILE)


@triton.jit
def largest_bits(x):
    """int32 [rows]: the bits of each row's largest magnitude; as integers NaN > Inf > every finite number."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def scale_bytes(amax, STORAGE: tl.constexpr):
    """int32 E8M0 bytes of fp16 or FP8 numbers with these largest magnitudes (bits), where they are finite."""
    emax: tl.constexpr = 8 if STORAGE == "fp8_e4m3" else 15
    # What carries into the exponent where the mantissa is above that of the largest number, 65504 or 1.75 * 2^e
    carry: tl.constexpr = 0x1FFF if STORAGE == "fp16" else 0x1FFFFF
    return tl.minimum(tl.maximum(((amax + carry) >> 23) - emax, 0), 254)


@Kernel
@triton.jit
def encode_blocks_kernel(
    values_ptr, codes_ptr, scales_ptr, tiles_ptr, ELEMENT: tl.constexpr, BLOCK: tl.constexpr, NATIVE_FP8: tl.constexpr
):
    """One program: one tile."""
    entry = tiles_ptr + tl.program_id(0) * COLUMNS
    source, tile, left = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    ROWS: tl.constexpr = TILE_ // BLOCK
    local = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(values_ptr + source * TILE_ + local, mask=local < left, other=0.0).to(tl.float32)
    amax = largest_bits(x)
    scales = scale_bytes(amax, ELEMENT)
    # Nothing has to be clamped: amax <= scale * largest. What the codes of a NaN scale are does not matter.
    codes = fp8_codes(x * power_of_two(254 - scales)[:, None], ELEMENT == "fp8_e4m3", NATIVE_FP8)
    scales = tl.where(amax >= EXPONENT_OF_INF, NAN_SCALE, scales)
    tl.store(codes_ptr + tile * TILE_ + local, codes)
    tl.store(scales_ptr + tile * ROWS + tl.arange(0, ROWS), scales.to(tl.uint8))


def encode_blocks(values: Tensor, codes: Tensor, scales: Tensor, tiles: Tensor, element: str, block_size: int) -> None:
    """Encode tiles of 1,024 elements of flat `values` (fp32, bf16 or fp16).

    Args:
        codes: uint8 [elements], and `scales`: uint8 E8M0 bytes [elements / block_size]: what they are written to.
        tiles: int64 [tiles, 3]: the tile of `values`, that of the codes, and how many elements it has; others are 0.
        element: "fp8_e4m3" or "fp8_e5m2".
        block_size: a power of two from 16 to 1024.
    """
    if len(tiles):
        encode_blocks_kernel[(len(tiles),)](
            values,
            codes,
            scales,
            tiles,
            ELEMENT=element,
            BLOCK=block_size,
            NATIVE_FP8=native_float8(codes.device) and not interpreted(),
            num_warps=4,
        )
