"""Jobs about parameters that others read than the module that has them, that run on ranks."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.distributed as dist
from models import section
from running import Spec, on_engine, run, step
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

HIDDEN = 48


class Block(nn.Module):
    """A repeated block."""

    def __init__(self):
        super().__init__()
        self.linear, self.unused = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, use_all=False):
        y = torch.tanh(self.linear(x))
        return y + self.unused(y) if use_all else y


class Pair(nn.Module):
    """Reads a weight of its child before the child runs."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x, early):
        if early:
            x = torch.tanh(x @ self.out.weight)
        return self.out(x)


class Reader(nn.Module):
    """`kind`: which parameter is read where, besides by its own module; None: none is."""

    def __init__(self, kind=None, checkpointed=False):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.checkpointed = kind, checkpointed
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.pair = Pair()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 4)
        for weight in self.parameters():  # large enough that all gradients matter
            nn.init.normal_(weight, std=1.5 / HIDDEN**0.5)
        if kind == "weight_norm":
            nn.utils.weight_norm(self.out)

    def forward(self, x, use_all=False):
        loss, kind = 0.0, self.kind
        x = self.first(x)
        if kind == "parent":
            x = x @ self.out.weight
        if kind == "regularizer":
            loss = 0.1 * self.head.weight.square().sum() + 0.1 * self.blocks[1].linear.weight.square().sum()
        if kind == "tied use":
            x = F.linear(x, self.out.weight, self.out.bias)
        x = self.pair(x, kind == "pair")
        for block in self.blocks:
            x = checkpoint(block, x, use_all, use_reentrant=False) if self.checkpointed else block(x, use_all)
        x = self.out(x)
        if kind == "early and late":
            x = x @ self.pair.out.weight + F.linear(x, self.out.weight)
        return self.head(torch.tanh(x)).square().mean() + loss


KINDS = ("parent", "regularizer", "tied use", "pair", "early and late", "weight_norm")


def inputs(rank, count, unequal):
    """Return what a rank gives the model; `unequal`: ranks differ in what they use of blocks."""
    torch.manual_seed(5 + rank)
    return [(torch.randn(3, HIDDEN), not unequal or (rank + place) % 2 == 0) for place in range(count)]


def train(kind, the_section, leaf=False, unequal=False, checkpointed=False, others=0):
    """Two steps of two micro-batches.

    `checkpointed`: blocks are run again in backward. `others`: engines that are made later over the same model, to
    evaluate.
    """
    # Each block is reduced as soon as its backward is over: there ranks must not meet in different collectives.
    each_block = {"zero_optimization": {"reduce_bucket_size": 5000}} if unequal else {}
    config = {"gradient_accumulation_steps": 2, **each_block}
    model = functools.partial(Reader, kind, checkpointed)
    spec = Spec(the_section, "fp32", config, model, "sgd", 0.1, leaves=(Block,) * leaf)
    later = []

    def make_later(engine):
        later.extend(replace(spec, optimizer=None).engine(engine.module) for _ in range(others))

    def end_later(engine):
        for each in reversed(later):
            each.destroy()

    events = [on_engine(make_later), *[step] * 4, on_engine(end_later)]
    left = ("weights", "bytes") if the_section else ("weights",)
    return run(spec, events, left, inputs(dist.get_rank(), 4, unequal))


def beside_stock(kinds, granularity):
    """{kind: (stock, lossless)}."""
    leaf, the_section = granularity == "block", section("lossless", gather_granularity=granularity)
    return {kind: (train(kind, None, leaf=leaf), train(kind, the_section)) for kind in kinds}


def reductions(recipe, kinds, fields=None):
    """{kind: a run}, None among the kinds."""
    return {kind: train(kind, section(recipe, **(fields or {}))) for kind in (None, *kinds)}


def with_unequal_ranks(recipe, kinds, checkpointed=False, fields=None, others=0):
    """{kind: a run} where ranks differ in what they use of blocks."""
    the_section = section(recipe, **(fields or {}))
    with set_checkpoint_early_stop(False):  # what is run again then reaches the hooks after the block
        options = {"unequal": True, "checkpointed": checkpointed, "others": others}
        return {kind: train(kind, the_section, **options) for kind in kinds}


def reference(kind, unequal=False, world=2):
    """The same training in one process: {name: weight} at its start and at its end."""
    of_ranks = [inputs(rank, 4, unequal) for rank in range(world)]
    model = Reader(kind)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for place, batches in enumerate(zip(*of_ranks)):
        for batch in batches:
            (model(*batch) / world / 2).backward()
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()
    return start, {name: p.detach().clone() for name, p in model.named_parameters()}
