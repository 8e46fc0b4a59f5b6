"""Log-probabilities and entropies in the RLHF examples, beside written-out formulas in plain Python (float64)."""

import math
from collections import defaultdict

import pytest
import torch
from common import losses
from common.losses import (
    sequence_logprobs,
    token_entropy,
    token_logprobs,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_loss_cases import (
    check,
    chosen,
    make_batch,
)
from torch.utils._python_dispatch import TorchDispatchMode


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


@settings(derandomize=True, max_examples=60)
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
