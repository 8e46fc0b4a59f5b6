"""Trainings judged by their held-out loss: data, steps and schedule, and the comparison over seeds with bf16."""

from __future__ import annotations

import ast
import math
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.results import read_result
from examples.pretrain.data import Sequences, byte_tokens, find_files, read_documents, split_tokens

BF16 = "bf16"
THEN = "_then_"
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1  # of matrices; vectors have none
LEAST_RATE = 0.1  # of the learning rate, at the end
LOSS_EVERY = 50  # steps between reading losses from the device


def load_data(args, device: torch.device) -> tuple[Sequences, Sequences]:
    """(training, held-out) sequences of bytes, on the device."""
    return sequences_of(read_documents(args.data), args.sequence, device)


def sequences_of(documents: list[bytes], length: int, device: torch.device) -> tuple[Sequences, Sequences]:
    """(training, held-out) sequences of so many bytes, on the device."""
    training, held_out = split_tokens(documents, byte_tokens)
    return Sequences(training.to(device), length), Sequences(held_out.to(device), length)


def docstrings(sources: list[str]) -> list[bytes]:
    """The docstrings of Python files, those of one file as one text; without files of a newer Python's syntax."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = []
    for source in sources:
        for path in find_files(source):
            if path.suffix != ".py":
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # of escapes in strings
                try:
                    tree = ast.parse(path.read_bytes())
                except SyntaxError:
                    continue
            nodes = (node for node in ast.walk(tree) if isinstance(node, kinds))
            texts.append("\n\n".join(filter(None, map(ast.get_docstring, nodes))).encode())
    return [text for text in texts if text]


def rate_factor(step: int, warmup: int, steps: int, least: float = LEAST_RATE) -> float:
    """Return the factor of the learning rate of step `step` (from 0): up to 1, then along a cosine to `least`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def train_steps(trainer, first: int, end: int, args, data: tuple[Sequences, Sequences], row: dict) -> None:
    """Steps `first` ... `end` - 1; losses and seconds, without those of held-out losses, are added to the row."""
    training, held_out = data
    least_rate = getattr(args, "least_rate", LEAST_RATE)
    losses = []
    began = time.perf_counter()
    for step in range(first, end):
        tokens = training.training_batch(step * args.batch, args.batch)
        losses.append(trainer.step(tokens, rate_factor(step, args.warmup, args.steps, least_rate)))
        done = step + 1
        evaluate = done % args.eval_every == 0 or done == args.steps
        if not evaluate and done % LOSS_EVERY and done != end:
            continue
        row["train"].append([done, torch.stack(losses).mean().item()])  # waits for the device
        losses.clear()
        row["seconds"] += time.perf_counter() - began
        if evaluate:
            row["held_out"].append([done, evaluated(trainer, held_out, args)])
            print(
                f"{row['run']} seed {row['seed']}: step {done}, {row['seconds']:.0f} s, loss "
                f"{row['train'][-1][1]:.4f}, held out {row['held_out'][-1][1]:.4f}",
                flush=True,
            )
        began = time.perf_counter()


def evaluated(trainer, held_out: Sequences, args) -> float:
    return trainer.held_out_loss(held_out, args.eval_sequences, args.batch)


def compare(rows: list[dict], target_of: Callable[[str], float | None]) -> list[dict]:
    """A line for each run: mean held-out loss over its seeds, and the mean difference to bf16 of the same seeds.

    Args:
        target_of: by how many percent the loss of a run may be above bf16's.
    """
    by_run = defaultdict(dict)
    for row in rows:
        by_run[row["run"]][row["seed"]] = row
    bf16 = by_run.get(BF16, {})
    lines = []
    for run, of_seeds in by_run.items():
        finals = {seed: row["held_out_loss"] for seed, row in of_seeds.items()}
        line = {
            "run": run,
            "seeds": sorted(finals),
            "held_out_loss": statistics.fmean(finals.values()),
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in of_seeds.values()),
            "target_percent": target_of(run),
        }
        differences = [100 * (loss / bf16[seed]["held_out_loss"] - 1) for seed, loss in finals.items() if seed in bf16]
        if differences:
            line["percent_above_bf16"] = statistics.fmean(differences)
            line["percent_above_bf16_by_seed"] = differences
        if len(finals) > 1:
            line["seed_spread_percent"] = 100 * statistics.stdev(finals.values()) / line["held_out_loss"]
        if line["target_percent"] is not None and differences:
            line["within_target"] = line["percent_above_bf16"] <= line["target_percent"]
        lines.append(line)
    return lines


def show(result: dict) -> None:
    """Print the comparison."""
    rows, data = result["rows"], result["data"]
    settings = result["settings"]
    print(
        f"\n{rows[0]['parameters'] / 1e6:.1f} million parameters, {rows[0]['tokens'] / 1e6:.1f} million tokens in "
        f"{settings['steps']} steps of {settings['batch']} x {settings['sequence']}, "
        f"{rows[0]['epochs']:.2f} epochs of {data['training_tokens'] / 1e6:.1f} million bytes "
        f"({', '.join(data['sources'])}); held out: {data['held_out_tokens'] / 1e6:.2f} million bytes, of which "
        f"{data['evaluated_tokens'] / 1e6:.2f} million are evaluated"
    )
    print(f"{'run':<26}{'seeds':>6}{'held-out loss':>15}{'above bf16':>12}{'target':>9}{'':>8}{'tokens/s':>11}")
    for line in result["comparison"]:
        above, target = line.get("percent_above_bf16"), line["target_percent"]
        verdict = {True: "met", False: "MISSED", None: ""}[line.get("within_target")]
        print(
            f"{line['run']:<26}{len(line['seeds']):>6}{line['held_out_loss']:>15.5f}"
            f"{'' if above is None else f'{above:+.3f} %':>12}{'' if target is None else f'{target:g} %':>9}"
            f"{verdict:>8}{line['tokens_per_s']:>11.0f}"
            + (f"   seeds vary by {line['seed_spread_percent']:.2f} %" if "seed_spread_percent" in line else "")
        )
    sys.stdout.flush()


def merge(paths: list[str], order: Sequence[str]) -> dict:
    """The results of several processes as one, rows in the order of their runs.

    Raises:
        ValueError: they were made with other settings or other data.
    """
    order = list(order)
    results = [read_result(path) for path in paths]
    first = results[0]
    for path, result in zip(paths, results):
        for key in ("settings", "data"):
            if result[key] != first[key]:
                raise ValueError(f"{path} was made with other {key} than {paths[0]}: {result[key]}, {first[key]}")
    merged = {key: first[key] for key in ("question", "date", "commit", "hardware", "versions", "settings", "data")}
    merged["commands"] = [result["command"] for result in results]
    rows = [row for result in results for row in result["rows"]]
    merged["rows"] = list({(row["run"], row["seed"]): row for row in reversed(rows)}.values())  # the first of each
    merged["rows"].sort(key=lambda row: (order.index(row["run"]) if row["run"] in order else len(order), row["run"]))
    merged["failed"] = [failure for result in results for failure in result.get("failed", ())]
    merged["finished"] = all(result["finished"] for result in results)
    return merged
