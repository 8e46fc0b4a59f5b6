"""Tokens a second of examples/rlhf/sft.py: bf16 and recipes, nothing but the ds_config differs.

    python -m benchmarks.rlhf_sft --out runs/rlhf_sft.json

A random Llama (on a GPU 8 layers of a 7 B model, 1.6 billion parameters; on a CPU a tiny one) and rows made of the
source of Python's standard library, cut to --tokens bytes, which are the byte-level tokenizer's tokens. Each run is the
script under the `deepspeed` launcher; its own log says how long steps took. The median of the steps after --warmup
counts. What bf16 reaches is the better of DeepSpeed's ZeRO-3 (stock) and of this package sending 16 bits (lossless),
which gathers a block at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from benchmarks.harness.environment import describe
from benchmarks.harness.hf_llama import llama_config
from benchmarks.harness.results import append_to, begin_result, end_result
from benchmarks.harness.sizes import SIZES
from examples.launching import computes_in_bf16, device, launch
from examples.options import new_file, whole
from examples.pretrain.data import standard_library_files
from examples.rlhf.common.monitor import LOG, read_log
from examples.rlhf.common.tokenizer import make_byte_tokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BF16 = ("stock", "lossless")
VOCABULARY = 320  # the byte tokenizer's 261, rounded up to a multiple of 64
PROMPT = 64  # characters of a row that are not learned


def write_rows(path: Path, tokens: int, rows: int) -> None:
    """Rows of `tokens` tokens each, the end token included."""
    text = "".join(file.read_text(encoding="ascii", errors="ignore") for file in standard_library_files())
    length = tokens - 1
    starts = [number * length % (len(text) - length) for number in range(rows)]
    lines = [{"prompt": text[i : i + PROMPT], "completion": text[i + PROMPT : i + length]} for i in starts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(folder: Path, name: str, bf16: bool) -> int:
    """The model and its tokenizer; returns the number of parameters."""
    tokenizer = make_byte_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(replace(SIZES[name], vocabulary=VOCABULARY)))
    model.config.pad_token_id, model.config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    (model.bfloat16() if bf16 else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def run(recipe: str, args, folder: Path) -> dict:
    """The row of a recipe."""
    config = json.loads((EXAMPLES.parent / "ds_configs" / f"{recipe}.json").read_text())
    config["train_micro_batch_size_per_gpu"] = args.batch
    if not args.bf16:
        config["bf16"] = {"enabled": False}
    path, out = folder / f"{recipe}.json", folder / recipe
    path.write_text(json.dumps(config))
    steps = args.warmup + args.steps
    words = ["--deepspeed_config", path, "--model", folder / "model", "--data", folder / "rows.jsonl", "--out", out]
    words += ["--max_tokens", args.tokens, "--steps", steps, "--lr", 1e-5]
    words += ["--gradient_checkpointing"] if args.gradient_checkpointing else []
    launch(recipe, EXAMPLES / "rlhf" / "sft.py", words, args.accelerator, args.ranks)
    log = [line for line in read_log(out / LOG) if "tokens_s" in line]
    measured = log[args.warmup :]
    return {
        "recipe": recipe,
        "tokens_s": args.ranks * statistics.median(line["tokens_s"] for line in measured),
        "losses": [log[0]["sft_loss"], log[-1]["sft_loss"]],
        "memory_gb": log[-1]["memory_gb"],
    }


def show(rows: list[dict]) -> None:
    """Print the table."""
    best = max((row["tokens_s"] for row in rows if row["recipe"] in BF16), default=None)
    print(f"\n{'':<12}{'tokens/s':>10}{'x bf16':>8}{'peak GB':>9}{'loss, first and last step':>28}")
    for row in rows:
        ratio = "-" if best is None else f"{row['tokens_s'] / best:.2f}"
        losses = " ".join(f"{loss:.3f}" for loss in row["losses"])
        print(f"{row['recipe']:<12}{row['tokens_s']:>10.0f}{ratio:>8}{row['memory_gb']:>9.1f}{losses:>28}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="stock,lossless,fp8-lm", help="files of ds_configs/ (%(default)s)")
    parser.add_argument("--model", choices=SIZES, default="7b-stack" if on_gpu else "tiny", help="default %(default)s")
    parser.add_argument(
        "--batch", type=whole(1), default=8 if on_gpu else 2, help="rows of a rank in a step (%(default)s)"
    )
    parser.add_argument("--tokens", type=whole(1), default=1024 if on_gpu else 128, help="of a row (%(default)s)")
    parser.add_argument("--warmup", type=whole(0), default=20 if on_gpu else 1, help="steps not counted (%(default)s)")
    parser.add_argument("--steps", type=whole(1), default=10 if on_gpu else 2, help="steps that count (%(default)s)")
    parser.add_argument("--ranks", type=whole(1), default=1, help="default %(default)s")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--out", type=new_file, default="runs/rlhf_sft.json", help="JSON file (default %(default)s)")
    args = parser.parse_args(argv)
    args.accelerator, args.ranks = device(ranks=args.ranks)
    args.bf16 = computes_in_bf16(args.accelerator)
    args.recipes = args.recipes.split(",")
    unknown = [name for name in args.recipes if not (EXAMPLES.parent / "ds_configs" / f"{name}.json").exists()]
    if unknown:
        parser.error(f"there is no ds_configs/{unknown[0]}.json")
    return args


def main() -> None:
    args = parse()
    begin_result(args.out, describe("rlhf_sft") | {"settings": vars(args)})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl", args.tokens, args.batch * args.ranks * (args.warmup + args.steps))
        parameters = write_model(folder / "model", args.model, args.bf16)
        for recipe in args.recipes:
            append_to(args.out, "rows", run(recipe, args, folder) | {"parameters": parameters})
    show(end_result(args.out)["rows"])


if __name__ == "__main__":
    main()
