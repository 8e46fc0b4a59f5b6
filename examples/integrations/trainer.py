"""Hugging Face Trainer on lines of text, as without the plugin; the ds_config names it. See docs/integrations.md."""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    """The model to train, and the data."""

    model_name_or_path: str
    dataset_name: str


def main() -> None:
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    rows = load_dataset("json", data_files=script.dataset_name, split="train")
    rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=256), remove_columns=["text"])
    parts = rows.train_test_split(test_size=8, seed=0)
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(script.model_name_or_path),
        args=training,
        train_dataset=parts["train"],
        eval_dataset=parts["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model()
    print(trainer.evaluate())


if __name__ == "__main__":
    main()
