"""The group of processes in which a trainer sends to receivers, apart from the trainer's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_POLL_SECONDS = 2e-4  # how often one that waits for a message looks whether the engine has failed


class TransferGroup:
    """Trainer (rank 0) and receivers, apart from the trainer's own process group; NCCL on GPUs, gloo on a CPU.

    Args:
        store: where they meet.
        rank, world_size: of the trainer and all receivers; device: of what is sent.
        seconds: that one waits for the others.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, device: torch.device, seconds: int = 300) -> None:
        self._seconds = seconds
        if device.type == "cuda":
            limit = timedelta(seconds=2 * seconds)  # beyond it NCCL's watchdog ends the process
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, limit)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=seconds))

    @classmethod
    def join(cls, told: dict[str, Any], number: int, device: torch.device, seconds: int = 300) -> TransferGroup:
        """Join as a receiver.

        Args:
            told: what `init_weight_transfer_engine` was called with; number: of the receiver, from 0 on.
        """
        limit = timedelta(seconds=seconds)
        store = dist.TCPStore(told["master_address"], told["master_port"], is_master=False, timeout=limit)
        store = dist.PrefixStore(told["join"], store)
        return cls(store, told["rank_offset"] + number, told["world_size"], device, seconds)

    def broadcast(self, tensor: Tensor, src: int = 0, answer: Future | None = None) -> None:
        """Fill a tensor with that of rank `src`. Collective.

        Args:
            answer: of a call to an engine that takes part; where it fails, nobody waits any longer.

        Raises:
            TimeoutError, RuntimeError: the others did not come, or are gone; what the call raised.
        """
        options = dist.BroadcastOptions()
        options.rootRank = src
        as_bytes = tensor.view(-1).view(torch.uint8)  # gloo does not know all dtypes
        work, until = self._group.broadcast([as_bytes], options), time.monotonic() + self._seconds
        while answer is not None and not work.is_completed():
            if answer.done():
                answer.result()
            if time.monotonic() > until:
                raise TimeoutError(f"no receiver took a message within {self._seconds} s")
            time.sleep(_POLL_SECONDS)
        work.wait()

    def leave(self) -> None:
        """End the group, whatever is under way in it; without waiting for that."""
        groups = [self._group]
        self._group = None
        with suppress(RuntimeError):  # of a backend that cannot, whose messages end with its time limit
            groups[0].abort()
        beside(groups.clear)  # gloo's last reference waits for that too


def beside(call: Callable, *arguments) -> Future:
    """A call in a thread, so that a rank that fails does not wait for ranks that wait for it."""
    future: Future = Future()

    def work() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
