"""A parameter group of `fully_shard` as a unit, sent in the same hops as those of ZeRO-3 (zero/gather/).

torch cuts parameters by rows, equally, with zeros below the last one, and gathers a group as [ranks, elements], in
which a rank's row has its part of each parameter. Its all-gather copies parts into such a buffer before it asks for the
rows of others, and copies whole parameters out of it. Rows are encoded from the parts themselves, so that nodes can
exchange them before torch asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeropp_fp8 import sharded
from zeropp_fp8.comm.payload import PayloadLayout
from zeropp_fp8.config.compute import matches
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.zero.gather.buffers import Regions
from zeropp_fp8.zero.gather.difference import Difference
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.sliced import SlicedUnit

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def dtype_of(group: FSDPParamGroup, member: FSDPParam) -> torch.dtype:
    """The dtype in which a parameter is gathered, as its MixedPrecisionPolicy says."""
    own, chosen = member.sharded_param.dtype, group.mp_policy.param_dtype
    return chosen if chosen is not None and own.is_floating_point else own


class FSDPUnit(SlicedUnit):
    """The parameters of one module that fully_shard gathers together.

    Args:
        group: torch's object, of which the parts and their sizes are read.
        names: of its parameters in the model.

    Attributes:
        members: torch's objects of the parameters, in the order of a row.
        known_version: of the parts from which everything kept was derived.
    """

    members: Sequence[FSDPParam]

    def __init__(self, group: FSDPParamGroup, names: list[str], route: Route) -> None:
        self.route = route
        super().__init__([], self)  # the unit answers for its storage: it has the same route
        self.group, self.members, self.names = group, group.fsdp_params, names
        self.numel = sum(member.sharded_param.numel() for member in self.members)
        self.known_version: tuple = ()

    # -- parts --------------------------------------------------------------------------------------------------------

    @property
    def part_numels(self) -> list[int]:
        """Elements of this rank's part of each parameter, the same on all ranks."""
        return [member.padded_sharded_param_size.numel() for member in self.members]

    @property
    def version(self) -> tuple:
        """A value that changes where autograd sees a write to a part: to the parameter, or to what `to_local` gives."""
        params = [member.sharded_param for member in self.members]
        return tuple([(id(p), p._version, p._local_tensor._version) for p in params])

    def sends_exactly(self, what: str, member: FSDPParam) -> bool:
        """Whether the "weights" or "gradients" of a parameter are sent in 16 or 32 bits, whatever the formats."""
        skipped = getattr(self.route.session.config, what).skip_modules
        if sharded.holds_codes(member._module_info.module):
            return True
        return len(member._orig_size) < 2 or matches(self.names[self.members.index(member)], skipped)

    def wire_format_of(self, member: FSDPParam) -> WireFormat:
        quantized = None if self.sends_exactly("weights", member) else self.route.session.formats.weights
        return quantized or UnquantizedFormat(dtype_of(self.group, member))

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[FSDPParam]:
        """The members that get gradients."""
        return [member for member in self.members if member.sharded_param.requires_grad]

    def gradient_versions(self) -> list[int | None]:
        """From 1, a number of each trained parameter that changes where its gradient is written; None: it has none."""
        grads = [member.sharded_param.grad for member in self.trained]
        return [None if grad is None else 1 + grad._version + grad._local_tensor._version for grad in grads]

    def reduced_as(self, gradients: Tensor) -> tuple:
        """Key of the gradients that torch reduces together: other parameters may be frozen later."""
        return gradients.numel(), gradients.dtype, *[member.sharded_param.requires_grad for member in self.members]

    def reduced_together(self, numel: int) -> tuple[list[int], list[bool], list[str]]:
        """(elements, whether they are sent exactly, names) of the gradients in `numel` elements of this rank.

        Those of all trained members, else of some, which torch does not name: these are one, which is sent exactly.
        """
        trained = self.trained
        numels = [member.padded_sharded_param_size.numel() for member in trained]
        names = [self.names[self.members.index(member)] for member in trained]
        if sum(numels) != numel:
            return [numel], [True], [f"some of {names[0]} ..."]
        return numels, [self.sends_exactly("gradients", member) for member in trained], names

    # -- as a unit ----------------------------------------------------------------------------------------------------

    @property
    def shards_are_values(self) -> bool:
        return False

    def lay_out(self) -> None:
        dtypes, numels = [dtype_of(self.group, member) for member in self.members], self.part_numels
        made_for = list(zip(dtypes, numels))
        if self.layout is not None and self._made_for == made_for:
            return
        self._made_for = made_for
        self._by_dtype = {dtype: [n for each, n in made_for if each == dtype] for dtype in dtypes}
        formats = [self.wire_format_of(member) for member in self.members]
        self.layout = PayloadLayout(numels, formats, dtypes, self.route.device)
        self._regions = Regions([self.layout.row_bytes])
        self.payload = None
        self.difference = Difference(self)

    def own_payload(self, into: Tensor | None = None) -> Tensor:
        device, dtypes = self.route.device, [dtype for dtype, _ in self._made_for]
        parts = [member._sharded_param_data for member in self.members]
        if any(part.dtype != dtype or part.device != device for part, dtype in zip(parts, dtypes)):
            own = self._empty(1)
            torch._foreach_copy_(own, parts)
            parts = own
        row = torch.empty(1, self.layout.row_bytes, dtype=torch.uint8, device=device) if into is None else into
        self.layout.encode(parts, self.route.one_row, row)
        return row

    def write(self, gathered: Tensor, into: Tensor) -> None:
        """Decode the last hop's result into `into`, the ranks' rows, as bytes where parameters have several dtypes."""
        route, world = self.route, self.route.world_size
        values = self._empty(world)
        self.layout.decode(self.codes_in(gathered), route.rank_order, values)
        torch.cat([value.view(world, -1).view(into.dtype) for value in values], dim=1, out=into.view(world, -1))

    def _empty(self, ranks: int) -> list[Tensor]:
        """Memory for the parts of so many ranks, flat per parameter: one allocation per dtype, for 9 take 80 us."""
        parts = {}
        for dtype, numels in self._by_dtype.items():
            flat = torch.empty(ranks * sum(numels), dtype=dtype, device=self.route.device)
            parts[dtype] = iter(flat.split([ranks * numel for numel in numels]))
        return [next(parts[dtype]) for dtype, _ in self._made_for]
