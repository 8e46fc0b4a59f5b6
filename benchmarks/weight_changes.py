"""How little of 16-bit weights changes in a step, and how many bits a lossless code of the changes needs.

    python -m benchmarks.weight_changes --out runs/weight_changes.json
    python -m benchmarks.weight_changes --size 100m --steps 600 --iterations 40 --out runs/weight_changes.json   (a GPU)

Weights in 16 bits are rounded from fp32 masters, as under ZeRO-3. Before and after some steps the masters are rounded
to bf16 and to fp16; what is counted of the differences, and the codes, are those of harness/changes.py. Runs:

    adamw, lion, sgd       a Llama from nothing, on bytes of Python's standard library, up to --lr (Lion a fifth,
                           SGD with momentum 100 times as much), a warm-up and a cosine to a tenth
    sft-1e-4, ...-1e-6     go on from the weights of `adamw`, which comes first, with docstrings of torch at that rate
    ppo-1e-5, ppo-1e-6     examples/rlhf: SFT and a reward model of its own tasks, then PPO: actor (0) and critic (1)

One process each, of one rank. `gradients` of a step are those of the bf16 model, clipped at 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.harness.changes import CODES, bits_of_gradients, changes
from benchmarks.harness.command import choose_runs, command, cut_into_nodes
from benchmarks.harness.environment import ROOT
from benchmarks.harness.learning import BETAS, WEIGHT_DECAY, docstrings, load_data, rate_factor, sequences_of
from benchmarks.harness.llama import Llama
from benchmarks.harness.measuring import synchronize
from benchmarks.harness.question import Question, runs_apart
from benchmarks.harness.rlhf_pipeline import FOLDER, SETTINGS, pipeline
from benchmarks.harness.sizes import SIZES
from examples.launching import device, launch
from examples.options import finite, whole

OPTIMIZERS = ("adamw", "lion", "sgd")
TUNED = tuple(f"sft-{lr}" for lr in ("1e-4", "1e-5", "1e-6"))
PPO = ("ppo-1e-5", "ppo-1e-6")
RUNS = (*OPTIMIZERS, *TUNED, *PPO)
BITS = ("entropy", "given_exponent", *CODES)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OF_ADAMW = {"adamw": 1.0, "lion": 0.2, "sgd": 100.0}  # learning rates, of AdamW's
MANY = 10**7  # parameters, from which on PPO has its larger model, of 103 million
PARTS = (0.02, 0.1, 0.25, 0.5, 0.75, 1.0)  # of a run, at whose ends a step is looked at; the first two always are


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, algorithm 2."""

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = momentum.lerp(param.grad, 1 - first).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(param.grad, 1 - second)


def looked_at(steps: int) -> list[int]:
    """Numbers of the steps, from 1 on, whose changes are counted."""
    return sorted({1, min(2, steps), *(max(1, round(part * steps)) for part in PARTS)})


def optimizer_of(name: str, masters: dict[str, Tensor], lr: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in masters.values() if (p.dim() >= 2) is many], "weight_decay": WEIGHT_DECAY * many}
        for many in (True, False)
    ]
    if name == "lion":
        return Lion(groups, lr)
    if name == "sgd":
        return torch.optim.SGD(groups, lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr, betas=BETAS, fused=groups[0]["params"][0].is_cuda)


def train(run: str, args, device: torch.device) -> dict:
    """A row: training from nothing, or from the weights of `adamw`."""
    tuned, name = run in TUNED, "adamw" if run in TUNED else run
    lr = float(run.partition("-")[2]) if tuned else args.lr * OF_ADAMW[name]
    steps = args.sft_steps if tuned else args.steps
    kept = Path(args.weights)
    torch.manual_seed(0)
    model = Llama(SIZES[args.size])
    if tuned:
        if not kept.exists():
            train("adamw", args, device)
        model.load_state_dict(torch.load(kept, weights_only=True))
        data, held_out = sequences_of(docstrings([str(Path(torch.__file__).parent / "nn")]), args.sequence, device)
    else:
        data, held_out = load_data(args, device)
    model.to(device)
    masters = {key: nn.Parameter(p.detach().clone()) for key, p in model.named_parameters()}
    model.to(torch.bfloat16)
    optimizer, points, losses = optimizer_of(name, masters, lr), [], []
    for step in range(1, steps + 1):
        factor = rate_factor(step - 1, max(1, steps // 10), steps)
        for group in optimizer.param_groups:
            group["lr"] = lr * factor
        loss = model(data.training_batch((step - 1) * args.batch, args.batch))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        look = step in looked_at(steps)
        before = {key: master.detach().clone() for key, master in masters.items()} if look else {}
        gradients = {key: p.grad for key, p in model.named_parameters()}
        for key, master in masters.items():
            master.grad = gradients[key].float()
        optimizer.step()
        losses.append(loss.detach())
        if look:
            found = {title: changes(before, masters, dtype) for title, dtype in DTYPES.items()}
            points.append({"step": step, "lr": lr * factor, "gradients": bits_of_gradients(gradients), **found})
        with torch.no_grad():
            for key, p in model.named_parameters():
                p.copy_(masters[key])
                p.grad = None
    if run == "adamw":
        torch.save({key: master.detach().cpu() for key, master in masters.items()}, kept)
    with torch.no_grad():
        held_out_loss = model(held_out.evaluation_batch(0, 1, args.batch)).item()
    synchronize(device)
    return {
        "run": run,
        "lr": lr,
        "steps": steps,
        "loss": losses[-1].item(),
        "held_out": held_out_loss,
        "points": points,
    }


def reinforce(run: str, args) -> dict:
    """A row: examples/rlhf/pipeline.py to one iteration of PPO, then that command for all, with its engines watched."""
    settings = copy.deepcopy(SETTINGS["base" if SIZES[args.size].parameters > MANY else "tiny"])
    settings["ppo"] |= {"lr": float(run.partition("-")[2]), "iterations": 1, "eval_every": 1}
    # The launchers make groups of their own.
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, without, clear=True):
        path, out, lines = Path(folder, "settings.json"), Path(folder, "out"), Path(folder, "changes.jsonl")
        path.write_text(json.dumps(settings))
        words = ["--settings", str(path), "--recipe", "lossless", "--ranks", "1", "--out", str(out)]
        pipeline([*words, "--stages", "sft", "reward", "ppo"], Path(folder, "log"), float("inf"))
        script, *words = json.loads((out / "ppo/stage.json").read_text())["command"]
        for name, value in (("iterations", args.iterations), ("eval-every", args.iterations), ("out", out / "watched")):
            words[words.index(f"--{name}") + 1] = str(value)
        os.environ |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "WATCHED_OUT": str(lines),
            "WATCHED_STEPS": ",".join(map(str, looked_at(4 * args.iterations))),
        }
        accelerator, _ = device(ranks=1)
        launch(run, ROOT / "benchmarks/harness/watched.py", [FOLDER / script, *words], accelerator, 1)
        found = [json.loads(line) for line in lines.read_text().splitlines()]
    names = {"bfloat16": "bf16", "float16": "fp16"}
    points = [{names.get(key, key): value for key, value in point.items()} for point in found]
    return {"run": run, "lr": settings["ppo"]["lr"], "steps": points[-1]["step"], "points": points}


