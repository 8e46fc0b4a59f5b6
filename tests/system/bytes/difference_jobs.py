"""Jobs on ranks whose nodes exchange how weights have changed."""

from __future__ import annotations

import functools
from dataclasses import replace

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_local_fp32_param,
)
from error_bounds import signal_to_noise_db
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
from zeropp_fp8.formats import make_format

MATRICES = 1  # dimensions more than which a tensor has codes


def differences(engine):
    """Of all units that have one."""
    return [unit.delta.difference for unit in engine.optimizer.gatherer.units if unit.delta.difference is not None]


def spec_of(recipe="zeropp-diff", dtype="fp32", lr=1e-3, frozen=(), accumulation=1, config=None, seed=0, **fields):
    """Of a small Llama; `frozen`: parts of names."""
    config = {"gradient_accumulation_steps": accumulation, **(config or {})}
    model = functools.partial(llama, seed=seed)
    return Spec(section(recipe, **fields), dtype, config, model, lr=lr, adapted=freezing(*frozen))


def gathered_weights(engine):
    """{name: fp32} of matrices as a forward computes with them."""
    gatherer = engine.optimizer.gatherer
    found = {}
    for unit in gatherer.units:
        gatherer.gather_now(unit.params)
        for name, param in engine.module.named_parameters():
            if param.dim() > MATRICES and any(param is one for one in unit.params):
                found[name] = param.detach().float().clone()
        gatherer.release(unit)
    return found


def snr(expected, found):
    flat = [torch.cat([weights[name].flatten() for name in found]) for weights in (expected, found)]
    return signal_to_noise_db(*flat)


