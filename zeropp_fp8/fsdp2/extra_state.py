"""Error feedback in a checkpoint of torch.distributed.checkpoint, beside weights and optimizer states."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

from zeropp_fp8.fsdp2.model import host_of


class ExtraState(Stateful):
    """The residuals of this rank, as bytes that have its name; none without error feedback.

    They are of a number of copies, nodes and ranks: to load on others, leave this out of the state to load, and they
    begin anew.
    """

    def __init__(self, model: nn.Module) -> None:
        host = host_of(model)
        topology = host.session.topology
        self._feedback = host.feedback
        copies = "" if host.replicas is None else f"{host.replicas.topology.nodes} copies on "
        # Ranks of other copies, and of other stages of a pipeline, have residuals of their own.
        self._name = f"residuals of rank {dist.get_rank()} of {copies}{topology.nodes} x {topology.ranks_per_node}"

    def state_dict(self) -> dict[str, bytes]:
        if self._feedback is None:
            return {}
        written = io.BytesIO()
        torch.save(self._feedback.state_dict(), written)
        return {self._name: written.getvalue()}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        if self._feedback is not None:
            self._feedback.load_state_dict(torch.load(io.BytesIO(state_dict[self._name]), weights_only=True))


def extra_state(model: nn.Module) -> ExtraState:
    """The part of a checkpoint's state that is the collectives': `{"model": .., "zeropp_fp8": extra_state(model)}`."""
    return ExtraState(model)
