"""benchmarks/harness: result files, jobs in order, the commit that is measured; and how the benchmarks are built."""

import argparse
import ast
import json
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import ARCHIVED, before_after, compat
from benchmarks.harness import command, environment, question, results
from benchmarks.harness.sizes import SIZES, flops_per_token
from tests.places import ROOT

BENCHMARKS = ROOT / "benchmarks"
QUESTIONS = sorted(path for path in BENCHMARKS.glob("*.py") if path.name != "__init__.py")


def imported(path):
    """Names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", QUESTIONS, ids=[path.stem for path in QUESTIONS])
def test_no_question_imports_another(path):
    others = {f"benchmarks.{other.stem}" for other in QUESTIONS}
    assert not others & set(imported(path))


def test_the_harness_imports_no_question_and_nobody_edits_the_path():
    others = {f"benchmarks.{other.stem}" for other in QUESTIONS}
    for path in (BENCHMARKS / "harness").glob("*.py"):
        assert not others & set(imported(path)), path
    for path in BENCHMARKS.rglob("*.py"):
        assert path == Path(__file__) or "sys.path" not in path.read_text(), path


def test_results_are_where_their_question_says():
    for path in (BENCHMARKS / "results").rglob("*.json"):
        result = json.loads(path.read_text())
        assert result["question"] == path.parent.name, path
        answered = path.parent.name in {*ARCHIVED, "demo", "upstream"}  # the last two are not questions of this folder
        assert (BENCHMARKS / f"{path.parent.name}.py").is_file() != answered, path
        assert result["date"] and (result["commit"] or result["kept_since"]), path
        hardware, ranks, link, *_ = path.stem.split("-")
        assert hardware in ("cpu", "h100", "h200") and ranks.isdecimal() and link, path
        assert result["finished"] in (True, False), path


def test_a_result_from_begin_to_end(tmp_path):
    path = tmp_path / "new" / "result.json"
    results.begin_result(path, {"question": "none", "command": "python -m benchmarks.none"})
    results.append_to(path, "rows", {"times_ms": [1.5, 2, 3e-5]})
    results.append_to(path, "more", "a word")
    with pytest.raises(results.UnfinishedError, match=r"result\.json: .* cut short; .*python -m benchmarks\.none"):
        results.finished_result(path)
    assert results.end_result(path, comparison=[]) == results.finished_result(path) == results.read_result(path)
    result = results.read_result(path)
    assert result["rows"] == [{"times_ms": [1.5, 2, 3e-5]}] and result["more"] == ["a word"]
    assert "started" not in result and result["finished"] and '"times_ms": [1.5, 2, 3e-05]' in path.read_text()


def test_a_file_that_does_not_say_is_not_finished(tmp_path):
    (tmp_path / "old.json").write_text('{"rows": []}')
    with pytest.raises(results.UnfinishedError):
        results.finished_result(tmp_path / "old.json")


def test_the_commit_that_is_measured(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setenv("ZEROPP_FP8_COMMIT", "")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(SystemExit, match="set ZEROPP_FP8_COMMIT"):
        environment.measured_commit()
    (tmp_path / "file").write_text("1")
    git("init", "-q")
    git("add", "file")
    git("commit", "-qm", "one")
    clean = environment.measured_commit()
    assert len(clean) == 7 and set(clean) <= set("0123456789abcdef")
    (tmp_path / "file").write_text("2")
    assert environment.measured_commit() == clean + "+"
    monkeypatch.setenv("ZEROPP_FP8_COMMIT", "abc1234")
    assert environment.measured_commit() == "abc1234"


def test_order_of_jobs():
    args = argparse.Namespace(rounds=2, runs=["a", "b"], ranks=2)
    together = question.rounds(args)
    assert [(job.runs, job.arguments) for job in together] == [(["a", "b"], {"round": 0}), (["b", "a"], {"round": 1})]
    args.ranks = 1
    assert [job.runs for job in question.rounds(args)] == [["a"], ["b"], ["b"], ["a"]]


def test_runs_are_chosen(capsys):
    parser = command.command("", "none", ("a", "b"), SIZES, "tiny")
    for given, runs in (([], ["a", "b"]), (["--runs", "b,a"], ["b", "a"])):
        args = parser.parse_args(given)
        command.choose_runs(args, parser, ("a", "b"))
        assert args.runs == runs
    with pytest.raises(SystemExit):
        command.choose_runs(parser.parse_args(["--runs", "a,c"]), parser, ("a", "b"))
    assert "unknown run c; runs are a, b" in capsys.readouterr().err


def test_flops_of_a_token():
    """6 for each weight of the linear layers, and attention over half of the positions before; by hand for one size."""
    size = SIZES["tiny-gqa"]
    layer = 256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 768
    assert flops_per_token(size, 10) == 6 * (3 * layer + 256 * 512) + 6 * 3 * 256 * 10


def test_before_and_after(tmp_path, capsys):
    """Both versions at once, each from its own folder; the median over pairs of steps, whatever drifts between them."""
    with pytest.raises(SystemExit):
        before_after.parse(["--before", str(tmp_path)])
    assert "there is no package zeropp_fp8 in it" in capsys.readouterr().err
    (tmp_path / "zeropp_fp8").mkdir()
    (tmp_path / "zeropp_fp8/__init__.py").touch()
    args = before_after.parse(["--before", str(tmp_path), "--runs", "zeropp"])
    jobs = before_after.both_versions(args)
    assert [(job.arguments["version"], job.cwd) for job in jobs] == [("before", str(tmp_path)), ("after", None)]
    assert args.side_by_side == 2 and jobs[0].arguments["turns"] == jobs[1].arguments["turns"]
    times = {"before": [100.0, 200.0, 300.0], "after": [103.0, 206.0, 303.0]}
    rows = [{"run": "zeropp", "version": v, "step_ms": times[v][1], "times_ms": times[v]} for v in times]
    (line,) = before_after.compare([*rows, {"run": "fp8-lm", "version": "after", "times_ms": [1.0]}])
    assert line["percent_slower"] == pytest.approx(3.0) and not line["met"]
    assert line["quartiles_percent"] == pytest.approx([1.0, 3.0])


def test_steps_in_turns(tmp_path, monkeypatch):
    """Two versions in threads: the second's n-th step begins after the first's n-th, and before its next one."""
    order, barrier = [], threading.Barrier(2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)

    def steps(version):
        turns = before_after.Turns(str(tmp_path / "turns"), "zeropp", version, seconds=60)
        barrier.wait()
        for batch in turns.of(iter("abcdef"), 4, torch.device("cpu")):
            order.append((version, batch))

    threads = [threading.Thread(target=steps, args=(version,)) for version in ("after", "before")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == [(version, batch) for batch in "abcd" for version in ("before", "after")]


def test_tests_of_other_versions_are_there():
    assert all((ROOT / f"tests/{name}.py").is_file() for name in compat.TESTS)


def test_how_tests_of_other_versions_ended():
    """By XML as pytest writes it: a test that passed says nothing."""
    case = '<testcase classname="tests.unit.test_a" name="test_{}" time="0.1">{}</testcase>'
    said = (
        ("one", ""),
        ("two[a-b]", '<skipped type="pytest.skip" message="not here">test_a.py:3: not here</skipped>'),
        ("three", '<failure message="assert 1 == 2&#10; + where">a trace</failure>'),
        ("four", '<error message="failed on setup">a trace</error>'),
        ("five", "<system-out>printed</system-out>"),
    )
    report = f"<testsuites><testsuite>{''.join(case.format(*each) for each in said)}</testsuite></testsuites>"
    assert compat.ended(report) == {
        "passed": 2,
        "skipped": {"tests/unit/test_a.py::test_two[a-b]": "not here"},
        "failed": {
            "tests/unit/test_a.py::test_three": "assert 1 == 2",
            "tests/unit/test_a.py::test_four": "failed on setup",
        },
    }
