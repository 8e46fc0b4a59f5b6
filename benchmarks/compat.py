"""The parity suite on other versions of DeepSpeed and torch: does what is supported hold at both ends?

    python -m benchmarks.compat 0.18.0:2.11.0 0.19.8:2.15.0
    python -m benchmarks.compat 0.18.9                                     (with the torch of this environment)

A DeepSpeed, and a torch with all that it asks for, lie in folders of their own below compat/ of this environment, which
are read before the rest of it; pip fills those that are not there. Beside the oldest DeepSpeed that setup.cfg admits
lie the oldest of all else that it gives a lower bound, but torch and triton: lowest bounds. Tests with ranks on the
CPU, over gloo: parity with stock, DeepSpeed's features, checkpoints, refusals. The exit status is 1 where one fails.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.results import append_to, begin_result, end_result
from examples.options import new_file, whole

PARITY = "system/parity"
PARTS = ("plugin/test_install", f"{PARITY}/test_parity", f"{PARITY}/test_breadth", f"{PARITY}/test_backwards")
TESTS = (*PARTS, f"{PARITY}/test_zero")
CHOSEN = " or ".join((*(name.rpartition("/")[2] for name in PARTS), "checkpoints", "refusals", "hpz"))
FOLDER = Path(sys.prefix, "compat")
NAMED = ("deepspeed", "torch")  # by a pair
# In a folder each, with pip's options: no DeepSpeed is built, which has nothing compiled, and what asks for torch takes
# the one that is there. The rest of the lowest bounds is one folder.
ALONE = {"deepspeed": ("--no-build-isolation", "--no-deps"), "torch": ()}
ALONE |= dict.fromkeys(("peft", "accelerate"), ("--no-deps",))
VERSIONS = """
import json, sys, importlib.metadata as installed
from benchmarks.harness import environment
print(json.dumps(environment.versions() | {name: installed.version(name) for name in sys.argv[1:]}))
"""


def lowest_bounds() -> dict[str, str]:
    """Package -> the oldest version that setup.cfg admits; torch is named by a pair, and brings its triton."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = map(Requirement, config["options"]["install_requires"].strip().split("\n"))
    bounds = {of.name: each.version for of in needed for each in of.specifier if each.operator == ">="}
    return {name: bounds[name] for name in bounds if name not in ("torch", "triton")}


def installed(packages: dict[str, str], options: Sequence[str] = ()) -> Path:
    """The folder with these versions of packages, which is there as a whole or not at all."""
    folder = FOLDER / "-".join(f"{name}-{version}" for name, version in packages.items())
    if not folder.is_dir():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as made:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{made}/new", *options]
            subprocess.run([*pip, *(f"{name}=={version}" for name, version in packages.items())], check=True)
            Path(made, "new").rename(folder)
    return folder


def tested(pair: str, workers: int) -> dict:
    """A row: what is there, and how the tests ended, with what those say that did not pass."""
    wanted, lowest = dict(zip(NAMED, pair.split(":"))), lowest_bounds()
    if Version(wanted["deepspeed"]) == Version(lowest["deepspeed"]):
        wanted = {**lowest, **wanted}
    together = {name: wanted[name] for name in wanted if name not in ALONE}
    folders = [installed(together)] if together else []  # before torch, which brings its own of some
    folders += [installed({name: wanted[name]}, options) for name, options in ALONE.items() if name in wanted]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))}
    versions = json.loads(subprocess.check_output([sys.executable, "-c", VERSIONS, *lowest], env=environment, cwd=ROOT))
    for package, version in wanted.items():
        if Version(versions[package].partition("+")[0]) != Version(version):
            sys.exit(f"compat: {package} is {versions[package]} and not {version}: what is read before {FOLDER}?")
    print(", ".join(f"{name} {version}" for name, version in versions.items() if version), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report, start = Path(folder, "report.xml"), time.monotonic()
        pytest = [sys.executable, "-m", "pytest", "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
        chosen = [*(f"tests/{name}.py" for name in TESTS), "-k", CHOSEN, f"--junitxml={report}"]
        status = subprocess.run([*pytest, *chosen], env=environment, cwd=ROOT).returncode
        if status not in (0, 1):  # that of failed tests
            sys.exit(f"compat: pytest ended with status {status}, which says nothing of {pair}")
        return {"versions": versions, "seconds": round(time.monotonic() - start), **ended(report.read_text())}


def ended(report: str) -> dict:
    """Of pytest's XML: how many passed; of the others what they say, by name."""
    found: dict = {"passed": 0, "skipped": {}, "failed": {}}
    for case in xml.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        outcome = next((each for each in case if each.tag in ("skipped", "failure", "error")), None)
        if outcome is None:
            found["passed"] += 1
        else:
            said = (outcome.get("message") or "").strip().partition("\n")[0]
            found["skipped" if outcome.tag == "skipped" else "failed"][name] = said
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", metavar="DEEPSPEED[:TORCH]", help="versions")
    parser.add_argument("--workers", type=whole(1), default=2, help="files of tests at a time (default %(default)s)")
    parser.add_argument("--out", type=new_file, default="runs/compat.json", help="JSON file (default %(default)s)")
    args = parser.parse_args()
    head = describe("compat")
    del head["versions"]  # each row has its own
    begin_result(args.out, head)
    for pair in args.pairs:
        append_to(args.out, "rows", tested(pair, args.workers))
    result = end_result(args.out)
    for row in result["rows"]:
        what = f"DeepSpeed {row['versions']['deepspeed']}, torch {row['versions']['torch']}"
        print(f"{what}: {row['passed']} passed, {len(row['skipped'])} skipped, {len(row['failed'])} failed")
    sys.exit(any(row["failed"] for row in result["rows"]))


if __name__ == "__main__":
    main()
