"""Describe faults of a configuration in plain words: the key, its value as JSON, allowed values, the nearest name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from typing_extensions import NotRequired, get_type_hints, is_typeddict

Keys = tuple[str, ...]
Model = TypeVar("Model", bound=BaseModel)
_LONGEST = 60  # characters of a value
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    list: "a list",
    tuple: "a list",
    dict: "an object, {...}",
    NoneType: "null",
}
_LIMITS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most", "multiple_of": "a multiple of"}


class ConfigError(ValueError):
    """An error for a ds_config that cannot be honoured: a line per fault, which names the key and the remedy."""

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        super().__init__(numbered(faults))


class Remarks(dict):
    """A dict {value that a field does not take: description}."""


def numbered(lines: Iterable[str]) -> str:
    """Return one line unchanged, and several lines below each other, with numbers."""
    lines = list(lines)
    if len(lines) == 1:
        return lines[0]
    return "\n".join((f"{len(lines)} faults:", *(f"  {place}. {line}" for place, line in enumerate(lines, 1))))


def key_of(line: str) -> str:
    """Return the key that a line is about: the first that it names."""
    return line.split('"')[1] if '"' in line else line


def once(lines: Iterable[str]) -> list[str]:
    """Keep the first line about each key: a fault of a key may break several rules."""
    return list({key_of(line): line for line in reversed(list(lines))}.values())[::-1]


def shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def match(word: Any, known: Iterable[Any], cutoff: float = 0.4) -> list[str]:
    """Return the known name that a word may stand for, if there is one."""
    return difflib.get_close_matches(str(word), [name for name in known if isinstance(name, str)], 1, cutoff)


def did_you_mean(names: list[str]) -> str:
    return f' (did you mean "{names[0]}"?)' if names else ""


def nearest(word: Any, known: Iterable[Any], cutoff: float = 0.4) -> str:
    """Return, in brackets, the known name that a word may stand for."""
    return did_you_mean(match(word, known, cutoff))


def takes(annotation: Any) -> str:
    """Say in words which values a type takes."""
    named = list(dict.fromkeys(map(str, names_of(annotation))))
    words = [f"{'one of ' * (len(named) > 1)}{', '.join(named)}"] if named else []
    return " or ".join(dict.fromkeys([*words, *_words(annotation)]))


def names_of(annotation: Any) -> Iterator[Any]:
    """Yield the values that a type names one by one."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for each in get_args(annotation):
            yield from names_of(each)
    elif isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from dict.fromkeys(each.value for each in annotation)


def _words(annotation: Any, metadata: tuple = ()) -> Iterator[str]:
    origin, given = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(given[0], given[1:])
    elif origin in (Union, UnionType):
        for each in given:
            yield from _words(each, metadata)
    elif origin is list:
        yield f"a list of {takes(given[0]).replace('a text', 'texts')}"
    elif _is_model(annotation):
        yield _WORDS[dict]
    elif (origin or annotation) in _WORDS:
        bounds = [one for each in metadata for one in getattr(each, "metadata", [each])]  # wherever pydantic keeps them
        limits = [
            f"{_LIMITS[n]} {getattr(one, n)}" for one in bounds for n in _LIMITS if getattr(one, n, None) is not None
        ]
        yield " ".join(filter(None, (_WORDS[origin or annotation], ", ".join(limits))))


def parse(model: type[Model], given: Mapping[str, Any], within: str) -> tuple[Model, set[Keys], list[str]]:
    """Parse the values without the wrong ones; return the model, the fields unknown then, a line per fault."""
    refused: set[Keys] = set()
    lines: list[str] = []
    while True:
        try:
            return model(**given), refused, lines
        except ValidationError as error:
            for unknown, line in refusals(model, error, given, within):
                lines.append(line)
                refused |= set(unknown)
                for path in unknown:
                    given = without(given, path)


def at(given: Any, path: Keys) -> Any:
    """Return the value at a path; None if there is no such key."""
    for key in path:
        given = given.get(key) if isinstance(given, Mapping) else None
    return given


