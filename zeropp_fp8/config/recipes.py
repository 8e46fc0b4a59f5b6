"""Named recipes: each fills the whole section; a field set by hand overrides it."""

from __future__ import annotations

from typing import Any

_ZEROPP_GRADIENTS = {"intra_format": "int8", "inter_format": "int4", "block_size": 128, "hadamard": True}
_FP8_LM_GRADIENTS = {
    "intra_format": "fp8_e4m3",
    "inter_format": "fp8_e4m3",
    "hadamard": False,
    "scales": "tensor",
    "store_format": "fp8_e4m3",
}
_FP8_LM_OPTIMIZER = {"master_format": "fp16", "exp_avg_format": "fp8_e4m3", "exp_avg_sq_format": "fp16"}

RECIPES: dict[str, dict[str, Any]] = {
    "lossless": {},
    "zeropp": {
        "weights": {"format": "int8", "block_size": 256},
        "secondary": {"scope": "node"},
        "gradients": _ZEROPP_GRADIENTS,
    },
    "zeropp-4bit": {
        "weights": {"format": "int4", "block_size": 128, "hadamard": True},
        "secondary": {"scope": "node"},
        "gradients": _ZEROPP_GRADIENTS,
    },
    # One node whose ranks have no fast link: each rank counts as a node, keeps the codes that its memory has room for,
    # and sends gradients around once, in INT4, whose error goes into the next gradients.
    "zeropp-pcie": {
        "topology": {"ranks_per_node": 1},
        "weights": {"format": "int8", "block_size": 256},
        "secondary": {"scope": "rank", "memory_gb": "auto"},
        "gradients": {**_ZEROPP_GRADIENTS, "error_feedback": True},
    },
    # Every rank has the 16-bit weights bit for bit: nodes send what has changed in them, without loss.
    "zeropp-exact": {
        "weights": {"difference": "exact"},
        "secondary": {"scope": "node"},
        "gradients": _ZEROPP_GRADIENTS,
    },
    "mxfp8": {
        "weights": {"format": "mxfp8_e4m3"},
        "secondary": {"scope": "node"},
        "gradients": {"intra_format": "mxfp8_e4m3", "inter_format": "mxfp4"},
        "compute": {"format": "mxfp8_e4m3"},
    },
    # FP8-LM (arXiv 2310.18313), section 2: O1 computes and reduces gradients in FP8, O2 keeps states in 6 bytes.
    "fp8-lm-o1": {"compute": {"format": "fp8"}, "gradients": _FP8_LM_GRADIENTS},
    "fp8-lm-o2": {"compute": {"format": "fp8"}, "gradients": _FP8_LM_GRADIENTS, "optimizer": _FP8_LM_OPTIMIZER},
    # O3: owners have whole tensors, and weights are sent as the FP8 codes that the GEMMs multiply.
    "fp8-lm": {
        "weights": {"format": "fp8_e4m3"},
        "compute": {"format": "fp8"},
        "gradients": _FP8_LM_GRADIENTS,
        "optimizer": _FP8_LM_OPTIMIZER,
        "partition": "whole_tensor",
        "activations": {"wire_format": "detect"},
    },
    # The same with ZeRO++'s hops: half of the bytes between nodes, for a copy of the codes in each node.
    "fp8-lm-zeropp": {
        "weights": {"format": "fp8_e4m3"},
        "secondary": {"scope": "node"},
        "compute": {"format": "fp8"},
        "gradients": {**_ZEROPP_GRADIENTS, "store_format": "fp8_e4m3"},
        "optimizer": _FP8_LM_OPTIMIZER,
        "partition": "whole_tensor",
        "activations": {"wire_format": "detect"},
    },
    # QLoRA (arXiv 2305.14314): frozen linear weights in NF4 with double quantization; the rest as `zeropp`.
    "qlora": {
        "frozen": {"format": "nf4", "block_size": 64, "double_quantize": True},
        "weights": {"format": "int8", "block_size": 256},
        "secondary": {"scope": "node"},
        "gradients": _ZEROPP_GRADIENTS,
    },
}
