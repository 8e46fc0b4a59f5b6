"""A small T5 with tied embeddings and Seq2SeqTrainer, as without the plugin; the ds_config names it.

It learns to repeat a row of one token, and generates where it evaluates. See docs/integrations.md.
"""

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
)

START, END, LENGTH = 0, 1, 6


def make_rows(count: int, seed: int) -> list[dict]:
    """Rows of one token, below 16, to be repeated and then to be ended."""
    tokens = torch.randint(2, 16, (count, 1), generator=torch.Generator().manual_seed(seed)).expand(-1, LENGTH)
    return [{"input_ids": row, "labels": torch.cat([row, torch.tensor([END])])} for row in tokens]


def share_right(predicted) -> dict[str, float]:
    """The share of the row's tokens that are generated; of Trainer's EvalPrediction, padded to the longest answer."""
    said, wanted = predicted.predictions[:, 1 : 1 + LENGTH], predicted.label_ids[:, :LENGTH]
    return {"right": float((said == wanted).mean())}


def main() -> None:
    (training,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    sizes = {"vocab_size": 16, "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    # A trained one: AutoModelForSeq2SeqLM.from_pretrained("google-t5/t5-small")
    config = T5Config(decoder_start_token_id=START, pad_token_id=START, tie_word_embeddings=True, **sizes)
    trainer = Seq2SeqTrainer(
        model=AutoModelForSeq2SeqLM.from_config(config),
        args=training,
        train_dataset=make_rows(512, seed=0),
        eval_dataset=make_rows(16, seed=1),
        compute_metrics=share_right,
    )
    trainer.train()
    trainer.save_model()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
