"""ZeRO-3's ds_config in the benchmarks, and which sections this version takes."""

from __future__ import annotations

from typing import Any

CLIP = 1.0  # of gradients' norm


def ds_config(section: dict | None, micro_batch: int, *, small: bool, lean: bool, bf16: bool = True) -> dict:
    """A ds_config.

    Args:
        section: of the plugin; None for stock.
        small: every tensor of the model is below the usual limits, so that it would stay gathered: lower them.
        lean: small buffers, and no weight stays gathered, so that a rank at rest has its model states and little else;
            without, the settings of two_nodes.py.
        bf16: else fp32.
    """
    bucket, kept = (10**7, 0) if lean else (10**8, 2 * 10**8)
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_max_live_parameters": kept,
        "stage3_max_reuse_distance": kept,
    }
    if small:
        zero |= {
            "reduce_bucket_size": 100_000,
            "stage3_prefetch_bucket_size": 100_000,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "zero_optimization": zero,
    }
    if section is not None:
        config["zeropp_fp8"] = {"report": {"every": 0, "diagnose": False}, **section}
    return config


def in_tree_zero(ranks_per_node: int) -> dict[str, Any]:
    """Return what turns on DeepSpeed's own ZeRO++ in "zero_optimization"."""
    return {
        "zero_quantized_weights": True,
        "zero_hpz_partition_size": ranks_per_node,
        "zero_quantized_gradients": True,
    }


def refusal(section: dict | None) -> str | None:
    """Why this version does not take a section; None where it does."""
    from zeropp_fp8.config import ConfigError, resolve

    try:
        resolve(ds_config(section, 1, small=True, lean=False))
    except ConfigError as error:
        return str(error)
    return None


def without_refused(sections: dict[str, dict | None]) -> list[str]:
    """The names of those sections that this version takes; the others are printed with the reason."""
    taken = []
    for name, section in sections.items():
        reason = refusal(section)
        if reason is None:
            taken.append(name)
        else:
            print(f"{name} is left out: {reason}", flush=True)
    return taken
