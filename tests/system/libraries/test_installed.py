"""The wheel in an environment of its own: a ds_config with the section is enough, whatever starts the script.

What is around this repository (torch, DeepSpeed, ...) is read from the environment that the tests run in.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from hang_guard import HANG

import zeropp_fp8
from tests.places import ROOT, TESTS

HERE = Path(__file__).parent
TABLE = "zeropp_fp8: recipe zeropp; 1 node(s)"  # what rank 0 prints at start

# On ranks that a launcher starts DeepSpeed would compile an operation that nothing here uses. The libraries are told
# that ranks are on a CPU as docs/cpu.md says.
ON_A_CPU = """
import os

if "LOCAL_RANK" in os.environ:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


def clean_environment(**more):
    left_out = ("PYTHON", "ZEROPP_FP8", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    return {**env, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning", **more}


def run(*command, status=0, input=None, cwd="/", **environment):
    """Standard output and error of a command, and it must end as said."""
    command = [*map(str, command)]
    done = subprocess.run(
        command,
        env=clean_environment(**environment),
        cwd=cwd,
        input=input,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == status, f"exit status {done.returncode}: {command}\n{done.stdout[-6000:]}"
    return done.stdout


def pip(python, *arguments):
    return run(sys.executable, "-m", "pip", "--python", python, *arguments, PIP_DISABLE_PIP_VERSION_CHECK="1")


def environment(folder):
    """The interpreter of a new environment, without pip, with the packages around this repository."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    around = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    packages_of(python).joinpath("around.pth").write_text("\n".join(sorted(around)) + "\n")
    return python


def packages_of(python):
    return next(python.parents[1].glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """(wheel, sdist), built as `make dist` does, the wheel from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def python(distributions, tmp_path_factory):
    """The interpreter of an environment that has the wheel."""
    python = environment(tmp_path_factory.mktemp("installed"))
    pip(python, "install", "--no-deps", "--no-index", distributions[0])
    return python


# -- the package


def test_what_is_in_the_wheel(distributions):
    names = zipfile.ZipFile(distributions[0]).namelist()
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "zeropp_fp8").rglob("*.py")}
    own = {"zeropp_fp8/py.typed", "zeropp_fp8_autoload.py", "zeropp_fp8_autoload.pth"}
    assert {name for name in names if ".dist-info/" not in name} == source | own


def test_installed_and_removed(python):
    """Of the installed package, not of this folder; its version."""
    code = "import zeropp_fp8; print(zeropp_fp8.__file__)"
    assert Path(run(python, "-c", code).strip()) == packages_of(python) / "zeropp_fp8" / "__init__.py"
    said = [run(python, "-m", "zeropp_fp8", "--version", **off) for off in ({}, {"ZEROPP_FP8_AUTOLOAD": "0"})]
    assert [line.split(": ")[0].split("(") for line in said] == [
        [f"zeropp_fp8 {zeropp_fp8.__version__} ", "ds_configs are looked at)\n"],
        [f"zeropp_fp8 {zeropp_fp8.__version__} ", "ds_configs are not looked at"],
    ]
    assert f"Version: {zeropp_fp8.__version__}" in pip(python, "show", "zeropp_fp8")


def test_the_console_script(python):
    """It is on PATH with the wheel, and is the package's command."""
    script = python.with_name("zeropp-fp8")
    assert run(script, "--help") == run(python, "-m", "zeropp_fp8", "--help")
    assert "no command" in run(script, "chekc", status=2)


def test_the_sdist_holds_what_the_demo_needs(distributions, tmp_path):
    """Targets, versions, scripts with all that they import, ds_configs, pages; and no test without its neighbours."""
    shutil.unpack_archive(distributions[1], tmp_path)
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.rglob("test*")} == set()
    assert "examples/pretrain/demo.py" in run("make", "--dry-run", "demo", cwd=folder)
    for script in ("demo", "train"):
        said = run(sys.executable, folder / f"examples/pretrain/{script}.py", "--help", PYTHONPATH=str(folder))
        assert "usage: " in said
    for needed in ("ds_configs/*.json", "examples/*/*.py", "docs/*"):
        there = {path.relative_to(ROOT) for path in ROOT.glob(needed)}
        assert there and there == {path.relative_to(folder) for path in folder.glob(needed)}
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (folder / "README.md").read_text())
    assert (folder / picture).is_file()


