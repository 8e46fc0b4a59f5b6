"""Trained models in any of the package's formats: evaluated as they would be stored, or quantized by calibration.

With `examples` on PYTHONPATH:

    from quantize import direct_cast, error_diffusion, restore

direct_cast.py       no calibration, no training
error_diffusion.py   weights that make up for each other's errors on calibration data
"""

from quantize.direct_cast import CastReport, direct_cast, restore
from quantize.error_diffusion import error_diffusion

__all__ = ["CastReport", "direct_cast", "error_diffusion", "restore"]
