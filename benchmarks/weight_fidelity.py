"""Which weights a forward computes with when they are sent in each format: how near, what is learned, the price.

    python -m benchmarks.weight_fidelity --out weight_fidelity.json
    python -m benchmarks.weight_fidelity --merge a.json b.json --out weight_fidelity.json                  # other seeds
    python -m benchmarks.weight_fidelity --size 25m --steps 450 --seeds 0 --out weight_fidelity.json          # on a GPU

One process trains a Llama on bytes with the weights as ranks would get them: bf16 weights are rounded from fp32 master
weights, encoded, decoded, and used forward and backward. Gradients and optimizer are exact, so that formats are all
that runs differ in; those of one seed begin alike and see the same batches. Runs:

    bf16                   as they are; `zeropp-exact` gives the same
    int8, int4             as `zeropp` and `zeropp-4bit` send them
    int4 then int8 at N %  a choice between these two that changes once; at the best N it is what an automatic one can
    int8 then int4 at N %  reach, which does not know the end

By step a row has the signal-to-noise ratio of the matrices that the forward gets, alone and cast to FP8 (E4M3, a scale
a tensor) as an FP8 layer casts them, and the held-out loss with these weights and with the exact ones.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import seeds
from benchmarks.harness.environment import describe
from benchmarks.harness.learning import BETAS, WEIGHT_DECAY, load_data, merge, rate_factor
from benchmarks.harness.llama import Llama
from benchmarks.harness.results import write_result
from benchmarks.harness.sizes import SIZES
from examples.options import finite, generator_seed, new_file, whole
from examples.pretrain.data import Sequences
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import make_format

REFERENCE = "bf16"
LEAST_RATE = 0.01  # of the learning rate, at the end: small steps are what 4 bits lose most of
FP8 = torch.float8_e4m3fn

Way = tuple[str, dict]  # the format of matrices
BF16: Way = ("none", {"dtype": torch.bfloat16})
INT8 = ("int8", {"block_size": 256})
INT4 = ("int4", {"block_size": 128, "hadamard": True})
# name: ways, and the share of the steps at which the second takes the place of the first
RUNS: dict[str, tuple[list[Way], float]] = {
    REFERENCE: ([BF16], 1.0),
    "int8": ([INT8], 1.0),
    "int4": ([INT4], 1.0),
    **{f"int4 then int8 at {100 * at:.0f} %": ([INT4, INT8], at) for at in (0.25, 0.5, 0.75)},
    "int8 then int4 at 50 %": ([INT8, INT4], 0.5),
}


class Wire:
    """One rank's weights on their way to others.

    Attributes:
        num_bytes: that are sent, and that a copy of them takes.
    """

    def __init__(self, way: Way, weights: list[Tensor]) -> None:
        chosen = [way if w.dim() > 1 else BF16 for w in weights]
        formats = [make_format(name, **options) for name, options in chosen]
        numels, device = [w.numel() for w in weights], weights[0].device
        self._layout = PayloadLayout(numels, formats, [torch.bfloat16] * len(weights), device)
        self._order = SliceOrder(range(1), device)
        self.num_bytes = self._layout.row_bytes

    def send(self, weights: list[Tensor]) -> list[Tensor]:
        """bf16 tensors, as they arrive."""
        payload = torch.empty(1, self.num_bytes, dtype=torch.uint8, device=weights[0].device)
        self._layout.encode(weights, self._order, payload)
        arrived = [torch.empty_like(w) for w in weights]
        self._layout.decode(payload, self._order, arrived)
        return arrived


def decibels(exact: list[Tensor], found: list[Tensor]) -> float | None:
    """Signal-to-noise ratio of matrices; None where nothing was lost."""
    pairs = [(one.double(), other.double()) for one, other in zip(exact, found) if one.dim() > 1]
    noise = sum((one - other).square().sum().item() for one, other in pairs)
    return None if not noise else 10 * math.log10(sum(one.square().sum().item() for one, _ in pairs) / noise)


def as_fp8(weights: list[Tensor]) -> list[Tensor]:
    """Weights as an FP8 layer multiplies them, with a scale per tensor."""
    scales = [w.float().abs().amax() / torch.finfo(FP8).max for w in weights]
    return [(w / scale).to(FP8).float() * scale for w, scale in zip(weights, scales)]


@torch.no_grad()
def held_out_loss(model: Llama, held_out: Sequences, args: argparse.Namespace) -> float:
    count = max(1, args.eval_sequences // args.batch)
    return torch.stack([model(held_out.evaluation_batch(n, count, args.batch)) for n in range(count)]).mean().item()


@torch.no_grad()
def put(model: Llama, weights: list[Tensor]) -> None:
    for param, weight in zip(model.parameters(), weights):
        param.copy_(weight)


def train(run: str, seed: int, args: argparse.Namespace, data: tuple[Sequences, Sequences], device) -> dict:
    """One run; its row of results."""
    training, held_out = data
    training = Sequences(training.tokens, training.length, seed)
    torch.manual_seed(seed)
    model = Llama(SIZES[args.size]).to(device)
    masters = [p.detach().clone() for p in model.parameters()]
    matrices, vectors = ([m for m in masters if (m.dim() > 1) is many] for many in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=BETAS)
    ways, switch_at = RUNS[run]
    numel = sum(m.numel() for m in masters)
    row = {"run": run, "seed": seed, "parameters": numel, "tokens": args.steps * args.batch * args.sequence}
    row |= {"steps": [], "later_bytes_a_parameter": 0.0, "kept_bytes_a_parameter": 0.0}
    began, way, wire = time.perf_counter(), None, None
    for step in range(args.steps + 1):
        now = ways[0] if step < switch_at * args.steps or len(ways) == 1 else ways[1]
        exact = [m.to(torch.bfloat16) for m in masters]
        if now is not way:
            way, wire = now, Wire(now, exact)
        arrived = wire.send(exact)
        row["kept_bytes_a_parameter"] = max(row["kept_bytes_a_parameter"], wire.num_bytes / numel)
        if step:
            row["later_bytes_a_parameter"] += wire.num_bytes / numel / args.steps
        if step % max(1, args.steps // args.evaluations) == 0 or step == args.steps:
            put(model, exact)
            checkpoint_loss = held_out_loss(model, held_out, args)
            put(model, arrived)
            point = {"step": step, "db": decibels(exact, arrived), "fp8_db": decibels(exact, as_fp8(arrived))}
            point |= {"held_out_loss": held_out_loss(model, held_out, args), "checkpoint_loss": checkpoint_loss}
            row["steps"].append(point)
        if step == args.steps:
            break
        put(model, arrived)
        loss = model(training.training_batch(step * args.batch, args.batch))
        for master, grad in zip(masters, torch.autograd.grad(loss, list(model.parameters()))):
            master.grad = grad
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate_factor(step, max(1, args.steps // 10), args.steps, LEAST_RATE)
        optimizer.step()
    last = row["steps"][-1]
    row |= {"held_out_loss": last["held_out_loss"], "checkpoint_loss": last["checkpoint_loss"]}
    return row | {"seconds": time.perf_counter() - began}


def show(rows: list[dict]) -> None:
    print(f"{'run':<24}{'sent':>8}{'kept':>8}{'dB':>8}{'in FP8':>8}{'held-out loss':>15}{'paired':>12}{'+-':>8}")
    for line in seeds.compare(rows, [REFERENCE]):
        row = next(row for row in rows if row["run"] == line["run"])
        last = row["steps"][-1]
        db = "exact" if last["db"] is None else f"{last['db']:.1f}"
        paired, half = line.get("paired_percent"), line.get("paired_half_width")
        print(
            f"{line['run']:<24}{row['later_bytes_a_parameter']:>8.3f}{row['kept_bytes_a_parameter']:>8.3f}{db:>8}"
            f"{last['fp8_db']:>8.1f}{line['mean']:>15.5f}{'' if paired is None else f'{paired:+.3f} %':>12}"
            f"{'' if half is None else f'{half:.3f}':>8}"
        )


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=generator_seed, default=[0, 1, 2])
    parser.add_argument("--size", choices=SIZES, default="tiny-bytes")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as for examples/pretrain/train.py")
    parser.add_argument("--steps", type=whole(1), default=300)
    parser.add_argument("--batch", type=whole(1), default=8, help="sequences")
    parser.add_argument("--sequence", type=whole(2), default=128, help="bytes of one")
    parser.add_argument(
        "--lr", type=finite(above=0), default=3e-3, help="after 10 %% of the steps; then a cosine to 1 %%"
    )
    parser.add_argument("--evaluations", type=whole(1), default=6)
    parser.add_argument("--eval-sequences", type=whole(1), default=256)
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="train nothing: put these results together")
    parser.add_argument("--out", type=new_file, default="runs/weight_fidelity.json")
    return parser.parse_args(argv)


def main(argv=None) -> None:
    args = parse(argv)
    if args.merge:
        result = merge(args.merge, list(RUNS))
        write_result(args.out, result)
        show(result["rows"])
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head, rows = describe("weight_fidelity"), []
    chosen = ("size", "steps", "batch", "sequence", "lr", "eval_sequences")
    head["settings"] = {name: getattr(args, name) for name in chosen} | {"least_rate": LEAST_RATE}
    data = load_data(args, device)
    head["data"] = {"sources": [Path(source).name for source in args.data], "training_tokens": len(data[0].tokens)}
    for seed in args.seeds:
        for run in args.runs:
            rows.append(train(run, seed, args, data, device))
            print(
                f"{run}, seed {seed}: held out {rows[-1]['held_out_loss']:.5f}, {rows[-1]['seconds']:.0f} s", flush=True
            )
            write_result(args.out, {**head, "rows": rows, "finished": False})
    write_result(args.out, {**head, "rows": rows, "finished": True})
    show(rows)


if __name__ == "__main__":
    main()
