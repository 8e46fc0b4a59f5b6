"""Speed of packed experts in FP8 against those of transformers in bf16, forward and backward.

    python -m benchmarks.fp8_experts --out runs/fp8_experts.json

One GPU; on a CPU small experts, which shows that it runs and nothing else. A Qwen3-MoE layer's experts, without router:
each token goes to as many experts as it would, drawn evenly. bf16 is transformers' "grouped_mm"; the others are this
project's scalings. Times are medians of CUDA events; runs take turns, so that all see the same clocks. FLOPs are those
of the tokens' products, without what pads groups.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness.command import choose_runs
from benchmarks.harness.compute import BF16, OURS, head_of
from benchmarks.harness.hf_llama import mixture_config
from benchmarks.harness.measuring import host_ms, interleaved_ms
from benchmarks.harness.results import write_result
from benchmarks.harness.sizes import MIXTURES
from examples.options import new_file, several, whole
from zeropp_fp8.compute import convert_linear_layers
from zeropp_fp8.compute.grouped import has_grouped_gemm

RUNS = (BF16, "current", "delayed", "per_channel")
TARGET = 1.3  # times bf16, where experts are bound by computing


def work_of(run: str, size: str, tokens: int, device: torch.device) -> Callable[[], None]:
    """Forward and backward of a layer's experts."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = MIXTURES[size]
    config = mixture_config(sizes)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with device:
        experts = Qwen3MoeExperts(config).bfloat16()
        for weight in experts.parameters():
            nn.init.normal_(weight, std=config.initializer_range)
        hidden, grad = (torch.randn(tokens, sizes.hidden, dtype=torch.bfloat16) for _ in range(2))
        index = torch.rand(tokens, sizes.experts).argsort(dim=1)[:, : sizes.chosen].contiguous()
        weights = torch.full((tokens, sizes.chosen), 1 / sizes.chosen, dtype=torch.bfloat16)
    report = None if run == BF16 else convert_linear_layers(experts, OURS[run])
    if report is not None and not report.converted:
        raise RuntimeError(f"{run}: {report}")
    inputs = (hidden.requires_grad_(), *experts.parameters())

    def work() -> None:
        torch.autograd.grad(experts(hidden, index, weights), inputs, grad)

    work()
    if report is not None:
        report.scaling.end_step()  # from here on delayed scales are known
    return work


def measure(size: str, tokens: int, args, device: torch.device) -> list[dict]:
    """A row for each run."""
    sizes = MIXTURES[size]
    works = {run: work_of(run, size, tokens, device) for run in args.runs}
    flop = 6 * tokens * sizes.chosen * 3 * sizes.hidden * sizes.intermediate
    took = interleaved_ms(works, device, args.rounds, args.repeats)
    rows = []
    for run, ms in took.items():
        row = {"size": size, "tokens": tokens, "run": run, "ms": ms, "tflop_per_s": flop / ms / 1e9}
        rows.append(row | {"host_ms": host_ms(works[run], device)})
        if BF16 in took:
            rows[-1]["times_bf16"] = took[BF16] / ms
    return rows


def show(rows: list[dict]) -> None:
    """Print the rows of one size and number of tokens."""
    size = MIXTURES[rows[0]["size"]]
    print(f"\n{size.experts} experts of {size.intermediate}, {rows[0]['tokens']} tokens to {size.chosen} of them each")
    print(f"{'run':<16}{'ms':>9}{'TFLOP/s':>10}{'x bf16':>8}{'host ms':>9}")
    for row in rows:
        times = row.get("times_bf16", float("nan"))
        print(f"{row['run']:<16}{row['ms']:>9.3f}{row['tflop_per_s']:>10.4g}{times:>8.2f}{row['host_ms']:>9.2f}")
    sys.stdout.flush()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", help=f"some of {','.join(RUNS)} (default: all)")
    parser.add_argument("--size", choices=MIXTURES, default="30b-a3b" if on_gpu else "tiny-moe")
    parser.add_argument(
        "--tokens", type=several(whole(1)), default="2048,16384,65536" if on_gpu else "64", help="default %(default)s"
    )
    parser.add_argument("--rounds", type=whole(1), default=6 if on_gpu else 1, help="in which the runs take turns")
    parser.add_argument("--repeats", type=whole(1), default=4 if on_gpu else 2, help="of a run in a round")
    parser.add_argument("--out", type=new_file, default="runs/fp8_experts.json", help="JSON file")
    args = parser.parse_args(argv)
    choose_runs(args, parser, RUNS)
    args.tokens = [int(count) for count in args.tokens.split(",")]
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = head_of("fp8_experts", device) | {"grouped_gemm": has_grouped_gemm(device)}
    result = head | {"finished": False, "target": TARGET, "model": vars(MIXTURES[args.size]), "rows": []}
    for tokens in args.tokens:
        rows = measure(args.size, tokens, args, device)
        show(rows)
        result["rows"] += rows
        write_result(args.out, result)
    write_result(args.out, result | {"finished": True})


if __name__ == "__main__":
    main()
