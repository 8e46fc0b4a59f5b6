"""Finds the transformer blocks of a model; a block is gathered and released as one unit."""

from __future__ import annotations

from collections import Counter

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of `model`, in registration order.

    A block is a module whose class a Hugging Face model names in `_no_split_modules`; without such a list it is a
    child of a ModuleList that holds two or more modules of its class. Modules without parameters are no blocks.
    """
    named_classes = {name for m in model.modules() for name in (getattr(m, "_no_split_modules", None) or ())}
    blocks: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        repeated = Counter(type(child) for child in module.children()) if isinstance(module, nn.ModuleList) else {}
        for child in module.children():
            is_block = type(child).__name__ in named_classes if named_classes else repeated.get(type(child), 0) >= 2
            if is_block and next(child.parameters(), None) is not None:
                blocks.append(child)
            else:
                visit(child)

    visit(model)
    return blocks
