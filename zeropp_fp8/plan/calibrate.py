"""The model against measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zeropp_fp8.plan.hardware import SHARES, Hardware
from zeropp_fp8.plan.job import PlanError
from zeropp_fp8.plan.measured import MeasuredPoint
from zeropp_fp8.plan.methods import method_named
from zeropp_fp8.plan.rlhf import iteration
from zeropp_fp8.plan.step_time import estimate

MOST_FIELDS = 3
FIRST_STEP, LAST_STEP = math.log(128), 1e-4  # a wide first step: what another resource hides has no slope


@dataclass(frozen=True)
class Residual:
    """`error` is (modelled - measured) / measured."""

    point: MeasuredPoint
    modelled_s: float

    @property
    def error(self) -> float:
        return self.modelled_s / self.point.step_s - 1


def check(points: Iterable[MeasuredPoint], hardware: Hardware) -> list[Residual]:
    """Modelled step time of each point and its relative error.

    Raises:
        PlanError: a run that is no known method.
    """
    return [Residual(point, _modelled(point, hardware)) for point in points]


def _modelled(point: MeasuredPoint, hardware: Hardware) -> float:
    method = method_named(point.run)
    if point.phase:
        return getattr(iteration(method, point.job, hardware), f"{point.phase}_s")
    return estimate(method, point.job, hardware).step_s


def _misfit(points: Sequence[MeasuredPoint], hardware: Hardware) -> float:
    """Sum of squares of log(modelled / measured): 10 % counts the same at 0.1 s and at 5 s."""
    return sum(math.log1p(residual.error) ** 2 for residual in check(points, hardware))


def _scaled(hardware: Hardware, field: str, log_factor: float) -> Hardware:
    value = getattr(hardware, field) * math.exp(log_factor)
    return replace(hardware, **{field: min(value, 1.0) if field in SHARES else value})


def calibrate_machine(points: Sequence[MeasuredPoint], hardware: Hardware) -> Hardware:
    """The four constants of a GPU and its host, fitted to runs of one machine on one day.

    First methods that work by block, in one node: their step is the blocks' Python or their computing. Then what
    DeepSpeed adds, from all.

    Raises:
        PlanError: fewer than two points of methods that work by block in one node.
    """
    by_block = [p for p in points if not method_named(p.run).host_by_tensor and p.job.cluster.nodes == 1]
    own = calibrate(by_block, hardware, ("host_per_block_ms", "achieved_tflops"))
    return calibrate(points, own, ("host_per_tensor_ms", "host_per_gather_ms"))


def calibrate(points: Sequence[MeasuredPoint], hardware: Hardware, fields: Sequence[str]) -> Hardware:
    """Fit up to three rates or constants to measured points that are steady: least squares of the log ratio, by
    coordinate search.

    Args:
        hardware: where the search starts; the fields that are not named stay as they are.
        fields: names of Hardware's fields.

    Raises:
        PlanError: no field, more than three, one that does not exist or is 0, or fewer points than fields.
    """
    unknown = [field for field in fields if field not in vars(hardware)]
    if unknown:
        raise PlanError(f"hardware has no {unknown[0]!r}; fields are {', '.join(vars(hardware))}")
    if not 1 <= len(fields) <= MOST_FIELDS:
        raise PlanError(f"fit 1 to {MOST_FIELDS} fields at a time, got {len(fields)}")
    points = [point for point in points if point.steady]
    if len(points) < len(fields):
        raise PlanError(f"{len(fields)} fields need at least as many measured points, got {len(points)}")
    zeros = [field for field in fields if getattr(hardware, field) == 0]
    if zeros:
        raise PlanError(f"{zeros[0]} starts at 0 and a search by factors cannot leave it; give it a start above 0")

    best, misfit, step = hardware, _misfit(points, hardware), FIRST_STEP
    while step > LAST_STEP:
        trials = [_scaled(best, field, log_factor) for field in fields for log_factor in (step, -step)]
        found = min(trials, key=lambda trial: _misfit(points, trial))
        if _misfit(points, found) < misfit:
            best, misfit = found, _misfit(points, found)
        else:
            step /= 2
    return best
