"""torch.compile and ZeRO-3: blocks are compiled without their hooks, and hooks are never traced.

A hook gathers or releases weights, which no graph can hold. Traced, it would end the graph in the middle of what it
does; left alone, it ends the graph before and after the block, whose own work is one graph. Weights are inputs of it:
what backward needs of them is saved as the Parameter, whose values are gathered again by then, and not as values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeropp_fp8.config import SECTION, ConfigError


def leave_untraced(handles: Iterable[RemovableHandle]) -> None:
    """Let torch.compile call these hooks instead of tracing them, wherever it was asked to compile."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        hook = hooks[handle.id]
        if not getattr(hook, "_torchdynamo_disable", False):  # DeepSpeed does it with half of its own
            hooks[handle.id] = torch.compiler.disable(hook)


class CompiledBlocks:
    """Blocks whose forward is compiled, until `undo`.

    Args:
        blocks: compiled at their first call; those of one class share graphs.

    Raises:
        ConfigError: there are none.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        if not blocks:
            raise ConfigError(
                f'"{SECTION}.compile" is "blocks", and the model has no repeated block: set it to "none", and call '
                "compile() on the modules that are worth it"
            )
        self._forwards = {block: block.__dict__.get("forward") for block in blocks}  # of its own, a wrapper for example
        compiled = {of_class: torch.compile(of_class.forward) for of_class in {type(block) for block in blocks}}
        for block, own in self._forwards.items():
            # A bound method, so that a deep copy of the block runs the copy's weights.
            block.forward = MethodType(compiled[type(block)], block) if own is None else torch.compile(own)

    def undo(self) -> None:
        """Give every block its own forward back."""
        for block, own in self._forwards.items():
            block.__dict__.pop("forward", None)
            if own is not None:
                block.forward = own
        self._forwards.clear()
