"""Messages between ranks through a key-value store.

There are no collectives in it: a rank that hangs, raises or is dead is named by the others and holds none of them up.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zeropp_fp8.outputs import MOST, whole

POLL_S = 0.02
GRACE_S = 5.0  # for other ranks, when one has said that it failed


class Unanswered(RuntimeError):
    """Rank 0 has not answered in time, or cannot be reached."""


class Ranks:
    """The ranks of a job, by number.

    Args:
        store: of torch.distributed, reached by all ranks.
        limit_s: how long to wait for what others say.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, limit_s: float) -> None:
        self.store, self.rank, self.world_size, self.limit_s = store, rank, world_size, limit_s

    def tell(self, what: str, said: Any, failed: bool = False) -> None:
        self.store.set(f"{what}/{self.rank}", json.dumps(said))
        self.store.add(f"{what}/failed", int(failed))
        self.store.add(f"{what}/count", 1)

    def hear(self, what: str, limit_s: float | None = None) -> dict[int, Any]:
        """The messages of the ranks that came in time. Where one failed, the others get `GRACE_S` more."""
        deadline, failed = time.monotonic() + (self.limit_s if limit_s is None else limit_s), False
        while self.store.add(f"{what}/count", 0) < self.world_size and time.monotonic() < deadline:
            if not failed and self.store.add(f"{what}/failed", 0):
                failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
            time.sleep(POLL_S)
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        return {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys) if self.store.check([key])}

    def decide(self, what: str, decided: Any) -> None:
        """Rank 0 says what all go by."""
        self.store.set(f"{what}/decided", json.dumps(decided))

    def decided(self, what: str, limit_s: float) -> Any:
        key = f"{what}/decided"
        try:
            self.store.wait([key], timedelta(seconds=limit_s))
            return json.loads(self.store.get(key))
        except RuntimeError as error:  # torch's errors of a store are some
            raise Unanswered(
                f"rank {self.rank}: rank 0 has not said what comes next ({what}); it may have ended: look at what it "
                f"printed ({str(error).splitlines()[0]})"
            ) from None

    def for_a_thread(self) -> Ranks:
        """The same with a connection of its own: one that waits would block what is asked beside it."""
        return Ranks(self.store.clone(), self.rank, self.world_size, self.limit_s)


def place_in_job(env: Mapping[str, str] = os.environ) -> tuple[int, int, int]:
    """(rank, ranks, local rank) as launchers say them; one rank where none does."""
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = _number(env, "WORLD_SIZE", least=1)
        rank = _number(env, "RANK", most=world_size - 1)
        return rank, world_size, _number(env, "LOCAL_RANK", rank)
    for variable in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"):
        if _number(env, variable, 1) > 1:
            raise ValueError(
                f"{variable}={env[variable]} says that there are several ranks, and RANK and WORLD_SIZE are not set: "
                "start with torchrun, deepspeed or accelerate launch, or set both (and MASTER_ADDR and MASTER_PORT)"
            )
    return 0, 1, 0


def _number(env: Mapping[str, str], name: str, default: int = 0, least: int = 0, most: int = MOST) -> int:
    try:
        return whole(least, most)(env.get(name, str(default)))
    except ArgumentTypeError as error:
        raise ValueError(f"{name}={error}") from None


def joined(rank: int, world_size: int, limit_s: float, env: Mapping[str, str] = os.environ) -> Ranks:
    """The ranks of the launcher's rendezvous, without waiting for them."""
    if world_size == 1:
        return Ranks(dist.HashStore(), rank, world_size, limit_s)
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), _number(env, "MASTER_PORT", 29500, most=65535)
    serves = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun's agent serves already
    try:
        store = dist.TCPStore(address, port, None, serves, timedelta(seconds=limit_s), wait_for_workers=False)
    except RuntimeError as error:
        raise Unanswered(
            f"rank {rank}: MASTER_ADDR:MASTER_PORT, {address}:{port}, cannot be reached in {limit_s:.0f} s "
            f"({str(error).splitlines()[0]}); is rank 0 there, and the port open?"
        ) from None
    return Ranks(dist.PrefixStore("zeropp_fp8_doctor", store), rank, world_size, limit_s)
