"""Files for tools outside of Python (pip, pre-commit, continuous integration, citations) say what the code says."""

import configparser
import datetime
import importlib
import re
import runpy

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import zeropp_fp8
from tests.places import ROOT
from zeropp_fp8.__main__ import COMMANDS

SETTINGS = configparser.ConfigParser()
SETTINGS.read(ROOT / "setup.cfg")
MAKEFILE = (ROOT / "Makefile").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
NEEDED = {each.name: each for each in map(Requirement, SETTINGS["options"]["install_requires"].strip().split("\n"))}
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["test"]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


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


def test_pythons_are_the_same_everywhere():
    """Of the metadata, make, the README, and what continuous integration runs."""
    minors = [minor for minor in range(30) if f"3.{minor}" in SpecifierSet(SETTINGS["options"]["python_requires"])]
    first, last = minors[0], minors[-1]
    assert f"(3, {first}) <= sys.version_info < (3, {last + 1})" in MAKEFILE
    assert f"Python 3.{first} to 3.{last}" in (ROOT / "README.md").read_text()
    named = re.findall(r"Python :: (3\.\d+)$", SETTINGS["metadata"]["classifiers"], flags=re.M)
    assert named == WORKFLOW["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in minors]


def test_links_of_the_long_description(tmp_path, monkeypatch):
    """Without an address it is the README; with one, links to files are absolute, and name files that are there."""
    readme = (ROOT / "README.md").read_text()
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    assert given["long_description"] == readme
    (tmp_path / "README.md").write_text(
        readme + "[here](#limits) [there](https://else.where/docs) ![](https://else.where/p.png)\n"
    )
    settings = (ROOT / "setup.cfg").read_text()
    urls = "project_urls =\n    Changes = https://some.where/it/changes\n    Source = https://some.where/it/\n"
    (tmp_path / "setup.cfg").write_text(settings.replace("[metadata]\n", "[metadata]\n" + urls))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "setup.py"))
    link = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")
    before, after = link.findall((tmp_path / "README.md").read_text()), link.findall(given["long_description"])
    assert len(after) == len(before) > 15
    for (picture, old), (_, new) in zip(before, after):
        if old.startswith(("#", "https:")):
            assert new == old
        else:
            assert new == f"https://some.where/it/{'raw' if picture else 'blob'}/HEAD/{old}"
            assert (ROOT / old.partition("#")[0]).is_file(), old


def test_the_console_script(capsys):
    """It is the package's command: the entry point resolves, and --help names the commands."""
    (line,) = lines_of("options.entry_points", "console_scripts")
    name, module, function = re.fullmatch(r"(\S+) = ([\w.]+):(\w+)", line).groups()
    assert name == "zeropp-fp8"
    with pytest.raises(SystemExit) as stop:
        getattr(importlib.import_module(module), function)(["--help"])
    said = capsys.readouterr().out
    assert not stop.value.code and all(command in said for command in COMMANDS)


def test_continuous_integration_runs_what_is_said():
    steps = WORKFLOW["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    targets = re.search(r"^exec make (.*?) <", (ROOT / ".ci/run").read_text(), flags=re.M)[1].split()
    assert targets == ["check", "test"] and all(re.search(rf"^{target}:", MAKEFILE, flags=re.M) for target in targets)


def test_pre_commit_has_the_ruff_of_make():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (pin,) = (pin for pin in PINS if pin.name == "ruff")
    assert repo["repo"].endswith("/ruff-pre-commit") and str(pin.specifier) == "==" + repo["rev"].removeprefix("v")


def test_a_version_has_a_date():
    """The newest of the changelog is that of the code, and a citation has both."""
    version, date = re.search(r"^## \[(.*?)\] - (.*)$", CHANGELOG, flags=re.M).groups()
    assert version == zeropp_fp8.__version__ and datetime.date.fromisoformat(date)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version and citation["date-released"].isoformat() == date
    assert citation["license"] == SETTINGS["metadata"]["license_expression"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_for_issues(path):
    """They are of the shape that the host takes, and name commands and files that are there."""
    text = path.read_text()
    form = yaml.safe_load(text)
    assert {"name", "description", "body"} == set(form)
    for item in form["body"]:
        assert item["attributes"].get("label") or item["attributes"].get("value")
    assert set(re.findall(r"`zeropp-fp8 (\w+)", text)) <= set(COMMANDS)
    assert all((ROOT / name).is_file() for name in re.findall(r"[\w/]+\.md", text))


def test_the_template_of_pull_requests():
    text = (ROOT / ".github/pull_request_template.md").read_text()
    targets = re.findall(r"`make ([\w-]+)`", text)
    assert targets and all(re.search(rf"^{target}:", MAKEFILE, flags=re.M) for target in targets)
    assert all((ROOT / name).exists() for name in re.findall(r"\b(?:[A-Z]+\.md|docs|benchmarks/results)\b", text))
