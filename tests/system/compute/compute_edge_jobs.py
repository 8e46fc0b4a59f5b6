"""Jobs about the edges of FP8 compute under ZeRO-3: readers of weights, ends of engines, odd ranks, odd steps."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from compute_jobs import engine_of
from models import Mlp, batches, ds_config, full_weights, llama, make_engine, section, train
from running import allow_fp16_on_cpu, evaluated, forward_backward, switch
from torch import nn

from zeropp_fp8 import sharded
from zeropp_fp8.compute.linear import LowPrecisionLinear

KEPT = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9, "stage3_prefetch_bucket_size": 10**9}


def fp8(scaling="current", **more):
    return {"format": "fp8", "scaling": scaling, **more}


def config_of(compute=None, weights="fp8_e4m3", dtype="bf16", node_size=None, fields=None, **overrides):
    switch(True)
    fields = {"compute": compute or fp8(), "weights": {"format": weights}, **(fields or {})}
    return ds_config(section("lossless", ranks_per_node=node_size, **fields), dtype, **overrides)


def small_llama(seed=0):
    return llama(hidden=128, intermediate=384, seed=seed)


def low_precision_layers(module):
    return sum(isinstance(m, LowPrecisionLinear) for m in module.modules())


def steps_on(engine, steps=3, features=128, rows=32, **kwargs):
    """Losses on random inputs that differ by rank."""
    losses = []
    for step in range(steps):
        torch.manual_seed(10 * step + dist.get_rank())
        loss = engine(torch.randn(rows, features, dtype=next(engine.module.parameters()).dtype), **kwargs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


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


def weights_read_as_numbers(granularity, kept=False):
    """{wire format: losses}, and which weights are decoded for readers."""
    losses, read = {}, []
    for weights in ("none", "fp8_e4m3"):
        zero = KEPT if kept else {}
        fields = {"gather_granularity": granularity}
        engine = make_engine(Blocks(ReadingBlock), config_of(weights=weights, fields=fields, zero_optimization=zero))
        losses[weights] = steps_on(engine)
        read = sorted(name for name, p in engine.module.named_parameters() if sharded.known(p).as_numbers)
        engine.destroy()
    return losses, read, sum(sharded.known(p).as_numbers for p in engine.module.parameters())


def dora(inference_first=False):
    """{wire format: losses} of LoRA that looks at the norm of the weight."""
    from peft import LoraConfig, get_peft_model

    losses = {}
    for weights in ("none", "fp8_e4m3"):
        config = config_of(weights=weights, zero_optimization=KEPT if inference_first else {})
        model = get_peft_model(small_llama(), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True))
        engine = make_engine(model, config, lr=1e-2)
        if inference_first:
            tokens = next(batches(1, 0))
            with torch.inference_mode():
                engine(input_ids=tokens, labels=tokens)
        losses[weights] = train(engine, 3)
        engine.destroy()
    return losses


def gradients_in_eval_mode():
    """{wire format: norms of gradients} of a model in eval mode."""
    from deepspeed.utils import safe_get_full_grad

    tokens, norms = next(batches(1, dist.get_rank())), {}
    for weights in ("none", "fp8_e4m3"):
        engine = make_engine(small_llama(), config_of(fp8(), weights))
        engine.eval()
        forward_backward(engine, tokens)
        named = engine.module.model.layers.named_parameters()
        norms[weights] = [safe_get_full_grad(p).norm().item() for _, p in named]
        engine.destroy()
    return norms


# -- settings that must not matter -----------------------------------------------------------------------------------


def same_losses_whatever_the_setting(settings):
    """Losses of each of several (fields, zero_optimization) over the same model and data."""
    results = []
    for fields, zero in settings:
        engine = make_engine(small_llama(), config_of(fields=fields, zero_optimization=zero))
        results.append(train(engine, 2))
        engine.destroy()
    return results


def partial_write(scope, scaling):
    """Two weights written while all units are live: losses before, after, and of a fresh engine with these weights."""
    import deepspeed

    config = config_of(fp8(scaling), fields={"secondary": {"scope": scope}}, zero_optimization=KEPT)
    engine = make_engine(small_llama(), config)
    tokens = next(batches(1, dist.get_rank()))
    train(engine, 2)
    before = evaluated(engine, tokens)
    live = sum(sharded.known(p).operand is not None for p in engine.module.parameters())
    written = [layer.self_attn.o_proj.weight for layer in engine.module.model.layers]
    with deepspeed.zero.GatheredParameters(written, modifier_rank=1):
        if dist.get_rank() == 1:
            for weight in written:
                weight.data.mul_(-3)
    after = [evaluated(engine, tokens) for _ in range(2)]
    model = small_llama()
    model.load_state_dict(full_weights(engine.module))
    fresh = evaluated(make_engine(model, config), tokens)
    return live, before, after, fresh, evaluated(engine, tokens)


def written_from_outside():
    """Losses after all weights were written: of an engine without amax histories, and of one that has others'."""
    import deepspeed

    tokens, losses = next(batches(1, dist.get_rank(), seed=7)), []
    for steps in (0, 2):
        engine = make_engine(small_llama(), config_of(fp8("delayed"), weights="none"))
        train(engine, steps)
        new = small_llama(seed=5).parameters()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            if dist.get_rank() == 0:
                for (name, param), value in zip(engine.module.named_parameters(), new):
                    param.data.copy_(value * (8 if "proj" in name else 1))
        losses.append(evaluated(engine, tokens))
        engine.destroy()
    return losses


