"""Jobs about updates: what they hold, to another process, through a folder; and what fails on the way."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from handover_jobs import attempt, bits, copied, engine_of, over
from models import train
from running import stepped
from stand_in import Trainer
from torch import nn

import zeropp_fp8
from tests.places import ROOT, TESTS
from zeropp_fp8.handover import Changes, FolderTransfer, Transfer, Updates, WeightSource
from zeropp_fp8.receiving import MissedUpdate, Receiver, catch_up


def equal(held, source):
    """Whether every bit is that of a whole hand-over; True on ranks that hold nothing. Collective."""
    whole = copied(source)
    if dist.get_rank():
        return True
    return held.keys() == whole.keys() and all(
        torch.equal(bits(held[n]).cpu(), bits(t).cpu()) for n, t in whole.items()
    )


def what_updates_hold(cases):
    """{case: (equal, bytes, version) of hand-overs at first, after a step at 1e-4 and at 1e-6, after a rank forgot}.

    And the bytes that this rank has sent outside of steps for one of what has not changed.
    """
    found = {}
    for case, (recipe, adapters, dtype, options, fields) in cases.items():
        engine = engine_of(recipe, adapters=adapters, dtype=dtype, sizes={"hidden": 128, "intermediate": 256}, **fields)
        source = WeightSource(engine, **options)
        updates, receiver, rounds = Updates(source), Receiver(), []

        def hand_over(updates=updates, receiver=receiver, rounds=rounds, source=source):
            sent = 0
            for update in filter(None, updates):
                receiver.apply(update)
                sent += sum(tensor.nbytes for tensor in update.tensors.values())
            rounds.append((equal(receiver.weights, source), sent, receiver.version))

        hand_over()
        outside = sum(zeropp_fp8.wire_report(engine)["outside_steps"].values())
        for update in filter(None, updates):
            receiver.apply(update)
        outside = sum(zeropp_fp8.wire_report(engine)["outside_steps"].values()) - outside
        for lr in (1e-4, 1e-6):
            for group in engine.optimizer.param_groups:
                group["lr"] = lr
            train(engine, 1)
            hand_over()
        if dist.get_rank() == 1:
            updates.forget()
        hand_over()
        found[case] = rounds, outside, sum(tensor.nbytes for tensor in copied(source).values())
        engine.destroy()
    return found


class Normed(nn.Module):
    """A batch norm, of whose numbers each rank has its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x):
        return self.norm(self.linear(x)).square().mean()


def buffers():
    """Whether those of a receiver and of patches are the first rank's, after a step on data of each rank."""
    engine = over(Normed())
    stepped(engine, (torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank())),))
    source = WeightSource(engine)
    receiver, patched = Receiver(), {}
    for update in filter(None, Updates(source)):
        receiver.apply(update)
    for patch in itertools.chain.from_iterable(Changes(source)):
        patched.setdefault(patch.name, torch.zeros(patch.shape, dtype=patch.values.dtype))
        patched[patch.name].view(-1)[patch.indices.long()] = patch.values
    return equal(receiver.weights, source), equal(patched, source), engine.module.norm.running_mean.tolist()


# -- to another process ----------------------------------------------------------------------------------------------


class StandIn:
    """On rank 0: a process that stands in for an engine; on others nothing.

    Attributes:
        client: the trainer's end.
    """

    def __init__(self, folder, device="cpu"):
        self.here = dist.get_rank() == 0
        self._address, self._file, self._device = f"{folder}/socket", f"{folder}/held.pt", device
        self.client = Trainer(self._address, b"key") if self.here else None
        self.start()

    def start(self):
        """Start it, again if it has ended. Collective."""
        if self.here:
            command = [sys.executable, str(TESTS / "stand_in.py"), self._address, "key", self._device, self._file]
            env = {**os.environ, "PYTHONPATH": str(ROOT)}
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env=env)
            assert self._process.stdout.readline() == b"listening\n"
        dist.barrier()

    def failing(self, **calls):
        if self.here:
            self.client.failing = calls

    def held(self):
        return torch.load(self._file) if self.here else {"held": {}, "version": None, "told": None}

    def end(self):
        if self.here:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def stand_in(folder, device="cpu"):
    process = StandIn(folder, device)
    try:
        yield process
    finally:
        process.end()


def joined(process, source, port=0):
    return Transfer(source, process.client, "127.0.0.1", port, seconds=60)


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def to_a_stand_in(folder):
    """{(what, number): equal there, version, what the engine was told, calls, bytes}, of two hand-overs of each."""
    engine, found = engine_of(adapters="lora", dtype="bf16"), {}
    ways = {"merged": {}, "fp8": {"format": "fp8"}, "adapters": {"weights": "adapters"}}
    with stand_in(folder) as process:
        for name, options in ways.items():
            source = WeightSource(engine, **options)
            transfer = joined(process, source)
            for number in range(2):
                called, sent = len(process.client.calls) if process.here else 0, transfer.sent_bytes
                transfer.send_weights()
                there = process.held()
                found[name, number] = {
                    "equal": equal(there["held"], source),
                    "versions": (there["version"], there["told"]),
                    "calls": [call for call, _ in process.client.calls[called:]] if process.here else [],
                    "sent": transfer.sent_bytes - sent,
                    "all": sum(t.nbytes for t in copied(source).values()),
                }
                train(engine, 1)
            transfer.shutdown()
    return found


