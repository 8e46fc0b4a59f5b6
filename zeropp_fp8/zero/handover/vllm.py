"""vLLM's own transfer with a WeightSource of the plugin. vLLM is imported when it is asked for, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module

from torch import Tensor

from zeropp_fp8.zero.handover.source import ParamMeta, WeightSource
from zeropp_fp8.zero.handover.transfer import Sender

_OLDEST = "0.33"  # before, its sources were iterated themselves, and `metadata` was a method


class VLLMTransfer(Sender):
    """vLLM's trainer engine, whose failures reach every rank. It sends all weights each time: it plans by metadata.

    Attributes:
        engine: vLLM's own.
    """

    def __init__(self, source: WeightSource, replayed, engine) -> None:
        super().__init__(source, takes=True)  # some of vLLM's transports need them on every rank
        self._replayed, self.engine = replayed, engine

    def send_weights(self) -> None:
        """Hand over all weights. Collective; raises as `Sender.send_weights`."""
        if self._source.sender is self:
            self._source.forget()
        super().send_weights()

    def shutdown(self) -> None:
        """Leave the engine."""
        self.engine.shutdown()

    def _send(self, declared: list[ParamMeta], weights: Iterator[tuple[str, Tensor]]) -> None:
        self._replayed.weights = weights
        self.engine.send_weights()


def vllm_transfer(source: WeightSource, init_info, client) -> VLLMTransfer:
    """vLLM's trainer engine over a source: its `send_weights()` hands over. Call it on every rank.

    Args:
        source: of `weights` "merged" or "base"; or "auto" without `takes_adapters`, which is "merged" here.
        init_info: one of vLLM's, e.g. `NCCLTrainerInitInfo(..., rank=torch.distributed.get_rank())`.
        client: e.g. `HTTPVLLMWeightSyncClient("http://localhost:8000")`.

    Raises:
        ImportError: there is no vLLM here, or one that is too old.
        ValueError: the source hands over adapters apart, which vLLM's transfer does not know.
    """
    if source.has_adapters:
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

    class Replayed(base):
        """The plugin's source as one of vLLM's, with the `weights` that a hand-over is to send."""

        weights: Iterator[tuple[str, Tensor]] = iter(())

        @cached_property
        def metadata(self):
            source.forget()  # else only what is due is declared
            return [meta(*declared) for declared in source.metadata()]

        def iter_full(self):
            return self.weights

    replayed = Replayed()
    return VLLMTransfer(source, replayed, factory.trainer_init(init_info=init_info, client=client, source=replayed))
