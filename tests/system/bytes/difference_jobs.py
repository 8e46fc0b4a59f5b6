"""Jobs on ranks whose nodes exchange what has changed in weights, beside the same without: all must be equal."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from frozen_jobs import with_lora
from models import batches, compiled_by, full_weights, llama, section
from ranks import printed
from running import (
    Spec,
    allow_fp16_on_cpu,
    backward,
    evaluated,
    forward,
    freezing,
    on_engine,
    run,
    see,
    shared_folder,
    step,
    stepped,
    update,
)

import zeropp_fp8


def spec_of(exact=True, recipe="zeropp-exact", dtype="bf16", lr=1e-4, frozen=(), accumulation=1, config=None, **fields):
    """Of a small Llama; `exact`: with differences; `frozen`: parts of names."""
    config = {"gradient_accumulation_steps": accumulation, **(config or {})}
    seed = fields.pop("seed", 0)
    fields["weights"] = {"difference": "exact" if exact else "none", **fields.get("weights", {})}
    if "store" in fields:
        fields["frozen"] = {"format": fields.pop("store")}
    fields["secondary"] = {"scope": "node", **fields.get("secondary", {})}
    model = functools.partial(llama, seed=seed)
    return Spec(section(recipe, **fields), dtype, config, model, lr=lr, adapted=freezing(*frozen))


def differences(engine):
    """Of all units that have one."""
    return [unit.difference for unit in engine.optimizer.gatherer.units if unit.difference.is_on]


def gathered_weights(engine):
    """{name: values} as a forward computes with them."""
    gatherer, found = engine.optimizer.gatherer, {}
    for unit in gatherer.units:
        gatherer.gather_now(unit.params)
        for name, param in engine.module.named_parameters():
            if any(param is one for one in unit.params) and param.numel() == param.ds_numel:  # else an FP8 operand
                found[name] = param.detach().clone()
        gatherer.release(unit)
    return found


def held(engine):
    """The payloads that this rank holds, flat."""
    return torch.cat([unit.secondary for unit in engine.optimizer.gatherer.units if unit.keeps_secondary])


def agree(engine):
    """Whether the ranks that hold the same rows hold the same bytes."""
    route, mine, same = engine.optimizer.gatherer.route, held(engine), True
    for level in route.before:
        everyone = [torch.empty_like(mine) for _ in range(level.size)]
        dist.all_gather(everyone, mine, group=level.group)
        same = same and all(torch.equal(mine, other) for other in everyone)
    return same


def looked(engine):
    """Gathered weights, those of a gather in 16 bits, agreement, differences since the last full gather, payloads."""
    gathered, full = gathered_weights(engine), full_weights(engine.module)
    steps = {difference.steps for difference in differences(engine)}
    in_16_bits = {name: full[name].to(value.dtype) for name, value in gathered.items()}
    return gathered, in_16_bits, agree(engine), steps, held(engine).clone()


def trained(steps=4, accumulation=1, zero_init=False, **options):
    """Losses, and what is seen after each step."""
    allow_fp16_on_cpu()
    spec = replace(spec_of(accumulation=accumulation, **options), zero_init=zero_init)
    with compiled_by("eager"):
        trace = run(spec, [*[step] * accumulation, see(looked)] * steps)
    return trace.losses, trace.seen


def many(job, cases):
    """One job after the other."""
    return [globals()[job](**case) for case in cases]


def pairs(job, cases):
    """By name: the job without differences, and with them."""
    return {name: [globals()[job](exact=exact, **case) for exact in (False, True)] for name, case in cases.items()}


class Gated(torch.nn.Module):
    """With a matrix of fewer numbers than most slices hold: a rank's slice of it is padding alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gate = torch.nn.Linear(64, 64), torch.nn.Linear(1, 5, bias=False)

    def forward(self, x):
        return (self.layer(x).sum(-1, keepdim=True) * self.gate.weight.view(-1)).square().mean()


def padding(exact):
    """Gathered weights after each step, where padding was NaN when the engine was made."""

    def with_nan(model):
        shard = model.gate.weight.ds_tensor
        shard.data[max(0, 5 - shard.numel() * dist.get_rank()) :] = torch.nan
        return model

    def forward(running):
        running.loss = running.engine(torch.ones(2, 64, dtype=torch.bfloat16))

    spec = replace(spec_of(exact), model=Gated, zero_init=True, adapted=with_nan, lr=1e-5)
    return run(spec, [forward, backward, update, see(looked)] * 4).seen


