"""Jobs about samples, references, and layers in high precision, that run on ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import running
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from error_bounds import signal_to_noise_db
from models import batches, full_weights, llama, section, with_lora
from running import Running, Spec, backward, forward, on_engine, other, run, see, step, update

from zeropp_fp8.config import TRIAL_VARIABLE, Trial
from zeropp_fp8.formats import make_format
from zeropp_fp8.numerics.bisect import Bisection, say
from zeropp_fp8.numerics.reference import Experiment, by_layer, check_the_same, draw, layer_table, read_run
from zeropp_fp8.numerics.sample import Sampler
from zeropp_fp8.numerics.watch import Watch
from zeropp_fp8.zero.telemetry import StepMetrics

POISONED = "model.layers.1.mlp.up_proj"
ROLES = ("weights", "activations", "gradients")
WITHIN = "gradients_within_nodes"
WATCHED = "model.layers.1.self_attn.q_proj"  # whose input is looked at


def sums_of(pairs):
    """(signal, noise, elements that became zero, elements) of pairs of tensors, over all ranks, in float64."""
    total = torch.zeros(4, dtype=torch.float64)
    for exact, decoded in pairs:
        exact, decoded = exact.double().flatten(), decoded.double().flatten()
        lost = ((exact != 0) & (decoded == 0)).sum()
        total += torch.stack(
            [exact.square().sum(), (exact - decoded).square().sum(), lost.double(), torch.tensor(1.0 * exact.numel())]
        )
    dist.all_reduce(total)
    return total.tolist()


def decibels(found):
    signal, noise, *_ = found
    return 10 * math.log10(signal / noise)


def lines_of(path):
    """Samples, on rank 0."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if dist.get_rank() == 0 else []


