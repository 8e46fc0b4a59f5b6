"""docs/tour.md, all of it: what its commands do, and that they show what the page says."""

import importlib.util
import json
import re
import subprocess

import pytest
from hang_guard import HANG

from tests.places import ROOT, python_path

spec = importlib.util.spec_from_file_location("tour", ROOT / "examples/tour/tour.py")
tour = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tour)


def test_the_section_shown_is_that_of_the_file():
    (shown,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs/tour.md").read_text(), flags=re.S)
    of_file, stock = (json.loads((ROOT / f"examples/tour/{name}.json").read_text()) for name in ("zeropp", "stock"))
    assert of_file == stock | json.loads(shown)


def test_all_of_it(tmp_path, monkeypatch, capfd):
    """With fewer steps of a smaller model."""
    page = (ROOT / "docs/tour.md").read_text()
    shorter = page.replace("--steps 40", "--steps 4 --model llama-tiny").replace(
        "--steps 20", "--steps 2 --model llama-tiny"
    )
    shorter = shorter.replace("runs/tour", str(tmp_path))
    assert shorter.count("llama-tiny") == 4
    monkeypatch.setattr(tour.Path, "read_text", lambda path: shorter)
    monkeypatch.setenv("PYTHONPATH", python_path())
    stock_run = subprocess.run
    monkeypatch.setattr(tour.subprocess, "run", lambda *args, **kwargs: stock_run(*args, **kwargs, timeout=HANG))
    tour.main()
    said = capfd.readouterr().out
    sent = re.search(r"between nodes per step: stock ([\d.]+) MB, zeropp ([\d.]+) MB", said)
    assert float(sent[1]) > 3 * float(sent[2]) > 0
    losses = re.search(r"held-out loss: stock ([\d.]+), zeropp ([\d.]+)", said)
    assert float(losses[2]) == pytest.approx(float(losses[1]), rel=0.02)
    for words in ('"int3" is not allowed', '"zero_optimization.stage" is 2', "the same loss", "def "):
        assert words in said, words


def test_it_stops_where_a_command_fails(monkeypatch):
    page = "```\npython -m zeropp_fp8 check nowhere.json\n```\n"
    monkeypatch.setattr(tour.Path, "read_text", lambda path: page)
    with pytest.raises(SystemExit, match="it ended with status 1"):
        tour.main()
