"""Work in which every rank has to do its part of the collectives, whatever fails on some of them; then all raise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from zeropp_fp8.comm import gather_objects


class Lockstep:
    """Does things on a rank until one fails there. It must go on gathering with the others, and then all raise.

    Args:
        what: fails, in the message.
        here: whether this rank does anything.
    """

    def __init__(self, what: str, here: bool = True) -> None:
        self._what, self._here = what, here
        self.error: Exception | None = None

    def call(self, action: Callable, *arguments):
        """The action's result; None where nothing is done, and after something has failed."""
        return self.always(action, *arguments) if self._here and self.error is None else None

    def always(self, action: Callable, *arguments):
        """The action's result, whatever has failed; None where it fails. The first failure counts."""
        try:
            return action(*arguments)
        except Exception as error:  # raised on every rank by raise_everywhere
            self.error = self.error or error
            return None

    def failures(self) -> list[str]:
        own = self.error and f"{type(self.error).__name__}: {self.error}"
        return [
            f"{self._what} failed on rank {rank}: {error}" for rank, error in enumerate(gather_objects(own)) if error
        ]

    def raise_everywhere(self) -> None:
        """Raise the error of the first rank that failed. Collective."""
        failures = self.failures()
        if failures:
            raise RuntimeError(failures[0]) from self.error


def consume(what: str, items: Iterator, action: Callable[[Iterator], object], here: bool = True) -> None:
    """Let `action` take from an iterator whose steps are collective, and drain what it leaves, for the other ranks.

    Args:
        what, here: as of Lockstep.

    Raises:
        RuntimeError: a rank has failed; on every rank.
    """
    lockstep = Lockstep(what, here)
    lockstep.call(action, items)
    lockstep.always(deque, items, 0)
    lockstep.raise_everywhere()
