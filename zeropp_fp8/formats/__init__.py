"""Number formats: a block of numbers <-> bytes.

Every format turns a tensor into one flat uint8 payload (scales, then codes, padded to 16 bytes) and back. The torch
code here runs on any device and is the reference that kernels match byte for byte. Nothing here communicates.

    fmt = make_format("int4", block_size=128, hadamard=True)
    payload = fmt.encode(tensor)                              # uint8 [fmt.payload_bytes(tensor.numel())]
    restored = fmt.decode(payload, tensor.shape, tensor.dtype)
    fmt.encode_part(weight, first, numel, out)                # a rank's part; both multiples of fmt.granule
    rounded = make_format("mxfp6_e3m2", scale_mode="rceil").round_trip(tensor, axis=0)

`exact.py` is no format: it codes what has changed in numbers, without loss.
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
