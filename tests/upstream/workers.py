"""Running pytest over many tests in processes that may hang or die, and going on where a run was cut off.

A process gets some tests. It writes a line for each (see upstream_plugin.py). Where it ends without
having finished a test, that test has failed; what it had not begun goes to another process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock, Thread
from types import MappingProxyType

import psutil

from zeropp_fp8.config import RECIPE_VARIABLE

REPORT = "UPSTREAM_REPORT"  # a variable: the file that one process's tests are told in; no other has it
HERE = Path(__file__).parent
PROJECT = HERE.parent.parent
TESTS_OF_A_PROCESS = 8  # importing torch and DeepSpeed once for so many


class Run:
    """Tests with one recipe, or with none: a file of results that only grows."""

    def __init__(
        self,
        folder: Path,
        results: Path,
        recipe: str | None,
        timeout: float,
        gpus: list[str],
        environment: Mapping[str, str] = MappingProxyType({}),
    ):
        """Of the tests.

        Args:
            folder: where pytest runs.
            timeout: seconds a test.
            gpus: as in CUDA_VISIBLE_DEVICES, none for the CPU.
            environment: what the processes find there besides.
        """
        self.folder, self.results, self.recipe, self.timeout, self.gpus = folder, results, recipe, timeout, gpus
        self.environment = environment
        self.lock = Lock()  # of what follows
        self.batches: list[list[str]] = []
        self.processes: set[subprocess.Popen] = set()
        self.closed = False

    def finished(self) -> dict[str, dict]:
        """The line of every finished test, by its id."""
        return {line["test"]: line for line in lines_of(self.results) if "test" in line}

    def collect(self, arguments: list[str]) -> list[str]:
        """The ids of the tests, in pytest's order."""
        report, output = self._run_pytest(0, ["--collect-only", "-q", *arguments])
        collected = [test for line in report for test in line.get("collected", [])]
        if not collected:
            raise RuntimeError(f"pytest collected nothing in {self.folder}:\n{output}")
        return collected

    def run(self, tests: list[str], workers: int, deadline: float) -> None:
        """Run those that have no result yet, until `deadline` (of time.monotonic())."""
        done = self.finished()
        left = [test for test in tests if test not in done]
        self.batches = [left[at : at + TESTS_OF_A_PROCESS] for at in range(0, len(left), TESTS_OF_A_PROCESS)]
        threads = [Thread(target=self._work, args=(worker,)) for worker in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self.lock:
            self.closed = True
            for process in self.processes:
                kill_group(process)
        for thread in threads:
            thread.join()

    def _work(self, worker: int) -> None:
        while True:
            with self.lock:
                if self.closed or not self.batches:
                    return
                tests = self.batches.pop(0)
            report, output = self._run_pytest(worker, tests)
            results = [line for line in report if "test" in line]
            finished = {line["test"] for line in results}
            begun = [line["started"] for line in report if "started" in line and line["started"] not in finished]
            with self.lock:
                if self.closed:
                    begun = []  # it was cut off, which says nothing about them
                elif not results and not begun:
                    begun = tests[:1]  # the process died before its first test
                died = {"outcome": "failed", "says": f"the process died\n{output}", "engines": 0}
                results += [{"test": test, **died} for test in begun]
                with open(self.results, "a") as file:
                    file.writelines(json.dumps(line) + "\n" for line in results)
                left = [test for test in tests if test not in finished and test not in begun]
                if left:
                    self.batches.insert(0, left)

    def _run_pytest(self, worker: int, arguments: list[str]) -> tuple[list[dict], str]:
        """The lines that pytest has written for these tests, and the end of what it has printed."""
        report, log = self.results.with_suffix(f".{worker}.lines"), self.results.with_suffix(f".{worker}.log")
        given = {**os.environ, **self.environment}
        environment = {
            **given,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(PROJECT), given.get("PYTHONPATH", "")]),
            # DeepSpeed's tests choose ports by the number of a worker of pytest-xdist.
            "PYTEST_XDIST_WORKER": f"gw{worker}",
            REPORT: str(report),
            "UPSTREAM_TIMEOUT": str(self.timeout),
            "DS_UNITTEST_TIMEOUT": str(int(10 * self.timeout)),  # theirs ends the session without naming the test
            RECIPE_VARIABLE: self.recipe or "",
        }
        if self.gpus:  # each worker begins with another one
            first = worker % len(self.gpus)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[first:] + self.gpus[:first])
        command = [sys.executable, "-m", "pytest", "-p", "upstream_plugin", "-p", "no:xdist", "-p", "no:cacheprovider"]
        with open(log, "w") as output:  # not a pipe, which what the tests leave behind would hold open
            with self.lock:
                if self.closed:
                    return [], ""
                process = subprocess.Popen(
                    [*command, *arguments],
                    cwd=self.folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.processes.add(process)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            with self.lock:
                kill_group(process)  # ranks that hang
                self.processes.remove(process)
                process.wait()
            kill_marked(REPORT, str(report))
        written = lines_of(report), log.read_text(errors="replace")[-3000:]
        report.unlink(missing_ok=True)
        log.unlink()
        return written


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process that has not been waited for, with all of its group."""
    os.killpg(process.pid, signal.SIGKILL)


def kill_marked(name: str, value: str) -> None:
    """Kill the processes with this in their environment: launchers give ranks sessions, and so groups, of their own."""

    def alive() -> list[psutil.Process]:  # what has ended, and waits for its parent, has no environment
        found = psutil.process_iter(["environ"])
        return [process for process in found if (process.info["environ"] or {}).get(name) == value]

    while left := alive():
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def lines_of(path: Path) -> list[dict]:
    """The whole lines of JSON of a file; the last one may be cut off."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
