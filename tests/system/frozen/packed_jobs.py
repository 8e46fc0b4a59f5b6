"""Jobs with layers whose weights are codes of another library, in bytes or in a dtype of numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import batches, ds_config, llama, make_engine, section
from ranks import attempt
from running import switch, trained
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zeropp_fp8 import fsdp2

SCALE = 1 / 64  # of a code


class PackedLinear(nn.Linear):
    """As bitsandbytes' Linear4bit: frozen codes as [numbers, 1] of a storage dtype, beside them their state."""

    def __init__(self, plain: nn.Linear, storage: torch.dtype) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        codes = (plain.weight.detach() / SCALE).round().clamp(-127, 127).to(torch.int8)
        self.quant_state = plain.weight.shape
        self.weight = nn.Parameter(codes.view(-1, 1).view(torch.uint8).view(-1).view(storage).view(-1, 1), False)

    def forward(self, x):
        codes = self.weight.detach().reshape(-1).view(torch.int8)
        return nn.functional.linear(x, SCALE * codes.view(self.quant_state).to(x.dtype))


def packed(storage):
    """A Llama in bf16 whose layers are packed, and of which head and norms train."""
    model = llama().bfloat16()
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child, getattr(torch, storage)))
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name or "lm_head" in name)
    return model


def losses_of(storage, recipes, **fields):
    """{recipe: losses of two steps, or what was raised}; None: stock."""
    found = {}
    for recipe in recipes:
        switch(recipe is not None)
        config = ds_config(None if recipe is None else section(recipe, **fields), "bf16")
        losses: list[float] = []

        def train(config=config, losses=losses):
            engine = make_engine(packed(storage), config)
            losses += trained(engine, batches(2, dist.get_rank()))
            engine.destroy()

        said = attempt(train)
        found[recipe] = losses or said
    return found


def losses_under_fsdp2(storage, recipes, **fields):
    """The same under FSDP2."""
    found, mesh = {}, init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in recipes:
        model = packed(storage)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
        if recipe is not None:
            fsdp2.apply(model, recipe, ranks_per_node=1, **fields)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        found[recipe] = losses = []
        for tokens in batches(2, dist.get_rank()):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return found
