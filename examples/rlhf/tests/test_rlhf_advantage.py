"""Advantages of the RLHF examples beside written-out formulas in plain Python (float64), and beside TRL's."""

import copy
import math
import statistics
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from common.advantage import (
    AdaptiveKL,
    FixedKL,
    gae,
    group_advantages,
    kl_penalty,
    masked_mean,
    masked_var,
    token_rewards,
    whiten,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

# Prompts of 4 tokens, then responses: position t speaks of token t+1, so the first one is at position 3.
START, POSITIONS = 3, 10
LENGTHS = (7, 1, 4, 0, 6)


def make_batch(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(5, POSITIONS, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        mask[row, START : START + length] = True

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return SimpleNamespace(
        mask=mask,
        logprobs=-normal(5, POSITIONS).abs(),
        reference_logprobs=-normal(5, POSITIONS).abs(),
        values=normal(5, POSITIONS),
        rewards=normal(5, POSITIONS),
        scores=8 * normal(5),
    )


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=tolerance)


# --- KL and rewards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalty(kind):
    batch = make_batch()
    estimates = kl_penalty(batch.logprobs, batch.reference_logprobs, kind)
    for place in torch.cartesian_prod(torch.arange(5), torch.arange(POSITIONS)).tolist():
        p, q = (math.exp(x[tuple(place)].item()) for x in (batch.logprobs, batch.reference_logprobs))
        expected = {"k1": math.log(p / q), "k2": math.log(q / p) ** 2 / 2, "k3": q / p - 1 - math.log(q / p)}[kind]
        assert estimates[tuple(place)].item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert not kl_penalty(batch.logprobs, batch.logprobs, kind).any()


@pytest.mark.parametrize(("kind", "bias"), [("k1", 0.0), ("k3", 0.0), ("k2", None)])
def test_kl_estimates_are_as_biased_as_schulman_says(kind, bias):
    """Over a whole vocabulary the expectation is a sum. k2's is close for close distributions only."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    policy, reference = (0.2 * logits).log_softmax(1)
    exact = (policy.exp() * (policy - reference)).sum().item()
    expectation = (policy.exp() * kl_penalty(policy, reference, kind)).sum().item()
    if bias == 0.0:
        assert expectation == pytest.approx(exact, rel=1e-12)
    else:
        assert expectation == pytest.approx(exact, rel=0.1) and expectation != pytest.approx(exact, rel=1e-4)


def test_k3_has_digits_where_models_are_close():
    """In fp32, log-ratios of 1e-5: exp(x) - 1 - x would be rounding errors alone."""
    log_ratio = 1e-5 * torch.tensor([1.0, -1.0, 0.5])
    actual = kl_penalty(torch.zeros(3), log_ratio, "k3")
    assert (actual - log_ratio.double() ** 2 / 2).abs().max() < 2e-12
    assert (torch.exp(log_ratio) - 1 - log_ratio - log_ratio.double() ** 2 / 2).abs().max() > 1e-8


def deepspeed_chat_rewards(scores, logprobs, reference_logprobs, lengths, kl_coefficient, clip):
    """`compute_rewards` of DeepSpeed-Chat's ppo_trainer.py: a row of rewards for each response, padding left out.

    rewards = -kl_ctl (log_probs - ref_log_probs); rewards[j, start:ends[j]][-1] += clamp(score[j], -clip, clip), with
    ends = start + the response's length.
    """
    rows = []
    for j, length in enumerate(lengths):
        rewards = []
        for t in range(START, START + length):
            rewards.append(-kl_coefficient * (logprobs[j, t].item() - reference_logprobs[j, t].item()))
        if rewards:
            rewards[-1] += min(max(scores[j].item(), -clip), clip)
        rows.append(rewards)
    return rows


@pytest.mark.parametrize("clip", [5.0, None])
def test_token_rewards(clip):
    batch = make_batch()
    assert clip is None or (batch.scores.abs() > clip).any()
    kl = kl_penalty(batch.logprobs, batch.reference_logprobs).masked_fill(~batch.mask, math.nan)
    rewards = token_rewards(batch.scores, kl, batch.mask, 0.1, clip)
    rows = deepspeed_chat_rewards(
        batch.scores, batch.logprobs, batch.reference_logprobs, LENGTHS, 0.1, clip or math.inf
    )
    for row, expected in enumerate(rows):
        close(rewards[row][batch.mask[row]], expected)
    assert not rewards[~batch.mask].any()


def test_score_comes_at_the_last_chosen_token_behind_a_gap():
    """A response in two pieces, with tokens of a tool between them."""
    mask = torch.tensor([[False, True, True, False, False, True, False]])
    rewards = token_rewards(torch.tensor([3.0]), torch.ones(1, 7), mask, 0.5)
    close(rewards, [[0, -0.5, -0.5, 0, 0, 2.5, 0]])


# --- GAE ---------------------------------------------------------------------------------------------------------


def deepspeed_chat_gae(rewards, values, gamma, lam):
    """`get_advantages_and_returns` of DeepSpeed-Chat's ppo_trainer.py on one response without padding, as lists.

    for t from the end: nextvalues = values[t + 1] or 0 at the end; delta = rewards[t] + gamma nextvalues - values[t];
    lastgaelam = delta + gamma lam lastgaelam. returns = advantages + values.
    """
    last, advantages = 0.0, []
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        last = rewards[t] + gamma * following - values[t] + gamma * lam * last
        advantages.insert(0, last)
    return advantages, [advantage + value for advantage, value in zip(advantages, values)]


def summed_gae(rewards, values, gamma, lam):
    """The definition: A_t = sum over l of (gamma lam)^l delta_{t+l} (arXiv 1506.02438, equation 16)."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, following)]
    return [math.fsum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


def check_gae(batch, gamma, lam, tolerance=1e-12):
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, gamma, lam)
    for row in range(len(batch.mask)):
        here = batch.mask[row]
        rewards, values = batch.rewards[row][here].tolist(), batch.values[row][here].tolist()
        expected, expected_returns = deepspeed_chat_gae(rewards, values, gamma, lam)
        close(advantages[row][here], expected, tolerance)
        close(advantages[row][here], summed_gae(rewards, values, gamma, lam), tolerance)
        close(returns[row][here], expected_returns, tolerance)
    assert not advantages[~batch.mask].any() and not returns[~batch.mask].any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae(gamma, lam):
    check_gae(make_batch(), gamma, lam)
    check_gae(make_batch(dtype=torch.float32), gamma, lam, tolerance=1e-5)


@settings(derandomize=True, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(0, 9), garbage=st.sampled_from((0.0, 1e9, math.nan)))
def test_gae_with_any_mask(data, rows, width, garbage):
    """Holes too: tokens that were not chosen are passed over, whatever stands there."""
    mask = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=rows * width, max_size=rows * width)), dtype=torch.bool
    )
    mask = mask.view(rows, width)
    generator = torch.Generator().manual_seed(rows * 10 + width)
    values, rewards = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    batch = SimpleNamespace(
        mask=mask, values=values.masked_fill(~mask, garbage), rewards=rewards.masked_fill(~mask, garbage)
    )
    check_gae(batch, 0.97, 0.9)


