"""tests/thinning.py, random_cases.covering: which cases are tried; conftest.py: which files start first."""

from itertools import combinations, product

import pytest
from random_cases import covering, draw
from thinning import latin_square, part_of, thinned

from conftest import LONGEST
from tests.places import ROOT


def test_each_value_comes_and_the_others_go_through_their_product():
    cases = thinned("abcdef", "xy", (1, 2, 3), full=False)
    assert [case[0] for case in cases] == list("abcdef")
    assert sorted(case[1:] for case in cases) == [(one, two) for one in "xy" for two in (1, 2, 3)]
    assert len(thinned("abcdef", "xy", (1, 2, 3), full=True)) == 36


def test_a_value_that_would_never_come_is_an_error():
    with pytest.raises(ValueError, match=r"'z'.* give the longest parameter first"):
        thinned("ab", "xyz", full=False)


@pytest.mark.parametrize("third", ["xy", "xyz"])
def test_every_two_values_meet_in_a_latin_square(third):
    first, second = "abc", range(12)
    cases = latin_square(first, second, third)
    assert [case[:2] for case in cases] == list(product(first, second))
    assert {(one, other) for one, _, other in cases} == set(product(first, third))
    assert {case[1:] for case in cases} == set(product(second, third))


def test_a_latin_square_that_would_miss_some_is_an_error():
    with pytest.raises(ValueError, match="give the shortest parameter last"):
        latin_square("ab", "abc", "xyz")


def test_random_cases_that_stand_for_others():
    """No two traits that meet bit parity in any of them are lost, no trait that meets rounding, and no recipe."""
    cases = [draw(seed) for seed in range(200)]
    chosen = covering(cases)
    assert 80 < len(chosen) < 130 and all(case in cases for case in chosen)
    for meets in (
        lambda case: {frozenset(two) for two in combinations(case.traits, 2)} if case.is_lossless else set(),
        lambda case: set() if case.is_lossless else {*case.traits, case.recipe},
    ):
        assert set().union(*map(meets, chosen)) == set().union(*map(meets, cases))


def test_files_that_start_first_are_there():
    there = {
        path.stem for folder in ("tests", "benchmarks", "examples") for path in (ROOT / folder).glob("**/test_*.py")
    }
    assert {f"test_{name}" for name in LONGEST.split()} <= there


def test_both_parts_have_everything():
    functions = ["long"] * 5 + ["short"] * 2 + [None] * 4 + ["long"]
    first, second = (part_of(functions, part) for part in (0, 1))
    for function, in_first, in_second in zip(functions, first, second):
        assert in_first != in_second if function == "long" else in_first and in_second
    assert first[:5] == [True, False, True, False, True] and second[11]
