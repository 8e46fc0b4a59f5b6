"""Jobs with mixtures of experts whose packed experts rest in a frozen store."""

from __future__ import annotations

import functools
import gc
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from frozen_jobs import load_into
from frozen_models import codes, config_of, decoded, evaluate, gathered, hugging_face_knows, plain, rounded, same
from models import batches, build, compiled_by, full_weights, make_engine, section
from ranks import attempt, printed
from running import Spec, changed, differing, loaded, on_engine, run, saved, see, shared_folder, step, switch
from safetensors.torch import load_file, save_file

import zeropp_fp8
from benchmarks.harness.host_memory import PeakOfMemory
from zeropp_fp8.zero.frozen.store import stored_weight

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "Qwen3Moe": {
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "head_dim": 16,
    },
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
LINEAR_ROUTER = {"Afmoe": {**KINDS["Qwen3Moe"], "num_dense_layers": 1, "num_shared_experts": 1}}
EXPERTS = ("gate_up_proj", "down_proj")


def mixture(kind, seed=0, **sizes):
    torch.manual_seed(seed)
    options = {
        "vocab_size": 256,
        "use_cache": False,
        "pad_token_id": None,
        **SIZES,
        **(KINDS | LINEAR_ROUTER)[kind],
        **sizes,
    }
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def adapted(model):
    """LoRA of attention and of packed experts, whose effect is not zero from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    parameters = [f"experts.{name}" for name in EXPERTS]
    options = {"target_modules": ["q_proj"], "target_parameters": parameters, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=4, **options), autocast_adapter_dtype=False)


def trained(model):
    return model


def with_a_trained_head(model):
    from peft import LoraConfig, get_peft_model

    options = {"target_modules": ["q_proj"], "modules_to_save": ["score", "mlp.gate"]}
    return get_peft_model(model, LoraConfig(r=4, **options), autocast_adapter_dtype=False)


def with_weights_of(state, model):
    """The model with these weights, with adapters. (Under zero.Init packed experts are what memory was before.)"""
    return adapted(load_into(model, state))


def equals_rounded(kind, fields, zero_init):
    """(names in the store, losses of training on it, on weights that were rounded beforehand)."""
    data, state = list(batches(3, dist.get_rank())), mixture(kind).state_dict()
    model = functools.partial(mixture, kind)

    def spec(more, state):
        adapt = functools.partial(with_weights_of, state)
        return Spec(section("lossless", **more), "bf16", model=model, adapted=adapt, zero_init=zero_init)

    trace = run(
        spec({"frozen": fields}, state), [see(lambda engine: sorted(codes(engine.module))), *[step] * 3], data=data
    )
    (names,) = trace.seen
    state |= {name: rounded(state[name].bfloat16(), fields).float() for name in names}
    return names, trace.losses, run(spec({}, state), [step] * 3, data=data).losses


def compiled(way, fields):
    """How training that is compiled in a way differs from training that is not; losses of both."""

    def compile_it(engine):
        if way == "engine.compile":
            engine.compile(backend="eager")

    traces, data = [], list(batches(2, dist.get_rank()))
    for how in ("none", way):
        section_of = section("lossless", frozen=fields, compile="blocks" if how == "blocks" else "none")
        spec = Spec(section_of, "bf16", model=functools.partial(mixture, "Mixtral"), adapted=adapted)
        with compiled_by("eager"):
            events = [on_engine(compile_it if how == way else lambda engine: None), *[step] * 2]
            traces.append(run(spec, events, ["masters"], data=data))
    return differing(*traces), *[trace.losses for trace in traces]


def memory_of_loading(folder, fields):
    """Bytes at the peak while a checkpoint is loaded and an engine made, bytes that rest then, and stored weights."""
    from transformers import AutoModelForCausalLM

    switch(True)
    config = config_of(fields, "bf16")
    mixture("Qwen3Moe")  # what is imported on the way is none of the weights' memory
    with hugging_face_knows(config), PeakOfMemory() as memory:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        engine = make_engine(model, config, optimizer=None)
    rests = sum(p.ds_tensor.numel() * p.ds_tensor.element_size() for p in engine.module.parameters())
    return memory.peak, rests, len(codes(engine.module))


def loaded_from(folder, fields):
    """Names of what is stored while a checkpoint streams in, and whether all numbers are the checkpoint's."""
    from transformers import AutoModelForCausalLM

    switch(True)
    config = config_of(fields, "bf16")
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    with hugging_face_knows(config):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    names = sorted(codes(model))
    as_rounded = same(decoded(model), {name: rounded(weights[name], fields) for name in names})
    with gathered(model):
        exact = [torch.equal(p, weights[n]) for n, p in model.named_parameters() if not stored_weight(p)]
    return names, as_rounded, all(exact)


