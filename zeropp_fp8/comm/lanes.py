"""Lanes for work and buffers between them: streams and events on a GPU, nothing on a CPU.

A collective on a GPU only orders streams; the host goes on. On a CPU `wait()` blocks the host, so code that starts
several exchanges before it waits for the first one overlaps them on both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor


class Lane:
    """A stream for one kind of work (default: a new stream), or on a CPU the host itself."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = (stream or torch.cuda.Stream(device)) if device.type == "cuda" else None

    @classmethod
    def here(cls) -> Lane:
        """Return a lane that is the current stream."""
        return cls(torch.device("cpu"))

    def __enter__(self) -> Lane:
        if self.stream is not None:
            self.stream.__enter__()  # in C, unlike torch.cuda.stream(self.stream)
        return self

    def __exit__(self, *exc) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc)

    def after_current(self) -> None:
        """Run work issued here from now on after all work that the current stream has now."""
        if self.stream is not None:
            mark(self.stream.device).wait(self.stream)

    def before_current(self) -> None:
        """Run work issued to the current stream from now on after all work that has been issued here."""
        if self.stream is not None:
            event = torch.Event(self.stream.device)
            event.record(self.stream)
            event.wait()


def mark(device: torch.device) -> torch.Event | None:
    """Record an event at this point of the current stream; None on a CPU.

    It is not torch.cuda's event, which finds the current stream in Python at every mark and wait.
    """
    if device.type != "cuda":
        return None
    event = torch.Event(device)
    event.record()
    return event


def after(event: torch.Event | None) -> None:
    """Make the current stream wait for an event of `mark`."""
    if event is not None:
        event.wait()


def stream_number(device: torch.device) -> int:
    """The current stream's number; 0 on a CPU. torch.cuda.current_stream makes ten Python calls."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def buffer_for(lane: Lane, num_bytes: int, device: torch.device) -> Tensor:
    """Return a flat uint8 buffer from the current stream's memory, which `lane` fills once; undefined contents.

    The current stream's own work may use the memory before and after; the memory of a ring serves the ring only. There
    is no race if the stream that uses the buffer last waits for the lane, and calls `used_last` before it drops it: the
    lane waits here for all work that the current stream has, and the memory's next user gets it on the current stream,
    after the last use. The price: later work of the lane no longer overlaps with what the current stream has now.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    lane.after_current()
    return buffer


def used_last(buffer: Tensor) -> None:
    """Record that the current stream has the last use of a buffer of `buffer_for`."""
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))  # no effect if the current stream allocated it


def on_one_stream(made: Generator[tuple[str, Tensor]], stream: torch.cuda.Stream) -> Generator[tuple[str, Tensor]]:
    """Let a generator make its tensors on one stream, whatever streams its callers are on."""
    try:
        while True:
            asking = torch.cuda.current_stream(stream.device)
            with torch.cuda.stream(stream):
                named = next(made, None)
            if named is None:
                return
            if asking != stream:
                asking.wait_stream(stream)
                named[1].record_stream(asking)
            yield named
    finally:
        with torch.cuda.stream(stream):
            made.close()


class BufferRing:
    """About `count` uint8 buffers that are used in turn; more if more are taken at once.

    By one event per buffer a ring knows when another stream has finished with it, so it requests no memory once it is
    full. `take` makes the current stream, not the host, wait until the buffer's last user is done. Take buffers always
    on the same stream, because the allocator may hand a dropped buffer to that stream.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.count = count
        self._free: deque[tuple[Tensor, torch.Event | None]] = deque()
        self._taken = 0

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer of exactly num_bytes; undefined contents."""
        storage = None
        if self._free and len(self._free) + self._taken >= self.count:
            storage, event = self._free.popleft()
            after(event)
        if storage is None or storage.numel() < num_bytes:
            storage = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._taken += 1
        return storage if storage.numel() == num_bytes else storage[:num_bytes]

    def give_back(self, buffer: Tensor) -> None:
        """Give a buffer back: the current stream has its last use."""
        self._taken -= 1
        storage = buffer._base if buffer._base is not None else buffer
        self._free.append((storage, mark(self.device)))

    def clear(self) -> None:
        """Forget the free buffers, so that their memory can be used for other things.

        Call it where the current stream waits for their last users; it need not be the stream that took them.
        """
        for storage, _ in self._free:
            used_last(storage)
        self._free.clear()

    def num_bytes(self) -> int:
        return sum(storage.numel() for storage, _ in self._free)