def prepared(poison=None, frozen=()):
    """A model, a few of whose weights are huge, and some of which is not trained."""
    model = llama()
    if poison:
        with torch.no_grad():
            weight = model.get_submodule(poison).weight
            weight.view(-1)[:: weight.numel() // 64] *= 1000
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    return model


def sampled(path, recipe, accumulation=1, steps=2, every=1, poison=None, frozen=(), **fields):
    """Samples of every step; of the last one the oracle's, {(kind, layer): (dB, share that became zero, amax)}.

    And what the engine tells of its last sample, and what of it is still looked at when training has ended.
    """
    numerics = {"every": every, "parts": 1, "file": path}
    config = {"gradient_accumulation_steps": accumulation}
    spec = Spec(section(recipe, numerics=numerics, **fields), config=config, model=lambda: prepared(poison, frozen))
    names, summed, oracle, inputs = {}, {}, {}, []

    def keep(param, gradient):
        summed[param] = summed.get(param, 0.0) + gradient.detach().double()

    def before(engine):
        names.update({param: name for name, param in engine.module.named_parameters()})
        for param in names:
            if param.requires_grad:
                param.register_hook(functools.partial(keep, param))
        watched = engine.module.get_submodule(WATCHED)
        watched.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
        oracle.update(weights_by_hand(engine, names))

    def after_backward(engine):
        oracle.update(gradients_by_hand(engine, names, summed, accumulation))
        oracle.update(inputs_by_hand(engine, inputs[0]))  # a sample looks at the first micro-batch

    def told(engine):
        found = StepMetrics(engine.zeropp_fp8_session)()  # what monitors and a Trainer's logs get
        parts = {*vars(engine.optimizer.gatherer), *vars(engine.optimizer.reducer)}
        return {k: v for k, v in found.items() if k.startswith("numerics/")}, {"finish", "start", "sum_in_node"} & parts

    *micro, last = running.accumulated(accumulation)
    earlier = [step] * accumulation * (steps - 1)
    trace = run(spec, [*earlier, on_engine(before), *micro, on_engine(after_backward), last, see(told)])
    return lines_of(path), oracle, *trace.seen[0]


def sampled_in_turn(path):
    """Samples of six steps with the default `parts`, more than there are units; vectors stay gathered, and exact."""
    zero = {"zero_optimization": {"stage3_param_persistence_threshold": 100}}

    def matrices(engine):
        return {n.removesuffix(".weight") for n, p in engine.module.named_parameters() if len(p.ds_shape) > 1}

    trace = run(Spec(section("zeropp", numerics={"every": 1, "file": path}), config=zero), [see(matrices), *[step] * 6])
    return trace.seen[0], [line["rows"] for line in lines_of(path)]


def sampled_after_a_resume(folder):
    """Steps of the samples, every third one, of a run that is saved after two, resumes and makes five more."""
    path = os.path.join(folder, "numerics.jsonl")
    spec = Spec(section("zeropp", numerics={"every": 3, "parts": 1, "file": path}))
    run(spec, [step, step, running.saved(folder, "saved")])
    run(other(spec), [running.loaded(folder, "saved"), *[step] * 5])
    return [line["step"] for line in lines_of(path)]


def beside_a_reference(path):
    """(observers of an engine that evaluates only, numbers of those of one that trains, engines in the samples)."""
    spec = Spec(section("zeropp", numerics={"every": 1, "parts": 1, "file": path, "watch": "stop"}))
    reference = replace(spec, optimizer=None).engine()

    def observers(engine):
        return sum(isinstance(part, (Sampler, Watch)) for part in engine.zeropp_fp8_session.parts)

    running.evaluated(reference, next(batches(1, dist.get_rank())))
    trace = run(spec, [step, see(observers)])
    return [observers(reference), *trace.seen], [line["engine"] for line in lines_of(path)]


def beside_a_later_engine(path):
    """Return the printed samples of an engine alone, beside a later one over its model, and when that is gone."""
    later = []

    def told_step(running):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            step(running)
        running.trace.seen.append(printed.getvalue())

    def make_later(engine):
        later.append(Spec(section("zeropp"), optimizer=None).engine(engine.module))

    end_later = on_engine(lambda engine: later.pop().destroy())
    spec = Spec(section("zeropp", numerics={"every": 1, "parts": 1, "file": path}))
    return run(spec, [told_step, on_engine(make_later), told_step, end_later, told_step]).seen


def many(folder, cases):
    """`sampled` of each case."""
    return [sampled(os.path.join(folder, f"{index}.jsonl"), **case) for index, case in enumerate(cases)]


def weights_by_hand(engine, names):
    """Each rank's shard encoded and decoded once more: nearest rounding makes the same bytes as the gather did."""
    wanted, found = engine.zeropp_fp8_session.config.weights, {}
    if wanted.format == "none":
        return found
    wire = make_format(wanted.format, block_size=wanted.block_size, hadamard=wanted.hadamard)
    for param, name in names.items():
        if len(param.ds_shape) > 1 and param.requires_grad:
            own = engine.zeropp_fp8_session.own_numel(param)
            shard = param.ds_tensor.data.view(-1)[:own].clone()
            decoded = wire.decode(wire.encode(shard), shard.shape, torch.float32)
            found["weights", name.removesuffix(".weight")] = summary_of(sums_of([(shard, decoded)]), shard)
    return found


def gradients_by_hand(engine, names, summed, accumulation):
    """The exact mean of what autograd gave on all ranks, against safe_get_full_grad."""
    found, config = {}, engine.zeropp_fp8_session.config.gradients
    for param, name in names.items():
        if not param.requires_grad:
            continue
        reduced = safe_get_full_grad(param).double()
        exact = summed[param].clone()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        if len(param.ds_shape) > 1:
            both = sums_of([(exact, reduced.view_as(exact))])
            found["gradients", name.removesuffix(".weight")] = summary_of(both, exact)
            if config.intra_format == "int8" and accumulation == 1:
                found[WITHIN, name.removesuffix(".weight")] = within_by_hand(config, summed[param], exact)
    return found


def within_by_hand(config, gradient, exact):
    """Every rank's slices for the ranks rounded by themselves, and nothing after that."""
    world, wire = dist.get_world_size(), make_format("int8", block_size=config.block_size)
    slices = gradient.float().flatten().split(-(-gradient.numel() // world))
    rounded = torch.cat([wire.decode(wire.encode(one), one.shape, torch.float32) for one in slices]).double()
    dist.all_reduce(rounded)
    return summary_of(sums_of([(exact, rounded / world)]), exact)


def inputs_by_hand(engine, given):
    """Current scaling: each rank's matrix with a scale of its own, by torch's own cast."""
    compute = engine.zeropp_fp8_session.config.compute
    if (compute.format, compute.scaling) != ("fp8", "current"):
        return {}
    scale = given.double().abs().max() / 448
    decoded = (given.double() / scale).float().to(torch.float8_e4m3fn).double() * scale
    return {("compute_activations", WATCHED): summary_of(sums_of([(given, decoded)]), given)}


def summary_of(sums, exact):
    amax = exact.abs().max().double() if exact.numel() else torch.zeros((), dtype=torch.float64)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    return decibels(sums), sums[2] / sums[3], amax.item()


# -- experiments ------------------------------------------------------------------------------------------------------

FAULTY = "model.layers.1.mlp.up_proj"
AT_FAULT = {
    "gradients": {"intra_format": "int8", "inter_format": "int8"},
    "compute": {"format": "fp8", "scaling": "current"},
}


def faulty_model():
    """One weight has a column of huge numbers, which is multiplied with zeros: in FP8 nothing is left of the others."""
    model = llama(intermediate=128)
    block = model.model.layers[1]
    with torch.no_grad():
        block.post_attention_layernorm.weight[3] = 0.0
        block.mlp.up_proj.weight *= 20  # so that the loss depends on it
        block.mlp.up_proj.weight[:, 3] = 3e5
    block.post_attention_layernorm.weight.requires_grad_(False)
    return model


class OnRanks(Experiment):
    """An experiment whose launch line is a loop on these ranks, each of which reads what rank 0 has written."""

    def __init__(self, folder, steps, spec):
        super().__init__(["a loop"], steps)
        self.folder, self.spec, self.names, self.seed = folder, spec, [], 1

    def run(self, name, **changes):
        file = os.path.join(self.folder, f"{len(self.names)}.jsonl")
        self.names.append(name)
        with tried(Trial(steps=self.steps, file=file, **changes)):
            run(self.spec, [step] * 100, data=batches(100, dist.get_rank(), seed=self.seed))
        return read_run(Path(file), json.loads(Path(file).read_text().splitlines()[0])["engine"])


@contextlib.contextmanager
def tried(trial):
    """Engines inside of it record a trial, which ends the program."""
    os.environ[TRIAL_VARIABLE] = trial.model_dump_json()
    try:
        yield
    except SystemExit as ended:
        assert ended.code == 0
    finally:
        del os.environ[TRIAL_VARIABLE]
    dist.barrier()


def bisected(folder):
    """(what is said, the runs' names) of a job with a fault in one layer's compute, and in one layer's weights."""
    found = []
    for name, fields in (("compute", AT_FAULT), ("weights", {"weights": {"format": "int4", "block_size": 256}})):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        spec = Spec(section("lossless", **fields), model=faulty_model)
        experiment = OnRanks(os.path.join(folder, name), 2, spec)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            say(Bisection(experiment, "loss"), {})
        found.append((said.getvalue().splitlines(), experiment.names))
    return found


def compared(folder):
    """Losses and gradient norms of a run with and without rounding, of Recorder and of a loop that asks the engine."""
    fields = {"gradients": {"intra_format": "int8", "inter_format": "int4"}, "weights": {"format": "int4"}}
    spec = Spec(section("lossless", **fields))
    experiment = OnRanks(folder, 3, spec)
    runs = {name: experiment.run(name, high=high) for name, high in (("as it is", []), ("lossless", ["all"]))}
    experiment.seed = 2
    other_data = experiment.run("other data", high=["all"])
    experiment.seed, experiment.spec = 1, other(spec)
    other_model = experiment.run("other model", high=["all"])
    told = [what_differs(runs["lossless"], one) for one in (runs["as it is"], other_data, other_model)]
    by_hand = {"as it is": by_engine(spec), "lossless": by_engine(Spec(section("lossless")))}
    values = {n: tuple([step[what] for step in run.steps] for what in ("loss", "grad_norm")) for n, run in runs.items()}
    gradients = [by_hand[name].pop() for name in runs]
    layers = by_layer(runs["as it is"], runs["lossless"])
    picture = os.path.join(folder, f"picture{dist.get_rank()}.png")
    draw({"as it is": runs["as it is"]}, runs["lossless"], picture)
    exact = {
        name: ((a - b).norm() / b.norm()).item() for (name, a), b in zip(gradients[0].items(), gradients[1].values())
    }
    return values, by_hand, told, (layers, exact, layer_table(layers), Path(picture).read_bytes()[:4])


def two_engines(folder):
    """{engine that is asked for: steps of each} where two take steps in turn."""
    found = {}
    for asked in (0, 1):
        file = os.path.join(folder, f"{asked}.jsonl")
        with tried(Trial(steps=2, file=file, engine=2 * asked + asked)):
            each = [Running(Spec(section("zeropp")).engine(), batches(4, dist.get_rank())) for _ in range(2)]
            for one in each * 4:
                step(one)
        found[asked] = [len(read_run(Path(file), 2 * asked + number).steps) for number in range(2)]
    return found


def what_differs(*runs):
    try:
        return check_the_same(*runs, "a run")
    except SystemExit as error:
        return str(error)


def by_engine(spec):
    """[mean losses over ranks, gradient norms, the first step's gradients] of three steps without any experiment."""

    def gradients(engine):
        matrices = {name: p for name, p in engine.module.named_parameters() if len(p.ds_shape) > 1}
        return {name.removesuffix(".weight"): safe_get_full_grad(p).double() for name, p in matrices.items()}

    norm = see(lambda engine: float(engine.get_global_grad_norm()))
    trace = run(spec, [forward, backward, see(gradients), update, norm, *[step, norm] * 2])
    means = torch.tensor(trace.losses, dtype=torch.float64)
    dist.all_reduce(means)
    return [(means / dist.get_world_size()).tolist(), trace.seen[1:], trace.seen[0]]


def small_model(lora=False, seed=0):
    model = llama(intermediate=128, seed=seed)
    if lora:
        model = with_lora(model, ("q_proj", "down_proj"))
        for name, param in model.named_parameters():  # B of zeros would leave A without a gradient
            param.data.normal_(std=0.02) if "lora_B" in name else None
    return model


# -- layers that travel in high precision ---------------------------------------------------------------------------


def travelling(cases):
    """Of each case {parameter: (whether it arrives as it rests, dB of its reduced gradient)}, in the second step."""
    return [_travelling(**{"recipe": "zeropp", **case}) for case in cases]


def _travelling(**case):
    arrived, own_gradients = {}, {}

    def watch(engine):
        watch_arrivals(engine, full_weights(engine.module), arrived)
        for name, param in engine.module.named_parameters():
            param.register_hook(functools.partial(_keep, own_gradients, name))

    def compare(engine):
        found = {}
        for name, param in engine.module.named_parameters():
            exact = own_gradients[name]
            dist.all_reduce(exact)
            db = signal_to_noise_db(exact / dist.get_world_size(), safe_get_full_grad(param))
            found[name] = arrived[name], db
        return found

    spec = Spec(section(**case), model=small_model)
    same_batch = itertools.repeat(next(batches(1, dist.get_rank())))
    return run(spec, [step, on_engine(watch), forward, backward, see(compare)], data=same_batch).seen[0]


def _keep(gradients, name, gradient):
    gradients[name] = gradient.detach().double().clone()


def watch_arrivals(engine, at_rest, arrived):
    """Whether each parameter has the bits that it has at rest when its module begins; hooks that are to be removed."""
    hooks = []
    for prefix, module in engine.module.named_modules():
        own = {f"{prefix}.{name}": param for name, param in module.named_parameters(recurse=False)}
        look_at = functools.partial(look, own, at_rest, arrived)
        hooks += [module.register_forward_pre_hook(look_at)] if own else []
    return hooks


def look(own, at_rest, arrived, module, args):
    for name, param in own.items():
        arrived[name] = torch.equal(param.data, at_rest[name])


# -- every recipe -----------------------------------------------------------------------------------------------------


def of_recipes(folder, cases):
    """Of each case what sampling and a watch change in training, what they find, and what a bisection measures."""
    running.allow_fp16_on_cpu()
    return [_of_recipe(os.path.join(folder, str(index)), **case) for index, case in enumerate(cases)]


def _of_recipe(path, recipe, lora=False, fields=None, **config):
    """(whether samples and a watch leave every bit as it is, samples, distances by piece, differences by layer)."""
    model = functools.partial(small_model, lora)
    numerics = {"every": 1, "parts": 1, "file": f"{path}.jsonl", "watch": "stop"}
    plain, observed = (
        Spec(section(recipe, **(fields or {}), **more), config=config, model=model)
        for more in ({}, {"numerics": numerics})
    )
    steps = [step] * 3 * config.get("gradient_accumulation_steps", 1)
    changed = running.differing(*(run(spec, steps, ("weights",)) for spec in (plain, observed)))
    os.makedirs(path, exist_ok=True)
    experiment = OnRanks(path, 2, plain)
    bisection = Bisection(experiment, "loss")
    whole, trial, without = bisection.pieces()
    rows = [sample["rows"] for sample in lines_of(f"{path}.jsonl")]
    return not changed, rows, (whole, without), by_layer(trial, bisection.reference)
