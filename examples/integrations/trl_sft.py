"""TRL's SFTTrainer, with --use_peft on LoRA adapters, as without the plugin; the ds_config names it.

See docs/integrations.md.
"""

from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config


def main() -> None:
    script, training, model = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset("json", data_files=script.dataset_name, split="train")
    adapters = get_peft_config(model)
    trainer = SFTTrainer(model=model.model_name_or_path, args=training, train_dataset=rows, peft_config=adapters)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
