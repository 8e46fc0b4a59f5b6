"""Whether all ranks have failed, found out without a collective: one that has not is waiting in another one."""

from __future__ import annotations

import time

import torch.distributed as dist

WAIT_S = 20.0  # ranks that run out of memory in the same allocation are seconds apart at most
_ALL, _GIVEN_UP = b"all", b"given up"


def all_have_failed(number: int, group: dist.ProcessGroup | None) -> bool:
    """Say that this rank has failed, and wait for the others of its group, no longer than WAIT_S.

    Args:
        number: of the failure; the same on every rank of the group, and another one each time.

    Returns:
        The same on all ranks that call it.
    """
    store = dist.distributed_c10d._get_default_store()  # what the launcher has brought ranks together with
    ranks = dist.get_process_group_ranks(group)
    name = f"zeropp_fp8/failed/{ranks[0]}/{number}"
    store.set(f"{name}/{dist.get_rank()}", "")
    deadline = time.monotonic() + WAIT_S
    while not (said := store.check([f"{name}/{rank}" for rank in ranks])) and time.monotonic() < deadline:
        time.sleep(0.05)
    # The first to decide does so for all: one may be there just when another gives up.
    return store.compare_set(name, "", (_ALL if said else _GIVEN_UP).decode()) == _ALL
