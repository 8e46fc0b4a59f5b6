"""vLLM's own transfer with a WeightSource of the plugin. vLLM is imported when it is asked for, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from itertools import chain

import torch
from torch import Tensor

from zeropp_fp8.zero.export.lockstep import consume
from zeropp_fp8.zero.handover.changes import Changes, Patch
from zeropp_fp8.zero.handover.source import WeightSource

_SPARSE = "vllm.distributed.weight_transfer.sparse_nccl_engine"
_IN_PATCHES = (torch.bfloat16, torch.float16, torch.float32)
_OLDEST = "0.33"  # before, its sources were iterated themselves, and `metadata` was a method


class VLLMTransfer:
    """vLLM's trainer engine, whose failures reach every rank. It sends all weights each time.

    Attributes:
        engine: vLLM's own.
    """

    def __init__(self, source: WeightSource, replayed, engine) -> None:
        self._source, self._replayed, self.engine = source, replayed, engine

    def send_weights(self) -> None:
        """Hand over all that the source has; every rank takes it, as some of vLLM's transports need. Collective.

        Raises:
            RuntimeError: a rank or the engine has failed; on every rank.
        """
        consume("send_weights", iter(self._source), self._send)

    def shutdown(self) -> None:
        """Leave the engine."""
        self.engine.shutdown()

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._replayed.weights = weights
        self.engine.send_weights()


class VLLMSparseTransfer:
    """vLLM's trainer engine for elements that have changed. The first hand-over, and one after a failure, has all.

    Attributes:
        engine: vLLM's own; changes: what is sent, with its version.
    """

    def __init__(self, source: WeightSource, engine) -> None:
        self.changes, self.engine = Changes(source), engine

    def forget(self) -> None:
        """Send all weights next time: an engine has lost its own. One rank is enough."""
        self.changes.forget()

    def send_weights(self) -> None:
        """Hand over what has changed; nothing is said to the engine where nothing has. Collective.

        Raises:
            RuntimeError: a rank or the engine has failed, or a weight is NaN, which vLLM's patches cannot say; on every
                rank. Then all is sent next time.
        """
        self.changes.hand_over(self._send, self.engine.is_sender)

    def shutdown(self) -> None:
        """Leave the engine."""
        self.engine.shutdown()

    def _send(self, changes: Iterator[list[Patch]]) -> None:
        patch_of = import_module(_SPARSE).SparseWeightPatch
        for patches in self._begun(changes):
            are_nan = torch.stack([patch.values.isnan().any() for patch in patches])
            if are_nan.any():  # one wait for the device per group
                name = patches[are_nan.int().argmax()].name
                raise RuntimeError(f"{name} has values that are NaN, which vLLM's sparse patches take for unchanged")
            self.engine.send_weight_chunk([patch_of(p.name, p.indices, p.values, tuple(p.shape)) for p in patches])

    def _begun(self, changes: Iterator[list[Patch]]) -> Iterator[list[Patch]]:
        """The groups with patches, within one update of the engine."""
        groups = filter(None, changes)
        first = next(groups, None)
        if first is not None:
            self.engine.client.start_weight_update()
            yield from chain([first], groups)
            self.engine.client.finish_weight_update(weight_version=str(self.changes.version))


def vllm_transfer(source: WeightSource, init_info, client) -> VLLMTransfer | VLLMSparseTransfer:
    """vLLM's trainer engine over a source: its `send_weights()` hands over. Call it on every rank.

    Args:
        source: of `weights` "merged" or "base".
        init_info: one of vLLM's, e.g. `NCCLTrainerInitInfo(..., rank=torch.distributed.get_rank())`; with
            `SparseNCCLTrainerInitInfo` only elements that have changed are sent.
        client: e.g. `HTTPVLLMWeightSyncClient("http://localhost:8000")`.

    Raises:
        ImportError: there is no vLLM here, or one that is too old.
        ValueError: the source hands over adapters, which vLLM's transfer does not know; or what sparse patches
            cannot hold.
    """
    if source.gives_adapters:
        raise ValueError('vllm_transfer: vLLM takes no adapters this way: use WeightSource(..., weights="merged")')
    try:
        vllm = import_module("vllm.distributed.weight_transfer")
        factory, base, meta = vllm.WeightTransferTrainerFactory, vllm.WeightSource, vllm.ParamMeta
        base.iter_full  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"vllm_transfer needs vLLM {_OLDEST} or newer (vllm.distributed.weight_transfer with sources that have "
            f"iter_full): {error}; install it with `pip install 'vllm>={_OLDEST}'`, or send with "
            "zeropp_fp8.handover.Transfer, which needs none"
        ) from error
    if getattr(init_info, "backend", None) == "sparse_nccl":
        others = [declared for declared in source.metadata() if declared.dtype not in _IN_PATCHES]
        if others:
            raise ValueError(
                f"vllm_transfer: {others[0].name} is {others[0].dtype}, and vLLM's sparse patches hold weights of 16 "
                'and 32 bits: use NCCLTrainerInitInfo, or WeightSource(..., format="none")'
            )
        return VLLMSparseTransfer(source, factory.trainer_init(init_info=init_info, client=client))

    class Replayed(base):
        """The plugin's source as one of vLLM's, with the `weights` that a hand-over is to send."""

        weights: Iterator[tuple[str, Tensor]] = iter(())

        @cached_property
        def metadata(self):
            return [meta(*declared) for declared in source.metadata()]

        def iter_full(self):
            return self.weights

    replayed = Replayed()
    return VLLMTransfer(source, replayed, factory.trainer_init(init_info=init_info, client=client, source=replayed))
