"""One snapshot of an engine's numbers, from which all that tells them is made; and a session that is fixed at start."""

import ast
from pathlib import Path

import pytest
import telemetry_jobs as jobs
from ranks import run_two

import zeropp_fp8

PACKAGE = Path(zeropp_fp8.__file__).parent


def assigned(source):
    """Lines that assign to an attribute of something called a session, or delete one."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner.endswith("session"):
                lines.append(node.lineno)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "delattr")):
            lines += [node.lineno] if ast.unparse(node.args[0]).endswith("session") else []
    return lines


def test_who_assigns_to_a_session_is_found():
    for line in ("session.x = 1", "self.session.x += 1", "engine.zeropp_fp8_session.x: int = 1", "del session.x",
                 "setattr(self._session, 'x', 1)", "a, stage.session.x = 1, 2"):  # fmt: skip
        assert assigned(line) == [1], line
    assert assigned("self.session = session\nsession.ledger.kind = 1\nsession.parts.append(x)\ny = session.x") == []


def test_nobody_assigns_to_a_session():
    """Attributes that change have an owner; `session` itself assigns where it is made only."""
    assert {path.name: lines for path in PACKAGE.rglob("*.py") if (lines := assigned(path.read_text()))} == {}
    nodes = ast.walk(ast.parse((PACKAGE / "zero/session.py").read_text()))
    (made,) = (node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Session")
    writers = {
        method.name
        for method in made.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert writers == {"__init__"}


@pytest.mark.parametrize("recipe", ["fp8-lm-o1", "zeropp", "lossless"])
def test_all_that_tells_numbers_tells_the_snapshot(recipe, tmp_path):
    """Monitor, callback, report and line, of the same steps; and steps change no attribute of the session."""
    results = run_two(jobs.told, folder=tmp_path, recipe=recipe)
    for changed, (found, of_run, report, _, _) in results:
        assert changed == []
        sent = sum(links["inter"] for links in report["per_step"].values())
        assert of_run["mb_between_nodes"] == pytest.approx(sent / 1e6, rel=1e-12)
        stock = sum(links["inter"] for links in report["stock_per_step"].values())
        assert of_run["of_stock_between_nodes"] == pytest.approx(sent / stock, rel=1e-12)
        scaling = {name.removeprefix("gradient_"): v for name, v in of_run.items() if name.startswith("gradient_")}
        assert report.get("gradient_scaling", {}) == scaling and bool(scaling) == (recipe == "fp8-lm-o1")
        names = set().union(*found)
        assert names == set(of_run) and bool({n for n in names if "numerics/" in n}) == (recipe != "lossless")
        once = [{name for name in step if name.startswith("step_share")} for step in found]
        assert [len(step) for step in once] == [0] * 6 + [2, 0], "shares are told when they are measured"
        assert {name: found[6][name] for name in once[6]} == {name: of_run[name] for name in once[6]}
    _, (found, of_run, _, line, logged) = results[0]
    assert logged == found
    (line,) = line
    assert f"sends {of_run['mb_between_nodes']:.3f} MB between nodes ({of_run['of_stock_between_nodes']:.3f} x" in line
    assert ("mu" in line) == (recipe == "fp8-lm-o1")
    if recipe == "fp8-lm-o1":
        assert f"mu {of_run['gradient_mu']:.3g}, {100 * of_run['gradient_saturated']:.2g} % at" in line
    assert results[1][1][3] == [], "rank 0 alone prints"