def test_the_sdist_with_its_dependencies(distributions, python, tmp_path):
    """The packages that are around satisfy them, or pip would look for others; it installs what the wheel does."""
    from_sdist = environment(tmp_path)
    said = pip(from_sdist, "install", "--no-index", "--no-build-isolation", distributions[1])
    for name in ("deepspeed", "torch", "triton", "transformers", "peft", "accelerate", "pydantic"):
        assert re.search(rf"Requirement already satisfied: {name}\b.*\(from zeropp_fp8==", said), said

    def files(of):
        return {path.relative_to(packages_of(of)) for path in packages_of(of).rglob("zeropp_fp8*/**/*.py")}

    assert files(from_sdist) == files(python) != set()


def test_an_editable_installation(tmp_path):
    python = environment(tmp_path)
    pip(python, "install", "--no-deps", "--no-index", "--no-build-isolation", "--editable", ROOT)
    code = "import sys; print('zeropp_fp8_autoload' in sys.modules); import zeropp_fp8; print(zeropp_fp8.__file__)"
    assert run(python, "-c", code).split() == ["True", str(ROOT / "zeropp_fp8" / "__init__.py")]
    pip(python, "uninstall", "--yes", "zeropp_fp8")
    assert [path.name for path in packages_of(python).iterdir() if "zeropp" in path.name] == []


# -- interpreters, with a DeepSpeed that shows what happens


DEEPSPEED = {
    "deepspeed/__init__.py": """
        import types

        class DeepSpeedConfig:
            def __init__(self, config, mpu=None):
                pass

        class Init:
            def __init__(self, module=None, config_dict_or_path=None, config=None):
                pass

        zero = types.SimpleNamespace(Init=Init)

        def initialize(config):
            DeepSpeedConfig(config)
            import sys
            return "zeropp_fp8" in sys.modules
    """,
    "deepspeed/text.txt": "found",
    "zeropp_fp8.py": """
        def enable():
            import zeropp_fp8_autoload

            zeropp_fp8_autoload.unwatch()
    """,
}
START = "import sys; sys.path.insert(0, {!r})\n"
TRAIN = "import deepspeed; print(deepspeed.initialize({}), deepspeed.initialize({'zeropp_fp8': {}}))"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    for name, text in DEEPSPEED.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return folder


def test_start_imports_nothing(python):
    """Beside what an interpreter imports without it, one module."""
    code = "import sys; print(*sorted(sys.modules))"
    with_it = set(run(python, "-c", code).split())
    pth = packages_of(python) / "zeropp_fp8_autoload.pth"
    pth.rename(pth.with_suffix(".away"))
    try:
        assert with_it - set(run(python, "-c", code).split()) == {"zeropp_fp8_autoload"}
    finally:
        pth.with_suffix(".away").rename(pth)


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ([], {}, "False True"),
        (["-I"], {}, "False True"),
        (["-E", "-s"], {}, "False True"),
        (["-S"], {}, "False False"),  # site, which reads .pth files, is not imported
        ([], {"ZEROPP_FP8_AUTOLOAD": "0"}, "False False"),
        (["-I"], {"ZEROPP_FP8_AUTOLOAD": "0"}, "False False"),
        ([], {"ZEROPP_FP8_AUTOLOAD": "1"}, "True True"),
    ],
)
def test_options_of_the_interpreter(options, environment, expected, python, stand_in):
    assert run(python, *options, "-c", START.format(str(stand_in)) + TRAIN, **environment).strip() == expected


SAME = {
    "found, not run": """
        import copy, importlib.util, pkgutil
        spec = importlib.util.find_spec("deepspeed")
        assert copy.deepcopy(spec).loader.get_filename("deepspeed") == spec.origin
        assert spec.origin.endswith("__init__.py") and spec.loader.get_filename("deepspeed") == spec.origin
        assert spec.loader.get_source("deepspeed").startswith("\\nimport types")
        assert "deepspeed" not in sys.modules and "deepspeed" in [m.name for m in pkgutil.iter_modules()]
    """,
    "the module's own loader": """
        import importlib.resources, inspect, deepspeed
        from importlib.machinery import SourceFileLoader
        assert type(deepspeed.__loader__) is type(deepspeed.__spec__.loader) is SourceFileLoader
        assert importlib.resources.files("deepspeed").joinpath("text.txt").read_text() == "found"
        assert inspect.signature(deepspeed.DeepSpeedConfig).parameters.keys() == {"config", "mpu"}
    """,
    "reloaded": "import importlib, deepspeed; importlib.reload(deepspeed)",
    "imported anew": "import deepspeed; del sys.modules['deepspeed']",
    "lazily": """
        import importlib.util
        spec = importlib.util.find_spec("deepspeed")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        sys.modules["deepspeed"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["deepspeed"])
    """,
    "imported twice by the .pth": "import importlib, zeropp_fp8_autoload; importlib.reload(zeropp_fp8_autoload)",
    "another hook before it and one after it": """
        import importlib.util
        class Hook:
            inside = False
            def find_spec(self, name, path=None, target=None):
                if self.inside or name != "deepspeed":
                    return None
                self.inside = True
                spec = importlib.util.find_spec(name)
                self.inside = False
                return spec
        sys.meta_path[:] = [Hook(), *sys.meta_path, object()]
        sys.meta_path.insert(2, Hook())
    """,
    "in a zip file": """
        import os, shutil, tempfile
        archive = shutil.make_archive(os.path.join(tempfile.mkdtemp(), "archive"), "zip", sys.path[0])
        sys.path[0] = archive
        import zeropp_fp8_autoload, deepspeed
        assert archive in deepspeed.__file__
    """,
}


