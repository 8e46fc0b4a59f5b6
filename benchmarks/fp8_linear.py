"""Speed of one FP8 linear layer against bf16, and what bounds it.

    python -m benchmarks.fp8_linear --out runs/fp8_linear.json

One GPU; on a CPU a small layer, which shows that it runs and nothing else. The runs are those of harness/compute.py.

Forward and backward (three GEMMs). Times are medians of CUDA events over all rounds; runs take turns, so that all see
the same clocks; inputs rotate and an iteration touches more than the L2 cache holds; the device sleeps first until the
host is ahead, whose own time stands beside. Then the parts: the three GEMMs with operands ready, which no casts can
beat, and the casts as the layer does them. torchao is measured eager and with torch.compile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness.compute import BF16, RUNS, TORCHAO, choose, converted, head_of
from benchmarks.harness.measuring import host_ms, interleaved_ms
from benchmarks.harness.results import write_result
from examples.options import new_file, several, whole
from zeropp_fp8.compute.gemm import matmul_nt
from zeropp_fp8.compute.operand import Float8Operand

COMPILED = " compiled"
# Times bf16.
TARGETS = {"current": 1.35, "delayed": 1.35, "per_channel": 1.25, "block": 1.1}
STRETCH = {"current": 1.5}
ROTATING_INPUTS = 3


class LayerInputs:
    """Inputs and output gradients of a layer, [tokens, in] and [tokens, out] in bf16, the next ones at each call."""

    def __init__(self, tokens: int, features_in: int, features_out: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)

        def normal(features: int, requires_grad: bool) -> Tensor:
            values = torch.randn(tokens, features, generator=generator, device=device).bfloat16()
            return values.requires_grad_(requires_grad)

        self._pairs = [(normal(features_in, True), normal(features_out, False)) for _ in range(ROTATING_INPUTS)]
        self._calls = 0

    def __call__(self) -> tuple[Tensor, Tensor]:
        self._calls += 1
        return self._pairs[self._calls % len(self._pairs)]


def forward_and_backward(layer: nn.Module, weight: nn.Parameter, inputs: LayerInputs) -> Callable[[], None]:
    def work() -> None:
        x, grad = inputs()
        torch.autograd.grad(layer(x), (x, weight), grad)

    return work


def parts_of(layer: nn.Linear, run: str, inputs: LayerInputs) -> dict[str, Callable[[], None]]:
    """The three GEMMs with their operands ready, and the casts that make them, as the layer calls both."""
    x, grad = (tensor.detach() for tensor in inputs())
    weight = layer.weight.detach()
    if run == BF16:
        return {
            "GEMM output": lambda: x @ weight.t(),
            "GEMM grad_input": lambda: grad @ weight,
            "GEMM grad_weight": lambda: grad.t() @ x,
        }
    precision = layer.precision
    scaling, number = precision.scaling, precision.layer

    def cast_input():
        return scaling.quantize(number, "activations", inputs()[0].detach(), True, True)

    def cast_weight():
        return precision.weight_operand(weight, forward=True)

    def cast_weight_transposed(scale: Tensor | None):
        return precision.weight_operand(weight, forward=False, scale=scale)

    def cast_gradient():
        return scaling.quantize(number, "gradients", inputs()[1], True, True)

    (x_q, x_t_q), weight_q, (grad_q, grad_t_q) = cast_input(), cast_weight(), cast_gradient()
    one_scale = isinstance(weight_q, Float8Operand) and weight_q.granularity == "tensor"
    scale = weight_q.scale if one_scale else None
    weight_t_q = cast_weight_transposed(scale)
    return {
        "GEMM output": lambda: matmul_nt(x_q, weight_q, x.dtype, fast_accumulation=True),
        "GEMM grad_input": lambda: matmul_nt(grad_q, weight_t_q, x.dtype),
        "GEMM grad_weight": lambda: matmul_nt(grad_t_q, x_t_q, x.dtype),
        "cast input": cast_input,
        "cast weight": cast_weight,
        "cast weight^T": lambda: cast_weight_transposed(scale),
        "cast gradient": cast_gradient,
    }


def measure(shape: tuple[int, int], args, device: torch.device) -> list[dict]:
    """A row for each run."""
    features_in, features_out = shape
    inputs = LayerInputs(args.tokens, features_in, features_out, device)
    works, parts, failures = {}, {}, {}
    for run in args.runs:
        for name in (run, run + COMPILED) if run.startswith(TORCHAO) and "compile" in args.modes else (run,):
            try:
                torch.manual_seed(0)
                layer = nn.Linear(features_in, features_out, bias=False, device=device, dtype=torch.bfloat16)
                model, report = converted(nn.Sequential(layer), run)
                call = torch.compile(model, dynamic=False) if name.endswith(COMPILED) else model
                work = forward_and_backward(call, model[0].weight, inputs)
                work()
                if report is not None:
                    report.scaling.end_step()  # from here on delayed scales are known
                work()
                parts |= {(name, part): done for part, done in ours(model[0], run, inputs).items()}
                for (owner, _), done in parts.items():
                    if owner == name:
                        done()
            except Exception as error:
                failures[name] = f"{type(error).__name__}: {error}"
                parts = {key: done for key, done in parts.items() if key[0] != name}
                continue
            works[name] = work
    took = interleaved_ms(works, device, args.rounds, args.repeats)
    of_parts = interleaved_ms(parts, device, args.rounds, args.repeats)
    flop = 6 * args.tokens * features_in * features_out
    rows = []
    for name, ms in took.items():
        row = {"shape": f"{features_in}x{features_out}", "run": name, "ms": ms, "tflop_per_s": flop / ms / 1e9}
        row["host_ms"] = host_ms(works[name], device)
        row["parts_ms"] = {part: ms for (owner, part), ms in of_parts.items() if owner == name}
        if BF16 in took:
            row["times_bf16"] = took[BF16] / ms
        rows.append(row)
    rows += [{"shape": f"{features_in}x{features_out}", "run": run, "error": text} for run, text in failures.items()]
    return rows


def ours(layer: nn.Module, run: str, inputs: LayerInputs) -> dict[str, Callable[[], None]]:
    """The parts of a layer that this project made, and of bf16; none of torchao's."""
    return {} if run.startswith(TORCHAO) else parts_of(layer, run, inputs)


