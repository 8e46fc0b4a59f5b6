"""Jobs on ranks whose nodes exchange how weights have changed."""

from __future__ import annotations

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
from models import batches, compiled_by, ds_config, full_weights, llama, make_engine, section
from ranks import printed
from running import allow_fp16_on_cpu, evaluated, loss_of, shared_folder, switch

import zeropp_fp8
from zeropp_fp8.formats import make_format

MATRICES = 1  # dimensions more than which a tensor has codes


def differences(engine):
    """Of all units that have one."""
    return [unit.delta.difference for unit in engine.optimizer.gatherer.units if unit.delta.difference is not None]


def engine_of(recipe="zeropp-diff", dtype="fp32", lr=1e-3, frozen=(), config=None, seed=0, model=None, **fields):
    """An engine over a small Llama; `frozen`: parts of names; None: what the model says."""
    switch(True)
    model = model or llama(seed=seed)
    for name, param in model.named_parameters() if frozen is not None else ():
        param.requires_grad_(not any(part in name for part in frozen))
    return make_engine(model, ds_config(section(recipe, **fields), dtype, **(config or {})), lr=lr)


def step_of(engine, data, accumulation=1):
    """Losses of one optimizer step."""
    losses = []
    for _ in range(accumulation):
        tokens = next(data)
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
    return losses


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
    switch(True)
    config = ds_config(section("zeropp-diff"))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Gated()
    shard, steps = model.gate.weight.ds_tensor, []
    shard.data[max(0, 5 - shard.numel() * dist.get_rank()) :] = torch.nan
    engine = make_engine(model, config, lr=1e-5)
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 64)))
        engine.step()
        steps.append([one.steps for one in differences(engine)])
    return steps


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


def fidelity(steps, at, recipe="zeropp-diff", accumulation=1, **options):
    """After each step of `at`: whether holders agree, SNR of gathered weights, of INT8; losses of all; and bytes."""
    engine = engine_of(recipe, config={"gradient_accumulation_steps": accumulation}, **options)
    data, found, losses = batches(steps * accumulation, dist.get_rank()), [], []
    for step in range(1, steps + 1):
        losses += step_of(engine, data, accumulation)
        if step in at:
            exact = full_weights(engine.module)
            found.append((snr(exact, gathered_weights(engine)), snr(exact, in_int8(exact)), agree(engine)))
    engine.destroy()
    return found, losses


def sent(recipe, steps=3, accumulation=1, **options):
    """Bytes between nodes of a step that is not the first, by kind; of the first; losses; weights."""
    engine = engine_of(recipe, config={"gradient_accumulation_steps": accumulation}, **options)
    meter, data = engine.zeropp_fp8_session.ledger.meter(), batches(steps * accumulation, dist.get_rank())
    losses, by_step = [], []
    for _ in range(steps):
        losses += step_of(engine, data, accumulation)
        own, of_all = (meter.report(total)["per_step"] for total in (False, True))
        by_step.append({kind: own[kind] | {"inter, all ranks": of_all[kind]["inter"]} for kind in own})
        meter.set_to_zero()
    weights = full_weights(engine.module)
    engine.destroy()
    return by_step, losses, weights


def many(job, cases):
    """One job after the other."""
    return [globals()[job](**case) for case in cases]


def table_of(recipe="zeropp-diff", **options):
    """The start table, and what its last lines say that is sent."""
    engine_of(recipe, **options)
    return printed()


def disturbed(what="", steps=4, accumulation=1, **options):
    """Losses of a training in which something happens before each micro-batch that is to change nothing; agreement."""
    engine = engine_of(config={"gradient_accumulation_steps": accumulation}, **options)
    data, losses, other = batches(steps * accumulation, dist.get_rank()), [], next(batches(1, 7))
    for micro_batch, tokens in enumerate(data):
        if what == "evaluate" and micro_batch:
            evaluated(engine, other)
        if what == "look":
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                pass
        if what == "look to write":
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                pass
        if what == "save":
            engine.optimizer.state_dict()
        losses += step_of(engine, iter([tokens]))
    return losses, agree(engine)


def write_masters(params):
    for param in params:
        safe_set_full_fp32_param(param, -1.5 * safe_get_full_fp32_param(param))


def write_own_masters(params):
    """One rank alone."""
    for param in params:
        own = safe_get_local_fp32_param(param)
        if dist.get_rank() == 1:
            safe_set_local_fp32_param(param, -1.5 * own)


