"""A training loop with Accelerate, as without the plugin; the ds_config names it. See docs/integrations.md."""

import argparse

import torch
from accelerate import Accelerator, PartialState
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--dataset_name", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--cpu", action="store_true", help="train on CPU ranks")
    arguments = parser.parse_args()

    if arguments.cpu:  # else Accelerate takes each CPU rank for the only one
        PartialState(cpu=True)
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def collate(rows: list[dict]) -> dict:
        texts = [row["text"] for row in rows]
        return dict(tokenizer(texts, truncation=True, max_length=256, padding=True, return_tensors="pt"))

    rows = load_dataset("json", data_files=arguments.dataset_name, split="train")
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            loss = model(**batch, labels=labels).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item():.4f}")
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(arguments.output_dir, state_dict=weights)
        tokenizer.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()
