"""Hugging Face Trainer on ranks, with nothing of the plugin in the script but the ds_config."""

from __future__ import annotations

from functools import partial

import torch
from models import batches, ds_config, full_weights, llama, make_engine, section
from ranks import attempt, printed
from recipes import section_of

import zeropp_fp8


class _Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [row for tokens in batches(16, rank=0, batch=4) for row in tokens]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def tell_accelerate() -> None:
    """Accelerate looks for an accelerator before it allows DeepSpeed; on a CPU it has to be told."""
    from accelerate.state import DistributedType, PartialState

    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)


def _arguments(the_section, folder, steps) -> dict:
    """Return what TrainingArguments and TRL's take alike; the plugin is on where there is a section."""
    tell_accelerate()
    zeropp_fp8.enable() if the_section else zeropp_fp8.disable()
    config = ds_config(the_section)
    config["train_micro_batch_size_per_gpu"] = config["gradient_clipping"] = "auto"
    return {
        "output_dir": folder,
        "deepspeed": config,
        "use_cpu": True,
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "seed": 0,
        "disable_tqdm": True,
        "optim": "adamw_torch",
    }


def _losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_with_trainer(recipes, folder):
    """{recipe: losses of a short Trainer run, and the wire report of its engine}."""
    return {recipe: _with_trainer(recipe, folder) for recipe in recipes}


def train_compiled(recipe, folder, backend):
    """Losses of the Trainer without and with `torch_compile`, and how many graphs there are then after each step.

    There are more layers than dynamo compiles one function anew for. Where it would leave the rest eager, it raises.
    """
    from torch._dynamo import config
    from torch._dynamo.utils import counters
    from transformers import TrainerCallback

    class Graphs(TrainerCallback):
        after_steps = []

        def on_step_end(self, args, state, control, **kwargs):
            self.after_steps.append(counters["stats"]["unique_graphs"])

    config.fail_on_recompile_limit_hit = True
    sizes = {"layers": config.recompile_limit + 2, "hidden": 16}
    eager, _ = _with_trainer(recipe, folder, sizes)
    torch._dynamo.reset()
    counters.clear()
    arguments = {"callbacks": [Graphs], "torch_compile": True, "torch_compile_backend": backend}
    compiled, _ = _with_trainer(recipe, folder, sizes, **arguments)
    return eager, compiled, Graphs.after_steps


def _with_trainer(recipe, folder, sizes=None, steps=4, callbacks=None, **more):
    from transformers import Trainer, TrainingArguments

    arguments = _arguments(section(recipe) if recipe else None, folder, steps)
    arguments = TrainingArguments(learning_rate=1e-3, **arguments, **more)
    trainer = Trainer(model=llama(**(sizes or {})), args=arguments, train_dataset=_Tokens(), callbacks=callbacks)
    return _losses(trainer), zeropp_fp8.wire_report(trainer.model_wrapped) if recipe else None


def report_on_trainer(folder):
    """Return what a callback, the reporters and DeepSpeed's monitor see of a run in steps logged two by two."""
    from pathlib import Path

    from transformers import Trainer, TrainerCallback, TrainingArguments

    from zeropp_fp8.integrations import log_metrics

    class Watching(TrainerCallback):
        reported, same, tokens = [], [], []

        def on_step_end(self, args, state, control, model, **kwargs):
            reports = [zeropp_fp8.wire_report(held) for held in (model, trainer, trainer.model_wrapped, model.model)]
            self.reported.append(reports[0])
            self.same.append(all(report == reports[0] for report in reports))
            if state.global_step == 2:
                with zeropp_fp8.generation(model, weights="values") as generating:
                    prompt = torch.arange(5).view(1, 5)
                    self.tokens += generating.generate(prompt, max_new_tokens=3, do_sample=False).shape

    class Reporter(TrainerCallback):
        logs = []

        def on_log(self, args, state, control, logs, **kwargs):
            self.logs.append(dict(logs))

    arguments = _arguments(section("fp8-lm"), folder, steps=4)
    arguments["deepspeed"]["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "job"}
    arguments = TrainingArguments(learning_rate=1e-3, **(arguments | {"logging_steps": 2}))
    trainer = Trainer(model=llama(), args=arguments, train_dataset=_Tokens(), callbacks=[Watching, Reporter])
    log_metrics(trainer)
    early = attempt(lambda: zeropp_fp8.wire_report(trainer))
    trainer.train()
    files = Path(folder, "job").glob("Train_Samples_zeropp_fp8_*.csv")
    events = {path.stem.partition("zeropp_fp8_")[2]: path.read_text().splitlines() for path in files}
    other = make_engine(llama(), ds_config(section("lossless")), optimizer=None)
    both = torch.nn.ModuleList([trainer.model, other.module])
    said = {
        "early": early,
        "number": attempt(lambda: zeropp_fp8.wire_report(3)),
        "saved": attempt(lambda: zeropp_fp8.save_merged_16bit(3, folder)),
        "two": attempt(lambda: zeropp_fp8.generation(both).__enter__()),
    }
    report = zeropp_fp8.wire_report(trainer)
    trainer.model_wrapped.destroy()
    said["ended"] = attempt(lambda: zeropp_fp8.wire_report(trainer.model))
    return {
        "reported": Watching.reported,
        "same": Watching.same,
        "tokens": Watching.tokens,
        "logs": Reporter.logs,
        "history": trainer.state.log_history,
        "events": events,
        "said": said,
        "report": report,
        "after": zeropp_fp8.wire_report(trainer),
    }


def _characters():
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(chr(i) for i in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def train_with_grpo(ways, folder):
    """TRL's GRPOTrainer in ways of generating: {way: (losses and rewards, where weights stayed, ...)}."""
    return {name: _with_grpo(folder, **way) for name, way in ways.items()}


# What a rank takes for its cache is half of the machine's memory else, whatever other ranks take of it.
BATCHES = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 16, "max_batch_tokens": 64},
}


