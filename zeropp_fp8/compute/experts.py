"""Packed experts of a mixture: parameters [experts, out, in], or [experts, in, out], as transformers keeps them."""

from __future__ import annotations

from torch import nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.formats.shapes import is_stack


def packed_experts(module: nn.Module) -> list[Parameter]:
    """The module's own parameters that are a stack of as many matrices as it says that it has experts.

    A number of experts tells them from position embeddings and the like, which have three dimensions too.
    """
    numbers = {value for name, value in vars(module).items() if "expert" in name and isinstance(value, int)}
    own = module.parameters(recurse=False)
    return [p for p in own if is_stack(sharded.shape(p)) and sharded.shape(p)[0] in numbers]
