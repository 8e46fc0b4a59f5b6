"""torch.compile and ZeRO-3: blocks are compiled without their hooks, and hooks are never traced.

A hook gathers or releases weights, which no graph can hold. Traced, it would end the graph in the middle of what it
does; left alone, it ends the graph before and after the block, whose own work is one graph. Weights are inputs of it:
what backward needs of them is saved as the Parameter, whose values are gathered again by then, and not as values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def compile_blocks(blocks: Sequence[nn.Module], put: Callable[[nn.Module, str, object], None]) -> None:
    """Let the forward of blocks be compiled at their first call; those of one class share graphs.

    Args:
        put: gives a module an attribute, for as long as it is to be compiled.

    Raises:
        ConfigError: there are none.
    """
    if not blocks:
        raise ConfigError(
            f'"{SECTION}.compile" is "blocks", and the model has no repeated block: set it to "none", and call '
            "compile() on the modules that are worth it"
        )
    compiled = {of_class: torch.compile(of_class.forward) for of_class in {type(block) for block in blocks}}
    for block in blocks:
        own = block.__dict__.get("forward")  # a wrapper for example
        # A bound method, so that a deep copy of the block runs the copy's weights.
        put(block, "forward", MethodType(compiled[type(block)], block) if own is None else torch.compile(own))
