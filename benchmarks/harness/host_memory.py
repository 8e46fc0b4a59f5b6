"""The peak of a process' memory on the host, of which most is gone before one could ask for it."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import time

M_MMAP_THRESHOLD = -3  # of glibc's mallopt


class PeakOfMemory:
    """The most anonymous memory of this process in a block, in bytes above what it had before.

    Pages of a mapped checkpoint are not anonymous: they can be dropped, and `mapped` has the most of them. Blocks from
    64 KiB are given back to the system at once.
    """

    def __enter__(self) -> PeakOfMemory:
        gc.collect()
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
        ctypes.CDLL(None).malloc_trim(0)  # what is free already would be taken again, without a new page
        self._start = self.peak, self.mapped = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    @staticmethod
    def _now() -> tuple[int, int]:
        """Anonymous bytes, and those of files and shared memory."""
        with open("/proc/self/statm") as statm:
            _, resident, shared, *_ = map(int, statm.read().split())
        return (resident - shared) * mmap.PAGESIZE, shared * mmap.PAGESIZE

    def _look(self) -> None:
        anonymous, mapped = self._now()
        self.peak, self.mapped = max(self.peak, anonymous), max(self.mapped, mapped)

    def _watch(self) -> None:
        while not self._over.is_set():
            self._look()
            time.sleep(0.001)

    def __exit__(self, *exc) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        self.peak, self.mapped = self.peak - self._start[0], self.mapped - self._start[1]
