"""Checkpoints of frozen weights that are stored as codes: what is saved of them, and how they are loaded.

DeepSpeed saves each rank's slice of a frozen parameter in that rank's file of model states. For a stored weight a
QuantizedFragment takes its place. It is loaded bit for bit:

* by as many ranks: each loads its own;
* by another number of ranks, from a universal checkpoint, or (fewer ranks) without optimizer states: each reads what it
  needs from all ranks' files, and cuts it anew at granules. DeepSpeed leaves frozen parameters of a universal
  checkpoint alone; with stored weights all of them are loaded, also those in 16 or 32 bits.

Slices of numbers, from a checkpoint without codes, are gathered and encoded, as storing the weight afresh does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.config import SECTION, ConfigError
from zeropp_fp8.formats.recut import cut_again
from zeropp_fp8.zero.fragment import EXPORT_COMMAND, QuantizedFragment, has_codes
from zeropp_fp8.zero.frozen.saved_ranks import FRAGMENTS, Fragment, SavedParameter, SavedRanks, read_states, slice_of
from zeropp_fp8.zero.frozen.store import StoredWeight, note_version, stored_weight, value_dtype


def payload_to_save(param: Parameter) -> Tensor:
    """This rank's codes of a stored parameter, from before an adapter was merged into it."""
    before_merge = stored_weight(param).before_merge
    return sharded.shard(param) if before_merge is None else before_merge


def fragment_of(name: str, param: Parameter) -> QuantizedFragment:
    """The entry of a stored parameter in a checkpoint."""
    stored = stored_weight(param)
    return QuantizedFragment(
        name=name,
        payload=payload_to_save(param).to("cpu", copy=True),  # a view would be saved with all that lies around it
        format_fields=stored.wire_format.options(),
        part_numel=stored.part_numel,
        full_shape=tuple(sharded.shape(param)),
        value_dtype=stored.dtype,
        rank=dist.get_rank(sharded.group(param)),
        ranks=dist.get_world_size(sharded.group(param)),
    )


