"""Jobs about samples, references, and layers in high precision, that run on ranks."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from error_bounds import signal_to_noise_db
from models import batches, ds_config, full_weights, llama, make_engine, section
from running import allow_fp16_on_cpu, forward_backward, loss_of, switch, trained

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


def sampled(path, recipe, accumulation=1, steps=2, every=1, poison=None, frozen=(), **fields):
    """Samples of every step; of the last one the oracle's, {(kind, layer): (dB, share that became zero, amax)}.

    And what the engine tells of its last sample, and what of it is still looked at when training has ended.
    """
    switch(True)
    model = llama()
    if poison:
        with torch.no_grad():
            weight = model.get_submodule(poison).weight
            weight.view(-1)[:: weight.numel() // 64] *= 1000
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    numerics = {"every": every, "parts": 1, "file": path}
    config = ds_config(section(recipe, numerics=numerics, **fields), gradient_accumulation_steps=accumulation)
    engine = make_engine(model, config)
    names = {param: name for name, param in engine.module.named_parameters()}
    summed, oracle = {}, {}

    def local_gradient(param):
        def keep(gradient):
            if last:
                summed[param] = summed.get(param, 0.0) + gradient.detach().double()

        return keep

    for param in names:
        if param.requires_grad:
            param.register_hook(local_gradient(param))
    inputs = []
    watched = engine.module.get_submodule(WATCHED)
    watched.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    data = batches(steps * accumulation, dist.get_rank())
    for step in range(1, steps + 1):
        last = step == steps
        if last:
            oracle |= weights_by_hand(engine, names)
            inputs.clear()  # a sample looks at the first micro-batch
        for micro in range(accumulation):
            tokens = next(data)
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            if last and micro == accumulation - 1:
                oracle |= gradients_by_hand(engine, names, summed, accumulation)
                oracle |= inputs_by_hand(engine, inputs[0])
            engine.step()
    session = engine.zeropp_fp8_session
    found = StepMetrics(session)()  # what monitors and a Trainer's logs get
    told = {name: value for name, value in found.items() if name.startswith("numerics/")}
    left = {"finish", "start", "sum_in_node"} & {*vars(engine.optimizer.gatherer), *vars(engine.optimizer.reducer)}
    engine.destroy()
    samples = [json.loads(line) for line in Path(path).read_text().splitlines()] if dist.get_rank() == 0 else None
    return samples, oracle, told, left


def sampled_in_turn(path):
    """Samples of six steps with the default `parts`, more than there are units; vectors stay gathered, and exact."""
    switch(True)
    zero = {"stage3_param_persistence_threshold": 100}
    numerics = {"every": 1, "file": path}
    engine = make_engine(llama(), ds_config(section("zeropp", numerics=numerics), zero_optimization=zero))
    matrices = {n.removesuffix(".weight") for n, p in engine.module.named_parameters() if len(p.ds_shape) > 1}
    for tokens in batches(6, dist.get_rank()):
        forward_backward(engine, tokens)
        engine.step()
    engine.destroy()
    lines = Path(path).read_text().splitlines() if dist.get_rank() == 0 else ()
    return matrices, [json.loads(line)["rows"] for line in lines]


def sampled_after_a_resume(folder):
    """Steps of the samples, every third one, of a run that is saved after two, resumes and makes five more."""
    switch(True)
    path, tokens = os.path.join(folder, "numerics.jsonl"), list(batches(5, dist.get_rank()))
    fields = {"numerics": {"every": 3, "parts": 1, "file": path}}
    for steps in (2, 5):
        engine = make_engine(llama(), ds_config(section("zeropp", **fields)))
        if steps == 5:
            engine.load_checkpoint(folder, tag="saved")
        for batch in tokens[:steps]:
            forward_backward(engine, batch)
            engine.step()
        engine.save_checkpoint(folder, tag="saved")
        engine.destroy()
    return [json.loads(line)["step"] for line in Path(path).read_text().splitlines()]


def beside_a_reference(path):
    """(observers of an engine that evaluates only, numbers of those of one that trains, engines in the samples)."""
    switch(True)
    fields = {"numerics": {"every": 1, "parts": 1, "file": path, "watch": "stop"}}
    reference = make_engine(llama(), ds_config(section("zeropp", **fields)), optimizer=None)
    engine = make_engine(llama(), ds_config(section("zeropp", **fields)))
    tokens = next(batches(1, dist.get_rank()))
    with torch.no_grad():
        reference(input_ids=tokens)
    forward_backward(engine, tokens)
    engine.step()
    dist.barrier()
    of = [each.zeropp_fp8_session.parts for each in (reference, engine)]
    observers = [sum(isinstance(part, (Sampler, Watch)) for part in parts) for parts in of]
    return observers, [json.loads(line)["engine"] for line in Path(path).read_text().splitlines()]


def beside_a_later_engine(path):
    """What is printed of samples of an engine alone, beside a later one over its model, and when that is gone."""
    switch(True)
    model, said = llama(), []
    engine = make_engine(model, ds_config(section("zeropp", numerics={"every": 1, "parts": 1, "file": path})))
    tokens = next(batches(1, dist.get_rank()))
    for place in range(3):
        later = make_engine(model, ds_config(section("zeropp")), optimizer=None) if place == 1 else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            forward_backward(engine, tokens)
            engine.step()
        said.append(printed.getvalue())
        if later is not None:
            later.destroy()
    return said


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

    def __init__(self, folder, steps, make_model=llama, recipe="lossless", options=None, **fields):
        super().__init__(["a loop"], steps)
        self.folder, self.make_model, self.fields, self.names, self.seed = folder, make_model, fields, [], 1
        self.recipe, self.options = recipe, options or {}

    def run(self, name, **changes):
        file = os.path.join(self.folder, f"{len(self.names)}.jsonl")
        self.names.append(name)
        trial = Trial(steps=self.steps, file=file, **changes)
        os.environ[TRIAL_VARIABLE] = trial.model_dump_json()
        switch(True)
        engine = make_engine(self.make_model(), ds_config(section(self.recipe, **self.fields), **self.options))
        try:
            for tokens in batches(100, dist.get_rank(), seed=self.seed):
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                engine.step()
        except SystemExit as ended:
            assert ended.code == 0
        finally:
            del os.environ[TRIAL_VARIABLE]
        engine.destroy()
        dist.barrier()
        return read_run(Path(file), json.loads(Path(file).read_text().splitlines()[0])["engine"])


def bisected(folder):
    """(what is said, the runs' names) of a job with a fault in one layer's compute, and in one layer's weights."""
    found = []
    for name, fields in (("compute", AT_FAULT), ("weights", {"weights": {"format": "int4", "block_size": 256}})):
        os.makedirs(os.path.join(folder, name), exist_ok=True)
        experiment = OnRanks(os.path.join(folder, name), 2, faulty_model, **fields)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            say(Bisection(experiment, "loss"), {})
        found.append((said.getvalue().splitlines(), experiment.names))
    return found


def compared(folder):
    """Losses and gradient norms of a run with and without rounding, of Recorder and of a loop that asks the engine."""
    fields = {"gradients": {"intra_format": "int8", "inter_format": "int4"}, "weights": {"format": "int4"}}
    experiment = OnRanks(folder, 3, **fields)
    runs = {name: experiment.run(name, high=high) for name, high in (("as it is", []), ("lossless", ["all"]))}
    experiment.seed = 2
    other = experiment.run("other data", high=["all"])
    experiment.seed, experiment.make_model = 1, lambda: llama(seed=5)
    other_model = experiment.run("other model", high=["all"])
    told = [what_differs(runs["lossless"], one) for one in (runs["as it is"], other, other_model)]
    by_hand = {name: by_engine(fields if name == "as it is" else {}) for name in runs}
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
        switch(True)
        os.environ[TRIAL_VARIABLE] = Trial(steps=2, file=file, engine=2 * asked + asked).model_dump_json()
        engines = [make_engine(llama(), ds_config(section("zeropp"))) for _ in range(2)]
        try:
            for tokens in batches(4, dist.get_rank()):
                for engine in engines:
                    forward_backward(engine, tokens)
                    engine.step()
        except SystemExit as ended:
            assert ended.code == 0
        dist.barrier()
        found[asked] = [len(read_run(Path(file), 2 * asked + number).steps) for number in range(2)]
    return found


def what_differs(*runs):
    try:
        return check_the_same(*runs, "a run")
    except SystemExit as error:
        return str(error)


def by_engine(fields):
    """[mean losses over ranks, gradient norms, the first step's gradients] of three steps without any experiment."""
    engine = make_engine(llama(), ds_config(section("lossless", **fields)))
    losses, norms, gradients = [], [], {}
    for tokens in batches(3, dist.get_rank()):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        for name, param in engine.module.named_parameters() if not losses else ():
            if len(param.ds_shape) > 1:
                gradients[name.removesuffix(".weight")] = safe_get_full_grad(param).double().clone()
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    engine.destroy()
    return [losses, norms, gradients]


def small_model(lora=False):
    model = llama(intermediate=128)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        for name, param in model.named_parameters():  # B of zeros would leave A without a gradient
            param.data.normal_(std=0.02) if "lora_B" in name else None
    return model


# -- layers that travel in high precision ---------------------------------------------------------------------------


def travelling(cases):
    """Of each case {parameter: (whether it arrives as it rests, dB of its reduced gradient)}, in the second step."""
    return [_travelling(**case) for case in cases]


def _travelling(**case):
    switch(True)
    recipe, arrived, own_gradients = case.pop("recipe", "zeropp"), {}, {}
    engine = make_engine(small_model(), ds_config(section(recipe, **case)))
    (tokens,) = batches(1, dist.get_rank())
    forward_backward(engine, tokens)
    engine.step()
    at_rest, params = full_weights(engine.module), dict(engine.module.named_parameters())
    for prefix, module in engine.module.named_modules():
        own = {f"{prefix}.{name}": param for name, param in module.named_parameters(recurse=False)}
        module.register_forward_pre_hook(functools.partial(look, own, at_rest, arrived))
    for name, param in params.items():
        param.register_hook(functools.partial(_keep, own_gradients, name))
    forward_backward(engine, tokens)
    found = {}
    for name, param in params.items():
        exact = own_gradients[name]
        dist.all_reduce(exact)
        db = signal_to_noise_db(exact / dist.get_world_size(), safe_get_full_grad(param))
        found[name] = arrived[name], db
    engine.destroy()
    return found


def _keep(gradients, name, gradient):
    gradients[name] = gradient.detach().double().clone()


def look(own, at_rest, arrived, module, args):
    for name, param in own.items():
        arrived[name] = torch.equal(param.data, at_rest[name])


# -- every recipe -----------------------------------------------------------------------------------------------------


def of_recipes(folder, cases):
    """Of each case what sampling and a watch change in training, what they find, and what a bisection measures."""
    allow_fp16_on_cpu()
    return [_of_recipe(os.path.join(folder, str(index)), **case) for index, case in enumerate(cases)]


def _of_recipe(path, recipe, lora=False, fields=None, **options):
    """(whether samples and a watch leave every bit as it is, samples, distances by piece, differences by layer)."""

    make_model = functools.partial(small_model, lora)
    fields, each = fields or {}, []
    numerics = {"every": 1, "parts": 1, "file": f"{path}.jsonl", "watch": "stop"}
    for observed in ({}, {"numerics": numerics}):
        switch(True)
        engine = make_engine(make_model(), ds_config(section(recipe, **fields, **observed), **options))
        micro, losses = engine.gradient_accumulation_steps(), []
        losses += trained(engine, batches(3 * micro, dist.get_rank()))
        each.append((losses, full_weights(engine.module)))
        engine.destroy()
    (plain, weights), (losses, observed_weights) = each
    same = plain == losses and all(torch.equal(weight, observed_weights[name]) for name, weight in weights.items())
    samples = (
        [json.loads(line) for line in Path(f"{path}.jsonl").read_text().splitlines()] if not dist.get_rank() else []
    )
    os.makedirs(path, exist_ok=True)
    experiment = OnRanks(path, 2, make_model, recipe, options, **fields)
    bisection = Bisection(experiment, "loss")
    whole, run, without = bisection.pieces()
    return same, [sample["rows"] for sample in samples], (whole, without), by_layer(run, bisection.reference)
