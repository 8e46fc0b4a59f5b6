"""The plan's formulas against measurement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.plan_fit.points import MeasuredPoint
from benchmarks.plan_fit.rlhf import iteration
from zeropp_fp8.plan import EMULATED_H200, PRESETS, Hardware, PlanError, estimate, method_named
from zeropp_fp8.plan.hardware import SHARES, preset_of

MOST_FIELDS = 3
WIDEST_STEP, LAST_STEP = math.log(128), 0.003
# Standard deviations of logarithms: of a measured step, and of constants of one machine and version of the code to the
# next. Of the host a factor of 2 is known, of `overlap` nothing.
NOISE = 0.05
MACHINE = {"host_per_block_ms": 0.6, "overlap": 1.0} | dict.fromkeys(
    ("achieved_tflops", "compiled_host", "compiled_compute", "compiled_fp8_host", "fp8_host", "fsdp_host")
    + ("reducer_host", "adapter_host", "tensor_host", "gather_host"),
    0.3,
)
COARSE = (-0.6, -0.3, 0.0, 0.3, 0.6)


@dataclass(frozen=True)
class Residual:
    """`error` is (modelled - measured) / measured."""

    point: MeasuredPoint
    modelled_s: float

    @property
    def error(self) -> float:
        return self.modelled_s / self.point.step_s - 1


def measured_on(gpu: str) -> Hardware:
    """The preset of a GPU by its name, an H200's where there is none, with a network that is this host's."""
    return replace(PRESETS[preset_of(gpu) or "h200"], link_efficiency=EMULATED_H200.link_efficiency)


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


def machine_of(points: Sequence[MeasuredPoint], hardware: Hardware) -> Hardware:
    """The constants of MACHINE, fitted to steady runs of one machine and one version of the code. Those that no run
    says anything about stay where they start.

    Raises:
        PlanError: no steady run.
    """
    # Whether host or GPU bounds a step is a matter of two of them. What one hides of the other has no slope.
    pairs = product(COARSE, repeat=2)
    starts = [_scaled(_scaled(hardware, "host_per_block_ms", a), "achieved_tflops", b) for a, b in pairs]
    return _nearest(points, hardware, MACHINE, starts)


def held_out(points: Sequence[MeasuredPoint], hardware: Hardware) -> list[Residual]:
    """Each steady run beside what the machine of all the others makes of it."""
    return [
        residual
        for point in points
        if point.steady
        for residual in check([point], machine_of([other for other in points if other is not point], hardware))
    ]


def fitted(before: Hardware, after: Hardware) -> list[str]:
    """Fields of MACHINE that differ by more than what a run is uncertain by."""
    return [field for field in MACHINE if abs(getattr(after, field) / getattr(before, field) - 1) > NOISE]


def calibrate(points: Sequence[MeasuredPoint], hardware: Hardware, fields: Sequence[str]) -> Hardware:
    """Fit up to three rates or constants, wherever they start, to measured points that are steady: least squares of the
    log ratio.

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
    steady = sum(point.steady for point in points)
    if steady < len(fields):
        raise PlanError(f"{len(fields)} fields need at least as many measured points, got {steady}")
    return _nearest(points, hardware, dict.fromkeys(fields, math.inf), [hardware])


def _nearest(
    points: Sequence[MeasuredPoint], known: Hardware, spreads: Mapping[str, float], starts: Iterable[Hardware]
) -> Hardware:
    """Least squares of log(modelled / measured) over NOISE, and of log(constant / `known`) over its spread: coordinate
    search from the best start, each field with a step of its own.

    Raises:
        PlanError: no steady run, or a field that is 0.
    """
    points = [point for point in points if point.steady]
    if not points:
        raise PlanError("there is no steady run to fit to")
    zeros = [field for field in spreads if getattr(known, field) == 0]
    if zeros:
        raise PlanError(f"{zeros[0]} starts at 0 and a search by factors cannot leave it; give it a start above 0")

    def misfit(hardware: Hardware) -> float:
        moved = (math.log(getattr(hardware, field) / getattr(known, field)) / spreads[field] for field in spreads)
        errors = (math.log1p(residual.error) / NOISE for residual in check(points, hardware))
        return sum(each**2 for each in (*errors, *moved))

    best = min(starts, key=misfit)
    least, steps = misfit(best), {field: min(WIDEST_STEP, spread) for field, spread in spreads.items()}
    while steps:
        for field, step in tuple(steps.items()):
            trials = [_scaled(best, field, sign * step) for sign in (1, -1)]
            found = [misfit(trial) for trial in trials]
            if min(found) < least:
                best, least, steps[field] = trials[found.index(min(found))], min(found), 1.5 * step
            elif step < LAST_STEP:
                del steps[field]
            else:
                steps[field] = step / 3
    return best


def _scaled(hardware: Hardware, field: str, log_factor: float) -> Hardware:
    value = getattr(hardware, field) * math.exp(log_factor)
    return replace(hardware, **{field: min(value, 1.0) if field in SHARES else value})
