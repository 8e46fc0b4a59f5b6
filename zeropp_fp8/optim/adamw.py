"""One AdamW step on quantities in any format: decode, update in fp32, round, store.

    g = gradient * grad_scale                                    L2 instead of decoupled decay: g += weight_decay * p
    m = m + (g - m) (1 - beta1)
    v = v beta2 + g g (1 - beta2)
    p = p (1 - lr weight_decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

The update uses this step's moments as they are before they are rounded. Then m, v and p are rounded to their formats
and stored, and the model's weights are written from the rounded p, so that a resumed run goes on from the same numbers.

Decoupled weight decay: AdamW (arXiv 1711.05101), as torch.optim.AdamW computes it. The torch code here runs on any
device and is the reference that kernels/optimizer/adamw.py must match bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeropp_fp8.formats.noise import Seed
from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer
from zeropp_fp8.optim.state_formats import storage_of_dtype

_GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def adamw_step(
    segments: Segments,
    master: StateBuffer | None,
    exp_avg: StateBuffer,
    exp_avg_sq: StateBuffer,
    grads: Sequence[Tensor | None] | FP8Gradients,
    weights_out: Sequence[Tensor] | None,
    hyper: Hyper,
    *,
    grad_scale: Tensor | None = None,
    seed: Seed | None = None,
    use_kernel: bool | None = None,
) -> None:
    """Update master weights and moments in place, and write the rounded master weights.

    The host waits for nothing. Gradients that hold NaN or Inf make NaN of what they touch (with scales, of the whole
    tensor or block), never finite numbers: whether to skip such a step is the caller's decision.

    Args:
        segments: the layout of all buffers.
        master: the master weights; None: `weights_out`, in fp32 or bf16, are the master weights themselves.
        exp_avg, exp_avg_sq: the moments.
        grads: one contiguous tensor a segment, all of one dtype (fp32, bf16 or fp16), at any alignment and of any
            shape; None leaves its segment as it is. Or FP8 codes laid out by the segments.
        weights_out: one contiguous tensor a segment, all of one dtype, which get the rounded master weights; or None.
        hyper: the hyperparameters.
        grad_scale: fp32 [1] on the device, multiplies every gradient.
        seed: round the master weights stochastically with the noise of this seed; None: to nearest.
        use_kernel: None: the Triton kernel on CUDA devices, torch elsewhere; True also in Triton's interpreter.

    Raises:
        ValueError: what is given does not fit the segments.
    """
    _check(segments, master, exp_avg, exp_avg_sq, grads, weights_out)
    if segments.num_tiles == 0:
        return
    constants = hyper.constants()
    if use_kernel is None:
        use_kernel = segments.device.type == "cuda"
    if use_kernel:
        from zeropp_fp8.optim.launch import kernel_step

        kernel_step(segments, master, exp_avg, exp_avg_sq, grads, weights_out, constants, grad_scale, seed)
        return
    for segment, numel in enumerate(segments.numels):
        if isinstance(grads, FP8Gradients):
            grad = grads.decode(segments, segment)
        elif grads[segment] is None:
            continue
        else:
            grad = grads[segment].detach().reshape(-1).to(torch.float32)
        if numel == 0:
            continue
        weights = None if weights_out is None else weights_out[segment].detach()
        old = weights.reshape(-1).to(torch.float32) if master is None else master.decode(segment)
        moments = exp_avg.decode(segment), exp_avg_sq.decode(segment)
        p, m, v = update(old, *moments, grad, grad_scale, constants)
        exp_avg.encode_(segment, m)
        exp_avg_sq.encode_(segment, v)
        if master is None:
            noise = None if seed is None else exp_avg.noise(segment, seed)
            rounded = storage_of_dtype(weights.dtype).codes_of(p, noise)
            weights.copy_(rounded.view_as(weights))
        else:
            master.encode_(segment, p, seed)
            if weights is not None:
                weights.copy_(master.decode(segment).view_as(weights))


def update(
    p: Tensor, m: Tensor, v: Tensor, g: Tensor, grad_scale: Tensor | None, constants: dict[str, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after a step, fp32, each operation rounded on its own and in the order in which the kernel takes them.

    sqrt(v) is multiplied by the reciprocal of sqrt(1 - beta2^t) where torch.optim divides: one rounding more of a
    constant (6e-8), one division an element less.
    """
    c = constants
    if grad_scale is not None:
        g = g * grad_scale
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


def _check(segments, master, exp_avg, exp_avg_sq, grads, weights_out) -> None:
    count = len(segments)
    for name, buffer in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if buffer is not None and buffer.segments.numels != segments.numels:
            raise ValueError(f"{name} is laid out by other segments")
    if isinstance(grads, FP8Gradients):
        grads.check(segments)
    else:
        _check_tensors("grads", [g for g in grads if g is not None])
        if len(grads) != count:
            raise ValueError(f"{count} segments need as many gradients, got {len(grads)}")
        for grad, numel in zip(grads, segments.numels):
            if grad is not None and grad.numel() != numel:
                raise ValueError(f"a gradient has {grad.numel()} elements, its segment {numel}")
    if weights_out is None:
        if master is None:
            raise ValueError("without master weights, weights_out must be given: they are the master weights then")
        return
    _check_tensors("weights_out", weights_out)
    if [w.numel() for w in weights_out] != list(segments.numels):
        raise ValueError("weights_out: one tensor of its size a segment")
    if master is None and weights_out:
        storage_of_dtype(weights_out[0].dtype)


def _check_tensors(name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype or tensor.dtype not in _GRADIENT_DTYPES or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous and all fp32, all bf16 or all fp16, got {tensor.dtype} after "
                f"{tensors[0].dtype}, contiguous: {tensor.is_contiguous()}"
            )
