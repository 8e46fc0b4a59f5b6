"""Each option of the section is wanted: a recipe, a ds_config, an example or a measurement sets it, or a reason stands.

What is set to its default by those counts for nothing. `WHY` holds the reasons, and may hold no other option.
"""

import ast
import json
from collections.abc import Iterator

import hjson
import pytest
from common.engines import frozen_ds_config
from config_cases import BF16
from pydantic import BaseModel

from benchmarks import convergence, fp8_lm_convergence, generation, handover, numerics_cost
from benchmarks.harness import engines, lora, peers, rlhf_runs, wire_runs
from tests.places import ROOT
from zeropp_fp8.config import RECIPES, SECTION, PluginConfig, resolve

RESULTS = ROOT / "benchmarks" / "results"
# What the runs of a measurement set, by the folder of its results and the name of a run.
RUNS = {
    "convergence": {run: {"compute": compute} for run, (compute, _) in convergence.COMPUTE.items()},
    "fp8_lm_convergence": fp8_lm_convergence.SECTIONS,
    **dict.fromkeys(("fp8_lm_step", "fp8_lm_memory", "fp8_lm_limits"), engines.SECTIONS),
    "generation": {run: section for run, (section, _, _) in generation.RUNS.items()},
    "handover": {run: section for run, (section, _, _) in handover.RUNS.items()},
    **dict.fromkeys(("lora_step", "lora_memory", "lora_limits", "lora_quality"), lora.SECTIONS),
    "numerics_cost": numerics_cost.SECTIONS,
    **dict.fromkeys(("two_nodes", "one_node", "step_profile"), peers.SECTIONS),
    "rlhf_step": {run: each.section for run, each in rlhf_runs.RUNS.items()},
    "wire_convergence": wire_runs.SECTIONS,
}
WHY = {
    "enabled": "one key switches the plugin off, and the rest of the section stays",
    "weights.skip_modules": "a layer whose weights must not be rounded; `bisect` prints it",
    "gradients.skip_modules": "a layer whose gradients must not be rounded; `bisect` prints it",
    "compute.skip_modules": "a layer that must not compute in low precision; `bisect` prints it",
    "compute.high_precision_gemms": "a GEMM that must not compute in low precision; `bisect` prints it",
    "compute.min_features": "a model of small layers, which convert only with it",
    "compute.allow_fp16": "lifts a refusal: FP8 compute in fp16 may leave fp16's range",
    "frozen.modules": "which weights rest as codes; what DeepSpeed's zero_quantized_nontrainable_weights means",
    "frozen.skip_modules": "a frozen layer that must stay in 16 bits; `bisect` prints it",
    "partition_split": "whole matrices with one owner each, which an optimizer of matrices needs",
    "gather_granularity": "a model without blocks, or in which a block is too large (docs/troubleshooting.md)",
    "trl_generation": "what stays on a rank while TRL generates, for want of memory (docs/integrations.md)",
    "checkpoint.verify": "lets a checkpoint be loaded whose files were changed on purpose",
    "report.diagnose": "a log that must hold nothing else, and measurements, which all switch it off",
    "numerics.every": "switches samples on (docs/numerics.md)",
    "numerics.parts": "what a sample costs (docs/numerics.md)",
    "numerics.file": "where samples go, on a machine whose folder cannot be written",
    "numerics.watch": "switches the watch on (docs/numerics.md)",
    "numerics.spike": "how large a jump of a loss is, which no default knows",
}


