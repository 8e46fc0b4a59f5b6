"""Jobs whose steps let blocks cross between nodes as soon as they are written."""

from __future__ import annotations

from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from models import batches, section
from running import Spec, differing, evaluate, loaded, on_engine, run, saved, see, shared_folder, step
from whole_muon_jobs import EIGHT_BITS, MODEL, by_config

import zeropp_fp8
from zeropp_fp8.handover import WeightSource
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.states import groups

FP8_LM = {"compute": {"format": "fp8", "min_features": 16}}
SPECS = {
    "muon": by_config(section("zeropp", partition="whole_tensor")),
    "8-bit momentum, clipped": by_config(
        section("zeropp-4bit", partition="whole_tensor", optimizer=EIGHT_BITS), config={"gradient_clipping": 0.1}
    ),
    "exact": by_config(section("zeropp-exact", partition="whole_tensor")),
    "differences of codes": by_config(
        section("zeropp", partition="whole_tensor", weights={"difference": "exact"}, optimizer=EIGHT_BITS)
    ),
    "fp8-lm": Spec(section("fp8-lm", **FP8_LM), model=MODEL),
    "slices in bf16": Spec(section("zeropp", optimizer={"exp_avg_format": "bf16"}), model=MODEL),
    "operands": Spec(section("fp8-lm-zeropp", **FP8_LM), model=MODEL),
    "differences of operands": Spec(section("fp8-lm-zeropp", **FP8_LM, weights={"difference": "exact"}), model=MODEL),
}


def crossing(engine):
    """Names of parameters on their way."""
    units = [unit for unit in engine.optimizer.gatherer.units if unit.pending is not None]
    return sorted(name for unit in units for name in unit.names)


def bytes_of_steps(engine):
    report = engine.zeropp_fp8_session.ledger.of_run.report()
    return report["per_step"], report["stock_per_step"]


def generated(engine):
    """Tokens, of weights as codes too."""
    found = []
    for weights in ("auto", "codes"):
        with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
            found.append(model.generate(torch.arange(4)[None], max_new_tokens=3, do_sample=False, pad_token_id=0))
    return found


def handed(engine):
    """Weights for another engine, and those of a file."""
    source = {name: tensor.clone() for name, tensor in WeightSource(engine)}
    saved_weights = engine._zero3_consolidated_16bit_state_dict() or {}
    return source, {name: tensor.clone() for name, tensor in saved_weights.items()}


def write(engine):
    """Change weights after a step has let them go."""
    params = [p for name, p in engine.module.named_parameters() if "layers.0" in name]
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        if dist.get_rank() == 0:
            for param in params:
                param.data.mul_(1.5)


def at_the_end(gatherer, parts):
    """In place of `step_writes`: nothing crosses before the step has ended."""
    for _ in parts:
        pass


def in_parts(name):
    """Return what crosses after steps in parts of a parameter, and how the run differs from one where nothing does.

    There are steps, an evaluation, a write between steps, a checkpoint, generation and hand-overs.
    """
    traces, data, early = [], list(batches(10, dist.get_rank())), []
    for context in (mock.patch.object(groups, "_PART", 1), mock.patch.object(Gatherer, "step_writes", at_the_end)):
        folder, look = shared_folder(), on_engine(lambda engine: early.append(crossing(engine)))
        events = [step, look, step, look, evaluate(data[0]), step, on_engine(write), step]
        events += [saved(folder, "c"), step, loaded(folder, "c"), step, see(generated), step, see(handed), step]
        # Ranks agree on scales, and on sizes of differences, once a part.
        events += [] if "operands" in name or "difference" in name or name == "exact" else [see(bytes_of_steps)]
        with context:
            traces.append(run(SPECS[name], events, ["weights", "masters"], data=data))
    first, second, *none = early
    assert none == [[], []]
    return first, second, differing(*traces)
