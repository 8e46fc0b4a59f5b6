"""Muon: a weight matrix moves along its orthogonalized momentum, whose singular values are all about 1.

K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (kellerjordan.github.io/posts/muon, 2024):

    m = m + (g - m) (1 - momentum)                               g: gradient * grad_scale
    u = g + (m - g) momentum                                     Nesterov; else m
    p = p (1 - lr weight_decay) - lr sqrt(max(1, rows / columns)) orthogonalized(u)

Five steps of a quintic Newton-Schulz iteration bring singular values between 0.01 and 1 to between 0.68 and 1.14. It
takes the whole matrix, so one rank must own all of it. Embeddings, head, norms and biases are updated as by AdamW.

A tensor of three dimensions is a stack of matrices, such as packed experts; one of more is a convolution, whose rows
are its filters. `Rows` says which rows are whose where a tensor holds several matrices (query, key and value).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropp_fp8.formats.shapes import is_vector, matrix_shape
from zeropp_fp8.optim.adamw import AdamWUpdate
from zeropp_fp8.optim.update import UPDATES, Computed, Update

COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS = 5
METHODS = ("gram", "standard")
NO_MATRIX = 'put what Muon does not update into a param group with "use_muon": False'
_EPS = 1e-7
_BELOW = {**dict.fromkeys(("lr", "muon_lr", "adam_lr", "weight_decay", "eps", "ns_steps"), math.inf), "momentum": 1}


def orthogonalized(
    matrices: Tensor, steps: int = STEPS, dtype: torch.dtype = torch.bfloat16, method: str = "standard"
) -> Tensor:
    """Matrices [..., rows, columns] with singular values of about 1, in `dtype`, in which products are taken.

    Args:
        method: "gram": the same polynomial, from products of the smaller Gram matrix where a matrix is not square.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).reshape(-1, *sorted(matrices.shape[-2:]))
    # In fp32: fp16 cannot say the sum of squares of a matrix, and bf16 rounds it to 3 digits.
    norm = x.float().norm(dim=(-2, -1), keepdim=True) + _EPS
    x = torch.div(x, norm, out=torch.empty_like(x, dtype=dtype))
    if method == "gram" and x.shape[-2] < x.shape[-1]:
        # In 16 bits a Gram matrix that is carried along drifts from that of the matrix: made anew after two steps.
        for some in (min(steps, 2), steps - 2):
            x = _by_gram_matrix(x, some)
    else:
        for _ in range(steps):
            x = torch.add(_factor(x @ x.mT) @ x, x, alpha=COEFFICIENTS[0])
    return (x.mT if tall else x).view(matrices.shape)


def _factor(gram: Tensor) -> Tensor:
    """b G + c G^2, whose sum is the product's last pass."""
    _, b, c = COEFFICIENTS
    return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)


def _by_gram_matrix(x: Tensor, steps: int) -> Tensor:
    """Some steps at once: with G = x x' and P = b G + c G^2, each is x <- (a + P) x and G <- (a + P) G (a + P).

    T. Dao, "Gram Newton-Schulz" (tridao.me/blog/2026/gram-newton-schulz).
    """
    if steps < 1:
        return x
    a, product = COEFFICIENTS[0], None
    gram = x @ x.mT
    for step in range(steps):
        factor = _factor(gram)  # without a, which in 16 bits would cost it digits
        if product is None:
            product = factor.clone()
            product.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            product = torch.add(factor @ product, product, alpha=a)
        if step < steps - 1:
            half = torch.add(factor @ gram, gram, alpha=a)
            gram = torch.add(half @ factor, half, alpha=a)
    return product @ x


def product_dtype(device: torch.device, method: str) -> torch.dtype:
    """The dtype of the iteration's products: DeepSpeed's on a GPU, fp32 on a CPU, where DeepSpeed may take fp16."""
    if device.type != "cuda":
        return torch.float32
    return torch.float16 if method == "gram" else torch.bfloat16


class Rows(NamedTuple):
    """The matrices whose rows one tensor holds, as `groups` times so many rows of each.

    Query, key and value of 8, 2 and 2 heads of 64, one after the other: Rows(1, (512, 128, 128)). With two query heads
    beside each key and value: Rows(2, (128, 64, 64)).

    Args:
        sizes: rows of each matrix in a group.
        joined: a matrix is its rows of all groups; else of each group: `Rows(heads, (rows,), False)` is one per head.
    """

    groups: int
    sizes: tuple[int, ...]
    joined: bool = True

    def map(self, change, tensor: Tensor) -> Tensor:
        """[..., rows, columns] -> `change` of each matrix."""
        parts = []
        for part in tensor.unflatten(-2, (self.groups, -1)).split(self.sizes, dim=-2):
            shape = part.shape
            parts.append(change(part.flatten(-3, -2) if self.joined else part).reshape(shape))
        return torch.cat(parts, dim=-2).flatten(-3, -2)

    def shapes(self, columns: int) -> list[tuple[int, int]]:
        """Shapes of all matrices."""
        if self.joined:
            return [(self.groups * size, columns) for size in self.sizes]
        return [(size, columns) for size in self.sizes] * self.groups


def _operations(rows: int, columns: int, options: Mapping[str, Any]) -> int:
    """Floating-point operations of the iteration, of one matrix."""
    small, large, steps = min(rows, columns), max(rows, columns), options.get("ns_steps", STEPS)
    if options.get("ns_method", "standard") == "gram" and small < large:
        runs = [some for some in (min(steps, 2), steps - 2) if some > 0]
        return sum(4 * small**2 * large + small**3 * (8 * some - 6) for some in runs)
    return steps * (4 * small**2 * large + 2 * small**3)


