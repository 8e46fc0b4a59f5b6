"""Triton kernels, one operation per file, under the contract of formats/ and compute/: the same bytes, only faster.

wire/: between tensors and what is sent, all tensors of a unit (a transformer block) that share a format per launch;
casts/: for computing; linear/: with weights that are stored as codes; optimizer/: a step on states in any format.

`elements.py`, `mx_elements.py` and `nf4_levels.py` hold what all share; `launching.py` launches. Triton compiles
kernels when they are first used: no nvcc, no build step.
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
