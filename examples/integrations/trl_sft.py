"""TRL's SFTTrainer, as without the plugin; the ds_config names it. See docs/integrations.md."""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset("json", data_files=script.dataset_name, split="train")
    trainer = SFTTrainer(model=model.model_name_or_path, args=training, train_dataset=rows)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