class FrozenLoad:
    """Loading the frozen parameters of one checkpoint into an engine of the plugin.

    Args:
        load_dir, tag: where the checkpoint is; None if only one rank's states are at hand.
    """

    def __init__(self, engine, load_dir: str | None = None, tag: str | None = None) -> None:
        self._engine, self._load_dir, self._tag = engine, load_dir, tag
        self._params = {engine.param_names[p]: p for p in engine.module.parameters() if p in engine.param_names}
        topology = engine.zeropp_fp8_session.topology
        self._rank, self._ranks, self._device = topology.rank, topology.world_size, engine.zeropp_fp8_session.device

    def concerns(self, states: dict) -> bool:
        """Whether codes are involved; otherwise DeepSpeed's own loading is left alone."""
        fragments = states.get(FRAGMENTS)
        if fragments is None:  # saved with exclude_frozen_parameters
            return False
        return has_codes(fragments) or any(stored_weight(p) is not None for p in self._params.values())

    def load_module(
        self,
        stock: Callable,
        states: dict,
        strict: bool = True,
        custom_load_fn: Callable | None = None,
        fetch_z3_params: bool = False,
        **options,
    ) -> None:
        """Load this rank's states as DeepSpeed's `load_module_state_dict` (`stock`) does. Collective.

        Raises:
            ConfigError: the checkpoint has codes of another format than a parameter is stored in.
            RuntimeError: the checkpoint does not fit the model, files are missing, or an adapter is merged.
        """
        parts = self._parts(states, self._rank)
        module, gathered = states["module"], nullcontext()
        if fetch_z3_params:  # `module` holds full weights
            # DeepSpeed would gather stored weights too, all at once, to write decoded numbers to them.
            module = {name: self._nothing_if_stored(name, value) for name, value in module.items()}
            missing = sharded.missing(self._params.values())
            gathered = sharded.gathered([p for p in missing if stored_weight(p) is None], modifier_rank=0)
        with gathered:
            rest = {**states, "module": module, FRAGMENTS: None}
            stock(rest, strict=strict, custom_load_fn=custom_load_fn, **options)
        self._write(parts)

    def load_universal(self, stock: Callable) -> tuple:
        """Load a universal checkpoint, of which `stock` loads what DeepSpeed does; returns its result. Collective.

        Raises:
            As `load_module`.
        """
        path = self._path_of(0)
        # DeepSpeed says so if it is not there.
        states = read_states(path, trusted=True) if os.path.isfile(path) else {}
        parts = self._parts(states, 0) if self.concerns(states) else {}
        result = stock()
        self._write(parts)
        return result

    def _nothing_if_stored(self, name: str, value: Tensor) -> Tensor:
        """A full weight; of a stored one what its partitioned parameter holds."""
        param = self._params.get(name)
        stored = param is not None and stored_weight(param) is not None
        return torch.empty(0, dtype=value.dtype, device="cpu") if stored else value

    def _path_of(self, rank: int) -> str:
        if self._load_dir is None:
            raise RuntimeError(
                "the states of one rank do not hold what other ranks have of frozen weights: call load_checkpoint "
                "instead of load_module_state_dict"
            )
        return self._engine._get_ckpt_name(self._load_dir, self._tag, pp_placeholder=str(rank))

    # -- checks, before anything is changed --------------------------------------------------------------------------

    def _check(self, fragments: dict[str, Fragment], ranks: int) -> None:
        """Raises on every rank alike: ranks differ in which parts they have, not in what these are."""
        for name, param in self._params.items():
            stored, fragment = stored_weight(param), fragments.get(name)
            if isinstance(fragment, QuantizedFragment):
                _check_codes(fragment, param, stored)
            elif fragment is not None and fragment.numel() != slice_numel(sharded.numel(param), ranks):
                raise RuntimeError(
                    f"{name}: the checkpoint has slices of {fragment.numel()} elements on {ranks} ranks, this model's "
                    f"tensor has {sharded.numel(param)} elements"
                )
            elif fragment is None and not param.requires_grad:
                raise RuntimeError(
                    f"the checkpoint has no frozen parameter {name}: it was trained there, or belongs to another model"
                )
            if stored is not None and stored.is_merged:
                raise RuntimeError(
                    f"an adapter is merged into {name}, and a checkpoint has the weight without it: unmerge adapters "
                    "before load_checkpoint"
                )

    def _check_files(self, saved: SavedRanks) -> None:
        """Raise RuntimeError on every rank where one of them lacks files that it must read. Collective."""
        needed = range(saved.ranks) if saved.ranks != self._ranks else [self._rank]
        missing = saved.missing(needed)
        anywhere = torch.tensor([len(missing)], device=self._device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._engine.zeropp_fp8_session.topology.group)
        if anywhere.item():
            lacks = f"this one lacks {missing[0]}" if missing else "this one has them"
            raise RuntimeError(
                f"frozen weights that {saved.ranks} ranks saved are read by {self._ranks} ranks from the files of all, "
                f"and some rank lacks some ({lacks}): put the checkpoint where every rank can read it"
            )

    # -- what goes into this rank's shards ---------------------------------------------------------------------------

    def _parts(self, states: dict, saved_by: int) -> dict[str, Tensor]:
        """For each frozen parameter the payload, or the slice, that belongs into this rank's shard. Collective."""
        fragments: dict[str, Fragment] = states[FRAGMENTS]
        codes = next((f for f in fragments.values() if isinstance(f, QuantizedFragment)), None)
        ranks = states["dp_world_size"] if codes is None else codes.ranks
        saved = SavedRanks(self._path_of, ranks, {saved_by: fragments}, trusted=True)
        self._check(fragments, saved.ranks)
        self._check_files(saved)
        frozen = ((name, param) for name, param in self._params.items() if not param.requires_grad)
        return {name: self._part(param, saved.of(name), fragments[name]) for name, param in frozen}

    def _part(self, param: Parameter, saved: SavedParameter, example: Fragment) -> Tensor:
        """This rank's payload or slice of one parameter; `example` is what some rank has of it."""
        stored, as_many = stored_weight(param), len(saved) == self._ranks
        if stored is None:
            own = saved[self._rank] if as_many else self._slice(param, saved)
            return sharded.known(param).wire.unit.storage.from_slice(param, own)
        if not isinstance(example, QuantizedFragment):
            return self._encoded(param, stored, saved)
        if as_many:
            return saved[self._rank]
        first = self._rank * stored.part_numel
        return cut_again(stored.wire_format, saved, example.part_numel, first, stored.part_numel)

    def _slice(self, param: Parameter, saved: SavedParameter) -> Tensor:
        numel = sharded.numel(param)
        return slice_of(saved.__getitem__, slice_numel(numel, len(saved)), numel, self._rank, self._ranks)

    def _encoded(self, param: Parameter, stored: StoredWeight, saved: SavedParameter) -> Tensor:
        """This rank's payload of a weight that was saved in slices of numbers. Collective."""
        own = saved[self._rank] if len(saved) == self._ranks else self._slice(param, saved)
        own = own.to(self._device, stored.dtype)
        full = own.new_empty(self._ranks * own.numel())
        dist.all_gather_into_tensor(full, own, group=sharded.group(param))
        payload = torch.empty(sharded.shard(param).numel(), dtype=torch.uint8, device=self._device)
        first = self._rank * stored.part_numel
        stored.wire_format.encode_part(full[: sharded.numel(param)], first, stored.part_numel, payload)
        return payload

    @torch.no_grad()
    def _write(self, parts: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            param = self._params[name]
            sharded.shard(param).copy_(part)
            stored = stored_weight(param)
            if stored is not None:
                stored.before_merge, stored.holds_merged = None, False
                note_version(param)


def _check_codes(fragment: QuantizedFragment, param: Parameter, stored: StoredWeight | None) -> None:
    if fragment.full_shape != tuple(sharded.shape(param)):
        raise RuntimeError(
            f"{fragment.name} has the shape {fragment.full_shape} in the checkpoint and {tuple(sharded.shape(param))} "
            "in this model"
        )
    if stored is not None and repr(stored.wire_format) == repr(fragment.wire_format):
        return
    if stored is not None:
        here = f"as {stored.wire_format!r} codes"
    else:
        dtype = str(value_dtype(param)).removeprefix("torch.")
        here = f'in {dtype} ("format": "none", named in "skip_modules", or trained)'
    raise ConfigError(
        f'"{SECTION}.frozen.format": the checkpoint holds {fragment.name} as {fragment.wire_format!r} codes, this '
        f'engine keeps it {here}. Load it with the "frozen" section that it was saved with, or make a checkpoint of '
        f"numbers first, which can be loaded into every format: {EXPORT_COMMAND}"
    )
