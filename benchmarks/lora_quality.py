"""Held-out loss of LoRA over frozen weights stored as codes, against LoRA over the same weights in bf16.

    python -m benchmarks.lora_quality --out runs/lora_quality.json
    python -m benchmarks.lora_quality --size 3m --out runs/lora_quality.json          (a CPU, some 6 minutes)
    python -m benchmarks.lora_quality --merge a.json b.json --out all.json

A small Llama is pre-trained by examples/pretrain/train.py on the bytes of the Python standard library's files whose
names begin with a to m, and saved as a Hugging Face checkpoint (--base DIR keeps it, and uses it where it is there).
It is then fine-tuned with LoRA on all linear layers on the files from n to z, 5 % of them held out. Weights become
codes while the checkpoint is loaded. Every run is a ZeRO-3 engine of one rank, so runs differ only in the
format that stores frozen weights: same adapters, data, order and schedule for a seed. Runs:

    bf16                    nothing stored
    int8, int4, nf4         blocks of 64
    int4-dq, nf4-dq         with double quantization
    mxfp8, mxfp4            MXFP8 (E4M3) and MXFP4

"start" is the held-out loss before the first step, which shows what quantization alone costs. The default text, sizes
and steps take some 5 minutes on a large GPU and a minute on a CPU, where the model is too small to say more than that
all works. --side-by-side processes share a device. --timeout bounds everything; a finished run is in --out at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import learning
from benchmarks.harness.environment import ROOT, describe, join
from benchmarks.harness.jobs import announce, choose_gpus, dealt_jobs, run_jobs
from benchmarks.harness.learning import BF16, load_data, merge, show, train_steps
from benchmarks.harness.lora import LoraRun, stored
from benchmarks.harness.results import append_to, begin_result, end_result, write_result
from benchmarks.harness.zero3 import ds_config, without_refused
from examples.options import finite, new_file, several, whole
from examples.pretrain.data import Sequences, standard_library_files


def without_wire(section: dict) -> dict:
    """Its frozen part alone: one rank sends nothing."""
    return {"recipe": "lossless", "frozen": section["frozen"]}


# run: (its section, by how many percent its loss may be above bf16's)
RUNS: dict[str, tuple[dict, float | None]] = {
    BF16: ({"recipe": "lossless"}, None),
    "int8": (without_wire(stored("int8")), 0.2),
    "int4": (without_wire(stored("int4")), 1.0),
    "int4-dq": (without_wire(stored("int4", double_quantize=True)), 1.0),
    "nf4": (without_wire(stored("nf4")), 1.0),
    "nf4-dq": (without_wire(stored("nf4", double_quantize=True)), 1.0),
    "mxfp8": ({"recipe": "lossless", "frozen": {"format": "mxfp8_e4m3"}}, None),
    "mxfp4": ({"recipe": "lossless", "frozen": {"format": "mxfp4"}}, None),
}
LAST_LETTER = "m"  # of the names of files that are pre-trained on
# Llamas of bytes besides those of the example: (hidden size, layers, heads, feed-forward size).
MORE_LLAMAS = {"llama-3m": (256, 4, 4, 704)}
# model; pre-training: steps, sequences, tokens in one, learning rate; fine-tuning: steps, sequences, learning rate;
# sequences of a held-out loss
SIZES = {
    "base": ("llama-base", 600, 32, 1024, 6e-4, 100, 16, 5e-4, 256),  # 85 million
    "3m": ("llama-3m", 250, 8, 256, 2e-3, 40, 8, 2e-3, 64),
    "tiny": ("llama-tiny", 30, 4, 128, 2e-3, 8, 4, 2e-3, 8),
}
SIZE_FIELDS = ("model", "pretrain_steps", "pretrain_batch", "sequence", "pretrain_lr", "steps", "batch", "lr")
SETTINGS = (*SIZE_FIELDS, "eval_sequences", "warmup", "bf16")


# -- the model that is fine-tuned --------------------------------------------------------------------------------------


def split_library(folder: Path) -> tuple[Path, Path]:
    """Folders with the standard library's files, links in their order: names up to LAST_LETTER, and after it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = folder / "first", folder / "second"
    for part in parts:
        part.mkdir()
    for number, path in enumerate(standard_library_files()):
        name = path.relative_to(root).parts[0].lstrip("_").lower()
        (parts[name[:1] > LAST_LETTER] / f"{number:05d}.py").symlink_to(path)
    return parts


