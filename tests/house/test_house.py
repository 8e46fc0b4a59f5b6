"""The package keeps its size: lines per folder, methods per class, lines per function. These numbers go down only.

Who makes a folder smaller lowers its number; a feature that needs more says so in the commit that raises it. Lines are
those of files, with docstrings and blanks. The aim is 28,000 lines, 25 methods and 60 lines.
"""

import ast
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

import zeropp_fp8
from tests.places import ROOT

PACKAGE = Path(zeropp_fp8.__file__).parent
LINES = {
    "": 1000,  # sharded.py, 252 lines, is the one that knows DeepSpeed's parameters
    "comm": 2060,
    "compute": 2478,
    "config": 1830,
    "doctor": 1441,
    "formats": 2489,
    "fsdp2": 997,
    "kernels": 5099,
    "numerics": 1168,
    "optim": 1183,
    "plan": 1771,
    "plugin": 1775,
    "zero": 3080,
    "zero/checkpoint": 380,
    "zero/export": 435,
    "zero/frozen": 1290,
    "zero/gather": 3064,  # the units of a module are kept, which a step on GPUs asks 56 times
    "zero/generation": 926,
    "zero/handover": 1652,
    "zero/owners": 989,
    "zero/reduce": 1482,
    "zero/states": 941,
}
# What the next features may add to the folders that they touch.
ALLOWED = {"FSDP2": 0}
METHODS = {}
FUNCTIONS = {}
MOST_METHODS, MOST_LINES = 25, 60


def folder_of(path):
    """Of a file: its folder; of zero/, whose folders are features, two levels."""
    parts = path.relative_to(PACKAGE).parts[:-1]
    return "/".join(parts[: 2 if parts[:1] == ("zero",) else 1])


def trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_lines_of_folders():
    lines = Counter()
    for path in PACKAGE.rglob("*.py"):
        lines[folder_of(path)] += len(path.read_text().splitlines())
    assert set(lines) == set(LINES)
    over = {folder: n for folder, n in lines.items() if n > LINES[folder]}
    assert over == {}, "remove as many lines there, or raise LINES and say why (CONTRIBUTING.md, The size of the house)"
    # A number far above what is there would let a folder grow unseen.
    assert {folder: n for folder, n in lines.items() if n < LINES[folder] - 100} == {}


def test_the_budget():
    """Of the whole package, with what the next features may add; 28,000 lines are the aim without them."""
    over = sum(LINES.values()) + sum(ALLOWED.values()) - 37_530
    assert over <= 0, f"{over} lines too many: remove as many elsewhere, see CONTRIBUTING.md, The size of the house"


def test_classes_and_functions():
    classes, functions = {}, {}
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = sum(isinstance(each, ast.FunctionDef) for each in node.body)
            elif isinstance(node, ast.FunctionDef):
                functions[node.name] = max(functions.get(node.name, 0), node.end_lineno - node.lineno + 1)
    large = {name: n for name, n in classes.items() if n > MOST_METHODS}
    long = {name: n for name, n in functions.items() if n > MOST_LINES}
    assert large == METHODS and long == FUNCTIONS


# A relative clause, or an attribute of nothing, is no sentence. A unit follows "per", not "a"; but "bytes a node sends"
# is a clause.
NO_SENTENCE = re.compile(r"(What|Who|Those|Whose|Of)\b")
MEASURE = r"(scale|bytes?|instructions?|numbers|bits|codes?|elements|amax|program|once|registers|number|multiplier)"
UNIT = r"(tensor|parameter|element|block|segment|row|column|step|second|thread|code|number|tile|program)"
NOT_PER = re.compile(rf"(?i:\b{MEASURE}) an? {UNIT}\b(?! (is|carries|looks|sends|takes|has|lies|starts)\b)")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("What a cast has made.", True),
        ("Of codes and scales.", True),
        ("Whatever is there.", False),
        ("FP8 with a scale a tensor.", True),
        ("5 bytes a parameter of states.", True),
        ("The bytes a row carries.", False),
        ("The bytes per row.", False),
    ],
)
def test_plain_words(text, wrong):
    assert bool(NO_SENTENCE.match(text) or NOT_PER.search(text)) == wrong


def not_plain(path, tree):
    """Docstrings that begin with no sentence, and words for "per", in a file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    said = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    wrong = [f"{path.name}: {text}" for text in said if NO_SENTENCE.match(text)]
    with path.open("rb") as file:
        said += [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    return wrong + [f"{path.name}: {found[0]}" for found in map(NOT_PER.search, said) if found]


@pytest.mark.parametrize("folder", LINES)
def test_docstrings_and_comments_are_plain(folder):
    assert [text for path, tree in trees() if folder_of(path) == folder for text in not_plain(path, tree)] == []


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples"])
def test_those_outside_of_the_package_are_plain_too(folder):
    """But for those that begin with "Of": of a test or a figure, it says where that holds."""
    found = [
        text for path in sorted((ROOT / folder).rglob("*.py")) for text in not_plain(path, ast.parse(path.read_text()))
    ]
    assert [text for text in found if not re.match(r"\S+: Of\b", text)] == []


def test_what_a_weight_is_by_its_shape_is_asked_in_one_place():
    """A matrix, a stack of matrices or a vector: formats/shapes.py says which, so that packed experts meet one rule."""
    asks = re.compile(r"len\([\w.()]*shape[\w.()]*\) *(?:[<>]=?|[!=]=)")
    found = {path.name for path, _ in trees() if asks.search(path.read_text())}
    assert found == {"shapes.py"}
