"""Print docs/configuration.md from the JSON schema of the pydantic models, and the recipes.

python -m benchmarks.report.configuration > docs/configuration.md         # or: make docs
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from zeropp_fp8.config.ds_config import IN_TREE_KEYS, RECIPE_VARIABLE
from zeropp_fp8.config.recipes import RECIPES
from zeropp_fp8.config.sections import SECTION, PluginConfig

_HEAD = f"""\
# Configuration

Everything is in one section of the ds_config, `"{SECTION}"`. Most jobs need nothing but the name of a recipe; a field
that is set by hand overrides its recipe:

```json
{{
  "{SECTION}": {{
    "recipe": "zeropp",
    "gradients": {{"error_feedback": true}},
    "report": {{"every": 10}}
  }}
}}
```

Without a recipe the section means `lossless` plus exactly what DeepSpeed's own ZeRO++ keys ask for. What cannot be
honoured is refused at start with `zeropp_fp8.ConfigError`, which names the key and the remedy; see
[Troubleshooting](troubleshooting.md). Where a field takes `"auto"`, `"detect"` means the same: write that with a
Trainer or Accelerate, which refuse the word "auto" in a section that they do not know. A name pattern is the dotted
name of a module or parameter, or some consecutive parts of it, with `*` and `?`: `lm_head`, `down_proj`, `layers.0` and
`*.down_proj`. The tables below are printed by `python -m benchmarks.report.configuration` from the models in
`zeropp_fp8/config/sections.py`.

## The section itself
"""
_RECIPES = """\
## What each recipe fills

Fields that are not shown have their default. `lossless` fills nothing.
"""
_KEYS = {
    "zero_quantized_weights": "`weights` of recipe `zeropp`",
    "zero_hpz_partition_size": "`secondary.scope`, as a number of ranks",
    "zero_quantized_gradients": "`gradients` of recipe `zeropp`",
    "zero_quantized_nontrainable_weights": '`frozen`: int8 in blocks of 256, `"modules": "frozen"`',
}
_END = f"""\
## DeepSpeed's own ZeRO++ keys

They stand in `zero_optimization`, with or without the section. This project's code honours them, and
DeepSpeed's does not see them. One that contradicts the section is refused.

| key | off | without a recipe it means |
|---|---|---|
{{keys}}

## The environment

| variable | meaning |
|---|---|
| `{RECIPE_VARIABLE}` | the recipe of every stage-3 ds_config that says nothing of the plugin |
| `NCCL_HOSTID` | what takes the place of a host's name, see `topology` |
| `DS_ACCELERATOR` | `cpu` makes DeepSpeed use the CPU, even if there is a GPU |
"""


def page() -> str:
    """Return the page as Markdown."""
    schema = PluginConfig.model_json_schema()
    keys = "\n".join(f"| `{key}` | {_shown(off)} | {_KEYS[key]} |" for key, off in IN_TREE_KEYS.items())
    return "\n".join((_HEAD, *_table(schema), *_parts(schema, schema["$defs"]), _recipes(), _END.format(keys=keys)))


def _parts(model: Mapping[str, Any], models: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield a table per part of a section, and per part of these parts."""
    for name, field in model["properties"].items():
        if "$ref" in field:
            part = models[field["$ref"].rpartition("/")[2]]
            yield f"## {within}{name}\n\n{part['description']}\n"
            yield from _table(part)
            yield from _parts(part, models, f"{within}{name}.")


def _table(model: Mapping[str, Any]) -> Iterator[str]:
    yield "| field | values | default | meaning |\n|---|---|---|---|"
    for name, field in model["properties"].items():
        if "$ref" not in field:
            values = ", ".join([*_values(field), *([f"or {field['or']}"] if "or" in field else [])])
            yield f"| `{name}` | {values} | {_shown(field['default'])} | {field['description']} |"
    yield ""


def _shown(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _values(schema: Mapping[str, Any]) -> list[str]:
    """Say in words which values a field takes; nothing for objects."""
    if "anyOf" in schema:
        return [value for each in schema["anyOf"] for value in _values(each)]
    if "const" in schema or "enum" in schema:
        return [*map(_shown, schema.get("enum", [schema.get("const")]))]
    kind = schema.get("type")
    if kind == "array":
        named = _values(schema["items"])
        return ["a list of name patterns" if named == ["a text"] else f"a list of {', '.join(named)}"]
    if kind in ("integer", "number"):
        most = schema.get("maximum", schema.get("exclusiveMaximum"))
        limits = f"{schema['minimum']} to {most}" if most else f"a number, at least {schema['minimum']}"
        return [limits + (f", a multiple of {schema['multipleOf']}" if "multipleOf" in schema else "")]
    return {"boolean": ["`true`", "`false`"], "string": ["a text"]}.get(kind, [])


def _recipes() -> str:
    lines = ",\n".join(
        f'  "{name}": {{\n'
        + ",\n".join(f"    {json.dumps(part)}: {json.dumps(fields)}" for part, fields in filled.items())
        + "\n  }"
        for name, filled in RECIPES.items()
        if filled
    )
    return f"{_RECIPES}\n```json\n{{\n{lines}\n}}\n```\n"


if __name__ == "__main__":
    print(page(), end="")
