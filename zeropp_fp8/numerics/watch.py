"""Watching for losses that jump, and for what is not finite: then the run stops, or goes on in high precision.

All ranks decide alike: from the loss's mean over ranks, which an all-reduce leaves bitwise the same on each, and from
DeepSpeed's own flag for gradients that are not finite on some rank. The all-reduce of two numbers stands where the step
waits for the device anyway.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.config import SECTION
from zeropp_fp8.zero.fall_back import fall_back, what_falls_back
from zeropp_fp8.zero.stage_part import StagePart

WINDOW, LEAST = 32, 8  # losses that a jump is measured by: at most, and at least
SMALLEST_SPREAD, SMALLEST_MEAN = 0.01, 0.01  # of the mean loss, which is 0 up to rounding in GRPO's first steps


def jumps(loss: float, earlier: deque[float], spike: float) -> bool:
    """Whether a loss is above the mean of earlier ones by more than `spike` standard deviations."""
    if len(earlier) < LEAST:
        return False
    mean = statistics.fmean(earlier)
    return loss > mean + spike * max(statistics.pstdev(earlier), SMALLEST_SPREAD * max(abs(mean), SMALLEST_MEAN))


class Watch(StagePart):
    """Does what `numerics.watch` says where a loss jumps or is not finite, or gradients are not (without fp16's scale).

    Raises:
        FloatingPointError: "stop", on every rank in the same step: before its update where a loss tells.
        RuntimeError: no loss came through `engine.backward`.
    """

    def __init__(self, engine) -> None:
        self.session, self.stage = engine.zeropp_fp8_session, engine.optimizer
        self.config = self.session.config.numerics
        self.scales_loss = engine.fp16_enabled()
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.session.device)  # losses, and how many
        self.earlier: deque[float] = deque(maxlen=WINDOW)
        self.problem: str | None = None
        self.goes_on = False  # the step before had one too, which is said once
        if self.config.watch == "fall_back" and self.session.topology.rank == 0:
            print(f"zeropp_fp8: where a loss jumps, {what_falls_back(self.session)}", flush=True)

    def extra_state(self) -> dict:
        return {"observers": {"Watch": {"earlier": [*self.earlier]}}}

    def load_extra_state(self, state: dict) -> None:
        """A run that resumes goes on comparing; from a checkpoint without losses it begins anew."""
        self.earlier = deque(state.get("observers", {}).get("Watch", {}).get("earlier", ()), maxlen=WINDOW)

    def loss_is(self, loss: Tensor) -> None:
        self.sums[0] += loss.detach().double().sum()
        self.sums[1] += 1

    def gradients_ready(self) -> None:
        with self.session.ledger.counting("other"):
            all_reduce(self.sums, dist.ReduceOp.SUM, self.session.topology.group, self.session.ledger)
        total, count = self.sums.tolist()
        self.sums.zero_()
        if not count:
            raise RuntimeError(
                f'"{SECTION}.numerics.watch" looks at losses, and none came through engine.backward(loss); call it '
                'instead of loss.backward(), or set watch to "none"'
            )
        loss = total / count
        if not math.isfinite(loss):
            self.problem = f"the loss is {loss}"
        elif jumps(loss, self.earlier, self.config.spike):
            self.problem = f"the loss is {loss:.4g}, the mean of the {len(self.earlier)} before it "
            self.problem += f"{statistics.fmean(self.earlier):.4g}"
        else:
            self.earlier.append(loss)
        self._stop_if_asked()

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        if overflow and not self.scales_loss and self.problem is None:
            self.problem = "gradients are not finite"
            self._stop_if_asked()
        goes_on, self.goes_on = self.goes_on, self.problem is not None
        if self.problem is None:
            return
        says = "all that goes to high precision is in it already"
        if not self.session.formats.fell_back:
            says = f"from the next step on, and in runs that resume from its checkpoints, {fall_back(self.stage)}"
        if self.session.topology.rank == 0 and not goes_on:
            print(f"zeropp_fp8: step {self._step()}: {self.problem}; {says}", flush=True)
        self.problem = None

    def _stop_if_asked(self) -> None:
        if self.problem and self.config.watch == "stop":
            problem = f"zeropp_fp8: step {self._step()}: {self.problem}"
            raise FloatingPointError(f'{problem}; "{SECTION}.numerics.watch" stops the run')

    def _step(self) -> int:
        return self.session.engine().global_steps + 1  # DeepSpeed counts it when it returns
