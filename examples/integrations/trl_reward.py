"""TRL's RewardTrainer, as without the plugin; the ds_config names it. See docs/integrations.md."""

from datasets import load_dataset
from trl import ModelConfig, RewardConfig, RewardTrainer, ScriptArguments, TrlParser


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, RewardConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset("json", data_files=script.dataset_name, split="train")
    trainer = RewardTrainer(model=model.model_name_or_path, args=training, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
