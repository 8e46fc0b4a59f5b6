"""Run all that docs/tour.md shows, in its order: commands, and Python.

    python examples/tour/tour.py

From a clone, with zeropp_fp8 installed. Without a GPU set DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRONG = "examples/tour/wrong.json"  # a command with this file must fail


def steps_of(page: str) -> Iterator[list[str]]:
    """The command lines of a page, and its Python as `python -c`."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", page, flags=re.S | re.M):
        if language == "python":
            yield [sys.executable, "-c", body]
        elif not language:
            yield from map(shlex.split, body.splitlines())


def main() -> None:
    for command in steps_of((ROOT / "docs/tour.md").read_text()):
        print(f"\n$ {command[2] if command[1] == '-c' else shlex.join(command)}", flush=True)
        if command[0] == "python":
            command[0] = sys.executable
        if command[0] == "torchrun":
            command[:1] = [sys.executable, "-m", "torch.distributed.run"]
        done = subprocess.run(command, cwd=ROOT)
        if (done.returncode != 0) != (WRONG in command):
            raise SystemExit(f"it ended with status {done.returncode}")


if __name__ == "__main__":
    main()
