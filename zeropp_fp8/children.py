"""Enable the plugin in processes that a script starts by `multiprocessing`."""

from __future__ import annotations

import multiprocessing

import zeropp_fp8


def enable_with_children() -> None:
    """Call zeropp_fp8.enable() here, in each process that `multiprocessing` starts from here, and in their children."""
    # A forked process has the plugin on already. "spawn" and "forkserver" send a pickle of the Process: first the
    # settings of the process that makes it (such as the authentication key), then target and arguments. The plugin is
    # therefore on when their modules are imported.
    multiprocessing.current_process()._config["zeropp_fp8"] = _arrived()


class _EnablesOnArrival:
    """An object that enables the plugin where it is unpickled."""

    def __reduce__(self):
        return _arrived, ()


def _arrived() -> _EnablesOnArrival:
    zeropp_fp8.enable()
    return _EnablesOnArrival()  # for the children of this process
