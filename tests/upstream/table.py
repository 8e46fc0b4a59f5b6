"""Verdicts of DeepSpeed's tests on a recipe, against stock in the same run, and the table.

Only tests that stock passes are judged; it need not have run what passes with a recipe. Of those that fail with a
recipe, a test is "not meant to hold" where known_differences.json has an entry with its id, the recipe and words that
the failure says; each entry has its reason. What is left is a regression.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

KNOWN_DIFFERENCES = Path(__file__).parent / "known_differences.json"
NOT_RUN = {"outcome": "not run", "says": "", "engines": 0}
_NUMBERS = re.compile(r"-?\d+\.\d*(?:e[+-]?\d+)?")  # neither NaN nor Inf, nor the number of a device
VERDICTS = ("passed", "regressions", "not meant to hold", "skipped", "not run")


@dataclass(frozen=True)
class Difference:
    """Tests that are not meant to hold with some recipes, and why.

    `tests` and `recipes` are patterns as of file names; `says` is part of what the failing test says. `within`: two
    tensors that it shows may differ by that part of the largest expected value; what shows none is not covered.
    """

    tests: tuple[str, ...]
    recipes: tuple[str, ...]
    says: str
    reason: str
    within: float | None = None

    def covers(self, test: str, recipe: str, says: str) -> bool:
        # "[" begins the parameters of a test's id, and a set of characters in a pattern.
        patterns = [pattern.replace("[", "[[]") for pattern in self.tests]
        return (
            any(fnmatch.fnmatchcase(test, pattern) for pattern in patterns)
            and any(fnmatch.fnmatchcase(recipe, pattern) for pattern in self.recipes)
            and self.says in says
            and (self.within is None or _difference_shown(says) <= self.within)
        )


def _difference_shown(says: str) -> float:
    """max |actual - expected| / max |expected| of the tensors that a failure shows; infinite where it shows none."""
    shown = re.search(r"actual=tensor\((.*?)\), expected=tensor\((.*?)\)(?: kwargs|$)", says, re.DOTALL)
    actual, expected = ([float(n) for n in _NUMBERS.findall(text)] for text in shown.groups()) if shown else ([], [])
    if not expected or len(actual) != len(expected):
        return float("inf")
    return max(abs(a - e) for a, e in zip(actual, expected)) / max(map(abs, expected))


def known_differences(path: Path = KNOWN_DIFFERENCES) -> list[Difference]:
    """The entries of the file.

    Raises:
        ValueError: an entry without tests, recipes, words of the failure or a reason.
    """
    differences = []
    for entry in json.loads(path.read_text()):
        given = {key: entry.get(key) for key in ("tests", "recipes", "says", "reason")}
        if not all(given.values()) or set(entry) - {"within"} != set(given):
            raise ValueError(f"{path.name}: every entry has tests, recipes, says and reason; got {entry}")
        tests, recipes = tuple(given["tests"]), tuple(given["recipes"])
        differences.append(Difference(tests, recipes, given["says"], given["reason"], entry.get("within")))
    return differences


def judge(recipe: str, stock: dict[str, dict], results: dict[str, dict], known: list[Difference]) -> dict:
    """The verdict on every test that stock passes.

    Args:
        stock, results: lines of finished tests (see upstream_plugin.py), by id, without and with the recipe.

    Returns:
        {"counts": {verdict: tests}, "engines": tests in which an engine with the recipe was made,
         "regressions": {test: what it says}, "not meant to hold": {test: reason}, "skipped": {test: what it says},
         "not run": [tests]}
    """
    found: dict = {"regressions": {}, "not meant to hold": {}, "skipped": {}, "not run": []}
    passed = 0
    for test, line in stock.items():
        result = results.get(test)
        if line["outcome"] not in ("passed", NOT_RUN["outcome"]):
            continue
        if result is None or (result["outcome"] == "failed" and line["outcome"] != "passed"):
            found["not run"].append(test)
        elif result["outcome"] == "passed":
            passed += 1
        elif result["outcome"] == "skipped":
            found["skipped"][test] = result["says"]
        else:
            reason = next((entry.reason for entry in known if entry.covers(test, recipe, result["says"])), None)
            kind, text = ("regressions", result["says"]) if reason is None else ("not meant to hold", reason)
            found[kind][test] = text
    counts = {"passed": passed, **{verdict: len(tests) for verdict, tests in found.items()}}
    engines = sum(1 for line in results.values() if line["engines"])
    return {"counts": {verdict: counts[verdict] for verdict in VERDICTS}, "engines": engines, **found}


def result(stock: dict[str, dict], results: dict[str, dict], judged: dict[str, dict]) -> dict:
    """Return what a result file keeps: {"finished": all were run, "tests": {test: {"stock" or recipe: how it ended}}}.

    An ending has "outcome", "engines" and "seconds", and where it is not "passed" the first line of what the test says
    and the reason why it is not meant to hold.
    """

    def ending(line: dict, reason: str | None = None) -> dict:
        kept = {key: line[key] for key in ("outcome", "engines", "seconds") if key in line}
        if line["outcome"] != "passed":
            kept["says"] = re.sub(r"/\S+/", "", _first_line(line["says"]))  # somebody's folders
        return kept if reason is None else {**kept, "reason": reason}

    tests = {
        test: {
            "stock": ending(line),
            **{
                recipe: ending(finished[test], judged[recipe]["not meant to hold"].get(test))
                for recipe, finished in results.items()
                if test in finished
            },
        }
        for test, line in stock.items()
    }
    return {"finished": not any(found["not run"] for found in judged.values()), "tests": tests}


def markdown(stock: dict[str, dict], judged: dict[str, dict], about: dict) -> str:
    """The table as text: a line a recipe, then each regression and each reason."""
    outcomes = Counter(line["outcome"] for line in stock.values())
    lines = [
        "# Others' ZeRO-3 tests with the plugin on",
        "",
        *(f"* {name}: {value}" for name, value in about.items()),
        "* stock: "
        + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
        + "; what it fails "
        "or skips is not judged",
        "",
        "| recipe | passed | regressions | not meant to hold | skipped | not run | made an engine with the recipe |",
        "|---|---|---|---|---|---|---|",
    ]
    for recipe, found in judged.items():
        numbers = [*found["counts"].values(), found["engines"]]
        lines.append(f"| `{recipe}` | " + " | ".join(map(str, numbers)) + " |")
    for recipe, found in judged.items():
        lines += [f"\n## `{recipe}`"] if found["regressions"] or found["not meant to hold"] else []
        if found["regressions"]:
            lines += ["\nRegressions:\n"]
            lines += [f"* `{test}`: {_first_line(says)}" for test, says in found["regressions"].items()]
        if found["not meant to hold"]:
            lines += ["\nNot meant to hold:\n"]
            by_reason = Counter(found["not meant to hold"].values())
            lines += [f"* {count} x {reason}" for reason, count in by_reason.most_common()]
    return "\n".join(lines) + "\n"


def _first_line(text: str, characters: int = 200) -> str:
    return text.strip().partition("\n")[0][:characters]
