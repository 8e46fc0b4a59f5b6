"""Starting points of the RLHF examples in tests: models, adapters, rows."""

import json

import torch
from common.tokenizer import make_byte_tokenizer
from models import llama
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

TOKENIZER = make_byte_tokenizer()


def make_starts(root):
    """In a folder: a language model, an adapter of it, a scoring model, a scoring adapter of the former, and rows."""
    model = llama(vocab=264, intermediate=128)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5 if param.ndim > 1 else 1)  # answers that are not all alike
    model.generation_config.eos_token_id = [TOKENIZER.eos_token_id, ord("A"), ord("z")]  # some answers end
    model.save_pretrained(root / "base")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    torch.manual_seed(1)
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(root / "base"), LoraConfig(task_type="CAUSAL_LM", **lora)
    ).save_pretrained(root / "adapter")
    torch.manual_seed(2)
    scorer = LlamaForSequenceClassification.from_pretrained(root / "base", num_labels=1)
    scorer.score.weight.data.mul_(20)
    scorer.save_pretrained(root / "scorer")
    torch.manual_seed(3)
    get_peft_model(scorer, LoraConfig(task_type="SEQ_CLS", **lora)).save_pretrained(root / "scorer_adapter")
    for folder in ("base", "adapter", "scorer", "scorer_adapter"):
        TOKENIZER.save_pretrained(root / folder)
    sums = [(a, b) for a in range(8) for b in range(4)]
    write(root / "prompts.jsonl", [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums])
    write(root / "sft.jsonl", [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in sums])
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "no"} for a, b in sums]
    write(root / "pairs.jsonl", pairs)
    write(root / "text.jsonl", [{"text": f"def f{a}(x):\n    return x * {b}\n"} for a, b in sums])


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder_of(path, *names):
    folder = path.joinpath(*names)
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