def pretrain(args) -> None:
    """In a process of its own: examples/pretrain/train.py, then its checkpoint as a Hugging Face one in args.base."""
    import deepspeed
    import models  # examples/pretrain is on the path of this process
    import train
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 30 s of gcc on a CPU, for nothing used here
    models.SMALL_LLAMAS |= MORE_LLAMAS
    with tempfile.TemporaryDirectory() as folder:
        config = ds_config({"recipe": "lossless"}, args.pretrain_batch, small=True, lean=False, bf16=args.bf16)
        path = Path(folder, "ds_config.json")
        path.write_text(json.dumps(config))
        options = {
            "model": args.model,
            "data": args.text,
            "deepspeed_config": path,
            "steps": args.pretrain_steps,
            "sequence-length": args.sequence,
            "lr": args.pretrain_lr,
            "warmup": args.pretrain_steps // 10,
            "schedule": "cosine",
            "save": folder,
            "summary": Path(args.base, "pretraining.json"),
        }
        sys.argv = ["train.py", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
        train.main()
        weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    model = models.make_model(args.model, {"zero_optimization": {"stage": 0}}, args.sequence)
    model.load_state_dict(weights)
    model.to(torch.bfloat16).save_pretrained(args.base)


def make_base(args, text: Path, deadline: float) -> dict:
    """Pre-train into the folder args.base, unless a model is there; the figures of the pre-training.

    Raises:
        RuntimeError: it failed.
    """
    figures = Path(args.base, "pretraining.json")
    if not Path(args.base, "config.json").exists():
        Path(args.base).mkdir(parents=True, exist_ok=True)
        job = json.dumps({**vars(args), "text": str(text)})
        path = [str(ROOT), str(ROOT / "examples/pretrain"), os.environ.get("PYTHONPATH", "")]
        environment = {"OMP_NUM_THREADS": str(os.cpu_count()), **os.environ, "PYTHONPATH": os.pathsep.join(path)}
        if not torch.cuda.is_available():
            environment["DS_ACCELERATOR"] = "cpu"
        left = max(1.0, deadline - time.monotonic())
        try:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.lora_quality", "--pretrain", job],
                env=environment,
                timeout=left,
                check=True,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {left:.0f} s") from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"ended with {error.returncode}; its error is above") from None
    return json.loads(figures.read_text()) if figures.exists() else {}


# -- fine-tuning -------------------------------------------------------------------------------------------------------


def pretrained(folder: str, config: dict, bf16: bool) -> nn.Module:
    """The model of a checkpoint, in shards, and as codes, from the beginning."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    partitioning = HfDeepSpeedConfig(config)  # while it lives, transformers loads under zero.Init
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if bf16 else torch.float32)
    del partitioning
    model.config.use_cache = False
    return model


class LoraTrainer:
    """A fine-tuning with what learning.train_steps asks for."""

    def __init__(self, run: str, seed: int, args, device: torch.device) -> None:
        self._learning_rate = args.lr
        self.training = LoraRun(
            RUNS[run][0],
            lambda config: pretrained(args.base, config, args.bf16),
            device,
            micro_batch=args.batch,
            small=True,
            bf16=args.bf16,
            seed=seed,
            optimizer={"lr": args.lr, "weight_decay": 0.0},
        )

    def step(self, tokens: Tensor, rate_factor: float) -> Tensor:
        """One training step; its loss."""
        for group in self.training.engine.optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_factor
        return self.training.step(tokens)

    @torch.no_grad()
    def held_out_loss(self, held_out: Sequences, sequences: int, batch: int) -> float:
        """Mean loss over `sequences` sequences, spread evenly over the held-out text."""
        engine = self.training.engine
        engine.eval()
        batches = max(1, sequences // batch)
        losses = [self.training.loss(held_out.evaluation_batch(n, batches, batch)) for n in range(batches)]
        engine.train()
        return torch.stack(losses).mean().item()


def fine_tune(run: str, seed: int, args, data: tuple[Sequences, Sequences], device: torch.device) -> dict:
    """One run; its row of results."""
    training, held_out = data
    trainer = LoraTrainer(run, seed, args, device)
    start = trainer.held_out_loss(held_out, args.eval_sequences, args.batch)
    row = {
        "run": run,
        "seed": seed,
        "section": RUNS[run][0],
        "parameters": trainer.training.parameters,
        "frozen_per_parameter": trainer.training.frozen_bytes / trainer.training.frozen_parameters,
        "tokens": args.steps * args.batch * args.sequence,
        "epochs": args.steps * args.batch / training.count,
        "seconds": 0.0,
        "train": [],
        "held_out": [[0, start]],
        "start_loss": start,
    }
    train_steps(trainer, 0, args.steps, args, (Sequences(training.tokens, training.length, seed), held_out), row)
    row["held_out_loss"] = row["held_out"][-1][1]
    row["tokens_per_s"] = row["tokens"] / row["seconds"]
    trainer.training.close()
    return row


def worker(args) -> None:
    """Do the runs of a job; each is named RUN:SEED."""
    choose_gpus(args)
    device = join()
    data = load_data(args, device)
    for name in args.runs:
        announce(args, name)
        run, _, seed = name.partition(":")
        append_to(args.out, "rows", fine_tune(run, int(seed), args, data, device))
    torch.distributed.destroy_process_group()


def measure(args) -> dict:
    """Pre-train, and do all runs; what is in args.out at the end."""
    deadline = time.monotonic() + args.timeout
    head = describe("lora_quality")
    settings = {name: getattr(args, name) for name in SETTINGS} | {"engine": "ZeRO-3, one rank"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        first, second = split_library(Path(folder))
        args.data = [str(second)]
        args.base = args.base or stack.enter_context(tempfile.TemporaryDirectory())
        training, held_out = load_data(args, torch.device("cpu"))
        data = {
            "sources": [f"standard library, after {LAST_LETTER}"],
            "training_tokens": len(training.tokens),
            "held_out_tokens": len(held_out.tokens),
            "evaluated_tokens": max(1, args.eval_sequences // args.batch) * args.batch * args.sequence,
        }
        begin_result(args.out, {**head, "settings": settings, "data": data})
        try:
            pretraining = make_base(args, first, deadline)
        except RuntimeError as error:
            append_to(args.out, "failed", {"run": "pre-training", "error": str(error)})
            return end_result(args.out)
        jobs = dealt_jobs([f"{run}:{seed}" for seed in args.seeds for run in args.runs], args.side_by_side)
        run_jobs("benchmarks.lora_quality", jobs, args, deadline, side_by_side=args.side_by_side)
    return end_result(args.out, pretraining=pretraining)


# -- results -----------------------------------------------------------------------------------------------------------


def compare(rows: list[dict]) -> list[dict]:
    """Lines lines, with the loss before the first step and its difference to bf16's."""
    lines = learning.compare(rows, lambda run: RUNS[run][1])
    starts = {row["run"]: row["start_loss"] for row in rows}  # the same for every seed: adapters begin at zero
    at_rest = {row["run"]: row["frozen_per_parameter"] for row in rows}
    for line in lines:
        line |= {"start_loss": starts[line["run"]], "frozen_per_parameter": at_rest[line["run"]]}
        if BF16 in starts:
            line["start_percent_above_bf16"] = 100 * (line["start_loss"] / starts[BF16] - 1)
    return lines


def finish(result: dict, args) -> None:
    """Compare, write, print and draw."""
    order = list(RUNS)
    result["rows"].sort(key=lambda row: (order.index(row["run"]), row["seed"]))
    result["comparison"] = compare(result["rows"])
    if args.out:
        write_result(args.out, result)
    if not result["rows"]:
        return
    show(result)
    print(f"\n{'before the first step':<26}{'held-out loss':>15}{'above bf16':>12}{'bytes per frozen weight':>23}")
    for line in result["comparison"]:
        above = line.get("start_percent_above_bf16")
        print(
            f"{line['run']:<26}{line['start_loss']:>15.5f}{'' if above is None else f'{above:+.3f} %':>12}"
            f"{line['frozen_per_parameter']:>23.4f}"
        )
    sys.stdout.flush()


# -- command line ------------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help="default: %(default)s")
    parser.add_argument(
        "--seeds",
        type=several(whole(0)),
        default="0,1,2" if on_gpu else "0",
        help="of adapters and the order of the data",
    )
    parser.add_argument("--size", choices=SIZES, default="base" if on_gpu else "tiny", help="default: %(default)s")
    parser.add_argument("--base", metavar="DIR", help="the pre-trained model; made where it is not there")
    parser.add_argument("--pretrain-steps", type=whole(1), help="default: as --size has it, like all that follow")
    parser.add_argument("--pretrain-batch", type=whole(1), help="sequences in a step")
    parser.add_argument("--pretrain-lr", type=finite(above=0))
    parser.add_argument("--steps", type=whole(1), help="of a fine-tuning")
    parser.add_argument("--batch", type=whole(1), help="sequences in a step of it")
    parser.add_argument("--lr", type=finite(above=0), help="of adapters, after a warm-up over a tenth of the steps")
    parser.add_argument("--sequence", type=whole(1), help="tokens in a sequence")
    parser.add_argument("--eval-every", type=whole(1), help="steps between held-out losses; default: a quarter of all")
    parser.add_argument("--eval-sequences", type=whole(1), help="for a held-out loss")
    parser.add_argument(
        "--side-by-side", type=whole(1), default=6 if on_gpu else 2, help="processes at a time (default %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=finite(above=0), default=570, help="seconds for everything (default: %(default)g)"
    )
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="train nothing: compare these results")
    parser.add_argument("--out", type=new_file, help="JSON file; default lora_quality.json (with --merge: none)")
    args = parser.parse_args(argv)
    if args.merge:
        return args
    for name, value in zip((*SIZE_FIELDS, "eval_sequences"), SIZES[args.size]):
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.out = args.out or "lora_quality.json"
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.ranks = args.nodes = 1
    args.warmup = max(1, args.steps // 10)
    args.eval_every = args.eval_every or max(1, args.steps // 4)
    args.bf16 = on_gpu or torch.ops.mkldnn._is_mkldnn_bf16_supported()  # without its instructions it is slow
    args.runs = args.runs.split(",")
    unknown = [run for run in args.runs if run not in RUNS]
    if unknown:
        parser.error(f"unknown run {unknown[0]}; runs are {', '.join(RUNS)}")
    args.runs = without_refused({run: RUNS[run][0] for run in args.runs})
    return args


def main() -> None:
    if sys.argv[1:2] in (["--worker"], ["--pretrain"]):
        {"--worker": worker, "--pretrain": pretrain}[sys.argv[1]](argparse.Namespace(**json.loads(sys.argv[2])))
        return
    args = parse()
    result = merge(args.merge, RUNS) if args.merge else measure(args)
    finish(result, args)
    for failure in result["failed"]:
        print(f"failed: {failure['run']}: {failure['error']}")
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
