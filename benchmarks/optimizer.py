"""Time of an optimizer step on flat state: the fused FP8 AdamW in its formats, beside fused fp32 Adams, Muon, a copy.

    python -m benchmarks.optimizer --millions 64 256 1024 --out optimizer.json

On a GPU the Triton kernel, else the torch code with one thread on tiny sizes. The parameters are cut like a Llama's. A
line says: milliseconds, bytes moved a parameter (read and written, counted from the formats), GB/s, and that bandwidth
as a share of a copy's, measured in the same run. With scales per tensor the step reads everything twice, so its bytes
are more. Before anything is timed, the kernel's codes are compared with the torch code's on a small case.

Of Muon, on the layers' matrices with fp32 states: a whole step and its iteration alone, by method, with operations per
second.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator

import torch

from benchmarks.harness.environment import describe, forget_memory
from benchmarks.harness.measuring import milliseconds
from benchmarks.harness.results import write_result
from examples.options import new_file, whole
from zeropp_fp8.optim import (
    UPDATES,
    Hyper,
    Muon,
    Owned,
    Segments,
    StateBuffer,
    StateFormats,
    adamw_step,
    make_state_buffers,
)
from zeropp_fp8.optim.muon import METHODS, orthogonalized, product_dtype

VOCABULARY = 32_000
HYPER = Hyper(1e-3, weight_decay=0.1, step=100)
# name: (formats, format of gradients)
STEPS = {
    "block scales, fp8 gradients": (StateFormats(scales="block"), "fp8_e4m3"),
    "block scales, bf16 gradients": (StateFormats(scales="block"), "bf16"),
    "tensor scales, fp8 gradients": (StateFormats(), "fp8_e4m3"),
    "all fp32, bf16 gradients": (StateFormats("fp32", "fp32", "fp32"), "bf16"),
    "all fp32, fp32 gradients": (StateFormats("fp32", "fp32", "fp32"), "fp32"),
}
GRADIENT_BYTES = {"fp8_e4m3": 1, "bf16": 2, "fp32": 4}


def llama_matrices(total: int) -> list[tuple[int, int]]:
    """Shapes of the matrices of one layer of a Llama with about as many parameters, of at most 32 layers."""
    hidden = 256
    while 32 * 12 * hidden * hidden < total:
        hidden *= 2
    between = -(-8 * hidden // 3 // 128) * 128
    return [(hidden, hidden)] * 4 + [(between, hidden)] * 2 + [(hidden, between)]


def llama_numels(total: int) -> list[int]:
    """Sizes of the tensors of a Llama with about as many parameters; the last one is cut to meet the total."""
    matrices = llama_matrices(total)
    hidden = matrices[0][0]
    layer = [math.prod(shape) for shape in matrices] + [hidden, hidden]
    numels = [VOCABULARY * hidden] if VOCABULARY * hidden < total // 4 else []
    while sum(numels) < total:
        numels += layer
    while sum(numels) - numels[-1] >= total:
        numels.pop()
    numels[-1] -= sum(numels) - total
    return numels


def bytes_moved(formats: StateFormats, gradients: str) -> float:
    """Read and written for each parameter, bf16 weights included; scales per tensor are not counted."""
    state = formats.bytes_per_parameter()
    passes = 2 if formats.scales == "tensor" and formats.master != "fp32" else 1
    return passes * (GRADIENT_BYTES[gradients] + state) + state + 2


def make_step(
    numels: list[int], name: str, device: torch.device, use_kernel: bool, drawn_on: torch.device
) -> tuple[Callable[[], None], tuple[StateBuffer, ...], list[torch.Tensor]]:
    """(work, buffers, weights) of a step of STEPS from random weights, moments and gradients."""
    formats, gradients = STEPS[name]
    generator = torch.Generator(device=drawn_on).manual_seed(0)
    segments = Segments(numels, device)
    buffers = make_state_buffers(segments, formats)
    weights = [torch.empty(n, dtype=torch.bfloat16, device=device) for n in numels]
    held = StateBuffer(segments, gradients) if gradients.startswith("fp8") else None
    listed = []
    for segment, numel in enumerate(numels):
        draw = torch.randn(numel, generator=generator, device=drawn_on).to(device)
        buffers[0].encode_(segment, 0.02 * draw)
        grad = 1e-3 * draw.roll(1)
        buffers[1].encode_(segment, 0.3 * grad.roll(1))
        buffers[2].encode_(segment, 0.1 * grad.square() + 1e-8)
        if held is None:
            listed.append(grad.to(torch.bfloat16 if gradients == "bf16" else torch.float32))
        else:
            held.encode_(segment, grad)
        del draw, grad
    grads = listed if held is None else held
    scale = torch.ones(1, device=device)
    shapes = [(n,) for n in numels]

    def work() -> None:
        adamw_step(Owned(segments, buffers[0], buffers[1:], grads, weights, scale, shapes), HYPER, use_kernel)

    return work, buffers, weights


def check(device: torch.device) -> dict[str, float]:
    """For each step the largest share of codes in which the kernel differs from the torch code on the CPU."""
    cpu = torch.device("cpu")
    numels = [100_000, 1, 1024, 4097]
    shares = {}
    for name in STEPS:
        made = [make_step(numels, name, place, place == device, cpu) for place in (device, cpu)]
        for work, _, _ in made:
            work()
        differ = 0.0
        for one, two in zip(*(buffers for _, buffers, _ in made)):
            unequal = one.codes.cpu() != two.codes
            inside = torch.cat([two.segments.view(unequal, segment) for segment in range(len(numels))])
            differ = max(differ, inside.float().mean().item())
        if differ:
            raise SystemExit(f"{name}: {differ:.2%} of the kernel's codes are not those of the torch code")
        shares[name] = differ
    return shares


def fused_adams(numels: list[int], device: torch.device) -> Iterator[tuple[str, Callable[[], None] | str]]:
    """(name, work), or (name, why there is none), of fused Adams on fp32 parameters and state."""

    def params() -> list[torch.nn.Parameter]:
        made = [torch.nn.Parameter(torch.full((n,), 0.02, device=device)) for n in numels]
        for p in made:
            p.grad = torch.full_like(p, 1e-3)
        return made

    options = {"lr": HYPER.lr, "weight_decay": HYPER.weight_decay}
    yield "torch.optim.AdamW(fused), fp32", torch.optim.AdamW(params(), **options, fused=True).step
    name = "DeepSpeed FusedAdam, fp32"
    if device.type == "cpu":
        yield name, "needs CUDA"
        return
    try:
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
        from deepspeed.ops.adam import FusedAdam

        optimizer = FusedAdam(params(), **options)
    except Exception as error:  # no deepspeed, no nvcc, a compiler's error: whatever it is, it is the row
        lines = str(error).strip().splitlines() or [""]
        yield name, f"could not be built: {type(error).__name__}: {lines[-1][:200]}"
        return
    yield name, optimizer.step


def muon_steps(total: int, device: torch.device) -> Iterator[tuple[str, Callable[[], None], int, int]]:
    """(name, work, parameters, operations) of Muon on the matrices of whole layers, of about so many parameters."""
    layer = llama_matrices(total)
    shapes = layer * max(1, total // sum(map(math.prod, layer)))
    numels = [math.prod(shape) for shape in shapes]
    segments = Segments(numels, device)
    buffers = make_state_buffers(segments, StateFormats("fp32", "fp32", "fp32"), ["exp_avg"])
    grads = [torch.randn(shape, device=device) for shape in shapes]
    weights = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    scale, update = torch.ones(1, device=device), UPDATES["Muon"]
    flat = [grad.view(-1) for grad in grads]
    for method in METHODS:
        group = {**Muon([torch.nn.Parameter(weights[0])], ns_method=method).param_groups[0]}
        options, dtype = update.options(None, group), product_dtype(device, method)

        def step(options=options) -> None:
            update.apply(Owned(segments, buffers[0], buffers[1:], flat, weights, scale, shapes), 1, options)

        def iterate(method=method, dtype=dtype) -> None:
            for kind in sorted(set(shapes)):
                of_kind, many = [g for g in grads if g.shape == kind], max(1, (1 << 24) // math.prod(kind))
                for first in range(0, len(of_kind), many):
                    orthogonalized(torch.stack(of_kind[first : first + many]), dtype=dtype, method=method)

        operations = sum(update.operations(shape, group) for shape in shapes)
        yield f"Muon, {method}", step, sum(numels), operations
        yield f"Newton-Schulz, {method}", iterate, sum(numels), operations


def copy_of(numel: int, device: torch.device) -> Callable[[], None]:
    source = torch.ones(numel, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def measure(total: int, device: torch.device, repeats: int) -> list[dict]:
    """Rows of results for about `total` parameters."""
    numels = llama_numels(total)
    numel = sum(numels)
    rows = []

    def add(name: str, work: Callable[[], None], num_bytes: float) -> None:
        ms = milliseconds(work, device, repeats)
        row = {"parameters": numel, "tensors": len(numels), "step": name, "ms": ms, "bytes_per_parameter": num_bytes}
        row["gb_per_s"] = num_bytes * numel / ms / 1e6
        rows.append(row)
        row["share_of_copy"] = row["gb_per_s"] / rows[0]["gb_per_s"]
        print(line(row), flush=True)

    add("copy of fp32", copy_of(numel, device), 8)
    for name, (formats, gradients) in STEPS.items():
        forget_memory(device)
        work, buffers, weights = make_step(numels, name, device, device.type == "cuda", device)
        add(name, work, bytes_moved(formats, gradients))
        rows[-1]["state_bytes_per_parameter"] = sum(buffer.num_bytes() for buffer in buffers) / numel
        del work, buffers, weights
    for name, work in fused_adams(numels, device):
        forget_memory(device)
        if isinstance(work, str):
            rows.append({"parameters": numel, "step": name, "error": work})
            print(f"{name:<34}{work}", flush=True)
        else:
            # read: gradient, weight, two moments; written: weight, two moments, all fp32
            add(name, work, 28)
        del work
    for name, work, held, operations in muon_steps(total, device):
        forget_memory(device)
        ms = milliseconds(work, device, max(2, repeats // 3))
        rows.append({"parameters": held, "step": name, "ms": ms, "tflops": operations / ms / 1e9})
        print(f"{name:<34}{ms:>10.3f} ms{rows[-1]['tflops']:>9.1f} TFLOP/s", flush=True)
        del work
    return rows


def line(row: dict) -> str:
    return (
        f"{row['step']:<34}{row['ms']:>10.3f} ms{row['bytes_per_parameter']:>7.2f} B a parameter"
        f"{row['gb_per_s']:>9.1f} GB/s{100 * row['share_of_copy']:>7.1f} % of copy"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--millions", type=whole(1), nargs="+", default=[64, 256, 1024] if on_gpu else [1])
    parser.add_argument("--repeats", type=whole(1), default=30 if on_gpu else 2)
    parser.add_argument("--out", type=new_file, default="runs/optimizer.json")
    args = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    result = describe("optimizer")
    result["codes_that_differ"] = check(device) if on_gpu else None
    result["rows"] = []
    for millions in args.millions:
        print(f"{millions}M parameters", flush=True)
        result["rows"] += measure(millions << 20, device, args.repeats)
    write_result(args.out, result | {"finished": True})


if __name__ == "__main__":
    main()
