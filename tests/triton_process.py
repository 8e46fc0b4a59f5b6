"""Python processes in which Triton interprets its kernels or compiles them: it decides that when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run(script: str | None, interpret: bool, *arguments: str) -> str:
    """What a script prints, or `python arguments` where it is None; an error of the process is an error of the test."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1" if interpret else "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, *(["-c", script] if script else []), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
