"""Own tests of libraries that train with DeepSpeed, with recipes: how they ended, and what stock does not pass."""

from __future__ import annotations

from collections import Counter

from benchmarks.report.blocks import Block, table
from benchmarks.report.upstream import below, item

NAMES = {"accelerate": "Accelerate", "transformers": "transformers", "trl": "TRL"}
FILES = below(*(f"cpu-2-gloo-{package}" for package in NAMES))
RECIPES = ("lossless", "zeropp")

# A part of the name of a test that stock does not pass, or of what it says, and why: on a CPU, with no network.
REASONS = {
    "test_zero_to_fp32": "scripts of `examples` are not there",
    "No module named 'evaluate'": "the package `evaluate` and its data are not there",
    "warmup_num_steps must be": "a warm-up of 0 steps, which DeepSpeed refuses",
    "RANK expected": "ranks are started for GPUs only",
    "'cuda:0' not found": "the devices have to be GPUs",
    "`position_ids`": "no `position_ids`, which the installed version asks for",
    "not an instance of 'Sequence'": "the model's stand-in does not have T5's own tokenizer",
    "requires liger-kernel": "Liger kernels are not there",
    "requires optuna": "Optuna is not there",
    "requires deepspeed async-io": "DeepSpeed's asynchronous files are not there",
    "fails when deepspeed>0.12.6": "skipped with every DeepSpeed since 0.12.6",
    "slowly diverges": "skipped always, as resuming diverges",
    "seems run oddly": "skipped at stage 3, after training",
}


def results(*suites: dict) -> str:
    """A row a library: its tests by how they end with stock, and of those that pass there how many do with recipes."""
    rows = []
    for (package, name), suite in zip(NAMES.items(), suites):
        of, _, version = suite["about"]["tests of"].partition(" ")
        installed = suite["about"]["installed"].split(", ")[0].split(" ")[1]
        assert of == package, of
        tests = suite["tests"].values()
        stock = Counter(test["stock"]["outcome"] for test in tests)
        assert stock.keys() <= {"passed", "skipped", "failed"}, stock
        engines = sum(test.get("lossless", {}).get("engines", 0) > 0 for test in tests)
        counts = [stock["passed"], *(passed(suite, recipe) for recipe in RECIPES), engines]
        counts += [stock["failed"], stock["skipped"]]
        rows.append([f"{name} {installed}", version, f"`{suite['commit']}`", *map(str, counts)])
    columns = ["stock passes", *(f"`{recipe}` passes of them" for recipe in RECIPES)]
    columns += ["make an engine of the plugin", "stock fails", "stock skips"]
    return table(["library", "its tests of", "commit", *columns], rows)


def passed(suite: dict, recipe: str) -> int:
    """How many of the tests that stock passes the recipe passes; it ran all of them."""
    ran = [test[recipe]["outcome"] for test in suite["tests"].values() if test["stock"]["outcome"] == "passed"]
    return ran.count("passed")


def not_passed(*suites: dict) -> str:
    """A list of libraries with the reasons of what stock does not pass."""
    lines = []
    for name, suite in zip(NAMES.values(), suites):
        stock = {test: endings["stock"] for test, endings in suite["tests"].items()}
        why = Counter(reason(f"{test} {end['says']}") for test, end in stock.items() if end["outcome"] != "passed")
        lines.append(item(f"* {name}: " + "; ".join(f"{words} ({count})" for words, count in why.most_common()) + "."))
    return "\n".join(lines)


def reason(text: str) -> str:
    """Why stock does not pass a test.

    Args:
        text: its name and what it says.

    Raises:
        ValueError: none of the reasons fits, or several.
    """
    (words,) = (words for part, words in REASONS.items() if part in text)
    return words


BLOCKS = {
    "integrations_results": Block(results, FILES, sourced=False),
    "integrations_not_passed": Block(not_passed, FILES, sourced=False),
}
