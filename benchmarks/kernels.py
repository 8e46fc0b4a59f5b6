"""Time of quantize, dequantize, dequantize-sum-quantize, error feedback and exact differences, beside a plain copy.

    python -m benchmarks.kernels --elements 268435456 --out kernels.json
    python -m benchmarks.kernels --only feedback,difference --out kernels.json    # some operations, by their names

On a GPU the Triton kernels, else the torch code with one thread. A line says: microseconds, GB/s (bytes read and
written), and that bandwidth as a share of a copy's, measured in the same run. "naive" is what one would write in torch:
one scale for the whole tensor; its error stands beside the block-scaled one's. "torch" is what kernels are compared
with: the same bytes by operations of torch.

Exact differences are of bf16 weights with a standard deviation of 0.02 from those before an update: normal numbers, of
whose masters the standard deviation is the learning rate. "add difference" counts all old weights as read and written,
of which it skips those that have not changed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness.environment import describe
from benchmarks.harness.measuring import milliseconds
from benchmarks.harness.results import write_result
from examples.options import new_file, whole
from zeropp_fp8.comm.error_feedback import ErrorFeedback
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import make_format
from zeropp_fp8.zero.gather.difference import Rows

RANKS = 8  # of a reduction
BY = (("", None), (", torch", False))
FORMATS = {
    "int8 block 256": ("int8", {"block_size": 256}),
    "int8 block 128": ("int8", {"block_size": 128}),
    "int4 block 128": ("int4", {"block_size": 128}),
    "int4 block 128 hadamard": ("int4", {"block_size": 128, "hadamard": True}),
    "fp8_e4m3 block 128": ("fp8_e4m3", {"block_size": 128}),
}
FED_BACK = "int4 block 128 hadamard"
LEARNING_RATES = (1e-6, 1e-5, 1e-4)
REDUCTIONS = {
    "8 x int8 -> int4 hadamard": ("int8 block 128", "int4 block 128 hadamard"),
    "8 x int8 -> int4": ("int8 block 128", "int4 block 128"),
    "8 x int8 -> int8": ("int8 block 128", "int8 block 128"),
    "8 x int4 hadamard -> fp32": ("int4 block 128 hadamard", None),
    "8 x int8 -> fp32": ("int8 block 128", None),
}


def made(name: str):
    element, options = FORMATS[name]
    return make_format(element, **options)


def relative_error(values: torch.Tensor, decoded: torch.Tensor) -> float:
    """Root of the mean squared error over the root mean square."""
    return ((values.float() - decoded.float()).norm() / values.float().norm()).item()


def naive_quantize(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for the whole tensor, in plain torch."""
    largest = 2 ** (bits - 1) - 1
    scale = values.abs().max().float() / largest
    codes = (values.float() / scale).round().clamp(-largest, largest).to(torch.int8)
    if bits == 4:
        codes = (codes[0::2] & 0xF) | (codes[1::2] << 4)
    return codes, scale


def naive_dequantize(codes: torch.Tensor, scale: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    if bits == 4:
        codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=-1).view(-1)
    return (codes.float() * scale).to(dtype)


