"""The outcome of each step of an experiment: loss, gradient norm, and whether another run had the same input."""

from __future__ import annotations

import atexit
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8 import sharded
from zeropp_fp8.config import GEMMS, SKIPPED_IN, Trial, pieces_of
from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.zero.gather.attached import unit_of
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import StagePart

_PERIOD = 8191  # of the weights in a sum over elements, so that their order counts


def fingerprint(value) -> Tensor | float:
    """fp64 []: a number that differs where tensors in (nested) arguments differ; 0 without tensors."""
    if isinstance(value, Tensor):
        flat = value.detach().reshape(-1).double().nan_to_num(0.0, 0.0, 0.0)
        return (flat * (torch.arange(flat.numel(), device=flat.device) % _PERIOD + 1)).sum()
    if isinstance(value, Mapping):  # a batch of a tokenizer is one, and no dict
        return sum(map(fingerprint, value.values()), 0.0)
    return sum(map(fingerprint, value), 0.0) if isinstance(value, (list, tuple)) else 0.0


class Sketches:
    """A few sums of each matrix of gradients, from which the distance of two runs' gradients can be told.

    Element i is added with a sign to one of SUMS sums, both drawn by its place in the whole tensor, the same in each
    run however it is cut into shards. The expected square of the norm of such sums is that of the tensor (the count
    sketch of Charikar, Chen and Farach-Colton, 2002); it scatters by sqrt(2 / SUMS), its root by half of that, 6 %.
    """

    SUMS = 128

    def __init__(self, engine) -> None:
        self.session, self.stage = engine.zeropp_fp8_session, engine.optimizer
        self.params = [
            (n, p) for n, p in engine.module.named_parameters() if p.requires_grad and not is_vector(sharded.shape(p))
        ]
        self.names = [name.removesuffix(".weight") for name, _ in self.params]

    def of_gradients(self) -> Tensor:
        """fp64 [matrices, SUMS + 1]: this rank's part of the sketches of a step's gradients, and of the sums of their
        squares; without the loss scale."""
        session = self.session
        sums = torch.zeros(len(self.params), self.SUMS + 1, dtype=torch.float64, device=session.device)
        for index, (_, param) in enumerate(self.params):
            if not param.requires_grad or not session.own_numel(param):
                continue
            generator = torch.Generator(session.device).manual_seed(index)
            options = {"dtype": torch.uint8, "device": session.device, "generator": generator}
            drawn = session.placement.own_part(param, torch.randint(2 * self.SUMS, (sharded.numel(param),), **options))
            grad = self.stage.get_local_fp32_grad_for_param(param).view(-1)[: drawn.numel()].double()
            grad /= float(self.stage.loss_scale)
            sums[index].index_add_(0, drawn.long() % self.SUMS, torch.where(drawn < self.SUMS, grad, -grad))
            sums[index, -1] = grad.square().sum()
        return sums


def gemms_of(session: Session) -> list[str]:
    """The GEMMs that are in low precision in some linear layer."""
    layers = session.conversion.converted.values() if session.conversion else ()
    return [gemm for gemm in GEMMS if not all(getattr(layer.precision.high, gemm) for layer in layers)]


def layers_of(engine) -> dict[str, list[str]]:
    """{piece: names of the layers in it}, of pieces of which layers can be left out."""
    session, found = engine.zeropp_fp8_session, {piece: [] for piece in SKIPPED_IN}
    found["compute"] = [*session.conversion.converted] if session.conversion else []
    for name, param in engine.module.named_parameters():
        unit, layer = unit_of(param), name.removesuffix(".weight")
        if unit.storage.sends_as_stored:
            found["frozen"].append(layer)
        elif not unit.is_exact(param):
            found["weights"].append(layer)
        if param.requires_grad and not session.sends_exactly("gradients", param):
            for hop in ("gradients_within", "gradients_between"):
                found[hop].append(layer)
    return found


class Recorder(StagePart):
    """Writes a line of JSON for the engine and for each of its steps, on rank 0; that of the trial ends the process.

    engine: {"engine", "pieces": what is in low precision, "layers": {piece: those that can be left out of it},
        "gemms": those that are, in some layer, "matrices": that train}
    step: {"engine", "step", "loss": mean over micro-batches and ranks, "grad_norm", "data": fingerprint of what the
        model was trained on, "sketches": of gradients, "state": of the weights, as the sum of their squares,
        in the first step}
    What is not there (a loss that `engine.backward` did not get, the norm of gradients that are not finite) is NaN.

    Raises:
        SystemExit: in the last step of the trial, with status 0, on every rank.
    """

    def __init__(self, engine, number: int, trial: Trial) -> None:
        self.session, self.stage, self.trial = engine.zeropp_fp8_session, engine.optimizer, trial
        self.number, self.steps = number, 0
        # Sums over this step and rank: losses, how many they are, the fingerprint of inputs.
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.session.device)
        hook = engine.module.register_forward_pre_hook(self._inputs, with_kwargs=True)
        self.session.on_model.callback(hook.remove)
        self.sketches, self.sketch = Sketches(engine), None
        gemms, matrices = gemms_of(self.session), self.sketches.names
        pieces, layers = pieces_of(self.session.config), layers_of(engine)
        self._write({"pieces": pieces, "layers": layers, "gemms": gemms, "matrices": matrices})

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

    def gradients_ready(self) -> None:
        """Weights are still those that the losses are of."""
        self.sketch = self.sketches.of_gradients()
        if self.steps:
            return
        for unit in self.stage.gatherer.units:
            for param in unit.params:
                if param.requires_grad:
                    own = sharded.unpadded(param, self.session.own_numel(param))
                    self.sums[3] += torch.linalg.vector_norm(own, dtype=torch.float64).square().to(self.sums.device)

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        self.steps += 1
        for sums in (self.sums, self.sketch) if self.sketches.names else (self.sums,):
            dist.all_reduce(sums, group=self.session.topology.group)
        loss, losses, data, state = self.sums.tolist()
        norm = math.nan if overflow else float(self.stage._global_grad_norm)
        values = {"loss": loss / losses if losses else math.nan, "grad_norm": norm, "data": data}
        values["sketches"] = [[float(f"{one:.7g}") for one in sums] for sums in self.sketch.tolist()]
        self._write({"step": self.steps, **values, **({"state": state} if self.steps == 1 else {})})
        self.sums.zero_()
        if self.steps == self.trial.steps and self.trial.engine in (None, self.number):
            atexit.register(_end_process_groups)
            raise SystemExit(0)


def _end_process_groups() -> None:
    """While Python is there: a thread of gloo that outlives it aborts the process (pytorch issue 190489)."""
    if dist.is_initialized():
        dist.destroy_process_group()
