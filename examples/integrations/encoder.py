"""A small BERT classifies rows of tokens, with Trainer, as without the plugin; the ds_config names it.

It learns whether the first token, a number below 64, is less than 32. See docs/integrations.md.
"""

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, HfArgumentParser, Trainer, TrainingArguments


def make_rows(count: int, seed: int) -> list[dict]:
    """Random rows of 16 tokens, and the class of each."""
    tokens = torch.randint(64, (count, 16), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] < 32)} for row in tokens]


def share_right(predicted) -> dict[str, float]:
    """Of Trainer's EvalPrediction."""
    return {"right": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def main() -> None:
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    # A trained one: AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
    model = AutoModelForSequenceClassification.from_config(BertConfig(vocab_size=64, num_labels=2, **sizes))
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=make_rows(512, seed=0),
        eval_dataset=make_rows(64, seed=1),
        compute_metrics=share_right,
    )
    trainer.train()
    trainer.save_model()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
