"""Named recipes: each fills the whole section; a field set by hand overrides it."""

from __future__ import annotations

from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "lossless": {},
    "zeropp": {
        "weights": {"format": "int8", "block_size": 256},
        "secondary": {"scope": "node"},
        "gradients": {"intra_format": "int8", "inter_format": "int4", "block_size": 128, "hadamard": True},
    },
    "zeropp-4bit": {
        "weights": {"format": "int4", "block_size": 128, "hadamard": True},
        "secondary": {"scope": "node"},
        "gradients": {"intra_format": "int8", "inter_format": "int4", "block_size": 128, "hadamard": True},
    },
    "mxfp8": {
        "weights": {"format": "mxfp8_e4m3"},
        "secondary": {"scope": "node"},
        "gradients": {"intra_format": "mxfp8_e4m3", "inter_format": "mxfp4"},
        "compute": {"format": "mxfp8_e4m3"},
    },
}
PLANNED_RECIPES = ("fp8-lm-o1", "fp8-lm-o2", "fp8-lm", "qlora")
