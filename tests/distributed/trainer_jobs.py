"""Hugging Face Trainer on ranks, with nothing of the plugin in the script but the ds_config."""

from __future__ import annotations

import torch
from models import batches, ds_config, llama, section

import zeropp_fp8


class _Tokens(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [row for tokens in batches(16, rank=0, batch=4) for row in tokens]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def train_with_trainer(recipe, folder, steps=4):
    """Losses of a short Trainer run, and the wire report of its engine."""
    from accelerate.state import DistributedType, PartialState
    from transformers import Trainer, TrainingArguments

    # Accelerate looks for an accelerator before it allows DeepSpeed; on a CPU it has to be told.
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    zeropp_fp8.enable() if recipe else zeropp_fp8.disable()
    config = ds_config(section(recipe) if recipe else None)
    config["train_micro_batch_size_per_gpu"] = config["gradient_clipping"] = "auto"
    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        seed=0,
        disable_tqdm=True,
        optim="adamw_torch",
    )
    trainer = Trainer(model=llama(), args=arguments, train_dataset=_Tokens())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, zeropp_fp8.wire_report(trainer.model_wrapped) if recipe else None
