"""Error feedback for the hop between nodes: the next gradient gets what quantization has dropped from this one.

The sender keeps, for each tensor, the difference between the intended values and the values that the receiver decodes,
in 8 bits with a scale per block (LoCo, arXiv 2407.04480, also uses 8 bits). Only the hop between nodes has a residual:
its codes have 4 bits, and the residual is only 1/ranks_per_node of the gradient. If each rank is a node, it is the
whole gradient: 1.02 bytes per parameter.

A residual is dropped (set to zero) when its gradient had NaN or Inf, or is sent in other slices; all are when a step is
skipped for overflow, when the loss scale, their unit, changes, and when a checkpoint of another world size is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats import WireFormat, make_format


@dataclass(frozen=True)
class Residuals:
    """Residuals of the tensors of one message, side by side: `PayloadLayout.encode` adds them and then replaces them.

    Attributes:
        wire_format: the format of all residuals.
        rows: uint8 [rows, row bytes].
        offsets, sizes: per tensor, in bytes of a row; the size is 0 if nothing is kept.
    """

    wire_format: WireFormat
    rows: Tensor
    offsets: Sequence[int]
    sizes: Sequence[int]

    def of(self, i: int) -> Tensor:
        """Return the residual of a tensor, uint8 [rows, size]."""
        return self.rows[:, self.offsets[i] : self.offsets[i] + self.sizes[i]]


class ErrorFeedback:
    """Keep 8-bit residuals by tensor key, on the sender.

    Args:
        block_size: elements that share a scale; kernels need the block size of the codes that are sent.
    """

    def __init__(self, block_size: int = 128) -> None:
        self._format = make_format("int8", block_size=block_size)
        self._payloads: dict[str, Tensor] = {}  # views of the messages' rows, or loaded ones
        self._messages: dict[tuple[str, ...], tuple[Residuals, dict[str, Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def num_bytes(self, rows: int, numel: int) -> int:
        """Return the bytes of the residual of a tensor that is sent as `rows` slices of `numel` elements."""
        return rows * self._format.payload_bytes(numel)

    def of(self, keys: Sequence[str], numels: Sequence[int], rows: int, device: torch.device) -> Residuals:
        """Return the residuals of a message, zeros at first. The caller writes the new residuals into them.

        Args:
            keys: keys of the message's tensors.
            numels: elements per slice of each tensor; 0 if nothing is kept of it.
            rows: number of slices.
        """
        held = self._messages.get(tuple(keys))
        if held is not None and all(self._payloads.get(key) is part for key, part in held[1].items()):
            return held[0]
        sizes = [self._format.payload_bytes(numel) for numel in numels]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        buffer = torch.zeros(rows, sum(sizes), dtype=torch.uint8, device=device)
        residuals, parts = Residuals(self._format, buffer, offsets, sizes), {}
        for i, key in enumerate(keys):
            if sizes[i]:
                parts[key], known = residuals.of(i), self._payloads.get(key)
                if known is not None and known.shape == parts[key].shape:  # loaded, or of another message until now
                    parts[key].copy_(known)
        self._payloads |= parts
        others = {names: message for names, message in self._messages.items() if not message[1].keys() & parts.keys()}
        self._messages = {**others, tuple(keys): (residuals, parts)}
        return residuals

    def reset(self) -> None:
        self._payloads.clear()
        self._messages.clear()

    def state_dict(self) -> dict[str, object]:
        """Return {"block_size", "residuals": payloads by key, on the CPU}."""
        residuals = {
            key: payload.clone(memory_format=torch.contiguous_format).cpu() for key, payload in self._payloads.items()
        }
        return {"block_size": self._format.block_size, "residuals": residuals}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load the result of `state_dict`; an empty state starts afresh.

        Raises:
            ValueError: the residuals have other blocks.
        """
        self.reset()
        # Older states hold the residuals alone, in blocks of 128; later ones have the blocks of the gradients.
        residuals = state.get("residuals", state)
        block_size = state.get("block_size", 128)
        if residuals and block_size != self._format.block_size:
            now = self._format.block_size
            raise ValueError(f"residuals are in blocks of {block_size}, gradients.block_size is {now}: set it back")
        self._payloads = dict(residuals)