def batches_of_gathered_weights(folder):
    """Return the words about continuous batching where each token gathers weights: by the field, and TRL's option."""
    ways = ({"trl_generation": "sharded"}, {}), ({}, {"ds3_gather_for_generation": False})
    return [attempt(partial(_with_grpo, folder, fields, **BATCHES, **more)) for fields, more in ways]


def generate_with_another_trl(folder):
    """The same where TRL's function does not take what it takes in the version that is known; and what is printed."""
    from trl.models import utils

    def another(model, accelerator, by_layer=None, **others):
        return known(model, accelerator, **others)

    known, utils._unwrap_model_for_generation = utils._unwrap_model_for_generation, another
    return _with_grpo(folder), utils._unwrap_model_for_generation is another, printed()


def _with_grpo(folder, fields=None, inside=False, **more):
    from contextlib import nullcontext

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.models import utils

    chosen = []

    def reward(completions, **columns):
        chosen.append(trainer.model_wrapped.optimizer.parameter_offload.announced)
        return [float(completion.count("7")) + len(completion) / 10 for completion in completions]

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            with zeropp_fp8.generation(self.model_wrapped, weights="codes") if inside else nullcontext():
                return super()._generate_single_turn(*args, **kwargs)

    arguments = _arguments(section("lossless", **(fields or {})), folder, steps=2)
    sizes = {"num_generations": 2, "max_completion_length": 8, "gradient_accumulation_steps": 2}
    arguments["deepspeed"]["gradient_accumulation_steps"] = "auto"
    trainer = Trainer(
        model=llama(vocab=128),
        reward_funcs=reward,
        args=GRPOConfig(bf16=False, learning_rate=1e-2, beta=0.0, **sizes, **arguments, **more),
        train_dataset=Dataset.from_list([{"prompt": f"{n} is "} for n in range(1, 33)]),
        processing_class=_characters(),
    )
    losses = _losses(trainer)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    zeropp_fp8.disable()
    return [losses, rewards], chosen, utils._unwrap_model_for_generation.__module__


def train_with_dpo(ways, folder):
    """TRL's DPOTrainer whose reference follows the policy.

    {way: (losses, largest relative difference of their weights, margin of rewards in the first step)}
    """
    return {way: _with_dpo(way, folder) for way in ways}


def _with_dpo(way, folder, steps=4):
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        bf16=False,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0,
        **_arguments(section_of(way) if way else None, folder, steps),
    )
    rows = [{"prompt": f"{n} is ", "chosen": f"{n * 3}", "rejected": f"{n * 7}"} for n in range(1, 33)]
    trainer = DPOTrainer(
        model=llama(vocab=128),
        ref_model=llama(vocab=128),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=_characters(),
    )
    losses = _losses(trainer)
    policy, reference = (full_weights(trainer.accelerator.unwrap_model(m)) for m in (trainer.model, trainer.ref_model))
    margin = trainer.state.log_history[0]["rewards/margins"]
    return losses, max(((reference[n] - w).norm() / w.norm()).item() for n, w in policy.items()), margin


def report_to_libraries(folder, libraries):
    """Of a run of 8 steps, logged by four: the Trainer's log, and what TensorBoard and W&B have of it by their readers.

    {"logs": entries, "tensorboard", "monitor": {name: {step or sample: value}}, "wandb": {name: its last value},
    "formats": {"logs", "wandb": {name: format}, "tensorboard": a text}}
    """
    import os

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import Trainer, TrainingArguments

    from zeropp_fp8.integrations import log_metrics

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_ERROR_REPORTING="false")
    os.environ.update({f"WANDB_{kind}DIR": folder for kind in ("", "CACHE_", "CONFIG_", "DATA_")})
    os.environ.update(TENSORBOARD_LOGGING_DIR=f"{folder}/tensorboard")
    the_section = section("zeropp", numerics={"every": 4, "parts": 1, "file": f"{folder}/numerics.jsonl"})
    arguments = _arguments(the_section, folder, steps=8) | {"logging_steps": 4, "report_to": libraries}
    arguments["deepspeed"]["tensorboard"] = {"enabled": True, "output_path": folder, "job_name": "monitor"}
    arguments = TrainingArguments(learning_rate=1e-3, **arguments)
    trainer = Trainer(model=llama(), args=arguments, train_dataset=_Tokens())
    log_metrics(trainer)
    trainer.train()
    found = {"logs": [entry for entry in trainer.state.log_history if "loss" in entry]}
    found["formats"] = {"logs": next(e for e in trainer.state.log_history if "zeropp_fp8/recipe" in e)}
    if trainer.is_world_process_zero():
        trainer.model_wrapped.monitor.tb_monitor.summary_writer.flush()
        for name in ("tensorboard", "monitor"):
            events = EventAccumulator(f"{folder}/{name}").Reload()
            found[name] = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
            for event in events.Tensors("zeropp_fp8/formats/text_summary") if name == "tensorboard" else ():
                found["formats"][name] = event.tensor_proto.string_val[0].decode()
        if "wandb" in libraries:
            import wandb

            found["wandb"] = dict(wandb.run.summary)
            found["formats"]["wandb"] = dict(wandb.run.config)
            wandb.finish()
    return found
