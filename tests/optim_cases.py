"""Common parts of the optimizer's tests: formats and AdamW written out in numpy and float64, kernel against torch."""

from __future__ import annotations

import math

import numpy as np
import torch

from zeropp_fp8 import optim
from zeropp_fp8.optim import Hyper, Owned, Segments, StateBuffer, StateFormats, make_state_buffers

CPU = torch.device("cpu")
# (mantissa bits, exponent of the smallest normal number, largest number, bytes)
GRIDS = {
    "fp32": (23, -126, 3.4028234663852886e38, 4),
    "bf16": (7, -126, 3.3895313892515355e38, 2),
    "fp16": (10, -14, 65504.0, 2),
    "fp8_e4m3": (3, -6, 448.0, 1),
    "fp8_e5m2": (2, -14, 57344.0, 1),
}
SCALED = ("fp16", "fp8_e4m3", "fp8_e5m2")
NUMELS = (1500, 1, 0, 1024, 7, 130)


def scale_of(values: np.ndarray, storage: str) -> float:
    """The smallest power of two X, 2^-127 or more, with amax <= X * largest; NaN where a value is not finite."""
    if not np.isfinite(values).all():
        return math.nan
    amax = float(np.abs(values).max(initial=0.0))
    exponent = -127
    while amax > math.ldexp(GRIDS[storage][2], exponent):
        exponent += 1
    return math.ldexp(1.0, exponent)


def spacing_of(values: np.ndarray, storage: str) -> np.ndarray:
    """The distance of neighbouring numbers of a format around float64 values."""
    mantissa, smallest, _, _ = GRIDS[storage]
    exponents = np.frexp(values)[1] - 1
    return np.ldexp(1.0, np.maximum(np.where(values == 0, smallest, exponents), smallest) - mantissa)


def rounded(values: np.ndarray, storage: str, block: int | None) -> np.ndarray:
    """float64: what fp32 values decode to after they were stored, to nearest, ties to even.

    What is rounded to a number above the largest of fp32 (of bf16, where it is stored as such) is Inf.
    """
    values = values.astype(np.float64)
    out = np.empty_like(values)
    size = len(values) if block is None or storage not in SCALED else block
    for start in range(0, len(values), max(size, 1)):
        unit = values[start : start + size]
        scale = scale_of(unit, storage) if storage in SCALED else 1.0
        if math.isnan(scale):
            out[start : start + size] = math.nan
            continue
        steps = spacing_of(unit / scale, storage)
        out[start : start + size] = np.round(unit / scale / steps) * steps * scale
    largest = GRIDS["bf16" if storage == "bf16" else "fp32"][2]
    return np.where(np.abs(out) > largest, np.copysign(np.inf, out), out)


def adamw(p, m, v, g, hyper: Hyper, grad_scale: float = 1.0):
    """(p, m, v) after a step, float64, written out from the papers' formulas (Adam, decoupled weight decay)."""
    p, m, v, g = (np.asarray(x, dtype=np.float64) for x in (p, m, v, g))
    g = g * grad_scale
    if not hyper.decoupled:
        g = g + hyper.weight_decay * p
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = hyper.beta2 * v + (1 - hyper.beta2) * g**2
    m_hat, v_hat = m, v
    if hyper.bias_correction:
        m_hat = m / (1 - hyper.beta1**hyper.step)
        v_hat = v / (1 - hyper.beta2**hyper.step)
    decay = hyper.lr * hyper.weight_decay if hyper.decoupled else 0.0
    return p - decay * p - hyper.lr * m_hat / (np.sqrt(v_hat) + hyper.eps), m, v


def adamw_step(segments, master, *rest, grad_scale=None, use_kernel=None) -> None:
    """`optim.adamw_step` of (segments, master, exp_avg, exp_avg_sq, grads, weights or None, hyper)."""
    *states, grads, weights, hyper = rest
    weights = [torch.empty(n, device=segments.device) for n in segments.numels] if weights is None else weights
    scale = torch.ones(1, device=segments.device) if grad_scale is None else grad_scale
    owned = Owned(segments, master, states, grads, weights, scale, [(n,) for n in segments.numels])
    optim.adamw_step(owned, hyper, use_kernel)


def heavy_tailed(numel: int, generator: torch.Generator, device=CPU) -> torch.Tensor:
    """fp32 numbers over a dozen orders of magnitude."""
    draw = [torch.randn(numel, generator=generator) for _ in range(2)]
    return (draw[0] * 10 ** (2 * draw[1])).to(device)