def without(given: Mapping[str, Any], path: Keys) -> dict[str, Any]:
    """Return a copy without the key at a path."""
    copied, key = dict(given), path[0]
    if len(path) == 1:
        copied.pop(key, None)
    elif isinstance(copied.get(key), Mapping):
        copied[key] = without(copied[key], path[1:])
    return copied


def refusals(
    model: type[BaseModel], error: ValidationError, given: Mapping[str, Any], within: str = "", cutoff: float = 0.4
) -> list[tuple[list[Keys], str]]:
    """Return (fields that are therefore unknown, line) for all that a pydantic model refuses in `given`, at `within`.

    Such a field is the key that the line names, a key that holds it in an object without a model, or the key that an
    unknown key may stand for.
    """
    found: dict[Keys, tuple[list[Keys], str]] = {}  # by the key that a line names
    for problem in error.errors(include_url=False):
        kind, location, owner, value = problem["type"], problem["loc"], {}, given
        field, path, types = (), (), [model]
        for part in location:  # indices of lists, and members of unions, are no keys
            missing = kind == "missing" and part == location[-1]
            if not (isinstance(value, Mapping) and (part in value or missing)):
                continue
            owner = next(filter(None, map(_keys, types)), {})
            value, path = value.get(part), (*path, str(part))
            field = path if any(map(_is_model, types)) else field
            types = list(_members(owner.get(part)))
        name, unknown = ".".join(filter(None, (within, *path))), [field]
        if kind == "extra_forbidden" or location[-1:] == ("[key]",):
            homes = _homes(model, path[-1], within)
            meant = [] if homes else match(path[-1], owner, cutoff)
            keys = f"; keys here are {listed}" if len(listed := ", ".join(owner)) < 4 * _LONGEST else ""
            where = f"; it belongs to {' or '.join(homes)}{keys}" if homes else keys
            line = f'"{name}": unknown key{did_you_mean(meant) or where}'
            unknown += [(*path[:-1], each) for each in meant]
        elif kind in ("value_error", "assertion_error"):
            line = f'"{name}": {shown(value)} is refused: {problem["ctx"]["error"]}'
        elif kind == "missing":
            line = f'"{name}" is missing; it takes {takes(types[0])}'
        else:
            hint = nearest(value, names_of(types[0]), 0.55) if isinstance(value, str) else ""
            remarks = [each[value] for each in types if isinstance(each, Remarks) and value in list(each)]
            hint = f", {remarks[0]}" if remarks else hint
            line = f'"{name}": {shown(value)} is not allowed{hint}; it takes {takes(types[0])}'
        found.setdefault(path, (unknown, line))
    # Each member of a union has its own errors: an error about an inner key says more than one about the whole.
    within_others = {path[:end] for path in found for end in range(len(path))}
    return [found[path] for path in found if path not in within_others]


def _homes(model: type[BaseModel], key: str, within: str) -> list[str]:
    """The places that have a key: a model and its parts."""
    parts = {f"{within}.{name}": _members(field.annotation) for name, field in model.model_fields.items()}
    places = {within: [model]} | parts
    return [f'"{n}"' for n, types in places.items() if any(_is_model(t) and key in t.model_fields for t in types)]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types that make up a type, itself first."""
    yield annotation
    if get_origin(annotation) in (Union, UnionType, Annotated):
        for each in get_args(annotation):
            yield from _members(each)


def _keys(annotation: Any) -> dict[str, Any]:
    """Return {key: type} of an object of this type, under all names of each key."""
    if _is_model(annotation):
        fields = annotation.model_fields
        typed = {name: Annotated[(one.annotation, *one.metadata, None)] for name, one in fields.items()}
        return typed | {one.alias: typed[name] for name, one in fields.items() if one.alias}
    if is_typeddict(annotation):
        hints = get_type_hints(annotation, include_extras=True)
        return {name: get_args(t)[0] if get_origin(t) is NotRequired else t for name, t in hints.items()}
    if get_origin(annotation) is dict:
        key, value = get_args(annotation)
        return dict.fromkeys(names_of(key), value)
    return {}
