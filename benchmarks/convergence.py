"""Held-out loss of a 100M-class Llama trained in FP8 and MX, against the same training in bf16.

    python -m benchmarks.convergence --runs bf16,current,delayed --out a.json
    CUDA_VISIBLE_DEVICES=1 python -m benchmarks.convergence --runs mxfp8,mxfp6 --out b.json
    python -m benchmarks.convergence --merge a.json b.json --out convergence.json

One GPU (a CPU with --size tiny --batch 2 --sequence 64 --steps 20); several processes with other runs may go side by
side. Every run has the same initial weights, the same data in the same order, and the same recipe: weights that compute
in bf16, fp32 master weights and moments in AdamW (as DeepSpeed's bf16 mode has them), gradients clipped at 1, a linear
warm-up and a cosine down to a tenth of the learning rate. Embedding, lm_head, norms and attention stay in bf16.
Held-out losses are computed in the run's own precision. Runs:

    bf16
    current, delayed, per_channel, block      FP8 (E4M3) scalings
    current_hybrid, delayed_hybrid            gradients in E5M2
    mxfp8, mxfp6                              E4M3; E3M2: scales rounded up, elements to nearest even
    mxfp4w_mxfp6a                             weights E2M1, activations and gradients E3M2
    bf16_then_RUN                             bf16 for half of the steps, saved, loaded and continued as RUN

Several seeds: --seeds 0,1,2. A difference is taken between runs of one seed; the spread of bf16's own seeds stands
beside. MX on GPUs without MX GEMMs is emulated: same numbers, no speed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness.environment import describe
from benchmarks.harness.learning import (
    BETAS,
    BF16,
    THEN,
    WEIGHT_DECAY,
    compare,
    evaluated,
    load_data,
    merge,
    show,
    train_steps,
)
from benchmarks.harness.llama import Llama
from benchmarks.harness.results import write_result
from benchmarks.harness.sizes import SIZES, Size
from benchmarks.harness.zero3 import CLIP
from examples.options import finite, new_file, several, whole
from examples.pretrain.data import Sequences
from zeropp_fp8.compute import convert_linear_layers

WEIGHTS_IN_4_BITS = {"weights": "mxfp4", "activations": "mxfp6_e3m2", "gradients": "mxfp6_e3m2"}
# run: (the "compute" section, by how many percent its loss may be above bf16's)
COMPUTE = {
    "current": ({"format": "fp8", "scaling": "current"}, 0.3),
    "delayed": ({"format": "fp8", "scaling": "delayed"}, 0.3),
    "per_channel": ({"format": "fp8", "scaling": "per_channel"}, 0.3),
    "block": ({"format": "fp8", "scaling": "block"}, 0.3),
    "current_hybrid": ({"format": "fp8_hybrid", "scaling": "current"}, 0.3),
    "delayed_hybrid": ({"format": "fp8_hybrid", "scaling": "delayed"}, 0.3),
    "mxfp8": ({"format": "mxfp8_e4m3"}, 0.3),
    "mxfp6": ({"format": "mxfp6_e3m2"}, 0.3),
    "mxfp4w_mxfp6a": ({"format": WEIGHTS_IN_4_BITS}, 2.0),
}
SETTINGS = ("size", "steps", "batch", "sequence", "lr", "warmup", "data", "eval_sequences")


class Trainer:
    """A model whose weights compute in bf16, with fp32 master weights in the optimizer."""

    def __init__(self, size: Size, seed: int, learning_rate: float, device: torch.device) -> None:
        torch.manual_seed(seed)
        self.model = Llama(size).to(device)  # made on the CPU: the same numbers on every device
        self.master = [p.detach().clone() for p in self.model.parameters()]
        self.model.to(torch.bfloat16)
        self.weights = list(self.model.parameters())
        for master in self.master:
            master.grad = torch.empty_like(master)
        self._learning_rate = learning_rate
        matrices, vectors = ([m for m in self.master if (m.dim() >= 2) is wanted] for wanted in (True, False))
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=BETAS,
            fused=device.type == "cuda",
        )
        self.report = None

    def compute_in(self, run: str) -> None:
        """Let the linear layers compute as a run does.

        Raises:
            RuntimeError: a linear layer besides lm_head would stay in bf16.
        """
        if run == BF16:
            return
        self.report = convert_linear_layers(self.model, COMPUTE[run][0])
        if set(self.report.skipped) != {"lm_head"}:
            raise RuntimeError(f"{run}: {self.report}")

    def step(self, tokens: torch.Tensor, rate_factor: float) -> torch.Tensor:
        """One training step; the loss, fp32 [] on the device. Nothing in it waits for the device."""
        loss = self.model(tokens)
        loss.backward()
        torch._foreach_copy_([master.grad for master in self.master], [weight.grad for weight in self.weights])
        for weight in self.weights:
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.master, CLIP)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * rate_factor
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.master)
        if self.report is not None:
            self.report.scaling.end_step()
        return loss.detach()

    @torch.no_grad()
    def held_out_loss(self, held_out: Sequences, sequences: int, batch: int) -> float:
        """Mean loss over `sequences` sequences, spread evenly over the held-out text."""
        self.model.eval()
        batches = max(1, sequences // batch)
        losses = [self.model(held_out.evaluation_batch(number, batches, batch)) for number in range(batches)]
        self.model.train()
        return torch.stack(losses).mean().item()

    def save(self, path: Path) -> None:
        """Everything that training depends on; the bf16 weights follow from the master weights."""
        torch.save({"master": self.master, "optimizer": self.optimizer.state_dict()}, path)

    def load(self, path: Path) -> None:
        """Continue from `save`'s file."""
        state = torch.load(path, map_location=self.master[0].device, weights_only=True)
        with torch.no_grad():
            torch._foreach_copy_(self.master, state["master"])
            torch._foreach_copy_(self.weights, self.master)
        self.optimizer.load_state_dict(state["optimizer"])


