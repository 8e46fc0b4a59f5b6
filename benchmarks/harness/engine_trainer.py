"""A ZeRO-3 engine whose ranks share each batch, for trainings that are judged by their held-out loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.harness.engines import EngineRun
from benchmarks.harness.learning import BETAS, WEIGHT_DECAY
from benchmarks.harness.sizes import Size
from examples.pretrain.data import Sequences
from zeropp_fp8.optim import Muon


class EngineTrainer:
    """An engine with what learning.train_steps asks for; `trace` grows by a step's mu and shares.

    Args:
        section: the plugin's; None for DeepSpeed without it.
        seed: of the initial weights, drawn in fp32 on the CPU.
        args: ranks, batch (of all ranks) and lr.
        muon_lr: train matrices of layers with Muon at this learning rate, and the others with AdamW.
        more: of EngineRun.
    """

    def __init__(
        self, section: dict | None, size: Size, seed: int, args, device: torch.device, muon_lr=None, **more
    ) -> None:
        def optimizer(model: nn.Module) -> torch.optim.Optimizer:
            matrices, vectors = ([p for p in model.parameters() if (p.dim() >= 2) is many] for many in (True, False))
            groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
            if muon_lr is None:
                return torch.optim.AdamW(groups, lr=args.lr, betas=BETAS, fused=device.type == "cuda")
            of_layers = set(model.layers.parameters()) & set(matrices)
            groups[0]["params"] = [p for p in matrices if p not in of_layers]
            groups = [{"use_muon": False, "lr": args.lr, "betas": BETAS, "eps": 1e-8, **group} for group in groups]
            of_muon = [p for p in matrices if p in of_layers]
            return Muon([{"params": of_muon, "lr": muon_lr, "weight_decay": WEIGHT_DECAY}, *groups])

        self._rank, self._ranks = torch.distributed.get_rank(), args.ranks
        self.engine_run = EngineRun(
            section,
            size,
            device,
            micro_batch=args.batch // args.ranks,
            seed=seed,
            dtype=torch.float32,
            optimizer=optimizer,
            **more,
        )
        self._learning_rates = [group["lr"] for group in self.engine_run.engine.optimizer.param_groups]
        self.trace: dict[str, list[float]] = {}

    def step(self, tokens: Tensor, rate_factor: float) -> Tensor:
        """One step on this rank's part of the batch; its loss."""
        for group, learning_rate in zip(self.engine_run.engine.optimizer.param_groups, self._learning_rates):
            group["lr"] = learning_rate * rate_factor
        loss = self.engine_run.step(tokens[self._rank :: self._ranks].contiguous())
        scales = self.engine_run.gradient_scales()
        for name, value in (scales or {}).items():
            self.trace.setdefault(name, []).append(float(f"{value:.6g}"))
        return loss

    @torch.no_grad()
    def held_out_loss(self, held_out: Sequences, sequences: int, batch: int, model: nn.Module | None = None) -> float:
        """Mean loss over `sequences` sequences spread over the held-out text, each on one rank.

        Args:
            model: computes it instead of the engine.
        """
        model = model or self.engine_run.engine
        model.eval()
        batches = max(1, sequences // batch)
        losses = []
        for number in range(batches):
            tokens = held_out.evaluation_batch(number, batches, batch)
            losses.append(model(tokens[self._rank :: self._ranks].contiguous()))
        model.train()
        mean = torch.stack(losses).mean()
        torch.distributed.all_reduce(mean)
        return mean.item() / self._ranks

    def full_weights(self) -> dict[str, Tensor]:
        """The fp32 master weights, whole and on the CPU, by name; all ranks together."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(p).cpu() for name, p in self.engine_run.engine.module.named_parameters()}
