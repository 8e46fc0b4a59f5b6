"""Number formats: a block of numbers <-> bytes.

Every format turns a tensor into one flat uint8 payload (scales, then codes, padded to 16 bytes) and back. The torch
code here runs on any device and is the reference that faster kernels must match byte for byte. Nothing in this folder
knows about communication.

    fmt = make_format("int4", block_size=128, hadamard=True)
    payload = fmt.encode(tensor)                              # uint8 [fmt.payload_bytes(tensor.numel())]
    restored = fmt.decode(payload, tensor.shape, tensor.dtype)

The MX family (OCP Microscaling) has its place beside `integer.py` and `float8.py`; it is not there yet.
"""

from zeropp_fp8.formats.base import WireFormat
from zeropp_fp8.formats.block_scaled import BlockScaledFormat
from zeropp_fp8.formats.registry import FORMAT_NAMES, make_format
from zeropp_fp8.formats.rounding import ROUNDING_MODES
from zeropp_fp8.formats.unquantized import UnquantizedFormat

__all__ = [
    "FORMAT_NAMES",
    "ROUNDING_MODES",
    "BlockScaledFormat",
    "UnquantizedFormat",
    "WireFormat",
    "make_format",
]