def an_update(elements: int, rate: float, device: torch.device) -> torch.Tensor:
    """bf16 [2, elements]: weights before and after a step of their fp32 masters."""
    both = torch.empty(2, elements, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for piece in both.split(1 << 26, dim=1):
        masters, updates = torch.randn(2, piece.shape[1], generator=generator, device=device)
        piece[0] = 0.02 * masters
        piece[1] = 0.02 * masters + rate * updates
    return both


def measure(elements: int, device: torch.device, repeats: int, only: list[str]) -> list[dict]:
    """Rows of results: of a copy, and of operations whose names hold one of `only`."""
    values = torch.empty(elements, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for piece in values.split(1 << 26):  # heavy-tailed, like gradients: normal / sqrt(chi-squared / 4)
        normal = torch.randn(5, piece.numel(), generator=generator, device=device)
        piece.copy_(normal[0] / (normal[1:].square().sum(0) / 4).sqrt())
    decoded = torch.empty_like(values)
    rows = []

    def add(operation: str, name: str, work: Callable[[], None], num_bytes: float, error=None, **more) -> None:
        if rows and not any(wanted in operation for wanted in only):
            return
        ms = milliseconds(work, device, repeats)
        rows.append({"operation": operation, "format": name, "us": 1e3 * ms, "gb_per_s": num_bytes / ms / 1e6, **more})
        copy = rows[0]["gb_per_s"]
        rows[-1]["share_of_copy"] = rows[-1]["gb_per_s"] / copy
        if error is not None:
            rows[-1]["relative_error"] = error()
        print(line(rows[-1]), flush=True)

    add("copy", "bf16", lambda: decoded.copy_(values), 4 * elements)
    whole = SliceOrder([0], device)
    for name in FORMATS:
        wire_format = made(name)
        layout = PayloadLayout([elements], [wire_format], [values.dtype], device)
        payload = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=device)
        moved = 2 * elements + layout.row_bytes
        add("quantize", name, lambda: layout.encode([values], whole, payload), moved)  # noqa: B023
        error = partial(relative_error, values, decoded)
        add("dequantize", name, lambda: layout.decode(payload, whole, [decoded]), moved, error)  # noqa: B023
    # the slices of a 2 x 2 reduction, reordered on the way
    reorder = SliceOrder([0, 2, 1, 3], device)
    layout = PayloadLayout([elements // 4], [made("int8 block 128")], [values.dtype], device)
    payload = torch.empty(4, layout.row_bytes, dtype=torch.uint8, device=device)
    moved = 2 * elements + 4 * layout.row_bytes
    add("reorder+quantize", "int8 block 128", lambda: layout.encode([values], reorder, payload), moved)
    # error feedback in one exchange between 4 ranks
    quarters, kept = SliceOrder(range(4), device), ErrorFeedback().of(["values"], [elements // 4], 4, device)
    for by, use_kernels in BY:
        layout = PayloadLayout([elements // 4], [made(FED_BACK)], [values.dtype], device, use_kernels=use_kernels)
        payload = torch.empty(4, layout.row_bytes, dtype=torch.uint8, device=device)
        moved = values.nbytes + payload.nbytes + 2 * kept.rows.nbytes
        work = partial(layout.encode, [values], quarters, payload, residuals=kept)
        add("quantize+feedback", f"{FED_BACK}{by}", work, moved)
    # how weights differ from what 2 ranks hold of them: what one sends of its half, and what each does with both
    half, bf16 = elements // 2, make_format("none", dtype=values.dtype)
    coder = Rows([bf16], [half], device)
    for rate in LEARNING_RATES:
        before, after = an_update(half, rate, device)
        brought = []  # back and there: what a difference is added to must be what it was made from
        for old, new in ((after, before), (before, after)):
            row, held = (bf16.encode_rows(each.unsqueeze(0)) for each in (new, old))
            measured = coder.measure(row, held)
            sent = torch.empty(1, int(measured.row_bytes), dtype=torch.uint8, device=device)
            coder.encode(row, held, measured, sent)
            brought.insert(0, sent.repeat(2, 1))
        name, bits = f"bf16, lr {rate:g}", 8 * sent.nbytes / max(1, half)
        moved = row.nbytes + held.nbytes + measured.headers.nbytes
        add("measure difference", name, partial(coder.measure, row, held), moved, bits=bits)
        work = partial(coder.encode, row, held, measured, sent)
        add("encode difference", name, work, moved + sent.nbytes, bits=bits)
        in_turn, of_both = itertools.cycle(brought), held.repeat(2, 1)
        moved = 2 * sent.nbytes + 2 * of_both.nbytes
        add("add difference", name, lambda: coder.add(next(in_turn), of_both), moved, bits=bits)  # noqa: B023

    part = elements // RANKS
    for name, (first, then) in REDUCTIONS.items():
        formats = made(first), made(then or first)
        layout = PayloadLayout([part], [formats[0]], [values.dtype], device, [formats[1]])
        next_layout = PayloadLayout([part], [formats[1]], [values.dtype], device, [formats[0]])
        received = torch.empty(RANKS, 1, layout.row_bytes, dtype=torch.uint8, device=device)
        for rank in range(RANKS):
            layout.encode([values[rank * part : (rank + 1) * part]], whole, received[rank])
        if then:
            payload = torch.empty(1, next_layout.row_bytes, dtype=torch.uint8, device=device)
            add(
                "sum",
                name,
                lambda: layout.reduce_to_payload(received, next_layout, payload),  # noqa: B023
                received.numel() + payload.numel(),
            )
        else:
            result = torch.empty(part, dtype=torch.float32, device=device)
            add(
                "sum",
                name,
                lambda: layout.reduce_to_tensors(received.squeeze(1), [result]),  # noqa: B023
                received.numel() + 4 * part,
            )
    for bits in (8, 4):
        codes, scale = naive_quantize(values, bits)
        moved, name = (2 + bits / 8) * elements, f"naive int{bits}, one scale"
        add("quantize", name, lambda: naive_quantize(values, bits), moved)  # noqa: B023
        work = partial(naive_dequantize, codes, scale, bits, values.dtype)
        add("dequantize", name, work, moved, lambda: relative_error(values, work()))  # noqa: B023
    return rows


def line(row: dict) -> str:
    more = f"   error {row['relative_error']:.4f}" if "relative_error" in row else ""
    more += f"   {row['bits']:.3f} bits" if "bits" in row else ""
    return (
        f"{row['operation']:<20}{row['format']:<36}{row['us']:>11.1f} us{row['gb_per_s']:>9.1f} GB/s"
        f"{100 * row['share_of_copy']:>7.1f} % of copy{more}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--elements", type=whole(1), default=1 << 28 if on_gpu else 1 << 24)
    parser.add_argument("--repeats", type=whole(1), default=30 if on_gpu else 3)
    parser.add_argument("--only", default="", help="parts of operations' names, with commas (default: all)")
    parser.add_argument("--out", type=new_file, default="runs/kernels.json")
    args = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    result = describe("kernels")
    result["elements"] = args.elements
    result["rows"] = measure(args.elements, device, args.repeats, args.only.split(","))
    write_result(args.out, result | {"finished": True})


if __name__ == "__main__":
    main()
