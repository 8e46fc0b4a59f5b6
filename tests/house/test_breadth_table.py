"""The table of docs/deepspeed.md: each line says whether a feature works, and names the tests that show it."""

import json
import re

import breadth_jobs
import deepspeed
import pytest
from deepspeed.runtime import config as stock_config
from models import ds_config, section

from tests.places import ROOT
from zeropp_fp8.config import ConfigError

PAGE = (ROOT / "docs/deepspeed.md").read_text()
TABLE = PAGE[PAGE.index("| feature |") :]
ROWS = [[cell.strip() for cell in line[1:-1].split("|")] for line in TABLE.splitlines() if line.startswith("| ")][1:]
UPSTREAM = json.loads((ROOT / "benchmarks/results/upstream/h200-2-nvlink-lossless.json").read_text())["tests"]


def is_test(name):
    """Whether there is a test of this name; of DeepSpeed's, whether some of that file passed and were looked at."""
    if name.startswith("unit/"):
        return any(test.startswith(f"{name}::") and row["outcome"] == "passed" for test, row in UPSTREAM.items())
    path, function, case = re.fullmatch(r"(tests/[\w/]+\.py)::(test_\w+)(?:\[(.+)\])?", name).groups()
    found = re.search(rf"^def {function}\(", (ROOT / path).read_text(), flags=re.M) is not None
    return found and (case is None or case in breadth_jobs.CASES)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_line_names_tests_that_are_there(row):
    feature, verdict, _, tests = row
    named = re.findall(r"`([^`]+)`", tests)
    assert feature and verdict in ("works", "refused")
    assert named and all(map(is_test, named)), named


def test_every_case_has_a_line():
    named = set(re.findall(r"test_beside_stock\[([^`]+)\]`", PAGE))
    assert named == set(breadth_jobs.CASES) and len(ROWS) > 40


@pytest.mark.parametrize("name", ["tests/house/test_docs.py::test_nothing", "unit/v1/zero/test_nothing.py"])
def test_a_test_that_is_not_there_is_found(name):
    assert not is_test(name)


REMOVED = ("sparse_gradients", "progressive_layer_drop", "curriculum_learning", "elasticity")


@pytest.mark.skipif(not hasattr(stock_config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS"), reason="of a later DeepSpeed")
def test_what_deepspeed_has_removed():
    """It says so itself, or where the plugin has replaced it the plugin says it, in DeepSpeed's words."""
    given = ds_config(section("zeropp"))
    refuses = (stock_config.DeepSpeedConfigError, ConfigError)
    for key in REMOVED:
        with pytest.raises(refuses, match="has been removed") as raised:
            deepspeed.DeepSpeedConfig({**given, key: {"enabled": True}})
        assert f"'{key}" in str(raised.value) or f".{key}'" in str(raised.value)
    given["zero_optimization"]["mics_shard_size"] = 2
    with pytest.raises(refuses, match="MiCS ZeRO-3 sharding has been removed"):
        deepspeed.DeepSpeedConfig(given)
    assert not [name for name in stock_config.DEEPSPEED_OPTIMIZERS if "onebit" in name]
