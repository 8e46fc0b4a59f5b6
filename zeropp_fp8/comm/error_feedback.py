"""Error feedback for the hop between nodes: what quantization dropped is added to the next gradient.

The sender keeps, for each tensor, the difference between what it wanted to send and what the receiver decoded, in 8
bits with a scale per block (LoCo, arXiv 2407.04480, keeps it in 8 bits too). Only the hop between nodes has one: there
the codes have 4 bits, and the residual is 1/ranks_per_node of the gradient: all of it, 1.03 bytes a parameter, where
each rank is a node.

Reset rule: a residual is dropped (zero) when its tensor's gradient held NaN or Inf, when a step is skipped for
overflow, when the loss scale changes (it is in units of the scaled gradient), and when a checkpoint of another world
size is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeropp_fp8.formats import make_format


class ErrorFeedback:
    """8-bit residuals by tensor key, on the sender."""

    def __init__(self, block_size: int = 128) -> None:
        self._format = make_format("int8", block_size=block_size)
        self._payloads: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return len(self._payloads)

    def num_bytes(self, rows: int, numel: int) -> int:
        """Bytes of the residual of a tensor that is sent as `rows` slices of `numel` elements."""
        return rows * self._format.payload_bytes(numel)

    def add_to_(self, key: str, rows: Tensor) -> None:
        """Add the stored residual to fp32 `rows` [nodes, n] in place."""
        payload = self._payloads.get(key)
        if payload is not None:
            rows += self._format.decode_rows(payload, rows.shape[1], torch.float32)

    def store(self, key: str, wanted: Tensor, decoded: Tensor) -> None:
        """Keep `wanted` - `decoded` (fp32 [nodes, n]); non-finite differences are dropped."""
        residual = torch.nan_to_num(wanted - decoded, nan=0.0, posinf=0.0, neginf=0.0)
        self._payloads[key] = self._format.encode_rows(residual)

    def reset(self) -> None:
        """Drop every residual."""
        self._payloads.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Payloads by key, on the CPU."""
        return {key: payload.cpu() for key, payload in self._payloads.items()}

    def load_state_dict(self, state: dict[str, Tensor], device: torch.device | str) -> None:
        """Take over what `state_dict` returned."""
        self._payloads = {key: payload.to(device) for key, payload in state.items()}
