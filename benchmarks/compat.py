"""The parity suite on other versions of DeepSpeed and torch: does what is supported hold at both ends?

    python -m benchmarks.compat 0.18.0:2.11.0 0.19.8:2.15.0
    python -m benchmarks.compat 0.18.9                                     (with the torch of this environment)

A DeepSpeed, and a torch with all that it asks for, lie in folders of their own below compat/ of this environment, which
are read before the rest of it; pip fills those that are not there. Tests with ranks on the CPU, over gloo: parity with
stock, DeepSpeed's features, checkpoints, refusals. The exit status is 1 where one fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from pathlib import Path

from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.results import append_to, begin_result, end_result
from examples.options import new_file, whole

PARITY = "system/parity"
PARTS = ("plugin/test_install", f"{PARITY}/test_parity", f"{PARITY}/test_breadth", f"{PARITY}/test_backwards")
TESTS = (*PARTS, f"{PARITY}/test_zero")
CHOSEN = " or ".join((*(name.rpartition("/")[2] for name in PARTS), "checkpoints", "refusals", "hpz"))
FOLDER = Path(sys.prefix, "compat")
# No DeepSpeed is built: it has nothing compiled, and asks for the torch that is there.
OPTIONS = {"deepspeed": ("--no-build-isolation", "--no-deps"), "torch": ()}
VERSIONS = "import json; from benchmarks.harness import environment; print(json.dumps(environment.versions()))"


def installed(package: str, version: str) -> Path:
    """The folder with a version of a package, which is there as a whole or not at all."""
    folder = FOLDER / f"{package}-{version}"
    if not folder.is_dir():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as made:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", f"{made}/new", *OPTIONS[package]]
            subprocess.run([*pip, f"{package}=={version}"], check=True)
            Path(made, "new").rename(folder)
    return folder


def tested(pair: str, workers: int) -> dict:
    """A row: what is there, and how the tests ended, with what those say that did not pass."""
    wanted = dict(zip(OPTIONS, pair.split(":")))
    folders = [installed(package, version) for package, version in wanted.items()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))}
    versions = json.loads(subprocess.check_output([sys.executable, "-c", VERSIONS], env=environment, cwd=ROOT))
    for package, version in wanted.items():
        if versions[package].partition("+")[0] != version:
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
