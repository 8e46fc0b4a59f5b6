"""Reward functions by name: what they give, whose functions are found, and what a function may return."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from common.verifiers import VERIFIERS, columns_of, last_number, needed_columns, reward_function
from hypothesis import given, settings
from hypothesis import strategies as st

OWN = '''
from dataclasses import dataclass

@dataclass
class Settings:
    """Found only if the module is registered while it runs."""
    weight: float = 2.0

def length(completions, **columns):
    return [Settings().weight * len(text) for text in completions]

def only_answer(completions, answer):
    return [float(text == right) for text, right in zip(completions, answer)]

def with_default(prompts, completions, kind=None):
    return [1 if kind is None else kind[i] == "add" for i in range(len(prompts))]

class Scale:
    def __call__(self, prompts, completions, **columns):
        return [None] * len(prompts)

scale = Scale()
number = 3

def no_completions(prompts):
    return []
'''


def rewards(name, completions, prompts=None, **columns):
    return reward_function(name)(prompts=prompts or ["p"] * len(completions), completions=completions, **columns)


def test_names():
    assert set(VERIFIERS) == {"exact_match", "gsm8k", "format"}
    for name in VERIFIERS:
        assert needed_columns(reward_function(name)) == ["answer"]


def test_exact_match():
    completions = ["42", " 42\n", "42.", "-42", "", "4 2", "Abc", "abc"]
    answers = ["42", "42", "42", 42, "42", "42", "abc", " abc "]
    assert rewards("exact_match", completions, answer=answers) == [1, 1, 0, 0, 0, 0, 0, 1]
    assert rewards("exact_match", ["42"], answer=[42], kind=["add"]) == [1]  # other columns do not matter


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("She has 3 + 4 = 7 apples.", "7", 1),
        ("... so\n#### 7", "7", 1),
        ("7 apples, of 12", "7", 0),
        ("It costs $1,234.50.", "1234.5", 1),
        ("It costs $1,234.50.", 1234.50, 1),
        ("18.00", "18", 1),
        ("1,234,567", "1234567", 1),
        ("the numbers 1,2,3", "3", 1),
        ("12,3456", "3456", 1),
        ("The change is -5", "-5", 1),
        ("The change is -5", "5", 0),
        ("10-5", "5", 1),
        ("(10)-5", "5", 1),
        ("x-5", "5", 1),
        ("10 - 5 = 5", "5", 1),
        ("5%", "5", 1),
        ("0.5", "0.50", 1),
        (".5", "5", 1),  # no number begins with a point
        ("no number", "7", 0),
        ("", "7", 0),
        ("\u0667", "7", 0),  # an Arabic digit
        ("7", "#### 7", 1),
        ("nothing", "nothing", 0),  # no number on both sides is no match
    ],
)
def test_gsm8k(completion, answer, reward):
    assert rewards("gsm8k", [completion], answer=[answer]) == [reward]


@settings(derandomize=True, max_examples=200)
@given(st.decimals(-(10**12), 10**12, places=2), st.booleans(), st.sampled_from(["", "The sum is ", "3 and 4: "]))
def test_numbers_as_python_writes_them(number, commas, before):
    written = f"{number:,}" if commas else str(number)
    assert last_number(f"{before}{written}") == number == last_number(f"{before}{written} apples.")
    assert last_number(f"{before}{written}.") == number


def test_format():
    completions = ["42", " 42", "4a", "ab", "ab", "a b", "AB", "", "a1", "-3", "é"]
    answers = ["7", "7", "7", "7", "x", "x", "x", "x", "x", 5, "x"]
    assert rewards("format", completions, answer=answers) == [1, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1]


def test_own_functions_of_a_file_and_of_a_module(tmp_path, monkeypatch):
    file = tmp_path / "my_rewards.py"
    file.write_text(OWN)
    assert rewards(f"{file}:length", ["ab", ""], answer=["x", "y"]) == [4.0, 0.0]
    monkeypatch.syspath_prepend(str(tmp_path))
    assert rewards("my_rewards:length", ["ab"]) == [4.0]
    # Columns that a function has no parameter for are not given to it.
    assert rewards(f"{file}:only_answer", ["ab", "c"], answer=["ab", "d"], kind=["k", "k"]) == [1.0, 0.0]
    assert rewards(f"{file}:with_default", ["a", "b"], kind=["add", "max"]) == [1.0, 0.0]
    assert rewards(f"{file}:with_default", ["a"]) == [1.0]
    assert rewards(f"{file}:scale", ["a", "b"]) == [None, None]
    needed = {
        name: needed_columns(reward_function(f"{file}:{name}")) for name in ("length", "only_answer", "with_default")
    }
    assert needed == {"length": [], "only_answer": ["answer"], "with_default": []}
    monkeypatch.chdir(tmp_path)
    file.write_text("1 / 0")  # a file is run once a process
    assert rewards("my_rewards.py:length", ["abc"]) == [6.0]


def returning(tmp_path, value):
    """A reward function that returns `value`."""
    (tmp_path / "given.py").write_text("def reward(completions, result, **columns):\n    return result[0]\n")
    return lambda count: rewards(f"{tmp_path / 'given.py'}:reward", ["c"] * count, result=[value] * count)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([1, 0.5, True, None], [1.0, 0.5, 1.0, None]),
        ((np.float32(0.5), np.float64(2), np.int64(3), torch.tensor(4)), [0.5, 2.0, 3.0, 4.0]),
        (torch.tensor([1.0, 2.0, 3.0, 4.0]), [1, 2, 3, 4]),
        (np.array([1, 2, 3, 4]), [1, 2, 3, 4]),
    ],
)
def test_results_that_are_taken(value, expected, tmp_path):
    result = returning(tmp_path, value)(4)
    assert result == expected and all(type(reward) in (float, type(None)) for reward in result)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0], r"returned 1 rewards for 2 completions"),
        ([1.0, 2.0, 3.0], r"returned 3 rewards for 2 completions"),
        (None, r"returned NoneType, not a list of numbers"),
        (1.0, r"returned float, not a list of numbers"),
        (torch.tensor(1.0), r"returned float, not a list of numbers"),
        ("ab", r"returned str, not a list of numbers"),
        ({0: 1.0, 1: 2.0}, r"returned dict, not a list of numbers"),
        ([1.0, math.nan], r"returned nan for completion 1; give a finite number, or None"),
        ([math.inf, 1.0], r"returned inf for completion 0"),
        (torch.tensor([1.0, -math.inf]), r"returned -inf for completion 1"),
        ([1.0, "2"], r"returned '2' for completion 1"),
        ([1.0, [2.0]], r"returned \[2.0\] for completion 1"),
        (torch.ones(2, 1), r"returned \[1.0\] for completion 0"),
        ([1.0, 1j], r"returned 1j for completion 1"),
        ([1.0, Decimal("1")], r"returned Decimal\('1'\) for completion 1"),
    ],
)
def test_results_that_are_refused(value, message, tmp_path):
    with pytest.raises(ValueError, match=rf"reward function '.*given.py:reward' {message}"):
        returning(tmp_path, value)(2)


def test_errors_of_names(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text(OWN)
    for name in ("exactmatch", "", ":reward", "module:", "file.py"):
        with pytest.raises(ValueError, match=r"give one of exact_match, gsm8k, format, or \"module:function\""):
            reward_function(name)
    with pytest.raises(FileNotFoundError, match=r"no such file: .*none.py"):
        reward_function(f"{tmp_path}/none.py:reward")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        reward_function("no_such_module:reward")
    for name in ("absent", "number"):
        with pytest.raises(ValueError, match=rf"my_rewards.py has no function '{name}'"):
            reward_function(f"{file}:{name}")
    with pytest.raises(ValueError, match=r"no_completions' has no parameter `completions`"):
        reward_function(f"{file}:no_completions")
    with pytest.raises(ValueError, match=r"needs the columns answer, which the rows lack"):
        rewards("exact_match", ["4"])


def test_columns_of_rows():
    rows = [{"prompt": "p", "answer": "4"}, {"prompt": "q", "answer": "5", "kind": "add"}]
    assert columns_of(rows) == {"answer": ["4", "5"], "kind": [None, "add"]}
    assert columns_of([]) == {}
    assert rewards("exact_match", ["4", "6"], **columns_of(rows)) == [1, 0]
