"""The interface that every number format has."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from zeropp_fp8.formats.noise import Seed, draw_seed

# A payload starts at a multiple of 16 bytes inside a bucket, so that kernels can use 16-byte loads.
PAYLOAD_ALIGNMENT = 16


def align_up(num_bytes: int) -> int:
    """The next multiple of PAYLOAD_ALIGNMENT."""
    return -(-num_bytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


class WireFormat(ABC):
    """A reversible (for quantized formats: lossy) map between a tensor and a flat uint8 payload.

    Subclasses implement the row form, in which each row of a matrix becomes a payload of its own. Rows are how a
    bucket is cut: one row a destination rank, so that a slice can be sent and decoded without its neighbours.
    """

    name: str

    @property
    @abstractmethod
    def bits_per_element(self) -> float:
        """Bits per element of a large tensor, scales counted, padding not."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Exact size in bytes of the payload of `numel` elements; 0 for 0 elements, else a multiple of 16."""

    @abstractmethod
    def encode_rows_seeded(self, matrix: Tensor, seed: Seed | None, out: Tensor | None = None) -> Tensor:
        """`encode_rows` with the seed itself; None where `needs_seed` is False.

        `out`, uint8 [rows, payload_bytes(n)] with adjacent bytes adjacent in memory, is written and returned. It saves
        a copy, and on a CPU the clearing of fresh memory: 3 ms for 16 MB.
        """

    @property
    def needs_seed(self) -> bool:
        """Whether encoding rounds stochastically."""
        return False

    def encode_rows(self, matrix: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode each row of `matrix` [rows, n] (fp32, bf16 or fp16) into uint8 [rows, payload_bytes(n)]."""
        return self.encode_rows_seeded(matrix, draw_seed(generator) if self.needs_seed else None)

    @abstractmethod
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Decode uint8 [rows, payload_bytes(numel)] into [rows, numel] of `dtype`: `out`, or a new tensor."""

    def mean_of_rows(self, payloads: Sequence[Tensor], numel: int, out: Tensor | None = None) -> Tensor:
        """fp32 [rows, numel]: the mean of several payloads [rows, payload_bytes(numel)], added in their order."""
        total = self.decode_rows(payloads[0], numel, torch.float32, out)
        for payload in payloads[1:]:
            total += self.decode_rows(payload, numel, torch.float32)
        return total.mul_(1.0 / len(payloads))

    def encode(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode a tensor of any shape into a flat uint8 payload.

        Args:
            tensor: fp32, bf16 or fp16, any shape, also empty.
            generator: source of the seed for stochastic rounding, a CPU generator.

        Returns:
            uint8 tensor [payload_bytes(tensor.numel())] on the tensor's device.

        Raises:
            TypeError: the dtype is not fp32, bf16 or fp16.
        """
        return self.encode_rows(tensor.detach().reshape(1, -1), generator).view(-1)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Decode a flat uint8 payload made by `encode` into a tensor of `shape` and `dtype`.

        Raises:
            ValueError: the payload's size does not belong to `shape`.
        """
        numel = math.prod(shape)
        expected = self.payload_bytes(numel)
        if payload.dtype != torch.uint8 or payload.numel() != expected:
            raise ValueError(
                f"{self.name}: a payload for shape {tuple(shape)} is {expected} bytes of uint8, "
                f"got {payload.numel()} of {payload.dtype}"
            )
        return self.decode_rows(payload.view(1, -1), numel, dtype).view(tuple(shape))


def check_encodable(matrix: Tensor, name: str) -> None:
    """Raise TypeError unless `matrix` holds fp32, bf16 or fp16."""
    if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"{name}: can encode float32, bfloat16 and float16 tensors, got {matrix.dtype}")