def norms_written_from_outside():
    """Losses after norms were written: of an engine made of these weights, and of the one that has trained them."""
    import deepspeed

    tokens, config = next(batches(1, dist.get_rank(), seed=7)), config_of(fp8("delayed"), weights="none")
    engine = make_engine(small_llama(), config)
    train(engine, 2)
    norms = [param for name, param in engine.module.named_parameters() if "norm" in name]
    with deepspeed.zero.GatheredParameters(norms, modifier_rank=0):
        if dist.get_rank() == 0:
            for param in norms:
                param.data.mul_(8)
    after = evaluated(engine, tokens)
    model = small_llama()
    model.load_state_dict(full_weights(engine.module))
    return evaluated(make_engine(model, config), tokens), after


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
    import deepspeed

    switch(True)
    fields = {"compute": compute, "weights": {"format": weights}, "gather_granularity": granularity}
    model = OfExperts()
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [Experts])
    engine = make_engine(model, ds_config(section(recipe, **fields), "bf16"))
    rank, losses = dist.get_rank(), []
    with torch.no_grad():  # an evaluation has no backward, and must not be waited for in the next one
        engine(torch.ones(4, 8, dtype=torch.bfloat16), chosen={0: 4})
    for step in range(3):
        chosen = {i: 12 if i == (rank + step) % 3 else 0 for i in range(3)}
        if idle and (rank, step) == (0, 0):
            chosen = {}
        losses += steps_on(engine, 1, features=8, rows=16, chosen=chosen)
    conversion = engine.zeropp_fp8_session.conversion
    state = {} if conversion is None else conversion.scaling.state_dict()
    return losses, state.get("history"), all(w.isfinite().all() for w in full_weights(engine.module).values())


# -- steps that are skipped, forwards that raise ----------------------------------------------------------------------


def loss_scales(steps=9):
    """Of each fp16 step: (overflow, loss scale, gradients with a history, largest gradient that scales hold,
    largest newest amax of gradients)."""
    allow_fp16_on_cpu()
    fp16 = {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}
    config = config_of(fp8("delayed", allow_fp16=True), dtype="fp16", node_size=1, fp16=fp16)
    engine = make_engine(small_llama(), config)
    scaling, seen = engine.zeropp_fp8_session.conversion.scaling, []
    for _ in range(steps):
        train(engine, 1, seed=len(seen))
        known = [index for index in scaling._known if index % 3 == 2]
        held = (scaling._scale[known, 0] * 448).max().item() if known else 0.0
        newest = scaling._recorded.newest[known].max().item() if known else 0.0
        seen.append((engine.optimizer.overflow, engine.optimizer.loss_scale, len(known), held, newest))
    return seen


def after_a_forward_that_raised():
    """(what a look at the weights says, losses afterwards, losses without all that)."""

    def interrupted(module, args):
        raise KeyError("interrupted")

    engine = engine_of(fp8(), "fp8_e4m3")
    hook = engine.module.model.layers[1].mlp.register_forward_pre_hook(interrupted)
    try:
        train(engine, 1)
    except KeyError:
        hook.remove()
    try:
        full_weights(engine.module)
        said = ""
    except RuntimeError as error:
        said = str(error)
    return said, train(engine, 2), train(engine_of(fp8(), "fp8_e4m3"), 2)


# -- beginnings and ends of engines ----------------------------------------------------------------------------------


