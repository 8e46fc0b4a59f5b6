"""Time of products with weights that lie as codes, beside torch's bf16 product.

    python -m benchmarks.quantized_linear --out quantized_linear.json
    python -m benchmarks.quantized_linear --sweep --rows 1 16 --formats int4 "nf4 double"   # which launches suit a GPU
    python -m benchmarks.quantized_linear --experts 128 --shapes 1536x2048 2048x768 --rows 8 64 256 512  # of a stack

On a GPU the Triton kernels, captured in a CUDA graph that goes through several copies of each weight, together far
larger than the L2 cache, so that each is read from memory and the host's time does not count; on a CPU the torch code
on small shapes. Each result is checked against float64 first, and two runs against each other bit for bit.

A line says: microseconds, times as fast as torch's bf16 product of the same shape, GB/s of the weight's bytes (codes
and scales, or bf16 numbers), and that as a share of the bytes a copy reads and writes in a second, measured in the same
run. "decode" is what a layer does without the kernel: the dequantize kernel, then torch's product. "+ LoRA" is the
product with an adapter of rank 16 in the same kernel, and "LoRA beside" the same with torch's operations after it.
"host" is how long the host takes to issue a product outside of a graph, of a layer that is called again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from benchmarks.harness.environment import describe
from benchmarks.harness.measuring import host_ms, milliseconds
from benchmarks.harness.results import write_result
from examples.options import new_file, several, whole
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import make_format
from zeropp_fp8.kernels.linear.quantized_weight import QuantizedWeight

SHAPES = ("4096x14336", "14336x4096", "4096x4096", "1024x4096")  # outputs x inputs: of Llama 3 8B
ROWS = (1, 2, 4, 8, 16, 32, 64)
FORMATS = {
    "int4": ("int4", {"block_size": 128}),
    "int8": ("int8", {"block_size": 128}),
    "nf4": ("nf4", {"block_size": 64}),
    "nf4 double": ("nf4", {"block_size": 64, "double_quantize": True}),
    "int4 double": ("int4", {"block_size": 64, "double_quantize": True}),
}
ORDER = (2, 0, 3, 1)  # slices of a weight, as 4 ranks send them
RANK = 16
CALLS = 200  # that the host issues at once, fewer than a GPU's queue holds
CACHE = 1 << 28  # bytes that copies of a weight have at least: four times an H200's L2


def slice_numel_of(numel: int, wire_format) -> int:
    return -(-numel // (len(ORDER) * wire_format.granule)) * wire_format.granule


class Weights:
    """A weight in one format, in enough copies to be read from memory."""

    def __init__(self, shape: tuple[int, int], name: str, device: torch.device) -> None:
        element, options = FORMATS[name]
        self.shape, self.name = shape, name
        self.wire_format = make_format(element, **options)
        numel = shape[0] * shape[1]
        slice_numel = slice_numel_of(numel, self.wire_format)
        self.layout = PayloadLayout([slice_numel], [self.wire_format], [torch.bfloat16], device)
        self.order = SliceOrder(ORDER, device)
        generator = torch.Generator(device=device).manual_seed(0)
        values = (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16()
        payload = torch.empty(len(ORDER), self.layout.row_bytes, dtype=torch.uint8, device=device)
        self.layout.encode([values], self.order, payload)
        self.bytes = payload.numel()
        self.copies = max(1, CACHE // self.bytes) if device.type == "cuda" else 1
        row_of_slice = torch.argsort(self.order.on_device).int()
        self.weights = [
            QuantizedWeight(
                payload.clone(),
                self.layout.offsets[0],
                self.wire_format,
                slice_numel,
                shape,
                torch.bfloat16,
                row_of_slice,
            )
            for _ in range(self.copies)
        ]

    def decoder(self) -> Callable[[QuantizedWeight], torch.Tensor]:
        """The dequantize kernel, which writes to the same matrix every time."""
        decoded = torch.empty(self.shape, dtype=torch.bfloat16, device=self.order.on_device.device)

        def decode(weight: QuantizedWeight) -> torch.Tensor:
            self.layout.decode(weight.payload, self.order, [decoded])
            return decoded

        return decode


def microseconds(work: Callable[[object], object], copies: Sequence, device: torch.device, repeats: int) -> float:
    """Time of `work` on one of several copies, which it goes through in turn."""

    def all_of_them() -> None:
        for copy in copies:
            work(copy)

    if device.type != "cuda":
        return 1e3 * milliseconds(all_of_them, device, repeats) / len(copies)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(copies[0])  # compiles, and lets libraries allocate
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()
    return 1e3 * milliseconds(graph.replay, device, repeats) / len(copies)


def host_microseconds(work: Callable[[object], object], copies: Sequence, device: torch.device) -> float:
    """How long the host takes to issue `work` on one of several copies, after each of them was issued once."""

    def often() -> None:
        for i in range(CALLS):
            work(copies[i % len(copies)])

    for copy in copies:
        work(copy)
    return 1e3 * host_ms(often, device) / CALLS


def check(x: torch.Tensor, weight: QuantizedWeight, y: torch.Tensor, lora=None) -> None:
    """Against float64 of the same rounded numbers, or of those and an adapter."""
    wanted = x.double() @ weight.dequantize().double().t()
    if lora is not None:
        wanted += lora.scaling * (x.double() @ lora.lora_A.double().t() @ lora.lora_B.double().t())
    error = ((y.double() - wanted).norm() / wanted.norm()).item()
    if not error < 2**-8:
        raise SystemExit(f"{weight.wire_format} {weight.shape}: {x.shape[0]} rows are off by {error:.2e}")


def copy_bandwidth(device: torch.device, repeats: int) -> float:
    """GB/s that a copy reads and writes."""
    size = 1 << (30 if device.type == "cuda" else 24)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).fill_(i) for i in range(2))
    return 2 * size / milliseconds(lambda: target.copy_(source), device, repeats) / 1e6


def measure(shapes: list[tuple[int, int]], counts: Sequence[int], device: torch.device, repeats: int) -> dict:
    """Rows of results, and the bandwidth they are compared with."""
    from zeropp_fp8.kernels.linear.quantized_linear import Lora, QuantizedLinear, quantized_linear

    copy = copy_bandwidth(device, repeats)
    print(f"copy {copy:.1f} GB/s")
    rows = []

    def add(shape: tuple[int, int], count: int, name: str, us: float, num_bytes: float, host_us=None) -> None:
        row = {"shape": f"{shape[0]}x{shape[1]}", "rows": count, "what": name, "us": us, "host_us": host_us}
        row |= {"gb_per_s": num_bytes / us / 1e3, "share_of_copy": num_bytes / us / 1e3 / copy}
        same = [r for r in rows if (r["shape"], r["rows"], r["what"]) == (row["shape"], count, "bf16")]
        row["speed_up"] = same[-1]["us"] / us if same else 1.0
        rows.append(row)
        print(line(row), flush=True)

    for shape in shapes:
        generator = torch.Generator(device=device).manual_seed(1)
        size = 2 * shape[0] * shape[1]
        plain = [
            torch.randn(shape, generator=generator, device=device).bfloat16()
            for _ in range(max(1, CACHE // size) if device.type == "cuda" else 1)
        ]
        xs = {count: torch.randn(count, shape[1], generator=generator, device=device).bfloat16() for count in counts}
        lora = Lora(
            (torch.randn(RANK, shape[1], generator=generator, device=device) * shape[1] ** -0.5).bfloat16(),
            (torch.randn(shape[0], RANK, generator=generator, device=device) * 0.02).bfloat16(),
            2.0,
        )

        def measured(work: Callable, copies: Sequence) -> tuple[float, float]:
            return microseconds(work, copies, device, repeats), host_microseconds(work, copies, device)

        def beside(layer: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
            reduced = F.linear(x, lora.lora_A)  # noqa: B023
            return torch.add(layer(x), F.linear(reduced, lora.lora_B), alpha=lora.scaling)  # noqa: B023

        for count, x in xs.items():
            us, host_us = measured(lambda w: F.linear(x, w), plain)  # noqa: B023
            add(shape, count, "bf16", us, size, host_us)
        del plain
        for name in FORMATS:
            weights = Weights(shape, name, device)
            decode = weights.decoder()
            for count, x in xs.items():
                first = quantized_linear(x, weights.weights[0])
                check(x, weights.weights[0], first)
                if not torch.equal(first, quantized_linear(x, weights.weights[0])):
                    raise SystemExit(f"{name} {shape}: another result on another run")
                if device.type != "cuda":  # torch code
                    us = microseconds(lambda w: quantized_linear(x, w), weights.weights, device, repeats)  # noqa: B023
                    add(shape, count, name, us, weights.bytes)
                    continue
                plain_layers = [QuantizedLinear(w) for w in weights.weights]
                with_lora = [QuantizedLinear(w, None, lora) for w in weights.weights]
                check(x, weights.weights[0], with_lora[0](x), lora)
                for what, work, layers in (
                    (name, lambda layer: layer(x), plain_layers),  # noqa: B023
                    (f"{name} + LoRA", lambda layer: layer(x), with_lora),  # noqa: B023
                    (f"{name}, LoRA beside", lambda layer: beside(layer, x), plain_layers),  # noqa: B023
                ):
                    us, host_us = measured(work, layers)
                    add(shape, count, what, us, weights.bytes, host_us)
            us = microseconds(lambda w: F.linear(x, decode(w)), weights.weights, device, repeats)  # noqa: B023
            add(shape, counts[-1], f"{name}, decode", us, weights.bytes)
            del weights
    return {"copy_gb_per_s": copy, "rows": rows}


def stacks(
    shape: tuple[int, int],
    experts: int,
    counts: Sequence[int],
    names: Sequence[str],
    device: torch.device,
    repeats: int,
) -> list[dict]:
    """Rows that go through one expert each, at random: by the kernel, and by decoding all for torch's product."""
    from zeropp_fp8.kernels.linear.quantized_linear import QuantizedStack

    rows, generator = [], torch.Generator(device=device).manual_seed(2)
    for name in names:
        weights = Weights((experts * shape[0], shape[1]), name, device)
        decode, layers = weights.decoder(), [QuantizedStack(weight, experts) for weight in weights.weights]
        for count in counts:
            x = torch.randn(count, shape[1], generator=generator, device=device).bfloat16()
            expert_of = torch.randint(experts, (count,), generator=generator, device=device).sort().values
            ends = torch.bincount(expert_of, minlength=experts).cumsum(0).int()

            def grouped(weight: QuantizedWeight) -> torch.Tensor:
                values = decode(weight).view(experts, *shape)  # noqa: B023
                return F.grouped_mm(x, values.transpose(1, 2), offs=ends)  # noqa: B023

            wanted, got = grouped(weights.weights[0]).float(), layers[0](x, expert_of).float()
            if not (got - wanted).norm() < 2**-7 * wanted.norm():
                raise SystemExit(f"{name} {shape}: {count} rows of {experts} experts are off")
            us = microseconds(lambda layer: layer(x, expert_of), layers, device, repeats)  # noqa: B023
            decoded = microseconds(grouped, weights.weights, device, repeats)
            what = {"shape": f"{shape[0]}x{shape[1]}", "experts": experts, "rows": count, "what": name}
            rows.append({**what, "us": us, "decoded_us": decoded, "speed_up": decoded / us})
            print(
                f"{what['shape']:<12}{count:>5} rows  {name:<14}{us:>9.1f} us, decoded {decoded:>9.1f} us", flush=True
            )
    return rows


