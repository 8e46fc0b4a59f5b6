"""Muon: a weight matrix moves along its momentum, orthogonalized: all of its singular values become about 1.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon, 2024):

    m = m + (g - m) (1 - momentum)                               g: gradient * grad_scale
    u = g + (m - g) momentum                                     Nesterov; else m
    p = p (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) orthogonalized(u)

Five steps of a quintic Newton-Schulz iteration bring singular values between 0.01 and 1 to between 0.68 and 1.14. The
iteration takes the whole matrix, so that one rank must own all of it. What is no matrix of a hidden layer (embeddings,
head, norms, biases) is updated as by AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.optim.adamw import AdamWUpdate
from zeropp_fp8.optim.update import UPDATES, Computed, Update

COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS = 5
_EPS = 1e-7
NO_MATRIX = 'put what Muon does not update into a param group with "use_muon": False'


def orthogonalized(matrices: Tensor, steps: int = STEPS, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Matrices [..., rows, columns] with singular values of about 1, in `dtype`, in which products are taken."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # In fp32: fp16 cannot say the sum of squares of a matrix, and bf16 rounds it to 3 digits.
    x = (x / (x.float().norm(dim=(-2, -1), keepdim=True) + _EPS)).to(dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _product_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the iteration's products: bf16, and fp32 on a CPU, as DeepSpeed has it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class MuonUpdate(Update):
    """Muon's of matrices, AdamW's of groups that say `"use_muon": False`."""

    states = {"momentum_buffer": "exp_avg"}
    needs_whole = True
    takes_vectors = False

    def of_group(self, group: Mapping[str, Any]) -> Update:
        return self if group.get("use_muon", True) else _ADAMW

    def refusals(self, options: Mapping[str, Any]) -> Iterator[str]:
        if not options.get("use_muon", True):
            yield from _ADAMW.refusals(options)
        elif tuple(options.get("ns_coefficients", COEFFICIENTS)) != COEFFICIENTS:
            yield f'"ns_coefficients" of Muon are {COEFFICIENTS} here; leave them out'
        elif options.get("adjust_lr_fn", "original") not in (None, "original"):
            yield '"adjust_lr_fn" of Muon is "original" here: leave it out, and multiply the learning rate'

    def options(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {name: float(group[name]) for name in ("lr", "momentum", "weight_decay")}
        return {**numbers, "nesterov": bool(group.get("nesterov", True)), "steps": int(group.get("ns_steps", STEPS))}

    def compute(
        self, weight: Tensor, grad: Tensor, states: list[Tensor], step: int, options: Mapping[str, Any]
    ) -> Computed:
        momentum = states[0].lerp(grad, 1 - options["momentum"])
        moved = grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum
        direction = orthogonalized(moved.flatten(1), options["steps"], _product_dtype(weight.device)).view_as(weight)
        rows, columns = moved.flatten(1).shape
        rate = options["lr"] * math.sqrt(max(1.0, rows / columns))
        return weight * (1 - options["lr"] * options["weight_decay"]) - rate * direction.float(), [momentum]


class Muon(torch.optim.Optimizer):
    """Muon of matrices, and AdamW of groups with `"use_muon": False`, in one optimizer.

    Args:
        params: parameters or groups; all that are not of matrices (two dimensions or more) must be AdamW's.
        lr, weight_decay: of both; momentum, nesterov, ns_steps: Muon's; betas, eps: AdamW's.

    `step` raises ValueError where a parameter of a group of Muon's has fewer than two dimensions.
    """

    def __init__(
        self,
        params,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = STEPS,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_steps": ns_steps, "betas": betas, "eps": eps, "use_muon": True}
        super().__init__(params, defaults | {"decoupled_weight_decay": True})

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters with gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            update = UPDATES["Muon"].of_group(group)
            options = update.options(self, group)
            for param in (param for param in group["params"] if param.grad is not None):
                if is_vector(param.shape) and not update.takes_vectors:
                    raise ValueError(f"{tuple(param.shape)} is no matrix; {NO_MATRIX}")
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                for name in update.states:
                    if name not in state:
                        state[name] = torch.zeros_like(param, dtype=torch.float32)
                held = [state[name] for name in update.states]
                new, held = update.compute(param.float(), param.grad.float(), held, state["step"], options)
                param.copy_(new)
                state.update(zip(update.states, held))
        return loss


_ADAMW = AdamWUpdate()
UPDATES["Muon"] = MuonUpdate()  # also torch.optim.Muon
