"""Several engines over one model, made one after the other: the last one's hooks and attributes are on the model.

Each module (and parameter) lists the engines over it. A new engine removes the hooks and attributes of the one before,
and puts them back when it ends: the last engine ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from torch.utils.hooks import RemovableHandle

_NONE = object()


class _Attachments(list):
    """The attachments of a module, the oldest first. A copy of the module has none."""

    def __reduce__(self):
        return _Attachments, ()


def _nothing(*args) -> None:
    """Replaces a silenced hook, so that the hook keeps its position among other hooks."""


def _set(thing: Any, values: dict[str, object]) -> None:
    for name, value in values.items():
        if value is _NONE:
            thing.__dict__.pop(name, None)
        else:
            thing.__dict__[name] = value


def _there(thing: Any, names: Iterable[str]) -> dict[str, object]:
    return {name: thing.__dict__.get(name, _NONE) for name in names}


def _speak(hooks: dict[int, Callable], number: int, hook: Callable) -> None:
    if number in hooks:  # else the hook was removed
        hooks[number] = hook


def _leave(thing: Any, listed_as: str) -> None:
    attachments = thing.__dict__[listed_as]
    attachments.pop()
    if not attachments:
        del thing.__dict__[listed_as]


class Attachment:
    """The time during which an owner's hooks and attributes are on modules or parameters.

    Args:
        things: the modules or parameters.
        listed_as: their attribute that lists attachments.
    """

    def __init__(self, owner: object, things: Iterable[Any], listed_as: str) -> None:
        self.owner = owner
        self._things, self._listed_as = list(things), listed_as
        self._before: dict[Any, dict[str, object]] = {}  # attributes as they are without an owner
        self._hooks: dict[int, list[RemovableHandle]] = {}  # by the id of a module's dictionary of hooks
        self._ending = ExitStack()

    def attach(self) -> list[Attachment]:
        """Take the things over. Returns earlier attachments that have not ended, the last one first."""
        earlier: dict[Attachment, None] = {}
        for thing in self._things:
            attachments = thing.__dict__.setdefault(self._listed_as, _Attachments())
            earlier |= dict.fromkeys(attachments[::-1])
            if attachments:
                attachments[-1]._make_room(thing, self._ending)
            attachments.append(self)
            self._ending.callback(_leave, thing, self._listed_as)
        return list(earlier)

    def _make_room(self, thing: Any, until: ExitStack) -> None:
        """Remove this owner's attributes and hooks from a thing; the end of the new attachment puts them back."""
        before = self._before.get(thing, {})
        until.callback(_set, thing, _there(thing, before))
        _set(thing, before)
        for hooks in (getattr(thing, name, {}) for name in ("_forward_pre_hooks", "_forward_hooks")):
            for hook in self._hooks.get(id(hooks), ()):
                if hook.id in hooks:
                    until.callback(_speak, hooks, hook.id, hooks[hook.id])
                    hooks[hook.id] = _nothing

    def put(self, thing: Any, name: str, value: object) -> None:
        """Set an attribute of a thing for the time of this attachment."""
        self.keep(thing, name)
        thing.__dict__[name] = value

    def keep(self, thing: Any, *names: str) -> None:
        """Restore attributes, which the caller is about to set, to their present values when this attachment ends."""
        there = _there(thing, names)
        self._before[thing] = there | self._before.get(thing, {})
        self._ending.callback(_set, thing, there)

    def silences(self, hooks: Iterable[RemovableHandle]) -> None:
        """Silence these hooks, and no others, while a later owner is attached."""
        self._hooks.clear()
        for hook in hooks:
            self._hooks.setdefault(id(hook.hooks_dict_ref()), []).append(hook)

    def detach(self) -> None:
        """Detach the last owner, even if it has begun for some of the things only, or not at all."""
        self._ending.close()


def is_attached(thing: Any, listed_as: str) -> bool:
    """Whether any owner is attached to a thing."""
    return listed_as in thing.__dict__
