"""Hugging Face Trainer on ranks, with nothing of the plugin in the script but the ds_config."""

from __future__ import annotations

import torch
from models import batches, ds_config, full_weights, llama, section
from recipes import section_of

import zeropp_fp8


class _Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [row for tokens in batches(16, rank=0, batch=4) for row in tokens]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def _arguments(the_section, folder, steps) -> dict:
    """What TrainingArguments and TRL's take alike; the plugin is on where there is a section."""
    from accelerate.state import DistributedType, PartialState

    # Accelerate looks for an accelerator before it allows DeepSpeed; on a CPU it has to be told.
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
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


def train_compiled(recipe, folder):
    """Losses of the Trainer without and with `torch_compile`, and how many graphs there are then."""
    from torch._dynamo.utils import counters

    eager, _ = _with_trainer(recipe, folder)
    torch._dynamo.reset()
    counters.clear()
    compiled, _ = _with_trainer(recipe, folder, torch_compile=True, torch_compile_backend="aot_eager")
    return eager, compiled, counters["stats"]["unique_graphs"]


def _with_trainer(recipe, folder, steps=4, **more):
    from transformers import Trainer, TrainingArguments

    arguments = _arguments(section(recipe) if recipe else None, folder, steps)
    arguments = TrainingArguments(learning_rate=1e-3, **arguments, **more)
    trainer = Trainer(model=llama(), args=arguments, train_dataset=_Tokens())
    return _losses(trainer), zeropp_fp8.wire_report(trainer.model_wrapped) if recipe else None


def _characters():
    """A tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<unk>", *(chr(i) for i in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def train_with_dpo(ways, folder):
    """TRL's DPOTrainer whose reference follows the policy.

    {way: (losses, largest relative difference of their weights)}
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
    return losses, max(((reference[n] - w).norm() / w.norm()).item() for n, w in policy.items())
