"""Losses of the RLHF examples beside written-out formulas in plain Python (float64)."""

import math
from types import SimpleNamespace

import pytest
import torch
from common.losses import (
    dpo_loss,
    grpo_loss,
    ppo_policy_loss,
    ppo_value_loss,
    reward_loss,
    sft_loss,
    tokens_a_micro_batch,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from rlhf_loss_cases import (
    CLOSE,
    GRPO_ARGUMENTS,
    LENGTHS,
    TOKEN_FIELDS,
    check,
    chosen,
    grpo,
    log_sigmoid,
    make_batch,
)

# --- supervised losses beside written-out formulas ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_sft_loss(dtype):
    batch = make_batch(dtype)
    total = -math.fsum(batch.logprobs[place].item() for place in chosen(batch))
    for token_count, divisor in ((None, sum(LENGTHS)), (50, 50), (torch.tensor(0.5), 0.5)):
        loss, stats = sft_loss(batch.logprobs, batch.mask, token_count)
        check(loss, total / divisor, dtype)
        check(stats["sft_loss"], total / divisor, dtype)


@pytest.mark.parametrize("dtype", list(CLOSE))
def test_reward_loss(dtype):
    winner, loser, margin = (make_batch(dtype, seed).advantages for seed in (1, 2, 3))
    margin = margin.abs()
    for with_margin in (False, True):
        for centering in (0.0, 0.01):
            terms = []
            for a, b, m in zip(winner.tolist(), loser.tolist(), margin.tolist()):
                terms.append(-log_sigmoid(a - b - m * with_margin) + centering * (a + b) ** 2)
            loss, stats = reward_loss(winner, loser, margin if with_margin else None, centering)
            check(loss, math.fsum(terms) / 5, dtype)
            leads = [a - b for a, b in zip(winner.tolist(), loser.tolist())]
            expected = {
                "reward_loss": math.fsum(terms) / 5,
                "accuracy": sum(lead > 0 for lead in leads) / 5,
                "margin": sum(leads) / 5,
                "chosen_score": sum(winner.tolist()) / 5,
                "rejected_score": sum(loser.tolist()) / 5,
            }
            assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected, rel=1e-5)


def dpo_batch(dtype):
    """Sums of log-probabilities of five pairs, and tokens of the completions."""
    sums = [-20 + 8 * make_batch(dtype, seed).advantages for seed in (4, 5, 6, 7)]
    return sums, torch.tensor([3, 9, 1, 4, 0]), torch.tensor([5, 2, 2, 7, 1])


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("with_reference", [True, False])
@pytest.mark.parametrize(
    ("kind", "label_smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("hinge", 0.0), ("ipo", 0.0)]
)
def test_dpo_loss(kind, label_smoothing, with_reference, dtype):
    beta = 0.1
    (winner, loser, winner_reference, loser_reference), *tokens = dpo_batch(dtype)
    if not with_reference:
        winner_reference = loser_reference = None
    terms, rewards = [], []
    for row in range(5):
        h = [winner[row].item(), loser[row].item()]
        if with_reference:
            h = [h[0] - winner_reference[row].item(), h[1] - loser_reference[row].item()]
        rewards.append([beta * value for value in h])
        z = beta * (h[0] - h[1])
        terms.append(
            {
                "sigmoid": -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z),
                "hinge": max(0.0, 1 - z),
                "ipo": (h[0] / max(1, tokens[0][row].item()) - h[1] / max(1, tokens[1][row].item()) - 0.5 / beta) ** 2,
            }[kind]
        )
    loss, stats = dpo_loss(
        winner,
        loser,
        winner_reference,
        loser_reference,
        beta,
        label_smoothing,
        kind,
        *(tokens if kind == "ipo" else ()),
    )
    check(loss, math.fsum(terms) / 5, dtype)
    expected = {
        "dpo_loss": math.fsum(terms) / 5,
        "accuracy": sum(a > b for a, b in rewards) / 5,
        "margin": sum(a - b for a, b in rewards) / 5,
        "chosen_reward": sum(a for a, _ in rewards) / 5,
        "rejected_reward": sum(b for _, b in rewards) / 5,
    }
    assert {name: value.item() for name, value in stats.items()} == pytest.approx(expected, rel=1e-5)


