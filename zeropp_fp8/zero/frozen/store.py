"""Frozen weights stored as codes: quantized once, kept in ZeRO-3 shards, sent as they are, never stored in 16 bits.

A stored parameter's shard is the payload (formats/) of this rank's part of the weight, uint8. Parts are equal, and cut
at multiples of the format's granule. Codes and scales are those of the whole tensor, so a checkpoint resumes bit for
bit on another number of ranks. All code sees decoded values; what is written to them under
`GatheredParameters(modifier_rank=...)` is encoded.

DeepSpeed's gathers and partitions would take codes for numbers, so `gather_stored` and `partition_stored` replace them
from the moment a weight is stored, under zero.Init already. (zero/gather/gatherer.py gathers for computing.)
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils.parametrize import is_parametrized

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import slice_of_rank
from zeropp_fp8.config import FIXED_BLOCKS, SECTION, FrozenConfig
from zeropp_fp8.formats import WireFormat, make_format


@dataclass(eq=False)
class StoredWeight:
    """The facts about a stored parameter besides its payload.

    Attributes:
        wire_format: of the codes.
        dtype: of the values that they are decoded to.
        part_numel: elements of each rank's part, a multiple of the format's granule; the last reach beyond the end.
        version: the parameter's version counter when the plugin last gathered or dropped its values.
        holds_merged: the codes hold an adapter that was merged into the weight.
        before_merge: this rank's payload from before that; None while none is, or where it never had codes before.
        adapter: the PEFT layer around the weight.
        place: (the module that contains that layer, or the one around it, the name there, and what is there): PEFT puts
            the bare layer there when it unloads.
    """

    wire_format: WireFormat
    dtype: torch.dtype
    part_numel: int
    version: int = 0
    holds_merged: bool = False
    before_merge: Tensor | None = None
    adapter: weakref.ref[nn.Module] | None = None
    place: tuple[weakref.ref[nn.Module], str, weakref.ref[nn.Module]] | None = None

    def _adapter_in_place(self) -> nn.Module | None:
        """The PEFT layer around the weight, if it still is; it may outlive that by as long as nothing collects it."""
        if self.adapter is None:
            return None
        module, name, outermost = self.place[0](), self.place[1], self.place[2]()
        return self.adapter() if module is not None and module._modules.get(name) is outermost is not None else None

    @property
    def is_merged(self) -> bool:
        """Whether an adapter of the layer around the weight counts as merged into it."""
        layer = self._adapter_in_place()
        return layer is not None and layer.merged

    @property
    def is_unmerged(self) -> bool:
        """Whether there is such a layer and none counts as merged."""
        layer = self._adapter_in_place()
        return layer is not None and not layer.merged


def stored_weight(param: Parameter) -> StoredWeight | None:
    """The facts about a stored parameter; None for others."""
    return sharded.known(param).stored


def value_dtype(param: Parameter) -> torch.dtype:
    """The dtype of a ZeRO-3 parameter's values, where its shard may hold codes."""
    stored = stored_weight(param)
    return sharded.shard_dtype(param) if stored is None else stored.dtype


def store_format(frozen: FrozenConfig) -> WireFormat | None:
    """The format of a "frozen" section; None for "none"."""
    if frozen.format == "none":
        return None
    if frozen.format in FIXED_BLOCKS:
        return make_format(frozen.format)
    if frozen.scales == "tensor":
        return make_format(frozen.format, scales="tensor")
    return make_format(frozen.format, block_size=frozen.block_size, double_quantize=frozen.double_quantize)


