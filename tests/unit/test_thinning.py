"""tests/thinning.py: which cases of a product are tried."""

import pytest
from thinning import thinned


def test_each_value_comes_and_the_others_go_through_their_product():
    cases = thinned("abcdef", "xy", (1, 2, 3), full=False)
    assert [case[0] for case in cases] == list("abcdef")
    assert sorted(case[1:] for case in cases) == [(one, two) for one in "xy" for two in (1, 2, 3)]
    assert len(thinned("abcdef", "xy", (1, 2, 3), full=True)) == 36


def test_a_value_that_would_never_come_is_an_error():
    with pytest.raises(ValueError, match=r"'z'.* give the longest parameter first"):
        thinned("ab", "xyz", full=False)
