"""Kernels against the torch code of formats/, for tests in Triton's interpreter (CPU) and natively (GPU)."""

from __future__ import annotations

import torch

from zeropp_fp8.comm.error_feedback import ErrorFeedback
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import MX_NAMES, UnquantizedFormat, make_format

CPU = torch.device("cpu")
# (name, options): every element, with the rotation, block sizes that are no power of two, and long blocks
FORMATS = {
    "int8": ("int8", {"block_size": 128}),
    "int8-96": ("int8", {"block_size": 96}),
    "int8-2": ("int8", {"block_size": 2}),
    "int8-8192": ("int8", {"block_size": 8192}),
    "int8-hadamard": ("int8", {"block_size": 256, "hadamard": True}),
    "int4": ("int4", {"block_size": 128}),
    "int4-34": ("int4", {"block_size": 34}),
    "int4-hadamard": ("int4", {"block_size": 128, "hadamard": True}),
    "int4-hadamard-96": ("int4", {"block_size": 96, "hadamard": True}),
    "fp8_e4m3": ("fp8_e4m3", {"block_size": 128}),
    "fp8_e5m2": ("fp8_e5m2", {"block_size": 128}),
    "int8-32": ("int8", {"block_size": 32}),
    "int2": ("int2", {"block_size": 64}),
    "int2-12": ("int2", {"block_size": 12}),
    "int2-hadamard-96": ("int2", {"block_size": 96, "hadamard": True}),
    "int3": ("int3", {"block_size": 128}),
    "int3-24": ("int3", {"block_size": 24}),
    "int3-hadamard-96": ("int3", {"block_size": 96, "hadamard": True}),
    **{name: (name, {}) for name in MX_NAMES},
    **{f"{name}-floor": (name, {"scale_mode": "floor"}) for name in MX_NAMES},
}
# Formats that kernels only decode: every element and both kinds of scales, block sizes that are no power of two, and
# long blocks.
FROZEN_FORMATS = {
    "nf4": ("nf4", {}),
    "nf4-34": ("nf4", {"block_size": 34}),
    "nf4-4096": ("nf4", {"block_size": 4096}),
    "nf4-double": ("nf4", {"double_quantize": True}),
    "nf4-2-double": ("nf4", {"block_size": 2, "double_quantize": True}),
    "int4-double": ("int4", {"block_size": 64, "double_quantize": True}),
    "int8-double": ("int8", {"block_size": 64, "double_quantize": True}),
    "int8-3-double": ("int8", {"block_size": 3, "double_quantize": True}),
    "fp8_e4m3-double": ("fp8_e4m3", {"block_size": 128, "double_quantize": True}),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make(name: str, dtype: torch.dtype = torch.bfloat16):
    """A format by its name in FORMATS or FROZEN_FORMATS, or "none"."""
    if name == "none":
        return make_format("none", dtype=dtype)
    element, options = (FORMATS | FROZEN_FORMATS)[name]
    return make_format(element, **options)


def awkward(numels, dtype, seed=0):
    """Tensors over nine orders of magnitude, with zeros of both signs, a NaN and an Inf."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for numel in numels:
        values = torch.randn(numel, generator=generator) * torch.logspace(-5, 4, max(numel, 1))[:numel]
        values[::7] = 0
        values[3::14] = -0.0
        tensors.append(values.to(dtype))
    if tensors[-1].numel() > 200:
        tensors[-1][150] = float("nan")
    if tensors[0].numel() > 2:
        tensors[0][-1] = float("inf")
    return tensors


def layouts(wire_format, slice_numels, dtype, device, partner=None):
    """(torch code on the CPU, kernels on `device`) for the same payload."""
    count = len(slice_numels)
    partners = [partner] * count if partner else None
    formats, dtypes = [wire_format] * count, [dtype] * count
    return (
        PayloadLayout(slice_numels, formats, dtypes, CPU, partners, use_kernels=False),
        PayloadLayout(slice_numels, formats, dtypes, device, partners, use_kernels=True),
    )


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, zeros with their signs, NaN where NaN (CPU and GPU cast NaN to different bits)."""
    actual, nan = actual.cpu(), expected.isnan()
    signs = torch.equal(actual.signbit() & ~nan, expected.signbit() & ~nan)
    return signs and torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan], expected[~nan])


