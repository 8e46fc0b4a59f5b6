"""The plugin in processes that a script starts by `multiprocessing`."""

from __future__ import annotations

import multiprocessing

import zeropp_fp8


def enable_with_children() -> None:
    """zeropp_fp8.enable() here and in every process that `multiprocessing` starts from here, and from those."""
    # A forked process has the plugin on as it is. "spawn" and "forkserver" send a pickle of the Process: first what it
    # takes over from the process that makes it (the authentication key is there too), then target and arguments, whose
    # modules find the plugin on when they are imported.
    multiprocessing.current_process()._config["zeropp_fp8"] = _arrived()


class _EnablesOnArrival:
    """Where this is unpickled, the plugin is enabled."""

    def __reduce__(self):
        return _arrived, ()


def _arrived() -> _EnablesOnArrival:
    zeropp_fp8.enable()
    return _EnablesOnArrival()  # for the processes that this one starts
