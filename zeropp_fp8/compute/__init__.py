"""Linear layers in FP8 and MX. Knows no communication and no DeepSpeed.

report = convert_linear_layers(model, {"format": "fp8", "scaling": "current"})   # in place, before ZeRO-3
"""

from zeropp_fp8.compute.convert import ConversionReport, convert_linear_layers, restore_linear_layers
from zeropp_fp8.compute.linear import LowPrecisionLinear

__all__ = ["ConversionReport", "LowPrecisionLinear", "convert_linear_layers", "restore_linear_layers"]