def line(row: dict) -> str:
    rows = f"{row['rows']} rows"
    return (
        f"{row['shape']:<14}{rows:<10}{row['what']:<34}{row['us']:>10.1f} us{row['speed_up']:>8.2f} x"
        f"{row['gb_per_s']:>10.1f} GB/s{100 * row['share_of_copy']:>7.1f} % of copy"
        + ("" if row["host_us"] is None else f"{row['host_us']:>8.1f} us host")
    )


# (warps, groups of 8 weight rows, loads a span, registers): for up to 8 rows of x, and for more
FEW_ROWS = [(4, 2, 1, 80), (4, 2, 2, 128), (4, 4, 1, 128), (4, 4, 2, 255), (8, 2, 1, 64), (8, 2, 1, 80), (8, 2, 1, 128)]
FEW_ROWS += [(8, 2, 2, 96), (8, 2, 2, 128), (8, 2, 2, 168), (8, 4, 1, 128), (8, 4, 1, 168), (8, 4, 2, 255)]
FEW_ROWS += [(16, 2, 1, 64), (16, 2, 1, 80), (16, 2, 2, 128), (16, 4, 1, 128)]
MORE_ROWS = [(4, 2, 1, 128), (4, 4, 1, 168), (4, 4, 1, 255), (8, 2, 1, 128), (8, 4, 1, 168), (8, 4, 1, 255)]
MORE_ROWS += [(8, 8, 1, 255), (16, 2, 1, 128), (16, 4, 1, 128)]


