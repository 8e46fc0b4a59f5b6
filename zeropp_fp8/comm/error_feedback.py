"""Error feedback for the hop between nodes: what quantization dropped is added to the next gradient.

The sender keeps, for each tensor, the difference between what it wanted to send and what the receiver decoded, in 8
bits with a scale per block (LoCo, arXiv 2407.04480, keeps it in 8 bits too). Only the hop between nodes has one: there
the codes have 4 bits, and the residual is 1/ranks_per_node of the gradient: all of it, 1.02 bytes a parameter, where
each rank is a node.

Reset rule: a residual is dropped (zero) when its tensor's gradient held NaN or Inf, when a step is skipped for
overflow, when the loss scale changes (it is in units of the scaled gradient), and when a checkpoint of another world
size is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats import WireFormat, make_format


@dataclass(frozen=True)
class Residuals:
    """What is kept of the tensors of one message, side by side: `PayloadLayout.encode` adds it and writes it anew.

    Attributes:
        wire_format: of all of them.
        rows: uint8 [rows, row bytes].
        offsets, sizes: of each tensor, bytes in a row; a size of 0 where nothing is kept.
    """

    wire_format: WireFormat
    rows: Tensor
    offsets: Sequence[int]
    sizes: Sequence[int]

    def of(self, i: int) -> Tensor:
        """uint8 [rows, size]: what is kept of a tensor."""
        return self.rows[:, self.offsets[i] : self.offsets[i] + self.sizes[i]]


class ErrorFeedback:
    """8-bit residuals by tensor key, on the sender.

    Args:
        block_size: elements that share a scale; kernels need that of the codes which travel.
    """

    def __init__(self, block_size: int = 128) -> None:
        self._format = make_format("int8", block_size=block_size)
        self._payloads: dict[str, Tensor] = {}  # views of the messages' rows, or what was loaded
        self._messages: dict[tuple[str, ...], tuple[Residuals, dict[str, Tensor]]] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def num_bytes(self, rows: int, numel: int) -> int:
        """Bytes of the residual of a tensor that is sent as `rows` slices of `numel` elements."""
        return rows * self._format.payload_bytes(numel)

    def of(self, keys: Sequence[str], numels: Sequence[int], rows: int, device: torch.device) -> Residuals:
        """The residuals of a message: zeros where there were none. They rest where they are, to be written anew.

        Args:
            keys: of its tensors.
            numels: elements of a slice of each, 0 where nothing is to be kept.
            rows: slices.
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
                parts[key] = residuals.of(i)
                if key in self._payloads:  # loaded, or in another message so far
                    parts[key].copy_(self._payloads[key])
        self._payloads |= parts
        others = {names: message for names, message in self._messages.items() if not message[1].keys() & parts.keys()}
        self._messages = {**others, tuple(keys): (residuals, parts)}
        return residuals

    def reset(self) -> None:
        """Drop every residual."""
        self._payloads.clear()
        self._messages.clear()

    def state_dict(self) -> dict[str, object]:
        """{"block_size", "residuals": payloads by key, on the CPU}."""
        residuals = {
            key: payload.clone(memory_format=torch.contiguous_format).cpu() for key, payload in self._payloads.items()
        }
        return {"block_size": self._format.block_size, "residuals": residuals}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take over what `state_dict` returned; an empty one starts afresh.

        Raises:
            ValueError: its residuals have other blocks.
        """
        self.reset()
        # Before they had the blocks of the gradients, a state was the residuals alone, in blocks of 128.
        residuals = state.get("residuals", state)
        block_size = state.get("block_size", 128)
        if residuals and block_size != self._format.block_size:
            raise ValueError(f"residuals are in blocks of {block_size}, gradients now in {self._format.block_size}")
        self._payloads = dict(residuals)