class MuonUpdate(Update):
    """Muon's of matrices, AdamW's of groups that say `"use_muon": False`."""

    states = {"momentum_buffer": "exp_avg"}
    needs_whole = True
    takes_vectors = False

    def of_group(self, group: Mapping[str, Any]) -> Update:
        return self if group.get("use_muon", True) else _ADAMW

    def refusals(self, options: Mapping[str, Any]) -> Iterator[str]:
        for key, most in _BELOW.items():
            if isinstance(options.get(key), (int, float)) and not 0 <= options[key] < most:
                yield f'"{key}" of Muon is {options[key]}; it must be at least 0 and below {most}'
        if not options.get("use_muon", True):
            yield from _ADAMW.refusals(options)
        elif tuple(options.get("ns_coefficients", COEFFICIENTS)) != COEFFICIENTS:
            yield f'"ns_coefficients" of Muon are {COEFFICIENTS} here; leave them out'
        elif options.get("adjust_lr_fn", "original") not in (None, "original"):
            yield '"adjust_lr_fn" of Muon is "original" here: leave it out, and multiply the learning rate'
        elif options.get("ns_method", "gram") not in METHODS:
            yield f'"ns_method" of Muon is {options["ns_method"]!r}; it is one of {", ".join(METHODS)}'

    def options(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
        numbers = {name: float(group[name]) for name in ("lr", "momentum", "weight_decay")}
        numbers |= {"nesterov": bool(group.get("nesterov", True)), "steps": int(group.get("ns_steps", STEPS))}
        return {
            **numbers,
            "method": group.get("ns_method", "standard"),
            "rows": group.get("rows") and Rows(*group["rows"]),
        }

    def operations(self, shape: Sequence[int], group: Mapping[str, Any]) -> int:
        rows, columns = matrix_shape(shape)
        each = Rows(*group["rows"]).shapes(columns) if group.get("rows") else [(rows, columns)]
        return math.prod(shape) // max(rows * columns, 1) * sum(_operations(*matrix, group) for matrix in each)

    def compute(
        self, weight: Tensor, grad: Tensor, states: list[Tensor], step: int, options: Mapping[str, Any]
    ) -> Computed:
        momentum = states[0].lerp(grad, 1 - options["momentum"])
        moved = grad.lerp(momentum, options["momentum"]) if options["nesterov"] else momentum
        moved = moved.reshape(-1, *matrix_shape(weight.shape[1:]))  # channels_last has other strides
        dtype = product_dtype(weight.device, options["method"])

        def direction(matrices: Tensor) -> Tensor:
            rows, columns = matrices.shape[-2:]
            found = orthogonalized(matrices, options["steps"], dtype, options["method"])
            return found * weight.new_full((1, 1), math.sqrt(max(1.0, rows / columns)))  # in fp32, in one pass

        moved = direction(moved) if options["rows"] is None else options["rows"].map(direction, moved)
        weight = weight * (1 - options["lr"] * options["weight_decay"])
        return weight.sub_(moved.reshape(weight.shape), alpha=options["lr"]), [momentum]


class Muon(torch.optim.Optimizer):
    """Muon of matrices, and AdamW of groups with `"use_muon": False`, in one optimizer.

    Args:
        params: parameters or groups; all that are not of matrices (two dimensions or more) must be AdamW's.
        lr, weight_decay: of both; momentum, nesterov, ns_steps, ns_method ("gram" or "standard"), and in a group also
            "rows" (of `Rows`): Muon's; betas, eps: AdamW's.

    Raises:
        ValueError: an option that it does not have, or, in `step`, a parameter of Muon's of fewer than two dimensions.
    """

    def __init__(
        self,
        params,
        lr: float = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = STEPS,
        ns_method: str = "gram",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_steps": ns_steps, "ns_method": ns_method, "betas": betas, "eps": eps, "use_muon": True}
        super().__init__(params, defaults | {"rows": None, "decoupled_weight_decay": True})
        for group in self.param_groups:  # plain, so that a checkpoint can be read without this package
            group["rows"] = group["rows"] and tuple(group["rows"])
            for refused in UPDATES["Muon"].refusals(group):
                raise ValueError(refused)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load fp32 states as they are: torch would give them their parameters' dtype."""
        super().load_state_dict(state_dict)
        saved, own = ([p for g in groups["param_groups"] for p in g["params"]] for groups in (state_dict, vars(self)))
        for number, param in zip(saved, own):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[param][name] = value.to(param.device, torch.float32)

    @torch.no_grad()
    def step(self, closure=None):
        """One step of all parameters with gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            update = UPDATES["Muon"].of_group(group)
            options = update.options(self, group)
            for param in (param for param in group["params"] if param.grad is not None and param.numel()):
                if is_vector(param.shape) and not update.takes_vectors:
                    raise ValueError(f"{tuple(param.shape)} is no matrix; {NO_MATRIX}")
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                for name in update.states:
                    if name not in state:
                        state[name] = torch.zeros_like(param, dtype=torch.float32)
                held = [state[name][None] for name in update.states]
                new, held = update.compute(param.float()[None], param.grad.float()[None], held, state["step"], options)
                param.copy_(new[0])
                state.update((name, each[0]) for name, each in zip(update.states, held))
        return loss


_ADAMW = AdamWUpdate()
UPDATES["Muon"] = MuonUpdate()  # also torch.optim.Muon
