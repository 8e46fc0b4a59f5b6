"""Where a test is: beside its module's place in the package, or under the promise that it needs ranks for."""

import ast
import configparser
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeropp_fp8
from tests.places import FOLDERS, ROOT, TESTS

PACKAGE = Path(zeropp_fp8.__file__).parent
# Not of one folder of the package: the system on ranks and on GPUs, other projects' suites, and how the code is built.
OTHERS = {"system", "gpu", "upstream", "house"}
# Tests of what several modules of a folder do together.
TOGETHER = {
    "comm/test_collectives.py",
    "compute/test_calls.py",
    "config/test_combinations.py",
    "config/test_config_environment.py",
    "config/test_in_tree_keys.py",
    "config/test_patterns.py",
    "formats/test_bitsandbytes.py",
    "formats/test_conformance.py",
    "formats/test_conformance_kernels.py",
    "kernels/test_adamw_kernel.py",
    "kernels/test_exact_kernels.py",
    "kernels/test_specializations.py",
    "plan/test_plan.py",
    "plan/test_plan_lora.py",
    "zero/owners/test_owners_plan.py",
    "test_running.py",
}


def of_modules():
    """The test files that belong to a folder of the package."""
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS)
        if name.parts[0] not in OTHERS:
            yield name


@pytest.mark.parametrize("name", of_modules(), ids=str)
def test_a_test_lies_where_its_module_does(name):
    """tests/zero/gather/test_units.py tests zeropp_fp8/zero/gather/units.py; kernels/ is one folder in the tests."""
    folder = PACKAGE / name.parent
    assert folder.is_dir(), f"{name.parent} is no folder of the package"
    modules = {path.stem for path in (folder.rglob if name.parent.name == "kernels" else folder.glob)("*.py")}
    assert (name.stem.removeprefix("test_") in modules) != (name.as_posix() in TOGETHER)


def test_each_module_name_of_the_tests_occurs_once():
    """Ranks and tests import by these names, whatever folder a file lies in."""
    folders = (TESTS, ROOT / "benchmarks/tests", ROOT / "examples/rlhf/tests", ROOT / "examples/quantize/tests")
    names = [path.name for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_pytest_and_ranks_import_from_the_same_folders():
    """Pytest has them from setup.cfg, ranks that benchmarks start without it from tests/places.py."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    named = {ROOT / folder for folder in settings["tool:pytest"]["pythonpath"].split()}
    assert {folder for folder in named if folder.is_relative_to(TESTS)} == set(FOLDERS) - {ROOT}


def modules_imported(path: Path) -> Iterator[str]:
    """Names of the modules that a file imports, also within its functions, but for those within a `try`."""
    tree = ast.parse(path.read_text())
    tried = {id(node) for each in ast.walk(tree) if isinstance(each, ast.Try) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if id(node) in tried:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_what_tests_import_is_there():
    """GPU tests and their scripts run rarely: a name that has moved shows here."""
    ours = {path.stem for folder in FOLDERS for path in folder.glob("*.py")}
    for path in sorted(TESTS.rglob("*.py")):
        beside = {each.stem for each in path.parent.glob("*.py")}
        for name in modules_imported(path):
            first = name.partition(".")[0]
            if first in ("vllm", "torchtitan") and path.parent.name == "upstream":
                continue  # of a wheel that is unpacked elsewhere
            found = ours | beside if first not in ("zeropp_fp8", "tests", "benchmarks", "examples") else set()
            assert first in found or importlib.util.find_spec(name), f"{path.relative_to(ROOT)} imports {name}"
