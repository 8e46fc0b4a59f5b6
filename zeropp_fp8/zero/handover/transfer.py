"""Sending a WeightSource to the processes of an engine: names first, then bytes in buckets.

The interface is that of vLLM's `TrainerWeightTransferEngine`, the four calls of its `VLLMWeightSyncClient`, and the
byte stream that of its packed broadcast: tensors follow one another without gaps, and a bucket ends with the tensor
that makes it larger than the limit (docs.vllm.ai/en/latest/training/weight_transfer). Where vLLM is installed its own
engine takes the same source (vllm.py); this one needs neither vLLM nor NCCL.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeropp_fp8.zero.export.lockstep import Lockstep, consume
from zeropp_fp8.zero.handover.source import ParamMeta, WeightSource


class Client(Protocol):
    """How a trainer reaches an engine: vLLM's `VLLMWeightSyncClient`. Calls block, and raise what fails there."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class TransferGroup:
    """Trainer (rank 0) and receivers, apart from the trainer's own process group.

    Args:
        master_address, master_port: rank 0 listens there.
        rank, world_size: of the trainer and all receivers.
        device: of what is sent: NCCL on GPUs, gloo on a CPU.
        seconds: that one waits for the others.
    """

    def __init__(
        self,
        master_address: str,
        master_port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        seconds: int = 300,
    ) -> None:
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(master_address, master_port, world_size, rank == 0, timeout=limit)
        self._group = (
            dist.ProcessGroupNCCL(store, rank, world_size, limit)
            if device.type == "cuda"
            else dist.ProcessGroupGloo(store, rank, world_size, limit)
        )

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Fill a tensor with that of rank `src`. Collective."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()


@dataclass
class TransferInit:
    """The arguments of `Transfer.trainer_init`.

    Attributes:
        group: makes the group that trainer and receivers share; called on the sender. It has `broadcast(tensor, src)`.
        receivers: what receivers have to know to join it; they get it beside the fields below.
        rank: this process's among the trainer's. Rank 0 sends.
        packed_buffer_size_bytes: the limit of a bucket. It takes this much memory, and a tensor more.
    """

    group: Callable[[], Any]
    receivers: dict[str, Any] = field(default_factory=dict)
    rank: int = field(kw_only=True)
    packed_buffer_size_bytes: int = field(default=1 << 28, kw_only=True)

    @property
    def is_sender(self) -> bool:
        """Whether this process sends."""
        return self.rank == 0


class Sender(ABC):
    """Hands a source over to an engine. Every rank of the trainer has one, and calls its methods together.

    Args:
        takes: whether this rank needs the tensors, or gathers them for others only.
    """

    def __init__(self, source: WeightSource, takes: bool) -> None:
        self._source, self._takes = source, takes

    def send_weights(self) -> None:
        """Hand over all that the source has. Collective.

        Raises:
            RuntimeError: a rank, the engine or the way to it has failed; on every rank.
        """
        declared = self._source.metadata()
        weights = iter(self._source) if self._takes else self._source.take_part()
        consume("send_weights", weights, partial(self._send, declared), self._takes)

    @abstractmethod
    def _send(self, declared: list[ParamMeta], weights: Iterator[tuple[str, Tensor]]) -> None:
        """Tell the engine what comes, and send it."""


