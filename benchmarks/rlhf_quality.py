"""PPO and GRPO with quantized models, beside bf16: SFT -> reward model -> PPO, and SFT -> GRPO, some seeds.

    python -m benchmarks.rlhf_quality --out runs/rlhf_quality.json
    python -m benchmarks.rlhf_quality --seeds 2 --ranks 2 --out runs/rlhf_quality.json        (a CPU, some 15 minutes)
    python -m benchmarks.rlhf_quality --recipes stock,benchmarks/harness/lossless-exact.json --seeds 3 --bf16
    python -m benchmarks.rlhf_quality --merge a.json b.json --out all.json

Every run is examples/rlhf/pipeline.py from nothing: data, a random Llama (103 million parameters on a GPU, 0.12 million
on a CPU), and all stages with one ds_config of ds_configs/: `stock` is DeepSpeed's ZeRO-3 in bf16, the others are
recipes of this package. A seed gives the same data, weights, order and sampling seeds in all of them. With several
ranks each is treated as a node, so that all that is sent is quantized; one rank sends nothing, and what is left of a
recipe is its compute, its optimizer, and the frozen models' weights.

The policies answer 1000 held-out tasks greedily: exact_match is the rate of right answers. A recipe's mean over seeds
is compared with the 95 % interval of bf16's (Student's t). --side-by-side pipelines share the device; --timeout bounds
everything, and a finished run is in --out at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.results import append_to, begin_result, end_result, read_result, write_result
from benchmarks.harness.rlhf_pipeline import SETTINGS, pipeline
from examples.launching import computes_in_bf16, device
from examples.options import finite, generator_seed, new_file, whole
from examples.rlhf.common.monitor import LOG, read_log

METRIC, BF16 = "exact_match", "stock"
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t, 97.5 %, 1 ... 9 degrees
CURVES = (f"reward_{METRIC}", "reward", "kl", "entropy", f"eval_{METRIC}")


# --- one run -----------------------------------------------------------------------------------------------------


def settings_of(args, folder: Path) -> Path:
    """The settings file of a pipeline."""
    settings = json.loads(json.dumps(SETTINGS[args.size]))
    for stage in ("ppo", "grpo"):
        settings[stage] |= {"iterations": args.iterations, "eval_every": max(1, args.iterations // 4)}
        settings[stage]["rollout_batch"] //= args.ranks if args.size == "base" else 1
    settings["ds_config"]["bf16"] = {"enabled": args.bf16}
    settings["ds_config"]["train_micro_batch_size_per_gpu"] //= args.ranks if args.size == "base" else 1
    path = folder / "settings.json"
    path.write_text(json.dumps(settings, indent=1))
    return path


def run(recipe: str, seed: int, args, folder: Path, deadline: float) -> dict:
    """The row of a recipe and a seed."""
    name = Path(recipe).stem
    out = folder / f"{name}_{seed}"
    out.mkdir()
    shared = ["--settings", str(settings_of(args, out)), "--recipe", recipe, "--seed", str(seed)]
    shared += ["--ranks", str(args.ranks), "--nodes", str(args.ranks), "--metric", METRIC]
    began = time.monotonic()
    pipeline([*shared, "--stages", "sft", "reward", "ppo", "--out", str(out / "ppo")], out / "ppo.log", deadline)
    start = ["--model", str(out / "ppo" / "sft"), "--data", str(out / "ppo" / "data")]
    pipeline([*shared, *start, "--stages", "grpo", "--out", str(out / "grpo")], out / "grpo.log", deadline)
    row = {"recipe": name, "seed": seed, "seconds": round(time.monotonic() - began, 1), "curves": {}}
    for stage in ("ppo", "grpo"):
        summary = json.loads((out / stage / "summary.json").read_text())
        row |= {name: summary[name][METRIC] for name in ("sft", stage)}
        row["reward_accuracy"] = summary["logs"].get("reward", {}).get("accuracy", row.get("reward_accuracy"))
        log = read_log(out / stage / stage / LOG)
        row["curves"][stage] = {key: curve(log, key) for key in CURVES}
    return row


def curve(log: list[dict], key: str) -> list[list[float]]:
    """[steps, values] of a log's number."""
    lines = [line for line in log if key in line]
    return [[line["step"] for line in lines], [round(line[key], 4) for line in lines]]


def measure(args) -> dict:
    """Do all runs; what is in args.out at the end."""
    names = ("size", "ranks", "iterations", "seeds", "recipes", "bf16")
    settings = {name: getattr(args, name) for name in names} | {"pipeline": SETTINGS[args.size]}
    begin_result(args.out, describe("rlhf_quality") | {"settings": settings})
    deadline = time.monotonic() + args.timeout

    def work(case: tuple[str, int]) -> None:
        recipe, seed = case
        try:
            row = run(recipe, seed, args, Path(folder), deadline)
        except (RuntimeError, TimeoutError) as error:
            append_to(args.out, "failed", {"run": f"{recipe}, seed {seed}", "error": str(error)})
            print(f"{recipe}, seed {seed}: {error}", flush=True)
            return
        append_to(args.out, "rows", row)
        print(
            f"{recipe}, seed {seed}: sft {row['sft']:.3f}, ppo {row['ppo']:.3f}, grpo {row['grpo']:.3f} in "
            f"{row['seconds']:.0f} s",
            flush=True,
        )

    cases = [(recipe, seed) for seed in range(args.first_seed, args.first_seed + args.seeds) for recipe in args.recipes]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.side_by_side) as pool:
        list(pool.map(work, cases))
    return end_result(args.out)


