"""How the four models of PPO are made in the runs that RLHF benchmarks compare."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from benchmarks.harness.sizes import SIZES
from benchmarks.harness.zero3 import ds_config
from examples.options import whole


@dataclass(frozen=True)
class Run:
    """How the four models are made.

    Attributes:
        section: of the plugin; None for stock.
        lora: adapters are trained; else all weights.
        shared: two models with two adapters each; else four models.
    """

    section: dict | None
    lora: bool
    shared: bool = False


RUNS = {
    "stock-lora": Run(None, lora=True, shared=True),
    "stock-four": Run(None, lora=True),
    "qlora": Run({"recipe": "qlora"}, lora=True, shared=True),
    "stock-full": Run(None, lora=False),
    "zeropp": Run({"recipe": "zeropp"}, lora=False),
    "fp8-lm": Run({"recipe": "fp8-lm"}, lora=False),
    "fp8-lm-zeropp": Run({"recipe": "fp8-lm-zeropp"}, lora=False),
}


def made(name: str, args, device: torch.device):
    """The models of a run."""
    from benchmarks.harness.ppo_models import make_models

    run, size = RUNS[name], SIZES[args.size]
    config = ds_config(run.section, args.batch, small=size.small, lean=False)
    leaf = args.leaf and run.section is None
    return make_models(config, size, device, lora=run.lora, shared=run.shared, leaf=leaf)


def add_rollouts(parser: argparse.ArgumentParser) -> None:
    """Return what is rolled out, and --leaf."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--batch", type=whole(1), default=8 if on_gpu else 2, help="sequences of a rank")
    parser.add_argument("--prompt", type=whole(1), default=256 if on_gpu else 16, help="tokens (default %(default)s)")
    parser.add_argument(
        "--tokens", type=whole(1), default=256 if on_gpu else 16, help="of a response (default %(default)s)"
    )
    parser.add_argument("--leaf", action=argparse.BooleanOptionalAction, default=True, help="z3 leaf modules for stock")