def sum_of_parts(row: dict, kind: str) -> float:
    """Milliseconds of the GEMMs or of the casts."""
    return sum(ms for part, ms in row["parts_ms"].items() if part.startswith(kind))


def show(rows: list[dict], tokens: int) -> None:
    """Print the rows of one shape."""
    print(f"\nOne linear layer, {tokens} tokens, {rows[0]['shape'].replace('x', ' -> ')}, forward and backward")
    print(
        f"{'run':<30}{'ms':>8}{'TFLOP/s':>9}{'x bf16':>8}{'target':>10}{'GEMMs ms':>10}{'x bf16':>8}{'casts ms':>10}"
        f"{'host ms':>9}"
    )
    bf16 = next((row for row in rows if row["run"] == BF16 and "ms" in row), None)
    bf16_gemms = sum_of_parts(bf16, "GEMM") if bf16 else None
    for row in rows:
        if "error" in row:
            print(f"{row['run']:<30}FAILED: {row['error'][:200]}")
            continue
        gemms, casts = (sum_of_parts(row, kind) for kind in ("GEMM", "cast"))
        ceiling = f"{bf16_gemms / gemms:.2f}" if bf16_gemms and gemms else ""
        print(
            f"{row['run']:<30}{row['ms']:>8.3f}{row['tflop_per_s']:>9.4g}{row.get('times_bf16', float('nan')):>8.2f}"
            f"{target_text(row['run']):>10}{f'{gemms:.3f}' if gemms else '':>10}{ceiling:>8}"
            f"{f'{casts:.3f}' if casts else '':>10}{row['host_ms']:>9.2f}"
        )
    names = list(dict.fromkeys(part for row in rows for part in row.get("parts_ms", ())))
    print(f"\n  {'parts in ms':<16}" + "".join(f"{part:>{len(part) + 2}}" for part in names))
    for row in rows:
        if row.get("parts_ms"):
            cells = (f"{row['parts_ms'][part]:.3f}" if part in row["parts_ms"] else "" for part in names)
            print(f"  {row['run']:<16}" + "".join(f"{cell:>{len(part) + 2}}" for part, cell in zip(names, cells)))
    sys.stdout.flush()


def target_text(run: str) -> str:
    target = TARGETS.get(run)
    return "" if target is None else f"{target:g}" + (f"/{STRETCH[run]:g}" if run in STRETCH else "")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", help=f"some of {','.join(RUNS)} (default: all)")
    parser.add_argument("--modes", default="eager,compile" if on_gpu else "eager", help="eager, compile or both")
    parser.add_argument("--tokens", type=whole(1), default=8192 if on_gpu else 256)
    parser.add_argument(
        "--shapes",
        type=several(several(whole(1), "x")),
        default="4096x14336,14336x4096,4096x4096" if on_gpu else "256x512",
        help="in x out (default %(default)s)",
    )
    parser.add_argument("--rounds", type=whole(1), default=8 if on_gpu else 1, help="in which the runs take turns")
    parser.add_argument("--repeats", type=whole(1), default=5 if on_gpu else 2, help="of a run in a round")
    parser.add_argument("--out", type=new_file, default="runs/fp8_linear.json", help="JSON file")
    args = parser.parse_args(argv)
    args.shapes = [tuple(map(int, shape.split("x"))) for shape in args.shapes.split(",")]
    choose(args, parser)
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    result = head_of("fp8_linear", device) | {"finished": False, "tokens": args.tokens, "linear": []}
    for shape in args.shapes:
        rows = measure(shape, args, device)
        show(rows, args.tokens)
        result["linear"] += rows
        write_result(args.out, result)
    write_result(args.out, result | {"finished": True})
    failed = [row["run"] for row in result["linear"] if "error" in row]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
