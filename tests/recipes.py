"""The ways in which weights rest, travel and are multiplied: each is a recipe with fields, for tests that try all."""

from __future__ import annotations

from models import section

_FP8 = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}

_STATES = {"master_format": "fp16", "exp_avg_format": "fp8_e4m3", "exp_avg_sq_format": "fp16"}

WAYS = {
    "lossless": ("lossless", {}),
    "lossless, node's copy": ("lossless", {"secondary": {"scope": "node"}}),
    "lossless, delayed FP8 compute": ("lossless", {"compute": {**_FP8, "scaling": "delayed"}}),
    "zeropp": ("zeropp", {}),
    "zeropp, rank's copy": ("zeropp", {"secondary": {"scope": "rank"}}),
    "zeropp-pcie, some copies": ("zeropp-pcie", {"secondary": {"memory_gb": 7e-5}}),
    "zeropp-4bit": ("zeropp-4bit", {}),
    "zeropp-exact": ("zeropp-exact", {}),
    "exact, whole tensors": ("zeropp-exact", {"partition": "whole_tensor"}),
    "zeropp, no copy": ("zeropp", {"secondary": {"scope": "none"}}),
    "FP8 operands": ("zeropp", {"weights": {"format": "fp8_e4m3"}, "compute": _FP8, "secondary": {"scope": "none"}}),
    "FP8 operands, node's copy": ("zeropp", {"weights": {"format": "fp8_e4m3"}, "compute": _FP8}),
    "mxfp8": ("mxfp8", {}),
    "FP8 states": ("zeropp", {"optimizer": _STATES}),
    "FP8 store": ("zeropp", {"gradients": {"store_format": "fp8_e4m3"}}),
    "fp8-lm-o2": ("fp8-lm-o2", {"compute": _FP8}),
    "fp8-lm": ("fp8-lm", {"compute": _FP8}),
    "fp8-lm-zeropp": ("fp8-lm-zeropp", {"compute": _FP8}),
    "fp8-lm, node's copy": ("fp8-lm", {"compute": _FP8, "secondary": {"scope": "node"}}),
}


def section_of(way: str, **fields) -> dict:
    """The section of one of WAYS, for 2 nodes of 2 ranks."""
    recipe, own = WAYS[way]
    return section(recipe, **{**own, **fields})