def test_gae_with_lam_1_is_reward_to_go_minus_value():
    batch = make_batch()
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, 1.0, 1.0)
    to_go = (batch.rewards * batch.mask).flip(1).cumsum(1).flip(1) * batch.mask
    close(returns, to_go)
    close(advantages, to_go - batch.values * batch.mask)


def test_gae_has_no_gradient_and_leaves_its_arguments_alone():
    batch = make_batch()
    before = copy.deepcopy(batch)
    batch.values.requires_grad_()
    advantages, returns = gae(batch.rewards, batch.values, batch.mask, 1.0, 0.95)
    assert not advantages.requires_grad and not returns.requires_grad
    assert torch.equal(batch.values, before.values) and torch.equal(batch.rewards, before.rewards)


# --- statistics --------------------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=60)
@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=20),
    offset=st.sampled_from((0.0, -3.0, 100.0)),
    garbage=st.sampled_from((7.0, math.nan, math.inf)),
)
def test_masked_statistics_and_whitening(flags, offset, garbage):
    mask = torch.tensor(flags)
    numbers = offset + torch.randn(len(flags), generator=torch.Generator().manual_seed(len(flags)), dtype=torch.float64)
    values = numbers.masked_fill(~mask, garbage)
    chosen = numbers[mask].tolist()
    mean = statistics.fmean(chosen) if chosen else 0.0
    variance = statistics.variance(chosen) if len(chosen) > 1 else 0.0
    close(masked_mean(values, mask), mean, 1e-11)
    close(masked_var(values, mask), variance, 1e-11)
    for shift_mean in (True, False):
        whitened = whiten(values, mask, shift_mean)
        expected = [(x - mean) / math.sqrt(variance + 1e-8) + (0.0 if shift_mean else mean) for x in chosen]
        close(whitened[mask], expected, 1e-9)
        assert not whitened[~mask].any()


def test_gradient_of_masked_mean():
    mask = torch.tensor([True, False, True, True])
    values = torch.tensor([1.0, math.nan, 2.0, 4.0], requires_grad=True)
    masked_mean(values, mask).backward()
    close(values.grad, [1 / 3, 0, 1 / 3, 1 / 3], 1e-6)


def statistics_of_a_part(values, mask, rewards, sizes):
    """On a rank: statistics of its rows with those of all ranks."""
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    values, mask = values[rows], mask[rows]
    return (
        masked_mean(values, mask, group),
        masked_var(values, mask, group),
        whiten(values, mask, group=group),
        whiten(values, mask, shift_mean=False, group=group),
        group_advantages(rewards[rows], 2, "batch", group),
        group_advantages(rewards[rows], 2, "group", group),
    )


