"""Jobs that train with torch.compile: what is traced, and whether it computes what eager code does."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from models import KEPT, Mlp, batches, compiled_by, section, with_lora
from ranks import attempt
from running import Spec, evaluate, on_engine, run, see, step
from torch._dynamo.utils import counters

import zeropp_fp8

WAYS = ("eager", "blocks", "layer.compile", "engine.compile")
STEPS = 4


def adapted(model, lora=False, checkpointing=None):
    if lora:
        model = with_lora(model)
        model.enable_input_require_grads()
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    return model


def spec_of(recipe, way, lora=False, checkpointing=None, dtype="fp32", fields=None, **config):
    """Of a model that is compiled in a way."""
    fields = {**(fields or {}), **({"compile": "blocks"} if way == "blocks" else {})}
    adapt = functools.partial(adapted, lora=lora, checkpointing=checkpointing)
    return Spec(section(recipe, **fields), dtype, {"gradient_clipping": 0.5, **config}, adapted=adapt)


def run_compiled(spec, way, backend, events, **more):
    """`run` of an engine that is compiled in a way, by a backend."""

    def compile_it(engine):
        if way == "layer.compile":
            for layer in engine.module.modules():
                if type(layer).__name__ == "LlamaDecoderLayer":
                    layer.compile(backend=backend)
        if way == "engine.compile":
            engine.compile(backend=backend)

    torch._dynamo.reset()
    counters.clear()
    with compiled_by(backend):
        return run(spec, [on_engine(compile_it), *events], **more)


def traced(engine=None):
    """(graphs, those of recompilations too; graph breaks) since the engine was made."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def train(recipe, way, backend="aot_eager", evaluations=2, **options):
    """(trace of losses, weights, and what was traced after each step and each evaluation; own forwards in the end)."""
    modules, tokens = [], list(batches(STEPS + evaluations, dist.get_rank()))
    keep = on_engine(lambda engine: modules.extend(engine.module.modules()))
    events = [keep, *[step, see(traced)] * STEPS, on_engine(lambda engine: engine.eval())]
    for batch in tokens[STEPS:]:  # gradients are off from here on: graphs of their own
        events += [evaluate(batch), see(traced)]
    trace = run_compiled(spec_of(recipe, way, **options), way, backend, events, leaves=("masters",), data=tokens)
    return trace, sum("forward" in module.__dict__ for module in modules)


def each_way(cases):
    return [{way: train(way=way, **case) for way in case.pop("ways")} for case in cases]


def sampled(folder, cases):
    """By case and way: the trace with samples of every second step; and the samples, on rank 0."""
    found = {}
    for name, case in cases.items():
        for way in case["ways"]:
            file = Path(folder, f"{name}, {way}.jsonl")
            fields = case.get("fields", {}) | {"numerics": {"every": 2, "parts": 1, "file": str(file)}}
            backend = "aot_eager" if way == "blocks" else "eager"
            watched, _ = train(case["recipe"], way, backend, evaluations=0, fields=fields)
            lines = file.read_text().splitlines() if dist.get_rank() == 0 else []
            found[name, way] = watched, [json.loads(line)["rows"] for line in lines]
    return found


def saved_tensors(recipe, ways):
    """Return what autograd saves of a forward: how many Parameters, and names of those of whose values something is.

    Values of a block live in a buffer that is used again once the block is released.
    """
    tokens = next(batches(1, dist.get_rank()))

    def look(engine):
        found = []

        def pack(tensor):
            owners = {p.data.untyped_storage().data_ptr(): n for n, p in engine.module.named_parameters() if p.numel()}
            name = owners.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if name is not None:
                found.append(None if isinstance(tensor, torch.nn.Parameter) else name)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            engine(input_ids=tokens, labels=tokens)
        return found.count(None), [name for name in found if name is not None]

    specs = [(spec_of(recipe, way, dtype="bf16"), way) for way in ways]
    return [run_compiled(spec, way, "aot_eager", [see(look)]).seen[0] for spec, way in specs]


def generated():
    """By way: tokens outside and inside of `zeropp_fp8.generation`, what is traced inside of it, and a loss behind it.

    Not outside with engine.compile(), where each length of the cache is a graph, and half a minute.
    """
    prompt = next(batches(1, 0, length=5))

    def generate(engine, way):
        ask = {"input_ids": prompt, "max_new_tokens": 3, "do_sample": False, "synced_gpus": True}
        said = [engine.module.generate(**ask)] if way != "engine.compile" else []
        before = traced()
        for weights in ("values", "codes"):
            with zeropp_fp8.generation(engine, weights=weights) as kept:
                said.append(kept.generate(**ask))
        return said, tuple(now - then for now, then in zip(traced(), before))

    found = {}
    for recipe, lora, ways in (("zeropp", False, ("eager", "blocks")), ("qlora", True, ("eager", "engine.compile"))):
        for way in ways:
            backend = "eager" if way == "engine.compile" else "aot_eager"
            events = [see(generate, way), step, see(traced)]
            trace = run_compiled(spec_of(recipe, way, lora), way, backend, events)
            (said, inside), behind = trace.seen
            found[recipe, way] = said, inside, trace.losses[0], behind
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
    spec = Spec(section("zeropp", compile="blocks"), config={"zero_optimization": KEPT}, model=lambda: Mlp(layers=1))
    return attempt(spec.engine)
