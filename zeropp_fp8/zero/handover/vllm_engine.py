"""vLLM's worker engine for updates: `weight_transfer_config={"backend": "zeropp_fp8"}`; the trainer has a `Transfer`.

vLLM's models cut and fuse weights. So a worker keeps those of the checkpoint too, on its device, and adds differences
to them: 2 bytes per weight in bf16. vLLM's own loader of patches writes what has changed to the model. vLLM's
"sparse_nccl" (`vllm_transfer`) needs no such memory.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.zero.gather.storage import BITS
from zeropp_fp8.zero.handover.group import TransferGroup
from zeropp_fp8.zero.handover.receiver import Receiver
from zeropp_fp8.zero.handover.update import Header

BACKEND = "zeropp_fp8"
_IN_PATCHES = {"bfloat16", "float16", "float32"}


def register() -> None:
    """Let vLLM know of the backend; by the entry point `vllm.general_plugins` vLLM calls it in each of its processes.

    An older vLLM continues without it, and says that it does not know the backend if asked for it.
    """
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError as error:
        logging.getLogger("vllm").warning("the weight transfer of zeropp_fp8 needs vLLM 0.33 or newer: %s", error)
        return
    WeightTransferEngineFactory.register_engine(BACKEND, __name__, "UpdateEngine")


def _changed(now: Tensor, before: Tensor | None) -> Tensor:
    """The places of elements with other bits; all where nothing was there."""
    if before is None:
        return torch.arange(now.numel(), device=now.device)
    now, before = (tensor.view(-1).view(BITS[tensor.element_size()]) for tensor in (now, before))
    return (now != before).nonzero().view(-1)


def __getattr__(name: str) -> Any:
    """UpdateEngine, once vLLM asks for it: its base is vLLM's."""
    if name != "UpdateEngine":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.distributed.weight_transfer import WeightTransferEngine
    from vllm.model_executor.model_loader import checkpoint_weight_patch as patching

    class UpdateEngine(WeightTransferEngine):
        """Receives updates, and gives what they have changed to the model of a worker."""

        init_info_cls = dict  # of what `Transfer` gives
        update_info_cls = Header
        supports_draft_weight_update = False

        def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
            super().__init__(config, vllm_config, device, model)
            self._receiver = Receiver(device=device)
            self._group: TransferGroup | None = None

        def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self.shutdown()
            parallel = self.parallel_config
            number = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._group = TransferGroup.join(init_info, number, self.device)

        def start_weight_update(self) -> None:
            """Nothing: patches are applied in place."""

        def finish_weight_update(self) -> None:
            """Nothing: patches are applied in place."""

        def receive_weights(self, update_info: Header) -> None:
            kept, names = self._receiver.weights, update_info.names
            if not set(update_info.dtype_names) <= _IN_PATCHES:
                raise ValueError(
                    f"{BACKEND}: vLLM's patches hold weights of 16 and 32 bits, and {', '.join(names)} are "
                    f'{", ".join(update_info.dtype_names)}: use WeightSource(..., format="none"), or the backend "nccl"'
                )
            before = {name: kept[name].clone() for name in names if name in kept}
            self._receiver.receive(vars(update_info), self._group)
            patches = []
            for name, now in ((name, kept[name]) for name in names):
                indices, shape = _changed(now, before.get(name)), tuple(now.shape)
                patches.append(patching.CheckpointWeightPatch(name, shape, now.dtype, now.view(-1)[indices], indices))
            patching.load_checkpoint_weight_patches(self.model, [patch for patch in patches if len(patch.indices)])

        def shutdown(self) -> None:
            group, self._group = self._group, None
            if group is not None:
                group.leave()

    return UpdateEngine