def check_quantize_and_dequantize(wire_format, dtype, numels, world, slices, device, outputs):
    """Same bytes, same values; tensors whose slices are in another order, and only some of them."""
    tensors = awkward(numels, dtype)
    slice_numels = [-(-n // world) for n in numels]
    reference, kernels = layouts(wire_format, slice_numels, dtype, device)
    assert all(group.segments is not None for group in kernels._groups)
    order, device_order = SliceOrder(slices, CPU), SliceOrder(slices, device)
    expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
    reference.encode(tensors, order, expected)
    actual = torch.full_like(expected, 255, device=device)
    kernels.encode([t.to(device) for t in tensors], device_order, actual)
    differing = (actual.cpu() != expected).nonzero().tolist()
    assert not differing, (wire_format, dtype, numels, slices, kernels.offsets, differing[:5])
    for output in outputs:
        wanted = [torch.full((n,), 7.0, dtype=output) for n in numels]
        got = [torch.full((n,), 7.0, dtype=output, device=device) for n in numels]
        reference.decode(expected, order, wanted)
        kernels.decode(expected.to(device), device_order, got)
        for a, b in zip(got, wanted):
            assert same(a, b), output


def check_feed_back(wire_format, dtype, numels, world, slices, device):
    """Three messages of one key after the other: the same bytes sent and kept, with NaN and Inf in the second."""
    slice_numels = [-(-n // world) for n in numels]
    reference, kernels = layouts(wire_format, slice_numels, dtype, device)
    order, device_order = SliceOrder(slices, CPU), SliceOrder(slices, device)
    keys, feedback = [str(i) for i in range(len(numels))], ErrorFeedback(wire_format.block_size)
    feedback_there = ErrorFeedback(wire_format.block_size)
    for step in range(3):
        tensors = awkward(numels, dtype, step)
        if step != 1:
            tensors = [tensor.nan_to_num(1.0, 2.0, -2.0) for tensor in tensors]
        kept = feedback.of(keys, slice_numels, len(slices), CPU)
        kept_there = feedback_there.of(keys, slice_numels, len(slices), device)
        assert kernels_feed_back(kernels, kept_there), "the torch code would be compared with itself"
        expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
        reference.encode(tensors, order, expected, residuals=kept)
        actual = torch.full_like(expected, 255, device=device)
        kernels.encode([t.to(device) for t in tensors], device_order, actual, residuals=kept_there)
        for what, mine, wanted in (("sent", actual, expected), ("kept", kept_there.rows, kept.rows)):
            differing = (mine.cpu() != wanted).nonzero().tolist()
            assert not differing, (what, step, wire_format, dtype, numels, slices, differing[:5])
    assert kept.rows.any(), "nothing was kept"


def kernels_feed_back(layout, residuals) -> bool:
    """Whether the kernel encodes every group of a layout."""
    from zeropp_fp8.kernels import can_feed_back

    groups = range(len(layout._groups))
    return all(
        can_feed_back(layout._groups[index].segments, layout._residual_table(index, residuals)) for index in groups
    )


def check_decoded_only(wire_format, dtype, numels, world, slices, device, outputs):
    """The bytes of the torch code, which encodes on any device, and by the kernel its values; nothing beyond a tensor.

    Needs slices of more than 256 blocks for a group of scales to have more than one program.
    """
    tensors = awkward(numels, dtype)
    slice_numels = [-(-n // world) for n in numels]
    reference, kernels = layouts(wire_format, slice_numels, dtype, device)
    assert all(group.segments is None and group.decoded_segments is not None for group in kernels._groups)
    order, device_order = SliceOrder(slices, CPU), SliceOrder(slices, device)
    expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
    reference.encode(tensors, order, expected)
    actual = torch.full_like(expected, 255, device=device)
    kernels.encode([t.to(device) for t in tensors], device_order, actual)
    differing = (actual.cpu() != expected).nonzero().tolist()
    assert not differing, (wire_format, dtype, numels, slices, kernels.offsets, differing[:5])
    for output in outputs:
        wanted = [torch.full((n,), 7.0, dtype=output) for n in numels]
        got = [torch.full((n,), 7.0, dtype=output, device=device) for n in numels]
        reference.decode(expected, order, wanted)
        kernels.decode(actual, device_order, got)
        for a, b in zip(got, wanted):
            assert same(a, b), (wire_format, output, numels, slices)


def largest(numels, dtype, seed=0):
    """Numbers that products of scale and element may round up beyond the dtype's largest; signs differ by rank."""
    return [torch.full((numel,), torch.finfo(dtype).max * (-1) ** seed, dtype=dtype) for numel in numels]


def check_reduce(first, then, dtype, numels, nodes, ranks, device, outputs, values=awkward):
    """The mean over ranks, encoded for the next hop (same bytes), then written and added to tensors (same values)."""
    slice_numels = [-(-n // (nodes * ranks)) for n in numels]
    reference, kernels = layouts(first, slice_numels, dtype, device, then)
    reference_then, kernels_then = layouts(then, slice_numels, dtype, device, first)
    received = torch.zeros(ranks, nodes, reference.row_bytes, dtype=torch.uint8)
    for rank in range(ranks):
        reference.encode(values(numels, dtype, seed=rank), SliceOrder(range(nodes), CPU), received[rank])
    expected = torch.zeros(nodes, reference_then.row_bytes, dtype=torch.uint8)
    reference.reduce_to_payload(received, reference_then, expected)
    actual = torch.full_like(expected, 255, device=device)
    kernels.reduce_to_payload(received.to(device), kernels_then, actual)
    differing = (actual.cpu() != expected).nonzero().tolist()
    if isinstance(then, UnquantizedFormat):  # NaN has other bits on each device: compare values
        for i in range(len(numels)):
            decoded = [
                then.decode_rows(reference_then._part(payload, i), slice_numels[i], torch.float32)
                for payload in (actual.cpu(), expected)
            ]
            assert same(*decoded), (first, then, numels)
    else:
        assert not differing, (first, then, numels, kernels_then.offsets, differing[:5])

    own = [max(0, n - 3) for n in slice_numels]  # a last slice without its padding
    for output in outputs:
        for accumulate in (False, True):
            wanted = [torch.full((n,), 0.25, dtype=output) for n in own]
            got = [torch.full((n,), 0.25, dtype=output, device=device) for n in own]
            reference_then.reduce_to_tensors(expected, wanted, accumulate)
            kernels_then.reduce_to_tensors(expected.to(device), got, accumulate)
            for a, b in zip(got, wanted):
                assert same(a, b), (output, accumulate)


def check_round_trip(mx_format, dtype, shape, device, axes=((True, False), (False, True), (True, True))):
    """kernels.round_trip against MXFormat.round_trip bit for bit, along each (rows, columns) of `axes`."""
    from zeropp_fp8.kernels.casts.round_trip import round_trip

    matrix = awkward([shape[0] * shape[1]], dtype)[0].view(shape)
    matrix.view(-1)[5::97] = -0.3
    if matrix.numel() > 400:
        matrix.view(-1)[300] = float("nan")
        matrix.view(-1)[-77:-70] = torch.finfo(dtype).max
        matrix.view(-1)[-60] = -torch.finfo(dtype).smallest_normal / 2
    wanted = mx_format.round_trip(matrix), mx_format.round_trip(matrix.t())
    for along_rows, along_columns in axes:
        got = round_trip(matrix.to(device), mx_format, along_rows, along_columns)
        for asked, a, b in zip((along_rows, along_columns), got, wanted):
            if not asked:
                assert a is None
                continue
            assert a.is_contiguous() and a.dtype == dtype and a.shape == b.shape
            assert same(a, b), (mx_format, dtype, shape, along_rows, along_columns)