@pytest.mark.parametrize("case", SAME)
def test_ways_to_import(case, python, stand_in):
    code = START.format(str(stand_in)) + textwrap.dedent(SAME[case]) + "\n" + TRAIN
    assert run(python, "-W", "error", "-c", code).strip() == "False True"


def test_another_folder_of_that_name(python, tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "ds_config.json").write_text("{}")
    (tmp_path / "deepspeed.py").write_text("settings = 3")
    code = START.format(str(tmp_path)) + "sys.path[1:] = [p for p in sys.path[1:] if 'packages' not in p]\n"
    assert run(python, "-W", "error", "-c", code + "import deepspeed; print(deepspeed.settings)") == "3\n"
    (tmp_path / "deepspeed.py").unlink()
    assert "namespace" in run(python, "-W", "error", "-c", code + "import deepspeed; print(deepspeed)").lower()


def test_a_deepspeed_that_is_not_known(python, tmp_path):
    """Its import goes on, and says that nothing is watched."""
    (tmp_path / "deepspeed.py").write_text("class DeepSpeedConfig:\n    pass\ninitialize = print")
    output = run(python, "-c", START.format(str(tmp_path)) + "import deepspeed; print(vars(deepspeed.DeepSpeedConfig))")
    assert (
        "cannot see the ds_configs of this DeepSpeed (AttributeError" in output and "call zeropp_fp8.enable()" in output
    )
    assert "'__init__'" not in output


def test_a_plugin_of_another_version(python, stand_in, tmp_path):
    """Found before the installed one; its enable() knows of no watch."""
    (tmp_path / "zeropp_fp8.py").write_text("def enable():\n    pass")
    code = START.format(str(stand_in)) + START.format(str(tmp_path)) + TRAIN
    error = run(python, "-c", code, status=1).splitlines()[-1]
    assert error.startswith(f"ImportError: {tmp_path / 'zeropp_fp8.py'} is of another version than ")
    assert error.endswith("install zeropp_fp8 again, or set ZEROPP_FP8_AUTOLOAD=0 and call its enable() yourself")


def test_processes_that_a_script_starts(python, stand_in, tmp_path):
    """By each method; nothing is handed over, they start as every interpreter does."""
    script = tmp_path / "script.py"
    script.write_text(
        START.format(str(stand_in))
        + "import multiprocessing\n"
        + f"def train():\n    {TRAIN}\n"
        + "if __name__ == '__main__':\n    for method in ('fork', 'spawn', 'forkserver'):\n"
        + "        child = multiprocessing.get_context(method).Process(target=train)\n"
        + "        child.start()\n        child.join()\n        assert child.exitcode == 0\n"
    )
    assert run(python, script).split("\n") == ["False True"] * 3 + [""]


# -- DeepSpeed itself


def test_every_way_a_ds_config_arrives(python):
    code = "import code, sys; code.InteractiveInterpreter().runsource(sys.stdin.read(), symbol='exec')"
    cases = (HERE / "installed_cases.py").read_text()
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    output = run(python, "-c", code, input=cases, DS_ACCELERATOR="cpu", **rank)
    answers = json.loads(output.partition("ANSWERS ")[2].partition("\n")[0])
    misspelt, null = answers.pop("misspelt"), answers.pop("null")
    assert misspelt.startswith('ConfigError: "zeropp-fp8" means nothing in a ds_config (did you mean "zeropp_fp8"?)')
    assert null.startswith("ConfigError: ") and "must be an object" in null
    assert "'off'; set it to 0 or 1" in answers.pop("unknown switch")
    halted = answers.pop("broken plugin")
    assert len(halted) == 4 and all("zeropp_fp8.plugin" in error for error in halted)
    assert answers.pop("enabled by the script") == ["zeropp_fp8", True]
    assert answers.pop("enabled, a section") == ["zeropp_fp8", False, True]
    for name in ("enabled, without a section", "enabled, another stage"):
        assert answers.pop(name) == ["deepspeed", True, True], name
    assert answers.pop("stock") == ["deepspeed", []] and answers.pop("modules") == []
    assert not answers.pop("file")
    on_stock = {"stock with a broken plugin", "disabled"}
    assert answers == {name: "deepspeed" if name in on_stock else "zeropp_fp8" for name in answers}
    assert len(answers) == 10 and output.count(TABLE) == 8  # those with the section