def work(run: str, args, device: torch.device) -> dict:
    return reinforce(run, args) if run in PPO else train(run, args, device)


def line(row: dict) -> str:
    last = row["points"][-1]["bf16"]["all"]
    return f"{row['run']}: {100 * last['changed']:.2f} % change in the last step, entropy {last['entropy']:.3f} bits"


def compare(rows: list[dict]) -> list[dict]:
    """A line per run, engine and dtype: of all weights, the least and the most over the steps after the first two."""
    lines = []
    for row in rows:
        engines = sorted({point.get("engine", 0) for point in row["points"]})
        for engine in engines:
            own = [point for point in row["points"] if point.get("engine", 0) == engine]
            later = [point for point in own if point["step"] > 2] or own
            for dtype in DTYPES:
                found = [point[dtype]["all"] for point in later]
                bits = {key: [min(f[key] for f in found), max(f[key] for f in found)] for key in ("changed", *BITS)}
                lr = max(point["lr"] for point in own)
                lines.append({"run": row["run"], "engine": engine, "dtype": dtype, "lr": lr, **bits})
    return lines


def show(result: dict) -> None:
    """Print the table."""
    settings = result["settings"]
    print(f"\nBits per weight that changes of a step need, Llama {settings['size']}: least and most after two steps")
    print(f"{'':<12}{'':>6}{'lr':>9}{'changed, %':>16}" + "".join(f"{name.replace('_', ' '):>16}" for name in BITS))
    for found in result["comparison"]:
        low, high = found["changed"]
        spans = "".join(f"{found[key][0]:>8.3f}{found[key][1]:>8.3f}" for key in BITS)
        name = found["run"] + (f", {found['engine']}" if found["engine"] else "")
        print(f"{name:<12}{found['dtype']:>6}{found['lr']:>9.1e}{100 * low:>8.2f}{100 * high:>8.2f}{spans}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "weight_changes", RUNS, SIZES, "100m" if on_gpu else "tiny-bytes")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="as examples/pretrain/train.py takes it")
    parser.add_argument("--lr", type=finite(above=0), default=6e-4)
    parser.add_argument("--steps", type=whole(1), default=600 if on_gpu else 40)
    parser.add_argument("--sft-steps", type=whole(1), default=200 if on_gpu else 20)
    parser.add_argument("--iterations", type=whole(1), default=20 if on_gpu else 2, help="of PPO")
    parser.add_argument("--batch", type=whole(1), default=64 if on_gpu else 8, help="sequences")
    parser.add_argument("--sequence", type=whole(2), default=512 if on_gpu else 64, help="bytes")
    args = parser.parse_args(argv)
    args.ranks, args.gbit, args.rounds = 1, None, 1
    cut_into_nodes(args, parser)
    choose_runs(args, parser, RUNS)
    args.weights = str(Path(tempfile.mkdtemp(), "adamw.pt"))
    return args


@contextlib.contextmanager
def weights(args) -> Iterator[None]:
    """The folder of the weights of `adamw`, removed at the end."""
    try:
        yield
    finally:
        shutil.rmtree(Path(args.weights).parent)


QUESTION = Question(
    name="weight_changes",
    parse=parse,
    settings=("size", "lr", "steps", "sft_steps", "iterations", "batch", "sequence"),
    jobs=runs_apart,
    work=work,
    line=line,
    compared=lambda result: {"comparison": compare(result["rows"])},
    show=show,
    links=weights,
)

if __name__ == "__main__":
    QUESTION.answer()
