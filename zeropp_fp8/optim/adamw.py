"""One AdamW step on quantities in any format: decode, update in fp32, round, store.

    g = gradient * grad_scale                                    L2 instead of decoupled decay: g += weight_decay * p
    m = m + (g - m) (1 - beta1)
    v = v beta2 + g g (1 - beta2)
    p = p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The update uses this step's moments as they are before they are rounded. Then m, v and p are rounded to their formats
and stored, and the model's weights are written from the rounded p.

Decoupled weight decay: AdamW (arXiv 1711.05101), as torch.optim.AdamW computes it. The torch code here runs on any
device and is the reference that kernels/optimizer/adamw.py must match bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.config import SECTION
from zeropp_fp8.optim.update import UPDATES, Computed, Owned, Update


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of a step.

    Args:
        lr, beta1, beta2, eps, weight_decay: as in torch.optim.AdamW.
        step: which update this is, counted from 1.
        decoupled: AdamW's weight decay; False: L2 regularization, as torch.optim.Adam.
        bias_correction: divide the moments by 1 - beta^step.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    step: int = 1
    decoupled: bool = True
    bias_correction: bool = True

    def constants(self) -> dict[str, float]:
        """The numbers of the formula, worked out in fp64; they are used as fp32."""
        correction1 = 1 - self.beta1**self.step if self.bias_correction else 1.0
        correction2 = 1 - self.beta2**self.step if self.bias_correction else 1.0
        return {
            "keep": 1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            "l2": 0.0 if self.decoupled else float(self.weight_decay),
            "rest1": 1 - self.beta1,
            "beta2": float(self.beta2),
            "rest2": 1 - self.beta2,
            "step_size": self.lr / correction1,
            "root_factor": 1 / correction2**0.5,
            "eps": float(self.eps),
        }


def adamw_step(owned: Owned, hyper: Hyper, use_kernel: bool | None = None) -> None:
    """Update master weights and moments in place, and write the rounded master weights. The host waits for nothing.

    Gradients that hold NaN or Inf make NaN of what they touch (with scales, of the whole tensor or block), never finite
    numbers: whether to skip such a step is the caller's decision.

    Args:
        owned: its states are exp_avg and exp_avg_sq.
        use_kernel: None: the Triton kernel on CUDA devices, torch elsewhere; True also in Triton's interpreter.
    """
    if owned.segments.num_tiles == 0:
        return
    constants = hyper.constants()
    if use_kernel is None:
        use_kernel = owned.segments.device.type == "cuda"
    if use_kernel:
        from zeropp_fp8.optim.launch import kernel_step

        kernel_step(owned, constants)
        return

    def compute(weight: Tensor, grad: Tensor, moments: list[Tensor]) -> Computed:
        weight, *moments = update(weight, *moments, grad, constants)
        return weight, moments

    owned.change(compute)


def update(p: Tensor, m: Tensor, v: Tensor, g: Tensor, constants: dict[str, float]) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after a step, fp32, each operation rounded on its own and in the order in which the kernel takes them.

    sqrt(v) is multiplied by the reciprocal of sqrt(1 - beta2^t) where torch.optim divides: one rounding more of a
    constant (6e-8), one division an element less.
    """
    c = constants
    if c["l2"] != 0:
        g = g + p * c["l2"]
    m = m + (g - m) * c["rest1"]
    v = v * c["beta2"] + (g * g) * c["rest2"]
    denominator = square_root(v) * c["root_factor"] + c["eps"]
    quotient = (m / denominator).masked_fill_(m.isinf(), math.nan)
    return p * c["keep"] - quotient * c["step_size"], m, v


def square_root(x: Tensor) -> Tensor:
    """sqrt of fp32 numbers kept within [2^-100, largest fp32], correctly rounded; NaN stays NaN.

    Bounds spare the kernel a branch an element. 2^-50 adds no more to an eps of 1e-8 than its last bit, and Inf, of a
    gradient above 1e19, is NaN once it is stored with a scale.

    torch's own on a CPU may be MKL's, which is one bit off for a fifth of all numbers. The root in fp64 has more than
    twice fp32's digits, so rounding it a second time does no harm.
    """
    x = x.clamp(2.0**-100, torch.finfo(torch.float32).max)
    return x.sqrt() if x.device.type == "cuda" else x.double().sqrt().float()


class AdamWUpdate(Update):
    """Adam's and AdamW's, in one launch where there is a kernel."""

    states = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}

    def refusals(self, options: Mapping[str, Any]) -> Iterator[str]:
        for option in ("amsgrad", "maximize"):
            if options.get(option):
                yield (
                    f'"{option}" of Adam does not go with states in low precision ("{SECTION}.optimizer"); leave it '
                    "out, or set the formats to fp32"
                )

    def options(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        beta1, beta2 = map(float, group["betas"])
        numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
        flags = {
            "decoupled": _decouples_weight_decay(optimizer, group),
            "bias_correction": bool(group.get("bias_correction", True)),
        }
        return {"beta1": beta1, "beta2": beta2, **numbers, **flags}

    def compute(
        self, weight: Tensor, grad: Tensor, states: list[Tensor], step: int, options: Mapping[str, Any]
    ) -> Computed:
        weight, *states = update(weight, *states, grad, Hyper(step=step, **options).constants())
        return weight, states

    def apply(self, owned: Owned, step: int, options: Mapping[str, Any]) -> None:
        adamw_step(owned, Hyper(step=step, **options))


def _decouples_weight_decay(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether weight decay is AdamW's, not an L2 penalty."""
    if hasattr(optimizer, "adam_w_mode"):  # DeepSpeed's FusedAdam and DeepSpeedCPUAdam
        return bool(optimizer.adam_w_mode)
    if "AdamW" in {cls.__name__ for cls in type(optimizer).__mro__}:
        return True
    return bool(group.get("decoupled_weight_decay", False))


UPDATES |= dict.fromkeys(("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"), AdamWUpdate())
