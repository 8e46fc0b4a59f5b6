"""Hand-overs on ranks to vLLM's own worker engine, which rank 0 has in another thread."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import deepspeed
import handover_jobs
import torch
import torch.distributed as dist
from models import full_weights, train
from ranks import attempt
from vllm_stubs import Wire, install, joined

from zeropp_fp8.handover import Transfer, WeightSource, vllm_transfer
from zeropp_fp8.zero.handover import vllm_engine


class Model:
    """An inference model that loads weights by the names of the checkpoint, in place."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, named) -> set[str]:
        for name, tensor in named:
            if name in self.weights:
                self.weights[name].copy_(tensor)
            else:
                self.weights[name] = tensor.clone()
        return set(self.weights)


class Client:
    """vLLM's four calls, answered by a worker engine of vLLM's; one of them may fail."""

    def __init__(self, worker, model: Model) -> None:
        self.worker, self.model, self.calls, self.failing, self.version = worker, model, [], None, None

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise OSError(f"{name} is not to be had")

    def init_weight_transfer_engine(self, init_info) -> None:
        self._called("init")
        self.worker.init_transfer_engine(self.worker.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self._called("start")
        self.worker.start_weight_update()

    def update_weights(self, update_info) -> None:
        self._called("update")
        self.worker.receive_weights(self.worker.parse_update_info(update_info))

    def finish_weight_update(self, weight_version=None) -> None:
        self._called("finish")
        self.version = weight_version
        self.worker.finish_weight_update()


def worker_of(model: Model, backend: str):
    """vLLM's worker engine, from its factory."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device("cpu"), model
    )


def equal(model: Model, engine) -> bool:
    """Whether the inference model has every bit of the training weights; True on ranks without one."""
    weights = full_weights(engine.module)
    if dist.get_rank():
        return True
    return model.weights.keys() == weights.keys() and all(
        torch.equal(model.weights[name].float(), weight) for name, weight in weights.items()
    )


def changes_to_vllm(wheel: str, ways: dict) -> dict:
    """{way: of hand-overs of what has changed: equal, bytes; what is said of failures}; all at first and after one."""
    install(Path(wheel))
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo

    told, found = SparseNCCLTrainerInitInfo("127.0.0.1", 1, 2, rank=dist.get_rank()), {}
    for way, (recipe, adapters, fields) in ways.items():
        engine, model, wire = handover_jobs.engine_of(recipe, adapters, "bf16", **fields), Model(), Wire()
        source, rounds = WeightSource(engine), []
        model.weights = {n: torch.zeros(shape, dtype=dtype) for n, dtype, shape in source.metadata()}
        client = Client(worker_of(model, "sparse_nccl"), model)
        with joined(wire):
            transfer = vllm_transfer(source, told, client)

            def send(transfer=transfer, source=source, rounds=rounds, model=model, wire=wire, client=client):
                wire.sent_bytes, client.calls[:] = 0, []
                said = attempt(transfer.send_weights)
                whole = handover_jobs.copied(source)
                same = dist.get_rank() or all(torch.equal(model.weights[n], tensor) for n, tensor in whole.items())
                rounds.append((said, bool(same), wire.sent_bytes, sorted(set(client.calls)), client.version))

            send()
            send()
            train(engine, 1)
            send()
            client.failing = "update"
            train(engine, 1)
            send()
            client.failing = None
            send()
            norm = next(p for n, p in engine.module.named_parameters() if n.endswith("model.norm.weight"))
            with deepspeed.zero.GatheredParameters([norm], modifier_rank=0):
                norm.data[3] = float("nan")
            send()
            transfer.shutdown()
        found[way] = rounds
        if way == "slices":
            codes = WeightSource(engine, format="fp8")
            found["codes"] = attempt(lambda codes=codes, client=client: vllm_transfer(codes, told, client))
        engine.destroy()
    return found


def updates_to_vllm(wheel: str) -> tuple[list, str]:
    """[(what is said, equal, elements that the model loads)]: at first, at once, after a step, after the engine
    was started again, and with NaN. And what is said of FP8 codes.
    """
    install(Path(wheel))
    from unittest import mock

    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patching

    if dist.get_rank() == 0 and vllm_engine.BACKEND not in WeightTransferEngineFactory._registry:
        vllm_engine.register()
    engine, model, found, loaded = handover_jobs.engine_of("zeropp", dtype="bf16"), Model(), [], []
    source = WeightSource(engine)
    model.weights = {n: torch.zeros(shape, dtype=dtype) for n, dtype, shape in source.metadata()}
    here = dist.get_rank() == 0
    client = Client(worker_of(model, vllm_engine.BACKEND), model) if here else None
    known = patching.load_checkpoint_weight_patches

    def counted(model, patches):
        loaded.append(sum(len(patch.indices) for patch in patches))
        return known(model, patches)

    transfer = Transfer(source, client, "127.0.0.1", seconds=30)

    def send():
        loaded.clear()
        said = attempt(transfer.send_weights)
        whole = handover_jobs.copied(source)
        same = not here or all(torch.equal(model.weights[n], tensor) for n, tensor in whole.items())
        found.append((said, same, sum(loaded)))

    with mock.patch.object(patching, "load_checkpoint_weight_patches", counted):
        send()
        send()
        train(engine, 1)
        send()
        if here:
            client.worker = worker_of(model, vllm_engine.BACKEND)
        transfer.shutdown()
        transfer.forget()
        send()
        norm = next(p for n, p in engine.module.named_parameters() if n.endswith("model.norm.weight"))
        with deepspeed.zero.GatheredParameters([norm], modifier_rank=0):
            norm.data[3] = float("nan")
        send()
    transfer.shutdown()
    if here:
        client.worker = worker_of(model, vllm_engine.BACKEND)
    transfer = Transfer(WeightSource(engine, format="fp8"), client, "127.0.0.1", seconds=30)
    codes = attempt(transfer.send_weights)
    transfer.shutdown()
    engine.destroy()
    return found, codes


def to_vllm(wheel: str, packed: bool) -> dict:
    """Two hand-overs, a failing one, and one after it; `equal` after those that succeed; `messages` of the first."""
    install(Path(wheel))
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    engine, model, wire = handover_jobs.engine_of("zeropp", dtype="bf16"), Model(), Wire()
    client = Client(worker_of(model, "nccl"), model)
    with joined(wire):
        how = {"packed": packed, "packed_buffer_size_bytes": 20_000}
        init_info = NCCLTrainerInitInfo("127.0.0.1", 1, 2, **how, rank=dist.get_rank())
        transfer = vllm_transfer(WeightSource(engine), init_info, client)
        found = {"adapters": attempt(lambda: vllm_transfer(SimpleNamespace(gives_adapters=True), init_info, client))}
        for name in ("first", "stepped"):
            transfer.send_weights()
            found[name] = equal(model, engine)
            found.setdefault("messages", wire.messages)
            train(engine, 1)
        client.failing = "finish"
        found["failing"] = attempt(transfer.send_weights)
        client.failing = None
        transfer.send_weights()
        found["then"] = equal(model, engine)
        found["calls"], found["sent"] = client.calls, wire.sent_bytes
        transfer.shutdown()
    engine.destroy()
    return found
