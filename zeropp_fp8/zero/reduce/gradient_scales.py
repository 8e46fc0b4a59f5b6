"""Scales that all ranks share for FP8 gradients, and the factor mu that keeps their sums in range (FP8-LM).

FP8-LM (arXiv 2310.18313), section 2.1. Rank i's gradient g_i is sent as FP8(g_i * e) with the same e on every rank, so
codes are added unchanged. With s = largest code / amax of the tensor over all ranks, and N ranks, e = s * mu, and the
mean gradient is the sum / (s * mu * N). (e = s / N turns small values into zeros, and e = s cuts sums off.)

mu is halved after a step in which more than 0.001 % of FP8 numbers are at the largest code, and otherwise grows by 2
over 1,000 steps. (The paper's "is set to 1/2" is read as halved: 1/2 could not follow sums that need 1/8.) Ranks'
gradients, partial sums between the hops and stored results count apart; the largest share decides.

amax comes from earlier steps: with the step's own amax mu would cancel. It is reduced over ranks once per step for all
tensors; a tensor that has none yet takes its current one, in one more collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.issue import all_reduce
from zeropp_fp8.formats import SharedScaleFormat
from zeropp_fp8.formats.amax_history import STEPS, AmaxHistory
from zeropp_fp8.formats.scale_table import ScaleTable, SharedScales
from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import Row, StagePart

TOLERATED_SHARE = 1e-5  # 0.001 %
GROWTH = 2.0 ** (1 / 1000)
# Below it only zeros would be left: mu does not cause overflows that persist so far. Above its inverse, steps whose
# gradients are all zero would bring mu to infinity.
SMALLEST_MU = 2.0**-24
LARGEST_MU = 2.0**24


class GradientScales(StagePart):
    """Scales of the gradients of one engine.

    Args:
        params: all trained parameters, in the order of their reduction. Those with fewer than two dimensions are sent
            exactly; they have a place, so that the scales of parameters that are reduced together are neighbours.
        names: of `params`, for checkpoints: another gather unit or other groups give another order.
    """

    if_lost = "gradient scales start afresh"

    def __init__(self, session: Session, params: Sequence[Parameter], names: Sequence[str]) -> None:
        self.session = session
        self.names = list(names)
        self._format: SharedScaleFormat = session.formats.within
        self._index = {sharded.key(p): index for index, p in enumerate(params)}
        device = session.device
        self.history = AmaxHistory(len(params), device)
        self.mu = torch.ones(1, dtype=torch.float32, device=device)
        self._counts = torch.zeros(3, 2, dtype=torch.int64, device=device)  # see SharedScales
        self.table = ScaleTable(self.history.current, self._counts)
        self._earlier_tables: list[ScaleTable] = []  # of this step
        # Elements that this step has encoded, and that it has reduced to the end: the same on every rank.
        self._encoded = self._reduced = 0
        # Copies of an element, by stage: every rank's gradient, every node's sum, the owner's result.
        copies = (session.topology.world_size, session.topology.nodes, 1)
        self._copies = torch.tensor(copies, dtype=torch.float64, device="cpu").view(3, 1).to(device)
        self._shares = torch.zeros(2, dtype=torch.float64, device=device)  # of the last step: saturated, vanished
        self._quantized = frozenset(index for index, p in enumerate(params) if not is_vector(sharded.shape(p)))
        self._without_history = set(self._quantized)
        self._places: dict[tuple[int, ...], Tensor] = {}

    # -- for the reduction -------------------------------------------------------------------------------------------

    def runs(self, params: Sequence[Parameter]) -> list[list[int]]:
        """Cut the indices of `params` into runs of neighbouring scales; each run can be reduced at once."""
        places = [self._index[sharded.key(param)] for param in params]
        found: list[list[int]] = []
        for i, place in enumerate(places):
            if i and place == places[i - 1] + 1:
                found[-1].append(i)
            else:
                found.append([i])
        return found

    @torch.no_grad()
    def of(self, params: Sequence[Parameter], grads: Sequence[Tensor], to_the_end: bool = True) -> SharedScales:
        """Return the scales of one reduction of neighbours, views of the tables.

        Collective (one all-reduce of one number per tensor) while one of them has no history.

        Args:
            to_the_end: both hops; otherwise the first hop, and `of_sums` gives the scales of the second.

        Raises:
            ValueError: the parameters are not neighbours.
        """
        places = self._places_of(params)
        numel = self._quantized_numel(params)
        self._encoded += numel
        self._reduced += numel if to_the_end else 0
        if not self._without_history.isdisjoint(places):
            self._take_current_amax(list(zip(places, grads)))
        return self.table.at(tuple(places))

    def of_sums(self, params: Sequence[Parameter]) -> SharedScales:
        """Return the scales of the second hop of neighbours whose gradients have accumulated in the node."""
        self._reduced += self._quantized_numel(params)
        return self.table.at(tuple(self._places_of(params)))

    def _places_of(self, params: Sequence[Parameter]) -> range:
        first = self._index[sharded.key(params[0])]
        places = range(first, first + len(params))
        if any(self._index[sharded.key(p)] != place for p, place in zip(params, places)):
            raise ValueError("gradients that are reduced together must be neighbours in the order of reduction")
        return places

    def _quantized_numel(self, params: Sequence[Parameter]) -> int:
        return sum(sharded.numel(p) for p in params if self._index[sharded.key(p)] in self._quantized)

    def _take_current_amax(self, places: Sequence[tuple[int, Tensor]]) -> None:
        """Set the scales of tensors that no step has shown yet, from this step's gradients."""
        new = [(index, grad) for index, grad in places if index in self._without_history]
        norms = torch._foreach_norm([grad.reshape(-1) for _, grad in new], torch.inf)
        # A tensor that is not finite on some rank is scaled by the others' amax; the step will be skipped.
        amax = torch.stack([norm.float() for norm in norms]).nan_to_num(0.0, 0.0, 0.0)
        all_reduce(amax, dist.ReduceOp.MAX, self.session.topology.group, self.session.ledger)
        index = torch.tensor([index for index, _ in new], device=self.session.device)
        self._earlier_tables.append(self.table)  # reductions under way still read it
        self.table = self.table.changed(index, *self._multipliers(amax))

    def _multipliers(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Return fp32 (encode, decode) of tensors with these amax; 0 means that nothing is known."""
        scale = self._format.scale_of_amax(amax)
        return self.mu / scale, scale / (self.mu * float(self.session.topology.world_size))

    def decode_of(self, params: Sequence[Parameter]) -> Tensor:
        """Return fp32 [params] factors: mean gradient = sum of codes * factor, until `end_step`."""
        places = tuple(self._index[sharded.key(p)] for p in params)
        if places not in self._places:  # an optimizer's group; a copy to the device would wait
            self._places[places] = torch.tensor(places, device=self.session.device)
        return self.table.decode[self._places[places]]

    # -- the step ----------------------------------------------------------------------------------------------------

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        with self.session.ledger.counting("other"):
            self.end_step(overflow, scale_change)

    def formats_changed(self) -> None:
        self.session.parts.remove(self)

    def rows(self) -> list[Row]:
        return [("gradient scales", "one per tensor, shared", 0, f"from {STEPS} steps; mu adapts; added in fp32")]

    @torch.no_grad()
    def end_step(self, overflow: bool, loss_scale_change: float = 1.0) -> None:
        """Record the amax and shares of the step, in two small collectives, and move mu. Nothing waits for the device.

        Args:
            overflow: the step was skipped: its gradients say nothing about the next step's.
            loss_scale_change: the new loss scale over that of the step.
        """
        topology, history = self.session.topology, self.history
        for table in (*self._earlier_tables, self.table):
            table.collect()
        self._earlier_tables.clear()
        if topology.world_size > 1:
            all_reduce(history.current, dist.ReduceOp.MAX, topology.group, self.session.ledger)
            all_reduce(self._counts, dist.ReduceOp.SUM, topology.group, self.session.ledger)
        if overflow:
            history.current.zero_()
        else:
            shares = self._counts.double() / self._copies
            shares[0] /= max(1, self._encoded)
            shares[1:] /= max(1, self._reduced)
            self._shares = shares.amax(dim=0)
            moved = torch.where(self._shares[0] > TOLERATED_SHARE, self.mu * 0.5, self.mu * GROWTH)
            self.mu = moved.clamp_(SMALLEST_MU, LARGEST_MU)
        history.end_step()
        if loss_scale_change != 1.0:  # gradients grow and shrink with it
            history.table *= loss_scale_change
        self._counts.zero_()
        self._encoded = self._reduced = 0
        largest = history.largest()
        if self._without_history:
            # Reading waits for the device; tensors are new in the first step, and seldom later.
            has_history = largest.gt(0).tolist()
            self._without_history = {index for index in self._without_history if not has_history[index]}
        self.table.update(*self._multipliers(largest))

    def report(self) -> dict[str, float]:
        """Return mu, and the last step's shares of FP8 numbers at the largest code and of those that became zero.

        They are from the stage with the largest share: gradients, partial sums or results.
        """
        saturated, vanished = self._shares.tolist()
        return {"mu": self.mu.item(), "saturated": saturated, "vanished": vanished}

    def metrics(self) -> dict[str, float]:
        return {f"gradient_{name}": value for name, value in self.report().items()}

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict:
        return {"gradient_scales": self.state_dict()}

    def load_extra_state(self, state: dict) -> None:
        self.load_state_dict(state.get("gradient_scales"))

    def state_dict(self) -> dict:
        """Return the state that the next step's scales depend on; the same on every rank, for any number of ranks."""
        return {
            "mu": self.mu.cpu(),
            "names": self.names,
            "amax_history": self.history.oldest_first(),
            "without_history": [self.names[index] for index in sorted(self._without_history)],
        }

    def load_state_dict(self, state: dict | None) -> None:
        """Continue from the result of `state_dict`; None or an empty one starts afresh.

        Raises:
            ValueError: the state is of other parameters, or of a version that did not save their names.
        """
        amax_history = torch.zeros(0, len(self.names), dtype=torch.float32, device="cpu")
        self._without_history = set(self._quantized)
        if state:
            if "names" not in state:
                raise ValueError("the checkpoint's gradient scales do not say of which tensors they are")
            if set(state["names"]) != set(self.names):
                other = min(set(state["names"]) ^ set(self.names))
                raise ValueError(f"the checkpoint's gradient scales are of other tensors than this model's: {other}")
            place = {name: index for index, name in enumerate(state["names"])}
            amax_history = state["amax_history"][:, [place[name] for name in self.names]]
            self._without_history = {self.names.index(name) for name in state["without_history"]}
        self.mu.copy_(state["mu"] if state else torch.ones_like(self.mu))
        self.history.load(amax_history)
        self._earlier_tables.clear()
        self._counts.zero_()
        self._encoded = self._reduced = 0
        self.table.update(*self._multipliers(self.history.largest()))
