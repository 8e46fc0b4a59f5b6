"""Number formats: a block of numbers <-> bytes.

Every format turns a tensor into one flat uint8 payload (scales, then codes, padded to 16 bytes) and back. The torch
code here runs on any device and is the reference that faster kernels must match byte for byte. Nothing in this folder
knows about communication.

    fmt = make_format("int4", block_size=128, hadamard=True)
    payload = fmt.encode(tensor)                              # uint8 [fmt.payload_bytes(tensor.numel())]
    restored = fmt.decode(payload, tensor.shape, tensor.dtype)

`integer.py` and `float8.py` are elements that share a bf16 scale (`scales.py`), `mini_float.py` those of the MX
formats, which share a power of two (`e8m0.py`). `mx.py` also rounds whole tensors along any axis, for computing:

    mx_format = make_format("mxfp6_e3m2", scale_mode="rceil")
    rounded = mx_format.round_trip(tensor, axis=0)

For stored weights, `nf4.py` has 4-bit normal-float elements, `double_quantized.py` formats whose scales are quantized
themselves, and `tensor_scaled.py` FP8 as linear layers multiply it. Each rank encodes its part of a weight:

    fmt = make_format("nf4", block_size=64, double_quantize=True)
    fmt.encode_part(weight, first, numel, out)                # both multiples of fmt.granule; scales as of the whole

`shared_scale.py` is FP8 codes whose scale is not sent with them; `amax_history.py` makes such scales, `scale_table.py`
gives them to reductions. `shapes.py` says which weights are matrices. `exact.py` is no format: it codes what changed
in 16-bit numbers, without loss.
"""

from zeropp_fp8.formats.base import WireFormat
from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.double_quantized import DOUBLE_QUANTIZED_NAMES, DoubleQuantizedFormat
from zeropp_fp8.formats.mx import MX_BLOCK, MX_NAMES, MXFormat
from zeropp_fp8.formats.nf4 import NF4Format
from zeropp_fp8.formats.registry import FORMAT_NAMES, make_format
from zeropp_fp8.formats.shared_scale import SharedScaleFormat
from zeropp_fp8.formats.tensor_scaled import TensorScaledFormat
from zeropp_fp8.formats.unquantized import UnquantizedFormat

__all__ = [
    "DOUBLE_QUANTIZED_NAMES",
    "FORMAT_NAMES",
    "MX_BLOCK",
    "MX_NAMES",
    "BlockScaledFormat",
    "DoubleQuantizedFormat",
    "MXFormat",
    "NF4Format",
    "SharedScaleFormat",
    "TensorScaledFormat",
    "UnquantizedFormat",
    "WireFormat",
    "make_format",
]
