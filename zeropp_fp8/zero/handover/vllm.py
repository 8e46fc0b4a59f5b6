"""vLLM's own transfer with a WeightSource of the plugin. vLLM is imported when it is asked for, and nowhere else."""

from __future__ import annotations

from importlib import import_module

from zeropp_fp8.zero.handover.source import WeightSource

_OLDEST = "0.29"


def vllm_transfer(source: WeightSource, init_info, client):
    """vLLM's trainer engine over a source: its `send_weights()` hands over. Call it on every rank.

    Args:
        init_info: one of vLLM's, e.g. `NCCLTrainerInitInfo(..., rank=torch.distributed.get_rank())`.
        client: e.g. `HTTPVLLMWeightSyncClient("http://localhost:8000")`.

    Raises:
        ImportError: there is no vLLM here, or one without these classes.
    """
    try:
        vllm = import_module("vllm.distributed.weight_transfer")
        factory, base, meta = vllm.WeightTransferTrainerFactory, vllm.WeightSource, vllm.ParamMeta
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"vllm_transfer needs vLLM {_OLDEST} or newer (vllm.distributed.weight_transfer with "
            f"WeightTransferTrainerFactory): {error}; install it with `pip install 'vllm>={_OLDEST}'`, or send with "
            "zeropp_fp8.handover.Transfer, which needs none"
        ) from error

    class Source(base):
        """The plugin's source as one of vLLM's."""

        def metadata(self):
            return [meta(*declared) for declared in source.metadata()]

        def __iter__(self):
            return iter(source)

    return factory.trainer_init(init_info=init_info, client=client, source=Source())
