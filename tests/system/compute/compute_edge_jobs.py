"""Jobs about the edges of FP8 compute under ZeRO-3: readers of weights, ends of engines, odd ranks, odd steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import warnings

import compute_jobs
import deepspeed
import running
import torch
import torch.distributed as dist
from compute_jobs import small_llama
from deepspeed.utils import safe_get_full_grad
from models import Mlp, batches, ds_config, full_weights, llama, with_lora
from ranks import attempt
from running import backward, evaluate, evaluated, forward, on_engine, run, see, step
from torch import nn

from zeropp_fp8 import sharded
from zeropp_fp8.compute.linear import LowPrecisionLinear

KEPT = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9, "stage3_prefetch_bucket_size": 10**9}


def fp8(scaling="current", **more):
    return {"format": "fp8", "scaling": scaling, **more}


def spec_of(compute=None, weights="fp8_e4m3", **options):
    return compute_jobs.spec_of(compute or fp8(), weights, **options)


def low_precision_layers(module):
    return sum(isinstance(m, LowPrecisionLinear) for m in module.modules())


def inputs(steps, features=128, rows=32, dtype=torch.bfloat16):
    """Random ones that differ by rank."""
    for index in range(steps):
        torch.manual_seed(10 * index + dist.get_rank())
        yield (torch.randn(rows, features, dtype=dtype),)


def write(engine, values, rank=0):
    """Give parameters what `values(name, param)` says, None for what stays."""
    params = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(params.values()), modifier_rank=rank):
        if dist.get_rank() == rank:
            for name, param in params.items():
                value = values(name, param)
                if value is not None:
                    param.data.copy_(value)


def with_its_weights(engine):
    """A new model with the weights of an engine."""
    model = small_llama()
    model.load_state_dict(full_weights(engine.module))
    return model


def live_operands(engine):
    return sum(sharded.known(p).operand is not None for p in engine.module.parameters())


# -- who reads the values of a weight --------------------------------------------------------------------------------


class ReadingBlock(nn.Module):
    """Uses its layers as layers, and the weight of one in a product and of one in a norm of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.plain = (nn.Linear(128, 128) for _ in range(3))

    def forward(self, x):
        y = self.up(x) + self.plain(x) + 0.5 * (x @ self.down.weight.t())
        return self.down(torch.relu(y)) + 0.1 * self.up.weight.float().norm()


class Blocks(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block() for _ in range(2)])

    def forward(self, x, **kwargs):
        for block in self.blocks:
            x = block(x, **kwargs)
        return x.float().square().mean()


def weights_read_as_numbers(cases):
    """Losses where weights travel as they are; of each (granularity, kept) those with codes, and what is decoded.

    And how many weights are decoded for readers once the engine is gone.
    """
    data, found, make = list(inputs(3)), [], functools.partial(Blocks, ReadingBlock)
    names = see(lambda engine: sorted(n for n, p in engine.module.named_parameters() if sharded.known(p).as_numbers))
    for granularity, kept in cases:
        model, config = make(), {"zero_optimization": KEPT if kept else {}}
        spec = spec_of(fields={"gather_granularity": granularity}, config=config)
        trace = run(spec, [*[step] * 3, names], data=data, model=model)
        found.append((trace.losses, *trace.seen, sum(sharded.known(p).as_numbers for p in model.parameters())))
    return run(spec_of(weights="none", model=make), [step] * 3, data=data).losses, found


def dora():
    """Losses of LoRA that looks at the norm of the weight: of weights as they are, of codes, and after inference."""
    dora = functools.partial(with_lora, targets=("q_proj",), use_dora=True)
    specs = (spec_of(weights=weights, adapted=dora, lr=1e-2) for weights in ("none", "fp8_e4m3"))
    kept = spec_of(adapted=dora, lr=1e-2, config={"zero_optimization": KEPT})
    tokens = next(batches(1, 0))

    def infer(engine):
        with torch.inference_mode():
            engine(input_ids=tokens, labels=tokens)

    plain, codes = (run(spec, [step] * 3).losses for spec in specs)
    return plain, codes, run(kept, [on_engine(infer), *[step] * 3]).losses