def test_statistics_over_ranks_are_those_of_the_whole():
    """8 rows on 3 ranks: 4, 2 (all masked) and 2."""
    sizes = (4, 2, 2)
    values = 5 + torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.rand(8, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[4:6] = False
    rewards = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = run_ranks(
        statistics_of_a_part, world=3, ranks_per_node=3, values=values, mask=mask, rewards=rewards, sizes=sizes
    )
    for mean, variance, *_ in results:
        close(mean, masked_mean(values, mask))
        close(variance, masked_var(values, mask))
    whole = (
        whiten(values, mask),
        whiten(values, mask, shift_mean=False),
        group_advantages(rewards, 2, "batch"),
        group_advantages(rewards, 2, "group"),
    )
    for index, expected in enumerate(whole, 2):
        close(torch.cat([result[index] for result in results]), expected)


# --- groups ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("group_size", [1, 3, 4])
def test_group_advantages(scale, group_size):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    numbers, expected = rewards.tolist(), []
    for start in range(0, 12, group_size):
        group = numbers[start : start + group_size]
        deviation = {
            "group": statistics.stdev(group) if group_size > 1 else 0.0,
            "batch": statistics.stdev(numbers),
            "none": None,
        }[scale]
        for reward in group:
            centred = reward - statistics.fmean(group)
            expected.append(centred if deviation is None else centred / (deviation + 1e-4))
    close(group_advantages(rewards, group_size, scale), expected)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_teach_nothing(scale):
    assert not group_advantages(torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0]), 2, scale).any()


@settings(derandomize=True, max_examples=30)
@given(order=st.permutations(range(4)), scale=st.sampled_from(("group", "batch", "none")))
def test_order_of_groups_does_not_matter(order, scale):
    rewards = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    advantages = group_advantages(rewards.flatten(), 3, scale).view(4, 3)
    close(group_advantages(rewards[list(order)].flatten(), 3, scale).view(4, 3), advantages[list(order)])


def trl_advantages(trl, rewards, group_size, scale):
    """GRPOTrainer._generate_and_score_completions with a stand-in for the trainer: no model, given rewards."""
    count = len(rewards)
    completions = ["x"] * count
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), process_index=0, gather=lambda x: x),
        args=SimpleNamespace(
            per_device_train_batch_size=count,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        beta=0.0,
        num_iterations=1,
        num_generations=group_size,
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        processing_class=SimpleNamespace(batch_decode=lambda ids, skip_special_tokens: completions),
        _generate=lambda prompts: ([[1]] * count, [[2]] * count, None, completions, None, {}, None, None),
        _calculate_rewards=lambda *_: rewards.unsqueeze(1),
        reward_weights=torch.ones(1),
        reward_func_names=["given"],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards=scale,
        _metrics={"train": defaultdict(list)},
        _logs={"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": {}},
        _pending_extra_logs={},
        _pending_metrics={},
    )
    return trl.GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * count)["advantages"]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_group_advantages_are_those_of_trl(scale):
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"written for the methods of TRL 1.16, not {trl.__version__}")
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    theirs = trl_advantages(trl, rewards, 4, scale)
    torch.testing.assert_close(group_advantages(rewards, 4, scale), theirs, rtol=1e-5, atol=1e-6)


# --- controllers -------------------------------------------------------------------------------------------------


def test_adaptive_kl():
    """Ziegler et al.: coefficient *= 1 + clip((kl - target) / target, -0.2, 0.2) n / horizon."""
    controller = AdaptiveKL(0.2, target=6.0, horizon=10000)
    coefficient = 0.2
    for kl, error in ((60.0, 0.2), (6.6, 0.1), (6.0, 0.0), (5.4, -0.1), (0.0, -0.2), (-3.0, -0.2)):
        controller.update(kl, 256)
        coefficient *= 1 + error * 256 / 10000
        assert controller.coefficient == pytest.approx(coefficient, rel=1e-12)
    controller.update(0.0, 10**6)  # many ranks: a factor of 1 - 0.2 * 100 would reward what goes far
    assert controller.coefficient == pytest.approx(0.8 * coefficient, rel=1e-12)


def test_controllers_continue_where_they_were():
    first, second = AdaptiveKL(0.2, 6.0, 1000), AdaptiveKL(0.9, 6.0, 1000)
    first.update(10.0, 64)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(2.0, 64)
    assert first.coefficient == second.coefficient != 0.2
    fixed, other = FixedKL(0.05), FixedKL(0.9)
    fixed.update(100.0, 64)
    other.load_state_dict(fixed.state_dict())
    assert fixed.coefficient == other.coefficient == 0.05


# --- errors ------------------------------------------------------------------------------------------------------


def test_errors():
    with pytest.raises(ValueError, match="kind is 'k4'; it must be k1, k2 or k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
    for size in (5, 0):
        with pytest.raises(ValueError, match=f"12 rewards do not make groups of {size}"):
            group_advantages(torch.zeros(12), size)
    with pytest.raises(ValueError, match="scale is 'all'; it must be group, batch or none"):
        group_advantages(torch.zeros(12), 3, "all")
    for target, horizon in ((0.0, 100), (6.0, 0)):
        with pytest.raises(ValueError, match=f"target {target} and horizon {horizon} must be above 0"):
            AdaptiveKL(0.2, target, horizon)
