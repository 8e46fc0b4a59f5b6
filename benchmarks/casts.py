"""Time of the casts of a matrix to FP8 operands, plain and transposed, beside a plain copy and torch code.

    python -m benchmarks.casts --out casts.json
    python -m benchmarks.casts --sweep              # which tiles and warps suit this GPU

On a GPU the Triton kernels, checked byte for byte against the torch code on the same matrix before they are timed; on a
CPU the torch code. A line says: microseconds, GB/s (bytes read and written, counting a matrix as often as it has to be
read), and that bandwidth as a share of a copy's, measured in the same run on the same matrix. "torch" is the same cast
in torch operations, without a compiler.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.harness.environment import describe
from benchmarks.harness.measuring import milliseconds
from benchmarks.harness.results import write_result
from examples.options import new_file, several, whole
from zeropp_fp8.compute import casts
from zeropp_fp8.compute.operand import Float8Operand

SHAPES = ("8192x4096", "8192x14336", "14336x4096")
COPIES = {"plain": (True, False), "transposed": (False, True), "both": (True, True)}
FLOAT8 = torch.float8_e4m3fn
EPS = 1e-5


class Matrix:
    """A matrix, what its casts need, and the casts.

    A cast takes (plain, transposed, use_kernels); beside it stands how often it reads the matrix: for scaling per row,
    the plain copy alone takes one pass.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        generator = torch.Generator(device=device).manual_seed(0)
        self.values = torch.randn(rows, columns, generator=generator, device=device).bfloat16()
        self.up = torch.randn(rows, columns, generator=generator, device=device).bfloat16()
        self.weight = torch.ones(columns, dtype=torch.bfloat16, device=device)
        self.scale = casts.scale_of_amax(casts.amax_of(self.values), FLOAT8)
        self.amax = torch.zeros(1, device=device)

    def casts(self) -> dict[str, tuple[Callable, Callable[[bool], int]]]:
        x, scale, amax = self.values, self.scale, self.amax

        def delayed(*flags):
            return casts.cast_per_tensor(x, FLOAT8, scale, amax, *flags)

        def current(*flags):
            return casts.cast_per_tensor(x, FLOAT8, None, None, *flags)

        return {
            "tensor, delayed": (delayed, lambda transposed: 1),
            "tensor, current": (current, lambda transposed: 2),
            "row": (lambda *flags: casts.cast_per_row(x, FLOAT8, *flags), lambda transposed: 1 + transposed),
            "block": (lambda *flags: casts.cast_blocks(x, FLOAT8, *flags), lambda transposed: 1),
            "tile": (lambda *flags: casts.cast_tiles(x, FLOAT8, *flags), lambda transposed: 1),
        }

    def fused(self) -> dict[str, tuple[Callable, Callable, int]]:
        """Per name: the fused cast, the same in two steps (torch's activation, then a cast), matrices it reads."""
        x, up, weight, wanted = self.values, self.up, self.weight, (FLOAT8, self.scale, self.amax, True, True)

        def cast(values):
            return casts.cast_per_tensor(values, *wanted)

        return {
            "swiglu": (
                lambda: casts.swiglu(x, up, *wanted),
                lambda: cast(F.silu(x) * up),
                2,
            ),
            "rms norm": (
                lambda: casts.rms_norm(x, weight, casts.inverse_rms(x, EPS), *wanted),
                lambda: cast(F.rms_norm(x, x.shape[1:], weight, EPS)),
                2,
            ),
        }


def written(operands: tuple[Float8Operand | None, ...]) -> int:
    """Bytes of codes and scales."""
    made = [operand for operand in operands if isinstance(operand, Float8Operand)]
    return sum(operand.codes.numel() + 4 * operand.scale.numel() for operand in made)


def same(operands: tuple[Float8Operand | None, ...], expected: tuple[Float8Operand | None, ...]) -> bool:
    """Whether all codes and scales are equal."""
    return all(
        (a is None and b is None)
        or (torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and torch.equal(a.scale, b.scale))
        for a, b in zip(operands, expected)
    )