def gradients_in_eval_mode():
    """{wire format: norms of gradients} of a model in eval mode."""

    def norms(engine):
        return [safe_get_full_grad(p).norm().item() for p in engine.module.model.layers.parameters()]

    events = [on_engine(lambda engine: engine.eval()), forward, backward, see(norms)]
    return {weights: run(spec_of(weights=weights), events).seen[0] for weights in ("none", "fp8_e4m3")}


# -- settings that must not matter -----------------------------------------------------------------------------------


def same_losses_whatever_the_setting(settings):
    """Losses of each of several (fields, zero_optimization) over the same model and data."""
    specs = [spec_of(fields=fields, config={"zero_optimization": zero}) for fields, zero in settings]
    return [run(spec, [step, step]).losses for spec in specs]


def partial_write(scope, scaling):
    """Two weights written while all units are live.

    Losses before, twice after, of a fresh engine with these weights and of the first one beside it; live weights.
    """
    spec = spec_of(fp8(scaling), fields={"secondary": {"scope": scope}}, config={"zero_optimization": KEPT})
    tokens, fresh = next(batches(1, dist.get_rank())), []
    changes = on_engine(write_outputs, rank=1)
    look, beside = evaluate(tokens), on_engine(lambda engine: fresh.append(spec.engine(with_its_weights(engine))))

    def of_fresh(running):
        running.trace.losses.append(evaluated(fresh[0], tokens))

    trace = run(spec, [step, step, look, see(live_operands), changes, look, look, beside, of_fresh, look])
    return trace.seen[0], trace.losses[2:]


def write_outputs(engine, rank):
    written = [layer.self_attn.o_proj.weight for layer in engine.module.model.layers]
    with deepspeed.zero.GatheredParameters(written, modifier_rank=rank):
        if dist.get_rank() == rank:
            for weight in written:
                weight.data.mul_(-3)


def written_from_outside():
    """Losses after all weights were written: of an engine without amax histories, and of one that has others'."""
    tokens, new = next(batches(1, dist.get_rank(), seed=7)), dict(small_llama(seed=5).named_parameters())
    change = on_engine(write, lambda name, param: new[name] * (8 if "proj" in name else 1))
    spec = spec_of(fp8("delayed"), weights="none")
    return [run(spec, [*[step] * steps, change, evaluate(tokens)]).losses[-1] for steps in (0, 2)]


def norms_written_from_outside():
    """Losses after norms were written: of an engine made of these weights, and of the one that has trained them."""
    tokens, spec = next(batches(1, dist.get_rank(), seed=7)), spec_of(fp8("delayed"), weights="none")
    change = on_engine(write, lambda name, param: param * 8 if "norm" in name else None)
    trace = run(spec, [step, step, change, evaluate(tokens)], ("weights",))
    model = small_llama()
    model.load_state_dict(trace.weights)
    return run(spec, [evaluate(tokens)], model=model).losses[0], trace.losses[-1]


# -- ranks that differ -----------------------------------------------------------------------------------------------


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(128, 128)

    def forward(self, x):
        return x + torch.relu(self.up(x))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([Expert() for _ in range(3)])

    def forward(self, x, chosen):
        for index, rows in chosen.items():
            x = torch.cat([self.experts[index](x[:rows]), x[rows:]])
        return x