def sent(steps=3, accumulation=1, **options):
    """Bytes between nodes of each step, by kind; losses; the start table; bits of a weight's difference."""
    meters, before = [], len(printed())

    def count(engine):
        own, of_all = (meters[0].report(total)["per_step"] for total in (False, True))
        meters[0].set_to_zero()
        bits = engine.zeropp_fp8_session.formats.difference_bits
        return {kind: own[kind] | {"inter, all ranks": of_all[kind]["inter"]} for kind in own} | {"bits": bits}

    begin = on_engine(lambda engine: meters.append(engine.zeropp_fp8_session.ledger.meter()))
    events = [begin, *[*[step] * accumulation, see(count)] * steps]
    trace = run(spec_of(accumulation=accumulation, **options), events)
    return trace.seen, trace.losses, printed()[before:]


def table_of(threshold=None):
    """The start table; `threshold` in elements: of DeepSpeed's persistent parameters."""
    config = {"zero_optimization": {"stage3_param_persistence_threshold": threshold}} if threshold else None
    spec_of(config=config).engine()
    return printed()


def look(engine, modifier_rank=None):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier_rank):
        pass


# Each is to change nothing.
DISTURBANCES = {
    "": lambda engine: None,
    "evaluate": lambda engine: evaluated(engine, next(batches(1, 7))),
    "look": look,
    "look to write": functools.partial(look, modifier_rank=0),
    "save": lambda engine: engine.optimizer.state_dict(),
}


def disturbed(what="", steps=4, accumulation=1, **options):
    """Losses of a training in which something happens before each micro-batch that is to change nothing; agreement."""
    happens = on_engine(DISTURBANCES[what])
    begins = [] if what == "evaluate" else [happens]
    events = [*begins, step, *[happens, step] * (steps * accumulation - 1), see(agree)]
    trace = run(spec_of(accumulation=accumulation, **options), events)
    return trace.losses, *trace.seen


def write_masters(params):
    for param in params:
        safe_set_full_fp32_param(param, -1.5 * safe_get_full_fp32_param(param))


def write_own_masters(params):
    """One rank alone."""
    for param in params:
        own = safe_get_local_fp32_param(param)
        if dist.get_rank() == 1:
            safe_set_local_fp32_param(param, -1.5 * own)


def first_layer(engine):
    return [p for name, p in engine.module.named_parameters() if "layers.0" in name]


def written(how, **options):
    """After 3 steps, after somebody has written to weights, and after each of three more steps: a loss, and a look."""
    spec = spec_of(**options)

    def seen(engine):
        return evaluated(engine, next(batches(1, 7))), *looked(engine)

    def write(engine):
        params = first_layer(engine)
        if how == "gathered":
            with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
                if dist.get_rank() == 0:
                    for param in params:
                        param.data.mul_(-1.5)
        elif how == "masters beside another engine":
            other = replace(spec, optimizer=None).engine(engine.module)
            evaluated(other, next(batches(1, 7)))
            write_masters(params)
            other.destroy()
        elif how == "of one rank":
            write_own_masters(params)
        elif how == "loaded":
            engine.optimizer.load_state_dict([engine.optimizer.state_dict()] * dist.get_world_size())
        else:
            write_masters(params)

    events = [step, step, step, see(seen), *[step] * (how == "masters after a step"), on_engine(write)]
    events += [step] * (how.startswith("masters") or how == "of one rank")  # they reach the weights with a step
    return run(spec, [*events, see(seen), step, see(seen), step, step, see(seen)]).seen


def jump(lr, **options):
    """A step of another size among usual ones: what is seen after each."""

    def set_lr(engine, to):
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = to

    rates = [lr if place == 2 else 1e-4 for place in range(7)]
    return run(spec_of(**options), [e for rate in rates for e in (on_engine(set_lr, rate), step, see(looked))]).seen


