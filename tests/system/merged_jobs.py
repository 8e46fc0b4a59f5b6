"""Jobs about saving the whole model in 16 bits, merged or not, and adapters alone, that run on ranks."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from frozen_checkpoint_jobs import engine_of, evaluation, same, steps
from frozen_jobs import codes_of
from models import build, ds_config, full_weights, llama, make_engine, section
from running import switch

import zeropp_fp8


def consolidated(folder, fields, dtype):
    """`save_16bit_model`, and what accelerate and the Trainer call."""
    from peft import PeftModel, get_peft_model_state_dict

    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = engine_of(fields, dtype=dtype, zero_optimization={**ds_config()["zero_optimization"], **zero})
    steps(engine, [0, 1])
    before, weights = codes_of(engine.module), full_weights(engine.module)
    engine.save_16bit_model(folder, "model.bin")
    adapters = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    result = {"codes": same(codes_of(engine.module), before)}
    if dist.get_rank() == 0:
        engine.module.save_pretrained(f"{folder}/adapter", state_dict=adapters)
        saved = torch.load(f"{folder}/model.bin")
        result["16 bit"] = same({n: w.float() for n, w in saved.items()}, weights)
        result["dtypes"] = {str(w.dtype) for w in saved.values()}
        fresh = PeftModel.from_pretrained(llama(seed=9, attention_bias=True), f"{folder}/adapter")
        loaded = get_peft_model_state_dict(fresh)
        mine = get_peft_model_state_dict(engine.module, state_dict=weights)
        result["adapter"] = same({n: w.float() for n, w in loaded.items()}, mine)
        result["files"] = sorted(os.listdir(f"{folder}/adapter"))
    dist.barrier()
    return result


def gathered_adapter(folder, fields):
    """`save_pretrained` inside GatheredParameters, as scripts of the PEFT documentation do it."""
    import deepspeed
    from peft import PeftModel, get_peft_model_state_dict

    engine = engine_of(fields)
    steps(engine, [0, 1])
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    with deepspeed.zero.GatheredParameters(trained):
        engine.module.save_pretrained(folder, is_main_process=dist.get_rank() == 0)
    mine = get_peft_model_state_dict(engine.module, state_dict=full_weights(engine.module))
    dist.barrier()
    fresh = PeftModel.from_pretrained(llama(seed=9, attention_bias=True), folder)
    return same(get_peft_model_state_dict(fresh), mine)


def all_kinds_of_adapters(kind):
    """A function that puts adapters of a kind on a model."""
    from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model

    options = {
        "lora": {},
        "rank-stabilized": {"use_rslora": True, "rank_pattern": {"down_proj": 2}},
        "dora": {"use_dora": True},
        "bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
        "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
        "modules to save": {"modules_to_save": ["lm_head", "norm"]},
        "parameters": {"target_parameters": ["embed_tokens.weight"]},
    }

    def adapt(model):
        torch.manual_seed(3)
        if kind == "none":
            return model
        if kind == "prompt":
            return get_peft_model(model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))
        chosen = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, **options[kind]}
        adapted = get_peft_model(model, LoraConfig(**chosen))
        for name, param in adapted.named_parameters():
            if "modules_to_save" in name:
                param.data += 0.25
        return adapted

    return adapt


def merged_model(folder, fields, kind="lora", dtype="fp32", merged=False, size="100KB", tie=False):
    """`save_merged_16bit` beside PEFT's merge_and_unload of an ordinary model that holds the decoded weights."""
    import deepspeed

    switch(True)
    if kind == "none":  # all is trained
        fields = {**fields, "modules": "frozen"}
    lora, config = all_kinds_of_adapters(kind), ds_config(section("lossless", frozen=fields), dtype)

    def make():
        return llama(attention_bias=True, tie=tie)

    engine = make_engine(lora(build(make, config)), config, lr=1e-2)
    steps(engine, [0])
    weights = full_weights(engine.module)
    if merged:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            engine.module.merge_adapter()
    before, flags = codes_of(engine.module), merged_flags(engine.module)
    zeropp_fp8.save_merged_16bit(engine, folder, max_shard_size=size)
    kept = same(codes_of(engine.module), before) and merged_flags(engine.module) == flags
    available = [n for n, p in engine.module.named_parameters() if p.ds_status.name == "AVAILABLE"]
    evaluation(engine)
    if dist.get_rank():
        return kept, available
    return kept, available, beside_peft(folder, lora(make()), weights)


def merged_flags(model):
    return [list(m.merged_adapters) for m in model.modules() if hasattr(m, "merged_adapters")]


def beside_peft(folder, ordinary, weights):
    """What was saved, and its largest difference from merge_and_unload in fp32, beside a tensor's largest number."""
    from transformers import AutoModelForCausalLM

    ordinary = ordinary.float()
    ordinary.load_state_dict(weights, strict=False)
    if hasattr(ordinary, "merge_and_unload"):
        ordinary = ordinary.merge_and_unload()
    loaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    expected, found = dict(ordinary.named_parameters()), dict(loaded.named_parameters())
    assert not any(report.values()), report
    return {
        "names": set(expected) == set(found),
        "off": max(((found[n] - w.to(found[n].dtype)).abs().max() / w.abs().max()).item() for n, w in expected.items()),
        "dtypes": {str(w.dtype) for w in found.values()},
        "files": sorted(os.listdir(folder)),
        "sizes": [os.path.getsize(f"{folder}/{f}") for f in os.listdir(folder) if f.endswith("safetensors")],
        "tied": loaded.config.tie_word_embeddings,
        "class": type(loaded).__name__,
    }


def saving_again(folder, fields):
    """One model with other file sizes, and of a model without an engine; then files of the first save are gone."""
    engine = engine_of({**fields, "modules": "frozen"}, lora=lambda model: model)
    files = []
    for size in ("100KB", "1GB", 200_000):
        zeropp_fp8.save_merged_16bit(engine.module, folder, max_shard_size=size)
        files.append(sorted(os.listdir(folder)))
        dist.barrier()
    return files


def merging_that_fails(folder, fields):
    """Messages, the same on every rank, and an engine that still works."""
    messages = {}

    def attempt(name, engine, where, **options):
        try:
            zeropp_fp8.save_merged_16bit(engine, where, **options)
            messages[name] = "saved"
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {error}"

    engine = engine_of(fields)
    attempt("size", engine, f"{folder}/a", max_shard_size="5 parrots")
    attempt("no size", engine, f"{folder}/a", max_shard_size=0)
    if dist.get_rank() == 0:
        with open(f"{folder}/file", "w") as file:
            file.write("in the way")
    dist.barrier()
    attempt("a file is in the way", engine, f"{folder}/file")
    from zeropp_fp8.zero.export import shard_writer

    real, written = shard_writer.save_file, []

    def full_disk(*arguments, **options):
        written.append(1)
        if len(written) == 2:
            raise OSError("No space left on device")
        real(*arguments, **options)

    shard_writer.save_file = full_disk
    attempt("the disk is full", engine, f"{folder}/a", max_shard_size="50KB")
    shard_writer.save_file = real
    attempt("then", engine, f"{folder}/a")
    losses = steps(engine, [0, 1])
    prompt = engine_of(fields, lora=all_kinds_of_adapters("prompt"))
    attempt("prompt", prompt, f"{folder}/b")
    return messages, losses
