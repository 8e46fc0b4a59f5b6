"""AdamW with 6 bytes of state a parameter, as a plain torch.optim.Optimizer.

optimizer.state[p] holds tensors: "step" (fp32, on the CPU), and for each of "master", "exp_avg" and "exp_avg_sq" its
codes in the shape of p, "..._scale" (E8M0 bytes) where the format has scales.
They are views of flat buffers, one a quantity, so that a step is one launch for all parameters that belong together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.formats.noise import Seed
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer, make_state_buffers
from zeropp_fp8.optim.state_formats import OPTIONS, STORAGES, StateFormats
from zeropp_fp8.optim.update import UPDATES, Owned

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_QUANTITIES = ("master", "exp_avg", "exp_avg_sq")
# Options that must be the same where state is loaded: all that say how it is stored.
_STORED_AS = tuple(name for name in OPTIONS if name != "rounding")


@dataclass
class _Bucket:
    """Parameters of one group, dtype and device whose state lies in the same buffers."""

    group: int
    params: list[Tensor]
    segments: Segments
    buffers: dict[str, StateBuffer]  # without "master" where the parameters are the master weights


class _Kept:
    """Carries a tensor past Optimizer.load_state_dict, which casts all state to the dtype of its parameter."""

    def __init__(self, value: Any) -> None:
        self.value = value


class FP8AdamW(torch.optim.Optimizer):
    """AdamW whose state is stored in 8 and 16 bits; the arithmetic is fp32.

    The parameters themselves hold the master weights, rounded to their dtype. An fp32 or bf16 parameter whose master
    format is the same is its own master: then there is no copy. Otherwise the first step copies the parameter; what is
    written to parameters afterwards by others is overwritten by the next step.

    Args:
        params: tensors or groups of them, in fp32, bf16 or fp16, on any devices. A group may have its own value of
            every option below.
        lr, betas, eps, weight_decay, maximize: as in torch.optim.AdamW.
        amsgrad: must be False: a fourth quantity is not kept.
        master_format, exp_avg_format, exp_avg_sq_format: "fp32", "bf16", "fp16" (with a scale), "fp8_e4m3", "fp8_e5m2".
        scales: one a "tensor" or a "block" of `block_size` elements. With "tensor" a step reads everything twice.
        block_size: a power of two from 16 to 1024.
        rounding: of the master weights, "nearest" or "stochastic".
        seed: of stochastic rounding. Data-parallel replicas must use the same, or their weights drift apart.

    Raises:
        ValueError: an option or a parameter's dtype is not supported.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        master_format: str = "fp16",
        exp_avg_format: str = "fp8_e4m3",
        exp_avg_sq_format: str = "fp16",
        scales: str = "tensor",
        block_size: int = 128,
        rounding: str = "nearest",
        seed: int = 0,
    ) -> None:
        self._buckets: list[_Bucket] = []
        self._minus_one: dict[torch.device, Tensor] = {}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "master_format": master_format,
                "exp_avg_format": exp_avg_format,
                "exp_avg_sq_format": exp_avg_sq_format,
                "scales": scales,
                "block_size": block_size,
                "rounding": rounding,
                "seed": seed,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim.Optimizer; the group's options and dtypes are checked."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; returns what the closure, if any, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            with_grad = [p for p in group["params"] if p.grad is not None]
            for p in with_grad:
                if p.grad.is_sparse:
                    raise RuntimeError("FP8AdamW does not support sparse gradients; use dense ones (sparse=False)")
            self._bind(index, [p for p in with_grad if p not in self.state])
        for bucket in self._buckets:
            self._step_bucket(bucket, self.param_groups[bucket.group])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the state that `state_dict` of an optimizer with the same formats returned; it resumes bit for bit.

        Raises:
            ValueError: another optimizer's state, other formats or other shapes.
        """

        def keep(_, loaded: dict[str, Any]) -> dict[str, Any]:
            for index, (own, saved) in enumerate(zip(self.param_groups, loaded["param_groups"])):
                for name in _STORED_AS:
                    if saved.get(name) != own[name]:
                        raise ValueError(
                            f"group {index} was saved with {name}={saved.get(name)!r}, this optimizer has "
                            f"{own[name]!r}: make the optimizer with the formats of the saved state"
                        )
            kept = {
                param: {name: _Kept(value) for name, value in values.items()}
                for param, values in loaded["state"].items()
            }
            return {**loaded, "state": kept}

        hook = self.register_load_state_dict_pre_hook(keep)  # after the user's own
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What loading and unpickling end in: lay the saved tensors out in flat buffers again."""
        super().__setstate__(state)
        self._buckets, self._minus_one = [], {}
        saved = self.state
        for values in saved.values():
            for name, value in values.items():
                values[name] = value.value if isinstance(value, _Kept) else value
        for index, group in enumerate(self.param_groups):
            self._bind(index, [p for p in group["params"] if p in saved], saved)

    def num_state_bytes(self) -> int:
        """Bytes of codes and scales, padding included; parameters that are their own master not counted."""
        return sum(buffer.num_bytes() for bucket in self._buckets for buffer in bucket.buffers.values())

    def _bind(self, index: int, params: list[Tensor], saved: dict[Tensor, dict[str, Any]] | None = None) -> None:
        """Make buckets for parameters of a group, with their state zero, or as saved."""
        if not params:
            return
        group = self.param_groups[index]
        formats = StateFormats.of(group)
        first_id = sum(len(earlier["params"]) for earlier in self.param_groups[:index])
        ids = {p: first_id + place for place, p in enumerate(group["params"])}
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in params:
            alike.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), members in alike.items():
            segments = Segments([p.numel() for p in members], device, [ids[p] for p in members])
            buffers = dict(zip(_QUANTITIES, make_state_buffers(segments, formats)))
            if _is_own_master(dtype, formats):
                del buffers["master"]
            bucket = _Bucket(index, members, segments, buffers)
            for segment, p in enumerate(members):
                state = _views(buffers, segment, p)
                if saved is None:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    if "master" in buffers:
                        buffers["master"].encode_(segment, p.detach().reshape(-1).to(torch.float32))
                else:
                    _copy_saved(state, saved[p])
                    state["step"] = torch.as_tensor(saved[p]["step"], dtype=torch.float32, device="cpu").clone()
                self.state[p] = state
            self._buckets.append(bucket)

    def _step_bucket(self, bucket: _Bucket, group: dict[str, Any]) -> None:
        # Nearly always one launch: parameters differ in their step count only where some had no gradient at times.
        launches: dict[tuple[int, torch.dtype], list[Tensor | None]] = {}
        active = [self.state[p]["step"] for p in bucket.params if p.grad is not None]
        if not active:
            return
        torch._foreach_add_(active, 1)
        counts = iter(torch.stack(active).tolist())
        for place, p in enumerate(bucket.params):
            if p.grad is not None:
                key = int(next(counts)), p.grad.dtype
                launches.setdefault(key, [None] * len(bucket.params))[place] = p.grad.detach().contiguous()
        weights = [p.detach() for p in bucket.params]
        dense = [w if w.is_contiguous() else w.contiguous() for w in weights]
        update, (master, *states) = UPDATES["FP8AdamW"], (bucket.buffers.get(name) for name in _QUANTITIES)
        for (step, _), grads in launches.items():
            seed = Seed.of(group["seed"], step) if group["rounding"] == "stochastic" else None
            sign = self._sign(bucket.segments.device) if group["maximize"] else None
            owned = Owned(bucket.segments, master, states, grads, dense, sign, seed)
            update.apply(owned, step, update.options(self, group))
        for p, w, d in zip(bucket.params, weights, dense):
            if d is not w and p.grad is not None:
                w.copy_(d)

    def _sign(self, device: torch.device) -> Tensor:
        if device not in self._minus_one:
            self._minus_one[device] = torch.full((1,), -1.0, dtype=torch.float32, device=device)
        return self._minus_one[device]


