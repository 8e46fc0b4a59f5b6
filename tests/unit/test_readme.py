"""What the README shows is what the repository holds."""

import json
import re
from pathlib import Path

import pytest

from zeropp_fp8.config import RECIPES, SECTION, resolve

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def code_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_the_ds_config_shown_is_the_recipe_file():
    (shown,) = (json.loads(block) for block in code_blocks("json"))
    assert shown == json.loads((ROOT / "ds_configs/zeropp.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_file_and_a_line(recipe):
    config = json.loads((ROOT / f"ds_configs/{recipe}.json").read_text())
    assert resolve(config).recipe == recipe == config[SECTION]["recipe"]
    assert f"| `{recipe}` |" in README


def test_every_path_named_exists():
    named = re.findall(r"`((?:ds_configs|examples|benchmarks|tests)/[\w./-]+)`", README)
    assert named
    for path in named:
        assert (ROOT / path).exists(), path


def test_make_targets_named_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([\w-]+)", README)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_every_placeholder_is_filled():
    assert "@@" not in README


def test_the_python_shown_runs():
    import zeropp_fp8

    for block in code_blocks("python"):
        names = re.findall(r"zeropp_fp8\.(\w+)\(", block)
        assert all(callable(getattr(zeropp_fp8, name)) for name in names)
        imports = [line for line in block.splitlines() if line.startswith("from zeropp_fp8")]
        assert names or imports
        for line in imports:
            exec(line, {})  # raises ImportError
