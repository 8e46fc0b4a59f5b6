"""Losses of the RLHF examples beside those of TRL's own trainers, on the same batches."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from common import losses
from common.losses import (
    dpo_loss,
    ppo_policy_loss,
    reward_loss,
    sequence_logprobs,
    sft_loss,
    token_entropy,
    token_logprobs,
)
from models import llama
from rlhf_loss_cases import GRPO_ARGUMENTS, POSITIONS, TARGET, grpo, make_batch


@pytest.fixture(scope="module")
def trl():
    """TRL, whose trainers compute their losses in methods that are called here with a stand-in for the trainer."""
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"written for the methods of TRL 1.16, not {trl.__version__}")
    return trl


def stand_in(**attributes):
    """The parts of `self` that the trainers' loss methods use: one process, no accumulation, nothing but the loss."""
    accelerator = SimpleNamespace(
        num_processes=1,
        device=torch.device("cpu"),
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        unwrap_model=lambda x: x,
    )
    return SimpleNamespace(
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        aux_loss_enabled=False,
        **attributes,
    )


def trl_grpo(
    trl,
    batch,
    kind,
    beta=0.0,
    importance_level="token",
    ratio_limit=None,
    token_count=0,
    max_tokens=0,
    old=True,
    clip=None,
):
    """GRPOTrainer._compute_loss; the model's log-probabilities are the batch's."""
    low, high = clip or ((0.1, 0.15) if importance_level == "sequence" else (0.2, 0.28))
    trainer = stand_in(
        args=SimpleNamespace(delta=ratio_limit, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=kind,
        beta=beta,
        importance_sampling_level=importance_level,
        epsilon_low=low,
        epsilon_high=high,
        max_completion_length=max_tokens,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, torch.zeros_like(batch.logprobs), None),
    )
    inputs = {
        "prompt_ids": torch.zeros(5, 1),
        "prompt_mask": torch.ones(5, 1),
        "completion_ids": torch.zeros(5, POSITIONS),
        "completion_mask": batch.mask.int(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logprobs if old else None,
        "ref_per_token_logps": batch.reference_logprobs,
        "num_items_in_batch": torch.tensor(float(token_count)),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, trainer._metrics["train"]


@pytest.mark.parametrize("name", GRPO_ARGUMENTS)
def test_grpo_loss_is_that_of_trl(name, trl):
    batch, arguments = make_batch(torch.float32), GRPO_ARGUMENTS[name]
    batch.logprobs.requires_grad_()
    loss, stats = grpo(batch, **arguments)
    expected, metrics = trl_grpo(trl, batch, **arguments)
    torch.testing.assert_close(loss, expected, **TARGET)
    gradients = [torch.autograd.grad(each, batch.logprobs)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients, **TARGET)
    if "beta" in arguments and arguments.get("token_count") is None:
        assert stats["kl"].item() == pytest.approx(metrics["kl"][0], rel=1e-5)
    if arguments.get("importance_level") != "sequence" and arguments.get("token_count") is None:
        for ours, theirs in (("", "region"), ("_low", "low"), ("_high", "high")):
            assert stats[f"clip_fraction{ours}"].item() == pytest.approx(metrics[f"clip_ratio/{theirs}_mean"][0])


def test_ppo_policy_loss_is_that_of_trl(trl):
    """TRL 1.16 has no PPO; its GRPO with a mean over tokens and an advantage for each token is PPO's policy loss."""
    batch = make_batch(torch.float32)
    batch.logprobs.requires_grad_()
    loss, stats = ppo_policy_loss(batch.logprobs, batch.old_logprobs, batch.token_advantages, batch.mask, 0.2)
    batch.advantages = batch.token_advantages
    expected, metrics = trl_grpo(trl, batch, "bnpo", clip=(0.2, 0.2))
    torch.testing.assert_close(loss, expected, **TARGET)
    assert stats["clip_fraction"].item() == pytest.approx(metrics["clip_ratio/region_mean"][0])
    gradients = [torch.autograd.grad(each, batch.logprobs)[0] for each in (loss, expected)]
    torch.testing.assert_close(*gradients, **TARGET)


@pytest.mark.parametrize("kind", losses.DPO_KINDS)
def test_dpo_loss_is_that_of_trl(kind, trl):
    """DPOTrainer._compute_loss on log-probabilities of tokens, the chosen five rows first."""
    winners, losers = make_batch(torch.float32, 1), make_batch(torch.float32, 2)
    losers.mask = losers.mask.flip(0)
    for batch in (winners, losers):
        batch.logprobs.requires_grad_()
    reference = [sequence_logprobs(batch.reference_logprobs, batch.mask) for batch in (winners, losers)]
    mask = torch.cat([winners.mask, losers.mask])
    tokens = [batch.mask.sum(1) for batch in (winners, losers)]
    ours, stats = dpo_loss(
        *(sequence_logprobs(batch.logprobs, batch.mask) for batch in (winners, losers)),
        *reference,
        0.1,
        0.0,
        kind,
        *tokens,
    )

    def model(**_):
        log_probs = torch.cat([winners.logprobs, losers.logprobs]) * mask
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=mask)

    trainer = stand_in(
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=0.1,
        label_smoothing=0.0,
        use_weighting=False,
    )
    inputs = {
        "input_ids": torch.zeros(10, POSITIONS + 1, dtype=torch.int64),
        "attention_mask": torch.ones(10, POSITIONS + 1),
        "completion_mask": torch.nn.functional.pad(mask, (1, 0)).int(),
        "ref_chosen_logps": reference[0],
        "ref_rejected_logps": reference[1],
    }
    theirs = trl.DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    torch.testing.assert_close(ours, theirs, **TARGET)
    for batch in (winners, losers):
        gradients = [torch.autograd.grad(each, batch.logprobs, retain_graph=True)[0] for each in (ours, theirs)]
        torch.testing.assert_close(*gradients, **TARGET)
    metrics = trainer._metrics["train"]
    for name, key in (
        ("accuracy", "rewards/accuracies"),
        ("margin", "rewards/margins"),
        ("chosen_reward", "rewards/chosen"),
        ("rejected_reward", "rewards/rejected"),
    ):
        assert stats[name].item() == pytest.approx(metrics[key][0], rel=1e-5)


@pytest.mark.parametrize("with_margin", [True, False])
@pytest.mark.parametrize("centering", [None, 0.01])
def test_reward_loss_is_that_of_trl(with_margin, centering, trl):
    """RewardTrainer.compute_loss on scores, the chosen five first."""
    scores = torch.randn(10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    margin = torch.rand(5, generator=torch.Generator().manual_seed(1)) if with_margin else None
    ours, stats = reward_loss(*scores.chunk(2), margin, centering or 0.0)
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=centering))
    inputs = {"attention_mask": torch.ones(10, 4)} | ({"margin": margin} if with_margin else {})

    def model(**_):
        return SimpleNamespace(logits=scores.unsqueeze(-1))

    theirs = trl.RewardTrainer.compute_loss(trainer, model, inputs)
    torch.testing.assert_close(ours, theirs, **TARGET)
    gradients = [torch.autograd.grad(each, scores)[0] for each in (ours, theirs)]
    torch.testing.assert_close(*gradients, **TARGET)
    metrics = trainer._metrics["train"]
    assert stats["accuracy"].item() == pytest.approx(metrics["accuracy"][0])
    assert stats["margin"].item() == pytest.approx(metrics["margin"][0], rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_entropy_and_sft_loss_are_those_of_trl(temperature, trl):
    """On a small Llama: TRL's fused LM head and SFTTrainer.compute_loss beside the logits; gradients of all weights."""
    from trl.trainer.utils import add_fused_lm_head

    model = llama()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(8)  # else each token's probability is about 1 / V
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy", "is_top1"))
    mask = make_batch().mask
    input_ids = torch.randint(0, 256, (5, POSITIONS + 1), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.nn.functional.pad(mask, (1, 0)), input_ids, -100)
    theirs = model(input_ids=input_ids, labels=labels, fused_lm_head=True)
    logits = model(input_ids=input_ids).logits
    logprobs = token_logprobs(logits, input_ids, temperature)
    assert logprobs[mask].std() > 1
    torch.testing.assert_close(logprobs * mask, theirs.log_probs, **TARGET)
    torch.testing.assert_close(token_entropy(logits, temperature) * mask, theirs.entropy, **TARGET)

    trainer = stand_in(
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
    )
    trainer.accelerator.parallelism_config = None
    inputs = {"input_ids": input_ids, "labels": labels, "attention_mask": torch.ones_like(input_ids)}
    for count in (None, 50):
        loss, _ = sft_loss(token_logprobs(model(input_ids=input_ids).logits, input_ids, temperature), mask, count)
        expected = trl.SFTTrainer.compute_loss(trainer, model, dict(inputs), num_items_in_batch=count)
        torch.testing.assert_close(loss, expected, **TARGET)
        gradients = [torch.autograd.grad(each, list(model.parameters())) for each in (loss, expected)]
        for ours, wanted in zip(*gradients):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
