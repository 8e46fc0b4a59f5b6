"""What the plan calls a method, out of a configuration of the plugin."""

from __future__ import annotations

from dataclasses import replace

from zeropp_fp8.config import MX_FORMATS, PluginConfig
from zeropp_fp8.formats import make_format
from zeropp_fp8.plan import METHODS, Method

_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
_OTHER_SCALES = 1 / 128  # of gradients at rest


def method_of(config: PluginConfig) -> Method:
    """How the plan counts a job with this configuration; a recipe's own is METHODS[recipe].

    Not modelled: a secondary copy that several ranks of a node share (counted as one in the node), scales of optimizer
    states, and layers and GEMMs that stay in 16 bits.
    """
    base = METHODS["lossless"]
    weights, gradients, compute, frozen = config.weights, config.gradients, config.compute, config.frozen
    scope, ring = config.secondary.scope, config.topology.ranks_per_node == 1
    fp8 = config.computes_in_low_precision and compute.scaling != "mx"
    # Codes that the GEMMs multiply as they come have a scale a tensor, a row or a tile.
    sent = 1.0 if fp8 and weights.format == "fp8_e4m3" else _bytes(weights.format, weights.block_size)
    changes: dict = {"weight_bytes": sent, "backward_bytes": sent}
    if scope != "none":
        changes |= {"secondary_bytes": sent, "later_from_secondary": True}
        changes["backward_gather"] = "rank" if scope == "rank" else "node"
    if ring:
        changes |= {"gather": "ring", "backward_gather": changes.get("backward_gather", "ring")}
    if weights.difference.format != "none":
        changes["difference_bytes"] = _bytes(weights.difference.format, weights.difference.block_size)
    if config.quantizes_gradients:
        intra, inter = (
            1.0 if gradients.scales == "tensor" else _bytes(name, gradients.block_size)
            for name in (gradients.intra_format, gradients.inter_format)
        )
        changes |= {"reduce": "ring" if ring else "two-level", "gradient_intra": inter if ring else intra}
        changes |= {"gradient_inter": inter, "reduces_by_tensor": False}
        changes["sums_in_node"] = gradients.accumulate_in != "world"
    if gradients.error_feedback:
        changes["residual_bytes"] = _bytes("int8", gradients.block_size)
    if gradients.store_format != "none":
        changes["stored_gradient_bytes"] = 1.0 if gradients.scales == "tensor" else 1 + _OTHER_SCALES
    if config.stores_states_in_low_precision:
        states = (config.optimizer.master_format, config.optimizer.exp_avg_format, config.optimizer.exp_avg_sq_format)
        changes |= {"state_bytes": float(sum(_STATE_BYTES[name] for name in states)), "fused_update": True}
    if config.computes_in_low_precision:
        own = METHODS["fp8-lm" if fp8 else "mxfp8"]
        changes |= {"cast_bytes": own.cast_bytes, "fp8_products": fp8}
    if config.compile == "blocks":
        changes["compiled"] = True
    if frozen.format != "none":
        options = {"double_quantize": True} if frozen.double_quantize else {}
        changes["stored_bytes"] = _bytes(frozen.format, frozen.block_size, **options)
    return replace(base, name=config.recipe or base.name, **changes)


def _bytes(name: str, block_size: int, **options) -> float:
    """Bytes an element, scales counted; 16 bits where nothing is quantized."""
    if name != "none" and name not in MX_FORMATS:
        options["block_size"] = block_size
    return make_format(name, **options).bits_per_element / 8
