"""Every pair of the plugin's parts in one training, on ranks."""

from __future__ import annotations

import copy
import functools
import itertools

import torch.distributed as dist
from frozen_jobs import with_lora
from models import batches, llama, section
from running import Spec, run, see, step

from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.owners.layout import OwnerLayout

# What each part adds to a section. Whole tensors need gradients that the plugin reduces, differences a node's copy.
PARTS = {
    "qwZ": {"weights": {"format": "int8"}},
    "hpZ": {"secondary": {"scope": "node"}, "weights": {"difference": "none"}},
    "qgZ": {"gradients": {"intra_format": "int8", "inter_format": "int4"}},
    "FP8 compute": {"compute": {"format": "fp8"}},
    "MX compute": {"compute": {"format": "mxfp8_e4m3"}},
    "FP8 optimizer": {
        "optimizer": {"master_format": "fp16", "exp_avg_format": "fp8_e4m3", "exp_avg_sq_format": "fp16"}
    },
    "whole tensors": {"partition": "whole_tensor", "gradients": {"intra_format": "int8", "inter_format": "int4"}},
    "frozen store": {"frozen": {"format": "nf4", "double_quantize": True}},
    "differences": {"weights": {"difference": "exact"}, "secondary": {"scope": "node"}},
}
NEEDS = {"whole tensors": "qgZ", "differences": "hpZ"}


def section_of(names):
    """The section with some parts."""
    fields = {}
    for name in names:
        for key, value in copy.deepcopy(PARTS[name]).items():
            fields[key] = {**fields[key], **value} if isinstance(value, dict) and key in fields else value
    return section("lossless", **fields)


def what_is_on(engine):
    """Which parts an engine really has, asked of the objects that do the work."""
    session, stage = engine.zeropp_fp8_session, engine.optimizer
    compute = session.conversion.scaling.formats["weights"] if session.conversion is not None else ""
    on = {
        "qwZ": session.formats.weights is not None,
        "hpZ": session.secondary_ranks is not None,
        "qgZ": session.formats.between is not None,
        "FP8 compute": compute.startswith("fp8"),
        "MX compute": compute.startswith("mx"),
        "FP8 optimizer": session.state_formats is not None,
        "whole tensors": isinstance(stage.layout, OwnerLayout),
        "frozen store": any(stored_weight(p) for p in engine.module.parameters()),
        "differences": session.formats.differs,
    }
    return {name for name, is_on in on.items() if is_on}


def train_with(several, steps=6, adapters=False):
    """(parts that were on, losses) for each of several lists of parts; LoRA where something is to be frozen.

    On one batch, whose loss falls from step to step, adapters' too.
    """
    tokens, results = next(batches(1, dist.get_rank(), batch=4)), []
    for names in several:
        lora = adapters or "frozen store" in names
        training = {"lr": 2e-2, "adapted": with_lora} if lora else {"lr": 3e-3}
        spec = Spec(section_of(names), "bf16", model=functools.partial(llama, intermediate=128), **training)
        trace = run(spec, [see(what_is_on), *[step] * steps], data=itertools.repeat(tokens))
        results.append((*trace.seen, trace.losses))
    return results
