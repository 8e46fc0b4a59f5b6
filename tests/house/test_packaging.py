"""The package's metadata say what the code says, and what was tested."""

import configparser
import importlib
import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.places import ROOT
from zeropp_fp8.__main__ import COMMANDS

SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
MAKEFILE = (ROOT / "Makefile").read_text()
NEEDED = {each.name: each for each in map(Requirement, SETTINGS["options"]["install_requires"].strip().split("\n"))}
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def lines_of(section, key):
    return SETTINGS[section][key].strip().split("\n")


def test_bounds_are_the_versions_that_were_tested():
    """Of DeepSpeed and torch: the oldest and the newest pair of `make test-compat`, and nothing beyond."""
    oldest, newest = (pair.split(":") for pair in re.search(r"^PAIRS \?= (.*)", MAKEFILE, flags=re.M)[1].split())
    for name, first, last in zip(("deepspeed", "torch"), map(Version, oldest), map(Version, newest), strict=True):
        bounds = {each.operator: Version(each.version) for each in NEEDED[name].specifier}
        assert bounds == {">=": first, "<": Version(f"{last.major}.{last.minor + 1}")}, name


def test_the_versions_of_make_are_within_the_bounds():
    """All that install_requires names is pinned for each Python, and a bound of others is not above the pin."""
    assert {pin.name for pin in PINS} >= {name.replace("_", "-") for name in NEEDED}
    for pin in PINS:
        (exact,) = pin.specifier
        needed = NEEDED.get(pin.name.replace("-", "_"), NEEDED.get(pin.name))
        assert exact.operator == "==" and (needed is None or exact.version in needed.specifier), pin


def test_the_console_script(capsys):
    """It is the package's command: the entry point resolves, and --help names the commands."""
    (line,) = lines_of("options.entry_points", "console_scripts")
    name, module, function = re.fullmatch(r"(\S+) = ([\w.]+):(\w+)", line).groups()
    assert name == "zeropp-fp8"
    with pytest.raises(SystemExit) as stop:
        getattr(importlib.import_module(module), function)(["--help"])
    said = capsys.readouterr().out
    assert not stop.value.code and all(command in said for command in COMMANDS)