def loaded_after_a_write(alone):
    """SNR of gathered weights, and differences in all units since the last full gather: of a run that is resumed with
    master weights that no step had brought to the weights; and after a step of one in which they are loaded again."""
    engine, folder, data, found = engine_of(), shared_folder(), batches(5, dist.get_rank()), []
    params = [p for name, p in engine.module.named_parameters() if "layers.0" in name]
    for _ in range(2):
        step_of(engine, data)
    engine.save_checkpoint(folder, tag="before")
    (write_own_masters if alone else write_masters)(params)
    engine.save_checkpoint(folder, tag="after")
    engine.load_checkpoint(folder, tag="before")
    step_of(engine, data)
    again = engine_of(seed=9)
    again.load_checkpoint(folder, tag="after")
    for one in (again, engine):
        weights = gathered_weights(one)
        steps = {difference.steps for difference in differences(one)}
        found.append((snr(full_weights(one.module), weights), steps))
    return found


def written(how, recipe="zeropp-diff", **options):
    """SNR of gathered weights after 3 steps, after somebody has written to them, after one more step, which brings
    master weights, and after 3; agreement; and the loss of one batch on all ranks."""
    engine, found = engine_of(recipe, **options), []
    data = batches(8, dist.get_rank())

    def look():
        loss = evaluated(engine, next(batches(1, 7)))
        exact = full_weights(engine.module)
        found.append((snr(exact, gathered_weights(engine)), agree(engine), loss))

    for _ in range(3):
        step_of(engine, data)
    look()
    params = [p for name, p in engine.module.named_parameters() if "layers.0" in name]
    if how == "gathered":
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if dist.get_rank() == 0:
                for param in params:
                    param.data.mul_(-1.5)
    elif how == "masters":
        write_masters(params)
    elif how == "masters after a step":  # what is held is not of the weights as they are
        step_of(engine, data)
        write_masters(params)
    elif how == "masters beside another engine":
        other = make_engine(engine.module, ds_config(section(recipe, **options)), optimizer=None)
        evaluated(other, next(batches(1, 7)))
        write_masters(params)
        other.destroy()
    elif how == "of one rank":
        write_own_masters(params)
    elif how == "loaded":
        engine.optimizer.load_state_dict([engine.optimizer.state_dict()] * dist.get_world_size())
    if how.startswith("masters") or how == "of one rank":  # they reach the weights with a step
        step_of(engine, data)
    look()
    step_of(engine, data)
    look()
    for _ in range(2):
        step_of(engine, data)
    look()
    return found


def jump(lr, **fields):
    """A step of another size among usual ones: after each, SNR of gathered weights, agreement, and full gathers."""
    engine = engine_of(**fields)
    data, found = batches(7, dist.get_rank()), []
    block = next(unit for unit in engine.optimizer.gatherer.units if len(unit.params) > 2)
    for step in range(7):
        for group in engine.optimizer.optimizer.param_groups:
            group["lr"] = lr if step == 2 else 1e-4
        step_of(engine, data)
        weights = gathered_weights(engine)  # what the next forward computes with
        found.append((snr(full_weights(engine.module), weights), agree(engine), block.delta.difference.steps))
    return found


def skipped():
    """fp16 with an overflow on one rank: losses, skipped steps, whether holders agree."""
    allow_fp16_on_cpu()
    engine = engine_of(dtype="fp16")
    losses, data = [], list(batches(5, dist.get_rank()))
    for step, tokens in enumerate(data):
        loss = loss_of(engine, tokens)
        losses.append(loss.item())
        engine.backward(loss * (float("inf") if step == 2 and dist.get_rank() == 3 else 1.0))
        engine.step()
    return losses, engine.skipped_steps, agree(engine), snr(full_weights(engine.module), gathered_weights(engine))


def two_engines(**options):
    """A policy and a reference that follows it: losses of both, agreement, SNR of both."""

    policy = engine_of(**options)
    reference = engine_of(**options)
    data, losses = batches(4, dist.get_rank()), []
    for _ in range(4):
        losses += step_of(policy, data)
        pairs = list(zip(reference.module.parameters(), policy.module.parameters()))
        with deepspeed.zero.GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0):
            for old, new in pairs:
                old.data.copy_(0.5 * old.data + 0.5 * new.data)
        losses.append(evaluated(reference, next(batches(1, 0))))
    return losses, [
        (snr(full_weights(engine.module), gathered_weights(engine)), agree(engine)) for engine in (policy, reference)
    ]


