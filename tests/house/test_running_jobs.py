"""One harness drives engines, tests/running.py: a job on ranks is a Spec, events, and what it reads of a Trace.

A job file that needs more asks for another event there, or for a function that drives an engine.
"""

import ast

import pytest

from tests.places import TESTS

DRIVERS = {
    "running.py": "the harness",
    "models.py": "makes engines for it, and for scripts outside of ranks",
    "system/golden/golden_traces.py": "a module that a new interpreter runs, without tests/ on its path",
    "gpu/generation_script.py": "a script of one process on a GPU",
    "gpu/handover_script.py": "a script of one process on a GPU",
    "system/unmodified_script.py": "a user's script for DeepSpeed, in which nothing is the plugin's",
    "system/libraries/installed_cases.py": "runs where the plugin is installed, without tests/",
    "system/libraries/accelerate_jobs.py": "a user's loop with Accelerate",
    "system/frozen/frozen_loading_jobs.py": "a user's loop with Accelerate",
    "system/backward_jobs.py": "several backwards over several forwards, and failing ones, are its subject",
    "system/breadth_jobs.py": "one step, with values that were written between backward and it",
    "system/compute/fp8_checkpoint_jobs.py": "one step, with a gradient that was written before it",
    "system/parity/any_model_jobs.py": "the mean of several forwards, and random events before the step",
    "system/compute/activation_jobs.py": "drives none: backwards of tensors",
    "system/compute/fp8_gradient_jobs.py": "drives none: steps of gradient scales",
}


def drives(source: str, on_ranks: bool) -> list[int]:
    """Lines that make an engine or drive one.

    `on_ranks`: there, what takes a step and is no optimizer, or goes backward from a loss that it is given, is an
    engine, whatever its name.
    """
    lines = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = ast.unparse(node.func.value)
        is_engine = owner.endswith("engine")
        is_step = node.func.attr == "step" and (
            is_engine or (on_ranks and not owner.endswith(("optimizer", "scheduler")))
        )
        is_backward = node.func.attr == "backward" and (is_engine or (on_ranks and bool(node.args)))
        if is_step or is_backward or (owner, node.func.attr) == ("deepspeed", "initialize"):
            lines.append(node.lineno)
    return lines


def found() -> dict[str, list[int]]:
    """{file: `drives`} of all that do."""
    names = {path: path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py")}
    lines = {name: drives(path.read_text(), name.startswith("system/")) for path, name in names.items()}
    return {name: of_file for name, of_file in lines.items() if of_file}


def test_the_harness_alone_drives_engines():
    lines = found()
    assert {name: of_file for name, of_file in lines.items() if name not in DRIVERS} == {}
    assert DRIVERS.keys() - lines.keys() == set(), "these drive no engine any more: take them off the list"


@pytest.mark.parametrize(
    "line",
    [
        "engine.step()",
        "self.engine.backward(loss)",
        "deepspeed.initialize(model=model)",
        "trains.step()",
        "x.backward(y)",
    ],
)
def test_who_drives_an_engine_is_found(line):
    assert drives(line, on_ranks=True) == [1]


@pytest.mark.parametrize(
    "line", ["loss.backward()", "optimizer.step()", "self.scheduler.step()", "stepped(engine, tokens)", "step(running)"]
)
def test_what_trains_without_an_engine_is_not(line):
    assert drives(line, on_ranks=True) == []
    assert drives("y.backward(gradient); pipeline.step()", on_ranks=False) == []
