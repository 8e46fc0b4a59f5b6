"""One step on flat buffers: against AdamW written out in float64, and torch.optim with everything in fp32."""

import numpy as np
import pytest
import torch
from optim_cases import (
    BF16,
    BLOCK,
    CPU,
    GRIDS,
    SCALED,
    TENSOR,
    adamw,
    adamw_step,
    assert_same_buffers,
    heavy_tailed,
    run_steps,
    scale_of,
    spacing_of,
)

from zeropp_fp8.optim import Hyper, Segments, StateBuffer, StateFormats, make_state_buffers

ALL_FP32 = StateFormats("fp32", "fp32", "fp32")
HYPERS = [
    {},
    {"decoupled": False},
    {"bias_correction": False},
    {"weight_decay": 0.0},
    {"weight_decay": 0.0, "decoupled": False},
    {"beta1": 0.0},
    {"beta2": 0.5, "eps": 1e-3, "lr": 0.3},
]


def step_spacing(values: np.ndarray, storage: str, block: int | None) -> np.ndarray:
    """The spacing of a format around each of these float64 values, with their own scales."""
    out = np.empty_like(values)
    size = len(values) if block is None or storage not in SCALED else block
    for start in range(0, len(values), size):
        unit = values[start : start + size]
        scale = scale_of(unit, storage) if storage in SCALED else 1.0
        out[start : start + size] = spacing_of(unit / scale, storage) * scale
    return out


