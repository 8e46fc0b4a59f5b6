"""Held-out loss of a trained model in every format: weights cast, weights and activations cast, error diffusion.

    python -m benchmarks.direct_cast --out direct_cast.json                          # CPU: a small Llama, some minutes
    python -m benchmarks.direct_cast --model llama-base --steps 2000 --batch 32 --sequence-length 512 --out ...   # GPU
    python -m benchmarks.direct_cast --checkpoint Qwen/Qwen3-0.6B --data ~/texts     # a model that is trained already

The model is one of examples/pretrain/models.py, trained here on text (the source of Python's standard library unless
--data says otherwise), with the data, the split and the order of examples/pretrain. Then every linear layer but lm_head
is cast. A cell is the loss on text that is never trained on, minus the loss of the model as it is, and the standard
error of that difference over the batches. All else is computed in --dtype, so that the differences are the format's.
Error diffusion quantizes weights and activations, and calibrates on training text (later text than was trained on).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time

import torch
from torch import nn
from tqdm import tqdm

from benchmarks.harness.environment import describe
from benchmarks.harness.results import write_result
from examples.options import finite, generator_seed, new_file, new_folder, whole
from examples.pretrain.data import Sequences, byte_tokens, read_documents, split_tokens, tokenizer_tokens
from examples.pretrain.models import SMALL_LLAMAS, make_model
from zeropp_fp8.compute.direct_cast import CastReport, direct_cast, restore
from zeropp_fp8.compute.error_diffusion import error_diffusion
from zeropp_fp8.formats import MX_NAMES, make_format

# name: (format, options)
FORMATS = {
    "bf16": ("none", {}),
    "int8 block 128": ("int8", {"block_size": 128}),
    "int4 block 128": ("int4", {"block_size": 128}),
    "int4 block 32": ("int4", {"block_size": 32}),
    "fp8_e4m3 block 128": ("fp8_e4m3", {"block_size": 128}),
    "fp8_e5m2 block 128": ("fp8_e5m2", {"block_size": 128}),
    **{f"{name} {mode}": (name, {"scale_mode": mode}) for name in MX_NAMES for mode in ("rceil", "floor")},
}
COLUMNS = ("weights", "weights_activations", "error_diffusion")
HEADINGS = ("direct, weights", "direct, weights+act.", "error diffusion, w.+a.")


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-small", choices=SMALL_LLAMAS, help="which one to train")
    parser.add_argument("--checkpoint", help="instead: a folder of save_pretrained(), or a name at Hugging Face")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as for examples/pretrain/train.py")
    parser.add_argument("--steps", type=whole(1), default=400, help="of training")
    parser.add_argument("--batch", type=whole(1), default=16, help="sequences in a batch, of training and evaluation")
    parser.add_argument("--sequence-length", type=whole(1), default=128)
    parser.add_argument("--lr", type=finite(above=0), default=None, help="3e-3, for llama-base 6e-4, unless told")
    parser.add_argument("--seed", type=generator_seed, default=0)
    parser.add_argument("--calibration-batches", type=whole(1), default=8)
    parser.add_argument("--eval-batches", type=whole(1), default=16)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), metavar="NAME")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of all other numbers")
    parser.add_argument("--save", type=new_folder, metavar="DIR", help="save_pretrained() the trained model there")
    parser.add_argument("--out", type=new_file, default="runs/direct_cast.json")
    arguments = parser.parse_args(argv)
    if arguments.lr is None:
        arguments.lr = 6e-4 if arguments.model == "llama-base" else 3e-3
    return arguments


def load_data(arguments: argparse.Namespace, vocabulary: int) -> tuple[Sequences, Sequences]:
    """(training data, held-out data): bytes for a model with 256 tokens, else those of the checkpoint's tokenizer."""
    encode = byte_tokens
    if vocabulary != 256:
        from transformers import AutoTokenizer

        encode = tokenizer_tokens(AutoTokenizer.from_pretrained(arguments.checkpoint))
    training, held_out = split_tokens(read_documents(arguments.data), encode)
    length = arguments.sequence_length
    return Sequences(training, length, arguments.seed), Sequences(held_out, length)


