"""Train a causal language model on text with DeepSpeed ZeRO-3, with or without zeropp_fp8. Copy it and change it.

    deepspeed train.py --model llama-base --data stdlib --deepspeed_config ../../ds_configs/zeropp.json --steps 500
    torchrun --nproc-per-node 4 train.py ...                  # the same
    python train.py ...                                       # one process
    deepspeed train.py --model Qwen/Qwen3-0.6B --data ~/texts ...        # a model of Hugging Face, your own files

What the plugin does is in the ds_config alone: its "zeropp_fp8" section, or DeepSpeed's ZeRO++ keys. Without them this
is a plain DeepSpeed script.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from data import Sequences, byte_tokens, read_documents, split_tokens, tokenizer_tokens
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from models import SMALL_LLAMAS, is_small, make_model
from tqdm import tqdm

import zeropp_fp8
from zeropp_fp8.config import load_ds_config, resolve

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from basics import (
    JsonLines,
    adamw,
    bytes_sent,
    failing_together,
    join_the_other_ranks,
    learning_rate_factor,
    mean_over_ranks,
    random_state,
    restore_random_state,
    seed_everything,
    shut_down,
)
from options import Parser, finite, generator_seed, model_config, new_file, new_folder, refusals, whole

MEGA = 1e6
END_STEPS = 10  # loss_end is the mean over so many steps
SETTINGS = "run.json"  # beside the checkpoints of a run
FIGURES = ("loss_start", "loss_end", "held_out_loss", "step_s")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        default="llama-small",
        help=f"Hugging Face name or folder, or one of {', '.join(SMALL_LLAMAS)} (random)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=["stdlib"],
        help='text files, folders, "stdlib" (the source of Python\'s standard library), or Hugging Face data sets '
        "(NAME or NAME:CONFIGURATION)",
    )
    parser.add_argument("--deepspeed_config", required=True, help="path of the DeepSpeed JSON")
    parser.add_argument(
        "--steps", type=whole(1), default=100, help="optimizer steps in all, those before --resume included"
    )
    parser.add_argument("--sequence-length", type=whole(2), default=128, help="tokens in a sequence")
    parser.add_argument("--lr", type=finite(least=0), default=1e-3, help="learning rate after the warm-up")
    parser.add_argument("--warmup", type=whole(0), default=10, help="steps over which the learning rate rises")
    parser.add_argument("--schedule", choices=("constant", "cosine"), default="constant", help="after the warm-up")
    parser.add_argument("--weight-decay", type=finite(least=0), default=0.1, help="for matrices; vectors have none")
    parser.add_argument("--seed", type=generator_seed, default=0, help="initial weights and order of the data")
    parser.add_argument(
        "--eval-every", type=whole(0), default=0, help="steps between held-out losses; 0: only at the end"
    )
    parser.add_argument(
        "--eval-batches", type=whole(0), default=8, help="batches on each rank for a held-out loss; 0: none"
    )
    parser.add_argument("--save", type=new_folder, metavar="DIR", help="write a checkpoint here at the end")
    parser.add_argument("--save-every", type=whole(0), default=0, help="and every so many steps; 0: only at the end")
    parser.add_argument("--resume", metavar="DIR", help="continue from the latest checkpoint there")
    parser.add_argument(
        "--export", type=new_folder, metavar="DIR", help="write the model at the end, for from_pretrained"
    )
    parser.add_argument(
        "--loss-log", type=new_file, metavar="FILE", help="JSON lines: loss, learning rate and seconds of each step"
    )
    parser.add_argument(
        "--summary", type=new_file, metavar="FILE", help="JSON: losses, step time and bytes of the whole run"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    arguments = parser.parse_args()
    if arguments.save_every and not arguments.save:
        parser.error("--save-every needs --save DIR")
    if arguments.resume and not Path(arguments.resume, "latest").is_file():
        parser.error(f"--resume {arguments.resume}: no checkpoint there")
    return arguments


def make_engine(arguments: argparse.Namespace, ds_config: dict):
    """The DeepSpeed engine. Optimizer and scheduler are the script's, unless the ds_config has its own."""
    model = make_model(arguments.model, copy.deepcopy(ds_config), arguments.sequence_length)
    optimizer = scheduler = None
    if "optimizer" not in ds_config:
        optimizer = adamw(model, arguments.lr, arguments.weight_decay)
        if "scheduler" not in ds_config:
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer,
                lambda step: learning_rate_factor(step, arguments.warmup, arguments.steps, arguments.schedule),
            )
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if optimizer else [p for p in model.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config=copy.deepcopy(ds_config),
    )
    return engine


