"""Jobs about keys that DeepSpeed 0.19 has and 0.18 has not: who says when to step, buffers that stay fp32."""

from __future__ import annotations

import functools
import importlib
import itertools
from dataclasses import replace

import torch
import torch.distributed as dist
from models import batches, llama, section
from running import Spec, accumulated, evaluate, loaded, run, saved, see, step

UNMANAGED = {"managed_gradient_accumulation": False}
ON_CPU = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}


# -- managed_gradient_accumulation -------------------------------------------------------------------------------------


def accumulate(recipe, windows, managed, fields=None, dtype="fp32", leaf=False, offload=False):
    """Training with a step after each of `windows` backward passes; recipe None: stock."""
    chosen = None if recipe is None else section(recipe, **(fields or {}))
    config = {**({} if managed else UNMANAGED), **(ON_CPU if offload else {})}
    style = "set boundary" if managed else "unmanaged"
    events = [event for window in windows for event in accumulated(window, style)]
    return run(Spec(chosen, dtype, config, leaves=("LlamaDecoderLayer",) * leaf), events, ("weights",))


def accumulate_several(runs):
    return [accumulate(**run) for run in runs]


# -- keep_in_fp32_modules ----------------------------------------------------------------------------------------------


def named_buffers(plugin, recipe, dtype, zero_init, fields, folder):
    """Losses, and what a buffer that the model names for fp32 and one that it does not are: trained, and resumed."""
    from transformers import LlamaForCausalLM

    importlib.import_module("torch._dynamo")  # zero.Init needs it imported before, see plugin.enable
    shape = llama().config

    class Biased(LlamaForCausalLM):
        """With a bias as those that route tokens to experts, whose values differ by less than bf16 can tell."""

        _keep_in_fp32_modules_strict = ["correction_bias"]

        def __init__(self, config):
            super().__init__(config)
            for name in ("correction_bias", "other_bias"):
                self.register_buffer(name, 10 + torch.arange(64) / 1000)

        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.loss = out.loss + self.correction_bias.float().std()
            return out

    def make(seed):
        torch.manual_seed(seed)
        return Biased(shape)

    def freeze(model):
        model.model.layers[0].requires_grad_(False)
        return model

    def look(engine):
        buffers = dict(engine.module.named_buffers())
        return {n: (buffers[n].dtype, buffers[n].float().tolist()) for n in ("correction_bias", "other_bias")}

    the_section, model = section(recipe, **fields) if plugin else None, functools.partial(make, 0)
    spec = Spec(the_section, dtype, model=model, zero_init=zero_init, adapted=freeze)
    tokens, tag = next(batches(1, dist.get_rank())), f"{plugin}"
    trace = run(spec, [step, step, saved(folder, tag), see(look)], data=itertools.repeat(tokens))
    again = replace(spec, model=functools.partial(make, 9))
    again = run(again, [loaded(folder, tag), evaluate(tokens), see(look)])
    return trace.losses + again.losses, trace.seen + again.seen
