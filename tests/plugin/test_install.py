"""Installing and removing the plugin, and what it says when DeepSpeed is not what it relies on."""

import importlib

import deepspeed
import pytest
from deepspeed.runtime.zero import parameter_offload, partition_parameters, stage3
from torch import nn

import zeropp_fp8
from zeropp_fp8 import plugin
from zeropp_fp8.plugin import install, relied_on


@pytest.fixture(autouse=True)
def leave_stock():
    zeropp_fp8.disable()  # where the package is installed, its hook watches for ds_configs until then
    yield
    zeropp_fp8.disable()


def replaceable():
    return (
        deepspeed.DeepSpeedEngine.__init__,
        partition_parameters.zero3_linear_wrap,
        partition_parameters.Init.__init__,
        deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm"),
    )


def test_enable_is_idempotent_and_disable_restores_every_name():
    stock = replaceable()
    zeropp_fp8.enable()
    first = replaceable()
    assert all(a is not b for a, b in zip(first[:3], stock[:3])) and first[3] is False
    zeropp_fp8.enable()
    assert replaceable() == first
    zeropp_fp8.disable()
    assert replaceable() == stock
    zeropp_fp8.disable()
    assert replaceable() == stock


def test_deepspeed_imported_anew_runs_with_the_plugin():
    """A reload of DeepSpeed's module gives it the same classes, and it is they that are changed."""
    stock = replaceable()
    zeropp_fp8.enable()
    installed = replaceable()
    importlib.reload(deepspeed)
    assert replaceable() == installed
    zeropp_fp8.disable()
    assert replaceable() == stock


def test_classes_of_engines_are_the_same_objects_everywhere():
    """Libraries ask `isinstance(model, deepspeed.DeepSpeedEngine)`, and of either module `type(model) is`."""
    from deepspeed.runtime import engine, hybrid_engine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    stock = engine.DeepSpeedEngine, hybrid_engine.DeepSpeedHybridEngine
    zeropp_fp8.enable()
    assert (deepspeed.DeepSpeedEngine, deepspeed.DeepSpeedHybridEngine) == stock
    assert (engine.DeepSpeedEngine, hybrid_engine.DeepSpeedHybridEngine) == stock
    assert issubclass(PipelineEngine, deepspeed.DeepSpeedEngine)


def test_an_engine_class_of_the_users_own_refuses_the_section():
    class Engine(deepspeed.DeepSpeedEngine):
        pass

    zeropp_fp8.enable()
    with pytest.raises(zeropp_fp8.ConfigError, match=r"with Engine, an engine class of its own.*remove the section"):
        Engine(None, nn.Linear(2, 2), config={"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "zeropp"}})


@pytest.mark.parametrize(
    "owner, name",
    [
        (stage3.DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"),
        (stage3.DeepSpeedZeroOptimizer_Stage3, "initialize_ds_offload"),
        (parameter_offload.DeepSpeedZeRoOffload, "pre_sub_module_backward_function"),
        (partition_parameters, "get_allgather_dtype"),
    ],
)
def test_a_missing_name_is_named_with_the_version(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"{name}.*DeepSpeed {deepspeed.__version__}.*install deepspeed"):
        zeropp_fp8.enable()
    assert not plugin.is_enabled()


def test_a_changed_signature_is_named(monkeypatch):
    monkeypatch.setattr(parameter_offload.DeepSpeedZeRoOffload, "pre_sub_module_forward_function", lambda self, m: None)
    with pytest.raises(RuntimeError, match="pre_sub_module_forward_function taking sub_module"):
        zeropp_fp8.enable()


def test_a_missing_attribute_is_named(monkeypatch):
    monkeypatch.setattr(
        relied_on,
        "RELIED_ON_ATTRIBUTES",
        {("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): "fp16_groups no_such_thing"},
    )
    with pytest.raises(RuntimeError, match="attribute no_such_thing of deepspeed"):
        zeropp_fp8.enable()


def test_run_passes_arguments_through(tmp_path, monkeypatch, capsys):
    """`python -m zeropp_fp8.run SCRIPT ARGS` with the launcher's --local_rank in front."""
    from zeropp_fp8 import run

    script = tmp_path / "script.py"
    script.write_text("import sys, zeropp_fp8.plugin\nprint(__name__, sys.argv[1:], zeropp_fp8.plugin.is_enabled())\n")
    monkeypatch.setattr("sys.argv", ["run"])
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    run.main(["--local_rank=1", str(script), "--a", "b"])
    assert capsys.readouterr().out == "__main__ ['--local_rank=1', '--a', 'b'] True\n"


@pytest.mark.parametrize("argument", ["config_dict_or_path", "config"])
def test_zero_init_refuses_duplicate_keys(argument, tmp_path):
    """As `initialize` does."""
    path = tmp_path / "twice.json"
    path.write_text('{"zero_optimization": {"stage": 1, "stage": 3}}')
    made = install._init_without_in_tree_keys(lambda self, config_dict_or_path=None, config=None: None)
    with pytest.raises(zeropp_fp8.ConfigError, match=r'twice\.json.*duplicate keys "stage"'):
        made(None, **{argument: str(path)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"bf16": {', ": "),
        ('["zeropp_fp8"]', "must be an object"),
        ('{"fp16": {}, "fp16": {}}', "duplicate keys"),
    ],
)
def test_initialize_names_a_broken_file(text, said, tmp_path):
    """DeepSpeed reads the file before there is an engine."""
    import deepspeed

    path = tmp_path / "broken.json"
    path.write_text(text)
    zeropp_fp8.enable()
    try:
        with pytest.raises(zeropp_fp8.ConfigError, match=rf"broken\.json'.*{said}"):
            deepspeed.DeepSpeedConfig(str(path))
    finally:
        zeropp_fp8.disable()


@pytest.mark.parametrize(
    ("words", "said"),
    [(["nope.py"], "there is no script nope.py"), (["-m", "nope.train"], "there is no module nope.train")],
)
def test_run_of_what_is_not_there(words, said, capsys, monkeypatch):
    from zeropp_fp8 import run

    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    with pytest.raises(SystemExit) as stop:
        run.main([*words, "--a"])
    assert stop.value.code == 2 and capsys.readouterr().err == f"zeropp_fp8.run: {said}\n"
    monkeypatch.setenv("RANK", "1")  # one line from one rank
    with pytest.raises(SystemExit):
        run.main([*words, "--a"])
    assert not capsys.readouterr().err


def test_run_without_a_script_says_how(capsys):
    from zeropp_fp8 import run

    with pytest.raises(SystemExit) as stop:
        run.main([])
    assert stop.value.code == 2 and "usage: python -m zeropp_fp8.run" in capsys.readouterr().out


def test_every_module_lets_its_parameters_be_read():
    """As DeepSpeed's walk: also a module in two places, one that knows its parent, and what was attached later."""
    from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict, _inject_parameters

    from zeropp_fp8.zero.offload import _gathers_what_is_read, _order_parameters

    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), None]))
    model.append(model[0])
    model[1].parent = model
    _inject_parameters(model, ZeROOrderedDict)
    model[0].later = nn.ModuleDict({"a": nn.Linear(2, 2)})
    if _order_parameters.__name__ == "<lambda>":  # DeepSpeed 0.18 reads nothing by name of what came later
        model[0].later = None
    for yes in (True, False):
        _gathers_what_is_read(model, yes)
        found = [module._parameters._in_forward for module in model.modules()]
        assert found == [yes] * (4 if model[0].later is None else 6)
