"""A sampled step: what weights, gradients and operands lose on their way, layer by layer, while the step is made.

    weights                    this rank's part of a weight, as the gather has brought it, against its shard
    gradients                  what the optimizer gets, against the exact mean over ranks and micro-batches
    gradients_within_nodes     what the hop within nodes alone would have made of it (two hops, scales of blocks)
    compute_weights, compute_activations, compute_gradients    operands of FP8 and MX products, against their matrices

What is sent exactly, and weights stored as codes, are left out. Exact means take fp32 reductions of their own.

A step that is not sampled makes four more calls in Python. A sampled one looks at one in `parts` of the units that
round something, in turn, and its numbers have its cost: seconds beyond the mean of steps before, or of comparisons.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm import gather_objects
from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import Reduction, Rings
from zeropp_fp8.compute.operand import Float8Operand
from zeropp_fp8.compute.scaling import DelayedScaling, Scaling
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.numerics.measure import SUMS, meaning, measure
from zeropp_fp8.zero.reduce.reduction_unit import ReductionUnit
from zeropp_fp8.zero.stage_part import StagePart

WITHIN, WHOLE = "gradients_within_nodes", "gradients"


class Sampler(StagePart):
    """Samples every `numerics.every` steps of an engine that trains, each thing at its first use in the step.

    Making one is collective.

    Raises:
        ConfigError: rank 0 cannot write to `numerics.file`; on every rank.
    """

    def __init__(self, engine, number: int) -> None:
        self.session = session = engine.zeropp_fp8_session
        self.stage, self.config = engine.optimizer, session.config.numerics
        self.number, self.path = number, Path(self.config.file)
        refusal = self._cannot_write("") if session.topology.rank == 0 else None
        refusal = gather_objects(refusal, session.topology.group)[0]
        if refusal:
            raise ConfigError(f'"{SECTION}.numerics.file": {refusal}; name a file that rank 0 can write')
        self.names = {param: name.removesuffix(".weight") for name, param in engine.module.named_parameters()}
        layers = session.conversion.converted if session.conversion else {}
        self.layer_of = {id(layer.own_weight()): layer.precision.layer for layer in layers.values()}
        self.found: dict[str, float] = {}  # summary of the last sample
        self.sampling = False
        self._ended, self._ended_at = self._now(), engine.global_steps
        self._begin_if_due(engine.global_steps + 1)

    # -- a sampled step ----------------------------------------------------------------------------------------------

    def _begin_if_due(self, step: int) -> None:
        """Begin to look on, if `step`, which is the next one, is to be sampled."""
        if step % self.config.every:
            return
        session, units = self.session, [unit for unit in self.stage.gatherer.units if self._is_rounded(unit)]
        self.step, self.sampling, self._begun, self._host_seconds = step, True, self._now(), 0.0
        turns = max(1, min(self.config.parts, len(units)))
        self.units = units[step // self.config.every % turns :: turns]
        params = [p for unit in self.units for p in unit.params]
        self.reduced = {p for p in params if p.requires_grad and not session.sends_exactly("gradients", p)}
        self.means: dict[str, dict[Parameter, Tensor]] = {WITHIN: {}, WHOLE: {}}
        self.rows: dict[tuple[str, int], int] = {}  # (kind, id of a Parameter or number of a layer) -> place, to come
        self.of_row: list[tuple[str, str]] = []
        for param in params:
            roles = ("weights", "activations", "gradients") if id(param) in self.layer_of else ()
            keys = [(kind, id(param)) for kind in ("weights", WITHIN, WHOLE)]
            keys += [(f"compute_{role}", self.layer_of[id(param)]) for role in roles]
            for kind, key in keys:
                self.rows[kind, key] = len(self.of_row)
                self.of_row.append((kind, self.names[param]))
        self.sums = torch.zeros(len(self.of_row), len(SUMS), dtype=torch.float64, device=session.device)
        self.amax = torch.zeros(len(self.of_row), dtype=torch.float64, device=session.device)
        self._look_on()

    def _is_rounded(self, unit) -> bool:
        """Whether there is something to compare of a unit: its weights, gradients or operands."""
        session = self.session
        arrives = not (unit.storage.sends_as_stored or unit.shards_are_values)
        return any(
            id(param) in self.layer_of
            or (arrives and not unit.is_exact(param))
            or (self._rounds_gradients and param.requires_grad and not session.sends_exactly("gradients", param))
            for param in unit.params
        )

    @property
    def _rounds_gradients(self) -> bool:
        """Whether gradients are reduced in a format, which a job that has fallen back does no more, and can be seen."""
        formats = self.session.formats.within, self.session.formats.between
        return formats != (None, None) and not self.stage.offload_optimizer

    def _look_on(self) -> None:
        """Stand between the parts of the engine and their callers."""
        self._replaced: list[tuple[object, str]] = []
        self._before(self.stage.gatherer, "finish", self._finish)
        if self._rounds_gradients:
            for name in ("start", "sum_in_node"):
                self._before(self.stage.reducer, name, self._reduce)
        if self.layer_of:
            self._look_at_products(self.session.conversion.scaling)

    def _look_at_products(self, scaling: Scaling) -> None:
        self._before(scaling, "quantize", self._quantize)
        if isinstance(scaling, DelayedScaling):  # which casts some operands where they are made
            self._before(scaling, "made_input", self._fused_input)

    def _before(self, owner: object, name: str, look: Callable) -> None:
        own = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: look(own, *args, **kwargs))
        self._replaced.append((owner, name))

    def _note(self, kind: str, key: int, exact: Tensor, decoded: Tensor) -> None:
        start, row = time.perf_counter(), self.rows.pop((kind, key))
        self.sums[row], self.amax[row] = measure(exact, decoded)
        self._host_seconds += time.perf_counter() - start

    def gradients_ready(self) -> None:
        """All gradients of the step are reduced: compare them."""
        if not self.sampling:
            return
        for param, exact in self.means[WHOLE].items():
            if param in self.means[WITHIN]:
                self._note(WITHIN, id(param), exact, self.means[WITHIN][param])
            if param.requires_grad:  # and was not frozen on the way
                own = self.stage.get_local_fp32_grad_for_param(param).view(-1)[: exact.numel()]
                self._note(WHOLE, id(param), exact, own)

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        """After every step of the optimizer; a sampled one is written down. Collective then."""
        step = self.session.engine().global_steps + 1  # DeepSpeed counts it when it returns
        if self.sampling:
            self.sampling = False
            for owner, name in self._replaced:
                delattr(owner, name)
            self._write(step)
            del self.means, self.sums, self.amax
        self._begin_if_due(step + 1)

    def formats_changed(self) -> None:
        self.layer_of.clear()  # which compute in high precision

    def metrics(self) -> dict[str, float]:
        return self.found

    def load_extra_state(self, state: dict) -> None:
        """Steps go on from those of the checkpoint, whose next one may be due."""
        self._ended, self._ended_at = self._now(), self.session.engine().global_steps
        if not self.sampling:
            self._begin_if_due(self._ended_at + 1)

    # -- what it looks at --------------------------------------------------------------------------------------------

    def _finish(self, finish: Callable, unit) -> None:
        wanted = unit in self.units and not unit.storage.sends_as_stored and not unit.shards_are_values
        missing = unit.missing if wanted else ()
        finish(unit)
        for param in missing:
            if ("weights", id(param)) in self.rows and not unit.is_exact(param):
                operand = sharded.known(param).operand
                values = param.data if operand is None else operand.dequantize()
                own = self.session.placement.own_part(param, values)
                shard = sharded.unpadded(param, own.numel()).to(own.device)
                if unit.brought is not None:  # numbers of experts that were not gathered are NaN
                    came = own.isfinite() | ~shard.isfinite()
                    shard, own = shard[came], own[came]
                self._note("weights", id(param), shard, own)

    def _reduce(self, reduce: Callable, unit: ReductionUnit, grads: Sequence[Tensor], *others, **options):
        chosen = [(p, grad) for p, grad in zip(unit.params, grads or ()) if p in self.reduced]
        if chosen and self._rounds_gradients:
            session, topology = unit.session, unit.session.topology  # experts of a mixture have their own
            some, grads_hp = [p for p, _ in chosen], [grad.view(sharded.shape(p)).float() for p, grad in chosen]
            self._add(WHOLE, some, grads_hp, None, session)
            hops = topology.nodes > 1 and topology.ranks_per_node > 1 and session.formats.within is not None
            if hops and session.config.gradients.scales == "block":
                self._add(WITHIN, some, grads_hp, session.formats.within, session)
        return reduce(unit, grads, *others, **options)

    @torch.no_grad()
    def _add(self, kind: str, params: list[Parameter], grads_hp: list[Tensor], intra_format, session) -> None:
        """Add this rank's parts of the mean over ranks, exact but for `intra_format`. Collective."""
        start, device = time.perf_counter(), session.device
        args = ([sharded.shape(p) for p in params], [torch.float32] * len(params), session.topology, intra_format, None)
        plan = session.placement.reduce_plan(params, *args, device)
        parts = [torch.zeros(session.own_numel(p), dtype=torch.float32, device=device) for p in params]
        here = Lane.here()
        reduction = Reduction(Rings.on(device), here, here, session.ledger)
        with session.ledger.counting("other"):
            for _ in plan.run(grads_hp, parts, reduction):
                pass
        for param, part in zip(params, parts):
            self.means[kind][param] = part + self.means[kind].get(param, 0.0)
        self._host_seconds += time.perf_counter() - start

    def _see_operands(self, layer: int, role: str, matrix: Tensor, pair) -> None:
        """Measure the cast of a matrix, along the first axis that was asked for."""
        if (f"compute_{role}", layer) not in self.rows:
            return
        operand, exact = (pair[0], matrix) if pair[0] is not None else (pair[1], matrix.t())
        decoded = operand.dequantize() if isinstance(operand, Float8Operand) else operand
        if decoded is not None:
            self._note(f"compute_{role}", layer, exact, decoded)

    def _quantize(
        self, quantize: Callable, layer, role, matrix, plain, transposed, scale=None, training=True, own=False
    ):
        pair = quantize(layer, role, matrix, plain, transposed, scale, training, own)
        if training:
            self._see_operands(layer, role, matrix, pair)
        return pair

    def _fused_input(self, made: Callable, layer, *args):
        """Make the input of a norm or a gated product, whose last argument is `training`."""
        values, pair = made(layer, *args)
        if args[-1]:
            self._see_operands(layer, "activations", values, pair)
        return values, pair

    # -- what it says ------------------------------------------------------------------------------------------------

    @staticmethod
    def _now() -> float:
        """Seconds, when the device has done all that it was given."""
        get_accelerator().synchronize()
        return time.perf_counter()

    def _write(self, step: int) -> None:
        group, ledger = self.session.topology.group, self.session.ledger
        with ledger.counting("other"):
            all_reduce(self.sums, dist.ReduceOp.SUM, group, ledger)
            all_reduce(self.amax, dist.ReduceOp.MAX, group, ledger)
        sums, amax = self.sums.tolist(), self.amax.tolist()
        now, others = self._now(), step - 1 - self._ended_at
        cost = None
        if others > 0:
            seconds = max(self._host_seconds, now - self._begun - (self._begun - self._ended) / others)
            cost = {"seconds": seconds, "share": seconds / (now - self._ended)}
        self._ended, self._ended_at = now, step
        rows = [
            {"kind": kind, "layer": layer, **meaning(sums[i], amax[i])}
            for i, (kind, layer) in enumerate(self.of_row)
            if sums[i][0]
        ]
        self.found = summary(rows)
        if self.session.topology.rank == 0:
            sample = {"engine": self.number, "step": step, "cost": cost, "rows": rows}
            problem = self._cannot_write(json.dumps(sample) + "\n")
            said = progress(step, rows, cost) + (f"; not written: {problem}" if problem else "")
            if self.stage.gatherer.ownership.elsewhere():
                said += "; not of weights that a later engine over this model has: call its destroy() to sample them"
            print(said, flush=True)

    def _cannot_write(self, text: str) -> str | None:
        """Append to the file; says what prevents it, for which a run is not to end."""
        try:
            with self.path.open("a") as file:
                file.write(text)
        except OSError as error:
            return str(error)
        return None


