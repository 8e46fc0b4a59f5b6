"""Run the ZeRO-3 parts of others' tests, unmodified, without and with recipes, and write the table.

    python tests/upstream/run_upstream.py --upstream /path/to/DeepSpeed --recipes lossless zeropp --out runs/upstream
    python tests/upstream/run_upstream.py --suite trl --upstream /path/to/trl --out runs/upstream/trl

First stock DeepSpeed runs them, then each recipe those that stock has passed; or, in half of the time, first the
recipes and then stock what one of them has failed (--stock-last). Every result is kept in OUT, and a second call goes
on where the first one ended. A GPU each rank, or the CPU (DS_ACCELERATOR=cpu LOCAL_SIZE=2).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
from suites import SUITES, Suite, prepare
from table import NOT_RUN, judge, known_differences, markdown, result
from workers import PROJECT, Run

from zeropp_fp8.config import RECIPES

sys.path.append(str(PROJECT))
sys.path.append(str(PROJECT / "examples"))

from options import finite, whole

from benchmarks.harness.environment import measured_commit
from benchmarks.harness.results import write_result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), default="deepspeed", help="whose tests they are")
    parser.add_argument("--upstream", type=Path, required=True, help="a checkout of it")
    parser.add_argument(
        "--recipes", nargs="*", default=["lossless", "zeropp"], choices=sorted(RECIPES), metavar="RECIPE"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/upstream"))
    parser.add_argument(
        "--workers", type=whole(1), default=2, help="processes with tests, each with the ranks of one test"
    )
    parser.add_argument("--timeout", type=finite(above=0), default=300, help="seconds a test may take")
    parser.add_argument("--minutes", type=finite(above=0), default=600, help="for all; what is not run by then is told")
    parser.add_argument("--stock-last", action="store_true", help="let stock run only what a recipe fails")
    parser.add_argument("tests", nargs="*", help="ids, files or folders; else what tests/upstream/suites.py names")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    upstream, deadline = arguments.upstream.resolve(), time.monotonic() + 60 * arguments.minutes
    gpus, suite, out = visible_gpus(), SUITES[arguments.suite], arguments.out.resolve()
    folder, environment = prepare(suite, upstream, out)

    def run_of(recipe: str | None) -> Run:
        return Run(folder, out / f"{recipe or 'stock'}.jsonl", recipe, arguments.timeout, gpus, environment)

    chosen = arguments.tests or [name for name in suite.tests if (folder / name).exists()]
    tests = run_of(None).collect(chosen)

    def stock() -> dict[str, dict]:
        finished = run_of(None).finished()
        return {test: finished.get(test, NOT_RUN) for test in tests}

    if not arguments.stock_last:
        run_of(None).run(tests, arguments.workers, deadline)
        tests = [test for test, line in stock().items() if line["outcome"] != NOT_RUN["outcome"]]
    candidates = [test for test, line in stock().items() if line["outcome"] in ("passed", NOT_RUN["outcome"])]
    for recipe in arguments.recipes:
        run_of(recipe).run(candidates, arguments.workers, deadline)
    results = {recipe: run_of(recipe).finished() for recipe in arguments.recipes}
    failed = [test for test in candidates if any(r.get(test, NOT_RUN)["outcome"] == "failed" for r in results.values())]
    run_of(None).run(failed, arguments.workers, deadline)
    known = known_differences()
    judged = {recipe: judge(recipe, stock(), found, known) for recipe, found in results.items()}
    for recipe, found in judged.items():
        print(f"{recipe}: {found['counts']}", flush=True)
    table = {"about": described(suite, upstream, gpus), "stock": stock(), "recipes": judged}
    (arguments.out / "table.json").write_text(json.dumps(table, indent=1))
    head = {"question": "upstream", "date": datetime.date.today().isoformat(), "commit": measured_commit()}
    write_result(arguments.out / "result.json", {**head, "about": table["about"], **result(stock(), results, judged)})
    (arguments.out / "table.md").write_text(markdown(table["stock"], judged, table["about"]))
    print(f"{arguments.out / 'table.md'}")
    raise SystemExit(1 if any(found["regressions"] or found["not run"] for found in judged.values()) else 0)


def visible_gpus() -> list[str]:
    """The GPUs that DeepSpeed will use, as in CUDA_VISIBLE_DEVICES."""
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(index) for index in range(torch.cuda.device_count())]


def described(suite: Suite, upstream: Path, gpus: list[str]) -> dict:
    """Return what was run, where."""
    packages = dict.fromkeys([suite.package, "deepspeed", "torch"])
    return {
        "tests of": f"{suite.package} {version_of(upstream)}",
        "installed": ", ".join(f"{package} {metadata.version(package)}" for package in packages),
        "device": f"{len(gpus)} x {torch.cuda.get_device_name()}" if gpus else "CPU",
    }


def version_of(upstream: Path) -> str:
    """The version that a checkout says it has, or else its commit."""
    for name in ("version.txt", "VERSION"):
        if (upstream / name).exists():
            return (upstream / name).read_text().strip()
    git = ["git", "-C", str(upstream), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
