"""Losses of the RLHF examples beside written-out formulas in plain Python (float64), and beside TRL's own trainers."""

import math
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import llama
from ranks import run_ranks
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "rlhf"))

from common import losses
from common.losses import (
    dpo_loss,
    grpo_loss,
    ppo_policy_loss,
    ppo_value_loss,
    reward_loss,
    sequence_logprobs,
    sft_loss,
    token_entropy,
    token_logprobs,
    tokens_a_micro_batch,
)

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


# --- of logits ---------------------------------------------------------------------------------------------------


def written_out(logits, input_ids, temperature):
    """Log-probabilities of the next tokens and entropies, number by number."""
    logprobs, entropies = [], []
    for row, ids in zip(logits.tolist(), input_ids.tolist()):
        for scores, target in zip(row[:-1], ids[1:]):
            scores = [score / temperature for score in scores]
            largest = max(scores)
            log_sum = largest + math.log(math.fsum(math.exp(score - largest) for score in scores))
            logprobs.append(scores[target] - log_sum)
            entropies.append(-math.fsum(math.exp(score - log_sum) * (score - log_sum) for score in scores))
    shape = (input_ids.shape[0], input_ids.shape[1] - 1)
    return (torch.tensor(values, dtype=torch.float64).view(shape) for values in (logprobs, entropies))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 9)),
    temperature=st.sampled_from((0.3, 1.0, 1.7)),
    chunk=st.integers(1, 60),
    scale=st.sampled_from((0.0, 1.0, 40.0)),
    dtype=st.sampled_from((torch.float64, torch.float32)),
)
def test_logprobs_and_entropy(shape, temperature, chunk, scale, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    logits = (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    input_ids = torch.randint(0, shape[2], shape[:2], generator=generator)
    logprobs, entropies = written_out(logits, input_ids, temperature)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 3e-5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK", chunk)
        torch.testing.assert_close(token_logprobs(logits, input_ids, temperature), logprobs.to(dtype), **tolerance)
        torch.testing.assert_close(token_entropy(logits, temperature), entropies.to(dtype), **tolerance)


@pytest.mark.parametrize("chunk", [1, 14, 35, 10**6])
def test_gradients_of_logprobs_and_entropy(chunk, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK", chunk)
    torch.manual_seed(0)
    logits = torch.randn(3, 5, 7, dtype=torch.float64, requires_grad=True)
    input_ids = torch.randint(0, 7, (3, 5))
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, input_ids, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, 0.7), logits)
    transposed = torch.randn(5, 3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x.transpose(0, 1), input_ids), transposed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_with_in_fp32(dtype):
    torch.manual_seed(0)
    narrow = (5 * torch.randn(2, 6, 33)).to(dtype).requires_grad_()
    wide = narrow.detach().float().requires_grad_()
    input_ids = torch.randint(0, 33, (2, 6))
    for of in (lambda x: token_logprobs(x, input_ids, 0.9), lambda x: token_entropy(x, 0.9)):
        result, expected = of(narrow), of(wide)
        assert result.dtype == torch.float32 and torch.equal(result, expected)
        (gradient,) = torch.autograd.grad(result.square().sum(), narrow)
        (expected_gradient,) = torch.autograd.grad(expected.square().sum(), wide)
        assert gradient.dtype == dtype and torch.equal(gradient, expected_gradient.to(dtype))


class LargestTensors(TorchDispatchMode):
    """The most elements that a tensor made inside has, by dtype; views are none."""

    def __init__(self):
        super().__init__()
        self.elements = defaultdict(int)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outcome = function(*args, **(kwargs or {}))
        for tensor in outcome if isinstance(outcome, (tuple, list)) else (outcome,):
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.elements[tensor.dtype] = max(self.elements[tensor.dtype], tensor.numel())
        return outcome


@pytest.mark.parametrize("of", [lambda x, ids: token_logprobs(x, ids, 0.9), lambda x, ids: token_entropy(x, 0.9)])
def test_no_wide_copy_of_the_logits(of, monkeypatch):
    """fp32 tensors are no larger than a chunk; in the logits' own dtype there is their gradient and nothing larger."""
    chunk, shape = 1024, (4, 32, 64)
    monkeypatch.setattr(losses, "CHUNK", chunk)
    torch.manual_seed(0)
    logits = torch.randn(shape).bfloat16().requires_grad_()
    kept = []
    with (
        LargestTensors() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
    ):
        of(logits, torch.zeros(shape[:2], dtype=torch.int64)).sum().backward()
    assert largest.elements[torch.float32] == chunk < logits.numel()
    assert largest.elements[torch.bfloat16] == logits.numel()
    assert [x.data_ptr() for x in kept if x.is_floating_point() and x.numel() > chunk] == [logits.data_ptr()]


def test_temperature_must_be_above_zero():
    for of in (
        lambda: token_logprobs(torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64), 0.0),
        lambda: token_entropy(torch.zeros(1, 2, 3), -1.0),
    ):
        with pytest.raises(ValueError, match=r"temperature is (0\.0|-1\.0); it must be above 0"):
            of()


def test_sequence_logprobs():
    batch = make_batch()
    expected = [math.fsum(batch.logprobs[b, t].item() for r, t in chosen(batch) if r == b) for b in range(5)]
    check(sequence_logprobs(batch.logprobs, batch.mask), expected)
    assert expected[1] == 0.0


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
@settings(derandomize=True, deadline=None, max_examples=6)
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


# --- beside TRL --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trl():
    """TRL, whose trainers compute their losses in methods that are called here with a stand-in for the trainer."""
    trl = pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    if not trl.__version__.startswith("1.16."):
        pytest.skip(f"written for the methods of TRL 1.16, not {trl.__version__}")
    return trl


def stand_in(**attributes):
    """What the trainers' loss methods use of `self`: one process, no accumulation, nothing but the loss."""
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
