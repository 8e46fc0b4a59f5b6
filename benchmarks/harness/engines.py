"""The trainings that the FP8-LM benchmarks compare: ZeRO-3 engines over the same plain model.

stock, stock-leaf   DeepSpeed's ZeRO-3 in bf16 with fp32 AdamW; with every layer as a z3 leaf module
lossless            the same through this project: what the levels of FP8-LM are added to
fp8-compute         lossless, linear layers in FP8
fp8-lm-o1           + FP8 gradients, on the wire and until the step
fp8-lm-o2           + AdamW's states in 5 bytes per parameter
fp8-lm              + whole tensors and FP8 weights on the wire (O3)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.environment import forget_memory
from benchmarks.harness.hf_llama import with_loss
from benchmarks.harness.measuring import live_bytes
from benchmarks.harness.sizes import Size
from benchmarks.harness.zero3 import ds_config

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
BASE = "lossless"  # bf16 with fp32 AdamW, what others are compared with where it was run; else stock
LEVELS = ("fp8-lm-o1", "fp8-lm-o2", "fp8-lm")


class EngineRun:
    """A bf16 Llama, or a mixture of experts, in a ZeRO-3 engine.

    Args:
        section: the plugin's; None for stock DeepSpeed.
        leaf: make every layer, or stage of layers, a z3 leaf module (stock only).
        dtype: of the initial weights; fp32 weights are drawn on the CPU, so that they are the same on every device.
        optimizer: makes the optimizer of a model; AdamW of all parameters alike without it.
        unit_layers: of the model.
        weights: a file with all of the model's weights, to begin with instead of random ones.
        zero: more of the section "zero_optimization".
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
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        unit_layers: int = 1,
        weights: str | None = None,
        zero: dict | None = None,
    ) -> None:
        import deepspeed

        import zeropp_fp8

        zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
        self.device, self.found_bytes = device, live_bytes(device)
        torch.manual_seed(seed)
        if dtype == torch.float32:
            model = with_loss(size, checkpointing, unit_layers)
            if weights is not None:
                model.load_state_dict(torch.load(weights, weights_only=True))
            model.to(device)
        else:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            with device:
                model = with_loss(size, checkpointing, unit_layers)
            torch.set_default_dtype(before)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.weight_bytes = live_bytes(device) - self.found_bytes
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, model._no_split_modules)
        fused = device.type == "cuda"
        chosen = optimizer(model) if optimizer else torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        config = ds_config(section, micro_batch, small=size.small, lean=lean)
        config["zero_optimization"] |= zero or {}
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
        import zeropp_fp8

        return zeropp_fp8.wire_report(self.engine).get("gradient_scaling") if self.with_plugin else None

    def close(self) -> None:
        """Free what can be freed."""
        import zeropp_fp8

        self.engine.destroy()
        del self.engine
        zeropp_fp8.disable()
        forget_memory(self.device)


def made(run: str, args, size: Size, device: torch.device, lean: bool = False) -> EngineRun:
    """The engine of a run."""
    return EngineRun(
        SECTIONS[run],
        size,
        device,
        leaf=run == "stock-leaf",
        micro_batch=args.micro_batch,
        checkpointing=args.checkpointing,
        lean=lean,
    )


def base_of(by_run: dict[str, dict]) -> dict | None:
    """Return what others are compared with, of what there is by run."""
    return next((by_run[run] for run in (BASE, *reversed(STOCK)) if run in by_run), None)
