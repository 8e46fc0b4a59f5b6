"""Decoding the frozen weights of one Llama block in one launch, beside a plain copy: what every gather ends with.

python -m benchmarks.dequantize --out runs/dequantize.json
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.command import choose_runs, command
from benchmarks.harness.environment import describe
from benchmarks.harness.lora import stored
from benchmarks.harness.measuring import milliseconds
from benchmarks.harness.results import append_to, begin_result, end_result, read_result
from benchmarks.harness.sizes import SIZES, Size
from examples.options import whole
from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.config import FrozenConfig
from zeropp_fp8.zero.frozen.store import part_numel_of, store_format

FORMATS = {
    "int8": stored("int8"),
    "int4": stored("int4"),
    "int4-dq": stored("int4", double_quantize=True),
    "nf4": stored("nf4"),
    "nf4-dq": stored("nf4", double_quantize=True),
}
COPY, BNB = "copy", "bnb nf4-dq"
TARGET_PERCENT = 80.0  # of a copy's bandwidth


def block_shapes(size: Size) -> list[tuple[int, int]]:
    """[outputs, inputs] of the seven weights."""
    kv = size.hidden // size.heads * size.kv_heads
    attention = [(size.hidden, size.hidden), (kv, size.hidden), (kv, size.hidden), (size.hidden, size.hidden)]
    return attention + [(size.intermediate, size.hidden)] * 2 + [(size.hidden, size.intermediate)]


def measure(size: Size, args, device: torch.device, write: Callable[[dict], None]) -> None:
    """Time each format as a row of `args.parts` ranks' payloads; `write` gets a row each, of bytes read and written."""
    shapes = block_shapes(size)
    generator = torch.Generator(device).manual_seed(0)
    weights = [torch.randn(shape, generator=generator, device=device).mul_(0.02).bfloat16() for shape in shapes]
    decoded = [torch.empty_like(weight) for weight in weights]
    numel = sum(weight.numel() for weight in weights)
    base = {"parameters": numel, "device": device.type}
    write({**base, **_copied(weights, device, args.repeats)})
    for name in args.runs:
        section = FORMATS[name]
        wire_format = store_format(FrozenConfig(**section["frozen"]))
        part_numels = [part_numel_of(w.numel(), args.parts, wire_format.granule) for w in weights]
        layout = PayloadLayout(part_numels, [wire_format] * len(weights), [w.dtype for w in weights], device)
        payload = torch.zeros(args.parts, layout.row_bytes, dtype=torch.uint8, device=device)
        for weight, part, offset, size in zip(weights, part_numels, layout.offsets, layout.sizes):
            for rank in range(args.parts):
                wire_format.encode_part(weight.view(-1), rank * part, part, payload[rank, offset : offset + size])
        order = SliceOrder(range(args.parts), device)
        ms = milliseconds(lambda: layout.decode(payload, order, decoded), device, args.repeats)  # noqa: B023
        moved = payload.numel() + 2 * numel
        row = {
            "run": name,
            "us": 1e3 * ms,
            "gb_per_s": moved / ms / 1e6,
            "bytes_per_parameter": payload.numel() / numel,
        }
        write({**base, **row, "relative_error": relative_error(weights, decoded)})
    if importlib.util.find_spec("bitsandbytes") is None:
        print(f"{BNB} is left out: bitsandbytes is not installed", flush=True)
    else:
        write({**base, **_with_bnb(weights, device, args.repeats)})


def _copied(weights: list[Tensor], device: torch.device, repeats: int) -> dict:
    """The row of a copy of so many bf16 numbers, in one piece."""
    flat = torch.cat([weight.view(-1) for weight in weights])
    target = torch.empty_like(flat)
    ms = milliseconds(lambda: target.copy_(flat), device, repeats)
    return {"run": COPY, "us": 1e3 * ms, "gb_per_s": 2 * flat.nbytes / ms / 1e6}


def relative_error(weights: list[Tensor], decoded: list[Tensor]) -> float:
    """Root of the mean squared error over the root mean square."""
    error = sum((w.float() - d.float()).square().sum().item() for w, d in zip(weights, decoded))
    return (error / sum(w.float().square().sum().item() for w in weights)) ** 0.5


def _with_bnb(weights: list[Tensor], device: torch.device, repeats: int) -> dict:
    """The row of bitsandbytes' own decoding, weight by weight."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    made = [quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=True) for w in weights]

    def decode() -> list[Tensor]:
        return [dequantize_4bit(codes, state) for codes, state in made]

    ms = milliseconds(decode, device, repeats)
    numel = sum(w.numel() for w in weights)
    states = [t for _, s in made for t in (s.absmax, s.state2.absmax)]
    held = sum(t.nbytes for t in (*(codes for codes, _ in made), *states))
    row = {"run": BNB, "us": 1e3 * ms, "gb_per_s": (held + 2 * numel) / ms / 1e6, "bytes_per_parameter": held / numel}
    return {**row, "relative_error": relative_error(weights, decode())}


def compare(rows: list[dict]) -> list[dict]:
    """A line a format: its bandwidth as a share of the copy's."""
    copy = next((row["gb_per_s"] for row in rows if row["run"] == COPY), None)
    lines = []
    for row in rows:
        line = {"run": row["run"], "percent_of_copy": None if copy is None else 100 * row["gb_per_s"] / copy}
        if row["run"] in FORMATS and copy is not None and row["device"] == "cuda":  # what has kernels
            line["met"] = line["percent_of_copy"] >= TARGET_PERCENT
        lines.append(line)
    return lines


def show(result: dict) -> None:
    """Print the table."""
    numel = result["rows"][0]["parameters"]
    print(
        f"\nDecoding {numel / 1e6:.1f} M weights of a block to bf16, {result['settings']['parts']} parts each. Target: "
        f"at least {TARGET_PERCENT:g} % of a copy's bandwidth"
    )
    print(f"{'':<14}{'us':>10}{'GB/s':>9}{'of copy':>10}{'bytes a weight':>16}{'error':>9}")
    for row, line in zip(result["rows"], result["comparison"]):
        verdict = {True: "met", False: "MISSED", None: ""}[line.get("met")]
        more = f"{row['bytes_per_parameter']:>16.4f}{row['relative_error']:>9.4f}" if "relative_error" in row else ""
        share = "-" if line["percent_of_copy"] is None else f"{line['percent_of_copy']:.1f} %"
        print(f"{row['run']:<14}{row['us']:>10.1f}{row['gb_per_s']:>9.1f}{share:>10}{more:<25}{verdict:>9}")


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "dequantize", FORMATS, SIZES, "8b" if on_gpu else "tiny-gqa")
    parser.add_argument("--parts", type=whole(1), default=4, help="ranks that a decoded payload comes from")
    parser.add_argument("--repeats", type=whole(1), default=30 if on_gpu else 3)
    args = parser.parse_args()
    choose_runs(args, parser, FORMATS)
    begin_result(args.out, describe("dequantize") | {"settings": {"size": args.size, "parts": args.parts}})

    def write(row: dict) -> None:
        append_to(args.out, "rows", row)
        print(f"{row['run']}: {row['us']:.1f} us", flush=True)

    measure(SIZES[args.size], args, torch.device("cuda" if on_gpu else "cpu"), write)
    show(end_result(args.out, comparison=compare(read_result(args.out)["rows"])))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
