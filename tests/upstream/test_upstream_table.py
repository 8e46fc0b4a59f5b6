"""The table of DeepSpeed's own tests: what counts as a regression, and what as not meant to hold."""

import json
import re

import pytest
from upstream.table import KNOWN_DIFFERENCES, Difference, judge, known_differences, markdown, result

from zeropp_fp8.config import RECIPES


def line(outcome, says="", engines=1):
    return {"outcome": outcome, "says": says, "engines": engines}


STOCK = {
    "a.py::T::holds": line("passed", engines=0),
    "a.py::T::breaks[fp16-3]": line("passed", engines=0),
    "a.py::T::differs[fp16-3]": line("passed", engines=0),
    "a.py::T::skips": line("passed", engines=0),
    "a.py::T::cut_off": line("passed", engines=0),
    "a.py::T::fails_anyway": line("failed", "stock", engines=0),
    "a.py::T::skipped_anyway": line("skipped", "no fp16", engines=0),
}
RESULTS = {
    "a.py::T::holds": line("passed", engines=0),
    "a.py::T::breaks[fp16-3]": line("failed", "AssertionError: wrong\nwhere it stands"),
    "a.py::T::differs[fp16-3]": line("failed", "AssertionError: F.linear is not stock's"),
    "a.py::T::skips": line("skipped", "no GPU"),
}
IDENTITY = Difference(("*differs[fp16-?]",), ("loss*",), "F.linear is not", "who F.linear is")


def test_every_test_that_stock_passes_gets_one_verdict():
    found = judge("lossless", STOCK, RESULTS, [IDENTITY])
    assert found["counts"] == {"passed": 1, "regressions": 1, "not meant to hold": 1, "skipped": 1, "not run": 1}
    assert found["regressions"] == {"a.py::T::breaks[fp16-3]": "AssertionError: wrong\nwhere it stands"}
    assert found["not meant to hold"] == {"a.py::T::differs[fp16-3]": "who F.linear is"}
    assert found["skipped"] == {"a.py::T::skips": "no GPU"} and found["not run"] == ["a.py::T::cut_off"]
    assert found["engines"] == 3


def test_stock_need_not_have_run_what_passes():
    """With --stock-last it runs what a recipe has failed; a failure without its word is no verdict."""
    unknown = {test: line("not run", engines=0) for test in STOCK}
    found = judge("lossless", unknown | {"a.py::T::breaks[fp16-3]": line("passed")}, RESULTS, [])
    assert list(found["regressions"]) == ["a.py::T::breaks[fp16-3]"]
    assert found["counts"]["passed"] == 1 and "a.py::T::differs[fp16-3]" in found["not run"]


@pytest.mark.parametrize(
    "entry",
    [
        Difference(("a.py::T::other*",), ("*",), "F.linear", "another test"),
        Difference(("*differs[fp16-3]",), ("fp8-lm", "qlora"), "F.linear", "another recipe"),
        Difference(("*differs[fp16-3]",), ("*",), "another error", "the test fails for something else"),
        Difference(("*differs[[]fp16-3]",), ("*",), "F.linear", "brackets are part of ids, not of patterns"),
    ],
)
def test_an_entry_covers_its_tests_recipes_and_failure_only(entry):
    found = judge("lossless", STOCK, RESULTS, [entry])
    assert found["counts"]["regressions"] == 2 and not found["not meant to hold"]


@pytest.mark.parametrize(
    "actual, covered",
    [
        ("[[1.02, -4.0], [0., 2.5e-01]], device='cuda:1', dtype=torch.bfloat16", True),
        ("[[1.06, -4.0], [0., 2.5e-01]], device='cuda:1', dtype=torch.bfloat16", False),
        ("[[1.02, -4.0], [0., nan]]", False),
        ("[1.0, -4.0]", False),
    ],
)
def test_a_bound_of_an_entry_is_of_the_largest_expected_value(actual, covered):
    """0.01 of 4."""
    entry = Difference(("*",), ("*",), "differ", "rounding", within=0.01)
    expected = "tensor([[1.0, -4.0], [0., 2.5e-01]], device='cuda:0', dtype=torch.bfloat16)"
    says = f"Gradients differ: actual=tensor({actual}), expected={expected} kwargs={{}}\nwhere"
    assert entry.covers("a.py::T::close", "zeropp", says) is covered
    assert not entry.covers("a.py::T::close", "zeropp", "gradients differ")


def test_the_table_names_regressions_and_reasons():
    text = markdown(STOCK, {"lossless": judge("lossless", STOCK, RESULTS, [IDENTITY])}, {"device": "CPU"})
    assert "* device: CPU" in text and "stock: 1 failed, 5 passed, 1 skipped;" in text
    assert "| `lossless` | 1 | 1 | 1 | 1 | 1 | 3 |" in text
    assert "* `a.py::T::breaks[fp16-3]`: AssertionError: wrong\n" in text and "* 1 x who F.linear is\n" in text


def test_what_a_result_file_keeps():
    """Every test with both endings, reasons, and no folder of somebody's."""
    results = {**RESULTS, "a.py::T::breaks[fp16-3]": line("failed", "no /home/me/file.py there\nmore")}
    kept = result(STOCK, {"lossless": results}, {"lossless": judge("lossless", STOCK, results, [IDENTITY])})
    assert kept["finished"] is False and kept["tests"].keys() == STOCK.keys()
    assert kept["tests"]["a.py::T::breaks[fp16-3]"] == {
        "stock": {"outcome": "passed", "engines": 0},
        "lossless": {"outcome": "failed", "engines": 1, "says": "no file.py there"},
    }
    assert kept["tests"]["a.py::T::differs[fp16-3]"]["lossless"]["reason"] == "who F.linear is"
    assert kept["tests"]["a.py::T::fails_anyway"] == {"stock": {"outcome": "failed", "engines": 0, "says": "stock"}}


@pytest.mark.parametrize("left_out", ["tests", "recipes", "says", "reason"])
@pytest.mark.parametrize("empty", [False, True])
def test_an_entry_without_a_reason_is_refused(tmp_path, left_out, empty):
    entry = {"tests": ["*"], "recipes": ["*"], "says": "x", "reason": "y"}
    entry[left_out] = type(entry[left_out])()
    if not empty:
        del entry[left_out]
    path = tmp_path / "known.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match="every entry has tests, recipes, says and reason"):
        known_differences(path)


def test_the_entries_of_the_repository():
    for entry in known_differences(KNOWN_DIFFERENCES):
        assert re.search(r"\w+ \w+", entry.reason)
        for recipe in entry.recipes:
            assert recipe == "*" or recipe in RECIPES