# --- what they came to -------------------------------------------------------------------------------------------


def interval(values: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of some runs (Student's t).

    Raises:
        ValueError: fewer than 2 runs, or more than 10.
    """
    if not 2 <= len(values) <= len(T_95) + 1:
        raise ValueError(f"an interval of {len(values)} runs: give 2 to {len(T_95) + 1} seeds")
    half = T_95[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    mean = statistics.fmean(values)
    return mean - half, mean + half


def compare(rows: list[dict]) -> list[dict]:
    """A line a recipe and policy: means over seeds, intervals, and where it lies in bf16's."""
    lines = []
    by_recipe = {recipe: [row for row in rows if row["recipe"] == recipe] for recipe in {r["recipe"] for r in rows}}
    for recipe in sorted(by_recipe, key=lambda name: (name != BF16, name)):
        for policy in ("sft", "ppo", "grpo"):
            values = [row[policy] for row in by_recipe[recipe]]
            line = {"recipe": recipe, "policy": policy, "seeds": len(values), "mean": statistics.fmean(values)}
            if len(values) > 1:
                line["interval"] = list(interval(values))
                if policy != "sft":
                    gains = [row[policy] - row["sft"] for row in by_recipe[recipe]]
                    line |= {"gain": statistics.fmean(gains), "gain_interval": list(interval(gains))}
            reference = [each for each in lines if each["recipe"] == BF16 and each["policy"] == policy]
            if recipe != BF16 and reference and "interval" in reference[0]:
                low, high = reference[0]["interval"]
                line["within_bf16"] = low <= line["mean"] <= high
            lines.append(line)
    return lines


def show(lines: list[dict]) -> None:
    """Print the table."""
    print(
        f"\n{'recipe':<14}{'policy':<8}{'seeds':>6}{'exact match':>13}{'95 % interval':>18}{'gain':>8}{'interval':>18}"
    )
    for line in lines:
        spans = [
            f"[{100 * line[key][0]:.1f}, {100 * line[key][1]:.1f}]" if key in line else "-"
            for key in ("interval", "gain_interval")
        ]
        gain = f"{100 * line['gain']:+.1f}" if "gain" in line else "-"
        inside = {True: "  within bf16's", False: "  OUTSIDE bf16's"}.get(line.get("within_bf16"), "")
        print(
            f"{line['recipe']:<14}{line['policy']:<8}{line['seeds']:>6}{100 * line['mean']:>11.1f} %{spans[0]:>18}"
            f"{gain:>8}{spans[1]:>18}{inside}"
        )


def finish(result: dict, args) -> None:
    """Add the comparison, show it, draw it."""
    result["lines"] = compare(result["rows"])
    write_result(args.out, result)
    show(result["lines"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    accelerator, _ = device()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default=f"{BF16},fp8-lm", help="of ds_configs/, or files (default %(default)s)")
    parser.add_argument("--seeds", type=whole(1), default=5, help="default %(default)s")
    parser.add_argument("--first-seed", type=generator_seed, default=0)
    parser.add_argument("--size", choices=SETTINGS, default="base" if accelerator == "cuda" else "tiny")
    parser.add_argument("--ranks", type=whole(1), default=1 if accelerator == "cuda" else 2, help="of a run")
    parser.add_argument("--bf16", action="store_true", help="also on a CPU where bf16 is slow, which takes fp32 else")
    parser.add_argument("--iterations", type=whole(1), default=40, help="of PPO, and of GRPO (default %(default)s)")
    parser.add_argument("--side-by-side", type=whole(1), default=1, help="runs at a time (default %(default)s)")
    parser.add_argument(
        "--timeout", type=finite(above=0), default=3600, help="seconds for everything (default %(default)g)"
    )
    parser.add_argument("--merge", nargs="+", metavar="JSON", help="results of several calls: compare all their rows")
    parser.add_argument(
        "--out", type=new_file, default="runs/rlhf_quality.json", help="JSON file (default %(default)s)"
    )
    args = parser.parse_args(argv)
    args.recipes = args.recipes.split(",")
    args.bf16 = args.bf16 or computes_in_bf16(accelerator)
    unknown = [name for name in args.recipes if not (ROOT / f"ds_configs/{name}.json").exists() | Path(name).is_file()]
    if unknown:
        parser.error(f"there is no ds_configs/{unknown[0]}.json, and no file {unknown[0]}")
    if torch.cuda.device_count() and args.ranks > torch.cuda.device_count():
        parser.error(f"{args.ranks} GPUs are needed, {torch.cuda.device_count()} found")
    return args


def main() -> None:
    args = parse()
    if args.merge:
        results = [read_result(path) for path in args.merge]
        result = results[0] | {"rows": [row for each in results for row in each["rows"]]}
        result["failed"] = [failure for each in results for failure in each["failed"]]
        result["commands"] = [each["command"] for each in results]
    else:
        result = measure(args)
    finish(result, args)
    sys.exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    main()
