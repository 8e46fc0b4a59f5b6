"""TRL's GRPOTrainer, as without the plugin; the ds_config names it. See docs/integrations.md."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser


def right(completions: list[str], answer: list[str], **columns) -> list[float]:
    """1 for the answer; of others, those of a length like the answer's are better."""
    pairs = [(said.strip(), wanted) for said, wanted in zip(completions, answer)]
    return [1.0 if said == wanted else -abs(len(said) - len(wanted)) / 10 for said, wanted in pairs]


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset("json", data_files=script.dataset_name, split="train")
    trainer = GRPOTrainer(model=model.model_name_or_path, reward_funcs=right, args=training, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
