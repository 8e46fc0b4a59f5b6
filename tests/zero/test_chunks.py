"""An update chunk by chunk is the update of the whole, in every bit and in what the optimizer keeps."""

import copy
import warnings

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeropp_fp8.zero import chunks

CHUNK = 64  # a multiple of what torch's loops on a CPU take at once: they round a tail otherwise
NUMELS = (0, 1, 64, 65, 64 * 5 + 17)


def fused_adam(params, **options):
    """DeepSpeed's FusedAdam with a stand-in for its CUDA op, which gets lists of tensors and a count of steps."""
    optimizer = FusedAdam.__new__(FusedAdam)
    defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    torch.optim.Optimizer.__init__(optimizer, params, defaults | options)
    optimizer.adam_w_mode, optimizer._dummy_overflow_buf = 1, None

    def op(chunk, flag, lists, lr, beta1, beta2, eps, step, mode, correction, decay):
        for grad, param, exp_avg, exp_avg_sq in zip(*lists):
            exp_avg.mul_(beta1).add_(grad * (1 - beta1))
            exp_avg_sq.mul_(beta2).add_(grad * grad * (1 - beta2))
            root = (exp_avg_sq / (1 - beta2**step)).sqrt() + eps
            param.sub_(lr * (exp_avg / (1 - beta1**step) / root + decay * param))

    optimizer.multi_tensor_adam = op
    return optimizer


def of(cls, **options):
    return pytest.param(lambda params: cls(params, **options), id=f"{cls.__name__}-{'-'.join(map(str, options))}")


OPTIMIZERS = [
    *(of(torch.optim.AdamW, **how) for how in ({}, {"foreach": True}, {"foreach": False}, {"fused": True})),
    *(of(torch.optim.Adam, **{"weight_decay": 0.1}, **how) for how in ({}, {"amsgrad": True}, {"maximize": True})),
    *(of(torch.optim.AdamW, amsgrad=True, **how) for how in ({"fused": True}, {"foreach": True})),
    of(torch.optim.AdamW, lr=torch.tensor(1e-3), capturable=False),
    *(of(torch.optim.SGD, lr=0.1, **how) for how in ({}, {"momentum": 0.9, "nesterov": True}, {"fused": True})),
    of(torch.optim.Adagrad),
    of(torch.optim.RMSprop, centered=True, momentum=0.9),
    pytest.param(fused_adam, id="FusedAdam"),
]


def trained(make, numel, whole, steps=3):
    """(weights, what the optimizer keeps for them) after each step; it goes on from a saved state before the last."""
    generator = torch.Generator().manual_seed(numel)
    flat = torch.randn(numel, generator=generator).requires_grad_()
    optimizer, seen = make([flat]), []
    group = optimizer.param_groups[0]
    for count in range(steps):
        if count == steps - 1:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make([flat])
            optimizer.load_state_dict(saved)
            group = optimizer.param_groups[0]
        grads = torch.randn(numel, generator=generator)
        if whole:
            flat.grad = grads
            optimizer.step()
            flat.grad = None
        else:

            def step(start, part, grads=grads, group=group, optimizer=optimizer):
                part.grad.copy_(grads[start : start + part.numel()])
                group["params"] = [part]
                optimizer.step()

            assert chunks.may_be_cut(optimizer)
            chunks.step_by_chunks(optimizer, flat, step)
            group["params"] = [flat]
        seen.append((flat.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"])))
        assert set(optimizer.state) <= {flat}
    return seen


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_chunks_are_the_whole(make, monkeypatch):
    """Weights, states and counts of steps: their names, order, types and bits; also from a loaded state."""
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    for numel in NUMELS:
        for (weights, states), (expected, kept) in zip(trained(make, numel, False), trained(make, numel, True)):
            assert torch.equal(weights, expected)
            assert list(states) == list(kept)
            for key, state in kept.items():
                assert list(states[key]) == list(state)
                for name, value in state.items():
                    assert type(states[key][name]) is type(value)
                    same = torch.equal if torch.is_tensor(value) else (lambda a, b: a == b)
                    assert same(states[key][name], value), name


def test_the_first_update_makes_each_state_once(monkeypatch):
    """Memory of a flat partition's size is made for the two moments alone, and a chunk's gradients are smaller."""
    monkeypatch.setattr(chunks, "CHUNK", CHUNK)
    made, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1])
    numel = 5 * CHUNK - 1
    trained(torch.optim.AdamW, numel, False, steps=1)
    assert [tensor.numel() for tensor in made] == [CHUNK, numel, numel]


def test_who_sees_steps_sees_whole_ones():
    """With hooks, own or global, a wrapper around `step`, or another class the optimizer gets whole tensors."""

    def make(cls=torch.optim.AdamW):
        return cls([torch.ones(3, requires_grad=True)], lr=0.1)

    assert chunks.may_be_cut(make())
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        optimizer = make()
        handle = getattr(optimizer, register)(lambda *args: None)
        assert not chunks.may_be_cut(optimizer)
        handle.remove()
        assert chunks.may_be_cut(optimizer)
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert not chunks.may_be_cut(make())
    handle.remove()

    optimizer = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert chunks.may_be_cut(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler warns if it has not seen a step
        optimizer.step()
        scheduler.step()
    optimizer.step = optimizer.step.__call__
    assert not chunks.may_be_cut(optimizer)
    assert not chunks.may_be_cut(make(type("Own", (torch.optim.AdamW,), {})))
    assert not chunks.may_be_cut(make(torch.optim.Adafactor))


def test_ranges():
    """Each element of tensors in a row, empty ones among them, is in the range that holds it, at its place."""
    numels = (3, 0, 5, 1, 0, 7)
    flat = [(index, element) for index, numel in enumerate(numels) for element in range(numel)]
    ranges = chunks.Ranges(numels)
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 3):
            found = {}
            for index, first, last, place in ranges.within(start, stop):
                found |= {place + k: (index, first + k) for k in range(last - first)}
            assert [found[k] for k in sorted(found)] == flat[start:stop]
            assert sorted(found) == list(range(len(flat[start:stop])))
