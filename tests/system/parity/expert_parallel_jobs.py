"""Jobs with mixtures whose experts DeepSpeed's AutoEP deals out to ranks."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from models import batches, section
from ranks import attempt
from running import (
    Spec,
    accumulated,
    differing,
    equal,
    evaluate,
    loaded,
    on_engine,
    resumed,
    run,
    saved,
    see,
    shared_folder,
    state_of,
    step,
    stepped,
    universal,
)
from transformers.utils import output_capturing
from used_expert_jobs import mixture

import zeropp_fp8
from zeropp_fp8.zero.fall_back import fall_back
from zeropp_fp8.zero.report import predicted_bytes

HELD_OUT = torch.arange(64).view(2, 32)
PRESETS = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral"}
FP8 = {"activations": {"wire_format": "fp8"}}


def let_autoep_start():
    """DeepSpeed 0.19.8 looks up a name with a default in a registry that transformers 5.23 has given another `get`."""
    registry = type(output_capturing._CAN_RECORD_REGISTRY)
    if registry is not dict and not hasattr(registry, "stock_get"):
        registry.stock_get = registry.get
        registry.get = lambda self, key, *default: (
            dict.get(self, key, *default) if default else registry.stock_get(self, key)
        )


def of(recipe=None, experts=2, kind="Qwen3Moe", fields=None, adapt=None, config=None, dtype="bf16", **options):
    """The Spec of a mixture whose experts lie on so many ranks; without a recipe DeepSpeed's own."""
    let_autoep_start()
    keys = {"enabled": True, "autoep_size": experts, "preset_model": PRESETS[kind], "use_grouped_mm": False}
    model = functools.partial(mixture, kind, **options)
    return Spec(
        section(recipe, **(fields or {})) if recipe else None,
        dtype,
        config={"gradient_clipping": 0.5, **(config or {}), **({"expert_parallel": keys} if experts else {})},
        model=model,
        adapted=adapt,
    )


def norm(engine):
    return float(engine.get_global_grad_norm())


def trained(spec, events=None, leaves=("weights", "masters", "moments"), **how):
    events = [event for _ in range(3) for event in (step, see(norm), evaluate(HELD_OUT))] if events is None else events
    return run(spec, events, leaves, **how)


def drawn(model):
    """The model with weights of its own: under zero.Init transformers leaves those of packed experts as they come."""
    torch.manual_seed(5)
    for param in model.parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if dist.get_rank() == 0:
                torch.nn.init.normal_(param, std=0.05)
    return model


def beside_stock(how="steps", zero_init=False, **options):
    """How `lossless` differs from stock."""
    config = {"gradient_accumulation_steps": 2} if how == "accumulated" else {}
    events = [*accumulated(2), see(norm), *accumulated(2), see(norm)] if how == "accumulated" else None
    if how in ("offload_optimizer", "offload_param"):
        config |= {"zero_optimization": {how: {"device": "cpu"}}}
    options |= {"adapt": drawn} if zero_init else {}
    specs = [replace(of(recipe, config=config, **options), zero_init=zero_init) for recipe in (None, "lossless")]
    return differing(*[trained(spec, events) for spec in specs])


def recipes(chosen, experts=2, fields=None, how=(), **options):
    """(losses, bytes per step) of recipes; of stock first."""
    found = []
    for recipe in (None, *chosen):
        spec = of(recipe, experts, fields=fields if recipe else None, **options)
        trace = trained(spec, [*how, *[step] * 4], ["bytes"] if recipe else [])
        found.append((trace.losses, trace.bytes))
    return found


def sampled(experts):
    """Rows of the numerics of two steps of `zeropp`, on rank 0."""
    file = Path(shared_folder()) / "numerics.jsonl"
    trained(of("zeropp", experts, fields={"numerics": {"every": 1, "parts": 1, "file": str(file)}}), [step] * 2, ())
    return [json.loads(line)["rows"] for line in file.read_text().splitlines()]


def whole_and_differences(recipe, experts, **options):
    """How a run with differences differs from one with whole weights, and the bytes of both."""
    runs = []
    for which in ("none", "exact"):
        fields = {"weights": {"difference": which}}
        runs.append(trained(of(recipe, experts, fields=fields, **options), leaves=["weights", "masters", "bytes"]))
    return differing(*runs, but=["bytes"]), *[trace.bytes for trace in runs]


def micro_batches(experts, fields=None):
    """Losses, and bytes of gradients between nodes, of two steps of three micro-batches: in the node, to the end."""
    found = []
    for where in ("node", "world"):
        given = {**(fields or {}), "gradients": {"accumulate_in": where, "error_feedback": False}}
        spec = of("zeropp", experts, fields=given, config={"gradient_accumulation_steps": 3})
        trace = trained(spec, [*accumulated(3), *accumulated(3), evaluate(HELD_OUT)], ["bytes"])
        found.append((trace.losses, trace.bytes["gradients"]["inter"]))
    return found


