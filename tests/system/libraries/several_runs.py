"""Several runs of a script under one launcher, each in processes of its own, forked from ones that have imported all.

    deepspeed several_runs.py SCRIPT RUNS
    python several_runs.py SCRIPT RUNS

RUNS is a JSON file: {"imports": [...], "runs": [{"arguments": [...], "port": "...", "log": "path"}, ...]}. A run has
the environment and the --local_rank that the launcher gives, with a master port of its own, and prints into log.RANK (0
without a launcher). After a run that fails there is no other.
"""

import argparse
import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def run(script: str, arguments: list[str], port: str, log: str) -> None:
    """Do what `python SCRIPT ARGUMENTS` does, into a log; ends this process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if "RANK" in os.environ:
        os.environ["MASTER_PORT"] = port
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    status = 1
    try:
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")
    parser.add_argument("script")
    parser.add_argument("runs", type=Path)
    given = parser.parse_args()
    plan = json.loads(given.runs.read_text())
    for name in plan["imports"]:
        importlib.import_module(name)
    from_launcher = [] if given.local_rank is None else [f"--local_rank={given.local_rank}"]
    for number, one in enumerate(plan["runs"]):
        log = f"{one['log']}.{os.environ.get('RANK', 0)}"
        child = os.fork()
        if child == 0:
            run(given.script, [*from_launcher, *one["arguments"]], one["port"], log)
        _, status = os.waitpid(child, 0)
        if status:
            # A launcher then ends the other ranks too.
            sys.exit(f"run {number} failed:\n{Path(log).read_text()[-6000:]}")


if __name__ == "__main__":
    main()