def train(model: nn.Module, training: Sequences, arguments: argparse.Namespace, device: torch.device) -> None:
    """AdamW; the learning rate rises for 5 % of the steps and falls as a cosine; bf16 autocast on a GPU."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=arguments.lr,
        betas=(0.9, 0.95),
    )
    warmup = max(1, arguments.steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, arguments.steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    bf16 = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()
    model.train()
    bar = tqdm(range(arguments.steps), desc=f"training {arguments.model}", unit="step", mininterval=5.0)
    for step in bar:
        tokens = training.training_batch(step * arguments.batch, arguments.batch).to(device)
        with bf16:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@torch.no_grad()
def held_out_losses(model: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
    """float64 [batches]."""
    return torch.stack([model(input_ids=tokens, labels=tokens).loss.double() for tokens in batches]).cpu()


def measure(model: nn.Module, name: str, calibration: list[torch.Tensor], batches: list[torch.Tensor]) -> dict:
    """One row: the losses of a format in all three ways, beside those of the model as it is."""
    element, options = FORMATS[name]
    original = held_out_losses(model, batches)
    row: dict = {"format": name, "bits": make_format(element, **options).bits_per_element}

    def add(column: str, report: CastReport) -> None:
        losses = held_out_losses(model, batches)
        restore(model)
        difference = losses - original
        row[column] = {
            "loss": losses.mean().item(),
            "difference": difference.mean().item(),
            "standard_error": (difference.std() / len(batches) ** 0.5).item() if len(batches) > 1 else None,
            "layers": len(report.layers),
        }

    add("weights", direct_cast(model, element, activations=False, **options))
    add("weights_activations", direct_cast(model, element, **options))
    row["error_diffusion"] = None
    if element != "none":
        began = time.perf_counter()
        report = error_diffusion(model, calibration, element, **options)
        seconds = time.perf_counter() - began
        add("error_diffusion", report)
        row["error_diffusion"]["seconds"] = seconds
    return row


def cell(figures: dict | None) -> str:
    if figures is None:
        return "-"
    error = figures["standard_error"]
    return f"{figures['difference']:+.5f}" + (f" +-{error:.5f}" if error is not None else "")


def line(row: dict) -> str:
    return f"{row['format']:<20}{row['bits']:>7.3f}" + "".join(f"{cell(row[column]):>24}" for column in COLUMNS)


def main() -> None:
    arguments = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(arguments.seed)
    model = make_model(arguments.checkpoint or arguments.model, {}, arguments.sequence_length).to(device)
    training, held_out = load_data(arguments, model.config.vocab_size)
    if not arguments.checkpoint:
        train(model, training, arguments, device)
    model.eval().to(getattr(torch, arguments.dtype))
    if arguments.save:
        model.save_pretrained(arguments.save)

    batch, trained_on = arguments.batch, 0 if arguments.checkpoint else arguments.steps * arguments.batch
    calibration = [
        training.training_batch(trained_on + i * batch, batch).to(device) for i in range(arguments.calibration_batches)
    ]
    batches = [
        held_out.evaluation_batch(i, arguments.eval_batches, batch).to(device) for i in range(arguments.eval_batches)
    ]
    baseline = held_out_losses(model, batches).mean().item()
    print(f"\nheld-out loss in {arguments.dtype}: {baseline:.5f}. In a format, the difference to it:\n")
    print(f"{'format':<20}{'bits':>7}" + "".join(f"{heading:>24}" for heading in HEADINGS))
    rows = []
    for name in arguments.formats:
        rows.append(measure(model, name, calibration, batches))
        print(line(rows[-1]), flush=True)
    result = {
        **describe("direct_cast"),
        "model": arguments.checkpoint or arguments.model,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_tokens": trained_on * arguments.sequence_length,
        "held_out_tokens": len(batches) * batch * arguments.sequence_length,
        "calibration_tokens": len(calibration) * batch * arguments.sequence_length,
        "dtype": arguments.dtype,
        "held_out_loss": baseline,
        "rows": rows,
        "finished": True,
    }
    write_result(arguments.out, result)


if __name__ == "__main__":
    main()
