"""A checkpoint stores a fragment of codes, in place of a slice of numbers, for a weight that is stored as codes.

A fragment is pickled with DeepSpeed's files, and may be unpickled where DeepSpeed is missing, so this module does not
import DeepSpeed. The class and its attributes are a file format: new versions must still read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from zeropp_fp8.formats import WireFormat, make_format

EXPORT_COMMAND = "python -m zeropp_fp8 export CHECKPOINT NEW_FOLDER"
_stands_in: ContextVar[bool] = ContextVar("zeropp_fp8_stands_in", default=False)


class RawCodesError(RuntimeError):
    """Codes would have been used as numbers."""


@contextmanager
def fragments_stand_in() -> Iterator[None]:
    """While it lasts, concatenating fragments gives a tensor without data (on "meta").

    DeepSpeed assembles the whole model from a checkpoint when it loads without optimizer states; codes of stored
    weights are loaded afterwards.
    """
    token = _stands_in.set(True)
    try:
        yield
    finally:
        _stands_in.reset(token)


@dataclass(eq=False)
class QuantizedFragment:
    """A rank's part of a weight, as codes. It is no tensor: code that uses it as one gets a RawCodesError.

    Attributes:
        name: the parameter's name.
        payload: uint8, the bytes of the rank's shard, on the CPU.
        format_fields: arguments of `make_format`.
        part_numel: elements of each rank's part; the last parts reach beyond the tensor's end.
        full_shape: the parameter's shape.
        value_dtype: the dtype that codes are decoded to.
        rank, ranks: the rank that has this part, and the number of ranks.
    """

    name: str
    payload: Tensor
    format_fields: dict[str, Any]
    part_numel: int
    full_shape: tuple[int, ...]
    value_dtype: torch.dtype
    rank: int
    ranks: int

    @property
    def wire_format(self) -> WireFormat:
        """The format of the codes."""
        return make_format(**self.format_fields)

    def decoded(self) -> Tensor:
        """[part_numel] of `value_dtype`: this part's values, with zeros beyond the tensor's end."""
        return self.wire_format.decode_rows(self.payload.view(1, -1), self.part_numel, self.value_dtype).view(-1)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        parts = args[0] if args else ()
        if func is torch.cat and _stands_in.get() and all(isinstance(part, cls) for part in parts):
            return torch.empty(sum(p.part_numel for p in parts), dtype=parts[0].value_dtype, device="meta")
        found = next(part for part in _flat((args, kwargs or {})) if isinstance(part, cls))
        found._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)  # pickle, copy and others ask for optional methods
        self._refuse()

    def _refuse(self, *_args, **_kwargs) -> NoReturn:
        raise RawCodesError(
            f"{self.name} was saved by zeropp_fp8 as {self.wire_format!r} codes, which are no numbers. To read the "
            f"checkpoint without the plugin, run `{EXPORT_COMMAND}` and read NEW_FOLDER; to resume from it, call "
            f'zeropp_fp8.enable() and set "zeropp_fp8.frozen.format" to "{self.format_fields["name"]}"'
        )


def _flat(arguments: Any) -> Iterator[Any]:
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    if isinstance(arguments, (list, tuple)):
        for argument in arguments:
            yield from _flat(argument)
    else:
        yield arguments


# Python looks these up on the class, without __getattr__.
for _name in ("float", "int", "index", "complex", "bool", "len", "iter", "getitem", "setitem", "array", "neg", "abs"):
    setattr(QuantizedFragment, f"__{_name}__", QuantizedFragment._refuse)
for _name in ("add", "sub", "mul", "matmul", "truediv", "pow", "lt", "le", "gt", "ge"):
    setattr(QuantizedFragment, f"__{_name}__", QuantizedFragment._refuse)
for _name in ("add", "sub", "mul", "matmul", "truediv", "pow"):
    setattr(QuantizedFragment, f"__r{_name}__", QuantizedFragment._refuse)


def has_codes(fragments: dict) -> bool:
    """Whether some of the frozen parameters of a checkpoint are codes."""
    return any(isinstance(fragment, QuantizedFragment) for fragment in fragments.values())