class OfExperts(nn.Module):
    """Only the experts are wide enough to compute in FP8."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.mixture = nn.Linear(8, 128), Experts()

    def forward(self, x, chosen):
        return self.mixture(self.into(x), chosen).float().square().mean()


def different_experts(compute, weights, recipe="lossless", granularity="block", leaf=True, idle=True):
    """Losses of three steps in which ranks have tokens for different experts; the amax history; finite weights.

    `leaf`: the mixture is gathered as one. `idle`: rank 0 uses no expert at all in the first step.
    """
    rank = dist.get_rank()

    def data():
        for index, (x,) in enumerate(inputs(3, features=8, rows=16)):
            chosen = {i: 12 if i == (rank + index) % 3 else 0 for i in range(3)}
            yield x, {} if idle and (rank, index) == (0, 0) else chosen

    def history(engine):
        conversion = engine.zeropp_fp8_session.conversion
        return None if conversion is None else conversion.scaling.state_dict().get("history")

    fields = {"gather_granularity": granularity}
    spec = spec_of(compute, weights, recipe=recipe, fields=fields, model=OfExperts, leaves=(Experts,) * leaf)
    # An evaluation has no backward, and must not be waited for in the next one.
    first = evaluate((torch.ones(4, 8, dtype=torch.bfloat16), {0: 4}))
    trace = run(spec, [first, *[step] * 3, see(history)], ("weights",), data())
    return trace.losses[1:], *trace.seen, all(w.isfinite().all() for w in trace.weights.values())


# -- steps that are skipped, forwards that raise ----------------------------------------------------------------------


def loss_scales(steps=9):
    """Of each fp16 step: (overflow, loss scale, gradients with a history, largest gradient that scales hold,
    largest newest amax of gradients)."""
    running.allow_fp16_on_cpu()
    fp16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}

    def look(engine):
        scaling = engine.zeropp_fp8_session.conversion.scaling
        known = [index for index in scaling._known if index % 3 == 2]
        held = (scaling._scale[known, 0] * 448).max().item() if known else 0.0
        newest = scaling._recorded.newest[known].max().item() if known else 0.0
        return engine.optimizer.overflow, engine.optimizer.loss_scale, len(known), held, newest

    data = itertools.chain(*(batches(1, dist.get_rank(), seed=seed) for seed in range(steps)))
    spec = spec_of(fp8("delayed", allow_fp16=True), dtype="fp16", node_size=1, config={"fp16": fp16})
    return run(spec, [step, see(look)] * steps, data=data).seen


def after_a_forward_that_raised():
    """(what a look at the weights says, losses afterwards, losses without all that)."""

    def interrupted(module, args):
        raise KeyError("interrupted")

    def raise_in_forward(running):
        hook = running.engine.module.model.layers[1].mlp.register_forward_pre_hook(interrupted)
        with contextlib.suppress(KeyError):
            forward(running)
        hook.remove()

    look, spec = see(lambda engine: attempt(lambda: full_weights(engine.module))), spec_of()
    first, *later = batches(3, dist.get_rank())
    trace = run(spec, [raise_in_forward, look, step, step], data=[first, *later])
    return trace.seen[0], trace.losses, run(spec, [step, step], data=later).losses


# -- beginnings and ends of engines ----------------------------------------------------------------------------------


def destroyed_again():
    """Layers in low precision after each event; losses of the second engine, and of one over another model."""
    model, spec, counts = small_llama(), spec_of(), []
    ended = [spec.engine(model)]

    def count(*_):
        counts.append(low_precision_layers(model))

    def collect(*_):
        ended.clear()
        gc.collect()

    ended[0].destroy()
    count()
    again = on_engine(lambda engine: ended[0].destroy())  # DeepSpeed does so when the engine is collected
    losses = run(spec, [again, count, step, step, collect, count, step], model=model).losses
    count()
    return counts, losses, run(spec, [step] * 3).losses


def failed_initialization():
    """The error of an engine that cannot be made, and the layers that it leaves in low precision."""
    model = small_llama()
    return attempt(lambda: spec_of(node_size=3).engine(model)), low_precision_layers(model)


def four_models(order):
    """Whether four engines side by side give what each gives alone; layers in low precision after each destroy()."""
    computes = [(fp8(scaling), "fp8_e4m3") for scaling in ("current", "block", "per_channel")]
    each = []
    for i, (compute, weights) in enumerate([*computes, ({"format": "none"}, "none")]):
        trains, model = i in (0, 3), functools.partial(small_llama, seed=i)
        spec = spec_of(compute, weights, model=model, optimizer="adamw" if trains else None)
        each.append((spec, step if trains else evaluate(next(batches(1, dist.get_rank())))))
    alone = [run(spec, [use, use]).losses for spec, use in each]
    runs = [running.Running(spec.engine(), batches(2, dist.get_rank())) for spec, _ in each]
    for one, (_, use) in [*zip(runs, each)] * 2:
        use(one)
    left = []
    for i in order:
        runs[i].engine.destroy()
        left.append([low_precision_layers(one.engine.module) for one in runs])
    return alone, [one.trace.losses for one in runs], left


# -- what else DeepSpeed and others do -------------------------------------------------------------------------------


def compiled(scaling):
    """Losses of an engine, and of a compiled one."""
    spec = spec_of(fp8(scaling), model=functools.partial(llama, layers=1, hidden=128, intermediate=384))
    compile_it = on_engine(lambda engine: engine.compile(backend="eager"))
    return [run(spec, [*first, step, step]).losses for first in ([], [compile_it])]


def weight_norm():
    """Losses of a model with a layer whose weight is no Parameter but computed before each forward."""

    def normed(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.nn.utils.weight_norm(model.linears[1])
        return model

    spec = spec_of(dtype="fp32", lr=1e-2, model=lambda: normed(Mlp(hidden=128)))
    data = ((x, torch.arange(8)) for (x,) in inputs(4, rows=8, dtype=torch.float32))
    return run(spec, [step] * 4, data=data).losses


def saved(folder):
    """Whether weights that are there as codes are saved exactly, under the keys they always had."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    def save(engine):
        live = live_operands(engine)
        engine.save_16bit_model(folder, "model.bin")
        engine.save_checkpoint(folder, tag="saved")
        return live

    zero = {**KEPT, "stage3_gather_16bit_weights_on_model_save": True}
    events = [step, step, evaluate(next(batches(1, dist.get_rank()))), see(save)]
    trace = run(spec_of(fp8("delayed"), config={"zero_optimization": zero}), events, ("weights",))
    if dist.get_rank() != 0:
        return None
    in_16_bits = torch.load(f"{folder}/model.bin")
    in_32_bits = get_fp32_state_dict_from_zero_checkpoint(folder, tag="saved")
    return (
        *trace.seen,
        set(in_16_bits) == set(small_llama().state_dict()),
        all(torch.equal(in_16_bits[name].float(), w) for name, w in trace.weights.items()),
        all(torch.equal(in_32_bits[name].bfloat16().float(), w) for name, w in trace.weights.items()),
    )


def trainer(folder):
    """Hugging Face Trainer: losses, the loss of an evaluation, the keys that it saves."""
    from accelerate.state import DistributedType, PartialState
    from safetensors.torch import load_file
    from trainer_jobs import _Tokens
    from transformers import Trainer, TrainingArguments

    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    spec = spec_of(fp8("delayed"), dtype="fp32", config={"zero_optimization": zero})
    running.switch(True)
    config = ds_config(spec.section, spec.dtype, **spec.config)
    config["train_micro_batch_size_per_gpu"] = config["gradient_clipping"] = "auto"
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        use_cpu=True,
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=0,
        disable_tqdm=True,
        optim="adamw_torch",
    )
    trainer = Trainer(model=small_llama(), args=arguments, train_dataset=_Tokens(), eval_dataset=_Tokens())
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/saved")
    dist.barrier()
    keys = set(load_file(f"{folder}/saved/model.safetensors"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, loss, keys == set(small_llama().state_dict()), low_precision_layers(trainer.model)