def incomplete(folder, fields, missing, head=False, adapt=adapted):
    """Return what a start prints over a checkpoint without tensors whose names have one of these parts.

    Args:
        head: whether the model gets one that the checkpoint lacks.
        adapt: makes of the model what is trained.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    switch(True)
    config, here = config_of(fields, "bf16"), shared_folder()
    if dist.get_rank() == 0:
        shutil.copytree(folder, here, dirs_exist_ok=True)
        for file in Path(here).glob("*.safetensors"):
            kept = {n: t for n, t in load_file(file).items() if not any(part in n for part in missing)}
            save_file(kept, file, metadata={"format": "pt"})
    dist.barrier()
    made = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    with hugging_face_knows(config):
        model = made.from_pretrained(here, dtype=torch.bfloat16)
    model._keys_to_ignore_on_load_missing = {"o_proj"}
    make_engine(adapt(model), config).destroy()
    return printed(dist.get_rank())


def engine_of(kind, fields):
    switch(True)
    # Before zero.Init: of a class that is imported inside, it puts back the __init__ from before its decorators.
    state, config = mixture(kind).state_dict(), config_of(fields)
    model = build(lambda: mixture(kind), config, zero_init=True)
    return make_engine(with_weights_of(state, model), config)


def merge_and_unmerge(kind, fields):
    """Whether codes, numbers and losses around merging are what they must be."""
    log, engine = {}, engine_of(kind, fields)
    model = engine.module
    before, numbers, unmerged_loss = codes(model), decoded(model), evaluate(engine)
    with gathered(model):
        layers = {
            f"{plain(name).removesuffix('.base_layer')}.{layer.parameter_name}": layer
            for name, layer in model.named_modules()
            if hasattr(layer, "parameter_name")
        }
        expected = {name: numbers[name] + layer.get_delta_weight("default") for name, layer in layers.items()}
        model.merge_adapter()
        merged = {plain(name): param.data.clone() for name, param in model.named_parameters()}
        model.unmerge_adapter()
    log["experts"] = sorted(layers)
    log["merged"] = all(torch.allclose(merged[name], values, rtol=1e-6, atol=1e-7) for name, values in expected.items())
    log["after one context"] = same(before, codes(model)) and evaluate(engine) == unmerged_loss
    with gathered(model, modifier_rank=0):
        model.merge_adapter()
    changed = [name for name, code in codes(model).items() if not torch.equal(code, before[name])]
    log["codes changed"] = sorted(changed)
    log["requantized"] = all(torch.equal(decoded(model)[name], rounded(merged[name], fields)) for name in layers)
    log["merged loss"] = evaluate(engine), unmerged_loss
    with gathered(model, modifier_rank=0):
        model.unmerge_adapter()
    log["after two contexts"] = same(before, codes(model)) and evaluate(engine) == unmerged_loss
    with gathered(model, modifier_rank=0):
        bare = model.merge_and_unload()
    gc.collect()
    log["unloaded"] = all(torch.equal(decoded(bare)[name], rounded(merged[name], fields)) for name in layers)
    return log


def checkpoints(kind, fields, folder):
    """Whether a run that goes on from a checkpoint is the one that was not interrupted; codes in the checkpoint."""
    data = list(batches(4, dist.get_rank()))
    state = [mixture(kind, seed).state_dict() for seed in (0, 1)]
    specs = [
        Spec(
            section("lossless", frozen=fields),
            "bf16",
            model=functools.partial(mixture, kind),
            adapted=functools.partial(with_weights_of, each),
            zero_init=True,
        )
        for each in state
    ]
    went_on = run(specs[0], [step, step, saved(folder, "half"), step, step], ["masters"], data=data)
    resumed = run(specs[1], [loaded(folder, "half"), step, step], ["masters"], data=data[2:])
    return went_on.losses[2:] == resumed.losses, changed(went_on.masters, resumed.masters)


def written_in_place(kind, fields):
    """Said of a write to packed experts in a forward, beside the one that PEFT's own does, and without that one."""
    engine = engine_of(kind, fields)
    experts = engine.module.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    evaluate(engine)
    evaluate(engine)

    def write(module, args):
        adapted = "parametrizations" in module._modules
        with torch.no_grad():
            (module.parametrizations.down_proj.original if adapted else module.down_proj).mul_(2)

    def without_adapters():
        with engine.module.disable_adapter():
            evaluate(engine)

    without_adapters()
    hook = experts.register_forward_pre_hook(write, prepend=True)
    said = [attempt(lambda: evaluate(engine)), attempt(without_adapters)]
    hook.remove()
    return said


def adapted_late(kind, fields):
    """Losses, and what is said of a matrix as a parameter, with adapters that were there or are added later."""
    from peft import LoraConfig, get_peft_model

    switch(True)
    state, config = mixture(kind).state_dict(), config_of(fields)

    def engine_with(parameters, early=False, forward_before=False):
        model = load_into(build(lambda: mixture(kind), config, zero_init=True), state)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]), autocast_adapter_dtype=False)
        engine = None if early else make_engine(model, config)
        if forward_before:
            evaluate(engine)
        torch.manual_seed(5)
        options = {"target_modules": [], "target_parameters": parameters, "init_lora_weights": False}
        model.add_adapter("late", LoraConfig(r=4, **options), autocast_adapter_dtype=False)
        model.set_adapter("late")
        return engine or make_engine(model, config)

    of_experts = [f"experts.{name}" for name in EXPERTS]
    ways = {"early": True}, {}, {"forward_before": True}
    losses = [evaluate(engine_with(of_experts, **way)) for way in ways]
    return losses, attempt(lambda: evaluate(engine_with(["k_proj.weight"])))


def saved_merged(kind, fields, folder):
    """Names whose saved weight is not what PEFT makes of an ordinary model with the decoded weights; rank 0 reads."""
    engine = engine_of(kind, fields)
    zeropp_fp8.save_merged_16bit(engine, folder, max_shard_size="100KB")
    ordinary = adapted(mixture(kind, seed=1))
    load_into(ordinary, full_weights(engine.module))
    dist.barrier()
    if dist.get_rank():
        return []
    expected = ordinary.merge_and_unload().state_dict()
    return changed(dict(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()), dict(expected))
