"""The score of each response: reward functions and a reward model, weighted and added."""

from __future__ import annotations

import torch
from basics import failing_together
from torch import Tensor

from common.roles import Role, in_parts, scores_of
from common.rollout import Rollout
from common.verifiers import RewardFunction, columns_of, needed_columns, reward_function


def load_functions(arguments) -> dict[str, RewardFunction]:
    """The reward functions of --reward_functions by name."""
    return {name: reward_function(name) for name in arguments.reward_functions}


def columns_for(functions: dict[str, RewardFunction]) -> list[str]:
    """The columns that the rows of prompts must have."""
    return sorted({column for function in functions.values() for column in needed_columns(function)})


class Rewards:
    """The scores of responses.

    Args:
        arguments: RolloutArguments: weights, and the penalty for responses that do not end.
        functions: see `load_functions`.
        model: the reward model, or None.
        model_batch: sequences that it takes at a time.
    """

    def __init__(
        self, arguments, functions: dict[str, RewardFunction], model: Role | None = None, model_batch: int = 1
    ) -> None:
        self.functions = functions
        self._weights = dict(zip(functions, arguments.reward_weights or [1.0] * len(functions)))
        self._eos_penalty = arguments.missing_eos_penalty
        self._model, self._model_weight, self._model_batch = model, arguments.reward_model_weight, model_batch

    def __call__(self, rollout: Rollout, rows: list[dict], prompts: list[str]) -> tuple[Tensor, dict[str, Tensor]]:
        """(scores fp32 [B], what each part gave by its name, fp32 [B], NaN where it had nothing to say).

        A score is the weighted sum of its parts, less the penalty where the end token did not come.

        Args:
            rows: those of the prompts, with the columns that reward functions take.
            prompts: their texts.

        Raises:
            RuntimeError, or what a reward function raised: on every rank if it failed on one.
        """
        parts = self.of_functions(rollout.texts, rows, prompts)
        parts = {name: values.to(rollout.input_ids.device) for name, values in parts.items()}
        scores = sum(
            (self._weights[name] * values.nan_to_num() for name, values in parts.items()),
            start=torch.zeros(len(rollout), device=rollout.input_ids.device),
        )
        if self._model is not None:
            parts["reward_model"] = in_parts(lambda part: scores_of(self._model, part), rollout, self._model_batch)
            scores = scores + self._model_weight * parts["reward_model"]
        return scores - self._eos_penalty * ~rollout.ended, parts

    def of_functions(self, texts: list[str], rows: list[dict], prompts: list[str]) -> dict[str, Tensor]:
        """Return what the functions alone say, by name."""
        with failing_together("a reward function"):
            said = {
                name: function(prompts=prompts, completions=texts, **columns_of(rows))
                for name, function in self.functions.items()
            }
            return {
                name: torch.tensor([float("nan") if value is None else value for value in values])
                for name, values in said.items()
            }
