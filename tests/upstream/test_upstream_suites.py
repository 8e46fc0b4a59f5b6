"""Tests of libraries that train with DeepSpeed: which are chosen, and what stands for the hub and an accelerator."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import accelerate
import datasets
import pytest
from huggingface_hub import try_to_load_from_cache

UPSTREAM = Path(__file__).parent


@pytest.fixture(scope="module")
def upstream():
    """The modules, whose folder the interpreter is given when they run."""
    sys.path.insert(0, str(UPSTREAM))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in ("hub", "suites", "upstream_plugin")})
    sys.path.remove(str(UPSTREAM))


@pytest.mark.parametrize(
    "name, stage3",
    [
        ("test_sft[zero3]", True),
        ("test_sft[zero2]", False),
        ("test_sft[fsdp2]", False),
        ("test_sft[ddp]", False),
        ("test_basic_training_zero3_bf16", True),
        ("test_basic_training_zero2_bf16", False),
        ("test_ds_config_zero2", False),
        ("test_torchrun_accelerate_deepspeed_zero2_env_parity", False),
        ("test_zero_to_fp32_1_param_group[zero_stage3]", True),
        ("test_ds_zero3_no_init_autofill", True),
    ],
)
def test_names_say_which_way_a_test_concerns(upstream, name, stage3):
    assert upstream.upstream_plugin.concerns_stage3(SimpleNamespace(name=name)) is stage3


def test_a_suite_runs_beside_what_is_installed(upstream, tmp_path, monkeypatch):
    """Copied tests, the installed library in the place of the checkout's, and every name in a cache of the hub."""
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "tests/test_some.py").write_text("def test_it(): pass")
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\naddopts = --of-another-project")
    (checkout / "accelerate").mkdir()
    monkeypatch.setenv("PYTHONPATH", "/given")
    folder, environment = upstream.suites.prepare(upstream.suites.SUITES["accelerate"], checkout, out)
    assert sorted(path.name for path in folder.iterdir()) == ["accelerate", "pytest.ini", "tests"]
    assert (folder / "accelerate").resolve() == Path(accelerate.__file__).resolve().parent and (
        folder / "tests/test_some.py"
    ).exists()
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests"]
    collected = subprocess.run(collect, cwd=folder, capture_output=True, text=True)
    assert collected.stdout.startswith("tests/test_some.py::test_it\n"), collected.stdout + collected.stderr
    assert environment["PYTHONPATH"] == os.pathsep.join([str(UPSTREAM / "between"), "/given"])
    cache = Path(environment["HF_HOME"])
    for name, (kind, _) in upstream.hub.MODELS.items():
        for file in ("config.json", *(["model.safetensors", "tokenizer.json"] if kind else [])):
            assert try_to_load_from_cache(name, file, cache_dir=cache / "hub"), (name, file)
    rows = datasets.Dataset.from_file(str(next(cache.glob("datasets/*/standard_preference/*/*/zen-train.arrow"))))
    assert set(rows.column_names) == {"prompt", "chosen", "rejected"} and len(rows) == 18
    assert upstream.suites.prepare(upstream.suites.SUITES["accelerate"], checkout, out) == (folder, environment)


def test_deepspeed_runs_where_it_lies(upstream, tmp_path):
    folder, environment = upstream.suites.prepare(upstream.suites.SUITES["deepspeed"], tmp_path, tmp_path / "out")
    assert folder == tmp_path / "tests" and environment["PYTHONPATH"].startswith(str(folder))
    assert environment.keys() == {"PYTHONPATH"} and not (tmp_path / "out").exists()


def test_modules_are_changed_when_they_have_been_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    spec = importlib.util.spec_from_file_location("between", UPSTREAM / "between/sitecustomize.py")
    between = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(between)
    assert not between.CHANGES.keys() & between.ON_CPU.keys()
    (tmp_path / "some_module_here.py").write_text("VALUE = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(between.CHANGES, "some_module_here", lambda module: setattr(module, "VALUE", module.VALUE + 1))
    assert importlib.import_module("some_module_here").VALUE == 2
