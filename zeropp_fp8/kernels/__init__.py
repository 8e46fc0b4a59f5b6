"""Triton kernels, one operation a file, under the contract of formats/ and compute/: the same bytes, only faster.

wire/, between tensors and what travels; each launch handles all tensors of a unit (a transformer block) that share a
format:

    quantize.py       tensors -> payload rows: slice reorder, Hadamard rotation, rounding, packing in one pass
    dequantize.py     payload rows -> tensors, NF4 and double-quantized scales included
    feed_back.py      quantize.py with error feedback
    exact.py          how 16-bit tensors differ from rows that are held -> payload rows, and what adds these to the rows
    reduce.py         payloads of several ranks -> their fp32 mean -> tensors, or a payload for the next hop
    launch_tables.py  the description of a launch

casts/, for computing:

    cast_tensor.py  FP8 with one scale, given or the matrix' own
    cast_rows.py    FP8 with a scale per row
    cast_blocks.py  FP8 with a scale per 1 x 128 block or 128 x 128 tile
    fused_casts.py  SwiGLU and RMSNorm whose result goes to FP8 at once
    swiglu.py       the gradients of SwiGLU's two inputs
    round_trip.py   MX, rounded in the matrix' own dtype
    transpose.py    FP8 codes that are there already
    matrices.py     what the casts share

linear/, with weights that lie as codes:

    quantized_linear.py         a layer for few rows of x, with LoRA
    quantized_linear_kernel.py  its kernel, x @ W^T
    quantized_weight.py         which bytes hold which elements
    code_words.py               decoding words of codes in registers

optimizer/:

    adamw.py          a step of AdamW on master weights and moments in any format
    encode_blocks.py  numbers -> FP8 codes with a scale per block
    squares.py        sums of squares of FP8 codes

`elements.py`, `mx_elements.py` and `nf4_levels.py` hold what all share; `launching.py` launches. What computing calls
is imported from these files, whose names are often those of their functions. Kernels are compiled by Triton when first
used: no nvcc, no build step.
"""

from zeropp_fp8.kernels.wire.dequantize import dequantize
from zeropp_fp8.kernels.wire.exact import add_exact, encode_exact, make_headers
from zeropp_fp8.kernels.wire.feed_back import can_feed_back, quantize_with_residuals
from zeropp_fp8.kernels.wire.launch_tables import KernelFormat, SegmentTable, TensorTable, decodes, supports, table_key
from zeropp_fp8.kernels.wire.quantize import quantize
from zeropp_fp8.kernels.wire.reduce import can_chain, reduce_to_payload, reduce_to_tensors

__all__ = [
    "KernelFormat",
    "SegmentTable",
    "TensorTable",
    "add_exact",
    "can_chain",
    "can_feed_back",
    "decodes",
    "dequantize",
    "encode_exact",
    "make_headers",
    "quantize",
    "quantize_with_residuals",
    "reduce_to_payload",
    "reduce_to_tensors",
    "supports",
    "table_key",
]
