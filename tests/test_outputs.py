"""A path to write to is looked at before a command begins, in the same words by all commands."""

import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.__main__ import COMMANDS
from zeropp_fp8.__main__ import main as command
from zeropp_fp8.numerics import reference
from zeropp_fp8.outputs import labelled, plain, table

FILES = {
    "doctor": ["doctor", "--json"],
    "check": ["check", "no_such_ds_config.json", "--json"],
    "plan": ["plan", "--params", "1e3", "--write"],  # a job that cannot be
}
PICTURES = {
    "plan": ["plan", "--params", "1e3", "--picture"],
    "numerics": ["numerics", "no_such_samples.jsonl", "--picture"],
    "reference": ["reference", "--steps", "1", "--picture"],
}
LAUNCH_LINE = {"reference": ["--", "no-such-command"]}


def refusal(name, words, path, capsys):
    """Return what is said of a path, as the only thing."""
    with pytest.raises(SystemExit) as ended:
        command([*words, str(path), *LAUNCH_LINE.get(name, [])])
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    return said.err.splitlines()[-1]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("name, words", [*FILES.items(), *PICTURES.items()])
def test_where_nothing_can_be_written(name, words, tmp_path, capsys):
    none, folder = tmp_path / "nowhere", tmp_path / "folder.png"
    folder.mkdir()
    said = refusal(name, words, none / "x.png", capsys)
    assert said.endswith(f"{words[-1]}: {none / 'x.png'}: there is no folder {none}; make it first")
    assert refusal(name, words, folder, capsys).endswith(f"{words[-1]}: {folder} is a folder; give a file")


@pytest.mark.parametrize("name, words", PICTURES.items())
def test_what_cannot_be_drawn(name, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(name, words, "x.docx", capsys).endswith("; end the name with one")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert refusal(name, words, "x.png", capsys).endswith("pip install matplotlib")


def test_a_rank_that_writes_nothing_need_not_have_the_folder(monkeypatch, capsys):
    """It goes on, to what such a rank is refused for here."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(SystemExit) as ended:
        command(["doctor", "--timeout", "0.1", "--json", "/nowhere/x.json"])
    assert ended.value.code == 1 and "cannot be reached" in capsys.readouterr().err


def test_json_goes_to_a_file_or_to_stdout_in_all_commands(tmp_path, capsys, monkeypatch):
    """The text is on stdout beside a file, and on stderr where stdout has the JSON."""
    sample = {"engine": 0, "step": 1, "cost": None, "rows": []}
    (tmp_path / "numerics.jsonl").write_text(json.dumps(sample))
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 1, "zero_optimization": {"stage": 3}}')
    step = {"step": 1, "loss": math.nan, "grad_norm": 1.0, "state": 1.0, "data": 1.0, "sketches": []}
    run = reference.Run([step], ["weights"], {"weights": []}, [], [])
    monkeypatch.setattr(reference.Experiment, "run", lambda *given, **changes: run)
    commands = {
        "doctor": ["doctor", "--seconds", "0"],
        "check": ["check", str(tmp_path / "ds_config.json")],
        "plan": ["plan", "--params", "7B", "--methods", "stock"],
        "numerics": ["numerics", str(tmp_path / "numerics.jsonl")],
        "reference": ["reference", "--steps", "1"],
        "bisect": ["bisect", "--by", "grad_norm"],
    }
    assert commands.keys() == COMMANDS.keys() - {"export"}  # a checkpoint is all that it writes
    for name, words in commands.items():
        said = {}
        for target in ([], ["--json"], ["--json", str(tmp_path / "found.json")]):
            with suppress(SystemExit):
                command([*words, *target, *(["--", "true"] if name in ("reference", "bisect") else [])])
            said[len(target)] = capsys.readouterr()
        found = json.loads(said[1].out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert found and found.keys() == json.loads((tmp_path / "found.json").read_text()).keys(), name
        assert said[0].out and said[0].out == said[2].out and said[0].out in said[1].err, name
        (tmp_path / "found.json").unlink()


CELLS = st.text("abc1.%", min_size=1, max_size=9)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5), st.sets(st.sampled_from([0, 1, 2])))
def test_columns_of_a_table_begin_or_end_below_each_other(rows, left):
    heads = ("x0", "x1", "x2")
    rows = [heads, *rows]
    lines = table(rows, words=[heads[column] for column in left])
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row, line in zip(rows, lines, strict=True):
        assert line.split() == list(row) and line == line.rstrip()
        padded, begin = line.ljust(sum(widths) + 4), 0
        for column, width in enumerate(widths):
            cell = padded[begin : begin + width]
            assert cell.startswith(row[column]) if column in left else cell.endswith(row[column])
            begin += width + 2


def test_json_of_a_dataclass_has_what_is_derived_and_no_number_that_is_none():
    @dataclass
    class Found:
        seconds: float
        parts: tuple
        DERIVED = ("twice",)

        @property
        def twice(self):
            return 2 * self.seconds

    said = plain({"found": Found(1.5, (Found(math.inf, ()), "x"))})
    assert json.loads(json.dumps(said)) == {
        "found": {"seconds": 1.5, "parts": [{"seconds": None, "parts": [], "twice": None}, "x"], "twice": 3.0}
    }


def test_a_long_label_does_not_run_into_its_text():
    assert labelled([("device", "CPU")]) == [f"{'device':<14}CPU"]
    long = labelled([("  recipe", "zeropp"), ("  gather_granularity", "parameter")])
    assert [line.split() for line in long] == [["recipe", "zeropp"], ["gather_granularity", "parameter"]]
    assert len({line.index(text) for line, text in zip(long, ("zeropp", "parameter"))}) == 1
