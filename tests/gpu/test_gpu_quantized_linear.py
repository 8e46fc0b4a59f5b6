"""Products with weights that lie as codes, natively on a GPU: exact numbers, float64, the same bits on every run.

A kernel is compiled once per format, dtype and launch, in 2 to 5 seconds; tests/kernels/test_quantized_linear.py goes
through slices and shapes in Triton's interpreter. Here every format is multiplied in bf16 with few rows of x, one of
each kind of scale with more, and other dtypes with one format of each element.
"""

import pytest
import torch
from quantized_cases import (
    DTYPES,
    FORMATS,
    check_bounds,
    check_each_number,
    check_lora_beside_large_scales,
    check_lora_spoils,
    check_product,
    check_spoiled,
    check_stack,
    lora_of,
    make,
    normal,
    on_cpu,
    same_bits,
    weight_of,
)

from zeropp_fp8.kernels.linear import quantized_linear as module
from zeropp_fp8.kernels.linear.quantized_linear import Launch, QuantizedLinear, quantized_linear
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def columns_of(wire_format, about):
    return wire_format.block_size * max(1, about // wire_format.block_size)


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    """Every number of a weight; sums of several steps; slices in and out of order, ends inside rows; NaN; overflow."""
    fmt = make(name)
    columns = columns_of(fmt, 256)
    every_option = name in ("int4", "int8-3")  # each is compiled by itself
    for outputs, slices, extra in ((33, 4, 1), (1, 1, 0), (130, 6, 0)):
        weight = weight_of(normal(outputs, columns), fmt, slices, extra, CUDA, ordered=outputs > 1 or not every_option)
        for first in range(0, columns, 8):
            check_each_number(weight, range(first, min(first + 8, columns)))
    columns = columns_of(fmt, 3000)
    weight = weight_of(normal(67, columns), fmt, 8, device=CUDA)
    for count in (1, 5, 8):
        bias = normal(67, seed=2, scale=50) if every_option and count > 1 else None
        check_product(weight, normal(count, columns, seed=1), bias)
    check_spoiled(normal(40, columns), fmt, 3, 5 * columns + fmt.block_size, CUDA)
    largest = torch.full((9, columns), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    largest[1::2] *= -0.9
    largest[4:6] = 2.0**-126
    largest[6] = 0
    check_each_number(weight_of(largest, fmt, 2, device=CUDA), rows=[0, columns // 2, columns - 1])


@pytest.mark.parametrize("name", ["int4", "int8", "nf4", "nf4-double", "int4-34"])
def test_more_rows(name):
    """16 and 32 rows of x a program, and several programs of them."""
    fmt = make(name)
    columns = columns_of(fmt, 1500)
    weight = weight_of(normal(67, columns), fmt, 4, device=CUDA)
    for count in (9, 16, 17, 32, 33, 100):
        check_product(weight, normal(count, columns, seed=1), normal(67, seed=2, scale=50))
    check_each_number(weight_of(normal(67, columns_of(fmt, 200)), fmt, 2, device=CUDA))


@pytest.mark.parametrize("name", ["nf4-double", "int4", "int8", "int8-3"])
def test_lora(name):
    """Ranks of any size in the same kernel; launched again, and with adapters that were written in the meantime."""
    fmt = make(name)
    weight = weight_of(normal(67, columns_of(fmt, 1500)), fmt, 4, device=CUDA)
    bias = normal(67, seed=2, scale=50) if name == "int4" else None
    every_launch = name == "nf4-double"  # each is compiled by itself
    counts = (1, 8, 1, 16, 8, 20, 32, 16) if every_launch else (1, 8, 1, 16, 8)
    for rank in (1, 4, 7, 8, 16, 64, 130)[: 7 if every_launch else 6]:
        lora = lora_of(weight, rank, 0.3)
        layer = QuantizedLinear(weight, None if bias is None else bias.to(CUDA), lora)
        for count in counts:
            first = check_product(weight, normal(count, weight.shape[1], seed=count), bias, lora=lora, layer=layer)
            again = layer(normal(count, weight.shape[1], seed=count).to(CUDA))
            assert torch.equal(first, again)
        lora.lora_A.mul_(-2), lora.lora_B.add_(0.5)
        check_product(weight, normal(8, weight.shape[1]), bias, lora=lora, layer=layer)
    check_lora_spoils(weight)
    check_lora_beside_large_scales(fmt, CUDA)


@pytest.mark.parametrize("dtype, of_lora", [("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_lora_in_other_dtypes(dtype, of_lora):
    weight = weight_of(normal(67, 1536, dtype=DTYPES[dtype]), make("nf4-double"), 4, device=CUDA)
    for rank, count in ((3, 1), (16, 8), (16, 20), (130, 5)):
        lora = lora_of(weight, rank, 1 / 3, DTYPES[of_lora])
        check_product(weight, normal(count, 1536, dtype=DTYPES[dtype], seed=1), lora=lora)


def test_lora_at_odd_addresses():
    """B in the middle of a buffer, as gathered parameters lie; x that is copied to a multiple of 16."""
    weight = weight_of(normal(67, 1536), make("nf4-double"), 4, device=CUDA)
    lora = lora_of(weight, 5)
    buffer = torch.empty(1 + lora.lora_B.numel(), dtype=torch.bfloat16, device=CUDA)
    lora = lora._replace(lora_B=buffer[1:].view(67, 5).copy_(lora.lora_B))
    layer, x = QuantizedLinear(weight, None, lora), normal(8, 1537, seed=1).to(CUDA)
    for some in (x[:, :1536], x.view(-1)[1 : 1 + 8 * 1536].view(8, 1536), x[:4, 1:].view(2, 2, 1536)):
        for _ in range(2):
            check_product(weight, some, lora=lora, layer=layer)


def test_lora_under_autocast():
    """Which would have torch's part of the product in another dtype than the adapter's."""
    weight = weight_of(normal(67, 512), make("nf4-double"), 4, device=CUDA)
    lora, x = lora_of(weight, 16, 2.0, torch.float32), normal(8, 512, seed=1).to(CUDA)
    layer = QuantizedLinear(weight, None, lora)
    wanted = layer(x)
    with torch.autocast("cuda", torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.bfloat16 and (got - wanted).norm() < 0.01 * wanted.norm()


def test_other_streams():
    """A kernel that is launched again runs on the stream that is current then."""
    weight = weight_of(normal(1024, 4096), make("nf4-double"), 4, device=CUDA)
    lora, x = lora_of(weight, 16), normal(8, 4096, seed=1).to(CUDA)
    layer = QuantizedLinear(weight, None, lora)
    wanted, stream = layer(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # 25 ms and more: what does not wait for it would read zeros
        late = torch.zeros_like(x).copy_(x)
        got = layer(late)
    torch.cuda.synchronize()
    assert torch.equal(got, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device():
    weight = weight_of(normal(67, 512), make("nf4-double"), 4, device=torch.device("cuda:1"))
    lora, x = lora_of(weight, 16), normal(8, 512, seed=1)
    layer = QuantizedLinear(weight, None, lora)
    for device in (0, 1, 1, 0):
        with torch.cuda.device(device):
            check_product(weight, x, lora=lora, layer=layer)


@pytest.mark.parametrize(
    "name, dtype", [("int4", "fp16"), ("nf4-double", "fp16"), ("int8", "fp32"), ("int8-3", "fp16")]
)
def test_other_dtypes(name, dtype):
    fmt, dtype = make(name), DTYPES[dtype]
    columns = columns_of(fmt, 1500)
    weight = weight_of(normal(67, columns, dtype=dtype), fmt, 4, device=CUDA)
    for count in (1, 20):
        check_product(weight, normal(count, columns, dtype=dtype, seed=1), normal(67, dtype=dtype, seed=2, scale=50))
    check_each_number(weight, range(0, columns, 97))


@pytest.mark.parametrize("name", ["int4", "int8", "nf4", "nf4-double"])
def test_matrices_of_a_model(name):
    """The same bits on every run, and after other work."""
    fmt = make(name)
    for outputs, columns in ((1024, 4096), (4096, 14336))[: 2 if name in ("int4", "nf4-double") else 1]:
        weight = weight_of(normal(outputs, columns, scale=0.02), fmt, 4, device=CUDA)
        for count in (1, 32):
            x = normal(count, columns, seed=1)
            first = check_product(weight, x)
            for _ in range(5):
                assert torch.equal(quantized_linear(x.to(CUDA), weight), first)


def test_inputs():
    """Views that begin at odd addresses, are not contiguous or have other numbers of dimensions; no rows at all."""
    weight = weight_of(normal(9, 256), make("int4"), 2, device=CUDA)
    x = normal(6, 512, seed=1).to(CUDA)
    for some in (x[:, ::2], x.view(-1)[1:1537].view(6, 256), x[:, :256].reshape(2, 3, 256), x[0, :256], x[:0, :256]):
        check_product(weight, some)
    bias = normal(18, seed=2).to(CUDA)[::2]
    wanted = quantized_linear(x[:, :256], weight, bias.clone())
    assert torch.equal(quantized_linear(x[:, :256], weight, bias), wanted)


@pytest.mark.parametrize("name", ["int4", "int8-3"])
def test_bounds(name):
    check_bounds(make(name), CUDA)


def test_every_launch(monkeypatch):
    """All that benchmarks/quantized_linear.py --sweep tries, in one format: the same sums."""
    weight = weight_of(normal(67, 2048), make("int4"), 3, device=CUDA)
    for warps in (4, 8, 16):
        for row_groups, groups, times in ((2, 1, 1), (2, 1, 2), (4, 1, 1), (4, 2, 1)):
            launch = Launch(warps, row_groups, groups, times, 128)
            monkeypatch.setattr(module, "launch_of", lambda *_, launch=launch: launch)
            check_product(weight, normal(11, 2048, seed=1))


def test_graph_capture():
    """A captured product works on the codes and the input that are there at replay."""
    fmt = make("nf4-double")
    first, second = (weight_of(normal(64, 512, seed=seed), fmt, 2, device=CUDA) for seed in (0, 1))
    weight = QuantizedWeight(
        first.payload.clone(), 48, fmt, first.slice_numel, (64, 512), torch.bfloat16, first.row_of_slice
    )
    x, lora = normal(3, 512, seed=2).to(CUDA), lora_of(first, 16)
    layers = QuantizedLinear(weight), QuantizedLinear(weight, None, lora)
    for _ in range(2):
        before = [layer(x) for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [layer(x) for layer in layers]
    weight.payload.copy_(second.payload)
    weight.row_of_slice.copy_(second.row_of_slice)
    x.mul_(2), lora.lora_B.mul_(3)
    graph.replay()
    wanted = quantized_linear(x, second), QuantizedLinear(second, None, lora)(x)
    for y, other, old in zip(captured, wanted, before):
        assert torch.equal(y, other) and not torch.equal(y, old)


def test_weights_on_a_gpu():
    """The torch code decodes the same numbers there; rows must begin at multiples of 16 bytes."""
    for name in FORMATS:
        weight = weight_of(normal(33, columns_of(make(name), 256)), make(name), 3, 1, CUDA)
        assert same_bits(weight.dequantize().cpu(), on_cpu(weight).dequantize())
    weight = weight_of(normal(4, 64), make("int4-32"), 2, device=CUDA)
    shifted = torch.zeros(weight.payload.numel() + 8, dtype=torch.uint8, device=CUDA)[8:].view(weight.payload.shape)
    with pytest.raises(ValueError, match="rows of a payload on a GPU start at multiples of 16 bytes"):
        QuantizedWeight(shifted, 48, weight.wire_format, 128, (4, 64), torch.bfloat16, weight.row_of_slice)


@pytest.mark.parametrize("name", ["int4", "nf4-double", "int8-3"])
def test_stacks(name):
    """Experts as of a Qwen3-MoE: some unused, some used by several rows."""
    for outputs, tokens, each, columns in ((48, 8, 8, 2048), (64, 8, 8, 768), (64, 64, 1, 768)):
        check_stack(make(name), 128, outputs, 4, tokens, each, columns, device=CUDA)
