"""The weights of a trainer as updates (update.py): all at first, then what has changed since the last hand-over."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeropp_fp8.zero.handover.handed import Handed
from zeropp_fp8.zero.handover.source import Parts, WeightSource
from zeropp_fp8.zero.handover.update import DIFFERENCES, Header, Layout, Ranges, Update, checksum_of, write_ranges


class Updates(Handed):
    """All that an engine needs to have the weights of now; all of them at first. Made on every rank.

    Iterating gives the Update of a group of tensors on rank 0, and None on others. Adapters are always sent
    whole. `version` is that of the last hand-over.
    """

    def __init__(self, source: WeightSource, version: int = 0) -> None:
        super().__init__(source)
        self.version = version
        self._layouts: dict[int, Layout] = {}

    def __iter__(self) -> Iterator[Update | None]:
        if self._source.gives_adapters:  # another one, with other tensors, may be active now
            self.forget()
        return super().__iter__()

    def _found(self, parts: Parts) -> tuple[tuple[bool, list[Ranges], int], Tensor]:
        """Whether weights are sent whole, their ranges and checksum; and the weights, or how they differ."""
        number, values = parts.number, [part.values.contiguous() for part in parts.of_tensors]
        ranges = [part.ranges for part in parts.of_tensors]
        summed = checksum_of(values, ranges)
        if number not in self._held:
            dtypes, numels = [each.dtype for each in values], [each.numel() for each in values]
            self._layouts[number] = Layout(dtypes, numels, self._source.session.device)
            self._held[number] = self._layouts[number].row(values)
            return (True, ranges, int(summed)), self._held[number][0]
        layout, held = self._layouts[number], self._held[number]
        row = layout.row(values)
        differences, summed = layout.differences(row, held, summed)
        held.copy_(row)
        return (False, ranges, summed), differences

    def _made(self, parts: Parts, told: list[tuple[bool, list[Ranges], int]], came: list[Tensor]) -> Update:
        of_tensors, whole = parts.of_tensors, told[0][0]
        header = Header(
            self.version + 1,
            after=None if whole else self.version,
            number=parts.number,
            count=parts.count,
            names=[part.name for part in of_tensors],
            dtype_names=[str(part.values.dtype).removeprefix("torch.") for part in of_tensors],
            shapes=[list(part.shape) for part in of_tensors],
            ranges=[] if whole else [ranges for _, ranges, _ in told],
            sizes=[] if whole else [len(of_rank) for of_rank in came],
            checksum=sum(summed for _, _, summed in told) % 2**64,
        )
        if not whole:
            return Update(header, {DIFFERENCES: torch.cat(came)} if any(header.sizes) else {})
        tensors = {part.name: part.values.new_empty(part.shape) for part in of_tensors}
        for (_, ranges, _), of_rank in zip(told, came):
            numels = [sum(numel for _, numel in of_tensor) for of_tensor in ranges]
            layout = Layout([part.values.dtype for part in of_tensors], numels, of_rank.device)
            for tensor, values, of_tensor in zip(tensors.values(), layout.values(of_rank), ranges):
                write_ranges(tensor.view(-1), of_tensor, values)
        return Update(header, tensors)
