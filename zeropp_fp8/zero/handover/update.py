"""An update of the weights of a group of tensors that are gathered together, with a version and a checksum.

The first one has the weights themselves. A later one has, of each rank of the trainer, how its own part differs from
what was sent last (formats/exact.py): 0.08 to 0.24 bits per weight in bf16 at 1e-6 (benchmarks/results/weight_changes).
To apply it an engine needs the weights of the version before, and no more (receiver.py).
Nothing here needs DeepSpeed: an engine's process has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zeropp_fp8.formats import UnquantizedFormat
from zeropp_fp8.zero.gather.difference import Rows
from zeropp_fp8.zero.gather.storage import BITS

DIFFERENCES = "differences"  # the name of what is sent instead of weights
_AT_ONCE = 1 << 22  # elements that a checksum takes at a time, in 64 bits each
Ranges = Sequence[tuple[int, int]]  # (first element, how many)


@dataclass
class Header:
    """All of an update but its tensors; `vars` of it are JSON.

    Attributes:
        version: of the weights; after: the one that it is to be applied to, None where the weights themselves come.
        number, count: of the group, and of groups.
        names, dtype_names, shapes: of the weights.
        ranges, sizes: by rank of the trainer: of each tensor the elements that the rank has, and the bytes of its
            differences, 0 where there are none.
        checksum: of the weights then (`checksum_of`).
    """

    version: int
    after: int | None
    number: int
    count: int
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    ranges: list[list[Ranges]]
    sizes: list[int]
    checksum: int


class Update(NamedTuple):
    """A group of tensors of a version: as they are, by name, or DIFFERENCES, uint8, of one rank after the other."""

    header: Header
    tensors: dict[str, Tensor]


def sent_tensors(header: Header) -> dict[str, tuple[torch.dtype, list[int]]]:
    """{name: (dtype, shape)} of an update's tensors."""
    if header.after is not None:
        return {DIFFERENCES: (torch.uint8, [sum(header.sizes)])} if sum(header.sizes) else {}
    dtypes = (getattr(torch, name) for name in header.dtype_names)
    return dict(zip(header.names, zip(dtypes, header.shapes)))


class Layout:
    """Parts of a group's tensors in a row of bytes, one after the other, and in the differences of two such rows.

    Args:
        dtypes, numels: of the parts.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], numels: Sequence[int], device: torch.device) -> None:
        formats = [UnquantizedFormat(dtype) for dtype in dtypes]
        self._dtypes, self._numels, self._device = dtypes, numels, device
        self._sizes = [each.payload_bytes(numel) for each, numel in zip(formats, numels)]
        self._rows = Rows(formats, numels, device)

    def row(self, values: Iterable[Tensor]) -> Tensor:
        """uint8 [1, bytes]; gaps are 0."""
        row = torch.zeros(1, sum(self._sizes), dtype=torch.uint8, device=self._device)
        for place, part in zip(self.values(row), values):
            place.copy_(part)
        return row

    def values(self, row: Tensor) -> list[Tensor]:
        """The parts in a row, each flat."""
        pieces = row.view(-1).split(self._sizes)
        return [piece.view(dtype)[:numel] for piece, dtype, numel in zip(pieces, self._dtypes, self._numels)]

    def differences(self, row: Tensor, held: Tensor, checksum: Tensor) -> tuple[Tensor, int]:
        """How a row differs from another one, uint8, without bytes where it does not; and the checksum, on the host."""
        measured = self._rows.measure(row, held)
        differs = (row != held).any().long().view(1)
        num_bytes, differs, summed = torch.cat([measured.row_bytes, differs, checksum.view(1)]).tolist()
        found = row.new_zeros(1, num_bytes if differs else 0)
        if differs:
            self._rows.encode(row, held, measured, found)
        return found[0], summed

    def add(self, differences: Tensor, held: Tensor) -> None:
        """Make of `held` the row of which the differences from it were made."""
        self._rows.add(differences.unsqueeze(0), held)


def write_ranges(flat: Tensor, ranges: Ranges, values: Tensor) -> None:
    """Write the elements of a rank to a flat tensor."""
    for (first, numel), piece in zip(ranges, values.split([numel for _, numel in ranges])):
        flat[first : first + numel] = piece


def checksum_of(tensors: Sequence[Tensor], ranges: Sequence[Ranges]) -> Tensor:
    """int64 []: the sum, mod 2^64, of the bits of each element times an odd number; of the whole, those of its parts.

    No change of a single element leaves it as it was, nor does one that exchanges two elements of a tensor.

    Args:
        tensors: of a group, in its order; of each the elements in `ranges`, flat.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)  # sums of integers wrap
    for number, (values, of_tensor) in enumerate(zip(tensors, ranges)):
        bits = values.view(BITS[values.element_size()])
        for (first, numel), piece in zip(of_tensor, bits.split([numel for _, numel in of_tensor])):
            for at in range(0, numel, _AT_ONCE):
                chunk = piece[at : at + _AT_ONCE]
                places = torch.arange(first + at, first + at + len(chunk), device=bits.device)
                total += (chunk * (2 * places + 1)).sum() * (2 * number + 1)
    return total
