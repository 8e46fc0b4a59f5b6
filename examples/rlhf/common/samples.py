"""Responses of a policy that learns from rows to some of their prompts, every few steps."""

from __future__ import annotations

from collections.abc import Sequence

from common.monitor import Monitor
from common.roles import Role
from common.rollout import Sampling, roll_out
from common.tokens import Item

PROMPTS = 4


class Samples:
    """Answers of a policy to the first prompts of its rows, greedily, in samples.jsonl and on the console.

    Args:
        arguments: sample_every (0: never), sample_tokens.
        policy: what answers; every rank the same prompts, because they gather weights together.
        items: as encode_sft makes them.
    """

    def __init__(self, arguments, policy: Role, tokenizer, items: Sequence[Item]) -> None:
        self._every, self._policy, self._tokenizer = arguments.sample_every, policy, tokenizer
        self._sampling = Sampling(arguments.sample_tokens, greedy=True)
        self._prompts = [prompt_of(item) for item in items[:PROMPTS]]

    def after(self, step: int, monitor: Monitor) -> None:
        """Answer, if it is time. On every rank together; the generators of torch go on as if nothing had been drawn."""
        if not self._every or step % self._every:
            return
        rollout = roll_out(self._policy, self._tokenizer, self._prompts, self._sampling, seed=0)
        monitor.sample(step, [self._tokenizer.decode(prompt) for prompt in self._prompts], rollout.texts)


def prompt_of(item: Item) -> list[int]:
    """The tokens before the first one that is learned."""
    return item["input_ids"][: item["response_mask"].index(True) + 1]