def engines_that_fail(folder):
    """{what goes wrong: what is said, seconds, what the next hand-over says, equal then}, and losses after it."""
    engine, found = engine_of("zeropp", dtype="bf16"), {}
    source = WeightSource(engine)
    with stand_in(folder) as process:
        transfer = joined(process, source, free_port())  # one that is given is not free while a broken group ends
        transfer.send_weights()
        for call, how in (
            ("start", "fails"),
            ("update", "fails"),
            ("finish", "fails"),
            ("update", "lost"),
            ("start", "lost"),
            ("update", "dies"),
            ("start", "dies"),
            ("update", "sleeps"),
        ):
            train(engine, 1)
            process.failing(**{call: how})
            begin = time.monotonic()
            said = attempt(transfer.send_weights)
            took = time.monotonic() - begin
            process.failing()
            if how == "dies":
                process.start()
            found[call, how] = said, took, attempt(transfer.send_weights), equal(process.held()["held"], source)
        again = joined(process, source)  # as a trainer that was started again would
        again.send_weights()
        found["restarted"] = equal(process.held()["held"], source), process.held()["version"]
        process.end()
        found["gone"] = attempt(lambda: joined(process, source))
    return found, train(engine, 1)


class Slow:
    """A client whose updates begin once they may."""

    def __init__(self, client):
        self._client, self.may = client, threading.Event()

    def __getattr__(self, name):
        return getattr(self._client, name)

    def update_weights(self, header):
        assert self.may.wait(60)
        self._client.update_weights(header)


def while_training_goes_on(folder):
    """Of hand-overs that nobody waits for: [versions there before the engine may go on, equal after; what is said]."""
    engine, found = engine_of("zeropp", dtype="bf16"), []
    source = WeightSource(engine)
    with stand_in(folder) as process:
        transfer = joined(process, source)
        if process.here:
            transfer._client = slow = Slow(process.client)
            slow.may.set()
        transfer.send_weights(wait=False)  # all weights are waited for
        found.append((process.held()["version"], equal(process.held()["held"], source)))
        train(engine, 1)
        if process.here:
            slow.may.clear()
        kept = copied(source)
        transfer.send_weights(wait=False)
        losses = train(engine, 1)
        found.append((process.held()["version"], len(losses)))
        if process.here:
            slow.may.set()
            transfer._under_way.result()
        there = process.held()
        found.append((there["version"], all(torch.equal(bits(t), bits(kept[n])) for n, t in there["held"].items())))
        process.failing(update="fails")
        said = [attempt(lambda: transfer.send_weights(wait=False))]
        if process.here:
            transfer._under_way.exception()
        process.failing()
        said += [attempt(transfer.send_weights), attempt(transfer.send_weights)]
        found += [said, equal(process.held()["held"], source)]
    return found


# -- through a folder ------------------------------------------------------------------------------------------------


def through_a_folder(folder):
    """[(what a receiver of each age says, equal)] of a trainer that is started again, asked for all, and fails."""
    engine, found, old, place = engine_of("zeropp", dtype="bf16"), [], Receiver(), Path(folder) / "weights"
    source = WeightSource(engine)
    transfer = FolderTransfer(source, place, whole_every=4)

    def look(receiver):
        dist.barrier()
        said = None
        if dist.get_rank() == 0:
            try:
                said = catch_up(place, receiver)
            except MissedUpdate as error:
                said = str(error).replace(str(place), "FOLDER")
        same = equal(receiver.weights, source)
        found.append((said, same, sorted(path.name for path in place.glob("*.json"))))

    def go_on():
        train(engine, 1)
        transfer.send_weights()

    transfer.send_weights()
    look(old)
    go_on()
    look(old)
    look(Receiver())
    transfer = FolderTransfer(source, place, whole_every=4)  # started again
    go_on()
    look(old)
    if dist.get_rank() == 0:
        (place / "wanted").touch()
    go_on()
    look(old)
    for _ in range(5):
        go_on()
    look(old)
    look(Receiver())
    if dist.get_rank() == 0:
        place.rename(f"{folder}/away")
        Path(folder, "weights").write_text("a file")
    said = attempt(go_on), attempt(lambda: FolderTransfer(source, place))
    if dist.get_rank() == 0:
        place.unlink()
        Path(folder, "away").rename(place)
    dist.barrier()
    go_on()
    look(old)
    return found, said