SECTION = {"zeropp_fp8": {"recipe": "zeropp"}}
ZERO3 = {"zero_optimization": {"stage": 3}, "zero_force_ds_cpu_optimizer": False}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder with ds_configs, what Accelerate asks for, a tiny model and its data."""
    from models import llama
    from trainer_jobs import _characters

    folder = tmp_path_factory.mktemp("job")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(ON_A_CPU)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    script = {"train_micro_batch_size_per_gpu": 16, "optimizer": optimizer, **ZERO3, **SECTION}
    (folder / "script.json").write_text(json.dumps(script))
    batch = dict.fromkeys(
        ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    (folder / "auto.json").write_text(json.dumps({**batch, **ZERO3, "zero_allow_untested_optimizer": True, **SECTION}))
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": str(folder / "auto.json"), "zero3_init_flag": True},
        "num_machines": 1,
        "num_processes": 1,
        "machine_rank": 0,
        "use_cpu": False,
    }
    (folder / "accelerate.yaml").write_text(json.dumps(accelerate))
    llama(layers=2, hidden=32, vocab=128, heads=2).save_pretrained(folder / "model")
    _characters().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = "".join(json.dumps({"text": f"{n} is {3 * n}"}) + "\n" for n in range(16))
    (folder / "data" / "train.jsonl").write_text(rows)
    return folder


WITH_ACCELERATE = """
import torch
from accelerate import Accelerator, PartialState

PartialState(cpu=True)
accelerator = Accelerator()
accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
accelerator.backward(model(torch.ones(4, 8, device=accelerator.device)).sum())
optimizer.step()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: {type(model.optimizer).__module__}")
"""


def launched(python, job, *command):
    env = {"PYTHONPATH": str(job / "site"), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "LOCAL_SIZE": "2"}
    output = run(python, *command, cwd=job, **env)
    assert output.count(TABLE) == 1, output[-6000:]
    return output


def script_of(launcher):
    """Return what the console script of a launcher runs."""
    module, _, function = launcher.partition(":")
    return ["-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


def test_deepspeed(python, job):
    from test_examples import free_port

    options = ["--quiet", "--num_accelerators", 2, "--master_port", free_port()]
    script = [TESTS / "system/unmodified_script.py", "--steps", 2, "--deepspeed", "--deepspeed_config", "script.json"]
    output = launched(python, job, *script_of("deepspeed.launcher.runner:main"), *options, *script)
    assert "1 node(s) x 2 rank(s)" in output and {"rank 0 step 1", "rank 1 step 1"} <= set(
        re.findall(r"rank \d step \d", output)
    )


def test_torchrun(python, job):
    script = [TESTS / "system/unmodified_script.py", "--steps", 2, "--deepspeed_config", "script.json"]
    options = ["--standalone", "--nproc-per-node", 1]
    output = launched(python, job, *script_of("torch.distributed.run:main"), *options, *script)
    assert "rank 0 step 1" in output


def test_accelerate_launch(python, job):
    (job / "script.py").write_text(WITH_ACCELERATE)
    launcher = script_of("accelerate.commands.accelerate_cli:main")
    options = ["launch", "--config_file", "accelerate.yaml", "--num_processes", 2]
    output = launched(python, job, *launcher, *options, "script.py")
    assert all(f"rank {rank} of 2: zeropp_fp8.zero.stage3" in output for rank in (0, 1)), output[-6000:]


def test_trl_on_the_command_line(python, job):
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    settings = "--use_cpu --bf16 False --max_steps 2 --report_to none --save_strategy no --optim adamw_torch"
    paths = "--config_file accelerate.yaml --model_name_or_path model --dataset_name data --output_dir out"
    command = ["sft", *paths.split(), *settings.split(), "--gradient_checkpointing", "False"]
    assert "'train_loss'" in launched(python, job, *script_of("trl.cli.main:main"), *command)
