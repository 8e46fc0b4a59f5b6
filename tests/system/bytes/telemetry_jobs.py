"""An engine's numbers on ranks, and the changes of its session in steps."""

from __future__ import annotations

import contextlib
import io
import re

from models import section
from running import Spec, forward, on_engine, run, see, step, within

import zeropp_fp8
from zeropp_fp8.zero.fall_back import fall_back
from zeropp_fp8.zero.telemetry import StepMetrics, snapshot

SMALL = {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}


def told(folder, recipe, steps=8):
    """(attributes of the session that steps, an evaluation and falling back have changed, what was told of 8 steps)."""
    numerics = {"every": 3, "file": f"{folder}/numerics.jsonl", "watch": "fall_back"}
    computes = {} if recipe == "lossless" else SMALL
    if recipe == "lossless":
        numerics.pop("watch")
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"}}
    spec = Spec(section(recipe, **computes, numerics=numerics, report={"every": steps}), config=monitor)
    before, events, metrics, printed = {}, [], [], io.StringIO()

    def begin(engine):
        before.update(vars(engine.zeropp_fp8_session))
        metrics.append(StepMetrics(engine.zeropp_fp8_session))
        write = engine.monitor.write_events
        engine.monitor.write_events = lambda those: (events.extend(those), write(those))

    def changed(engine):
        return [name for name, value in vars(engine.zeropp_fp8_session).items() if before.get(name) is not value]

    reported = within(
        lambda engine: contextlib.redirect_stdout(printed), *[step, see(lambda engine: metrics[0]())] * steps
    )
    numbers = [see(lambda engine: snapshot(engine.zeropp_fp8_session)), see(zeropp_fp8.wire_report)]
    evaluation = [on_engine(lambda engine: engine.eval()), forward, on_engine(lambda engine: engine.train())]
    falls_back = [on_engine(lambda engine: fall_back(engine.optimizer)), step] * (recipe != "lossless")
    seen = run(spec, [on_engine(begin), reported, *numbers, *evaluation, *falls_back, see(changed)]).seen
    *found, of_run, report, changes = seen
    line = re.findall(r"step \d+: a rank sends .*", printed.getvalue())
    logged = [
        {name.removeprefix("Train/Samples/zeropp_fp8/"): value for name, value, at in events
         if at == sample and "zeropp_fp8" in name}
        for sample in dict.fromkeys(at for _, _, at in events)
    ][:steps]  # fmt: skip
    return changes, (found, of_run, report, line, logged)
