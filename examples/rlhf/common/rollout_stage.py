"""PPO and GRPO around their algorithms: data and checks; rollouts; log, samples, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import deepspeed
import torch.distributed as dist
from options import model_config
from torch import Tensor

from common.arguments import RolloutArguments, check_length
from common.evaluation import report
from common.figures import Clock
from common.models import find_start, load_tokenizer
from common.monitor import Monitor, draw, memory_and_bytes
from common.order import Order
from common.prompts import Prompts, load_prompts
from common.rewards import Rewards, columns_for, load_functions
from common.roles import Role, find_reward_model
from common.rollout import Rollout, Sampling, roll_out, seed_of
from common.state import Checkpoints


class RolloutStage:
    """A run of iterations, each a rollout and the training on it.

    Args:
        epochs: passes over a rollout.

    Attributes:
        steps: optimizer steps of the run.
        tokenizer, checkpoints: of the run.

    Raises:
        ValueError, FileNotFoundError: what cannot be run, before any weights are loaded.
    """

    def __init__(self, arguments: RolloutArguments, ds_config: dict, epochs: int) -> None:
        self._arguments = arguments
        self._micro_batch = ds_config["train_micro_batch_size_per_gpu"]
        minibatches = arguments.rollout_batch // (self._micro_batch * ds_config["gradient_accumulation_steps"])
        self.steps = arguments.iterations * epochs * minibatches
        config = model_config("--model", find_start(arguments.model).base)
        self.tokenizer = load_tokenizer(arguments.model)
        asked = arguments.max_prompt_tokens + arguments.max_new_tokens
        check_length(asked, config, "--max_prompt_tokens and --max_new_tokens")
        find_reward_model(arguments, self.tokenizer)
        self._functions = load_functions(arguments)
        columns = columns_for(self._functions)
        self._prompts = load_prompts(arguments, arguments.data, self.tokenizer, columns)
        self._held_out = arguments.eval_data and load_prompts(arguments, arguments.eval_data, self.tokenizer, columns)
        self.checkpoints = Checkpoints(arguments, ds_config, {"the number of prompts": len(self._prompts)})
        self._order, self._sampling = Order(len(self._prompts), arguments.seed), Sampling.of(arguments)

    def iterations(self, policy: Role, reward_model: Role | None, first: int, shown: Sequence[str]) -> Iterator[int]:
        """The numbers of the iterations from `first`, with a progress bar; before the first of all an evaluation."""
        arguments = self._arguments
        self._policy, self._shown = policy, shown
        self.rewards = Rewards(arguments, self._functions, reward_model, self._micro_batch)
        self._monitor = Monitor(arguments.out, policy.engine, resume=arguments.resume, shown=shown)
        if self._held_out and first == 0:
            self._report(step=0)
        with self._monitor.bar(arguments.iterations, first, unit="iteration") as bar:
            for iteration in range(first, arguments.iterations):
                yield iteration
                bar.update()

    def roll_out(self, iteration: int, group: int = 1) -> tuple[Prompts, Rollout]:
        """This rank's prompts of an iteration, each `group` times in a row, and the policy's answers to them."""
        rank, arguments = dist.get_rank(), self._arguments
        picked = self._order.batch(iteration, rank, dist.get_world_size(), arguments.rollout_batch // group)
        asked = self._prompts.rows([index for index in picked for _ in range(group)])
        seed = seed_of(arguments.seed, iteration, rank)
        size = arguments.generation_batch
        return asked, roll_out(self._policy, self.tokenizer, asked.ids, self._sampling, seed, size)

    def end_iteration(
        self,
        iteration: int,
        figures: dict[str, float],
        clock: Clock,
        asked: Prompts,
        rollout: Rollout,
        scores: Tensor,
        *engines: deepspeed.DeepSpeedEngine,
    ) -> None:
        """Log, sample, evaluate and save where it is time to.

        Args:
            figures: means over ranks.
            scores: fp32 [B], of the responses.
            engines: whose communication is reported.
        """
        arguments, step, is_last = self._arguments, iteration + 1, iteration + 1 == self._arguments.iterations
        if step % arguments.log_every == 0:
            self._monitor.log(step, **figures, **clock.figures(rollout), **memory_and_bytes(*engines))
        if arguments.sample_every and step % arguments.sample_every == 0:
            self._monitor.sample(step, asked.texts, rollout.texts, scores.tolist())
        if self._held_out and (is_last or (arguments.eval_every and step % arguments.eval_every == 0)):
            self._report(step)
        if arguments.save_every and step % arguments.save_every == 0:
            self.checkpoints.save(step)

    def draw(self) -> None:
        """Draw the curves, on rank 0."""
        if dist.get_rank() == 0:
            draw(self._arguments.out, self._shown)

    def _report(self, step: int) -> None:
        report(self._arguments, self._policy, self.tokenizer, self._held_out, self.rewards, self._monitor, step)
