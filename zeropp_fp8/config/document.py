"""docs/configuration.md, out of the pydantic models and the recipes.

python -m zeropp_fp8.config.document > docs/configuration.md         # or: make docs
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from zeropp_fp8.config.ds_config import IN_TREE_KEYS
from zeropp_fp8.config.environment import RECIPE_VARIABLE
from zeropp_fp8.config.recipes import RECIPES
from zeropp_fp8.config.sections import SECTION, PluginConfig
from zeropp_fp8.config.words import OneOf, bounds

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
Trainer or Accelerate, which refuse the word "auto" in a section that they do not know. The tables below are printed by
`python -m zeropp_fp8.config.document` from the models in `zeropp_fp8/config/sections.py`.
"""
_KEYS = {
    "zero_quantized_weights": "`weights` of recipe `zeropp`",
    "zero_hpz_partition_size": "`secondary.scope`, as a number of ranks",
    "zero_quantized_gradients": "`gradients` of recipe `zeropp`",
    "zero_quantized_nontrainable_weights": '`frozen`: int8 in blocks of 256, `"modules": "frozen"`',
}


def page() -> str:
    """The page, as Markdown."""
    return "\n".join((_HEAD, *_fields(), *_recipes(), *_keys(), *_environment())).rstrip() + "\n"


def _fields() -> Iterator[str]:
    """A table of what is directly in the section, and one for each of its parts."""
    yield "## The section itself\n"
    yield from _table(PluginConfig.model_fields)
    yield from _parts(PluginConfig)


def _parts(model: type[BaseModel], within: str = "") -> Iterator[str]:
    """A table of each part of a section, and of the parts of that."""
    for name, field in model.model_fields.items():
        if _is_part(field):
            yield f"## {within}{name}\n\n{inspect.getdoc(field.annotation)}\n"
            yield from _table(field.annotation.model_fields)
            yield from _parts(field.annotation, f"{within}{name}.")


def _is_part(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _table(fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| field | values | default | meaning |\n|---|---|---|---|"
    for name, field in fields.items():
        if _is_part(field):
            continue
        values = ", ".join(
            _values(Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation)
        )
        yield f"| `{name}` | {values} | {_shown(field.default)} | {field.description} |"
    yield ""


def _shown(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _values(annotation: Any) -> list[str]:
    """What a field takes, in words."""
    origin, given = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        known = next((each for each in given if isinstance(each, OneOf)), None)
        if known is not None:
            return [*map(_shown, known.names), *filter(None, (known.other,))]
        return [_range(bounds(given[1:]))] if given[0] in (int, float) else _values(given[0])
    if origin is Literal:
        return [*map(_shown, given)]
    if origin in (Union, UnionType):
        return [value for each in given for value in _values(each)]
    if origin is list:
        return ["a list of name patterns"]
    return {bool: ["`true`", "`false`"], int: ["a number"]}[annotation]


def _range(limits: dict[str, float]) -> str:
    most = limits["le"] if "le" in limits else limits["lt"] - 1 if "lt" in limits else None
    if most is None:
        return f"a number, at least {limits['ge']}"
    power = (most + 1).bit_length() - 1
    shown = f"2^{power} - 1" if most + 1 == 1 << power else f"2^{power}" if most == 1 << power else str(most)
    return f"{limits['ge']} to {shown}"


def _recipes() -> Iterator[str]:
    yield "## What each recipe fills\n\nFields that are not shown have their default. `lossless` fills nothing.\n"
    yield "```json"
    lines = ",\n".join(
        f'  "{name}": {{\n'
        + ",\n".join(f"    {json.dumps(part)}: {json.dumps(fields)}" for part, fields in filled.items())
        + "\n  }"
        for name, filled in RECIPES.items()
        if filled
    )
    yield f"{{\n{lines}\n}}\n```\n"


def _keys() -> Iterator[str]:
    yield (
        "## DeepSpeed's own ZeRO++ keys\n\n"
        "They stand in `zero_optimization`, with or without the section. This project's code honours them, and\n"
        "DeepSpeed's does not see them. One that contradicts the section is refused.\n"
    )
    yield "| key | off | without a recipe it means |\n|---|---|---|"
    for key, off in IN_TREE_KEYS.items():
        yield f"| `{key}` | {_shown(off)} | {_KEYS[key]} |"
    yield ""


def _environment() -> Iterator[str]:
    yield (
        "## The environment\n\n"
        "| variable | meaning |\n|---|---|\n"
        f"| `{RECIPE_VARIABLE}` | the recipe of every stage-3 ds_config that says nothing of the plugin |\n"
        "| `NCCL_HOSTID` | what takes the place of a host's name, see `topology` |\n"
        "| `DS_ACCELERATOR` | `cpu` makes DeepSpeed use the CPU where it finds no GPU |\n"
    )


if __name__ == "__main__":
    print(page(), end="")