class Transfer(Sender):
    """Sends over a group of processes, in messages.

    Attributes:
        peak_bucket_bytes: the largest bucket so far; sent_bytes: of all.
    """

    def __init__(self, client: Client, source: WeightSource, group, init_info: TransferInit) -> None:
        super().__init__(source, init_info.is_sender)
        self._client, self._group, self._limit = client, group, init_info.packed_buffer_size_bytes
        self.peak_bucket_bytes = self.sent_bytes = 0

    @classmethod
    def trainer_init(cls, init_info: TransferInit, *, client: Client, source: WeightSource) -> Transfer:
        """Join the receivers, which the client tells to.

        Raises:
            ValueError: no positive limit of a bucket.
            RuntimeError: a rank could not; on every rank.
        """
        if init_info.packed_buffer_size_bytes < 1:
            raise ValueError(f"packed_buffer_size_bytes is {init_info.packed_buffer_size_bytes}: give a positive size")
        lockstep = Lockstep("joining the receivers of weights", here=init_info.is_sender)

        def join():
            told = {"packed": True, "packed_buffer_size_bytes": init_info.packed_buffer_size_bytes}
            answer = _beside(client.init_weight_transfer_engine, {**init_info.receivers, **told})
            group = init_info.group()
            answer.result()
            return group

        group = lockstep.call(join)
        lockstep.raise_everywhere()
        return cls(client, source, group, init_info)

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    def _send(self, declared: list[ParamMeta], weights: Iterator[tuple[str, Tensor]]) -> None:
        if self._group is None:
            raise RuntimeError("it was shut down")
        self._client.start_weight_update()
        answer = _beside(self._client.update_weights, update_info(declared))  # who receives waits in it
        for bucket in buckets(declared, self._limit):
            packed = None
            for meta, place in zip(bucket, _places(bucket)):
                name, tensor = next(weights, ("nothing", torch.empty(0, dtype=torch.float32, device="cpu")))
                if (name, tensor.dtype, tuple(tensor.shape)) != meta:
                    raise RuntimeError(f"{meta} was declared, and {name} {tensor.dtype} {tuple(tensor.shape)} came")
                if packed is None:
                    packed = torch.empty(sum(map(num_bytes, bucket)), dtype=torch.uint8, device=tensor.device)
                packed[place].copy_(tensor.contiguous().view(-1).view(torch.uint8))
                del tensor
            if answer.done():
                answer.result()
            self._group.broadcast(packed, src=0)
            self.peak_bucket_bytes = max(self.peak_bucket_bytes, packed.numel())
            self.sent_bytes += packed.numel()
        for name, _ in weights:  # raises where a rank has failed
            raise RuntimeError(f"{name} came, and was not declared")
        answer.result()
        self._client.finish_weight_update()


# -- the stream of bytes ---------------------------------------------------------------------------------------------


def num_bytes(meta: ParamMeta) -> int:
    """Bytes of a tensor."""
    return math.prod(meta.shape) * meta.dtype.itemsize


def buckets(declared: Iterable[ParamMeta], limit: int) -> Iterator[list[ParamMeta]]:
    """Cut what follows in messages: each ends with the tensor that makes it larger than `limit` bytes."""
    bucket: list[ParamMeta] = []
    for meta in declared:
        bucket.append(meta)
        if sum(map(num_bytes, bucket)) > limit:
            yield bucket
            bucket = []
    if bucket:
        yield bucket


def _places(bucket: list[ParamMeta]) -> Iterator[slice]:
    start = 0
    for meta in bucket:
        yield slice(start, start + num_bytes(meta))
        start += num_bytes(meta)


def update_info(declared: list[ParamMeta]) -> dict[str, list]:
    """The description of tensors for receivers: JSON."""
    return {
        "names": [meta.name for meta in declared],
        "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in declared],
        "shapes": [list(meta.shape) for meta in declared],
    }


def received(update_info: dict[str, list], group, limit: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of what `Transfer.send_weights` sends, for an engine that is not vLLM; a bucket in memory.

    Args:
        update_info: what `update_weights` was called with.
        group: has `broadcast(tensor, src)`; limit: the `packed_buffer_size_bytes` of `init_weight_transfer_engine`.
    """
    fields = zip(update_info["names"], update_info["dtype_names"], update_info["shapes"])
    declared = (ParamMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in fields)
    for bucket in buckets(declared, limit):
        packed = torch.empty(sum(map(num_bytes, bucket)), dtype=torch.uint8, device=device)
        group.broadcast(packed, src=0)
        for meta, place in zip(bucket, _places(bucket)):
            yield meta.name, packed[place].clone().view(meta.dtype).view(meta.shape)  # at an address that dtypes allow


def _beside(call: Callable, *arguments) -> Future:
    """A call in a thread that nobody has to wait for: one that fails here must not wait for who waits for it."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
