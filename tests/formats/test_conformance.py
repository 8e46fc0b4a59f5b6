"""Every format of the registry, with its options, against what all formats promise: the torch code on a CPU."""

import conformance
import pytest
from conformance import CODED, DTYPES, ENTRIES, PLAIN, QUANTIZED, SPECIALS, WHOLE, tensors, with_specials
from hypothesis import given, settings
from hypothesis import strategies as st

EVERY = pytest.mark.parametrize("entry", ENTRIES)


@pytest.mark.parametrize(("entry", "dtype"), [(entry, dtype) for entry in ENTRIES for dtype in DTYPES])
def test_reference(entry, dtype):
    conformance.check_reference(entry, DTYPES[dtype])


@pytest.mark.parametrize("entry", PLAIN)
@settings(max_examples=30, derandomize=True)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=70))
def test_any_numbers(entry, values):
    conformance.check_numbers(entry, values)


@pytest.mark.parametrize("entry", CODED)
def test_every_code(entry):
    conformance.check_codes(entry)


@EVERY
def test_sizes_and_options(entry):
    conformance.check_sizes(entry)


@EVERY
@settings(max_examples=30, derandomize=True)
@given(tensor=tensors())
def test_any_tensor(entry, tensor):
    conformance.check_any_tensor(entry, tensor)


@pytest.mark.parametrize(("entry", "dtype"), [(entry, dtype) for entry in QUANTIZED for dtype in DTYPES])
def test_nan_and_inf(entry, dtype):
    conformance.check_nan(entry, DTYPES[dtype])


@EVERY
def test_rows(entry, monkeypatch):
    conformance.check_rows(entry, monkeypatch)


@EVERY
def test_mean(entry):
    conformance.check_mean(entry)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry not in WHOLE])
@settings(max_examples=15, derandomize=True)
@given(tensor=tensors(), world=st.sampled_from([1, 2, 3, 4, 7]), specials=SPECIALS)
def test_parts(entry, tensor, world, specials):
    conformance.check_parts(entry, with_specials(tensor, specials), world, finite=not specials)


@EVERY
def test_refusals(entry):
    conformance.check_refusals(entry)
