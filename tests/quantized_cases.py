"""Products with weights that lie as codes, for tests in Triton's interpreter (CPU) and natively (GPU)."""

from __future__ import annotations

import torch
from numerics import UNIT_ROUNDOFF

from zeropp_fp8.compute import casts
from zeropp_fp8.formats import make_format
from zeropp_fp8.kernels.linear import quantized_linear as linear_module
from zeropp_fp8.kernels.linear import quantized_to_fp8 as fp8_module
from zeropp_fp8.kernels.linear.quantized_linear import quantized_linear
from zeropp_fp8.kernels.linear.quantized_to_fp8 import quantized_to_fp8
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight, largest_magnitude

CPU = torch.device("cpu")
# Blocks of one, two, three and more pieces of 16 bytes, and of parts of one; every kind of scale.
FORMATS = {
    "int4": ("int4", {"block_size": 128}),
    "int4-32": ("int4", {"block_size": 32}),
    "int4-96": ("int4", {"block_size": 96}),
    "int4-34": ("int4", {"block_size": 34}),
    "int4-double": ("int4", {"block_size": 64, "double_quantize": True}),
    "int8": ("int8", {"block_size": 128}),
    "int8-16": ("int8", {"block_size": 16}),
    "int8-3": ("int8", {"block_size": 3}),
    "int8-double": ("int8", {"block_size": 64, "double_quantize": True}),
    "nf4": ("nf4", {}),
    "nf4-32": ("nf4", {"block_size": 32}),
    "nf4-8": ("nf4", {"block_size": 8}),
    "nf4-double": ("nf4", {"double_quantize": True}),
    "nf4-6-double": ("nf4", {"block_size": 6, "double_quantize": True}),
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make(name: str):
    element, options = FORMATS[name]
    return make_format(element, **options)


def normal(*shape, dtype=torch.bfloat16, seed=0, scale=1.0):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def weight_of(values, wire_format, slices, extra=0, device=CPU, seed=0, ordered=True):
    """A matrix in `slices` slices and `extra` ones beyond its end, in shuffled rows between bytes of other tensors."""
    generator = torch.Generator().manual_seed(seed)
    block = wire_format.block_size
    slice_numel = -(-values.numel() // (slices * block)) * block
    rows, size, offset = slices + extra, wire_format.payload_bytes(slice_numel), 48
    payload = torch.randint(0, 256, (rows, offset + size + 16), dtype=torch.uint8, generator=generator)
    order = torch.randperm(rows, generator=generator) if ordered else torch.arange(rows)
    flat = torch.zeros(rows * slice_numel, dtype=values.dtype)
    flat[: values.numel()] = values.reshape(-1)
    payload[order, offset : offset + size] = wire_format.encode_rows(flat.view(rows, slice_numel))
    return QuantizedWeight(
        payload.to(device),
        offset,
        wire_format,
        slice_numel,
        tuple(values.shape),
        values.dtype,
        order.int().to(device) if ordered else None,
    )


def on_cpu(weight):
    order = None if weight.row_of_slice is None else weight.row_of_slice.cpu()
    place = weight.offset, weight.wire_format, weight.slice_numel, weight.shape, weight.dtype, order
    return QuantizedWeight(weight.payload.cpu(), *place)


def same_bits(a, b):
    """Equal, zeros of either sign, NaN where NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def check_each_number(weight, rows=None, use_kernel=True):
    """x is the identity: the result is the weight, transposed, exactly (some of its columns: `rows` of x)."""
    columns = weight.shape[1]
    wanted = on_cpu(weight).dequantize()
    rows = range(columns) if rows is None else rows
    x = torch.eye(columns, dtype=weight.dtype)[rows].to(weight.device)
    got = quantized_linear(x, weight, use_kernel=use_kernel).cpu()
    differing = (got != wanted.t()[rows]).nonzero().tolist()
    assert not differing, (weight.wire_format, weight.dtype, weight.shape, weight.slice_numel, differing[:5])


def check_product(weight, x, bias=None, use_kernel=True):
    """Against float64 of the same rounded numbers, to the error of fp32 sums and of rounding the result."""
    outputs, columns = weight.shape
    values = on_cpu(weight).dequantize().double()
    on_device = None if bias is None else bias.to(weight.device)
    got = quantized_linear(x.to(weight.device), weight, on_device, use_kernel=use_kernel)
    assert got.dtype == weight.dtype and got.shape == (*x.shape[:-1], outputs) and got.is_contiguous()
    x = x.cpu().double()
    wanted = x @ values.t() + (0 if bias is None else bias.double())
    sums = x.abs() @ values.abs().t() + wanted.abs()
    bound = UNIT_ROUNDOFF[weight.dtype] * wanted.abs() + 4 * columns**0.5 * 2.0**-24 * sums + 1e-30
    excess = ((got.cpu().double() - wanted).abs() / bound).max().item() if got.numel() else 0.0
    assert excess <= 1, (weight.wire_format, weight.dtype, weight.shape, x.shape, excess)
    return got


def check_spoiled(weight_values, wire_format, slices, place, device=CPU, use_kernel=True):
    """A NaN at `place` spoils its block, hence its row of outputs, and no other."""
    values = weight_values.clone()
    values.view(-1)[place] = torch.nan
    weight = weight_of(values, wire_format, slices, device=device)
    outputs, columns = weight.shape
    got = quantized_linear(normal(3, columns, dtype=values.dtype).to(device), weight, use_kernel=use_kernel).cpu()
    first = place // wire_format.block_size * wire_format.block_size
    spoiled = torch.zeros(outputs, dtype=torch.bool)
    spoiled[first // columns] = True  # blocks do not straddle rows
    assert torch.equal(got.isnan(), spoiled.expand(3, outputs)), (wire_format, place)


def check_fp8(weight, multiplier, use_kernel=True):
    """The bytes of torch's decoding and the cast of compute/casts.py with the scale of which this is the reciprocal."""
    scale = torch.tensor([1 / multiplier])
    reciprocal = torch.ones(1) / scale
    expected, _ = casts.cast_per_tensor(on_cpu(weight).dequantize(), torch.float8_e4m3fn, scale, transposed=False)
    got = quantized_to_fp8(weight, reciprocal.to(weight.device), use_kernel=use_kernel)
    assert got.dtype == torch.float8_e4m3fn and got.shape == expected.codes.shape
    wanted = expected.codes.view(torch.uint8)
    differing = (got.view(torch.uint8).cpu() != wanted).nonzero().tolist()
    assert not differing, (weight.wire_format, weight.dtype, weight.shape, differing[:5])


def check_bounds(wire_format, device=CPU):
    """Nothing is written behind a result, where a slice goes on behind the weight by whole tiles."""
    columns = wire_format.block_size * (1024 // wire_format.block_size)
    longer = weight_of(normal(21, columns), wire_format, 1, device=device)
    weight = QuantizedWeight(longer.payload, 48, wire_format, longer.slice_numel, (9, columns), torch.bfloat16)
    x, multiplier = normal(3, columns).to(device), torch.ones(1, device=device)
    for size, launch in (
        (9 * columns, lambda out: fp8_module._launch(weight, multiplier, out.view(9, columns))),
        (2 * 3 * 9, lambda out: linear_module._launch(x, weight, None, out.view(torch.bfloat16).view(3, 9))),
    ):
        buffer = torch.full((size + 32768,), 77, dtype=torch.uint8, device=device)
        launch(buffer[:size])
        assert (buffer[size:] == 77).all() and not (buffer[:size] == 77).all(), (wire_format, size)


def check_largest(weight):
    values = on_cpu(weight).dequantize().float()
    finite = values[values.isfinite()]
    wanted = finite.abs().max().view(1) if finite.numel() else torch.zeros(1)
    got = largest_magnitude(weight)
    assert got.dtype == torch.float32 and torch.equal(got.cpu(), wanted)