def predicted(experts):
    """Bytes of weights and gradients that the start table says, and those of a step after the first."""
    spec = of("zeropp", experts, fields={"weights": {"difference": "none"}})
    kinds = {"weights forward": "weights_forward", "weights backward": "weights_backward", "gradients": "gradients"}
    trace = trained(spec, [step, see(lambda e: predicted_bytes(e.zeropp_fp8_session, e.optimizer.gatherer))], ["bytes"])
    return [(said, trace.bytes[kinds[kind]]) for kind, said in trace.seen[0].items()]


def exchanged_with_stock():
    """How `lossless` goes on from a checkpoint of stock's, and stock from one of `lossless`, beside going on."""
    found, folder, data = [], shared_folder(), list(batches(4, dist.get_rank()))
    for one, other in ((None, "lossless"), ("lossless", None)):
        tag, leaves = str(one), ("weights", "masters", "moments")
        keep = [see(state_of)]
        went_on = run(of(one), [step, step, saved(folder, tag), *keep, step, step], leaves, data)
        again = run(of(other), [loaded(folder, tag), *keep, step, step], leaves, data[2:])
        went_on.losses = went_on.losses[2:]
        found.append(differing(went_on, again))
    return found


def universal_of_both():
    """(files that one alone has, files, those that differ) of universal checkpoints of stock and `lossless`."""
    folders, data, found = [shared_folder() for _ in range(2)], list(batches(2, dist.get_rank())), []
    for recipe, folder in zip((None, "lossless"), folders):
        run(of(recipe), [step, step, saved(folder, "x")], data=data)
        dist.barrier()
        if dist.get_rank() == 0:
            universal(folder, "x")
        dist.barrier()
        files = Path(folder, "universal/zero").glob(
            "*/*.pt"
        )  # one per tensor; others have padding, which is any number
        found.append({str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in files})
    stock, ours = found
    return stock.keys() ^ ours.keys(), len(stock), [name for name in stock if not equal(stock[name], ours.get(name))]


def goes_on(recipe, experts, fields=None):
    """How a run that resumes differs from one that goes on."""
    spec = of(recipe, experts, fields=fields)
    _, went_on, again = resumed(spec, [step] * 2, [step] * 2, ("weights", "masters", "moments"))
    return differing(went_on, again)


def tokens_sent(fields=None, steps=2, few=False):
    """(bytes of tokens that this rank sends to others per step, their elements, losses, whether a rank got no token).

    `few`: only the first experts are chosen, which lie on one rank.
    """
    from deepspeed.module_inject import auto_ep_layer

    spec, numels, empty = of("lossless", 2, fields=fields), [], []

    def choose_few(engine):
        for module in engine.module.modules() if few else ():
            if getattr(module, "_is_autoep_layer", False):
                with deepspeed.zero.GatheredParameters([module.router.gate.weight], modifier_rank=0):
                    first, last = module.router.gate.weight.data.chunk(2)
                    first[::2], first[1::2] = first[:1].clone(), -first[:1]  # half of these logits are above 0
                    last.zero_()

    stock, mine = auto_ep_layer._AllToAllV.apply, dist.get_rank() % 2

    def counting(group, tokens, sent, received):
        numels.extend(rows[1 - mine] * tokens.shape[1] for rows in (sent, received))  # and of its gradient
        empty.append(0 in sent)
        return stock(group, tokens, sent, received)

    auto_ep_layer._AllToAllV.apply = counting
    try:
        trace = trained(spec, [on_engine(choose_few), *[step] * steps], ["bytes"])
    finally:
        del auto_ep_layer._AllToAllV.apply
    return sum(trace.bytes["activations"].values()), sum(numels) / steps, trace.losses, any(empty)


def fallen_back():
    """Losses after an engine has given up its quantization, beside those of one that has not had any."""
    data = list(batches(4, dist.get_rank()))
    spec = of("zeropp", fields=FP8)
    return trained(spec, [step, on_engine(lambda e: fall_back(e.optimizer)), step, step], [], data=data).losses


def refused(recipe, experts):
    """The error of an engine."""
    return attempt(lambda: of(recipe, experts).engine())


def not_started():
    """The error of an engine where DeepSpeed and transformers do not fit; None if these do."""
    spec, registry = of("zeropp"), type(output_capturing._CAN_RECORD_REGISTRY)
    if not hasattr(registry, "stock_get"):
        return None
    mended, registry.get = registry.get, registry.stock_get
    try:
        return attempt(spec.engine)
    finally:
        registry.get = mended


def refusals(given):
    """Errors of sections, and of what a script asks of an engine."""
    found = {name: attempt(lambda how=how: of("zeropp", **how).engine()) for name, how in given.items()}
    engine = of("zeropp").engine()
    stepped(engine, HELD_OUT)
    found["generate"] = attempt(lambda: zeropp_fp8.generation(engine).__enter__())
    found["hand over"] = attempt(lambda: list(zeropp_fp8.handover.WeightSource(engine)))
    return found
