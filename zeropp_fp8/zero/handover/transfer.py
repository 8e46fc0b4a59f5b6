"""Send updates to an engine: four calls announce them, a process group carries the tensors.

The calls are those of vLLM's `VLLMWeightSyncClient`, so that its clients reach an engine of vLLM's (vllm_engine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from datetime import timedelta
from functools import partial
from itertools import chain

import torch.distributed as dist

from zeropp_fp8.zero.export.lockstep import Lockstep
from zeropp_fp8.zero.handover.group import TransferGroup, beside
from zeropp_fp8.zero.handover.source import WeightSource
from zeropp_fp8.zero.handover.update import Update
from zeropp_fp8.zero.handover.updates import Updates


class Transfer:
    """Sends updates to receivers, which a client tells what comes. All ranks make it, and call its methods together.

    After a failure the next hand-over joins the receivers anew, and has all weights.

    Args:
        client: reaches the engine that has the receivers: a `VLLMWeightSyncClient` of vLLM's, or what has its methods.
            They block, and raise what fails there. Rank 0 alone uses it.
        address, port: where receivers meet rank 0; port 0 is any that is free.
        receivers: how many processes; seconds: that one waits for another.

    Attributes:
        updates: what is sent, with its version; sent_bytes: of tensors, so far.

    Raises:
        RuntimeError: the receivers cannot be joined; on every rank.
    """

    def __init__(
        self,
        source: WeightSource,
        client,
        address: str,
        port: int = 0,
        receivers: int = 1,
        seconds: int = 300,
    ) -> None:
        self.updates, self.sent_bytes = Updates(source), 0
        self._client, self._address, self._world_size, self._seconds = client, (address, port), 1 + receivers, seconds
        self._device, self._sends = source.session.device, source.session.topology.rank == 0
        self._store: dist.TCPStore | None = None
        self._joins = 0
        self._group: TransferGroup | None = None
        self._under_way: Future | None = None  # on rank 0, a hand-over that nobody has waited for
        lockstep = Lockstep("joining the receivers of weights", here=self._sends)
        lockstep.call(self._join)
        lockstep.raise_everywhere()

    def forget(self) -> None:
        """Send all weights next time: an engine has lost its own. One rank is enough."""
        self.updates.forget()

    def send_weights(self, wait: bool = True) -> None:
        """Hand over what the receivers need to have the weights of now. Collective.

        Args:
            wait: for the receivers. Else differences are sent while training goes on, and the next hand-over raises
                what has failed meanwhile. All weights are waited for, or rank 0 would have to keep them.

        Raises:
            RuntimeError: a rank, an engine or the way to it has failed; on every rank. Then all is sent next time.
        """
        self.complete()
        try:
            self.updates.hand_over(partial(self._send, wait), self._sends)
        except RuntimeError:
            self.shutdown()
            raise

    def complete(self) -> None:
        """Wait until what was handed over last is with the receivers. Collective.

        Raises:
            RuntimeError: as `send_weights`.
        """
        under_way, self._under_way = self._under_way, None
        lockstep = Lockstep("send_weights")
        if under_way is not None:
            lockstep.call(under_way.result)
        try:
            lockstep.raise_everywhere()
        except RuntimeError:
            self.forget()
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Leave the receivers."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _join(self) -> None:
        if self._store is None:
            limit = timedelta(seconds=self._seconds)
            self._store = dist.TCPStore(*self._address, is_master=True, timeout=limit, wait_for_workers=False)
        self._joins += 1  # keys of an earlier group, which may not have ended, are others
        told = {"master_address": self._address[0], "master_port": self._store.port, "join": str(self._joins)}
        told |= {"rank_offset": 1, "world_size": self._world_size}
        store = dist.PrefixStore(told["join"], self._store)
        answer = beside(self._client.init_weight_transfer_engine, told)
        group = beside(TransferGroup, store, 0, self._world_size, self._device, self._seconds)
        for done in wait_for((answer, group), return_when=FIRST_EXCEPTION).done:
            done.result()
        self._group = group.result()

    def _send(self, wait: bool, updates: Iterator[Update | None]) -> None:
        if self._group is None:
            self._join()
        updates = filter(None, updates)
        first = next(updates)
        if wait or first.header.after is None:
            self._send_all(chain([first], updates))
        else:
            self._under_way = beside(self._send_all, [first, *updates])

    def _send_all(self, updates: Iterable[Update]) -> None:
        self._client.start_weight_update()
        for header, tensors in updates:
            answer = beside(self._client.update_weights, vars(header))  # receivers wait in it
            for tensor in tensors.values():
                self._group.broadcast(tensor, answer=answer)
                self.sent_bytes += tensor.nbytes
            answer.result()
        self._client.finish_weight_update(weight_version=str(header.version))