def train(run: str, seed: int, args, data: tuple[Sequences, Sequences], device: torch.device, folder: Path) -> dict:
    """One run; its row of results.

    A run bf16_then_RUN continues from the checkpoint of the half of bf16 that lies in `folder`; where there is none, it
    trains that half itself.
    """
    training, held_out = data
    data = Sequences(training.tokens, training.length, seed), held_out
    then = run.partition(THEN)[2]
    half = args.steps // 2
    checkpoint = folder / f"{BF16}_seed{seed}_step{half}.pt"
    trainer = Trainer(args.size, seed, args.lr, device)
    row = {
        "run": run,
        "seed": seed,
        "parameters": sum(weight.numel() for weight in trainer.weights),
        "tokens": args.steps * args.batch * args.sequence,
        "epochs": args.steps * args.batch / training.count,
        "seconds": 0.0,
        "train": [],
        "held_out": [],
    }
    if not then:
        trainer.compute_in(run)
    start = 0
    if then or (run == BF16 and any(THEN in other for other in args.runs)):
        if not checkpoint.exists():
            train_steps(trainer, 0, half, args, data, row)
            trainer.save(checkpoint)
        start = half
    if then:
        trainer = Trainer(args.size, seed, args.lr, device)
        trainer.load(checkpoint)
        trainer.compute_in(then)
        row |= {"seconds": 0.0, "train": [], "held_out": []}
        row["continued_from"] = {"step": half, "held_out_loss": evaluated(trainer, held_out, args)}
    train_steps(trainer, start, args.steps, args, data, row)
    row["held_out_loss"] = row["held_out"][-1][1]
    trained = (args.steps - (half if then else 0)) * args.batch * args.sequence
    row["tokens_per_s"] = trained / row["seconds"]
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


# -- results --------------------------------------------------------------------------------------------------------


def target_of(run: str) -> float | None:
    """By how many percent the loss of a run may be above bf16's; None for bf16 itself."""
    precision = run.rpartition(THEN)[2]
    return COMPUTE[precision][1] if precision in COMPUTE else None


# -- command line ---------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [BF16, *COMPUTE, *(BF16 + THEN + run for run in (BF16, "current", "mxfp8"))]
    parser.add_argument("--runs", default=",".join(default), help="default: %(default)s")
    parser.add_argument(
        "--seeds", type=several(whole(0)), default="0", help="of initial weights and the order of the data"
    )
    parser.add_argument("--size", choices=SIZES, default="100m" if on_gpu else "tiny-bytes")
    parser.add_argument("--steps", type=whole(1), default=1000 if on_gpu else 20)
    parser.add_argument("--batch", type=whole(1), default=32 if on_gpu else 2, help="sequences in a step")
    parser.add_argument("--sequence", type=whole(1), default=1024 if on_gpu else 64, help="tokens in a sequence")
    parser.add_argument("--lr", type=finite(above=0), default=6e-4, help="after the warm-up")
    parser.add_argument("--warmup", type=whole(0), help="steps; default: a tenth of all")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as examples/pretrain/train.py takes it")
    parser.add_argument("--eval-every", type=whole(1), help="steps between held-out losses; default: a tenth of all")
    parser.add_argument("--eval-sequences", type=whole(1), default=512 if on_gpu else 4, help="for a held-out loss")
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="train nothing: compare these results")
    parser.add_argument("--out", type=new_file, default="runs/convergence.json", help="written after every run")
    args = parser.parse_args(argv)
    args.runs = args.runs.split(",")
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.warmup = max(1, args.steps // 10) if args.warmup is None else args.warmup
    args.eval_every = max(1, args.steps // 10) if args.eval_every is None else args.eval_every
    for run in args.runs:
        first, _, then = run.partition(THEN)
        if first not in (BF16, *COMPUTE) or (then and (first != BF16 or then not in (BF16, *COMPUTE))):
            parser.error(f"unknown run {run}; runs are {BF16}, {', '.join(COMPUTE)} and {BF16}{THEN}RUN")
    return args


def finish(result: dict, args) -> None:
    """Compare, and write what there is."""
    result["comparison"] = compare(result["rows"], target_of)
    if args.out:
        write_result(args.out, result)


def main() -> None:
    args = parse()
    if args.merge:
        result = merge(args.merge, [BF16, *COMPUTE])
        finish(result, args)
        show(result)
        return
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    result = describe("convergence")
    result["settings"] = {name: getattr(args, name) for name in SETTINGS if name not in ("size", "data")}
    result["settings"]["size"] = vars(SIZES[args.size])
    args.size = SIZES[args.size]
    data = load_data(args, device)
    result["data"] = {
        "sources": [Path(source).name for source in args.data],
        "training_tokens": len(data[0].tokens),
        "held_out_tokens": len(data[1].tokens),
        "evaluated_tokens": max(1, args.eval_sequences // args.batch) * args.batch * args.sequence,
    }
    result |= {"finished": False, "rows": [], "failed": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in args.seeds:
            for run in args.runs:
                if on_gpu:
                    torch.cuda.reset_peak_memory_stats()
                try:
                    result["rows"].append(train(run, seed, args, data, device, Path(folder)))
                except Exception as error:
                    result["failed"].append({"run": run, "error": str(error)})
                    print(f"{run} seed {seed} FAILED: {type(error).__name__}: {error}", flush=True)
                finish(result, args)
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
    result["finished"] = True
    finish(result, args)
    if result["rows"]:
        show(result)
    if result["failed"]:
        sys.exit(f"failed: {', '.join(failure['run'] for failure in result['failed'])}")


if __name__ == "__main__":
    main()
