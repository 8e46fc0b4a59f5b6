"""Jobs that train with torch.compile: what is traced, and whether it computes what eager code does."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import torch.distributed as dist
from models import KEPT, Mlp, batches, compiled_by, ds_config, full_fp32_weights, llama, make_engine, section
from running import loss_of, switch
from torch._dynamo.utils import counters

import zeropp_fp8
from zeropp_fp8.config import ConfigError

WAYS = ("eager", "blocks", "layer.compile", "engine.compile")
STEPS = 4


def _lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    model.enable_input_require_grads()
    return model


def _layers(engine):
    return [m for m in engine.module.modules() if type(m).__name__ == "LlamaDecoderLayer"]


def _engine(recipe, way, lora=False, checkpointing=None, dtype="fp32", fields=None, **options):
    switch(recipe is not None)
    torch._dynamo.reset()
    counters.clear()
    model = llama(layers=2)
    if lora:
        model = _lora(model)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    fields = (fields or {}) | ({"compile": "blocks"} if way == "blocks" else {})
    the_section = section(recipe, **fields) if recipe is not None else None
    return make_engine(model, ds_config(the_section, dtype, gradient_clipping=0.5, **options))


def _compile(engine, way, backend):
    if way == "layer.compile":
        for layer in _layers(engine):
            layer.compile(backend=backend)
    if way == "engine.compile":
        engine.compile(backend=backend)


def _traced():
    """(graphs, those of recompilations too; graph breaks) since the engine was made."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def train(recipe, way, backend="aot_eager", evaluations=2, **options):
    """Losses, weights, and what was traced after each step and after each evaluation."""
    with compiled_by(backend):
        engine = _engine(recipe, way, **options)
        _compile(engine, way, backend)
        losses, traced = [], []
        for index, tokens in enumerate(batches(STEPS + evaluations, dist.get_rank())):
            if index == STEPS:  # gradients are off from here on: graphs of their own
                engine.eval()
            if index < STEPS:
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                engine.step()
            else:
                with torch.no_grad():
                    loss = loss_of(engine, tokens)
            losses.append(loss.item())
            traced.append(_traced())
    found = {"losses": losses, "traced": traced, "weights": full_fp32_weights(engine.module)}
    engine.destroy()
    found["forwards"] = sum("forward" in module.__dict__ for module in engine.module.modules())
    return found


def each_way(cases):
    return [{way: train(way=way, **case) for way in case.pop("ways")} for case in cases]


def sampled(folder, cases):
    """By case and way: `train` with samples of every second step; and the samples, on rank 0."""
    found = {}
    for name, case in cases.items():
        for way in case["ways"]:
            file = Path(folder, f"{name}, {way}.jsonl")
            fields = case.get("fields", {}) | {"numerics": {"every": 2, "parts": 1, "file": str(file)}}
            backend = "aot_eager" if way == "blocks" else "eager"
            watched = train(case["recipe"], way, backend, evaluations=0, fields=fields)
            samples = (
                [json.loads(line)["rows"] for line in file.read_text().splitlines()] if not dist.get_rank() else []
            )
            found[name, way] = watched, samples
    return found


def saved_tensors(recipe, way):
    """What autograd saves of a forward: how many Parameters, and the names of those of whose values something else is.

    Values of a block live in a buffer that is used again once the block is released.
    """
    with compiled_by("aot_eager"):
        engine = _engine(recipe, way, dtype="bf16")
        found = []

        def pack(tensor):
            owners = {p.data.untyped_storage().data_ptr(): n for n, p in engine.module.named_parameters() if p.numel()}
            name = owners.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if name is not None:
                found.append(None if isinstance(tensor, torch.nn.Parameter) else name)
            return tensor

        tokens = next(batches(1, dist.get_rank()))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine(input_ids=tokens, labels=tokens)
        engine.destroy()
    return found.count(None), [name for name in found if name is not None]


def generated():
    """By way: tokens outside and inside of `zeropp_fp8.generation`, what is traced inside of it, and a loss behind it.

    Not outside with engine.compile(), where each length of the cache is a graph, and half a minute.
    """
    found = {}
    for recipe, lora, ways in (("zeropp", False, ("eager", "blocks")), ("qlora", True, ("eager", "engine.compile"))):
        for way in ways:
            with compiled_by("aot_eager"):
                engine = _engine(recipe, way, lora)
                _compile(engine, way, "eager")
                prompt = next(batches(1, 0, length=5))
                ask = {"max_new_tokens": 3, "do_sample": False, "synced_gpus": True}
                said = [engine.module.generate(input_ids=prompt, **ask)] if way != "engine.compile" else []
                before = _traced()
                for weights in ("values", "codes"):
                    with zeropp_fp8.generation(engine, weights=weights) as kept:
                        said.append(kept.generate(input_ids=prompt, **ask))
                inside = tuple(now - then for now, then in zip(_traced(), before))
                tokens = next(batches(1, dist.get_rank()))
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                engine.step()
                behind = _traced()
                engine.destroy()
            found[recipe, way] = (said, inside, loss.item(), behind)
    return found


def copies():
    """Whether a deep copy of a compiled model runs weights of its own; and a module that has a wrapper as forward."""
    from zeropp_fp8.zero.attachment import Attachment
    from zeropp_fp8.zero.compiled import compile_blocks

    torch._dynamo.reset()
    with compiled_by("eager"):
        first = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        x = torch.randn(2, 4)
        plain = first[1].forward
        first[1].forward = lambda y: plain(y) + 1.0
        expected = [first[0](x), first[1](x)]
        wrapped = first[1].forward
        attachment = Attachment(None, first, "attachments")
        attachment.attach()
        compile_blocks(list(first), attachment.put)
        during = [first[0](x), first[1](x)]
        copied = copy.deepcopy(first[0])
        with torch.no_grad():
            copied.weight.zero_()
        zeroed = copied(x)
        attachment.detach()
        attachment.detach()
    return {
        "same": all(torch.equal(a, b) for a, b in zip(expected, during)),
        "copy": torch.equal(zeroed, copied.bias.expand(2, 4)),
        "undone": "forward" not in first[0].__dict__ and first[1].forward is wrapped,
    }


def refusals():
    """A model without blocks."""
    switch(True)
    try:
        make_engine(Mlp(layers=1), ds_config(section("zeropp", compile="blocks"), zero_optimization=KEPT))
    except ConfigError as error:
        return str(error)
    return None