def measure(shapes: list[tuple[int, int]], device: torch.device, repeats: int) -> list[dict]:
    """Rows of results."""
    rows = []

    def add(shape: str, cast: str, copies: str, work: Callable[[], object], num_bytes: float) -> None:
        ms = milliseconds(work, device, repeats)
        row = {"shape": shape, "cast": cast, "copies": copies, "us": 1e3 * ms, "gb_per_s": num_bytes / ms / 1e6}
        rows.append(row)
        copy = next(r["gb_per_s"] for r in rows if r["cast"] == "copy" and r["shape"] == shape)
        row["share_of_copy"] = row["gb_per_s"] / copy
        print(line(row), flush=True)

    for height, width in shapes:
        shape = f"{height}x{width}"
        matrix = Matrix(height, width, device)
        copied = torch.empty_like(matrix.values)
        size = matrix.values.nbytes
        add(shape, "copy", "bf16", lambda: copied.copy_(matrix.values), 2 * size)  # noqa: B023
        for name, (cast, passes) in matrix.casts().items():
            for copies, (plain, transposed) in COPIES.items():
                operands = cast(plain, transposed, None)
                if device.type == "cuda" and not same(operands, cast(plain, transposed, False)):
                    raise SystemExit(f"{shape} {name} {copies}: the kernels' bytes differ from the torch code's")
                moved = passes(transposed) * size + written(operands)
                add(shape, name, copies, lambda: cast(plain, transposed, None), moved)  # noqa: B023
            if device.type == "cuda":
                add(shape, f"{name}, torch", "both", lambda: cast(True, True, False), moved)  # noqa: B023
        for name, (fused, in_two_steps, reads) in matrix.fused().items():
            moved = (reads + 1) * size + written(fused())  # the result is written in 16 bits, too
            add(shape, name, "both", fused, moved)
            add(shape, f"{name}, two steps", "both", in_two_steps, moved)
    return rows


def line(row: dict) -> str:
    return (
        f"{row['shape']:<14}{row['cast']:<24}{row['copies']:<12}{row['us']:>10.1f} us{row['gb_per_s']:>9.1f} GB/s"
        f"{100 * row['share_of_copy']:>7.1f} % of copy"
    )


def launches() -> Iterator[tuple[str, str, object, str, object]]:
    """(cast, description, module, name of its Launch, Launch) of all that are worth trying."""
    from zeropp_fp8.kernels.casts import cast_blocks, cast_rows, cast_tensor, fused_casts
    from zeropp_fp8.kernels.casts.matrices import BLOCK, Launch

    tiles = [(128, 64, 4), (128, 64, 8), (64, 64, 2), (64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 128, 8)]
    tiles += [(128, 128, 16), (128, 32, 4), (32, 128, 4), (256, 64, 8), (256, 32, 8)]
    for (tall, wide, warps), registers in itertools.product(tiles, (None, 64, 128)):
        what = f"{tall}x{wide}, {warps} warps, {registers} registers"
        launch = Launch(tall, wide, warps, registers)
        yield "tensor, delayed", what, cast_tensor, "CAST", launch
        yield "row", what, cast_rows, "CAST", launch
        yield "swiglu", what, fused_casts, "SWIGLU", launch
        yield "rms norm", what, fused_casts, "RMS_NORM", launch
    for warps, registers in itertools.product((4, 8, 16), (None, 40, 64, 80, 128)):
        what = f"{warps} warps, {registers} registers"
        for name in ("block", "tile"):
            yield name, what, cast_blocks, "CAST", Launch(BLOCK, BLOCK, warps, registers)


def sweep(shape: tuple[int, int], device: torch.device, repeats: int) -> list[dict]:
    """Time of each cast in both copies with each way to launch it, the fastest first."""
    matrix = Matrix(*shape, device)
    work = {name: (lambda cast=cast: cast(True, True, None)) for name, (cast, _) in matrix.casts().items()}
    work |= {name: fused for name, (fused, *_) in matrix.fused().items()}
    rows = []
    for name, what, module, attribute, launch in launches():
        usual = getattr(module, attribute)
        setattr(module, attribute, launch)
        try:
            rows.append({"cast": name, "launch": what, "us": 1e3 * milliseconds(work[name], device, repeats)})
            rows[-1]["usual"] = launch == usual
        except RuntimeError as error:  # too many registers or too much shared memory for the device
            print(f"{name}: {what}: {type(error).__name__}")
        finally:
            setattr(module, attribute, usual)
    rows.sort(key=lambda row: (row["cast"], row["us"]))
    for row in rows:
        print(f"{row['cast']:<18}{row['launch']:<40}{row['us']:>10.1f} us{'  (the usual one)' if row['usual'] else ''}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=several(whole(1), "x"),
        default=SHAPES if on_gpu else ("512x256",),
        help="ROWSxCOLUMNS",
    )
    parser.add_argument("--repeats", type=whole(1), default=30 if on_gpu else 3)
    parser.add_argument("--sweep", action="store_true", help="instead, try tiles and warps on the first shape")
    parser.add_argument("--out", type=new_file, default="runs/casts.json")
    args = parser.parse_args()
    shapes = [tuple(int(side) for side in shape.split("x")) for shape in args.shapes]
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
        if args.sweep:
            raise SystemExit("--sweep needs a GPU")
    result = describe("casts")
    result["rows"] = sweep(shapes[0], device, args.repeats) if args.sweep else measure(shapes, device, args.repeats)
    write_result(args.out, result | {"finished": True})


if __name__ == "__main__":
    main()
