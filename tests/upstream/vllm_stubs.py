"""vLLM's own weight transfer from an unpacked wheel, on a machine without CUDA: which of its modules are stand-ins.

    unzip -d /path/to/vllm vllm-0.33.0-*.whl 'vllm/distributed/weight_transfer/*' 'vllm/config/weight_transfer.py' \
        'vllm/model_executor/model_loader/checkpoint_weight_patch.py'

Everything in those files is vLLM's. Packages above them are not executed. Stand-ins are what needs CUDA, C extensions
or the rest of vLLM: `vllm.config`, `vllm.config.parallel` (names of types), `vllm.config.utils.config` (a dataclass),
`vllm.logger.init_logger` (logging), `vllm.utils.nccl` and `vllm.distributed.utils` (nothing), `model_loader.reload` and
`mtp_validation` (nothing: the model loads in place), the NCCL communicator (`Wire`, which hands tensors from the
trainer's thread to the worker's), `pybase64` (base64), and torch's CUDA streams, events
and current device.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import logging
import queue
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

SECONDS = 60  # after which a thread that waits for the other gives up


class Wire:
    """The two ends of a communicator, one for each thread: what one broadcasts, the other receives."""

    def __init__(self) -> None:
        self.tensors: queue.Queue = queue.Queue()
        self.sent_bytes = self.messages = 0

    def end(self, sends: bool) -> SimpleNamespace:
        return SimpleNamespace(
            broadcast=self._send if sends else self._receive, device=torch.device("cpu"), destroy=lambda: None
        )

    def _send(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        self.messages += 1
        self.sent_bytes += tensor.numel() * tensor.element_size()
        self.tensors.put(tensor.clone())

    def _receive(self, tensor: torch.Tensor, src: int, stream=None) -> None:
        came = self.tensors.get(timeout=SECONDS)
        assert (came.dtype, came.shape) == (tensor.dtype, tensor.shape)
        tensor.copy_(came)


class InOrder:
    """A stream, or an event, of a CPU, on which all is done in order."""

    def __init__(self, device=None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait_event = record = lambda self, other: None


def install(wheel: Path) -> None:
    """Make `vllm.distributed.weight_transfer` of an unpacked wheel importable."""

    def module(name: str, **names) -> None:
        made = sys.modules[name] = ModuleType(name)
        made.__path__ = [str(wheel.joinpath(*name.split(".")))]
        vars(made).update(names)

    for name in ("vllm", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.model_loader", "vllm.utils"):
        module(name)
    module("vllm.config", VllmConfig=object)
    module("vllm.config.parallel", ParallelConfig=object)
    module("vllm.config.utils", config=dataclasses.dataclass)
    loader = "vllm.model_executor.model_loader"
    nothing = dict.fromkeys(("initialize_layerwise_reload", "finalize_layerwise_reload"), lambda *arguments: None)
    module(f"{loader}.reload", **nothing)
    module(f"{loader}.mtp_validation", disable_mtp_completeness_check=contextlib.nullcontext)
    module("vllm.logger", init_logger=logging.getLogger)
    module("vllm.utils.nccl", unpinned_nccl_env=contextlib.nullcontext)
    module("vllm.distributed.utils", StatelessProcessGroup=object)
    module("vllm.distributed.device_communicators")
    module("vllm.distributed.device_communicators.pynccl", PyNcclCommunicator=object)
    module("vllm.distributed.device_communicators.pynccl_wrapper", NCCL_UNIQUE_ID_BYTES=128)
    sys.modules["pybase64"] = base64
    torch.cuda.current_stream = lambda *args, **kwargs: None
    torch.accelerator.device_index = lambda index: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.current_stream, torch.cuda.Stream, torch.Event = InOrder, InOrder, InOrder
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda tensor, stream: None


@contextlib.contextmanager
def joined(wire: Wire):
    """Let vLLM's trainer and worker engines meet over a wire instead of NCCL."""
    from unittest import mock

    from vllm.distributed.weight_transfer import nccl_engine, sparse_nccl_engine

    with contextlib.ExitStack() as stack:
        for engine in (nccl_engine, sparse_nccl_engine):
            stack.enter_context(mock.patch.object(engine, "open_trainer_endpoint", lambda init_info: wire.end(True)))
            worker = mock.patch.object(engine, "worker_init_process_group", lambda *arguments: wire.end(False))
            stack.enter_context(worker)
        yield
