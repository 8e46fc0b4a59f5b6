"""Linear layers in FP8 and MX. Knows no communication and no DeepSpeed.

report = convert_linear_layers(model, {"format": "fp8", "scaling": "current"})   # in place, before ZeRO-3

operand.py, casts.py    matrices to FP8, with a scale per tensor, row, block or tile
rounded.py              the same for MX, whose values travel through a 16-bit GEMM
gemm.py                 the product of two operands
scaling.py              which scales, and what they remember between steps
products.py, linear.py  the three GEMMs of a layer, and the layer; operators.py: the same for torch.compile's graphs
convert.py              finding the layers of a model
rms_norm.py, swiglu.py  modules whose result is cast as it is made; fused_module.py: what both share
differentiable_once.py  backward passes that cannot be differentiated, and functions that have them
"""

from zeropp_fp8.compute.convert import ConversionReport, convert_linear_layers, restore_linear_layers
from zeropp_fp8.compute.linear import LowPrecisionLinear

__all__ = ["ConversionReport", "LowPrecisionLinear", "convert_linear_layers", "restore_linear_layers"]
