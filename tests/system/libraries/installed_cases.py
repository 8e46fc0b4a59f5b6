"""Cases for test_installed.py, each in a fork of an interpreter that has imported DeepSpeed; prints {case: answer}.

It is read from standard input, as a notebook's cells are: there is no file.
"""

import base64
import json
import os
import sys
import tempfile
import traceback

import deepspeed

# What enable() imports of others, once for all cases.
import deepspeed.runtime.sequence_parallel.ulysses_sp
import deepspeed.runtime.superoffload.superoffload_stage3
import torch
import torch._dynamo

FOLDER = tempfile.mkdtemp()
STOCK = (deepspeed.DeepSpeedConfig.__init__.__wrapped__, deepspeed.zero.Init.__init__.__wrapped__)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, also by stock


def ds_config(zero=(), **more):
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    zero = {"stage": 3, **dict(zero)}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero, **more}


def written(config):
    path = os.path.join(FOLDER, f"{len(os.listdir(FOLDER))}.json")
    with open(path, "w") as file:
        json.dump(config, file)
    return path


def plugin_modules():
    return sorted(name for name in sys.modules if name.partition(".")[0] == "zeropp_fp8")


def trained(config, zero_init=None):
    """The package that the ZeRO stage of an engine is of, after a step."""
    return package(engine_after_a_step(config, zero_init))


def package(engine):
    return type(engine.optimizer).__module__.partition(".")[0]


def engine_after_a_step(config, zero_init=None):
    store = torch.distributed.FileStore(tempfile.mktemp(dir=FOLDER), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    if zero_init is None:
        model = torch.nn.Linear(8, 8)
    else:
        with deepspeed.zero.Init(dtype=torch.float32, **zero_init):
            model = torch.nn.Linear(8, 8)
        assert bool(plugin_modules()) == bool(zero_init)  # it has seen the section
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 8, dtype=next(model.parameters()).dtype)).sum())
    engine.step()
    return engine


SECTION = ds_config(zeropp_fp8={"recipe": "zeropp"})
IN_TREE = ds_config(zero={"zero_quantized_weights": True})


def stock():
    return [trained(ds_config()), plugin_modules()]


def stock_with_a_broken_plugin():
    sys.modules["zeropp_fp8"] = None
    return trained(ds_config())


def broken_plugin():
    sys.modules["zeropp_fp8.plugin"] = None
    errors = []
    for make in (deepspeed.DeepSpeedConfig, lambda config: deepspeed.zero.Init(config_dict_or_path=config)) * 2:
        try:
            make(SECTION)
        except ImportError as error:
            errors.append(str(error))
    return errors


def disabled():
    import zeropp_fp8

    zeropp_fp8.disable()
    return trained(SECTION)


def enabled_by_the_script():
    import zeropp_fp8

    zeropp_fp8.enable()
    found = trained(SECTION)
    zeropp_fp8.disable()
    return [found, (deepspeed.DeepSpeedConfig.__init__, deepspeed.zero.Init.__init__) == STOCK]


def enabled_with(config):
    """[the package, whether its class is stock's own, and whether it is one in every way a library asks]."""
    import zeropp_fp8

    imported_before = deepspeed.DeepSpeedEngine
    zeropp_fp8.enable()
    engine = engine_after_a_step(config)
    engine.destroy()
    classes = (imported_before, deepspeed.DeepSpeedEngine, deepspeed.runtime.engine.DeepSpeedEngine)
    return [package(engine), type(engine) is imported_before, all(isinstance(engine, each) for each in classes)]


def switch(name, value, config):
    os.environ[name] = value
    return trained(config)


CASES = {
    "stock": stock,
    "stock with a broken plugin": stock_with_a_broken_plugin,
    "broken plugin": broken_plugin,
    "initialize": lambda: trained(SECTION),
    "initialize, a file": lambda: trained(written(SECTION)),
    "initialize, base64": lambda: trained(base64.urlsafe_b64encode(json.dumps(SECTION).encode()).decode()),
    "zero.Init": lambda: trained(SECTION, zero_init={"config_dict_or_path": SECTION}),
    "zero.Init, a file by its old name": lambda: trained(SECTION, zero_init={"config": written(SECTION)}),
    "zero.Init without a ds_config": lambda: trained(SECTION, zero_init={}),
    "misspelt": lambda: trained({**ds_config(), "zeropp-fp8": {}}),
    "null": lambda: trained({**ds_config(), "zeropp_fp8": None}),
    "disabled": disabled,
    "enabled by the script": enabled_by_the_script,
    "enabled, a section": lambda: enabled_with(SECTION),
    "enabled, without a section": lambda: enabled_with(ds_config()),
    "enabled, another stage": lambda: enabled_with(ds_config(zero={"stage": 2})),
    "recipe in the environment": lambda: switch("ZEROPP_FP8_RECIPE", "zeropp", ds_config()),
    "ZeRO++ keys, as asked": lambda: switch("ZEROPP_FP8_AUTOLOAD", "1", IN_TREE),
    "unknown switch": lambda: switch("ZEROPP_FP8_AUTOLOAD", "off", SECTION),
}


def answer(case):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = case()
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = json.load(file)
    os.waitpid(child, 0)
    return said


answers = {"file": "__file__" in globals(), "modules": plugin_modules()}
answers.update((name, answer(case)) for name, case in CASES.items())
print("ANSWERS " + json.dumps(answers), flush=True)
