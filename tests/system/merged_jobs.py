"""Jobs about saving the whole model in 16 bits, merged or not, and adapters alone, that run on ranks."""

from __future__ import annotations

import functools
import os

import torch
import torch.distributed as dist
from deepspeed import zero
from frozen_checkpoint_jobs import EVALUATED, codes_in, spec_of, weights_of
from models import llama, section
from ranks import attempt
from running import Spec, equal, evaluate, on_engine, run, see, step

import zeropp_fp8


def saved_for_trainers(folder, fields, dtype):
    """`save_16bit_model`, what accelerate and the Trainer call, and `save_pretrained` inside GatheredParameters."""
    from peft import PeftModel, get_peft_model_state_dict

    def adapter_in(folder):
        fresh = PeftModel.from_pretrained(llama(seed=9, attention_bias=True), folder)
        return {name: w.float() for name, w in get_peft_model_state_dict(fresh).items()}

    def save(engine):
        before, weights = codes_in(engine), weights_of(engine)
        engine.save_16bit_model(folder, "model.bin")
        adapters = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        result = {"codes": equal(codes_in(engine), before)}
        # As scripts of the PEFT documentation do it.
        with zero.GatheredParameters([p for p in engine.module.parameters() if p.requires_grad]):
            engine.module.save_pretrained(f"{folder}/gathered", is_main_process=dist.get_rank() == 0)
        mine = get_peft_model_state_dict(engine.module, state_dict=weights)
        dist.barrier()
        result["gathered"] = equal(adapter_in(f"{folder}/gathered"), dict(mine))
        if dist.get_rank() == 0:
            engine.module.save_pretrained(f"{folder}/adapter", state_dict=adapters)
            saved = torch.load(f"{folder}/model.bin")
            result["16 bit"] = equal({n: w.float() for n, w in saved.items()}, weights)
            result["dtypes"] = {str(w.dtype) for w in saved.values()}
            result["adapter"] = equal(adapter_in(f"{folder}/adapter"), dict(mine))
            result["files"] = sorted(os.listdir(f"{folder}/adapter"))
        dist.barrier()
        return result

    config = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
    return run(spec_of(fields, dtype=dtype, **config), [step, step, see(save)]).seen[0]


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
    if kind == "none":  # all is trained
        fields = {**fields, "modules": "frozen"}
    adapt, make = all_kinds_of_adapters(kind), functools.partial(llama, attention_bias=True, tie=tie)
    spec = Spec(section("lossless", frozen=fields), dtype, model=make, adapted=adapt, lr=1e-2)

    def save(engine):
        weights = weights_of(engine)
        if merged:
            with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                engine.module.merge_adapter()
        before, flags = codes_in(engine), merged_flags(engine.module)
        zeropp_fp8.save_merged_16bit(engine, folder, max_shard_size=size)
        kept = equal(codes_in(engine), before) and merged_flags(engine.module) == flags
        available = [n for n, p in engine.module.named_parameters() if p.ds_status.name == "AVAILABLE"]
        return weights, kept, available

    weights, kept, available = run(spec, [step, see(save), evaluate(EVALUATED)]).seen[0]
    if dist.get_rank():
        return kept, available
    return kept, available, beside_peft(folder, adapt(make()), weights)


def merged_flags(model):
    return [list(m.merged_adapters) for m in model.modules() if hasattr(m, "merged_adapters")]


def beside_peft(folder, ordinary, weights):
    """Return what was saved, and its largest difference from merge_and_unload in fp32, beside a tensor's maximum."""
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
    """Files of one model with other file sizes, the last one's as a number."""

    def save(engine, size):
        zeropp_fp8.save_merged_16bit(engine.module, folder, max_shard_size=size)
        files = sorted(os.listdir(folder))
        dist.barrier()
        return files

    spec = spec_of({**fields, "modules": "frozen"}, lora=lambda model: model)
    return run(spec, [see(save, size) for size in ("100KB", "1GB", 200_000)]).seen


def merging_that_fails(folder, fields):
    """Messages, the same on every rank, and losses of an engine that still works."""
    from zeropp_fp8.zero.export import shard_writer

    messages = {}

    def save(name, where, **options):
        def event(engine):
            messages[name] = attempt(lambda: zeropp_fp8.save_merged_16bit(engine, f"{folder}/{where}", **options))

        return on_engine(event)

    def put_in_the_way(engine):
        if dist.get_rank() == 0:
            with open(f"{folder}/file", "w") as file:
                file.write("in the way")
        dist.barrier()

    real, written = shard_writer.save_file, []

    def full_disk(*arguments, **options):
        written.append(1)
        if len(written) == 2:
            raise OSError("No space left on device")
        real(*arguments, **options)

    def disk(save_file):
        return lambda running: setattr(shard_writer, "save_file", save_file)

    sizes = [save("size", "a", max_shard_size="5 parrots"), save("no size", "a", max_shard_size=0)]
    in_the_way = [on_engine(put_in_the_way), save("a file is in the way", "file")]
    full = [disk(full_disk), save("the disk is full", "a", max_shard_size="50KB"), disk(real)]
    losses = run(spec_of(fields), [*sizes, *in_the_way, *full, save("then", "a"), step, step]).losses
    run(spec_of(fields, lora=all_kinds_of_adapters("prompt")), [save("prompt", "b")])
    return messages, losses
