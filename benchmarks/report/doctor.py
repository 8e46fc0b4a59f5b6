"""The doctor: what it prints, and what it recommends by what it has measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from benchmarks.report.blocks import Block
from zeropp_fp8.plan import Cluster, Hardware, Job, Model
from zeropp_fp8.plan.__main__ import steps_table
from zeropp_fp8.plan.recommend import recommend


def _made(of: type, given: Mapping[str, Any]) -> Any:
    """A dataclass out of its fields, as `asdict` has written them."""
    return of(**{field.name: given[field.name] for field in dataclasses.fields(of) if field.name in given})


def doctor(result: dict) -> str:
    """All of it, with the recipes as the plan has them now: at the rates that were measured then."""
    found, printed = result["found"], result["printed"]
    parts = {"model": _made(Model, found["job"]["model"]), "cluster": _made(Cluster, found["job"]["cluster"])}
    job = _made(Job, found["job"] | parts)
    memory = min(rank["device"]["bytes"] for rank in found["ranks"].values())
    advice = recommend(job, _made(Hardware, found["hardware"]), memory)
    first, last = (printed.index(line) for line in ("", printed[-1]))
    lines = [*printed[: first + 1], steps_table(advice.estimates, job), advice.text, "", *printed[last:]]
    return "\n".join(["```", *lines, "```"])


BLOCKS = {"doctor": Block(doctor, ("doctor/h100-2-nvlink",))}
