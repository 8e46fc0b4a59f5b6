"""A process that stands in for an engine which generates: vLLM's four calls, and its way to cut the stream of bytes.

    python tests/stand_in.py ADDRESS KEY DEVICE FILE

It listens at ADDRESS (a socket's path) for (call, argument), answers with None or what failed, and writes to FILE what
it has, {name: tensor}, each time an update is finished. It reads messages by itself, not by the package's own function,
so that it is a second reading of the format: tensors without gaps, and a message ends with the tensor that makes it
larger than the limit.
"""

import sys
from math import prod
from multiprocessing.connection import Client, Listener


class Trainer:
    """The trainer's end: what vLLM calls a VLLMWeightSyncClient. `failing` names a call that fails there."""

    def __init__(self, address, key, failing=None):
        self._connection = Client(address, authkey=key)
        self.failing, self.calls = failing, []

    def close(self):
        self._connection.close()

    def _call(self, name, argument=None):
        self.calls.append((name, argument))
        self._connection.send((name, argument, name == self.failing))
        error = self._connection.recv()
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
    def __init__(self, device, file):
        import torch

        self.device, self.file, self.held, self.sizes = torch.device(device), file, {}, []

    def init(self, told):
        from zeropp_fp8.handover import TransferGroup

        assert told["packed"] is True
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)
        self.limit = told["packed_buffer_size_bytes"]
        self.group = TransferGroup(told["master_address"], told["master_port"], 1, 2, self.device)

    def start(self, _):
        self.sizes = []

    def update(self, told):
        import torch

        waiting = [
            (name, getattr(torch, dtype), shape)
            for name, dtype, shape in zip(told["names"], told["dtype_names"], told["shapes"], strict=True)
        ]
        if any(map(of_adapter, told["names"])):
            self.held = {name: tensor for name, tensor in self.held.items() if not of_adapter(name)}
        while waiting:
            message, size = [], 0
            while waiting and size <= self.limit:
                name, dtype, shape = waiting.pop(0)
                message.append((name, dtype, shape, size))
                size += prod(shape) * torch.empty(0, dtype=dtype).element_size()
            packed = torch.empty(size, dtype=torch.uint8, device=self.device)
            self.group.broadcast(packed)
            self.sizes.append(size)
            for name, dtype, shape, start in message:
                end = start + prod(shape) * torch.empty(0, dtype=dtype).element_size()
                values = torch.frombuffer(bytearray(packed[start:end].cpu().numpy().tobytes()), dtype=dtype)
                self.held[name] = values.reshape(shape)

    def finish(self, _):
        import torch

        torch.save({"held": self.held, "sizes": self.sizes}, self.file)


def of_adapter(name):
    return name.startswith("base_model.")


def main(address, key, device, file):
    with Listener(address, authkey=key.encode()) as listener:
        print("listening", flush=True)
        while True:
            with listener.accept() as connection:
                answer(connection, Engine(device, file))


def answer(connection, engine):
    while True:
        try:
            name, argument, fails = connection.recv()
        except EOFError:
            return
        try:
            if fails:
                raise ValueError(f"{name} is not to be had")
            getattr(engine, name)(argument)
            connection.send(None)
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
