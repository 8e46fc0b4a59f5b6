"""The trainings that the FP8-LM benchmarks compare: ZeRO-3 engines over the same plain Llama.

stock, stock-leaf   DeepSpeed's ZeRO-3 in bf16 with fp32 AdamW; with every layer as a z3 leaf module
lossless            the same through this project: what the levels of FP8-LM are added to
fp8-compute         lossless, linear layers in FP8
fp8-lm-o1           + FP8 gradients, on the wire and until the step
fp8-lm-o2           + AdamW's states in 5 bytes a parameter
fp8-lm              + whole tensors and FP8 weights on the wire (O3)
"""

from __future__ import annotations

from typing import Any

import torch
from environment import forget_memory
from llama import Llama, Size
from measuring import live_bytes
from torch import Tensor
from zero3 import ds_config

SIZES = {
    "7b": Size(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000),
    "4b": Size(hidden=3072, intermediate=8192, layers=32, heads=24, kv_heads=24, vocabulary=32000),
    "2b": Size(hidden=2560, intermediate=6912, layers=24, heads=20, kv_heads=20, vocabulary=32000),
    "1.3b": Size(hidden=2048, intermediate=5504, layers=24, heads=16, kv_heads=16, vocabulary=32000),
    "small": Size(hidden=256, intermediate=688, layers=6, heads=4, kv_heads=4, vocabulary=2048),
    "tiny": Size(hidden=128, intermediate=352, layers=4, heads=4, kv_heads=4, vocabulary=512),
}
STOCK = ("stock", "stock-leaf")
SECTIONS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "stock-leaf": None,
    "lossless": {"recipe": "lossless"},
    "fp8-compute": {"recipe": "lossless", "compute": {"format": "fp8"}},
    "fp8-lm-o1": {"recipe": "fp8-lm-o1"},
    "fp8-lm-o2": {"recipe": "fp8-lm-o2"},
    "fp8-lm": {"recipe": "fp8-lm"},
}
LEVELS = ("fp8-lm-o1", "fp8-lm-o2", "fp8-lm")
SMALL = 1024  # hidden size of a model whose tensors are all below ZeRO-3's usual limits
PEAK_FLOPS = 989e12  # of an H200 (and H100) in dense bf16; the same for all runs, so that FP8 may exceed its half


class EngineRun:
    """A bf16 Llama in a ZeRO-3 engine.

    Args:
        section: the plugin's; None for stock DeepSpeed.
        leaf: make every layer a z3 leaf module (stock only).
        dtype: of the initial weights; fp32 weights are drawn on the CPU, so that they are the same on every device.
        groups: what to call for the optimizer's groups of a model; all parameters alike without it.
        optimizer: keywords of torch.optim.AdamW.
    """

    def __init__(
        self,
        section: dict | None,
        size: Size,
        device: torch.device,
        *,
        leaf: bool = False,
        micro_batch: int = 1,
        checkpointing: bool = False,
        lean: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        groups=None,
        optimizer: dict | None = None,
    ) -> None:
        import deepspeed

        import zeropp_fp8

        zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
        self.device, self.found_bytes = device, live_bytes(device)
        torch.manual_seed(seed)
        if dtype == torch.float32:
            model = Llama(size, checkpointing).to(device)
        else:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            with device:
                model = Llama(size, checkpointing)
            torch.set_default_dtype(before)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.weight_bytes = live_bytes(device) - self.found_bytes
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, ["Block"])
        chosen = torch.optim.AdamW(
            model.parameters() if groups is None else groups(model),
            **({"lr": 1e-4} | (optimizer or {})),
            fused=device.type == "cuda",
        )
        config = ds_config(section, micro_batch, small=size.hidden < SMALL, lean=lean)
        self.engine = deepspeed.initialize(model=model, optimizer=chosen, config=config)[0]
        self.with_plugin = section is not None

    def step(self, tokens: Tensor) -> Tensor:
        """One training step on int64 tokens [micro-batch, length]; the loss, fp32 []."""
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def wire(self) -> dict | None:
        """Bytes of all ranks so far, by the plugin's count."""
        import zeropp_fp8

        return zeropp_fp8.wire_report(self.engine, total=True) if self.with_plugin else None

    def gradient_scales(self) -> dict[str, float] | None:
        """mu and the shares of the last step, where gradients have scales that ranks share."""
        scales = getattr(self.engine.optimizer, "scales", None)
        return None if scales is None else scales.report()

    def close(self) -> None:
        """Free what can be freed."""
        import zeropp_fp8

        self.engine.destroy()
        del self.engine
        zeropp_fp8.disable()
        forget_memory(self.device)


def flops_per_token(size: Size, length: int) -> float:
    """Of a training step, without what checkpointing computes twice.

    6 for every weight that is multiplied (all but the embedding and the norms), and for attention half of
    12 * layers * hidden * length, because a position sees only those before it.
    """
    head_size = size.hidden // size.heads
    attention = 2 * size.hidden * size.hidden + 2 * size.hidden * size.kv_heads * head_size
    weights = size.layers * (attention + 3 * size.hidden * size.intermediate) + size.hidden * size.vocabulary
    return 6 * weights + 6 * size.layers * size.hidden * length
