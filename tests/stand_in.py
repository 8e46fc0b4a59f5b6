"""A process that stands in for an engine which generates: vLLM's four calls over a socket, and a Receiver behind them.

    python tests/stand_in.py ADDRESS KEY DEVICE FILE

It listens at ADDRESS (a socket's path) for (call, argument, how), answers with None or what failed, and writes to FILE
its weights, {"held": {name: tensor}, "version": .., "told": ..}, when an update is finished. `how` is None, or what
goes wrong: "fails" before it does anything, "dies", or "sleeps" first; "lost" lets it forget its weights.
"""

import os
import sys
import time
from multiprocessing.connection import Client, Listener


class Trainer:
    """The trainer's end: what vLLM calls a VLLMWeightSyncClient. `failing` maps calls to how they go wrong there."""

    def __init__(self, address, key):
        self._where, self._connection = (address, key), None
        self.failing, self.calls = {}, []

    def _call(self, name, argument=None):
        self.calls.append((name, argument))
        if self._connection is None:
            address, key = self._where
            self._connection = Client(address, authkey=key)
        try:
            self._connection.send((name, argument, self.failing.get(name)))
            error = self._connection.recv()
        except (EOFError, OSError):
            self._connection = None
            raise ConnectionError("the engine is gone") from None
        if error is not None:
            raise RuntimeError(f"the engine says: {error}")

    def init_weight_transfer_engine(self, init_info):
        self._call("init", init_info)

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, update_info):
        self._call("update", update_info)

    def finish_weight_update(self, weight_version=None):
        self._call("finish", weight_version)


class Engine:
    """Its weights stay from one trainer to the next."""

    def __init__(self, device, file):
        import torch

        from zeropp_fp8.receiving import Receiver

        self.device, self.file, self.receiver, self.group = torch.device(device), file, Receiver(device=device), None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def init(self, told):
        from zeropp_fp8.receiving import TransferGroup

        if self.group is not None:
            self.group.leave()
        self.group = TransferGroup.join(told, 0, self.device)

    def start(self, _):
        pass

    def update(self, header):
        self.receiver.receive(header, self.group)

    def finish(self, version):
        import torch

        torch.save({"held": self.receiver.weights, "version": self.receiver.version, "told": version}, self.file)


def main(address, key, device, file):
    engine = Engine(device, file)
    if os.path.exists(address):
        os.unlink(address)
    with Listener(address, authkey=key.encode()) as listener:
        print("listening", flush=True)
        while True:
            with listener.accept() as connection:
                answer(connection, engine)


def answer(connection, engine):
    while True:
        try:
            name, argument, how = connection.recv()
        except EOFError:
            return
        try:
            if how == "dies":
                os._exit(1)
            if how == "sleeps":
                time.sleep(2.0)
            if how == "fails":
                raise ValueError(f"{name} is not to be had")
            if how == "lost":
                engine.receiver = type(engine.receiver)(device=engine.device)
            getattr(engine, name)(argument)
            connection.send(None)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
