"""Cutting stored codes anew: the payloads of a tensor's parts, from those of its parts of another size, bit for bit.

A tensor that lies in equal parts on ranks (`WireFormat.encode_part`) is cut at granules, whose codes and scales do not
depend on the parts. What lies where in a payload does, so bytes are moved granule by granule; nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp_fp8.formats.base import WireFormat


def cut_again(wire_format: WireFormat, parts: Sequence[Tensor], part_numel: int, first: int, numel: int) -> Tensor:
    """The payload of the elements [first, first + numel) of a tensor.

    Args:
        parts: uint8 [payload_bytes(part_numel)] each, on a CPU: the parts of the tensor, in order. Only those that the
            elements lie in are asked for, and the first.
        part_numel: elements of each part.
        first, numel: multiples of the granule. What lies beyond the parts is encoded as zeros.

    Returns:
        uint8 [payload_bytes(numel)], what `encode_part` of the tensor writes.

    Raises:
        ValueError: a size is no multiple of the granule.
    """
    granule = wire_format.granule
    if part_numel % granule or part_numel <= 0:
        raise ValueError(f"{wire_format.name}: parts of {part_numel} elements are not cut at multiples of {granule}")
    payload = torch.empty(wire_format.payload_bytes(numel), dtype=torch.uint8, device="cpu")
    wire_format.encode_part(torch.zeros(1, dtype=torch.float32, device="cpu"), first, numel, payload)
    if numel == 0:
        return payload
    runs, part_runs = wire_format.granule_runs(numel), wire_format.granule_runs(part_numel)
    end = min(first + numel, len(parts) * part_numel)
    position = first
    while position < end:
        index, inside = divmod(position, part_numel)
        length = min(part_numel - inside, end - position)
        for (start, size), (part_start, part_size) in zip(runs, part_runs):
            into, source, count = (n // granule for n in (position - first, inside, length))
            taken = parts[index][part_start + source * part_size :][: count * part_size]
            payload[start + into * size :][: count * size] = taken
        position += length
    payload[wire_format.shared_bytes(numel)] = parts[0][wire_format.shared_bytes(part_numel)]
    return payload
