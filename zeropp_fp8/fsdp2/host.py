"""Everything that the modules of one model share, and its life: a step of the optimizer, writes to weights."""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from zeropp_fp8.comm import ErrorFeedback, make_topology
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.comm.payload import SliceOrder
from zeropp_fp8.comm.reduce_scatter import Reduction, Rings
from zeropp_fp8.fsdp2.unit import FSDPUnit
from zeropp_fp8.zero.gather.hops import Hops
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.secondary import SecondaryShards
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import Row, idle_pattern_rows, row_of_hop, table_of
from zeropp_fp8.zero.telemetry import ProgressLine

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


# Activation checkpointing and torch.compile put modules in between, which no name pattern and no checkpoint knows.
_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")


class Replicas:
    """The ranks that have this rank's part of the model, and the resources of their reductions.

    Args:
        mesh: of one dimension, these ranks.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self.topology = make_topology(mesh.get_group(), 1)
        self.rings, self.first, self.last = Rings.on(device), Lane(device), Lane(device)
        self.one_row = SliceOrder([0], device)
        self.in_order = SliceOrder(range(self.topology.nodes), device)


class Host:
    """The collectives of one model.

    Attributes:
        units: of all modules that fully_shard was called on, in the order of the model.
        feedback: residuals of gradients, if the section asks for them.
        before_step: called before an optimizer writes a unit's parameters.
        replicas: the ranks with the same part of other copies of the model, if there are any.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[FSDPParamGroup], session: Session, replicas: Replicas | None
    ) -> None:
        self.session, config, device, self.replicas = session, session.config, session.device, replicas
        session.leave_exact(model)
        session.ledger.copies = 1 if replicas is None else replicas.topology.nodes
        route, places = Route(session), {id(module): name for name, module in model.named_modules()}
        self.units = []
        for group in groups:
            for member in group.fsdp_params:
                member.reset_sharded_param()  # loading may have put another Parameter in its place
            known = [member._module_info for member in group.fsdp_params]
            names = [_WRAPPERS.sub("", f"{places[id(each.module)]}.{each.param_name}".lstrip(".")) for each in known]
            self.units.append(FSDPUnit(group, names, route))
        self.before_step: dict[FSDPUnit, list[Callable[[], None]]] = defaultdict(list)
        self.hops = Hops(route, lambda: self.units)
        self._order: dict[FSDPUnit, None] = {}  # as a forward first asks for them
        self._rings, self._first, self._last = Rings.on(device), Lane(device), Lane(device)
        gradients = config.gradients
        self.feedback = ErrorFeedback(gradients.block_size) if gradients.error_feedback else None
        self._stepped = self._evaluating = False
        self._given: list[tuple[Tensor, int]] = []  # parts in state dicts since the last forward, and their versions
        self._progress = ProgressLine(session, config.report.every) if config.report.every else None
        SecondaryShards(session).choose(self.units)
        model.register_forward_pre_hook(self._forward_begins, prepend=True)  # torch's gathers the root's weights
        model.register_state_dict_post_hook(lambda module, state, *_: self._gave(state))
        if session.topology.rank == 0 and (replicas is None or replicas.topology.rank == 0):
            print("\n".join(table_of(session, self._rows())), flush=True)
        own = weakref.ref(self)
        before = register_optimizer_step_pre_hook(lambda optimizer, *_: _tell(own, Host.step_begins, optimizer))
        after = register_optimizer_step_post_hook(lambda optimizer, *_: _tell(own, Host.stepped, optimizer))
        for hook in (before, after):
            weakref.finalize(self, hook.remove)

    # -- gathers ------------------------------------------------------------------------------------------------------

    def counting_gathers(self) -> AbstractContextManager:
        """A context in which bytes are those of the pass that runs."""
        in_backward = torch._C._current_graph_task_id() != -1
        kind = "weights_backward" if in_backward else OUTSIDE if self._evaluating else "weights_forward"
        return self.session.ledger.counting(kind)

    def first_hops(self, unit: FSDPUnit) -> None:
        """Start the hops between nodes of a unit whose weights are new, and of all that a forward needs after it."""
        self._look_at(unit)
        if unit not in self._order:
            self._order[unit] = None
        if unit.pending is not None or unit.secondary_is_current or not unit.keeps_secondary:
            return
        self.hops.written()  # torch lets this stream wait for the optimizer
        for each in self._order:
            self._look_at(each)
            self.hops.start_first(each)

    def _look_at(self, unit: FSDPUnit) -> None:
        """Forget what was derived from weights that have been written since, other than by a step."""
        version = unit.version
        if version != unit.known_version:
            unit.known_version = version
            self.hops.cancel(unit)
            # After a step the other ranks send differences, whether they have written more or not.
            unit.changed(by_step=not unit.secondary_is_current)

    def _forward_begins(self, *_: Any) -> None:
        evaluating = not torch.is_grad_enabled()
        written, self._given = any(part._version != version for part, version in self._given), []
        # For an evaluation moving averages may be put in place through `param.data`.
        for unit in self.units if written or evaluating != self._evaluating else ():
            self.hops.cancel(unit)
            unit.changed(by_step=True)
        self._evaluating = evaluating
        self.end_step()

    def _gave(self, state: dict[str, Any]) -> None:
        """Note a state dict: a checkpoint may be loaded into these tensors, which have versions of their own."""
        parts = (value._local_tensor for value in state.values() if isinstance(value, DTensor))
        self._given += [(part, part._version) for part in parts]

    def end_step(self) -> None:
        """Count a step, if an optimizer has made one since the last call."""
        if self._stepped:
            self._stepped = False
            self.session.ledger.end_step()
            if self._progress is not None:
                self._progress.step_counted()

    def step_begins(self, units: Sequence[FSDPUnit]) -> None:
        """An optimizer is about to write parameters of these units."""
        for unit in units:
            for check in self.before_step[unit]:
                check()

    def stepped(self, units: Sequence[FSDPUnit]) -> None:
        """An optimizer has written parameters of these units.

        One without a pass before it is no step: torch.distributed.checkpoint makes it to have states to load into.
        """
        ledger = self.session.ledger
        self._stepped = self._stepped or bool(units and (ledger.pending or ledger.world_size == 1))
        for unit in units:
            self.hops.cancel(unit)
            unit.known_version = unit.version
            unit.changed(by_step=True)

    def weights_changed(self) -> None:
        """Weights were written through `param.data`: gather all of them anew. Call it on every rank."""
        for unit in self.units:
            self.hops.cancel(unit)
            unit.changed()

    # -- reductions ---------------------------------------------------------------------------------------------------

    def reduction(self, names: list[str]) -> Reduction:
        """The resources of one reduction of gradients with these names."""
        return Reduction(self._rings, self._first, self._last, self.session.ledger, self.feedback, names)

    # -- the start table ----------------------------------------------------------------------------------------------

    def _rows(self) -> list[Row]:
        session, by_format = self.session, defaultdict(list)
        for unit in self.units:
            for member in unit.members:
                by_format[repr(unit.wire_format_of(member))].append(member.sharded_param)
        rows: list[Row] = [
            ("weights", name, sum(p.numel() for p in params), f"{len(params)} tensors")
            for name, params in by_format.items()
        ]
        trained = sum(m.sharded_param.numel() for u in self.units for m in u.members if m.sharded_param.requires_grad)
        topology, formats = session.topology, session.formats
        rows.append(row_of_hop(session, "within nodes", formats.within, topology.ranks_per_node, trained))
        rows.append(row_of_hop(session, "between nodes", formats.between, topology.nodes, trained))
        if self.replicas is not None:
            copies = self.replicas.topology.nodes
            rows.append(row_of_hop(session, "over copies", formats.between, copies, trained))
        kept = sum(unit.numel for unit in self.units if unit.keeps_secondary)
        how = ("added to" if formats.differs else "as received") if kept else "none"
        remark = f"one copy in {session.secondary_ranks} rank(s); backward stays there" if kept else ""
        rows.append(("secondary shard", how, kept, remark))
        names = [name for unit in self.units for name in unit.names]
        rows += idle_pattern_rows(session.config, {"weights": names, "gradients": names})
        return [*rows, ("gather unit", "fully_shard", 0, f"{len(self.units)} modules")]


def _tell(host: weakref.ref, what: Callable, optimizer: torch.optim.Optimizer) -> None:
    found = host()
    if found is not None:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        what(found, [unit for unit in found.units if any(id(m.sharded_param) in params for m in unit.members)])
