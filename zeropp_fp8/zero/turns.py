"""Engines over one model, made one after the other: the last one's hooks and attributes are on it, until it ends.

Each module (and parameter) lists the engines over it. The next one takes off what the one before has there, and puts it
back when it ends: the last one ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.hooks import RemovableHandle

_NONE = object()


class _Turns(list):
    """Those of a module, the oldest first. A copy of the module has none."""

    def __reduce__(self):
        return _Turns, ()


def _nothing(*args) -> None:
    """In the place of a hook that is silent, which then keeps its place among hooks of others."""


def _set(thing: Any, values: dict[str, object]) -> None:
    for name, value in values.items():
        if value is _NONE:
            thing.__dict__.pop(name, None)
        else:
            thing.__dict__[name] = value


def _there(thing: Any, names: Iterable[str]) -> dict[str, object]:
    return {name: thing.__dict__.get(name, _NONE) for name in names}


class Turn:
    """The time in which hooks and attributes of an owner are on modules, or parameters.

    Args:
        things: these.
        listed_as: their attribute that lists turns.
    """

    def __init__(self, owner: object, things: Iterable[Any], listed_as: str) -> None:
        self.owner = owner
        self._things, self._listed_as = list(things), listed_as
        self._before: dict[Any, dict[str, object]] = {}  # attributes, as they were when it began
        self._own: dict[Any, dict[str, object]] = {}  # the owner's, while a later one has its turn
        self._hooks: dict[int, list[RemovableHandle]] = {}  # by the id of a module's dictionary of hooks
        self._silent: dict[Any, list[tuple[dict, int, Callable]]] = {}

    def begin(self) -> list[Turn]:
        """Returns the earlier ones that have not ended, the last one first."""
        earlier: dict[Turn, None] = {}
        for thing in self._things:
            turns = thing.__dict__.setdefault(self._listed_as, _Turns())
            found = turns[::-1]
            earlier |= dict.fromkeys(found)
            turns.append(self)
            for last in found[:1]:
                last._step_back(thing)
        return list(earlier)

    def put(self, thing: Any, name: str, value: object) -> None:
        """Give a thing an attribute for as long as this turn is."""
        self.keep(thing, name)
        thing.__dict__[name] = value

    def keep(self, thing: Any, *names: str) -> None:
        """Let attributes, which somebody is about to set, be after this turn what they are now."""
        self._before[thing] = _there(thing, names) | self._before.get(thing, {})

    def silences(self, hooks: Iterable[RemovableHandle]) -> None:
        """These, and no others, are not called while a later one has its turn."""
        self._hooks.clear()
        for hook in hooks:
            self._hooks.setdefault(id(hook.hooks_dict_ref()), []).append(hook)

    def end(self) -> None:
        """Of the last one. Also where it has begun for some of the things only, or not at all."""
        for thing in self._things:
            turns = thing.__dict__.get(self._listed_as)
            if not turns or turns[-1] is not self:
                continue
            turns.pop()
            self._step_back(thing)
            if turns:
                turns[-1]._step_forth(thing)
            else:
                del thing.__dict__[self._listed_as]

    def _step_back(self, thing: Any) -> None:
        before = self._before.pop(thing, {})
        self._own[thing] = _there(thing, before)
        _set(thing, before)
        taken = self._silent[thing] = []
        for hooks in (getattr(thing, name, {}) for name in ("_forward_pre_hooks", "_forward_hooks")):
            for hook in self._hooks.get(id(hooks), ()):
                if hook.id in hooks:
                    taken.append((hooks, hook.id, hooks[hook.id]))
                    hooks[hook.id] = _nothing

    def _step_forth(self, thing: Any) -> None:
        own = self._own.pop(thing, {})
        self._before[thing] = _there(thing, own)
        _set(thing, own)
        for hooks, number, hook in self._silent.pop(thing, ()):
            if number in hooks:  # else it was removed
                hooks[number] = hook


def has_turn(thing: Any, listed_as: str) -> bool:
    """Whether somebody has."""
    return listed_as in thing.__dict__
