"""A student learns from a teacher, with Accelerate and a ds_config each. See docs/integrations.md."""

import argparse

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True, help="where the student starts")
    parser.add_argument("--teacher_name_or_path", required=True)
    parser.add_argument("--dataset_name", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--ds_config", required=True, help="of the student")
    parser.add_argument("--teacher_ds_config", required=True)
    arguments = parser.parse_args()

    plugins = {
        "student": DeepSpeedPlugin(hf_ds_config=arguments.ds_config),  # the first one is selected
        "teacher": DeepSpeedPlugin(hf_ds_config=arguments.teacher_ds_config),
    }
    accelerator = Accelerator(deepspeed_plugins=plugins)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model_name_or_path)

    def collate(rows: list[dict]) -> dict:
        texts = [row["text"] for row in rows]
        return dict(tokenizer(texts, truncation=True, max_length=256, padding=True, return_tensors="pt"))

    rows = load_dataset("json", data_files=arguments.dataset_name, split="train")
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, collate_fn=collate)
    student = AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)

    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(AutoModelForCausalLM.from_pretrained(arguments.teacher_name_or_path))
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")

    for step, batch in enumerate(loader):
        with torch.no_grad():
            wanted = teacher(**batch).logits.softmax(-1)
        with accelerator.accumulate(student):
            said = student(**batch).logits.log_softmax(-1)
            read = batch["attention_mask"].bool()
            loss = torch.nn.functional.kl_div(said[read], wanted[read], reduction="batchmean")
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss.item():.4f}")
    weights = accelerator.get_state_dict(student)
    if accelerator.is_main_process:
        accelerator.unwrap_model(student).save_pretrained(arguments.output_dir, state_dict=weights)
        tokenizer.save_pretrained(arguments.output_dir)


if __name__ == "__main__":
    main()
