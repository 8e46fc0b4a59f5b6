"""Triton kernels, one operation a file, under the contract of formats/: the same bytes, only faster.

    quantize.py     tensors -> payload rows: slice reorder, Hadamard rotation, rounding, packing in one pass
    dequantize.py   payload rows -> tensors
    reduce.py       payloads of several ranks -> their fp32 mean -> tensors, or a payload for the next hop

Each launch handles all tensors of a unit (a transformer block) that share a format. Kernels are compiled by Triton when
first used: no nvcc, no build step. `elements.py` holds what they share, `tables.py` the description of a launch.
"""

from zeropp_fp8.kernels.dequantize import dequantize
from zeropp_fp8.kernels.quantize import quantize
from zeropp_fp8.kernels.reduce import can_chain, reduce_to_payload, reduce_to_tensors
from zeropp_fp8.kernels.tables import KernelFormat, SegmentTable, TensorTable, supports, table_key

__all__ = [
    "KernelFormat",
    "SegmentTable",
    "TensorTable",
    "can_chain",
    "dequantize",
    "quantize",
    "reduce_to_payload",
    "reduce_to_tensors",
    "supports",
    "table_key",
]
