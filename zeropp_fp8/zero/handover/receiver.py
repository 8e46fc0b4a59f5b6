"""Weights that updates keep equal to those of a trainer, in an engine's process."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.zero.handover.update import DIFFERENCES, Header, Layout, Update, checksum_of, sent_tensors, write_ranges


class MissedUpdate(RuntimeError):
    """An update is of weights that are not here; all of them have to come."""


class Receiver:
    """Applies updates in their order, and says where one is missing.

    Args:
        weights: to be written to in place, under the names of the checkpoint, such as a model's `state_dict()`. None:
            it keeps its own, of whatever comes.
        device: of its own weights.

    Attributes:
        weights: as of `version`, which is None before the first one is whole, and while one is written.
    """

    def __init__(self, weights: MutableMapping[str, Tensor] | None = None, device: torch.device | str = "cpu") -> None:
        self._takes_all, self._device = weights is None, torch.device(device)
        self.weights: MutableMapping[str, Tensor] = {} if weights is None else weights
        self.version: int | None = None
        self._due = None, 0  # version and number of the group that is to come
        self._before: int | None = None  # the version that was here when this one began
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._names: dict[int, str] = {}  # by address of a weight
        self.checksums: list[int] = []  # of the groups of the last version

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Make the weights of a group those of the trainer.

        Raises:
            MissedUpdate: it is not the next one, of version or group, and nothing was written; or the weights have
                another checksum than the trainer's, because something else has written to them.
            ValueError: there is no such weight here, it has another shape or dtype, or two of them are tied here alone.
        """
        header = update.header
        version, number, after = header.version, header.number, header.after
        before = self.version if number == 0 else self._before
        if number and self._due != (version, number):
            raise MissedUpdate(
                f"group {number} of version {version} came, and {self._due[1]} of {self._due[0]} was due"
            )
        if after is not None and after != before:
            raise MissedUpdate(f"version {version} differs from version {after}, and {before} is here")
        self._before, self.version, self._due = before, None, (None, 0)
        if number == 0:
            self._names, self.checksums = {}, []
            if self._takes_all and after is None:
                self.weights.clear()
        kept = [self._weight(*meta) for meta in zip(header.names, header.dtype_names, header.shapes)]
        if after is None:
            for name, weight in zip(header.names, kept):
                weight.copy_(update.tensors[name].view(-1))
        elif update.tensors:
            self._add(header, kept, update.tensors[DIFFERENCES])
        if int(checksum_of(kept, [[(0, weight.numel())] for weight in kept])) % 2**64 != header.checksum:
            raise MissedUpdate(
                f"{', '.join(header.names)} of version {version} have another checksum than where "
                "they come from: something else has written to them, or bytes were lost"
            )
        self.checksums.append(header.checksum)
        if number + 1 == header.count:
            self.version = version
        else:
            self._due = version, number + 1

    def receive(self, header: dict[str, Any], group) -> None:
        """Apply an update whose tensors come over a group, all of them whatever fails: the trainer waits for that.

        Args:
            header: `vars` of a Header; group: has `broadcast(tensor, src)`, whose rank 0 is the trainer.
        """
        device = self._device if self._takes_all else next(iter(self.weights.values())).device
        update = Update(Header(**header), {})
        for name, (dtype, shape) in sent_tensors(update.header).items():
            update.tensors[name] = torch.empty(shape, dtype=dtype, device=device)
            group.broadcast(update.tensors[name], src=0)
        self.apply(update)

    def _weight(self, name: str, dtype_name: str, shape: list[int]) -> Tensor:
        """A weight, flat."""
        dtype = getattr(torch, dtype_name)
        if self._takes_all and name not in self.weights:
            self.weights[name] = torch.empty(shape, dtype=dtype, device=self._device)
        weight = self.weights.get(name)
        if weight is None or (weight.dtype, list(weight.shape)) != (dtype, list(shape)):
            here = "nothing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
            raise ValueError(f"{name} of {dtype} {list(shape)} came, and {here} of that name is here")
        other = self._names.setdefault(weight.data_ptr(), name) if weight.numel() else name
        if other != name:
            raise ValueError(f"{other} and {name} came with numbers of their own, and are one tensor here: untie them")
        return weight.detach().view(-1)

    def _add(self, header: Header, weights: list[Tensor], differences: Tensor) -> None:
        """Add the differences of each rank of the trainer to its part of the weights."""
        device = weights[0].device
        for rank, (ranges, brought) in enumerate(zip(header.ranges, differences.split(header.sizes))):
            if not len(brought):
                continue
            parts = [
                torch.cat([weight[first : first + numel] for first, numel in of_weight] or [weight[:0]])
                for weight, of_weight in zip(weights, ranges)
            ]
            numels = [part.numel() for part in parts]
            key = header.number, rank, *numels
            if key not in self._layouts:
                self._layouts[key] = Layout([part.dtype for part in parts], numels, device)
            row = self._layouts[key].row(parts)
            self._layouts[key].add(brought.to(device), row)
            for weight, of_weight, values in zip(weights, ranges, self._layouts[key].values(row)):
                write_ranges(weight, of_weight, values)