def ways():
    """Trainings with what goes with differences: losses, SNR of gathered weights, agreement, by name."""
    found = {}

    def train(name, engine, accumulation=1):
        data = batches(4 * accumulation, dist.get_rank())
        losses = [loss for _ in range(4) for loss in step_of(engine, data, accumulation)]
        found[name] = losses, snr(full_weights(engine.module), gathered_weights(engine)), agree(engine)
        engine.destroy()

    train("plain", engine_of())
    train("error feedback", engine_of(gradients={"error_feedback": True}))
    for bits in (3, 2):
        gradients = {"error_feedback": True, "inter_format": f"int{bits}"}
        train(f"gradients in {bits} bits", engine_of(gradients=gradients))
    twice = {"config": {"gradient_accumulation_steps": 2}}
    train("2 micro-batches, lossless", engine_of("lossless", secondary={"scope": "node"}, **twice), 2)
    for where in ("node", "world"):
        gradients = {"error_feedback": True, "accumulate_in": where}
        train(f"2 micro-batches, {where}", engine_of(gradients=gradients, **twice), 2)
    train("by module", engine_of(gather_granularity="module"))
    train("by parameter", engine_of(gather_granularity="parameter"))
    train("some", engine_of(secondary={"memory_gb": 1.8e-4}))
    train("whole tensors", engine_of(partition="whole_tensor"))
    train("whole tensors, never cut", engine_of(partition="whole_tensor", partition_split="none"))
    train("whole tensors by module", engine_of(partition="whole_tensor", gather_granularity="module"))
    fp8 = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}
    train("FP8 compute", engine_of(compute=fp8))
    train("kept gathered", engine_of(config={"zero_optimization": {"stage3_param_persistence_threshold": 5000}}))
    train("offload", engine_of(config={"zero_optimization": {"offload_param": {"device": "cpu"}}}))
    with compiled_by("eager"):
        train("compiled", engine_of(compile="blocks"))
    config = ds_config(section("zeropp-diff"))
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = llama()
    train("zero.Init", engine_of(model=model))
    return found


def adapted(steps=8, saved_at=4, **options):
    """LoRA: losses, and from `saved_at` on those of a run that was resumed; bytes of weights between nodes a step;
    sizes of this rank's slices of adapters; SNR of gathered adapters, whether frozen weights are exact; agreement."""

    def made(seed):
        return engine_of(frozen=None, model=with_lora(llama(seed=seed)), **options)

    folder, data, losses, by_step, before = shared_folder(), list(batches(steps, dist.get_rank())), [], [], 0
    engine = made(0)
    for step, tokens in enumerate(data):
        if step == saved_at:
            engine.save_checkpoint(folder)
        losses += step_of(engine, iter([tokens]))
        total = engine.zeropp_fp8_session.ledger.of_run.bytes["per_step", "weights_forward", "inter"]
        by_step.append(total - before)
        before = total
    exact, gathered = full_weights(engine.module), gathered_weights(engine)
    adapters = {name: weight for name, weight in gathered.items() if "lora_" in name}
    frozen_exact = all(torch.equal(exact[name], weight) for name, weight in gathered.items() if name not in adapters)
    slices = [p.ds_tensor.ds_numel for p in engine.module.parameters() if p.requires_grad]
    again = made(9)
    again.load_checkpoint(folder)
    resumed = [loss for tokens in data[saved_at:] for loss in step_of(again, iter([tokens]))]
    return losses, resumed, by_step, slices, (snr(exact, adapters), frozen_exact, agree(engine))


def moved(folder, save, **options):
    """Three steps and a checkpoint, or it loaded here: loss, agreement after another step, the least SNR of gathered
    weights before it and after it."""
    engine, data = engine_of(seed=0 if save else 5, **options), batches(4, dist.get_rank())
    if save:
        for _ in range(3):
            step_of(engine, data)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    loss = evaluated(engine, next(batches(1, 7)))
    before = snr(full_weights(engine.module), gathered_weights(engine))
    step_of(engine, data)
    return loss, agree(engine), min(before, snr(full_weights(engine.module), gathered_weights(engine)))


def generated():
    """Tokens that an engine generates, in each way that weights stay."""
    engine, found = engine_of(), {}
    data = batches(2, dist.get_rank())
    tokens = next(batches(1, 0))[:, :4]
    step_of(engine, data)
    for weights in ("codes", "values", "sharded"):
        with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
            found[weights] = model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False).tolist()
    return found, step_of(engine, data)
