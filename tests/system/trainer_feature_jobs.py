"""Features of the Hugging Face Trainer, and models of several kinds, with the plugin and with stock."""

from __future__ import annotations

from pathlib import Path

import torch
from models import batches, full_fp32_weights, llama, section
from running import loss_of
from trainer_jobs import _arguments, _losses

AUTO = {
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": 0,
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}
BUCKETS = dict.fromkeys(
    ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
)


class Rows(torch.utils.data.Dataset):
    """`rows` random inputs of a model; `made` makes one of a generator."""

    def __init__(self, rows, made):
        generator = torch.Generator().manual_seed(3)
        self.rows = [made(generator) for _ in range(rows)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def _text(rows=64):
    tokens = iter([row for batch in batches(rows // 4, rank=0, batch=4) for row in batch])
    return Rows(rows, lambda _: {"input_ids": (row := next(tokens)), "labels": row})


def _section(way):
    """`way`: a recipe, None for stock. `lossless` has stock's units, and so its bits."""
    if way is None:
        return None
    return section(way, gather_granularity="module") if way == "lossless" else section(way)


def _trainer(way, folder, steps, model, rows, trainer=None, arguments=None, config=None, **more):
    import transformers

    given = _arguments(_section(way), str(folder), steps)
    given["deepspeed"] = {**given["deepspeed"], **(config or {})}
    given["deepspeed"]["zero_optimization"] |= {"stage3_gather_16bit_weights_on_model_save": True}
    kind = trainer or transformers.Trainer
    arguments = arguments or transformers.TrainingArguments
    return kind(
        model=model,
        args=arguments(**{**given, "learning_rate": 1e-2, **more}),
        train_dataset=rows,
        eval_dataset=_text(8),
    )


# -- a run with all that a script may ask


def run_with_features(ways, folder):
    return {way: _with_features(way, Path(folder) / str(way)) for way in ways}


def _with_features(way, folder):
    """A run of 6 steps that evaluates and saves, the last 4 of it again, and what became of its model and files."""
    asked = {
        "gradient_accumulation_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "warmup_steps": 2,
        "weight_decay": 0.01,
    }
    # The best is the one with the largest loss: not the last.
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}

    def made(**more):
        return _trainer(way, folder, 6, llama(tie=True), _text(), config=_automatic(way), **asked, **more)

    whole = made(**best)
    found = {"losses": _losses(whole), "evaluated": _evaluated(whole)}
    found["best"] = Path(whole.state.best_model_checkpoint).name, whole.state.best_metric
    found["of the best"] = whole.evaluate()["eval_loss"]
    found["predicted"] = float(torch.tensor(whole.predict(_text(8)).predictions).double().sum())
    found["filled in"] = _filled_in(whole.model_wrapped)
    found["weights of the best"] = full_fp32_weights(whole.model_wrapped.module)
    whole.save_model(str(folder / "saved"))
    resumed = made()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["resumed"] = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    found["resumed, evaluated"] = _evaluated(resumed)
    found["weights"] = full_fp32_weights(resumed.model_wrapped.module)
    if torch.distributed.get_rank() == 0:
        found["saved"] = _loss_of_saved(folder / "saved")
    return found


def _automatic(way):
    config = dict(AUTO)
    given = _arguments(_section(way), "", 1)["deepspeed"]["zero_optimization"]
    return {**config, "zero_optimization": {**given, **BUCKETS}}


def _evaluated(trainer):
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def _filled_in(engine):
    """Return what "auto" became."""
    group = engine.optimizer.param_groups[0]
    return {
        "accumulation": engine.gradient_accumulation_steps(),
        "micro": engine.train_micro_batch_size_per_gpu(),
        "clipping": engine.gradient_clipping(),
        "weight_decay": group["weight_decay"],
        "scheduler": type(engine.lr_scheduler).__name__,
        "prefetch": engine.config["zero_optimization"]["stage3_prefetch_bucket_size"],
    }


def _loss_of_saved(folder):
    """By transformers alone, in one process, as `Trainer.evaluate` does."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.stack([row["input_ids"] for row in _text(8).rows])
    with torch.no_grad():
        return float(loss_of(model, tokens))


def train_adapters(ways, folder):
    """{way: losses, evaluations, the best one's, and the same of a run that resumes} of LoRA in bf16 that accumulates.

    transformers saves adapters alone then, and has DeepSpeed leave out what is frozen.
    """
    return {way: _with_adapters(way, Path(folder) / str(way)) for way in ways}


def _with_adapters(way, folder):
    asked = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "bf16": True}
    config = {"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}

    def made(**more):
        more |= {"gradient_accumulation_steps": 2, **asked}
        return _trainer(way, folder, 4, _lora(llama()), _text(), config=config, **more)

    whole = made(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    found = {"losses": _losses(whole), "evaluated": _evaluated(whole)}
    found["best"] = Path(whole.state.best_model_checkpoint).name, whole.evaluate()["eval_loss"]
    found["dtype"] = {param.dtype for param in whole.model.parameters()}
    resumed = made()
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    found["resumed"] = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry], _evaluated(resumed)
    found["files"] = {path.name for path in (folder / "checkpoint-2").iterdir()}
    return found


def evaluate_alone(ways, folder):
    """{way: loss of a Trainer that does not train}. (It cannot train after that: Accelerate loses its engine.)"""
    return {way: _trainer(way, folder, 2, llama(), _text()).evaluate()["eval_loss"] for way in ways}


# -- activation checkpointing


def checkpoint_activations(ways, folder):
    """{(way, whether with LoRA): losses by kind of checkpointing}; of stock with none alone."""
    return {
        (way, lora): {kind: _checkpointed(way, lora, kind, folder) for kind in (KINDS if way else KINDS[:1])}
        for way in ways
        for lora in (False, True)
    }


KINDS = (None, "reentrant", "non-reentrant")


def _lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def _checkpointed(way, lora, kind, folder):
    more = {"gradient_checkpointing": kind is not None}
    if kind is not None:
        more["gradient_checkpointing_kwargs"] = {"use_reentrant": kind == "reentrant"}
    model = _lora(llama()) if lora else llama()
    return _losses(_trainer(way, folder, 3, model, _text(), **more))


# -- models of several kinds


def _bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    config = BertConfig(num_hidden_layers=2, num_attention_heads=2, num_labels=3, **sizes)
    return BertForSequenceClassification(config)


def _vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48}
    return ViTForImageClassification(ViTConfig(num_hidden_layers=2, num_attention_heads=2, num_labels=3, **sizes))


def _t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, tie_word_embeddings=True, **sizes))


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


def _llava():
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    parts = {
        "vision_config": CLIPVisionConfig(image_size=16, patch_size=8, **sizes),
        "text_config": LlamaConfig(vocab_size=64, **sizes),
    }
    return LlavaForConditionalGeneration(LlavaConfig(image_token_id=63, **parts))


def _classified(generator):
    tokens = torch.randint(0, 64, (12,), generator=generator)
    return {"input_ids": tokens, "labels": tokens[0] % 3}


def _image(generator):
    pixels = torch.randn(3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": (pixels.mean() > 0).long()}


def _sequence(generator):
    tokens = torch.randint(1, 64, (12,), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _seen(generator):
    """An image, four patches, and what is said of it."""
    tokens = torch.cat([torch.full((4,), 63), torch.randint(1, 62, (8,), generator=generator)])
    return {**_image(generator), "input_ids": tokens, "labels": tokens.clone()}


KINDS_OF_MODELS = {
    "encoder": (_bert, _classified),
    "vision": (_vit, _image),
    "vision and language": (_llava, _seen),
    "tied, dropout": (_gpt2, _sequence),
    "experts": (_mixtral, _sequence),
    "encoder and decoder": (_t5, _sequence),
}


def train_kinds(ways, folder):
    """{kind of model: {way: (losses, evaluation, generated tokens of an encoder and decoder)}}."""
    return {kind: {way: _of_kind(way, kind, folder) for way in ways} for kind in KINDS_OF_MODELS}


def _of_kind(way, kind, folder):
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
    from transformers.integrations import unset_hf_deepspeed_config

    make, made = KINDS_OF_MODELS[kind]
    unset_hf_deepspeed_config()  # the run before this one would have parts of Llava made under its zero.Init
    torch.manual_seed(0)
    generates = kind == "encoder and decoder"
    classes = (Seq2SeqTrainer, Seq2SeqTrainingArguments) if generates else (Trainer, TrainingArguments)
    more = {"predict_with_generate": True} if generates else {}
    trainer = _trainer(way, folder, 4, make(), Rows(32, made), *classes, **more)
    losses = _losses(trainer)
    predicted = trainer.predict(Rows(16, made))  # 8 a rank: a batch of evaluation
    tokens = predicted.predictions.tolist() if generates else None
    return losses, predicted.metrics["test_loss"], tokens