def options(model: type[BaseModel] = PluginConfig, within: str = "") -> Iterator[tuple[str, object]]:
    """(name, default) of all leaves of the section."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options(field.annotation, f"{within}{name}.")
        else:
            yield f"{within}{name}", field.default


DEFAULTS = dict(options())


def written(section: dict, within: str = "") -> Iterator[tuple[str, object]]:
    """(name, value) of what a section says."""
    for key, value in section.items():
        name = f"{within}{key}"
        yield from written(value, f"{name}.") if isinstance(value, dict) and name not in DEFAULTS else [(name, value)]


def changed(section: dict) -> set[str]:
    """The options that a section sets to something else than their defaults."""
    return {name for name, value in written(section) if name in DEFAULTS and value != DEFAULTS[name]}


def sections_in(value: object) -> Iterator[dict]:
    """Everything in a JSON document that is a section, or is under the section's name."""
    if isinstance(value, dict):
        parts = {name.split(".")[0] for name in DEFAULTS}
        if value.keys() <= parts and (
            any(isinstance(each, dict) for each in value.values()) or str(value.get("recipe")) in RECIPES
        ):
            yield value
        for each in value.values():
            yield from sections_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from sections_in(each)


def literal(node: ast.expr) -> object:
    """The value of an expression in a script; what is worked out there is some value that is no default."""
    if isinstance(node, ast.Dict):
        return {getattr(key, "value", None): literal(value) for key, value in zip(node.keys, node.values)}
    return node.value if isinstance(node, ast.Constant) else object()


def of_recipes() -> Iterator[dict]:
    yield from RECIPES.values()
    yield {"recipe": "zeropp"}


def of_ds_configs() -> Iterator[dict]:
    for path in (ROOT / "ds_configs").glob("*.json"):
        yield hjson.loads(path.read_text()).get(SECTION, {})


def of_examples() -> Iterator[dict]:
    for path in (ROOT / "examples").rglob("*"):
        if path.suffix == ".json":
            yield from sections_in(json.loads(path.read_text()))
        if path.suffix == ".py":
            dicts = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Dict))
            yield from (each for node in dicts for each in sections_in(literal(node)))
    for recipe in RECIPES:
        config = {**BF16, "zero_optimization": {"stage": 3}, SECTION: {"recipe": recipe}}
        yield frozen_ds_config(config, None).get(SECTION, {})


def of_results() -> Iterator[dict]:
    for path in RESULTS.rglob("*.json"):
        result = json.loads(path.read_text())
        yield from sections_in(result)
        sections = RUNS.get(path.parent.name, {})
        for row in result.get("rows", []) if isinstance(result, dict) else []:
            yield sections.get(row.get("run")) or {}


SOURCES = {"recipe": of_recipes, "ds_config": of_ds_configs, "example": of_examples, "result": of_results}


@pytest.fixture(scope="module")
def wanted():
    """{source: the options that it sets}."""
    return {name: set().union(*map(changed, source())) for name, source in SOURCES.items()}


def test_each_option_is_set_somewhere_or_has_a_reason(wanted):
    unset = DEFAULTS.keys() - set().union(*wanted.values())
    assert unset - WHY.keys() == set(), "options that nobody sets: delete them, or say in WHY what they are for"
    assert WHY.keys() - unset == set(), "reasons of options that are there no more, or that are set: delete them"
    assert all(len(reason) > 20 for reason in WHY.values())


def test_every_source_sets_some(wanted):
    """Else the test above would look in the wrong places."""
    assert wanted["recipe"] >= {"weights.format", "secondary.scope", "gradients.scales", "optimizer.master_format"}
    assert wanted["ds_config"] == {"recipe", "partition", "gradients.inter_format"}  # ds_configs/muon.json
    assert wanted["example"] >= {"recipe", "frozen.scales", "topology.ranks_per_node", "report.every"}
    assert wanted["result"] >= {"compute.scaling", "compile", "optimizer.scales", "gradients.accumulate_in"}


def test_runs_of_measurements_are_sections():
    for runs in RUNS.values():
        for section in filter(None, runs.values()):
            resolve({**BF16, "zero_optimization": {"stage": 3}, SECTION: section})


def test_a_default_is_no_wish():
    assert changed({"recipe": "zeropp", "report": {"every": 100}, "partition": "slice"}) == {"recipe"}
    script = ast.parse('config |= {"topology": {"ranks_per_node": ranks // 2}, "report": {"every": 100}}')
    (section,) = sections_in(literal(script.body[0].value))
    assert changed(section) == {"topology.ranks_per_node"}