def part_numel_of(numel: int, ranks: int, granule: int) -> int:
    """Elements of a rank's part: whole granules, as few as make `ranks` parts cover `numel` elements."""
    return -(-numel // (ranks * granule)) * granule


def ranks_of(param: Parameter) -> int:
    """How many ranks a ZeRO-3 parameter is cut over."""
    return dist.get_world_size(sharded.group(param))


def rank_in(param: Parameter) -> int:
    return dist.get_rank(sharded.group(param))


# -- to codes and back -----------------------------------------------------------------------------------------------


@torch.no_grad()
def store(param: Parameter, wire_format: WireFormat) -> None:
    """Replace a ZeRO-3 parameter's 16- or 32-bit shard by codes. Collective: the weight is gathered for it."""
    param.all_gather()
    part_numel = part_numel_of(sharded.numel(param), ranks_of(param), wire_format.granule)
    stored = StoredWeight(wire_format, sharded.shard_dtype(param), part_numel)
    shard = sharded.shard(param)
    payload = torch.empty(wire_format.payload_bytes(part_numel), dtype=torch.uint8, device=shard.device)
    _encode_own_part(param, stored, payload)
    sharded.remember(param, stored=stored)
    sharded.leave_between_steps(param)  # DeepSpeed would keep small ones gathered, in 16 bits
    sharded.replace_shard(param, payload.pin_memory() if shard.is_pinned() else payload, part_numel)
    _drop_values(param)


@torch.no_grad()
def unstore(param: Parameter) -> None:
    """Give a stored parameter a shard of its own dtype again, with the decoded values. Collective."""
    gather_stored([param])
    own = slice_of_rank(param.data.reshape(-1), rank_in(param), ranks_of(param)).to(sharded.shard(param).device)
    sharded.remember(param, stored=None)
    sharded.replace_shard(param, own)
    _drop_values(param)


def _encode_own_part(param: Parameter, stored: StoredWeight, out: Tensor) -> None:
    """Write the payload of this rank's part of a gathered parameter to `out`, on any device."""
    first = rank_in(param) * stored.part_numel
    payload = out if out.device == param.data.device else torch.empty_like(out, device=param.data.device)
    stored.wire_format.encode_part(param.data.reshape(-1), first, stored.part_numel, payload)
    if payload is not out:
        out.copy_(payload)


def _drop_values(param: Parameter) -> None:
    sharded.free(param)
    sharded.set_dropped(param)
    note_version(param)


# -- DeepSpeed's gather and partition, for stored parameters ---------------------------------------------------------


@torch.no_grad()
def gather_stored(params: Sequence[Parameter]) -> None:
    """Decode stored parameters into their full shapes, complete on the current stream. Collective, one message."""
    for param in params:
        check_untouched(param)
    for members in _by_group(sharded.missing(params)):
        device = members[0].device
        own = torch.cat([sharded.shard(param).to(device) for param in members])
        gathered = own.new_empty(ranks_of(members[0]) * own.numel())
        dist.all_gather_into_tensor(gathered, own, group=sharded.group(members[0]))
        parts = gathered.view(-1, own.numel()).split([sharded.shard(param).numel() for param in members], dim=1)
        for param, rows in zip(members, parts):
            decode_rows_into(param, rows)


def _by_group(params: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Parameters by the process group that they are partitioned over."""
    by_group: dict[int, list[Parameter]] = defaultdict(list)
    for param in params:
        by_group[id(sharded.group(param))].append(param)
    return by_group.values()


def decode_rows_into(param: Parameter, rows: Tensor) -> None:
    """Make a stored parameter available: `rows` is uint8 [ranks, payload bytes], in the order of the ranks."""
    stored = stored_weight(param)
    flat = stored.wire_format.decode_rows(rows, stored.part_numel, stored.dtype).view(-1)
    sharded.set_full(param, flat[: sharded.numel(param)].view(sharded.shape(param)))
    note_version(param)


@torch.no_grad()
def partition_stored(
    params: Sequence[Parameter], has_been_updated: bool = False, free_data: bool = True
) -> list[Parameter]:
    """Drop stored parameters' values; what was written to them is encoded if `has_been_updated`. Collective then.

    Returns those whose codes have changed, the same on every rank.

    Codes that decode to the values that are there stay as they are. An adapter that PEFT merges is taken out again bit
    for bit: the codes from before the merge are kept until its layer counts as unmerged.

    Raises:
        RuntimeError: a parameter was written in place, and `has_been_updated` is not set; or an adapter counts as
            merged on some ranks only. The values are dropped and the codes stay as they were.
    """
    available = sharded.full(params)
    try:
        if has_been_updated:
            return [param for members in _by_group(available) for param in _take_over(members)]
        for param in available:
            check_untouched(param)
        return []
    finally:
        for param in params:
            if free_data and sharded.is_full(param):
                sharded.free(param)
            sharded.set_dropped(param)
            note_version(param)


def _take_over(params: Sequence[Parameter]) -> list[Parameter]:
    """Encode gathered parameters of one process group whose values were written, and return them. Collective.

    Every rank encodes its part as soon as any of them saw another value in its own: scales may depend on the whole
    tensor, and codes must not depend on how it is cut.
    """
    flags = [(not _decodes_to_own_part(p), stored_weight(p).is_merged, not stored_weight(p).is_merged) for p in params]
    on_any_rank = torch.tensor(flags, dtype=torch.int32, device=params[0].device)
    dist.all_reduce(on_any_rank, op=dist.ReduceOp.MAX, group=sharded.group(params[0]))
    found = on_any_rank.tolist()
    for param, (_, merged, unmerged) in zip(params, found):
        if merged and unmerged:
            raise RuntimeError(
                f"an adapter is merged into {_name_of(param)} on some ranks only; call merge_adapter() and "
                "unmerge_adapter() on every rank"
            )
    written = []
    for param, (changed, merged, _) in zip(params, found):
        stored, shard = stored_weight(param), sharded.shard(param)
        held, stored.holds_merged = stored.holds_merged, bool(merged)
        if stored.before_merge is not None and stored.is_unmerged:
            shard.data.copy_(stored.before_merge)
            stored.before_merge = None
            written.append(param)
            continue
        if not merged:
            stored.before_merge = None  # the layer around the weight is gone: what it merged stays
        elif not held:
            stored.before_merge = shard.data.clone()
        if changed:
            _encode_own_part(param, stored, shard.data)
            written.append(param)
    return written


def _decodes_to_own_part(param: Parameter) -> bool:
    """Whether this rank's codes decode to what a gathered parameter holds in its part."""
    stored = stored_weight(param)
    first = rank_in(param) * stored.part_numel
    now = param.data.reshape(-1)[first : first + stored.part_numel]
    row = sharded.shard(param).to(param.data.device).view(1, -1)
    decoded = stored.wire_format.decode_rows(row, stored.part_numel, stored.dtype).view(-1)[: now.numel()]
    return now.dtype == decoded.dtype and torch.equal(now, decoded)


# -- writes that would be lost ---------------------------------------------------------------------------------------


def note_version(param: Parameter) -> None:
    """Remember how often a stored parameter has been written by now."""
    stored = stored_weight(param)
    if stored is not None:
        stored.version = param._version


@torch.compiler.disable
def note_parametrized(name: str, param: Parameter, module: nn.Module, *_) -> None:
    """Take it that a parametrization which is there has set the parameter to itself: torch's do when they are
    registered, and PEFT registers those of `target_parameters` for each forward of the module."""
    stored = stored_weight(param)
    if stored is not None and is_parametrized(module, name) and param._version == stored.version + 1:
        stored.version = param._version


def check_untouched(param: Parameter) -> None:
    """Raise RuntimeError where a stored parameter was written in place since the plugin last had it in its hands.

    What was written is dropped: a kept unit would compute with it until its next gather. While a model is made nothing
    is checked: it may initialize what is partitioned by then, that is, empty tensors, as with stock.
    """
    stored = stored_weight(param)
    if param._version != stored.version and sharded.under_construction() is None:
        sharded.set_dropped(param, param.data.new_empty(0))
        stored.version = param._version
        raise RuntimeError(
            f"{_name_of(param)} is stored as {stored.wire_format!r} codes and was written in place, which would be "
            "lost: write to it inside deepspeed.zero.GatheredParameters(..., modifier_rank=0); add adapters of "
            "matrices as parameters before the engine is made"
        )


def check_usable(param: Parameter) -> None:
    """Raise RuntimeError where a stored parameter may not be computed with.

    It was told to require gradients, or its codes and the PEFT layer around it disagree on whether an adapter is
    merged: merging inside GatheredParameters without modifier_rank does not reach the codes.
    """
    stored = stored_weight(param)
    if param.requires_grad:
        raise RuntimeError(
            f"{_name_of(param)} is stored as {stored.wire_format!r} codes and cannot be trained; set "
            f'requires_grad to False again, or leave it out of the store with "{SECTION}.frozen.skip_modules"'
        )
    if stored.holds_merged and stored.is_unmerged:
        raise RuntimeError(
            f"the codes of {_name_of(param)} still hold an adapter that counts as unmerged; unmerge inside "
            "deepspeed.zero.GatheredParameters(..., modifier_rank=0), or enter it afterwards, which takes it out too"
        )
    if stored.is_merged and not stored.holds_merged:
        raise RuntimeError(
            f"an adapter counts as merged into {_name_of(param)}, but its codes do not hold it; merge inside "
            "deepspeed.zero.GatheredParameters(..., modifier_rank=0), or unmerge before the context without it ends"
        )


def _name_of(param: Parameter) -> str:
    return sharded.known(param).name or f"the parameter of shape {tuple(sharded.shape(param))}"


def name_stored(named_params: Iterable[tuple[str, Parameter]]) -> None:
    for name, param in named_params:
        if stored_weight(param) is not None:
            sharded.remember(param, name=name)