def run_steps(
    use_kernel: bool,
    formats: StateFormats,
    grads: torch.dtype | tuple[str, str, int],
    weights: torch.dtype | None,
    device=CPU,
    numels=NUMELS,
    steps: int = 2,
    grad_scale: float | None = None,
    spoil: bool = False,
    odd: bool = False,
    moments: bool = False,
    **hyper,
):
    """(buffers, weights) after some steps; the same arguments give the same numbers.

    Args:
        grads: a dtype, or (FP8 format, scales, block size).
        spoil: NaN and Inf in some gradients of the last step.
        odd: gradients and weights start where vectors of 16 bytes do not.
        moments: begin with moments above zero, encoded on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    segments = Segments(numels, device)
    buffers = make_state_buffers(segments, formats)

    def placed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        home = torch.empty(values.numel() + 1, dtype=dtype, device=device)[int(odd) :][: values.numel()]
        return home.copy_(values)

    start = [heavy_tailed(n, generator, device) for n in numels]
    out = None if weights is None else [placed(values, weights) for values in start]
    buffers[0].encode_all_(start)
    if moments:
        home = Segments(numels, CPU)
        for buffer, encoded in zip(buffers[1:], make_state_buffers(home, formats)[1:]):
            values = [heavy_tailed(n, generator, CPU) for n in numels]
            encoded.encode_all_([v.abs() for v in values] if buffer is buffers[2] else values)
            buffer.load_state_dict(encoded.state_dict())
    for step in range(1, steps + 1):
        values = [heavy_tailed(n, generator, device) for n in numels]
        if spoil and step == steps:
            values[0][3], values[0][1200], values[3][1000] = math.nan, math.inf, -math.inf
        if isinstance(grads, tuple):
            held = StateBuffer(segments, *grads)
            held.codes.fill_(0x7F)  # what the padding holds does not matter
            held.encode_all_(values)
            given = held
        else:
            given = [placed(x, grads) for x in values]
        adamw_step(
            segments,
            *buffers,
            given,
            out,
            Hyper(1e-2, weight_decay=0.1, step=step, **hyper),
            grad_scale=None if grad_scale is None else torch.tensor([grad_scale], device=device),
            use_kernel=use_kernel,
        )
    return buffers, out


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)


def assert_same_buffers(actual, expected) -> None:
    """Scales and codes, bit for bit; but codes of a NaN scale, padding, and which NaN it is."""
    for one, two in zip(actual, expected):
        for segment in range(len(two.segments)):
            if two.scales is not None:
                a, b = (buffer.scales[buffer.units(segment)].cpu() for buffer in (one, two))
                assert torch.equal(a, b), segment
            a, b = (buffer.segments.view(buffer.codes, segment).cpu() for buffer in (one, two))
            values = two.decode(segment).cpu()
            assert torch.equal(one.decode(segment).cpu().isnan(), values.isnan()), segment
            a, b = a[~values.isnan()], b[~values.isnan()]
            assert torch.equal(raw(a), raw(b)), (two.storage.name, segment)


def assert_same_weights(actual, expected) -> None:
    for a, b in zip(actual or (), expected or ()):
        a, b = a.cpu(), b.cpu()
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(raw(a[~a.isnan()]), raw(b[~b.isnan()]))


def check_kernel(formats: StateFormats, grads, weights, device=CPU, **options) -> None:
    """The kernel's codes, scales and weights are the torch code's on the CPU."""
    buffers, out = run_steps(True, formats, grads, weights, device, **options)
    expected, expected_out = run_steps(False, formats, grads, weights, CPU, **options)
    assert_same_buffers(buffers, expected)
    assert_same_weights(out, expected_out)


# (formats, gradients, weights, options): each format in each place, each kind of gradient, dtype and option.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TENSOR, BLOCK = StateFormats(), StateFormats(scales="block")
KERNEL_CASES = [
    (TENSOR, BF16, BF16, {}),
    (BLOCK, BF16, BF16, {}),
    (TENSOR, FP32, FP32, {"spoil": True}),
    (BLOCK, FP32, FP32, {"spoil": True, "odd": True}),
    (TENSOR, FP16, FP16, {"odd": True}),
    (BLOCK, FP16, FP16, {}),
    (TENSOR, BF16, None, {}),
    (BLOCK, BF16, FP32, {}),
    (TENSOR, ("fp8_e4m3", "tensor", 128), BF16, {"grad_scale": 0.3}),
    (BLOCK, ("fp8_e4m3", "tensor", 128), BF16, {"grad_scale": -0.3}),
    (BLOCK, ("fp8_e5m2", "block", 128), BF16, {}),
    (BLOCK, ("fp8_e5m2", "block", 32), BF16, {"spoil": True}),
    (TENSOR, ("fp8_e4m3", "block", 64), None, {}),
    (StateFormats("fp32", "fp32", "fp32"), FP32, FP32, {"spoil": True}),
    (StateFormats("fp32", "fp32", "fp32"), BF16, BF16, {"decoupled": False}),
    (StateFormats("bf16", "bf16", "bf16"), BF16, BF16, {}),
    (StateFormats("bf16", "bf16", "fp32"), FP32, FP16, {"bias_correction": False}),
    (StateFormats("fp16", "fp8_e5m2", "fp8_e4m3"), BF16, BF16, {}),
    (StateFormats("fp8_e4m3", "fp16", "fp8_e5m2", "block", 16), BF16, BF16, {}),
    (StateFormats("fp8_e5m2", "bf16", "fp16", "block", 1024), BF16, BF16, {"decoupled": False}),
    (StateFormats("fp8_e5m2", "fp8_e4m3", "fp8_e4m3"), FP32, BF16, {}),
    (TENSOR, BF16, BF16, {"eps": 0.0}),
    (StateFormats(exp_avg="fp8_e5m2", exp_avg_sq="fp8_e4m3"), FP32, BF16, {"spoil": True}),
    (StateFormats(exp_avg_sq="fp8_e4m3", scales="block", block_size=32), FP32, None, {}),
]


def awkward_values(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Of many magnitudes, block by block, with zeros, subnormals, NaN and Inf among them."""
    generator = torch.Generator().manual_seed(seed)
    low, high = (-20, 10) if dtype == torch.float16 else (-140, 120)
    exponents = torch.randint(low, high, (-(-numel // 16),), generator=generator)
    magnitudes = torch.ldexp(torch.ones(1), exponents).repeat_interleave(16)[:numel]
    values = torch.randn(numel, generator=generator) * magnitudes
    values[torch.rand(numel, generator=generator) < 0.05] = 0.0
    if numel > 2500:
        values[1200], values[1400] = math.inf, math.nan
    return values.to(dtype)


def check_encode_several(element: str, block: int, dtype: torch.dtype, device: torch.device, encode=None) -> None:
    """Segments at once hold what each of them holds when it is encoded alone; sums of squares are those of float64.

    Args:
        encode: (buffer, segments, values, in place) -> None instead of the buffer's own.
    """
    encode = encode or StateBuffer.encode_several_
    nothing = StateBuffer(Segments([0], device), element, "block", block)  # of a rank that owns no matrix
    encode(nothing, [0], torch.empty(0, dtype=dtype, device=device), False)
    assert nothing.square_sum([0]) == nothing.square_sum([]) == 0
    numels = (700, 3001, 0, 1, 1024, 2049, 130)
    chosen = [1, 2, 3, 5]
    for in_place in (False, True):
        alone, together = (StateBuffer(Segments(numels, d), element, "block", block) for d in (CPU, device))
        per_segment = [awkward_values(n, seed, dtype) for seed, n in enumerate(numels)]
        flat = torch.full((alone.segments.padded_numel,), 7.0, dtype=dtype)  # what padding holds does not matter
        laid_out = []
        for segment in range(len(numels)):
            alone.segments.view(flat, segment).copy_(per_segment[segment])
            if segment in chosen:
                alone.encode_(segment, per_segment[segment].float())
                row = torch.full((alone.segments.padded(segment),), 7.0, dtype=dtype)
                row[: numels[segment]] = per_segment[segment]
                laid_out.append(row)
        encode(together, chosen, (flat if in_place else torch.cat(laid_out)).to(device), in_place)
        assert torch.equal(together.scales.cpu(), alone.scales)
        for mine, reference in zip(together.decode_all(), alone.decode_all()):
            torch.testing.assert_close(mine.cpu(), reference, rtol=0, atol=0, equal_nan=True)
        for segments in ([3, 5], chosen, list(range(len(numels)))):
            expected = sum(alone.decode(k).double().square().sum() for k in segments)
            torch.testing.assert_close(together.square_sum(segments).cpu(), expected, rtol=1e-5, atol=0, equal_nan=True)
            assert bool(expected.isnan()) == (1 in segments)