def destroyed_again():
    """Layers in low precision after each event; losses of the second engine, and of one over another model."""
    model = small_llama()
    first = make_engine(model, config_of())
    first.destroy()
    counts = [low_precision_layers(model)]
    second = make_engine(model, config_of())
    first.destroy()  # DeepSpeed does so when the engine is collected
    counts.append(low_precision_layers(model))
    losses = train(second, 2)
    del first
    gc.collect()
    counts.append(low_precision_layers(model))
    losses += train(second, 1)
    second.destroy()
    counts.append(low_precision_layers(model))
    other = make_engine(small_llama(), config_of())
    return counts, losses, train(other, 2) + train(other, 1)


def failed_initialization():
    """The error of an engine that cannot be made, and the layers that it leaves in low precision."""
    model = small_llama()
    try:
        make_engine(model, config_of(node_size=3))
        said = ""
    except ValueError as error:
        said = str(error)
    return said, low_precision_layers(model)


def four_models(order):
    """Whether four engines side by side give what each gives alone; layers in low precision after each destroy()."""
    tokens = next(batches(1, dist.get_rank()))
    configs = [config_of(fp8(scaling)) for scaling in ("current", "block", "per_channel")]
    configs.append(config_of({"format": "none"}, "none"))

    def engine_for(i):
        return make_engine(small_llama(seed=i), configs[i], "adamw" if i in (0, 3) else None)

    def use(engine, i):
        return train(engine, 1)[0] if i in (0, 3) else evaluated(engine, tokens)

    alone = []
    for i in range(4):
        engine = engine_for(i)
        alone.append([use(engine, i) for _ in range(2)])
        engine.destroy()
    engines = [engine_for(i) for i in range(4)]
    rounds = [[use(engine, i) for i, engine in enumerate(engines)] for _ in range(2)]
    together = [list(losses) for losses in zip(*rounds)]
    left = []
    for i in order:
        engines[i].destroy()
        left.append([low_precision_layers(engine.module) for engine in engines])
    return alone, together, left


# -- what else DeepSpeed and others do -------------------------------------------------------------------------------


def compiled(scaling):
    """Losses of an engine, and of a compiled one."""
    losses = []
    for compile_it in (False, True):
        engine = make_engine(llama(layers=1, hidden=128, intermediate=384), config_of(fp8(scaling)))
        if compile_it:
            engine.compile(backend="eager")
        losses.append(train(engine, 2))
        engine.destroy()
    return losses


def weight_norm():
    """Losses of a model with a layer whose weight is no Parameter but computed before each forward."""
    import warnings

    model = Mlp(hidden=128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.linears[1])
    engine = make_engine(model, config_of(dtype="fp32"), lr=1e-2)
    return steps_on(engine, 4, rows=8, y=torch.arange(8))


def saved(folder):
    """Whether weights that are there as codes are saved exactly, under the keys they always had."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    zero = {**KEPT, "stage3_gather_16bit_weights_on_model_save": True}
    engine = make_engine(small_llama(), config_of(fp8("delayed"), zero_optimization=zero))
    train(engine, 2)
    evaluated(engine, next(batches(1, dist.get_rank())))
    live = sum(sharded.known(p).operand is not None for p in engine.module.parameters())
    engine.save_16bit_model(folder, "model.bin")
    engine.save_checkpoint(folder, tag="saved")
    weights = full_weights(engine.module)
    if dist.get_rank() != 0:
        return None
    in_16_bits = torch.load(f"{folder}/model.bin")
    in_32_bits = get_fp32_state_dict_from_zero_checkpoint(folder, tag="saved")
    return (
        live,
        set(in_16_bits) == set(small_llama().state_dict()),
        all(torch.equal(in_16_bits[name].float(), w) for name, w in weights.items()),
        all(torch.equal(in_32_bits[name].bfloat16().float(), w) for name, w in weights.items()),
    )


def trainer(folder):
    """Hugging Face Trainer: losses, the loss of an evaluation, the keys that it saves."""
    from accelerate.state import DistributedType, PartialState
    from safetensors.torch import load_file
    from trainer_jobs import _Tokens
    from transformers import Trainer, TrainingArguments

    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    config = config_of(fp8("delayed"), dtype="fp32", zero_optimization=zero)
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
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{folder}/saved")
    dist.barrier()
    keys = set(load_file(f"{folder}/saved/model.safetensors"))
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, evaluated, keys == set(small_llama().state_dict()), low_precision_layers(trainer.model)
