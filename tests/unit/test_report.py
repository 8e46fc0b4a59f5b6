"""python -m benchmarks.report: the documentation holds what the results say, and nothing else is taken."""

import re

import pytest

from benchmarks.harness import results
from benchmarks.harness.environment import ROOT
from benchmarks.report import __main__ as report
from benchmarks.report import blocks as parts
from benchmarks.report import pictures
from benchmarks.report.blocks import Block

BLOCKS = report.all_blocks()


@pytest.fixture
def documents(tmp_path):
    """A copy of the documents that holds them where the report looks for them."""
    for name in report.DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_the_documentation_is_what_the_results_say(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_a_figure_that_somebody_changed_is_found_and_made_good(documents, capsys):
    page = documents / "docs/results.md"
    right = page.read_text()
    page.write_text(right.replace("| 1883 |", "| 1884 |"))
    assert report.main(["--check"], documents) == 1
    assert capsys.readouterr().out == "docs/results.md: step_time is not what python -m benchmarks.report makes\n"
    assert page.read_text() != right, "--check writes nothing"
    assert report.main([], documents) == 0
    assert page.read_text() == right


def test_every_block_stands_somewhere():
    named = [name for document in report.DOCUMENTS for name in parts.named((ROOT / document).read_text())]
    assert sorted(named) == sorted(BLOCKS)
    assert len(BLOCKS) == sum(len(topic.BLOCKS) for topic in report.TOPICS), "two topics have one name"


def test_a_block_that_nobody_makes():
    with pytest.raises(KeyError, match="no function makes the block unknown"):
        parts.filled("<!-- block: unknown -->\n<!-- end -->", BLOCKS)


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.cut_short])
def test_what_was_cut_short_says_so(name):
    block = BLOCKS[name]
    assert set(block.cut_short) <= set(block.files)
    for file in block.cut_short:
        assert results.read_result(results.RESULTS / f"{file}.json")["finished"] is False, "it need not be named"
        if block.sourced:
            assert re.search(rf"`benchmarks/results/{file}\.json` \([^)]*; cut short\)", block.text())
    with pytest.raises(results.UnfinishedError, match=block.cut_short[0]):
        Block(block.make, block.files).text()


def test_sources():
    made = Block(lambda *given: f"{len(given)} results", ("demo/cpu-4-gloo", "two_nodes/h200-4-25gbit")).text()
    assert made == (
        "2 results\n\nSource: `benchmarks/results/demo/cpu-4-gloo.json` (commit `1db7d34`),\n"
        "`benchmarks/results/two_nodes/h200-4-25gbit.json` (kept since `a5a0d20`).\n"
    )


def test_tables():
    assert parts.table(["", "a"], [["b", ""], ["", ""]]) == "| | a |\n|---|---|\n| b | |\n| | |"
    with pytest.raises(AssertionError):
        parts.table(["a"], [["b", "c"]])
    assert parts.paragraph("a  b\n  c") == "a b c" and parts.paragraph("word " * 40).count("\n") == 1


def test_pictures(tmp_path, monkeypatch):
    """Those that are kept, of the kept results; one's own; what cannot be drawn."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    for name, (_, files) in pictures.KEPT.items():
        assert (results.RESULTS / f"{name}.png").stat().st_size > 10_000
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / f"{file}.json").symlink_to(results.RESULTS / f"{file}.json")
    assert report.main(["--pictures"]) == 0
    for name in pictures.KEPT:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    kept = results.RESULTS / "two_nodes"
    given = [str(tmp_path / "new/own.png"), str(kept / "h200-4-25gbit.json"), str(kept / "h200-4-10_6_4gbit.json")]
    assert report.main(["--draw", *given]) == 0
    assert (tmp_path / "new/own.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="results of kernels: give those of one of two_nodes, convergence"):
        pictures.draw([results.RESULTS / "kernels/h200-1-local.json"], "none.png")
    with pytest.raises(results.UnfinishedError):
        pictures.draw([results.RESULTS / "fp8_lm_policies/h200-1-local.json"], "none.png")
