"""Products with weights that lie as codes, for tests in Triton's interpreter (CPU) and natively (GPU)."""

from __future__ import annotations

import torch
from error_bounds import UNIT_ROUNDOFF

from zeropp_fp8.formats import make_format
from zeropp_fp8.kernels.linear.quantized_linear import Lora, QuantizedLinear, QuantizedStack, quantized_linear
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight

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


def lora_of(weight, rank, scaling=2.0, dtype=None, seed=5):
    """An adapter whose product is as large as the weight's."""
    (outputs, columns), dtype = weight.shape, dtype or weight.dtype
    lora_A = normal(rank, columns, dtype=dtype, seed=seed)
    lora_B = normal(outputs, rank, dtype=dtype, seed=seed + 1, scale=rank**-0.5 / scaling)
    return Lora(lora_A.to(weight.device), lora_B.to(weight.device), scaling)


def check_product(weight, x, bias=None, use_kernel=True, lora=None, layer=None):
    """Against float64 of the same rounded numbers, to the error of fp32 sums and of rounding the result.

    `lora`: x A^T is torch's. `layer`: the QuantizedLinear of all that, which may have been called before.
    """
    outputs, columns = weight.shape
    values = on_cpu(weight).dequantize().double()
    on_device, bias_on_device = x.to(weight.device), None if bias is None else bias.to(weight.device)
    if lora is None and layer is None:
        got = quantized_linear(on_device, weight, bias_on_device, use_kernel=use_kernel)
    else:
        got = (layer or QuantizedLinear(weight, bias_on_device, lora))(on_device)
    assert got.dtype == weight.dtype and got.shape == (*x.shape[:-1], outputs) and got.is_contiguous()
    x = x.cpu().double()
    wanted = x @ values.t() + (0 if bias is None else bias.double())
    sums = x.abs() @ values.abs().t() + wanted.abs()
    if lora is not None:
        rows = on_device.reshape(-1, columns).contiguous().clone()  # at an address that does not matter to torch
        reduced = torch.mm(rows.to(lora.lora_A.dtype), lora.lora_A.t()).cpu().double()
        lora_B = lora.lora_B.cpu().double()
        wanted += (lora.scaling * reduced @ lora_B.t()).view(wanted.shape)
        sums += (abs(lora.scaling) * reduced.abs() @ lora_B.abs().t()).view(wanted.shape)
    bound = UNIT_ROUNDOFF[weight.dtype] * wanted.abs() + 4 * columns**0.5 * 2.0**-24 * sums + 1e-30
    excess = ((got.cpu().double() - wanted).abs() / bound).max().item() if got.numel() else 0.0
    assert excess <= 1, (weight.wire_format, weight.dtype, weight.shape, x.shape, lora and lora.lora_B.shape, excess)
    return got


def check_stack(fmt, matrices, outputs, slices, tokens, each, columns=384, dtype=torch.bfloat16, device=CPU):
    """A stack's rows against the products with each matrix by itself."""
    columns = fmt.block_size * max(1, columns // fmt.block_size)
    weight = weight_of(normal(matrices * outputs, columns, dtype=dtype), fmt, slices, device=device)
    generator = torch.Generator().manual_seed(3)
    matrix_of = torch.randint(matrices, (tokens * each,), generator=generator)
    x = normal(tokens, columns, dtype=dtype, seed=1)
    got = QuantizedStack(weight, matrices)(x.to(device), matrix_of.to(device)).cpu().double()
    values = on_cpu(weight).dequantize().double().view(matrices, outputs, columns)
    rows = x.double().repeat_interleave(each, 0)
    wanted = torch.einsum("rk,rnk->rn", rows, values[matrix_of])
    sums = torch.einsum("rk,rnk->rn", rows.abs(), values[matrix_of].abs()) + wanted.abs()
    bound = UNIT_ROUNDOFF[dtype] * wanted.abs() + 4 * columns**0.5 * 2.0**-24 * sums + 1e-30
    assert got.shape == wanted.shape and ((got - wanted).abs() <= bound).all(), (fmt, matrices, outputs, slices, dtype)


def check_lora_spoils(weight):
    """NaN and overflow in LoRA: in B they spoil an output, in A or x all outputs of the rows that they meet."""
    outputs, columns = weight.shape
    x, places = normal(3, columns, dtype=weight.dtype).to(weight.device), range(3)
    for place, value, wanted in (
        ("lora_A", torch.nan, (places, range(outputs))),
        ("lora_B", torch.nan, (places, [outputs - 1])),
        ("x", torch.nan, ([1], range(outputs))),
        ("lora_B", torch.inf, (places, [outputs - 1])),
    ):
        lora, some = lora_of(weight, 9), x.clone()
        spoiled = some if place == "x" else getattr(lora, place)
        spoiled[(1, 3) if place == "x" else (-1, 3)] = value
        got = QuantizedLinear(weight, None, lora)(some).cpu()
        expected = torch.zeros(3, outputs, dtype=torch.bool)
        expected[torch.tensor(list(wanted[0]))[:, None], torch.tensor(list(wanted[1]))] = True
        assert torch.equal(~got.isfinite(), expected), (place, value, weight.wire_format)


def check_lora_beside_large_scales(wire_format, device=CPU):
    """The sums of weights at the end of their dtype's range, which are made twice on a GPU, have LoRA's once."""
    columns = wire_format.block_size * max(1, 128 // wire_format.block_size)
    largest = torch.full((9, columns), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    weight = weight_of(largest, wire_format, 2, device=device)
    lora, x = lora_of(weight, 5), torch.zeros(3, columns, dtype=torch.bfloat16, device=device)
    x[:, 0] = 2.0**-100
    lora = lora._replace(scaling=2.0**127)
    got = QuantizedLinear(weight, None, lora)(x).double()
    of_weight = x.double() @ on_cpu(weight).dequantize().double().to(device).t()
    of_lora = lora.scaling * torch.mm(x, lora.lora_A.t()).double() @ lora.lora_B.double().t()
    assert (of_lora.abs().amax(1) > of_weight.abs().amax(1) / 32).all()
    bound = 2.0**-8 * (of_weight.abs() + of_lora.abs())
    assert ((got - of_weight - of_lora).abs() <= bound).all(), (wire_format, got, of_weight, of_lora)


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


def check_bounds(wire_format, device=CPU):
    """Nothing is written behind a result, where a slice goes on behind the weight by whole tiles."""
    columns = wire_format.block_size * (1024 // wire_format.block_size)
    longer = weight_of(normal(21, columns), wire_format, 1, device=device)
    weight = QuantizedWeight(longer.payload, 48, wire_format, longer.slice_numel, (9, columns), torch.bfloat16)
    x = normal(3, columns).to(device)
    with_lora = QuantizedLinear(weight, None, lora_of(weight, 5))
    reduced = x @ with_lora.lora.lora_A.t()
    for size, launch in (
        (2 * 3 * 9, lambda out: QuantizedLinear(weight).launch(x, x, out.view(torch.bfloat16).view(3, 9))),
        (2 * 3 * 9, lambda out: with_lora.launch(x, reduced, out.view(torch.bfloat16).view(3, 9))),
    ):
        buffer = torch.full((size + 32768,), 77, dtype=torch.uint8, device=device)
        launch(buffer[:size])
        assert (buffer[size:] == 77).all() and not (buffer[:size] == 77).all(), (wire_format, size)