def launches(count: int) -> Iterator[object]:
    """All launches that are worth trying for so many rows of x; each is compiled, which takes two seconds and more."""
    from zeropp_fp8.kernels.linear.quantized_linear import Launch

    groups = 1 if count <= 8 else (2 if count <= 16 else 4)
    for warps, row_groups, times, registers in FEW_ROWS if groups == 1 else MORE_ROWS:
        yield Launch(warps, row_groups, groups, times, registers)


def sweep(shape: tuple[int, int], counts: Sequence[int], names: Sequence[str], device: torch.device, repeats: int):
    """Time of each product with each way to launch it, the fastest first."""
    from zeropp_fp8.kernels.linear import quantized_linear as module

    rows = []
    usual = module.launch_of
    for name in names:
        weights = Weights(shape, name, device)
        for count in counts:
            x = torch.randn(count, shape[1], device=device).bfloat16()
            for launch in launches(count):
                module.launch_of = lambda *_, launch=launch: launch
                try:
                    check(x, weights.weights[0], module.quantized_linear(x, weights.weights[0]))
                    us = microseconds(lambda w: module.quantized_linear(x, w), weights.weights, device, repeats)  # noqa: B023
                    what = {"shape": f"{shape[0]}x{shape[1]}", "rows": count, "what": name, "launch": str(launch)}
                    rows.append({**what, "us": us, "usual": launch == usual(count, shape[0])})
                except RuntimeError as error:  # too many registers or too much shared memory for the device
                    print(f"{name}, {count} rows: {launch}: {type(error).__name__}")
                finally:
                    module.launch_of = usual
    rows.sort(key=lambda row: (row["what"], row["rows"], row["us"]))
    for row in rows:
        mark = "  (the usual one)" if row["usual"] else ""
        print(f"{row['what']:<14}{row['rows']:>4} rows{row['us']:>9.1f} us  {row['launch']}{mark}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=several(whole(1), "x"),
        default=SHAPES if on_gpu else ("64x256",),
        help="OUTPUTSxINPUTS",
    )
    parser.add_argument("--rows", type=whole(1), nargs="+", default=ROWS if on_gpu else (1, 3), help="rows of x")
    parser.add_argument(
        "--formats", nargs="+", default=tuple(FORMATS), choices=tuple(FORMATS), help="of --sweep, --experts"
    )
    parser.add_argument("--repeats", type=whole(1), default=30 if on_gpu else 3)
    parser.add_argument("--sweep", action="store_true", help="instead, try launches on the first shape")
    parser.add_argument("--experts", type=whole(1), help="instead, of stacks of so many matrices")
    parser.add_argument("--out", type=new_file, default="runs/quantized_linear.json")
    args = parser.parse_args()
    shapes = [tuple(int(side) for side in shape.split("x")) for shape in args.shapes]
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
        if args.sweep:
            raise SystemExit("--sweep needs a GPU")
    result = describe("quantized_linear")
    if args.experts:
        found = (stacks(shape, args.experts, args.rows, args.formats, device, args.repeats) for shape in shapes)
        result["rows"] = [row for of_shape in found for row in of_shape]
    elif args.sweep:
        result["rows"] = sweep(shapes[0], args.rows, args.formats, device, args.repeats)
    else:
        result |= measure(shapes, args.rows, device, args.repeats)
    write_result(args.out, result | {"finished": True})


if __name__ == "__main__":
    main()