def lowest(rows: Sequence[dict]) -> dict[str, dict]:
    """{kind: the row of the layer with the least signal-to-noise} of what lost anything."""
    kinds: dict[str, dict] = {}
    for row in rows:
        if row["snr_db"] is not None and row["snr_db"] < kinds.get(row["kind"], row | {"snr_db": 1e9})["snr_db"]:
            kinds[row["kind"]] = row
    return kinds


def summary(rows: Sequence[dict]) -> dict[str, float]:
    """A sample as a few numbers with names, to be drawn over time."""
    found = {f"numerics/{kind}/lowest_snr_db": row["snr_db"] for kind, row in lowest(rows).items()}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        for name in ("amax", "underflow", "overflow", "non_finite"):
            found[f"numerics/{kind}/highest_{name}"] = max(row[name] for row in rows if row["kind"] == kind)
    return found


def progress(step: int, rows: Sequence[dict], cost: dict | None) -> str:
    worst = [f"{kind} {row['snr_db']:.1f} dB in {row['layer']}" for kind, row in lowest(rows).items()]
    broken = max(rows, key=lambda row: row["non_finite"], default={"non_finite": 0})
    if share := 100 * broken["non_finite"]:
        worst.append(f"{broken['kind']} {share:.3g} % not finite in {broken['layer']}")
    took = f"; {cost['seconds']:.2g} s, {100 * cost['share']:.2g} % of the time since the last sample" if cost else ""
    return f"zeropp_fp8: numerics of step {step}: lowest " + (", ".join(worst) or "none: nothing was rounded") + took
