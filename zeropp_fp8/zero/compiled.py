"""torch.compile and ZeRO-3: blocks are compiled without their hooks, and hooks are never traced.

A hook gathers or releases weights, which no graph can contain. If it is traced, the graph breaks inside the hook. If it
is not, the graph breaks before and after the block, and the block is one graph. Weights are inputs of that graph:
backward saves the Parameter and not its values, and the values are gathered again before backward needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import MethodType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeropp_fp8.config import SECTION, ConfigError


def leave_untraced(handles: Iterable[RemovableHandle]) -> None:
    """Make torch.compile call these hooks instead of tracing them, whoever asked it to compile."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        hook = hooks[handle.id]
        if not getattr(hook, "_torchdynamo_disable", False):  # DeepSpeed does so for half of its hooks
            hooks[handle.id] = torch.compiler.disable(hook)


def compile_blocks(blocks: Sequence[nn.Module], put: Callable[[nn.Module, str, object], None]) -> None:
    """Compile the forward of blocks at their first call; blocks of one class share graphs.

    Args:
        put: sets an attribute of a module for as long as the module is to be compiled.

    Raises:
        ConfigError: there are no blocks.
    """
    if not blocks:
        raise ConfigError(
            f'"{SECTION}.compile" is "blocks", and the model has no repeated block: set it to "none", and call '
            "compile() on the modules that are worth it"
        )
    compiled = {of_class: torch.compile(of_class.forward) for of_class in {type(block) for block in blocks}}
    for block in blocks:
        own = block.__dict__.get("forward")  # a wrapper, for example
        # A bound method, so that a deep copy of the block uses the weights of the copy.
        put(block, "forward", MethodType(compiled[type(block)], block) if own is None else torch.compile(own))
