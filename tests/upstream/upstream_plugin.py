"""pytest plugin for others' tests (`pytest -p upstream_plugin`): turn a recipe on, choose tests, report each.

With ZEROPP_FP8_RECIPE set, the plugin is enabled in this process and in those that the tests start. Tests whose name or
parameters say another way than ZeRO stage 3 are left out. UPSTREAM_REPORT names a file that gets a line of JSON for
each test that is collected, started and finished, so that what is known survives a process that has to be killed.
"""

from __future__ import annotations

import gc
import json
import multiprocessing.pool
import os
import re
import threading

from zeropp_fp8.config import RECIPE_VARIABLE

STAGE_PARAMETERS = ("zero_stage", "stage")
OTHER_WAYS = re.compile(r"[_\[](zero[12]|ddp|fsdp2?)(?=[_\]-]|$)")  # as a part of a test's id
ENDED = re.compile("returncode|exit status")
RAISED = re.compile(r"^(?:stderr: )?(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception): .*)", re.MULTILINE)
TABLE = "zeropp_fp8: recipe "  # how the table begins that an engine with the plugin prints

IMPORTED = ("torch._dynamo", "deepspeed", "deepspeed.runtime.zero.stage3")
IMPORTED_WITH_A_RECIPE = ("zeropp_fp8.zero.session", "zeropp_fp8.zero.stage3")


def pytest_configure():
    recipe = os.environ.get(RECIPE_VARIABLE)
    if recipe:
        from zeropp_fp8.children import enable_with_children

        enable_with_children()
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        # Ranks are forked by a server. What it has imported, they need not. With GPUs it must not: the import opens
        # CUDA, which a forked process cannot use.
        multiprocessing.set_forkserver_preload([*IMPORTED, *(IMPORTED_WITH_A_RECIPE if recipe else ())])


def write(**line) -> None:
    with open(os.environ["UPSTREAM_REPORT"], "a") as file:
        file.write(json.dumps(line) + "\n")


def concerns_stage3(item) -> bool:
    """Whether a test's name and parameters leave room for stage 3."""
    if OTHER_WAYS.search(item.name):
        return False
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return all(parameters.get(name, 3) == 3 for name in STAGE_PARAMETERS)


def pytest_collection_modifyitems(config, items):
    left_out = [item for item in items if not concerns_stage3(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if concerns_stage3(item)]


def pytest_collection_finish(session):
    if session.config.option.collectonly:
        write(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report):
    if report.failed:
        write(test=report.nodeid, outcome="failed", says=f"not collected: {report.longreprtext[-4000:]}", engines=0)


def pytest_runtest_logstart(nodeid):
    write(started=nodeid)
    global _watch
    _watch = threading.Timer(float(os.environ["UPSTREAM_TIMEOUT"]), give_up, [nodeid])
    _watch.daemon = True
    _watch.start()


def pytest_runtest_logfinish(nodeid):
    _watch.cancel()
    outcomes = {report.when: report for report in _reports}
    _reports.clear()
    failed = [report for report in outcomes.values() if report.failed]
    skipped = [report for report in outcomes.values() if report.skipped]
    outcome = "failed" if failed else "skipped" if skipped else "passed"
    shown = (failed or skipped or [None])[0]
    write(
        test=nodeid,
        outcome=outcome,
        says="" if shown is None else _message(shown),
        engines=max(report.capstdout.count(TABLE) for report in outcomes.values()),  # each has what came before it
        seconds=round(sum(report.duration for report in outcomes.values()), 1),
    )


def pytest_runtest_logreport(report):
    _reports.append(report)


_reports: list = []
_watch: threading.Timer


def _message(report) -> str:
    """Return what a report says: the error's own words first, and where it came from."""
    if report.skipped:
        return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    crash = getattr(report.longrepr, "reprcrash", None)
    words = crash.message if crash else ""
    if ENDED.search(words):  # of a process that the test has started, which says no more
        words = "\n".join([*RAISED.findall(f"{report.capstdout}\n{report.capstderr}")[:1], words])
    return "\n".join(filter(None, [words, report.longreprtext[-4000:]]))


def raised_in_pools() -> list[str]:
    """Return what ranks have raised in pools whose other ranks have not come back.

    A pool tells it only when every rank has come back, and those that wait for the one that raised never do.
    """
    waiting = [found for found in gc.get_objects() if issubclass(type(found), multiprocessing.pool.MapResult)]
    return [repr(found._value) for found in waiting if not found.ready() and not found._success]


def give_up(nodeid: str) -> None:
    """A test takes too long: say why, as far as it is known, and end this process."""
    raised = raised_in_pools()
    says = f"a rank raised {raised[0]}, and others wait" if raised else "hung: no rank has raised anything"
    write(test=nodeid, outcome="failed", says=says, engines=0, seconds=float(os.environ["UPSTREAM_TIMEOUT"]))
    os._exit(3)
