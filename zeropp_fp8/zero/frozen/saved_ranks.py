"""Frozen parameters in a DeepSpeed checkpoint, across the files of its ranks."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.zero.fragment import QuantizedFragment

FRAGMENTS = "frozen_param_fragments"  # DeepSpeed's key: {name: slice} of a rank's frozen parameters
Fragment = Tensor | QuantizedFragment

# Besides tensors, numbers, text and what holds them, of which all is made that DeepSpeed saves as model states; only a
# `client_state` may hold more.
_ALLOWED = [QuantizedFragment]


def read_states(path: str | os.PathLike, trusted: bool = False) -> dict:
    """A file of model states, on the CPU. Tensors are mapped: what is not looked at takes no memory.

    Args:
        trusted: unpickle whatever the file holds, which may run code. For what DeepSpeed, which does so, reads too.

    Raises:
        ValueError: the file is not trusted, and asks for more than model states are made of; or it holds none.
    """
    states, why = None, "there is something else in it"
    with torch.serialization.safe_globals(_ALLOWED):
        try:
            states = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=not trusted)
        except Exception as error:  # of torch, pickle or the system, for a file that is cut or damaged
            if getattr(error, "filename", None) or isinstance(error, MemoryError):
                raise
            if isinstance(error, pickle.UnpicklingError) and not trusted:
                found = re.search(r"GLOBAL (\S+)", str(error))
                asked = found[1] if found else "what torch.save does not write"
                said = f"{path} asks for {asked}, which may run code; if you trust the file, add --trust"
                raise ValueError(said) from None
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
    if not isinstance(states, dict) or "dp_world_size" not in states:
        remedy = "save the checkpoint again, or take another tag"
        raise ValueError(f"{path} is cut, damaged or no file of model states ({why}): {remedy}")
    return states


class SavedRanks:
    """The frozen parameters of each rank of a checkpoint; a file is read when it is asked for.

    Args:
        path_of: the file of model states of a rank.
        ranks: how many there are.
        known: what has been read already, by rank.
        trusted: of the files, as in `read_states`.
    """

    def __init__(
        self, path_of: Callable[[int], str], ranks: int, known: dict[int, dict[str, Fragment]], trusted: bool
    ) -> None:
        self.ranks, self._trusted = ranks, trusted
        self._path_of = path_of
        self._read = dict(known)

    def missing(self, ranks: Sequence[int]) -> list[str]:
        """Files that are not there, of those of `ranks` that have not been read."""
        paths = (self._path_of(rank) for rank in ranks if rank not in self._read)
        return [path for path in paths if not os.path.isfile(path)]

    def of_rank(self, rank: int) -> dict[str, Fragment]:
        """{name: slice, or codes} of a rank; empty where it was saved with exclude_frozen_parameters."""
        if rank not in self._read:
            self._read[rank] = read_states(self._path_of(rank), self._trusted).get(FRAGMENTS) or {}
        return self._read[rank]

    def of(self, name: str) -> SavedParameter:
        return SavedParameter(self, name)


class SavedParameter(Sequence):
    """One parameter on each rank: its payload, or its slice."""

    def __init__(self, saved: SavedRanks, name: str) -> None:
        self._saved, self._name = saved, name

    def __len__(self) -> int:
        return self._saved.ranks

    def __getitem__(self, rank: int) -> Tensor:
        fragment = self.fragment(rank)
        return fragment.payload if isinstance(fragment, QuantizedFragment) else fragment

    def fragment(self, rank: int) -> Fragment:
        return self._saved.of_rank(rank)[self._name]


def slice_of(parts: Callable[[int], Tensor], part_numel: int, numel: int, rank: int, ranks: int) -> Tensor:
    """DeepSpeed's slice of a tensor: elements [rank * S, (rank + 1) * S) with S = ceil(numel / ranks), then zeros.

    Args:
        parts: gives the values of a part, flat [part_numel].
        numel: elements of the tensor, which ends in one of its parts.
    """
    size = slice_numel(numel, ranks)
    position, end = min(rank * size, numel), min((rank + 1) * size, numel)
    taken = []
    while position < end:
        index, inside = divmod(position, part_numel)
        length = min(part_numel - inside, end - position)
        taken.append(parts(index)[inside : inside + length])
        position += length
    if not taken:
        return torch.zeros_like(parts(0)[:1]).expand(size).clone()
    return F.pad(torch.cat(taken), (0, size - sum(piece.numel() for piece in taken)))
