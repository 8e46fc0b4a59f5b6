"""The route that all units of an engine share: the hops, and the order of rows in their results."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.all_gather import ranks_held
from zeropp_fp8.comm.payload import SliceOrder
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.zero.gather.gemm_weights import GemmWeights
from zeropp_fp8.zero.gather.unequal import UnequalHops
from zeropp_fp8.zero.session import Session


class Route:
    """The hops of an engine's gathers.

    Attributes:
        before, last: levels of the hops up to the secondary shard, and of the one after it.
        reached, own_row: number of rows (one per rank) that the hops before it bring, and the index of this rank's row.
        held_ranks: the ranks whose rows those hops bring, in the order of the rows.
        rank_order: the order of the rows that the last hop brings.
        rows_in_rank_order, row_of_slice: int64 and int32 [ranks], the row that holds the slice of rank r.
        unequal: the same hops for rows of different sizes.
        gemm_weights: the weights that are sent as operands of a product.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.device = session, session.device
        self.before, (self.last,) = session.gather_levels
        self.levels = [*self.before, self.last]
        self.world_size = session.topology.world_size
        self.reached, self.own_row = 1, 0
        for level in self.before:
            self.own_row += level.rank * self.reached
            self.reached *= level.size
        sizes = [level.size for level in self.levels]
        self.held_ranks = ranks_held(sizes, len(self.before), session.topology.rank)
        self.unequal = UnequalHops(self.levels, len(self.before), session.topology.rank, session.ledger)
        self.one_row = SliceOrder([0], self.device)
        self.rank_order = SliceOrder(ranks_held(sizes, len(sizes), 0), self.device)
        rows = self.rank_order.slices
        self.rows_in_rank_order = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), device=self.device)
        self.row_of_slice = self.rows_in_rank_order.to(torch.int32)
        self.gemm_weights = GemmWeights(session)  # empty until parameters are attached

    @property
    def in_rank_order(self) -> bool:
        """Whether the last hop brings the slices in the order of the ranks."""
        return self.rank_order.is_natural

    def format_of(self, param: Parameter) -> WireFormat:
        """The wire format of a parameter's shard: matrices as configured, vectors and skipped modules in full."""
        quantized = self.session.formats.weights if self.world_size > 1 else None  # else nothing is sent
        if quantized is not None and not self.session.sends_exactly("weights", param):
            return quantized
        return UnquantizedFormat(sharded.wire_dtype(param))
