"""Where work is issued, and the buffers that travel between: streams and events on a GPU, nothing on a CPU.

A collective on a GPU only orders streams; the host goes on. On a CPU `wait()` blocks the host, so code that starts
several exchanges before it waits for the first one overlaps on both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor


class Lane:
    """A stream of its own for one kind of work (default: a new one), or the host itself on a CPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = (stream or torch.cuda.Stream(device)) if device.type == "cuda" else None

    @classmethod
    def here(cls) -> Lane:
        """The current stream."""
        return cls(torch.device("cpu"))

    def __enter__(self) -> Lane:
        if self.stream is not None:
            self.stream.__enter__()  # in C, unlike torch.cuda.stream(self.stream)
        return self

    def __exit__(self, *exc) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exc)

    def after_current(self) -> None:
        """What is issued here from now on runs after all that the current stream has been given."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def before_current(self) -> None:
        """What the current stream gets from now on runs after all that has been issued here."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def mark(device: torch.device) -> torch.Event | None:
    """An event at this point of the current stream; None on a CPU.

    Not torch.cuda's: those find the current stream in Python, at every mark and wait.
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


def buffer_for(lane: Lane, num_bytes: int, device: torch.device) -> Tensor:
    """A flat uint8 buffer that `lane` fills once, out of the current stream's memory; undefined contents.

    The memory serves the current stream's own work before and after, which that of a ring never does. There is no race,
    provided that the stream that uses the buffer last waits for the lane and calls `used_last` before it drops it:
    * Who had the memory before has used it on the current stream, or the allocator has seen the end of its use. The
      lane waits here for all that the current stream has been given.
    * Who gets it next gets it on the current stream, after the last use: on that stream itself, or, if the buffer was
      last used on another, once the allocator has seen the end of that.
    The price is that what the lane does next no longer overlaps with what the current stream has been given by now.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    lane.after_current()
    return buffer


def used_last(buffer: Tensor) -> None:
    """The current stream has been given the last use of a buffer of `buffer_for`."""
    if buffer.is_cuda:
        buffer.record_stream(torch.cuda.current_stream(buffer.device))  # nothing on the stream it was allocated on


def on_one_stream(made: Generator[tuple[str, Tensor]], stream: torch.cuda.Stream) -> Generator[tuple[str, Tensor]]:
    """Let a generator make its tensors on one stream, whichever streams those who ask for them are on."""
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
    """About `count` uint8 buffers that are used again and again, in turn; more where more are taken at once.

    The allocator cannot know when another stream has finished with a buffer; a ring does, by one event a buffer, and
    asks for no more memory once it is full. `take` makes the current stream wait until the buffer's last user is
    done: on a GPU that is how a slow link holds back the work before it, without stopping the host.
    Buffers must always be taken on the same stream, because the allocator may hand a dropped one to that stream.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.device = device
        self.count = count
        self._free: deque[tuple[Tensor, torch.Event | None]] = deque()
        self._taken = 0

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of exactly num_bytes; undefined contents."""
        storage = None
        if self._free and len(self._free) + self._taken >= self.count:
            storage, event = self._free.popleft()
            after(event)
        if storage is None or storage.numel() < num_bytes:
            storage = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._taken += 1
        return storage[:num_bytes]

    def give_back(self, buffer: Tensor) -> None:
        """The current stream has been given the last use of `buffer`."""
        self._taken -= 1
        storage = buffer._base if buffer._base is not None else buffer
        self._free.append((storage, mark(self.device)))

    def clear(self) -> None:
        """Forget the free buffers, so that their memory can be used for other things."""
        self._free.clear()

    def num_bytes(self) -> int:
        """Bytes of the free buffers."""
        return sum(storage.numel() for storage, _ in self._free)