def _is_own_master(dtype: torch.dtype, formats: StateFormats) -> bool:
    storage = STORAGES[formats.master]
    return not storage.scaled and storage.dtype == dtype


def _check_group(group: dict[str, Any]) -> None:
    """Refuse options and dtypes that are not supported.

    Raises:
        ValueError: one that is not.
    """
    if group["amsgrad"]:
        raise ValueError("FP8AdamW keeps no maximum of the second moment: leave amsgrad out or use torch.optim.AdamW")
    beta1, beta2 = group["betas"]
    for name, value, fits in (
        ("lr", group["lr"], group["lr"] >= 0),
        ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", group["eps"], 0 <= group["eps"] < math.inf),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
    ):
        if not fits:
            raise ValueError(f"{name} is out of range: {value}")
    StateFormats.of(group)
    if not isinstance(group["seed"], int) or not 0 <= group["seed"] < 1 << 62:
        raise ValueError(f"seed must be an integer of at most 62 bits, got {group['seed']!r}")
    for p in group["params"]:
        if p.dtype not in _DTYPES:
            raise ValueError(f"parameters must be fp32, bf16 or fp16, got {p.dtype}")


def _views(buffers: dict[str, StateBuffer], segment: int, p: Tensor) -> dict[str, Tensor]:
    """What the buffers hold of one parameter, by the names of optimizer.state."""
    views = {}
    for name, buffer in buffers.items():
        views[name] = buffer.segments.view(buffer.codes, segment).view(p.shape)
        if buffer.scales is not None:
            views[f"{name}_scale"] = buffer.scales[buffer.units(segment)]
    return views


def _copy_saved(state: dict[str, Tensor], saved: dict[str, Any]) -> None:
    if set(saved) != {*state, "step"}:
        raise ValueError(f"the saved state of a parameter holds {sorted(saved)}, needed: {sorted([*state, 'step'])}")
    for name, view in state.items():
        value = saved[name]
        if value.dtype != view.dtype or value.shape != view.shape:
            raise ValueError(
                f"the saved {name} is {value.dtype} {tuple(value.shape)}, needed: {view.dtype} {tuple(view.shape)}"
            )
        view.copy_(value)
