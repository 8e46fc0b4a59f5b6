"""What each step of an experiment gave: loss, gradient norm, and whether it was made of the same as in another run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.config import Trial, pieces_of
from zeropp_fp8.zero.observer import Observer

_PERIOD = 8191  # of the weights in a sum over elements, so that their order counts


def fingerprint(value) -> Tensor | float:
    """fp64 []: a number that differs where tensors in (nested) arguments differ; 0 without tensors."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1).double().nan_to_num(0.0, 0.0, 0.0)
        return (flat * (torch.arange(flat.numel(), device=flat.device) % _PERIOD + 1)).sum()
    if isinstance(value, dict):
        return sum(map(fingerprint, value.values()), 0.0)
    return sum(map(fingerprint, value), 0.0) if isinstance(value, (list, tuple)) else 0.0


class Recorder(Observer):
    """Writes a line of JSON for the engine and for each of its steps, on rank 0, and ends the process after the last.

    engine: {"engine", "pieces": what is in low precision, "layers": those that compute so}
    step: {"engine", "step", "loss": mean over micro-batches and ranks, "grad_norm", "data": fingerprint of what the
        model was trained on, "state": of the weights, as the sum of their squares, in the first step}
    What is not there (a loss that `engine.backward` did not get, the norm of gradients that are not finite) is NaN.

    Raises:
        SystemExit: in the last step, with status 0, on every rank.
    """

    def __init__(self, engine, number: int, trial: Trial) -> None:
        self.session, self.stage, self.trial = engine.zeropp_fp8_session, engine.optimizer, trial
        self.number, self.steps = number, 0
        # Sums over this step and rank: losses, how many they are, the fingerprint of inputs.
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.session.device)
        engine.module.register_forward_pre_hook(self._inputs, with_kwargs=True)
        conversion = self.session.conversion
        layers = [*conversion.converted] if conversion else []
        self._write({"pieces": pieces_of(self.session.config), "layers": layers})

    def _write(self, values: dict) -> None:
        if self.session.topology.rank == 0:
            with Path(self.trial.file).open("a") as file:
                file.write(json.dumps({"engine": self.number, **values}) + "\n")

    def _inputs(self, module, args, kwargs) -> None:
        if module.training and torch.is_grad_enabled():
            self.sums[2] += fingerprint(args) + fingerprint(kwargs)

    def loss_is(self, loss: Tensor) -> None:
        self.sums[0] += loss.detach().double().sum()
        self.sums[1] += 1

    def gradients_are_there(self) -> None:
        """Weights are still those that the losses are of."""
        if self.steps:
            return
        for unit in self.stage.gatherer.units:
            for param in unit.params:
                if param.requires_grad:
                    own = param.ds_tensor.data.view(-1)[: self.session.own_numel(param)]
                    self.sums[3] += torch.linalg.vector_norm(own, dtype=torch.float64).square().to(self.sums.device)

    def step_ended(self) -> None:
        self.steps += 1
        dist.all_reduce(self.sums, group=self.session.topology.group)
        loss, losses, data, state = self.sums.tolist()
        norm = math.nan if self.stage.overflow else float(self.stage._global_grad_norm)
        values = {"loss": loss / losses if losses else math.nan, "grad_norm": norm, "data": data}
        self._write({"step": self.steps, **values, **({"state": state} if self.steps == 1 else {})})
        self.sums.zero_()
        if self.steps == self.trial.steps:
            raise SystemExit(0)