def train_step(engine, training: Sequences, step: int) -> float:
    """One optimizer step (gradient accumulation included); returns the loss, mean over micro-batches and ranks."""
    batch, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for micro in range(accumulation):
        first = ((step * accumulation + micro) * world + rank) * batch
        tokens = training.training_batch(first, batch).to(engine.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def held_out_loss(engine, held_out: Sequences, batches: int) -> float:
    """Loss on `batches` batches a rank of text that is never trained on, mean over ranks."""
    batch, rank, world = engine.train_micro_batch_size_per_gpu(), dist.get_rank(), dist.get_world_size()
    engine.eval()
    losses = []
    for index in range(batches):
        tokens = held_out.evaluation_batch(index * world + rank, batches * world, batch).to(engine.device)
        losses.append(engine(input_ids=tokens, labels=tokens).loss.detach())
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


def what_must_not_change(arguments: argparse.Namespace, ds_config: dict, training: Sequences) -> dict:
    """Everything that a resumed run must share with the run it continues."""
    names = ["seed", "sequence_length", "lr", "warmup", "schedule", "weight_decay"]
    if arguments.schedule == "cosine":
        names.append("steps")
    fixed = {"--" + name.replace("_", "-"): getattr(arguments, name) for name in names}
    fixed["the number of sequences in a step"] = DeepSpeedConfig(copy.deepcopy(ds_config)).train_batch_size
    fixed["the number of tokens to train on"] = len(training.tokens)
    return fixed


def compare(directory: str, fixed: dict) -> None:
    """Refuse to go on with a run that had other settings.

    Raises:
        ValueError: it had.
        OSError: there is no file that says what it had.
    """
    before = json.loads(Path(directory, SETTINGS).read_text())
    for name, value in fixed.items():
        if before.get(name) != value:
            raise ValueError(f"--resume {directory}: {name} was {before.get(name)}, is {value} now")


def save(engine, directory: str, step: int, fixed: dict) -> None:
    """Write a checkpoint. Every rank keeps its own generator states; the order of the data follows from the step."""
    with failing_together(f"writing {Path(directory, SETTINGS)}"):
        if dist.get_rank() == 0:
            Path(directory).mkdir(parents=True, exist_ok=True)
            new = Path(directory, f"{SETTINGS}.new")
            new.write_text(json.dumps(fixed, indent=1))
            new.replace(Path(directory, SETTINGS))
    engine.save_checkpoint(directory, tag=f"step{step}", client_state={"step": step, "random": random_state()})


def resume(engine, directory: str) -> int:
    """Load the latest checkpoint; returns the number of steps done."""
    _, state = engine.load_checkpoint(directory)
    restore_random_state(state["random"])
    return state["step"]


def load_data(arguments: argparse.Namespace) -> tuple[Sequences, Sequences]:
    """(training data, held-out data).

    Raises:
        ValueError, OSError: a model or text that is not there, or too little text.
    """
    encode = byte_tokens
    if not is_small(arguments.model):
        from transformers import AutoTokenizer

        model_config("--model", arguments.model)
        encode = tokenizer_tokens(AutoTokenizer.from_pretrained(arguments.model))
    training, held_out = split_tokens(read_documents(arguments.data), encode)
    return (
        Sequences(training, arguments.sequence_length, arguments.seed),
        Sequences(held_out, arguments.sequence_length),
    )


def train(
    arguments: argparse.Namespace, engine, training: Sequences, held_out: Sequences, start: int, fixed: dict
) -> dict:
    """Steps `start` ... arguments.steps - 1, with evaluation and checkpoints; returns the figures of the run."""
    log = JsonLines(arguments.loss_log, done=start)
    is_main = dist.get_rank() == 0
    losses, seconds, evaluated = [], [], {}
    bar = tqdm(
        total=arguments.steps,
        initial=start,
        desc=Path(arguments.deepspeed_config).stem,
        unit="step",
        disable=not is_main,
        mininterval=0.5 if sys.stderr.isatty() else 5.0,
        dynamic_ncols=True,
    )
    for step in range(start, arguments.steps):
        learning_rate = engine.get_lr()[0]
        get_accelerator().synchronize()
        began = time.perf_counter()
        losses.append(train_step(engine, training, step))  # reading the loss waits for the device
        get_accelerator().synchronize()
        seconds.append(time.perf_counter() - began)
        log.write(step=step + 1, loss=losses[-1], lr=learning_rate, seconds=seconds[-1])

        sent = bytes_sent(engine)
        shown = {"loss": f"{losses[-1]:.3f}", "s/step": f"{statistics.median(seconds[-END_STEPS:]):.2f}"}
        if sent:
            shown |= {"MB/step between nodes": f"{sent['inter'] / MEGA:.2f}", "within": f"{sent['intra'] / MEGA:.2f}"}
        bar.set_postfix(shown, refresh=False)
        bar.update()

        done = step + 1 == arguments.steps
        if arguments.eval_batches and (done or (arguments.eval_every and (step + 1) % arguments.eval_every == 0)):
            evaluated[step + 1] = held_out_loss(engine, held_out, arguments.eval_batches)
            log.write(step=step + 1, held_out_loss=evaluated[step + 1])
        if arguments.save and (done or (arguments.save_every and (step + 1) % arguments.save_every == 0)):
            save(engine, arguments.save, step + 1, fixed)
    bar.close()
    figures = {
        "steps": arguments.steps,
        "world_size": dist.get_world_size(),
        "loss_start": losses[0] if losses else None,
        "loss_end": statistics.fmean(losses[-END_STEPS:]) if losses else None,
        "held_out_loss": evaluated.get(arguments.steps),
        "step_s": statistics.median(seconds) if seconds else None,
        "wire_report": None,
    }
    if bytes_sent(engine) is not None:
        # All ranks together, bytes of one step; stock's by the ring formula in 16 bits.
        figures["wire_report"] = zeropp_fp8.wire_report(engine, total=True)
    return figures


def main() -> None:
    arguments = parse_arguments()
    with refusals():
        ds_config = load_ds_config(arguments.deepspeed_config)
        resolve(ds_config)
        training, held_out = load_data(arguments)
    zeropp_fp8.enable()  # the one line that this project adds; it acts where the ds_config asks for it
    join_the_other_ranks()
    seed_everything(arguments.seed)
    with refusals():
        fixed = what_must_not_change(arguments, ds_config, training)
        if arguments.resume:
            compare(arguments.resume, fixed)
    engine = make_engine(arguments, ds_config)
    seed_everything(arguments.seed + 1 + dist.get_rank())  # same initial weights, other dropout on each rank
    start = resume(engine, arguments.resume) if arguments.resume else 0
    if dist.get_rank() == 0:
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        print(
            f"{arguments.model}: {parameters / MEGA:.2f} million parameters; {len(training.tokens) / MEGA:.2f} million "
            f"tokens to train on, {len(held_out.tokens) / MEGA:.2f} held out; {engine.train_batch_size()} sequences of "
            f"{arguments.sequence_length} tokens per step on {dist.get_world_size()} rank(s)",
            flush=True,
        )
    figures = train(arguments, engine, training, held_out, start, fixed)
    if arguments.export:
        zeropp_fp8.save_merged_16bit(engine, arguments.export)
    if dist.get_rank() == 0:
        print("; ".join(f"{name} {figures[name]:.4f}" for name in FIGURES if figures[name] is not None), flush=True)
        if arguments.summary:
            Path(arguments.summary).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.summary).write_text(json.dumps(figures, indent=2) + "\n")
    shut_down(engine)


if __name__ == "__main__":
    main()