def skipped(**options):
    """fp16 with an overflow on one rank: losses, skipped steps, and what is seen."""
    allow_fp16_on_cpu()

    def overflow(running):
        running.loss = running.loss * (float("inf") if dist.get_rank() == 3 else 1.0)

    events = [step, step, forward, overflow, backward, update, step, step]
    trace = run(spec_of(dtype="fp16", **options), [*events, see(lambda engine: engine.skipped_steps), see(looked)])
    return trace.losses, *trace.seen


def two_engines(**options):
    """A policy and a reference that follows it: losses of both; what is seen of both."""
    policy, reference = (spec_of(**options).engine() for _ in range(2))
    losses = []
    for tokens in batches(4, dist.get_rank()):
        losses.append(stepped(policy, tokens))
        both = list(zip(reference.module.parameters(), policy.module.parameters()))
        with deepspeed.zero.GatheredParameters([p for pair in both for p in pair], modifier_rank=0):
            for old, new in both:
                old.data.copy_(0.5 * old.data + 0.5 * new.data)
        losses.append(evaluated(reference, next(batches(1, 0))))
    return losses, [looked(engine) for engine in (policy, reference)]


def adapted(steps=8, saved_at=4, **options):
    """LoRA: losses, and from `saved_at` on those of a run that was resumed; bytes of weights between nodes per step;
    elements of this rank's slices of adapters; what is seen."""
    folder, data = shared_folder(), list(batches(steps, dist.get_rank()))

    def sent(engine):
        return engine.zeropp_fp8_session.ledger.of_run.bytes["per_step", "weights_forward", "inter"]

    def slices(engine):
        return [p.ds_tensor.ds_numel for p in engine.module.parameters() if p.requires_grad]

    first, again = (replace(spec_of(seed=seed, **options), adapted=with_lora) for seed in (0, 9))
    counted, save = [step, see(sent)], on_engine(lambda engine: engine.save_checkpoint(folder))
    trace = run(first, [*counted * saved_at, save, *counted * (steps - saved_at), see(slices), see(looked)], data=data)
    load = on_engine(lambda engine: engine.load_checkpoint(folder))
    resumed = run(again, [load, *[step] * (steps - saved_at)], data=data[saved_at:])
    *totals, slices, seen = trace.seen
    by_step = [after - before for before, after in zip([0, *totals], totals)]
    return trace.losses, resumed.losses, by_step, slices, seen


def moved(folder, save, **options):
    """Three steps and a checkpoint, or it loaded here: a loss, and what is seen before and after another step."""
    saves = on_engine(lambda engine: engine.save_checkpoint(folder))
    loads = on_engine(lambda engine: engine.load_checkpoint(folder))
    look = [see(lambda engine: evaluated(engine, next(batches(1, 7)))), see(looked), step, see(looked)]
    events = [step, step, step, saves, *look] if save else [loads, *look]
    return run(spec_of(seed=0 if save else 5, **options), events).seen


def generated(**options):
    """Tokens that an engine generates, in each way that weights stay; and the loss of a step then."""
    engine, found = spec_of(**options).engine(), {}
    first, second = batches(2, dist.get_rank())
    tokens = next(batches(1, 0))[:, :4]
    stepped(engine, first)
    stepped(engine, second)
    for weights in ("values", "sharded"):
        with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
            found[weights] = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False).tolist()
    return found, stepped(engine, second)


def unused(**options):
    """Two forwards leave a block out, whose copy is then of steps before: losses, and a look at the end."""

    class Skipping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.skips = llama(seed=0), False

        def forward(self, input_ids, labels):
            layers = self.model.model.layers
            kept = layers[:1] if self.skips else layers
            hidden = self.model.model.embed_tokens(input_ids)
            positions = self.model.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
            for layer in kept:
                hidden = layer(hidden, position_embeddings=positions)
                hidden = hidden if torch.is_tensor(hidden) else hidden[0]
            logits = self.model.lm_head(self.model.model.norm(hidden))
            flat = logits[:, :-1].float().flatten(0, 1)
            return SimpleNamespace(loss=torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten()))

    def skip(engine, skips):
        engine.module.skips = skips

    spec = replace(spec_of(**options), model=Skipping)
    events = [step, step, on_engine(skip, True), step, step, on_engine(skip, False), step]
    trace = run(spec, [*events, see(looked)])
    return trace.losses, trace.seen[0]
