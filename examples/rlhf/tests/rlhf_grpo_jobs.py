"""Jobs about GRPO: what only several ranks show, step by step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import full_weights
from rlhf_jobs import arguments_of, config_of
from running import switch

from zeropp_fp8 import sharded


class Grpo:
    """The models and one rollout of GRPO: four prompts, two answers each."""

    def __init__(self, folder, config, temperature=0.7, **given):
        import grpo
        from common.models import load_tokenizer
        from common.roles import load_policy_and_reference
        from common.rollout import Sampling, roll_out

        switch(True)
        self.grpo = grpo
        given = {"max_new_tokens": 6, "lr": 1e-2, "group_size": 2, **given}
        self.arguments = arguments_of("GRPOArguments", folder, config, temperature=temperature, **given)
        self.tokenizer = load_tokenizer(given["model"])
        self.policy, self.reference = load_policy_and_reference(
            self.arguments, config, steps=10, with_reference=self.arguments.beta > 0
        )
        rank = dist.get_rank()
        prompts = [self.tokenizer.encode(f"{i // 2}+{rank}=") for i in range(8)]
        self.rollout = roll_out(self.policy, self.tokenizer, prompts, Sampling(6, temperature=temperature), seed=rank)

    def experience(self, scores=None):
        if scores is None:
            scores = torch.linspace(-1, 1, 8).square() + dist.get_rank()
        models = self.policy, self.reference
        return self.grpo.make_experience(self.arguments, *models, self.rollout, scores, iteration=0)

    def train(self, experience, iteration=0):
        return self.grpo.train_on(self.arguments, self.policy, experience, iteration)


def first_iterations(folder, recipe, **given):
    """KL and ratios before the first step and after it."""
    from common.roles import logprobs_of

    run = Grpo(folder, config_of(recipe, given.pop("overrides", None)), **given)
    scores = torch.tensor([0.0, 0, 1, 0, 2, 2, 0, -1]) if dist.get_rank() == 0 else torch.arange(8.0)
    experience, figures = run.experience(scores)
    ratios = []
    for part in experience.parts(2):
        ratio = (logprobs_of(run.policy, part, 0.7) - part.old_logprobs).exp()
        ratios.append((ratio - 1)[part.response_mask].abs().max().item())
    trained = run.train(experience)
    of_trained, later = run.experience(scores)
    names = [name for name, _ in run.policy.engine.module.named_parameters() if "lora_" in name]
    return {
        "first ratios": ratios,
        "clip fractions": [float(each["clip_fraction"]) for each in trained],
        "trained": [{name: float(value) for name, value in each.items()} for each in trained],
        "learned from": [experience.input_ids.tolist(), experience.advantages.tolist()],
        "rolled out": run.rollout.input_ids.tolist(),
        "figures": {name: value.item() for name, value in figures.items()},
        "later": {name: value.item() for name, value in later.items()},
        "reference stays": run.reference is None
        or torch.equal(of_trained.reference_logprobs, experience.reference_logprobs),
        "engines": len({id(role.engine) for role in (run.policy, run.reference) if role is not None}),
        "adapters": sorted({name.split(".")[-2] for name in names}),
    }


def gradients(folder, recipe, **given):
    """The gradients of the first optimizer step in full, and what they are made of."""
    from deepspeed.utils import safe_get_full_grad

    run = Grpo(folder, config_of(recipe), **given)
    experience, _ = run.experience()
    kept, engine = [], run.policy.engine
    # As if the policy were no longer the one that answered, nor the reference: ratios are not 1, KL is not 0.
    waves = torch.sin(torch.arange(experience.old_logprobs.numel())).view_as(experience.old_logprobs)
    experience.old_logprobs += 0.2 * waves
    experience.reference_logprobs += 0.3 * waves.flip(0)
    step, policy_loss, taken = engine.step, run.grpo.policy_loss, []

    def keep_and_step():
        if engine.is_gradient_accumulation_boundary() and not kept:
            named = engine.module.named_parameters()
            kept.append({name: safe_get_full_grad(p).clone() for name, p in named if p.requires_grad})
        step()

    def take(arguments, policy, batch, tokens):
        taken.append(batch)
        return policy_loss(arguments, policy, batch, tokens)

    engine.step, run.grpo.policy_loss = keep_and_step, take
    try:
        figures = run.train(experience)
    finally:
        run.grpo.policy_loss = policy_loss
    fields = experience.__dataclass_fields__
    batches = [{name: getattr(batch, name) for name in fields} for batch in taken[:2]]
    return kept[0], batches, figures[:2]


def rewarded(folder, recipe, reward_model, fields, **given):
    """The reward model alone, as GRPO has it."""
    from common.models import load_tokenizer
    from common.roles import in_parts, load_reward, scores_of

    config = config_of(recipe, **fields)
    run = Grpo(folder, config, reward_model=reward_model, **given)
    reward = load_reward(run.arguments, config, load_tokenizer(given["model"]))
    params = dict(reward.engine.module.named_parameters())
    return {
        "rollout": {name: getattr(run.rollout, name) for name in ("input_ids", "attention_mask")},
        "scores": in_parts(lambda part: scores_of(reward, part), run.rollout, 2),
        "weights": {name.removeprefix("model."): w for name, w in full_weights(reward.engine.module).items()},
        "stored": sum(sharded.known(p).stored is not None for p in params.values()),
        "trained": [name for name, param in params.items() if param.requires_grad],
        "adapters": sum("lora_" in name for name in params),
    }