# --- on-policy losses beside written-out formulas ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("token_count", [None, 40])
def test_ppo_policy_loss(token_count, dtype):
    """DeepSpeed-Chat, `actor_loss_fn`: sum of max(-A r, -A clamp(r, 1 - c, 1 + c)) mask / sum of mask."""
    batch, clip = make_batch(dtype), 0.2
    total = clipped = divergence = 0.0
    for place in chosen(batch):
        log_ratio = batch.logprobs[place].item() - batch.old_logprobs[place].item()
        ratio, advantage = math.exp(log_ratio), batch.token_advantages[place].item()
        first, second = -advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip)
        total += max(first, second)
        clipped += second > first
        divergence += ratio - 1 - log_ratio
    assert 0 < clipped < sum(LENGTHS)  # else this shows nothing
    divisor = token_count or sum(LENGTHS)
    loss, stats = ppo_policy_loss(
        batch.logprobs, batch.old_logprobs, batch.token_advantages, batch.mask, clip, token_count
    )
    check(loss, total / divisor, dtype)
    check(stats["policy_loss"], total / divisor, dtype)
    check(stats["clip_fraction"], clipped / divisor, dtype)
    check(stats["approx_kl"], divergence / divisor, dtype)


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("clip", [0.2, 0.8, None])
@pytest.mark.parametrize("token_count", [None, 40])
def test_ppo_value_loss(clip, token_count, dtype):
    """DeepSpeed-Chat, `critic_loss_fn`: 0.5 sum of max((V - R)^2, (V' - R)^2) mask / sum of mask."""
    batch = make_batch(dtype)
    total = clipped = 0.0
    for place in chosen(batch):
        value, old, target = (x[place].item() for x in (batch.values, batch.old_values, batch.returns))
        first = second = (value - target) ** 2
        if clip is not None:
            second = (min(max(value, old - clip), old + clip) - target) ** 2
        total += 0.5 * max(first, second)
        clipped += second > first
    assert (clipped > 0) == (clip is not None)
    divisor = token_count or sum(LENGTHS)
    loss, stats = ppo_value_loss(batch.values, batch.old_values, batch.returns, batch.mask, clip, token_count)
    check(loss, total / divisor, dtype)
    check(stats["value_loss"], total / divisor, dtype)
    check(stats["value_clip_fraction"], clipped / divisor, dtype)


