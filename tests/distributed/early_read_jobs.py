"""Jobs about parameters that others read than the module that has them, that run on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import ds_config, full_weights, make_engine, section
from parity_jobs import switch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import zeropp_fp8

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


def train(kind, the_section, steps=2, accumulation=2, leaf=False, unequal=False, checkpointed=False, others=0):
    """Losses, weights, and bytes of gradients a step.

    `unequal`: ranks differ in what they use of blocks. `checkpointed`: blocks are run again in backward. `others`:
    engines that are made later over the same model, to evaluate.
    """
    import deepspeed

    switch(the_section is not None)
    model, rank = Reader(kind, checkpointed), dist.get_rank()
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    # Each block is reduced as soon as its backward is over: there ranks must not meet in different collectives.
    each_block = {"zero_optimization": {"reduce_bucket_size": 5000}} if unequal else {}
    config = ds_config(the_section, gradient_accumulation_steps=accumulation, **each_block)
    engine = make_engine(model, config, optimizer="sgd", lr=0.1)
    later = [make_engine(model, config, optimizer=None) for _ in range(others)]
    torch.manual_seed(5 + rank)
    losses = []
    for step in range(steps * accumulation):
        loss = engine(torch.randn(3, HIDDEN), use_all=not unequal or (rank + step) % 2 == 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sent = zeropp_fp8.wire_report(engine)["per_step"]["gradients"] if the_section else None
    weights = full_weights(engine.module)
    for each in (*later[::-1], engine):
        each.destroy()
    return {"losses": losses, "weights": weights, "sent": sent}


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


def reference(kind, unequal=False, steps=2, accumulation=2, world=2):
    """The same training in one process: {name: weight} at its start and at its end."""
    model, inputs = Reader(kind), []
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for rank in range(world):
        torch.manual_seed(5 + rank)
        inputs.append([torch.randn(3, HIDDEN) for _ in range(steps * accumulation)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps * accumulation):
        for rank in range(world):
            loss = model(inputs[rank][step], use_all=not unequal or (rank + step) % 2 == 0)
            (loss / world / accumulation).backward()
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return start, {name: p.detach().clone() for name, p in model.named_parameters()}
