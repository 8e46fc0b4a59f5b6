"""Common parts of tests of the RLHF examples' losses: a batch of five responses, and how the GRPO loss is called."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from common.losses import grpo_loss

CLOSE = {torch.float64: {"rtol": 1e-12, "atol": 1e-12}, torch.float32: {"rtol": 1e-5, "atol": 1e-5}}
TARGET = {"rtol": 1e-5, "atol": 1e-6}  # of TRL's figures, on the same fp32 batch
LENGTHS = (6, 0, 3, 11, 1)  # chosen tokens of the five sequences; the second one has none
FIRST = (2, 3, 0, 0, 9)  # position of the first of them
POSITIONS = 11


def make_batch(dtype=torch.float64, seed=0):
    """Tensors of five responses whose ratios lie on both sides of any clip range; garbage outside the mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    mask = torch.zeros(5, POSITIONS, dtype=torch.bool)
    for row, (first, length) in enumerate(zip(FIRST, LENGTHS)):
        mask[row, first : first + length] = True
    logprobs = -normal(5, POSITIONS).abs() - 0.1
    batch = SimpleNamespace(
        mask=mask,
        logprobs=logprobs,
        old_logprobs=logprobs + 0.4 * normal(5, POSITIONS),
        reference_logprobs=logprobs + 0.5 * normal(5, POSITIONS),
        token_advantages=normal(5, POSITIONS),
        advantages=normal(5),
        values=normal(5, POSITIONS),
        old_values=normal(5, POSITIONS),
        returns=normal(5, POSITIONS),
    )
    return batch


TOKEN_FIELDS = (
    "logprobs",
    "old_logprobs",
    "reference_logprobs",
    "token_advantages",
    "values",
    "old_values",
    "returns",
)


def check(actual, expected, dtype=torch.float64):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), **CLOSE[dtype])


def chosen(batch):
    """(row, position) of each chosen token."""
    return [(b, t) for b in range(len(batch.mask)) for t in range(batch.mask.shape[1]) if batch.mask[b, t]]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


GRPO_ARGUMENTS = {
    "grpo": {"kind": "grpo"},
    "bnpo": {"kind": "bnpo"},
    "dapo": {"kind": "dapo", "token_count": 37},
    "dr_grpo": {"kind": "dr_grpo", "max_tokens": 16},
    "beta": {"kind": "grpo", "beta": 0.3},
    "dapo, beta": {"kind": "dapo", "token_count": 37, "beta": 0.3},
    "sequence": {"kind": "grpo", "importance_level": "sequence"},
    "sequence, beta": {"kind": "bnpo", "importance_level": "sequence", "beta": 0.3},
    "sequence, dr_grpo": {"kind": "dr_grpo", "max_tokens": 16, "importance_level": "sequence"},
    "limit": {"kind": "bnpo", "ratio_limit": 1.4},
    "on policy": {"kind": "bnpo", "old": False},
}


def grpo(batch, old=True, **arguments):
    clip = (0.1, 0.15) if arguments.get("importance_level") == "sequence" else (0.2, 0.28)
    if arguments.get("beta"):
        arguments["reference_logprobs"] = batch.reference_logprobs
    old_logprobs = batch.old_logprobs if old else None
    return grpo_loss(batch.logprobs, old_logprobs, batch.advantages, batch.mask, *clip, **arguments)
