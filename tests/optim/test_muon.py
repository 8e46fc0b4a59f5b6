"""Muon's update against its formula in float64, torch.optim.Muon and DeepSpeed's, on whole matrices."""

import copy
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from zeropp_fp8.optim import UPDATES, Muon, Owned, Segments, StateFormats, make_state_buffers, update
from zeropp_fp8.optim.muon import COEFFICIENTS, METHODS, Rows, orthogonalized

SHAPES = [(64, 64), (48, 96), (96, 48), (8, 200), (1, 16), (16, 1)]


def written_out(matrix, steps=5):
    """The iteration on singular values, by an SVD in float64."""
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_iteration_is_the_polynomial_of_singular_values(shape, method):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for steps in range(7):
        found = orthogonalized(matrix, steps, torch.float32, method)
        torch.testing.assert_close(found.double(), written_out(matrix, steps), rtol=0, atol=2e-5)
    for dtype, within in ((torch.bfloat16, 0.05), (torch.float16, 0.02)):
        found = orthogonalized(matrix, dtype=dtype, method=method)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), written_out(matrix), rtol=0, atol=within)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (256, 32)])
def test_operations_are_those_of_the_products(shape, method):
    """As torch counts them, of the iteration on meta tensors."""
    group = {"ns_method": method}
    for steps in range(1, 7):
        with FlopCounterMode(display=False) as counter:
            orthogonalized(torch.empty(shape, device="meta"), steps, torch.bfloat16, method)
        operations = UPDATES["Muon"].operations
        assert operations(shape, {**group, "ns_steps": steps}) == counter.get_total_flops()
        assert operations((3, *shape), {**group, "ns_steps": steps}) == 3 * counter.get_total_flops()
    halves = {**group, "rows": Rows(1, (shape[0] // 2,) * 2)}
    assert operations(shape, halves) == 2 * operations((shape[0] // 2, shape[1]), group)


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.floats(1e-30, 1e30), st.integers(0, 2**31))
def test_matrices_of_one_shape_together_and_any_scale(count, rows, columns, scale, seed):
    """Each as it is alone; a factor makes no difference; zeros stay zeros."""
    matrices = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))
    together = orthogonalized(matrices, dtype=torch.float32)
    for one, alone in zip(together, matrices):
        torch.testing.assert_close(one, orthogonalized(alone, dtype=torch.float32), rtol=1e-4, atol=1e-5)
    if 1e-6 < scale < 1e12:
        torch.testing.assert_close(orthogonalized(scale * matrices, dtype=torch.float32), together, rtol=0, atol=0.05)
    assert not orthogonalized(torch.zeros(2, 3)).any()


QUERIES_KEYS_VALUES = {
    "one after the other": (Rows(1, (32, 16, 16)), [range(32), range(32, 48), range(48, 64)]),
    "key and value beside their queries": (
        Rows(2, (16, 8, 8)),
        [[*range(16), *range(32, 48)], [*range(16, 24), *range(48, 56)], [*range(24, 32), *range(56, 64)]],
    ),
    "one per head": (Rows(4, (16,), joined=False), [range(i, i + 16) for i in range(0, 64, 16)]),
}


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("kind", QUERIES_KEYS_VALUES)
def test_several_matrices_in_one_tensor(kind, lead):
    """Each matrix gets the step that it gets alone, its factor of rows and columns included."""
    rows, matrices = QUERIES_KEYS_VALUES[kind]
    assert sorted(len(each) for each in matrices) == sorted(height for height, _ in rows.shapes(24))
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(*lead, 64, 24, generator=generator) for _ in range(2))
    whole = torch.nn.Parameter(weight.clone())
    whole.grad = grad.clone()
    Muon([{"params": [whole], "rows": rows}]).step()
    for each in map(list, matrices):
        alone = torch.nn.Parameter(weight[..., each, :].clone())
        alone.grad = grad[..., each, :].clone()
        Muon([alone]).step()
        torch.testing.assert_close(whole[..., each, :], alone, rtol=1e-5, atol=1e-6)


def test_stacks_and_convolutions():
    """Packed experts as each expert alone, as DeepSpeed has it; a convolution with a filter per row."""
    generator = torch.Generator().manual_seed(0)
    experts, filters = torch.randn(4, 24, 16, generator=generator), torch.randn(16, 3, 2, 2, generator=generator)
    last = filters.to(memory_format=torch.channels_last)
    for weight, alone in ((experts, list(experts)), (filters, [filters.flatten(1)]), (last, [filters.flatten(1)])):
        params = [torch.nn.Parameter(each.clone()) for each in (weight, *alone)]
        for param in params:
            param.grad = param.detach().cos()
        Muon(params).step()
        expected = torch.stack([param.detach() for param in params[1:]]).view_as(weight)
        torch.testing.assert_close(params[0].detach(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_nothing_at_all(shape):
    params = [torch.nn.Parameter(torch.ones(each)) for each in (shape, (4, 4))]
    for param in params:
        param.grad = torch.ones_like(param)
    Muon(params).step()
    assert params[1].detach().max() < 1


@pytest.mark.parametrize("limit", [1, 3000, 1 << 24])
def test_together_as_one_by_one(limit, monkeypatch):
    """Tensors of one owner, in any order of shapes and batches of any size."""
    monkeypatch.setattr(update, "_TOGETHER", limit)
    shapes = [(32, 24), (24, 32), (32, 24), (2, 16, 24), (40, 40), (32, 24), (0, 24), (24, 32)]
    generator = torch.Generator().manual_seed(0)
    weights, grads = ([torch.randn(shape, generator=generator) for shape in shapes] for _ in range(2))
    segments = Segments([math.prod(shape) for shape in shapes], torch.device("cpu"))
    formats = StateFormats("fp32", "fp32", "fp32")
    master, momentum = make_state_buffers(segments, formats, ["exp_avg"])
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    master.encode_all_([weight.reshape(-1) for weight in weights])
    optimizer = Muon(params, weight_decay=0.1)
    the_update = UPDATES["Muon"]
    for _ in range(3):
        owned = Owned(segments, master, [momentum], [g.reshape(-1) for g in grads], weights, torch.ones(1), shapes)
        the_update.apply(owned, 1, the_update.options(optimizer, optimizer.param_groups[0]))
        for param, grad in zip(params, grads):
            param.grad = grad.clone() if grad.numel() else None
        optimizer.step()
        for weight, param in zip(weights, params):
            torch.testing.assert_close(weight, param.detach(), rtol=1e-5, atol=2e-6)


def stepped(optimizer, param, steps=6):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("options", [{}, {"nesterov": False, "weight_decay": 0.1, "momentum": 0.8, "ns_steps": 3}])
def test_beside_torch(shape, options):
    """torch.optim.Muon multiplies in bf16, this on a CPU in fp32: 0.01 of a step apart."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours, torchs = (torch.nn.Parameter(weight.clone()) for _ in range(2))
    common = {"lr": 0.02, "weight_decay": 0.0, **options}
    moved = stepped(Muon([ours], **common), ours) - weight
    expected = stepped(torch.optim.Muon([torchs], **common), torchs) - weight
    assert (moved - expected).norm() < 0.015 * expected.norm()


def test_matrices_and_vectors_in_one_optimizer():
    """Muon's formula and AdamW's, written out; what is not of matrices is refused for Muon."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in ((32, 48), (48, 32), (40,))]
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1, "use_muon": False}
    optimizer = Muon([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], **adam}])
    expected, momenta = [weight.double() for weight in weights], [torch.zeros_like(w).double() for w in weights[:2]]
    first, second = torch.zeros(2, 40, dtype=torch.float64)
    for step in range(1, 21):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        for number, momentum in enumerate(momenta):
            grad, (rows, columns) = params[number].grad.double(), params[number].shape
            momentum.lerp_(grad, 0.05)
            direction = written_out(grad.lerp(momentum, 0.95)) * math.sqrt(max(1, rows / columns))
            expected[number] = expected[number] * (1 - 0.02 * 0.1) - 0.02 * direction
        grad = params[2].grad.double()
        first, second = first.lerp(grad, 0.1), second.lerp(grad.square(), 0.05)
        moved = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-10)
        expected[2] = expected[2] * (1 - 1e-2 * 0.1) - 1e-2 * moved
    for param, weight in zip(params, expected):
        torch.testing.assert_close(param.double(), weight, rtol=0, atol=1e-5)
    said = r'\(40,\) is no matrix; put what Muon does not update into a param group with "use_muon": False'
    with pytest.raises(ValueError, match=said):
        Muon(params).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumed_from_its_state_dict(dtype):
    """The states of 16-bit parameters stay fp32: the next steps are those of the optimizer that was saved."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator).to(dtype) for shape in ((8, 6), (6,), (4, 4))]

    def made(values):
        params = [torch.nn.Parameter(value.clone()) for value in values]
        return params, Muon([{"params": params[::2]}, {"params": params[1:2], "use_muon": False}])

    def step(params, optimizer, seed):
        generator.manual_seed(seed)
        for param in params[:2]:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.step()

    params, optimizer = made(weights)
    for seed in range(3):
        step(params, optimizer, seed)
    others, resumed = made([param.detach() for param in params])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {len(state) for state in resumed.state.values()} == {2, 3}, "a parameter without a gradient got a state"
    for seed in range(3, 6):
        step(params, optimizer, seed)
        step(others, resumed, seed)
    assert all(map(torch.equal, params, others))
    for states in zip(optimizer.state.values(), resumed.state.values()):
        torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"ns_coefficients": (3, -4, 2)}, '"ns_coefficients" of Muon'),
        ({"adjust_lr_fn": "match_rms_adamw"}, '"adjust_lr_fn"'),
        ({"lr": -1.0}, '"lr" of Muon is -1.0; it must be at least 0 and below inf'),
        ({"momentum": 1.0}, '"momentum" of Muon is 1.0; it must be at least 0 and below 1'),
        ({"ns_method": "svd"}, "\"ns_method\" of Muon is 'svd'; it is one of gram, standard"),
    ],
)
def test_options_that_it_does_not_have(options, said):
    (line,) = UPDATES["Muon"].refusals(options)
    assert line.startswith(said)
    with pytest.raises(ValueError, match=re.escape(said)):
        Muon([{"params": [torch.nn.Parameter(torch.ones(2, 2))], **options}])
    assert not list(UPDATES["Muon"].refusals({"adjust_lr_fn": "original"}))
