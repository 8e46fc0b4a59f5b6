"""What an engine tells, on ranks, and what its steps change of its session."""

from __future__ import annotations

import contextlib
import io
import re

import torch.distributed as dist
from models import batches, ds_config, llama, make_engine, section
from parity_jobs import switch

import zeropp_fp8
from zeropp_fp8.zero.fall_back import fall_back
from zeropp_fp8.zero.telemetry import StepMetrics, snapshot

SMALL = {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}


def told(folder, recipe, steps=8):
    """(attributes of the session that steps, an evaluation and falling back have changed, what was told of 8 steps)."""
    switch(True)
    numerics = {"every": 3, "file": f"{folder}/numerics.jsonl", "watch": "fall_back"}
    computes = {} if recipe == "lossless" else SMALL
    fields = section(recipe, **computes, numerics=numerics, report={"every": steps})
    if recipe == "lossless":
        numerics.pop("watch")
    monitor = {"csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "run"}}
    engine, printed = make_engine(llama(), ds_config(fields, **monitor)), io.StringIO()
    session, metrics = engine.zeropp_fp8_session, StepMetrics(engine.zeropp_fp8_session)
    before, events, found = dict(vars(session)), [], []
    write = engine.monitor.write_events
    engine.monitor.write_events = lambda those: (events.extend(those), write(those))
    with contextlib.redirect_stdout(printed):
        for tokens in batches(steps, dist.get_rank()):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            found.append(metrics())
    of_run, report = snapshot(session), zeropp_fp8.wire_report(engine)
    engine.eval()
    engine(input_ids=tokens, labels=tokens)
    if recipe != "lossless":
        fall_back(engine.optimizer)
        engine.train()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    line = re.findall(r"step \d+: a rank sends .*", printed.getvalue())
    logged = [
        {name.removeprefix("Train/Samples/zeropp_fp8/"): value for name, value, at in events
         if at == sample and "zeropp_fp8" in name}
        for sample in dict.fromkeys(at for _, _, at in events)
    ][:steps]  # fmt: skip
    changed = [name for name, value in vars(session).items() if before.get(name) is not value]
    engine.destroy()
    return changed, (found, of_run, report, line, logged)
