"""The interface that every number format has."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# A payload starts at a multiple of 16 bytes inside a bucket, so that kernels can use 16-byte loads.
PAYLOAD_ALIGNMENT = 16


def align_up(num_bytes: int) -> int:
    """The next multiple of PAYLOAD_ALIGNMENT."""
    return -(-num_bytes // PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


@dataclass(frozen=True)
class KernelSpec:
    """The facts about a format's payloads that kernels need.

    Attributes:
        element: the kind of code, by name.
        bits: of a code.
        block_size: elements that share a scale; None: all of a row.
        hadamard: whether groups of 32 are rotated.
        largest: the largest code.
        scale: how blocks are scaled, by name; "shared": by the caller's scale of a tensor; "none": not at all.
    """

    element: str
    bits: int
    block_size: int | None = None
    hadamard: bool = False
    largest: float = 0.0
    scale: str = "none"


class WireFormat(ABC):
    """A reversible (for quantized formats: lossy) map between a tensor and a flat uint8 payload.

    Subclasses implement the row form, in which each row of a matrix becomes a payload of its own. Rows are how a
    bucket is cut: one row a destination rank, so that a slice can be sent and decoded without its neighbours.

    Attributes:
        scales: where the scales of codes are: "payload", with the "caller", or "none", of numbers that are no codes.
    """

    name: str
    scales: Literal["payload", "caller", "none"] = "payload"

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Arguments of `make_format`, `name` among them, that give a format which makes the same bytes."""

    @property
    def key(self) -> Hashable:
        """Equal for formats that make the same bytes."""
        return self.scales, *self.options().items()

    @property
    def is_exact(self) -> bool:
        """Whether numbers are sent as they are."""
        return self.scales == "none"

    def kernel_spec(self) -> KernelSpec | None:
        """The spec for kernels; None: only torch code knows this format."""
        return None

    @property
    @abstractmethod
    def bits_per_element(self) -> float:
        """Bits per element of a large tensor, scales counted, padding not."""

    @abstractmethod
    def payload_bytes(self, numel: int) -> int:
        """Exact size in bytes of the payload of `numel` elements; 0 for 0 elements, else a multiple of 16."""

    @property
    @abstractmethod
    def granule(self) -> int:
        """Elements at whose multiples a flat tensor may be cut so that its parts have the whole tensor's codes.

        Raises:
            ValueError: there is no such number, because one scale belongs to all elements.
        """

    def granule_runs(self, numel: int) -> list[tuple[int, int]]:
        """(first byte, bytes a granule) of what lies in a payload in the order of its granules.

        Raises:
            TypeError: payloads in this format cannot be cut.
        """
        raise TypeError(f"{self.name}: payloads in this format cannot be cut")

    def shared_bytes(self, numel: int) -> slice:
        """The bytes that are the same in the payloads of all parts of a tensor."""
        return slice(0, 0)

    @abstractmethod
    def encode_rows(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode each row of `matrix` [rows, n] (fp32, bf16 or fp16) into uint8 [rows, payload_bytes(n)].

        `out`, uint8 [rows, payload_bytes(n)] with adjacent bytes adjacent in memory, is written and returned. It saves
        a copy, and on a CPU the clearing of fresh memory: 3 ms for 16 MB.
        """

    @abstractmethod
    def decode_rows(self, payload: Tensor, numel: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        """Decode uint8 [rows, payload_bytes(numel)] into [rows, numel] of `dtype`: `out`, or a new tensor."""

    @torch.no_grad()
    def encode_part(self, tensor: Tensor, first: int, numel: int, out: Tensor) -> None:
        """Encode the elements [first, first + numel) of a tensor with the codes and scales that the whole tensor has.

        A whole tensor's payload and its parts' decode to the same numbers, however many parts there are.

        Args:
            tensor: fp32, bf16 or fp16, taken as flat. What lies beyond its end counts as zeros; a part may lie there.
            first, numel: multiples of `granule`.
            out: uint8 [payload_bytes(numel)] on the tensor's device, written.

        Raises:
            ValueError: `first` or `numel` is no multiple of `granule`, or `out` has another size or dtype.
            TypeError: the tensor's dtype is not fp32, bf16 or fp16.
        """
        granule = self.granule
        if first < 0 or numel < 0 or first % granule or numel % granule:
            raise ValueError(
                f"{self.name}: a part begins and ends at multiples of {granule} elements, got first {first} and "
                f"numel {numel}"
            )
        expected = self.payload_bytes(numel)
        if out.dtype != torch.uint8 or out.shape != (expected,):
            raise ValueError(
                f"{self.name}: the payload of {numel} elements is [{expected}] of uint8, "
                f"got {list(out.shape)} of {out.dtype}"
            )
        check_encodable(tensor, self.name)
        if numel:
            self._encode_part(tensor.detach().reshape(-1), first, numel, out.view(1, -1))

    def _encode_part(self, flat: Tensor, first: int, numel: int, out: Tensor) -> None:
        """`encode_part` of a flat tensor into `out` [1, payload_bytes(numel)], after the checks."""
        self.encode_rows(part_of(flat, first, numel), out)

    def mean_of_rows(self, payloads: Sequence[Tensor], numel: int) -> Tensor:
        """fp32 [rows, numel]: the mean of several payloads [rows, payload_bytes(numel)], added in their order."""
        total = self.decode_rows(payloads[0], numel, torch.float32)
        for payload in payloads[1:]:
            total += self.decode_rows(payload, numel, torch.float32)
        return total.mul_(1.0 / len(payloads))

    def encode(self, tensor: Tensor) -> Tensor:
        """Encode a tensor of any shape into a flat uint8 payload.

        Args:
            tensor: fp32, bf16 or fp16, any shape, also empty.

        Returns:
            uint8 tensor [payload_bytes(tensor.numel())] on the tensor's device.

        Raises:
            TypeError: the dtype is not fp32, bf16 or fp16.
        """
        return self.encode_rows(tensor.detach().reshape(1, -1)).view(-1)

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


def part_of(flat: Tensor, first: int, numel: int) -> Tensor:
    """[1, numel]: the elements [first, first + numel) of a flat tensor, zeros beyond its end."""
    part = flat[first : first + numel]
    if part.numel() < numel:
        part = F.pad(part, (0, numel - part.numel()))
    return part.view(1, -1)
