"""Scripts in processes in which Triton interprets its kernels or compiles them: it decides that when it is imported."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hang_guard import HANG

from tests.places import TESTS, python_path


def _environment(interpret: bool) -> dict[str, str]:
    return {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": python_path()}


@functools.cache
def _server(interpret: bool) -> subprocess.Popen:
    """It ends when this process does, which closes its standard input."""
    return subprocess.Popen(
        [sys.executable, str(TESTS / "triton_server.py")],
        env=_environment(interpret),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(script: str, interpret: bool, processes: int = 1) -> str:
    """Return what a script prints in a new process; an error there is an error of the test.

    In several processes at once, the cases over which the script goes with `for case in mine(cases)`, and what it does
    under `if turn():`, are shared among them; what they print comes one after the other.
    """
    server = _server(interpret)
    with tempfile.TemporaryDirectory() as folder:
        request = {"script": script, "outputs": [f"{folder}/{place}" for place in range(processes)]}
        print(json.dumps(request), file=server.stdin, flush=True)
        with selectors.DefaultSelector() as selector:
            selector.register(server.stdout, selectors.EVENT_READ)
            answered = selector.select(HANG)
        answer = server.stdout.readline() if answered else ""
        printed, errors = (
            "".join(p.read_text() for p in sorted(Path(folder).glob(f"*.{kind}"))) for kind in ("out", "err")
        )
        if not answer:
            _server.cache_clear()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            raise AssertionError(f"no answer in {HANG} s, or the server ended ({server.wait()}):\n{printed}{errors}")
        assert not any(json.loads(answer)), printed + errors
        return printed


def run_python(*arguments: str) -> str:
    """Return what `python arguments` prints, where Triton compiles; an error there is an error of the test."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=_environment(False), capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