@pytest.mark.parametrize("scales", ["tensor", "block"])
@pytest.mark.parametrize(
    "names", [("fp16", "fp8_e4m3", "fp16"), ("bf16", "fp8_e5m2", "bf16"), ("fp32", "fp16", "fp32")]
)
def test_each_quantity_is_the_float64_step_rounded(names, scales):
    """From the numbers that the buffers hold: half a spacing from the exact result, and 1e-6 of arithmetic."""
    formats = StateFormats(*names, scales=scales)
    block = 128 if scales == "block" else None
    generator = torch.Generator().manual_seed(0)
    numels = [1500, 1, 260]
    for options in HYPERS:
        segments = Segments(numels, CPU)
        buffers = make_state_buffers(segments, formats)
        buffers[0].encode_all_([torch.randn(n, generator=generator) for n in numels])
        for step in range(1, 4):
            hyper = Hyper(**{"lr": 1e-2, "weight_decay": 0.1, "step": step, **options})
            grads = [torch.randn(n, generator=generator) for n in numels]
            before = [[buffer.decode(i).numpy() for buffer in buffers] for i in range(len(numels))]
            adamw_step(segments, *buffers, grads, None, hyper, grad_scale=torch.tensor([0.25]))
            for i in range(len(numels)):
                exact = adamw(*before[i], grads[i].numpy(), hyper, grad_scale=0.25)
                for value, buffer, name in zip(exact, buffers, names):
                    far = np.abs(buffer.decode(i).double().numpy() - value)
                    # p is a difference of numbers that may be larger than it.
                    size = np.abs(value) + (np.abs(before[i][0]) + hyper.lr if value is exact[0] else 0)
                    size = size + (np.abs(before[i][1]) + 1 if value is exact[1] else 0)
                    if value is exact[2] and not hyper.decoupled:  # so is the gradient then
                        largest = 0.25 * np.abs(grads[i].numpy()) + hyper.weight_decay * np.abs(before[i][0])
                        size = size + (1 - hyper.beta2) * largest**2
                    assert (far <= 0.5 * step_spacing(value, name, block) + 1e-6 * size).all(), (options, step, name)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_in_fp32_it_is_torch_optim(decoupled, weight_decay):
    """50 steps: weights and state to 1e-6."""
    generator = torch.Generator().manual_seed(0)
    numels = [1500, 33, 1]
    start = [torch.randn(n, generator=generator) for n in numels]
    params = [torch.nn.Parameter(values.clone()) for values in start]
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = cls(params, lr=1e-2, weight_decay=weight_decay, betas=(0.9, 0.95), foreach=False)
    segments = Segments(numels, CPU)
    buffers = make_state_buffers(segments, ALL_FP32)
    buffers[0].encode_all_(start)
    weights = [torch.empty(n) for n in numels]
    for step in range(1, 51):
        grads = [torch.randn(n, generator=generator) for n in numels]
        for p, g in zip(params, grads):
            p.grad = g.clone()
        theirs.step()
        hyper = Hyper(1e-2, 0.9, 0.95, weight_decay=weight_decay, step=step, decoupled=decoupled)
        adamw_step(segments, *buffers, grads, weights, hyper)
    for i, p in enumerate(params):
        expected = [p.detach(), theirs.state[p]["exp_avg"], theirs.state[p]["exp_avg_sq"]]
        assert torch.equal(weights[i], buffers[0].decode(i))
        for buffer, value in zip(buffers, expected):
            scale = value.abs().max()
            torch.testing.assert_close(buffer.decode(i), value, rtol=1e-6, atol=1e-6 * scale.item())


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_gradients_of_any_size(size):
    """As in float64, but where g^2 leaves fp32: below it is zero, as in torch.optim; above, the update vanishes."""
    generator = torch.Generator().manual_seed(0)
    grad = size * torch.randn(100, generator=generator)
    segments = Segments([100], CPU)
    start = torch.randn(100, generator=generator)
    for formats in (ALL_FP32, TENSOR, BLOCK):
        buffers = make_state_buffers(segments, formats)
        buffers[0].encode_(0, start)
        p = buffers[0].decode(0).numpy()
        out = [torch.empty(100)]
        hyper = Hyper(1e-2, weight_decay=0.0)
        adamw_step(segments, *buffers, [grad], out, hyper)
        zeros = np.zeros(100)
        expected, _, v = adamw(p, zeros, zeros, grad.numpy(), hyper)
        if size == 1e30:
            assert np.abs(out[0].numpy() - p).max() <= 1e-2 * 2e12 and out[0].isfinite().all()
            continue
        np.testing.assert_allclose(out[0].numpy(), expected, rtol=0, atol=1e-3 if formats is not ALL_FP32 else 1e-6)
        if formats is ALL_FP32 and size > 1e-20:
            np.testing.assert_allclose(buffers[2].decode(0).numpy(), v, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_the_rounded_master(dtype):
    """And not the master before it was rounded, which would make a resumed run another one."""
    for formats in (TENSOR, BLOCK, StateFormats("fp8_e4m3", "fp16", "fp16")):
        buffers, weights = run_steps(False, formats, BF16, dtype)
        for i, out in enumerate(weights):
            assert torch.equal(out, buffers[0].decode(i).to(dtype))
    # fp32 weights of an FP8 master have few distinct mantissas
    assert (weights[0].view(torch.int32) & 0x000FFFFF).unique().numel() == 1 or dtype != torch.float32


def test_the_step_uses_moments_before_they_are_rounded():
    """An exp_avg in E5M2 is off by up to 12 %; the first step's update m / sqrt(v) is 1 in spite of it."""
    segments = Segments([1000], CPU)
    buffers = make_state_buffers(segments, StateFormats("fp32", "fp8_e5m2", "fp8_e5m2"))
    grad = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.5
    adamw_step(segments, *buffers, [grad], None, Hyper(0.5, weight_decay=0.0))
    torch.testing.assert_close(buffers[0].decode(0), torch.full((1000,), -0.5), rtol=1e-6, atol=0)
    assert ((buffers[1].decode(0) - 0.1 * grad).abs() > 0.01 * 0.1 * grad).float().mean() > 0.5


def test_gradients_of_every_kind_are_the_same_numbers():
    """FP8 codes with multipliers or block scales, and what they decode to as tensors of any dtype that holds it."""
    segments = Segments([1500, 7, 0, 130], CPU)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator) for n in segments.numels]
    for scales in ("tensor", "block"):
        held = StateBuffer(segments, "fp8_e5m2", scales)
        held.encode_all_(values)
        decoded = held.decode_all()
        kinds = [held, decoded, [g.bfloat16() for g in decoded], [g.half() for g in decoded]]
        results = []
        for grads in kinds:
            buffers = make_state_buffers(segments, BLOCK)
            adamw_step(segments, *buffers, grads, None, Hyper(1e-2))
            results.append(buffers)
        for buffers in results[1:]:
            assert_same_buffers(buffers, results[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_in_a_gradient_never_becomes_finite(bad):
    """It spoils what shares its scale, in state and weights, and nothing else."""
    for formats, last in ((TENSOR, 300), (BLOCK, 256), (ALL_FP32, 141)):
        segments = Segments([300, 50], CPU)
        buffers = make_state_buffers(segments, formats)
        weights = [torch.ones(300), torch.ones(50)]
        buffers[0].encode_all_(weights)
        grads = [torch.ones(300), torch.ones(50)]
        grads[0][140] = bad
        adamw_step(segments, *buffers, grads, weights, Hyper(1e-2))
        first = {300: 0, 256: 128, 141: 140}[last]
        spoiled = torch.zeros(300, dtype=torch.bool)
        spoiled[first:last] = True
        for values in (buffers[0].decode(0), buffers[1].decode(0), buffers[2].decode(0), weights[0]):
            assert torch.equal(~values.isfinite(), spoiled)
        assert weights[1].isfinite().all() and all(buffer.decode(1).isfinite().all() for buffer in buffers)
        adamw_step(segments, *buffers, [torch.ones(300), torch.ones(50)], weights, Hyper(1e-2, step=2))
        assert torch.equal(~weights[0].isfinite(), spoiled)


def test_a_nan_grad_scale_reaches_everything():
    segments = Segments([300, 5], CPU)
    buffers = make_state_buffers(segments, TENSOR)
    weights = [torch.ones(300), torch.ones(5)]
    grads = [torch.ones(300), torch.ones(5)]
    adamw_step(segments, *buffers, grads, weights, Hyper(1e-2), grad_scale=torch.tensor([float("nan")]))
    assert all(w.isnan().all() for w in weights)


def test_nothing_to_do():
    for numels in ([], [0, 0]):
        segments = Segments(numels, CPU)
        buffers = make_state_buffers(segments, BLOCK)
        adamw_step(segments, *buffers, [torch.ones(n) for n in numels], None, Hyper(1e-2))


def test_decoded_state_in_fp32_resumes_exactly():
    """A checkpoint that holds decoded states: encoding them again gives a run that goes on with the same numbers."""
    generator = torch.Generator().manual_seed(0)
    numels = [1500, 33]
    for formats in (TENSOR, BLOCK, StateFormats("fp8_e4m3", "fp8_e5m2", "fp8_e4m3", "block", 16)):
        segments = Segments(numels, CPU)
        first, resumed = make_state_buffers(segments, formats), make_state_buffers(segments, formats)
        first[0].encode_all_([heavy_tailed(n, generator) for n in numels])
        for step in range(1, 7):
            grads = [heavy_tailed(n, generator) for n in numels]
            if step == 4:
                for one, two in zip(first, resumed):
                    two.encode_all_(one.decode_all())
            for buffers in (first, resumed) if step >= 4 else (first,):
                adamw_step(segments, *buffers, grads, None, Hyper(1e-2, step=step))
        for one, two in zip(first, resumed):
            assert all(torch.equal(a, b) for a, b in zip(one.decode_all(), two.decode_all()))


def test_what_does_not_fit_is_refused():
    segments = Segments([4, 6], CPU)
    buffers = make_state_buffers(segments, TENSOR)
    good, hyper = [torch.ones(4), torch.ones(6)], Hyper(1e-2)

    def step(grads=good, weights=None, master=buffers[0], moments=buffers[1:]):
        adamw_step(segments, master, *moments, grads, weights, hyper)

    with pytest.raises(ValueError, match="grads must be one tensor of its size per segment"):
        step(good[:1])
    with pytest.raises(ValueError, match="grads must be one tensor of its size per segment"):
        step([torch.ones(4), torch.ones(5)])
    with pytest.raises(ValueError, match="grads must be contiguous and all fp32"):
        step([torch.ones(4), torch.ones(6).half()])
    with pytest.raises(ValueError, match="grads must be contiguous and all fp32"):
        step([torch.ones(4).double(), torch.ones(6).double()])
    with pytest.raises(ValueError, match="grads must be contiguous"):
        step([torch.ones(8)[::2], torch.ones(6)])
    with pytest.raises(ValueError, match="weights must be contiguous"):
        step(weights=[torch.ones(8)[::2], torch.ones(6)])
    with pytest.raises(ValueError, match="weights must be one tensor"):
        step(weights=good[:1])
    with pytest.raises(ValueError, match="a state is laid out by other segments"):
        step(moments=make_state_buffers(Segments([4, 7], CPU), TENSOR)[1:])


def test_grids_of_this_file_are_those_of_the_formats():
    """The oracle's table against torch's own."""
    for name, dtype in (("fp16", torch.float16), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        assert GRIDS[name][2] == torch.finfo(dtype).max
