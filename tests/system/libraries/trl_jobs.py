"""TRL's trainers on ranks, with nothing of the plugin in the script but the ds_config."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from models import full_weights, llama
from trainer_feature_jobs import _section
from trainer_jobs import _arguments, _characters, _losses

TEXTS = [{"text": f"{n} is {n * 3}"} for n in range(1, 33)]
PAIRS = [{"prompt": f"{n} is ", "chosen": f"{n * 3}", "rejected": f"{n * 7}"} for n in range(1, 33)]


def train(ways, folder):
    """{kind of training: {way: numbers}}, `way` a recipe or None for stock DeepSpeed."""
    return {kind.__name__: {way: kind(way, folder) for way in ways} for kind in KINDS}


def _configured(kind, way, folder, **more):
    return kind(bf16=False, learning_rate=1e-3, **_arguments(_section(way), folder, steps=3), **more)


def sft(way, folder, streamed=False, **more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    asked = {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2}
    rows = Dataset.from_list(TEXTS)
    trainer = SFTTrainer(
        model=llama(vocab=128, tie=True),
        args=_configured(SFTConfig, way, folder, **asked),
        train_dataset=rows.to_iterable_dataset() if streamed else rows,
        eval_dataset=Dataset.from_list(TEXTS[:6]),
        processing_class=_characters(),
        **more,
    )
    losses = _losses(trainer)
    return losses, [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def sft_lora(way, folder):
    from peft import LoraConfig

    torch.manual_seed(1)
    return sft(way, folder, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def sft_streamed(way, folder):
    """Rank 0 reads the rows, and Accelerate hands each rank its own."""
    return sft(way, folder, streamed=True)


def reward(way, folder):
    from datasets import Dataset
    from transformers import LlamaForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    config = llama(vocab=128).config
    config.num_labels = 1
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    model.config.pad_token_id = 0  # not before: transformers fills the row of an embedding that may be partitioned
    trainer = RewardTrainer(
        model=model,
        args=_configured(RewardConfig, way, folder),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=_characters(),
    )
    return _losses(trainer), [entry["margin"] for entry in trainer.state.log_history if "margin" in entry]


def dpo_precomputed(way, folder):
    """The reference's numbers come from the policy's own model, by an engine that does not train, before it does."""
    from datasets import load_dataset
    from trl import DPOConfig, DPOTrainer

    # Rank 0 writes them beside the data set's own file, where the others read: of one in memory each has another place.
    path = f"{folder}/pairs.jsonl"
    if torch.distributed.get_rank() == 0:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    torch.distributed.barrier()
    rows = load_dataset("json", data_files=path, split="train", cache_dir=f"{folder}/of {way}")
    asked = {"precompute_ref_log_probs": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer = DPOTrainer(
        model=llama(vocab=128),
        args=_configured(DPOConfig, way, folder, **asked),
        train_dataset=rows,
        eval_dataset=rows.select(range(6)),
        processing_class=_characters(),
    )
    losses = _losses(trainer)
    return losses, [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def _score(completions, **columns):
    return [float(completion.count("7")) + len(completion) / 10 for completion in completions]


def rloo(way, folder):
    """Norms of gradients, for losses are 0 before clipping; rewards; where weights stayed while tokens were made."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    stayed = []

    def score(completions, **columns):
        stayed.append(way and trainer.model_wrapped.optimizer.parameter_offload.announced)
        return _score(completions)

    trainer = RLOOTrainer(
        model=llama(vocab=128),
        reward_funcs=score,
        args=_configured(RLOOConfig, way, folder, num_generations=2, max_completion_length=6, beta=0.0),
        train_dataset=Dataset.from_list([{"prompt": f"{n} is "} for n in range(1, 33)]),
        processing_class=_characters(),
    )
    _losses(trainer)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [entry["grad_norm"] for entry in logged], [entry["reward"] for entry in logged], set(stayed)


def grpo(way, folder):
    """With a reference that follows the policy: losses, and the largest relative difference of their weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    follows = {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    sizes = {"num_generations": 2, "max_completion_length": 6}
    start = f"{folder}/start"  # TRL loads the reference from where the policy was
    if torch.distributed.get_rank() == 0:
        llama(vocab=128).save_pretrained(start)
    torch.distributed.barrier()
    trainer = GRPOTrainer(
        model=start,
        reward_funcs=_score,
        args=_configured(GRPOConfig, way, folder, **sizes, **follows),
        train_dataset=Dataset.from_list([{"prompt": f"{n} is "} for n in range(1, 33)]),
        processing_class=_characters(),
    )
    losses = _losses(trainer)
    unwrap = trainer.accelerator.unwrap_model
    policy, reference = (full_weights(unwrap(model)) for model in (trainer.model, trainer.ref_model))
    return losses, [((reference[n] - w).norm() / w.norm()).item() for n, w in policy.items()]


KINDS = (sft, sft_lora, sft_streamed, reward, dpo_precomputed, rloo, grpo)
