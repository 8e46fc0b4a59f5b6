"""Random small models, trained by the plugin and by stock ZeRO-3: bit for bit with `lossless`, close with the others.

    ANY_MODEL=1000:3000 python -m pytest tests/system/parity/test_any_model.py -s       # 3000 cases from seed 1000 on
    ANY_MODEL=1234 python -m pytest tests/system/parity/test_any_model.py -s            # the case of one seed
    ANY_MODEL='{"width": 3}' python -m pytest tests/system/parity/test_any_model.py -s  # a case by its text

Without ANY_MODEL, of 200 seeds as many as random_cases.covering needs; all of the 200 with ZEROPP_FP8_TEST_FULL=1.
ANY_MODEL_WITHOUT='early read,skip' leaves out what random_cases.FEATURES names so. A case that fails is made smaller as
long as it fails in the same phase, and printed as such a command.
"""

import os
import re
from collections import Counter, defaultdict

import any_model_jobs as jobs
import random_cases
from random_cases import Case, covering, draw, parsed, smaller
from ranks import RankError, run_ranks
from thinning import FULL

ALL = "0:200"
CHUNK = 50  # cases that share a start of ranks, which takes 0.5 s
START_SECONDS, CASE_SECONDS = 90, 10  # after which a chunk counts as hanging; a case takes 0.4 s on an idle machine
TRIES_TO_SHRINK = 40  # of each failure ...
SHRUNK = 3  # ... of the first few


def chosen_cases() -> list[Case]:
    """Return the cases that ANY_MODEL asks for, else the ones of every run of the tests."""
    asked = os.environ.get("ANY_MODEL", ALL)
    if asked.startswith("{"):
        return [parsed(asked)]
    without = set(filter(None, os.environ.get("ANY_MODEL_WITHOUT", "").split(",")))
    assert without <= random_cases.FEATURES, f"features are {sorted(random_cases.FEATURES)}"
    first, _, count = asked.partition(":")
    cases = [draw(int(first) + i, random_cases.FEATURES - without) for i in range(int(count or 1))]
    return cases if FULL or "ANY_MODEL" in os.environ else covering(cases)


def run(cases: list[Case], phases=("plugin", "stock")):
    """(figures of each case, None), or (None, (index of the case that failed first, its phase, the error))."""
    first = cases[0]
    texts = [case.text() for case in cases]
    try:
        figures = run_ranks(
            jobs.run_cases,
            world=first.world,
            ranks_per_node=first.ranks_per_node,
            timeout=START_SECONDS + CASE_SECONDS * len(cases),
            texts=texts,
            phases=phases,
        )[0]
    except RankError as error:
        named = re.findall(r"^(?:\S+: )?CASE (\w+) (\{.*\})$", str(error), re.MULTILINE)
        assert named, error
        phase, text = named[0] if "did not finish" not in str(error) else named[-1]
        return None, (texts.index(text), phase, str(error))
    return figures, None


def kind_of(case: Case, phase: str, error: str) -> str:
    """Return what a case that did not go through counts as: a failure of the plugin, or a reason why there is none."""
    if phase == "stock":
        return "stock fails"
    if phase == "compare" or "did not finish" in error:
        return "failure"
    if "ConfigError" in error:
        return "refused"
    return "both fail" if run([case], phases=("stock",))[1] else "failure"


def shrunk(case: Case, phase: str) -> Case:
    """The simplest case found that fails in the same phase, where stock goes through."""
    tries = TRIES_TO_SHRINK
    while True:
        for candidate in smaller(case):
            if tries == 0:
                return case
            tries -= 1
            failed = run([candidate])[1]
            if failed and failed[1] == phase and kind_of(candidate, *failed[1:]) == "failure":
                case = candidate
                break
        else:
            return case


def test_any_model():
    """Every case is what stock is, or raises where stock does; few of them do."""
    cases = chosen_cases()
    by_world = defaultdict(list)
    for case in cases:
        by_world[case.world, case.ranks_per_node].append(case)
    counts, figures, failures = Counter(), [], []
    for of_world in by_world.values():
        while of_world:
            chunk = of_world[:CHUNK]
            measured, failed = run(chunk)
            passed = len(chunk)
            if failed:
                passed, phase, error = failed
                case = chunk[passed]
                kind = kind_of(case, phase, error)
                counts[kind] += 1
                print(f"\n{kind} ({phase}): {case.text()}", flush=True)
                if kind == "failure":
                    print(error, flush=True)
                    failures.append((case, phase, error))
            else:
                figures += zip(chunk, measured)
            counts["passed"] += passed
            of_world = of_world[passed + bool(failed) :]
    print(f"\nseeds {cases[0].seed} to {cases[-1].seed}: {dict(counts)}")
    print_figures(figures)
    report = [f"{len(failures)} of {len(cases)} cases fail"]
    for number, (case, phase, error) in enumerate(failures):
        small = shrunk(case, phase) if number < SHRUNK else case
        text = small.text().replace("'", "'\\''")
        report.append(
            f"seed {case.seed}, {phase}; smaller, to run again:\n"
            f"ANY_MODEL='{text}' python -m pytest tests/system/parity/test_any_model.py -s\n{error}"
        )
    assert not failures, "\n\n".join(report)
    without_result = len(cases) - counts["passed"]
    assert without_result <= max(1, 0.1 * len(cases)), f"too many cases say nothing: {dict(counts)}"


def print_figures(figures) -> None:
    """Largest of each figure by recipe, with its seed."""
    largest = {}
    for case, values in figures:
        for name, value in values.items():
            key = (case.recipe, name)
            largest[key] = max(largest.get(key, (0.0, 0)), (value, case.seed))
    for (recipe, name), (value, seed) in sorted(largest.items()):
        print(f"{recipe:12} {name:10} at most {value:.4f} (seed {seed})")