class Gated(torch.nn.Module):
    """With a matrix of fewer numbers than most slices hold: a rank's slice of it is padding alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.gate = torch.nn.Linear(64, 64), torch.nn.Linear(1, 5, bias=False)

    def forward(self, x):
        return (self.layer(x).sum(-1, keepdim=True) * self.gate.weight.view(-1)).square().mean()


def padding():
    """Differences since the last full gather, in each step, where padding was NaN when the engine was made."""

    def with_nan(model):
        shard = model.gate.weight.ds_tensor
        shard.data[max(0, 5 - shard.numel() * dist.get_rank()) :] = torch.nan
        return model

    def forward(running):
        running.loss = running.engine(torch.ones(2, 64))

    spec = Spec(section("zeropp-diff"), model=Gated, zero_init=True, adapted=with_nan, lr=1e-5)
    look = see(lambda engine: [one.steps for one in differences(engine)])
    return run(spec, [forward, backward, update, look] * 4).seen


def in_int8(weights):
    wire_format = make_format("int8", block_size=256)
    return {
        name: wire_format.decode(wire_format.encode(weight), weight.shape, torch.float32)
        for name, weight in weights.items()
        if weight.dim() > MATRICES
    }


def held(engine):
    """The bytes of every secondary shard, as one tensor; on all ranks of one local index the same."""
    units = engine.optimizer.gatherer.units
    return torch.cat([unit.secondary for unit in units if unit.keeps_secondary])


def agree(engine):
    """Whether the ranks that hold the same rows hold the same bytes."""
    route, mine = engine.optimizer.gatherer.route, held(engine)
    same = True
    for level in route.before:
        everyone = [torch.empty_like(mine) for _ in range(level.size)]
        dist.all_gather(everyone, mine, group=level.group)
        same = same and all(torch.equal(mine, other) for other in everyone)
    return same


def nearness(engine):
    """SNR of gathered weights, and whether holders agree."""
    return snr(full_weights(engine.module), gathered_weights(engine)), agree(engine)


def fidelity(steps, at, accumulation=1, **options):
    """After each step of `at`: SNR of gathered weights, of INT8, and whether holders agree; and losses of all."""

    def look(engine):
        exact = full_weights(engine.module)
        return snr(exact, gathered_weights(engine)), snr(exact, in_int8(exact)), agree(engine)

    events = []
    for place in range(1, steps + 1):
        events += [*[step] * accumulation, *[see(look)] * (place in at)]
    trace = run(spec_of(accumulation=accumulation, **options), events)
    return trace.seen, trace.losses


def sent(recipe, steps=3, accumulation=1, **options):
    """Bytes between nodes of each step, by kind; losses; and the start table."""
    meters, before = [], len(printed())

    def count(engine):
        own, of_all = (meters[0].report(total)["per_step"] for total in (False, True))
        meters[0].set_to_zero()
        return {kind: own[kind] | {"inter, all ranks": of_all[kind]["inter"]} for kind in own}

    begin = on_engine(lambda engine: meters.append(engine.zeropp_fp8_session.ledger.meter()))
    events = [begin, *[*[step] * accumulation, see(count)] * steps]
    trace = run(spec_of(recipe, accumulation=accumulation, **options), events)
    return trace.seen, trace.losses, printed()[before:]


def many(job, cases):
    """One job after the other."""
    return [globals()[job](**case) for case in cases]


def table_of(recipe="zeropp-diff"):
    """The start table."""
    spec_of(recipe).engine()
    return printed()


def look(engine, modifier_rank=None):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier_rank):
        pass


# What is to change nothing.
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


def loaded_after_a_write(alone):
    """SNR of gathered weights, and differences in all units since the last full gather: of a run that is resumed with
    master weights that no step had brought to the weights; and after a step of one in which they are loaded again."""
    folder, found = shared_folder(), []

    def saves(engine, tag):
        engine.save_checkpoint(folder, tag=tag)

    def loads(engine, tag):
        engine.load_checkpoint(folder, tag=tag)

    def look(engine):
        weights = gathered_weights(engine)
        steps = {difference.steps for difference in differences(engine)}
        return snr(full_weights(engine.module), weights), steps

    write = on_engine(lambda engine: (write_own_masters if alone else write_masters)(first_layer(engine)))
    written = [step, step, on_engine(saves, "before"), write, on_engine(saves, "after")]
    found += run(spec_of(), [*written, on_engine(loads, "before"), step, see(look)]).seen
    return run(spec_of(seed=9), [on_engine(loads, "after"), see(look)]).seen + found


def written(how, recipe="zeropp-diff", **options):
    """SNR of gathered weights after 3 steps, after somebody has written to them, after one more step, which brings
    master weights, and after 3; agreement; and the loss of one batch on all ranks."""
    spec = spec_of(recipe, **options)

    def look(engine):
        loss = evaluated(engine, next(batches(1, 7)))
        return (*nearness(engine), loss)

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

    events = [step, step, step, see(look), *[step] * (how == "masters after a step"), on_engine(write)]
    events += [step] * (how.startswith("masters") or how == "of one rank")  # they reach the weights with a step
    return run(spec, [*events, see(look), step, see(look), step, step, see(look)]).seen


def jump(lr, **fields):
    """A step of another size among usual ones: after each, SNR of gathered weights, agreement, and full gathers."""

    def set_lr(engine, to):
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = to

    def look(engine):
        block = next(unit for unit in engine.optimizer.gatherer.units if len(unit.params) > 2)
        return (*nearness(engine), block.delta.difference.steps)

    rates = [lr if place == 2 else 1e-4 for place in range(7)]
    return run(spec_of(**fields), [e for rate in rates for e in (on_engine(set_lr, rate), step, see(look))]).seen


def skipped():
    """fp16 with an overflow on one rank: losses, skipped steps, SNR, whether holders agree."""
    allow_fp16_on_cpu()

    def overflow(running):
        running.loss = running.loss * (float("inf") if dist.get_rank() == 3 else 1.0)

    events = [step, step, forward, overflow, backward, update, step, step]
    trace = run(spec_of(dtype="fp16"), [*events, see(lambda engine: engine.skipped_steps), see(nearness)])
    return trace.losses, *trace.seen


def two_engines(**options):
    """A policy and a reference that follows it: losses of both; SNR of both, and agreement."""
    policy, reference = (spec_of(**options).engine() for _ in range(2))
    losses = []
    for tokens in batches(4, dist.get_rank()):
        losses.append(stepped(policy, tokens))
        pairs = list(zip(reference.module.parameters(), policy.module.parameters()))
        with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0):
            for old, new in pairs:
                old.data.copy_(0.5 * old.data + 0.5 * new.data)
        losses.append(evaluated(reference, next(batches(1, 0))))
    return losses, [nearness(engine) for engine in (policy, reference)]


def ways():
    """Trainings with what goes with differences: losses, SNR of gathered weights, agreement, by name."""
    feedback, twice = {"error_feedback": True}, {"accumulation": 2}
    zero = {
        "kept gathered": {"stage3_param_persistence_threshold": 5000},
        "offload": {"offload_param": {"device": "cpu"}},
    }
    cases = {
        "plain": {},
        "error feedback": {"gradients": feedback},
        **{f"gradients in {n} bits": {"gradients": {**feedback, "inter_format": f"int{n}"}} for n in (3, 2)},
        "2 micro-batches, lossless": {"recipe": "lossless", "secondary": {"scope": "node"}, **twice},
        **{
            f"2 micro-batches, {at}": {"gradients": {**feedback, "accumulate_in": at}, **twice}
            for at in ("node", "world")
        },
        **{f"by {granularity}": {"gather_granularity": granularity} for granularity in ("module", "parameter")},
        "some": {"secondary": {"memory_gb": 1.8e-4}},
        "whole tensors": {"partition": "whole_tensor"},
        "whole tensors, never cut": {"partition": "whole_tensor", "partition_split": "none"},
        "whole tensors by module": {"partition": "whole_tensor", "gather_granularity": "module"},
        "FP8 compute": {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}},
        **{name: {"config": {"zero_optimization": options}} for name, options in zero.items()},
        "compiled": {"compile": "blocks"},
        "zero.Init": {},
    }
    found = {}
    for name, case in cases.items():
        spec = replace(spec_of(**case), zero_init=name == "zero.Init")
        with compiled_by("eager"):
            trace = run(spec, [*[step] * 4 * case.get("accumulation", 1), see(nearness)])
        found[name] = trace.losses, *trace.seen[0]
    return found


def adapted(steps=8, saved_at=4, **options):
    """LoRA: losses, and from `saved_at` on those of a run that was resumed; bytes of weights between nodes per step;
    sizes of this rank's slices of adapters; SNR of gathered adapters, whether frozen weights are exact; agreement."""
    folder, data = shared_folder(), list(batches(steps, dist.get_rank()))

    def sent(engine):
        return engine.zeropp_fp8_session.ledger.of_run.bytes["per_step", "weights_forward", "inter"]

    def look(engine):
        exact, gathered = full_weights(engine.module), gathered_weights(engine)
        adapters = {name: weight for name, weight in gathered.items() if "lora_" in name}
        exactly = all(torch.equal(exact[name], weight) for name, weight in gathered.items() if name not in adapters)
        slices = [p.ds_tensor.ds_numel for p in engine.module.parameters() if p.requires_grad]
        return slices, (snr(exact, adapters), exactly, agree(engine))

    first, again = (replace(spec_of(seed=seed, **options), adapted=with_lora) for seed in (0, 9))
    counted, save = [step, see(sent)], on_engine(lambda engine: engine.save_checkpoint(folder))
    trace = run(first, [*counted * saved_at, save, *counted * (steps - saved_at), see(look)], data=data)
    load = on_engine(lambda engine: engine.load_checkpoint(folder))
    resumed = run(again, [load, *[step] * (steps - saved_at)], data=data[saved_at:])
    *totals, (slices, looked) = trace.seen
    by_step = [after - before for before, after in zip([0, *totals], totals)]
    return trace.losses, resumed.losses, by_step, slices, looked


def moved(folder, save, **options):
    """Three steps and a checkpoint, or it loaded here: loss, agreement after another step, the least SNR of gathered
    weights before it and after it."""
    saves = on_engine(lambda engine: engine.save_checkpoint(folder))
    loads = on_engine(lambda engine: engine.load_checkpoint(folder))
    look = [see(lambda engine: evaluated(engine, next(batches(1, 7)))), see(nearness), step, see(nearness)]
    events = [step, step, step, saves, *look] if save else [loads, *look]
    loss, (before, _), (after, same) = run(spec_of(seed=0 if save else 5, **options), events).seen
    return loss, same, min(before, after)


def generated():
    """Tokens that an engine generates, in each way that weights stay; and the loss of a step then."""
    engine, found = spec_of().engine(), {}
    first, second = batches(2, dist.get_rank())
    tokens = next(batches(1, 0))[:, :4]
    stepped(engine, first)
    for weights in ("codes", "values", "sharded"):
        with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
            found[weights] = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False).tolist()
    return found, stepped(engine, second)
