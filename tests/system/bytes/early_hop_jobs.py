"""Jobs whose steps let blocks cross between nodes as soon as they are written."""

from __future__ import annotations

from unittest import mock

import deepspeed
import torch.distributed as dist
from models import batches, section
from running import Spec, differing, evaluate, loaded, on_engine, run, saved, see, shared_folder, step
from whole_muon_jobs import EIGHT_BITS, MODEL, by_config

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


def write(engine):
    """Change weights after a step has let them go."""
    params = [p for name, p in engine.module.named_parameters() if "layers.0" in name]
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        if dist.get_rank() == 0:
            for param in params:
                param.data.mul_(1.5)


def in_parts(name):
    """Return what crosses after steps in parts of a parameter, and how the run differs from one of whole steps.

    There are steps, an evaluation, a write between steps, and a checkpoint.
    """
    traces, data = [], list(batches(8, dist.get_rank()))
    for least in (1, 1 << 40):
        folder = shared_folder()
        events = [step, see(crossing), step, see(crossing), evaluate(data[0]), step, on_engine(write), step]
        events += [saved(folder, "c"), step, loaded(folder, "c"), step, step]
        # Ranks agree on scales, and on sizes of differences, once a part.
        events += [] if "operands" in name or "difference" in name or name == "exact" else [see(bytes_of_steps)]
        with mock.patch.object(groups, "_PART", least):
            traces.append(run(SPECS[name], events, ["weights", "masters"], data=data))
    (first, second, *_), whole = traces[0].seen, traces[1].seen
    assert whole[:2] == [first, second], "what is written is started, in one part and in many"
    return first, second, differing(*traces)
