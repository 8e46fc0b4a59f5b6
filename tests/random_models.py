"""Small models put together at random: an embedding, a row of stages that keep the width, a head and a loss.

A stage is named by a text, "kind" or "kind:argument", so that a whole model can be printed, and made again from what
was printed. `draw_stages` draws a row of them.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 11
PLAIN = ("linear", "norm", "gain", "cube", "convolution", "sequential", "list", "dropout", "gru", "attention", "unused")
CALLED_OTHERWISE = ("keywords", "pair", "weight_norm")
BLOCKS = ("mlp", "attention", "adapter", "twice", "scalar", "nested", "reads", "branchy", "branchy")
CHECKPOINTING = ("reentrant", "non-reentrant")


class Gain(nn.Module):
    """A parameter of one element, of which all ranks but one hold nothing but padding.

    DeepSpeed 0.19.8 refuses parameters without dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.9]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Cube(nn.Module):
    """A parameter with three dimensions, of odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cube = nn.Parameter(torch.randn(3, width, 5) / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("btd,kde,kce->btc", x, self.cube, self.cube).tanh()


class Listed(nn.Module):
    """Parameters in a list, which is a module that is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = x + torch.tanh(x @ weight)
        return x


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2).tanh()


class Attention(nn.Module):
    """torch's attention, which reads the weight of `out_proj` without calling it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(x)[0]


class Keywords(nn.Module):
    """Its input comes by keyword only: there are no positional inputs to put a function of autograd on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, *, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Pair(nn.Module):
    """Two outputs, of which the second is not used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.left(x).tanh(), self.right(x)


class Residual(nn.Module):
    """x + tanh(linear(x)); `linear` is what others share, tie or read."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Block(nn.Module):
    """One of several of its class in a list: what the plugin gathers at once."""

    def __init__(self, width: int, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.norm = nn.LayerNorm(width)
        if variant == "mlp":
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        elif variant == "attention":
            self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        elif variant == "adapter":
            self.base = nn.Linear(width, width)
            self.a, self.b = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
            self.base.requires_grad_(False)
        elif variant in ("twice", "reads"):
            self.inner = nn.Linear(width, width)
        elif variant == "scalar":
            self.gate, self.inner = nn.Parameter(torch.tensor([0.7])), nn.Linear(width, width)
        elif variant == "nested":
            self.inner = nn.ModuleList([Residual(nn.Linear(width, width)) for _ in range(2)])
        else:
            assert variant == "branchy", variant
            self.main, self.extra, self.never = (nn.Parameter(torch.randn(width, width) / width**0.5) for _ in range(3))

    def forward(self, x: Tensor, extra: float | None = 1.0) -> Tensor:
        """`extra`: a factor of a branch of the variant "branchy"; None leaves it out."""
        y = self.norm(x)
        if self.variant == "mlp":
            return x + self.down(functional.gelu(self.up(y)))
        if self.variant == "attention":
            weights = torch.softmax(self.q(y) @ self.k(y).transpose(1, 2) / y.shape[-1] ** 0.5, -1)
            return x + self.o(weights @ self.v(y))
        if self.variant == "adapter":
            return x + torch.tanh(self.base(y) + self.b(self.a(y)))
        if self.variant == "twice":
            return x + self.inner(self.inner(y).tanh())
        if self.variant == "reads":
            return x + self.inner(torch.tanh(y @ self.inner.weight))
        if self.variant == "scalar":
            return x + self.gate * self.inner(y)
        if self.variant == "nested":
            for inner in self.inner:
                y = inner(y)
            return x + y
        y = torch.tanh(y @ self.main)
        return x + y if extra is None else x + y + extra * (y @ self.extra)


class RandomModel(nn.Module):
    """The model that `stages` describe.

    Args:
        spans: texts "first-last:kind": what runs in one checkpointed function, of either kind.
        tied: the head's weight is the embedding's.
    """

    def __init__(self, stages, width: int, spans=(), tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.texts = list(stages)
        self.spans = dict(_parsed_span(text) for text in spans)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.stages = nn.ModuleDict()
        for index, text in enumerate(stages):
            module = self._made(text, width)
            if module is not None:
                self.stages[str(index)] = module
        self.lm_head = nn.Linear(width, VOCABULARY, bias=not tied)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def _made(self, text: str, width: int) -> nn.Module | None:
        kind, _, argument = text.partition(":")
        if kind in ("again", "read", "regularize"):
            return None
        if kind == "blocks":
            count, variant = argument.split(":")
            return nn.ModuleList([Block(width, variant) for _ in range(int(count))])
        if kind == "tied":
            residual = Residual(nn.Linear(width, width))
            residual.linear.weight = self.stages[argument].linear.weight
            return residual
        makers = {
            "linear": lambda: Residual(nn.Linear(width, width)),
            "unused": lambda: nn.Linear(width, width),
            "norm": lambda: nn.LayerNorm(width),
            "gain": Gain,
            "cube": lambda: Cube(width),
            "convolution": lambda: Convolution(width),
            "sequential": lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
            "list": lambda: Listed(width),
            "dropout": lambda: nn.Dropout(0.1),
            "gru": lambda: Recurrent(width),
            "attention": lambda: Attention(width),
            "keywords": lambda: Keywords(width),
            "pair": lambda: Pair(width),
            "weight_norm": lambda: Residual(nn.utils.weight_norm(nn.Linear(width, width))),
        }
        return makers[kind]()

    def _run(self, index: int, x: Tensor, extra: float | None) -> Tensor:
        kind, _, argument = self.texts[index].partition(":")
        if kind in ("unused", "regularize"):
            return x
        if kind == "again":
            return self.stages[argument](x)
        if kind == "read":  # the parent reads what belongs to another module, before or after that runs
            return x + 0.5 * torch.tanh(x @ self.stages[argument].linear.weight)
        module = self.stages[str(index)]
        if kind == "blocks":
            for block in module:
                x = block(x, extra)
            return x
        if kind == "keywords":
            return module(x=x)
        return module(x)[0] if kind == "pair" else module(x)

    def forward(self, tokens: Tensor, skipped=(), zeroed=(), extra: float | None = 1.0) -> Tensor:
        """The mean cross-entropy of the next token.

        Args:
            tokens: int64 [sequences, length].
            skipped, zeroed: stages that are left out, and those that run but count for nothing.
            extra: see Block.
        """

        def run(x: Tensor, first: int, last: int) -> Tensor:
            for index in range(first, last + 1):
                if index in zeroed:
                    x = x + 0.0 * self._run(index, x, extra)
                elif index not in skipped:
                    x = self._run(index, x, extra)
            return x

        x = self.embedding(tokens)
        index = 0
        while index < len(self.texts):
            last, kind = self.spans.get(index, (index, None))
            if kind is None or not self.training:
                x = run(x, index, last)
            else:
                if kind == "reentrant" and not x.requires_grad and torch.is_grad_enabled():
                    x = x.detach().requires_grad_()
                x = checkpoint(run, x, index, last, use_reentrant=kind == "reentrant")
            index = last + 1
        logits = self.lm_head(x)[:, :-1].float()
        loss = functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        for text in self.texts:
            kind, _, argument = text.partition(":")
            if kind == "regularize":
                loss = loss + 0.1 * self.stages[argument].linear.weight.float().square().mean()
        return loss

    def stage(self, index: int) -> nn.Module:
        """Return what stage `index` owns; the empty module where it owns nothing."""
        return self.stages[str(index)] if str(index) in self.stages else nn.Identity()


def _parsed_span(text: str) -> tuple[int, tuple[int, str]]:
    place, kind = text.split(":")
    first, last = map(int, place.split("-"))
    return first, (last, kind)


def draw_stages(rng: random.Random, features: frozenset[str]) -> tuple[str, ...]:
    """One to eight stages, four on the average; what is not in `features` is left out."""
    kinds = [*PLAIN, "linear", "linear", "blocks", "blocks", "blocks", "blocks"]
    kinds += CALLED_OTHERWISE if "called otherwise" in features else ()
    blocks = [variant for variant in BLOCKS if variant != "branchy" or "ranks differ" in features]
    blocks = [variant for variant in blocks if variant != "reads" or "early read" in features]
    stages: list[str] = []
    for _ in range(rng.randint(1, 4)):
        kind = rng.choice(kinds)
        stages.append(f"blocks:{rng.choice((2, 2, 3))}:{rng.choice(blocks)}" if kind == "blocks" else kind)
    if "early read" not in features:
        stages = ["linear" if text == "attention" else text for text in stages]
    linears = [i for i, text in enumerate(stages) if text == "linear"]
    single = [i for i, text in enumerate(stages) if text in PLAIN and text not in ("unused", "dropout")]
    if linears and rng.random() < 0.2:
        stages.append(f"tied:{rng.choice(linears)}")
    if single and rng.random() < 0.25:
        stages.append(f"again:{rng.choice(single)}")
    if linears and rng.random() < 0.2:
        stages.append(f"read:{rng.choice(linears)}")
    if linears and rng.random() < 0.15:
        stages.append(f"regularize:{rng.choice(linears)}")
    if linears and "early read" in features and rng.random() < 0.2:
        stages = ["gain", *(_moved(text) for text in stages)]
        stages[0] = f"read:{linears[-1] + 1}"
    return tuple(stages)


def _moved(text: str) -> str:
    """A stage's text when one more stage stands before all."""
    kind, _, argument = text.partition(":")
    return f"{kind}:{int(argument) + 1}" if kind in ("tied", "again", "read", "regularize") else text


def draw_spans(rng: random.Random, stages: tuple[str, ...], features: frozenset[str]) -> tuple[str, ...]:
    """Up to two pieces of the row that run in a checkpointed function."""
    if rng.random() < 0.5:
        return ()
    spans, first = [], 0
    while first < len(stages):
        last = min(len(stages) - 1, first + rng.choice((0, 0, 1, 2)))
        kind = rng.choice(CHECKPOINTING)
        if rng.random() < 0.4 and (last == first or kind == "reentrant" or "checkpointed function" in features):
            spans.append(f"{first}-{last}:{kind}")
        first = last + 1
    return tuple(spans)