def written_out_grpo(
    batch, kind, beta=0.0, importance_level="token", ratio_limit=math.inf, token_count=None, max_tokens=None, old=True
):
    """Loss, share of tokens clipped below and above, KL a token."""
    low, high = (0.1, 0.15) if importance_level == "sequence" else (0.2, 0.28)
    sums, clipped_low, clipped_high, divergences = [], 0, 0, []
    for b, length in enumerate(LENGTHS):
        advantage, total = batch.advantages[b].item(), 0.0
        places = [t for row, t in chosen(batch) if row == b]
        log_ratios = {t: (batch.logprobs - batch.old_logprobs)[b, t].item() if old else 0.0 for t in places}
        for t in places:
            log_ratio = log_ratios[t]
            if importance_level == "sequence":
                log_ratio = math.fsum(log_ratios.values()) / length
            ratio = math.exp(log_ratio)
            total -= min(min(ratio, ratio_limit) * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
            clipped_low += ratio < 1 - low and advantage < 0
            clipped_high += ratio > 1 + high and advantage > 0
            toward = batch.reference_logprobs[b, t].item() - batch.logprobs[b, t].item()
            divergences.append(math.exp(toward) - 1 - toward)
            total += beta * divergences[-1]
        sums.append(total)
    loss = {
        "grpo": math.fsum(total / max(1, length) for total, length in zip(sums, LENGTHS)) / len(LENGTHS),
        "bnpo": math.fsum(sums) / sum(LENGTHS),
        "dapo": math.fsum(sums) / (token_count or 1),
        "dr_grpo": math.fsum(sums) / (len(LENGTHS) * (max_tokens or 1)),
    }[kind]
    divisor = token_count or sum(LENGTHS)
    return loss, clipped_low / divisor, clipped_high / divisor, math.fsum(divergences) / divisor


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("name", GRPO_ARGUMENTS)
def test_grpo_loss(name, dtype):
    batch, arguments = make_batch(dtype), GRPO_ARGUMENTS[name]
    expected, low, high, divergence = written_out_grpo(batch, **arguments)
    loss, stats = grpo(batch, **arguments)
    check(loss, expected, dtype)
    check(stats["policy_loss"], expected, dtype)
    check(stats["clip_fraction_low"], low, dtype)
    check(stats["clip_fraction_high"], high, dtype)
    check(stats["clip_fraction"], low + high, dtype)
    assert (low > 0 and high > 0) == (name != "on policy")
    assert ("kl" in stats) == ("beta" in arguments)
    if "kl" in stats:
        check(stats["kl"], divergence, dtype)


def test_kl_is_measured_without_beta_too():
    batch = make_batch()
    plain, _ = grpo(batch, kind="bnpo")
    loss, stats = grpo(batch, kind="bnpo", reference_logprobs=batch.reference_logprobs)
    assert loss == plain
    check(stats["kl"], written_out_grpo(batch, kind="bnpo")[3])


# --- properties --------------------------------------------------------------------------------------------------

# Losses of tokens: name -> (batch, further arguments) -> (loss, stats), and which tensors have a gradient.
OF_TOKENS = {
    "sft": (lambda b, **more: sft_loss(b.logprobs, b.mask, **more), ("logprobs",)),
    "policy": (
        lambda b, **more: ppo_policy_loss(b.logprobs, b.old_logprobs, b.token_advantages, b.mask, 0.2, **more),
        ("logprobs",),
    ),
    "value": (
        lambda b, **more: ppo_value_loss(b.values, b.old_values, b.returns, b.mask, 0.2, **more),
        ("values",),
    ),
    "value, no clip": (
        lambda b, **more: ppo_value_loss(b.values, b.old_values, b.returns, b.mask, None, **more),
        ("values",),
    ),
} | {
    f"grpo: {name}": (lambda b, arguments=arguments, **more: grpo(b, **{**arguments, **more}), ("logprobs",))
    for name, arguments in GRPO_ARGUMENTS.items()
}
EACH = pytest.mark.parametrize("name", OF_TOKENS)


def loss_and_gradients(name, batch, **more):
    of, trained = OF_TOKENS[name]
    batch = SimpleNamespace(**vars(batch))
    inputs = []
    for field in trained:
        setattr(batch, field, getattr(batch, field).clone().requires_grad_())
        inputs.append(getattr(batch, field))
    loss, stats = of(batch, **more)
    assert not any(value.requires_grad for value in stats.values())
    return loss, stats, torch.autograd.grad(loss, inputs)


@EACH
@pytest.mark.parametrize("garbage", [0.0, 1e4, math.inf, -math.inf, math.nan])
def test_padding_never_matters(name, garbage):
    batch = make_batch()
    expected = loss_and_gradients(name, batch)
    for field in TOKEN_FIELDS:
        setattr(batch, field, getattr(batch, field).masked_fill(~batch.mask, garbage))
    loss, stats, gradients = loss_and_gradients(name, batch)
    assert torch.equal(loss, expected[0]) and stats == expected[1]
    for gradient, wanted in zip(gradients, expected[2]):
        assert torch.equal(gradient, wanted) and not gradient[~batch.mask].any()


@EACH
@settings(derandomize=True, max_examples=6)
@given(order=st.permutations(range(5)), more_padding=st.integers(0, 3))
def test_order_of_sequences_and_width_do_not_matter(name, order, more_padding):
    batch = make_batch()
    loss, stats, _ = loss_and_gradients(name, batch)
    for field in (*TOKEN_FIELDS, "mask", "advantages"):
        tensor = getattr(batch, field)[list(order)]
        setattr(batch, field, torch.nn.functional.pad(tensor, (0, more_padding)) if tensor.dim() == 2 else tensor)
    again, stats_again, _ = loss_and_gradients(name, batch)
    torch.testing.assert_close(again, loss, rtol=1e-13, atol=1e-13)
    for key, value in stats.items():
        torch.testing.assert_close(stats_again[key], value, rtol=1e-13, atol=1e-13)


@EACH
def test_gradients(name):
    of, (field,) = OF_TOKENS[name]
    batch = make_batch()

    def loss_of(tensor):
        return of(SimpleNamespace(**{**vars(batch), field: tensor}))[0]

    if name != "grpo: on policy":  # there logprobs are the old ones too, which have no gradient
        assert torch.autograd.gradcheck(loss_of, getattr(batch, field).clone().requires_grad_())


def test_gradient_on_policy():
    """With old = new the gradient is that of -A log p, by the chain rule with ratio 1."""
    batch = make_batch()
    _, _, (gradient,) = loss_and_gradients("grpo: on policy", batch)
    expected = -batch.advantages.unsqueeze(1) * batch.mask / sum(LENGTHS)
    torch.testing.assert_close(gradient, expected)


def test_gradients_of_pairs():
    (winner, loser, *reference), *tokens = dpo_batch(torch.float64)
    inputs = (winner.clone().requires_grad_(), loser.clone().requires_grad_())
    for arguments in ((0.1,), (0.1, 0.2), (0.1, 0.0, "hinge"), (0.1, 0.0, "ipo", *tokens)):
        assert torch.autograd.gradcheck(
            lambda a, b, arguments=arguments: dpo_loss(a, b, *reference, *arguments)[0], inputs
        )
    margin = torch.rand(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda a, b: reward_loss(a, b, margin, 0.01)[0], inputs)


@EACH
def test_all_masked(name):
    batch = make_batch()
    batch.mask = torch.zeros_like(batch.mask)
    for more in ({}, {"token_count": 0}, {"token_count": torch.tensor(0.0)}):
        loss, stats, gradients = loss_and_gradients(name, batch, **more)
        assert loss == 0 and not any(stats.values())
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("name", [name for name in OF_TOKENS if "grpo" not in name or "dapo" in name])
def test_mean_over_micro_batches_is_the_mean_over_tokens(name):
    """Micro-batches of 2, 2 and 1 sequences with a shared token count: their mean is the loss of all five."""
    batch = make_batch()
    parts = [slice(0, 2), slice(2, 4), slice(4, 5)]
    whole, stats, (gradient,) = loss_and_gradients(name, batch, token_count=sum(LENGTHS))
    count = tokens_a_micro_batch([batch.mask[part] for part in parts])
    assert count == sum(LENGTHS) / 3
    losses_, stats_, gradients = [], [], []
    for part in parts:
        micro = SimpleNamespace(**{field: tensor[part] for field, tensor in vars(batch).items()})
        loss, micro_stats, (micro_gradient,) = loss_and_gradients(name, micro, token_count=count)
        losses_.append(loss)
        stats_.append(micro_stats)
        gradients.append(micro_gradient)
    torch.testing.assert_close(torch.stack(losses_).mean(), whole)
    torch.testing.assert_close(torch.cat(gradients) / 3, gradient)
    for key, value in stats.items():
        torch.testing.assert_close(torch.stack([each[key] for each in stats_]).mean(), value)


def count_on_ranks():
    rank = torch.distributed.get_rank()
    masks = [torch.ones(2, 3 * rank + 1, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool)][: rank + 1]
    return tokens_a_micro_batch(masks, torch.distributed.group.WORLD).item()


def test_token_count_over_ranks():
    """Rank 0: one micro-batch of 2 tokens; rank 1: two, of 8 and 0 tokens."""
    assert run_ranks(count_on_ranks, world=2) == [pytest.approx(10 / 3)] * 2


# --- errors ------------------------------------------------------------------------------------------------------


def test_errors():
    batch, one = make_batch(), torch.ones(1)
    for arguments, message in (
        ({"kind": "nonsense"}, "kind is 'nonsense'; it must be one of grpo, bnpo, dapo, dr_grpo"),
        ({"kind": "dapo"}, "kind dapo needs token_count"),
        ({"kind": "dr_grpo"}, "kind dr_grpo needs max_tokens"),
        ({"importance_level": "word"}, "importance_level is 'word'; it must be token or sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo(batch, **arguments)
    with pytest.raises(ValueError, match=r"beta 0\.1 needs reference_logprobs"):
        grpo_loss(batch.logprobs, None, batch.advantages, batch.mask, 0.2, 0.2, beta=0.1)
    for arguments, message in (
        ((0.0, "nonsense"), "kind is 'nonsense'; it must be one of sigmoid, hinge, ipo"),
        ((0.1, "ipo", one, one), r"label smoothing 0\.1 \(kind ipo\) goes with sigmoid, from 0 to 0\.5"),
        ((0.5, "sigmoid"), r"label smoothing 0\.5"),
        ((-0.1, "sigmoid"), r"label smoothing -0\.1"),
        ((0.0, "ipo"), "ipo needs chosen_tokens and rejected_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            dpo_loss(one, one, one, one, 0.1, *arguments)
