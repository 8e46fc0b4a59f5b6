"""Packed experts of transformers by themselves, with random weights."""

from __future__ import annotations

import torch
from torch import nn


def made(maker: tuple, seed: int = 0) -> nn.Module:
    """The experts of a (class, config), with transformers' eager forward."""
    experts, config = maker
    config._experts_implementation = "eager"
    torch.manual_seed(seed)
    module = experts(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module
