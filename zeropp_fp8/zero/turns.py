"""Engines over one model, made one after the other: the last one's hooks and attributes are on it, until it ends.

Each module (and parameter) lists the engines over it. The next one takes off what the one before has there, and puts it
back when it ends: the last one ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
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


def _speak(hooks: dict[int, Callable], number: int, hook: Callable) -> None:
    if number in hooks:  # else it was removed
        hooks[number] = hook


def _leave(thing: Any, listed_as: str) -> None:
    turns = thing.__dict__[listed_as]
    turns.pop()
    if not turns:
        del thing.__dict__[listed_as]


class Turn:
    """The time in which hooks and attributes of an owner are on modules, or parameters.

    Args:
        things: these.
        listed_as: their attribute that lists turns.
    """

    def __init__(self, owner: object, things: Iterable[Any], listed_as: str) -> None:
        self.owner = owner
        self._things, self._listed_as = list(things), listed_as
        self._before: dict[Any, dict[str, object]] = {}  # attributes, as they are without any owner
        self._hooks: dict[int, list[RemovableHandle]] = {}  # by the id of a module's dictionary of hooks
        self._ending = ExitStack()

    def begin(self) -> list[Turn]:
        """Returns the earlier ones that have not ended, the last one first."""
        earlier: dict[Turn, None] = {}
        for thing in self._things:
            turns = thing.__dict__.setdefault(self._listed_as, _Turns())
            earlier |= dict.fromkeys(turns[::-1])
            if turns:
                turns[-1]._make_room(thing, self._ending)
            turns.append(self)
            self._ending.callback(_leave, thing, self._listed_as)
        return list(earlier)

    def _make_room(self, thing: Any, until: ExitStack) -> None:
        """Take its attributes and hooks off a thing; they come back at the end of the turn that begins."""
        before = self._before.get(thing, {})
        until.callback(_set, thing, _there(thing, before))
        _set(thing, before)
        for hooks in (getattr(thing, name, {}) for name in ("_forward_pre_hooks", "_forward_hooks")):
            for hook in self._hooks.get(id(hooks), ()):
                if hook.id in hooks:
                    until.callback(_speak, hooks, hook.id, hooks[hook.id])
                    hooks[hook.id] = _nothing

    def put(self, thing: Any, name: str, value: object) -> None:
        """Give a thing an attribute for as long as this turn is."""
        self.keep(thing, name)
        thing.__dict__[name] = value

    def keep(self, thing: Any, *names: str) -> None:
        """Let attributes, which somebody is about to set, be after this turn what they are now."""
        there = _there(thing, names)
        self._before[thing] = there | self._before.get(thing, {})
        self._ending.callback(_set, thing, there)

    def silences(self, hooks: Iterable[RemovableHandle]) -> None:
        """These, and no others, are not called while a later one has its turn."""
        self._hooks.clear()
        for hook in hooks:
            self._hooks.setdefault(id(hook.hooks_dict_ref()), []).append(hook)

    def end(self) -> None:
        """Of the last one. Also where it has begun for some of the things only, or not at all."""
        self._ending.close()


def has_turn(thing: Any, listed_as: str) -> bool:
    """Whether somebody has."""
    return listed_as in thing.__dict__
