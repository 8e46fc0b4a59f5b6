"""Speed of a training step of an 8B-shaped Llama stack with FP8 linear layers against bf16.

    python -m benchmarks.fp8_stack --runs bf16,current --modes eager,compile --profile 25 --out runs/fp8_stack.json
    python -m benchmarks.fp8_stack --part blocks --size 1.3b --layers 8 --model transformers --batch 4 --sequence 2048

One GPU; on a CPU a small stack, which shows that it runs and nothing else. The runs are those of harness/compute.py.

Forward, backward and torch's fused AdamW (weights, gradients and moments in bf16); embedding, lm_head and attention
stay in bf16. "--part blocks": forward and backward of the layers alone. "compile" compiles each transformer layer, in
which this project's casts and GEMMs stay kernels of their own.

"passes" is the device time of what neither multiplies nor attends: casts, norms, activations, sums. "host" is how long
Python takes to issue a step, "busy" how long the device computed in a step under the profiler, both as a share of the
step's time without it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from benchmarks.harness import profiling
from benchmarks.harness.compute import BF16, RUNS, TORCHAO, choose, converted, head_of
from benchmarks.harness.hf_llama import llama_config
from benchmarks.harness.llama import Llama, rotary_tables
from benchmarks.harness.measuring import host_ms, synchronize
from benchmarks.harness.results import write_result
from benchmarks.harness.sizes import SIZES
from examples.options import new_file, whole

# Times bf16 in the same mode.
TARGET, STRETCH = 1.25, 1.35
IN_STACK = (BF16, "current", "delayed", "per_channel", "block", TORCHAO + "tensorwise", TORCHAO + "rowwise")


class Trainer:
    """A stack and its optimizer."""

    def __init__(self, run: str, mode: str, args, device: torch.device) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model, forward = made_model(args)
        self.model.to(torch.bfloat16)
        self.model, self.report = converted(self.model, run)
        if mode == "compile":
            torch._dynamo.reset()
            for layer in forward.layers:
                layer.compile(dynamic=False)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=on_gpu)
        generator = torch.Generator().manual_seed(1)
        vocabulary = args.size.vocabulary
        self._batches = [
            torch.randint(vocabulary, (args.batch, args.sequence), generator=generator).to(device) for _ in range(4)
        ]
        self._from_transformers = args.model == "transformers"
        self._steps = 0
        if args.part == "blocks":
            self._layers = forward.layers
            shape = (args.batch, args.sequence, args.size.hidden)
            self._input, self._grad = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
            head_size = args.size.hidden // args.size.heads
            self._tables = rotary_tables(args.sequence, head_size, device, torch.bfloat16)
            self.step = self._step_of_blocks

    def step(self) -> None:
        """One training step."""
        tokens = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        loss = self.model(input_ids=tokens, labels=tokens).loss if self._from_transformers else self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.report is not None:
            self.report.scaling.end_step()
        self.loss = loss.detach()

    def _step_of_blocks(self) -> None:
        """Forward and backward of the layers."""
        x = self._input.detach().requires_grad_()
        tables = tuple(table[None] for table in self._tables) if self._from_transformers else self._tables
        for layer in self._layers:
            x = layer(x, position_embeddings=tables) if self._from_transformers else layer(x, tables)
        x.backward(self._grad)
        self.optimizer.zero_grad()
        if self.report is not None:
            self.report.scaling.end_step()
        self.loss = x.detach().float().square().mean()


def made_model(args) -> tuple[nn.Module, nn.Module]:
    """(a Llama of the size asked for, the module of it that has `layers`)."""
    if args.model == "plain":
        model = Llama(args.size)
        return model, model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(llama_config(args.size), attn_implementation="sdpa")
    return model, model.model


def measure(run: str, mode: str, args, device: torch.device) -> dict:
    """The row of one run."""
    row = {"run": run, "mode": mode, "batch": args.batch, "sequence": args.sequence, "layers": args.size.layers}
    row |= {"part": args.part, "model": args.model}
    on_gpu = device.type == "cuda"
    trainer = None
    try:
        trainer = Trainer(run, mode, args, device)
        row["parameters"] = sum(parameter.numel() for parameter in trainer.model.parameters())
        for _ in range(args.warmup):
            trainer.step()
        synchronize(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        row["step_ms"] = steps_ms(trainer.step, device, args.steps)
        row["host_ms"] = host_ms(trainer.step, device)
        row["tokens_per_s"] = 1e3 * args.batch * args.sequence / row["step_ms"]
        row["loss"] = trainer.loss.item()
        if on_gpu:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["device"] = profiling.device_profile(trainer.step, args.profile)
            row["busy_share"] = row["device"]["computing_ms"] / row["step_ms"]
            by_kind = row["device"]["by_kind_ms"]
            row["passes_ms"] = sum(ms for kind, ms in by_kind.items() if kind not in ("GEMM", "attention"))
        if args.profile:
            # backward, too, which else runs in a thread of its own
            with torch.autograd.set_multithreading_enabled(False):
                row["host"] = profiling.host_profile(trainer.step, args.profile)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    del trainer
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return row


def steps_ms(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Median time of a step, of steps issued one after the other without waiting for the device."""
    if device.type != "cuda":
        return host_ms(step, device, steps)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in itertools.pairwise(events))


def add_ratios(rows: list[dict]) -> None:
    """Speed against bf16 in the same mode, and against bf16 in eager mode."""
    bf16 = {row["mode"]: row["step_ms"] for row in rows if row["run"] == BF16 and "step_ms" in row}
    for row in rows:
        if "step_ms" not in row:
            continue
        for key, mode in (("times_bf16", row["mode"]), ("times_bf16_eager", "eager")):
            if mode in bf16:
                row[key] = bf16[mode] / row["step_ms"]


def show(rows: list[dict], args) -> None:
    """Print the table, and the profiles asked for."""
    size = args.size
    parameters = next((row["parameters"] for row in rows if "parameters" in row), 0)
    print(
        f"\n{'Training step' if args.part == 'step' else 'Forward and backward'}, "
        f"{size.layers} layers of hidden {size.hidden} and intermediate {size.intermediate}, "
        f"{parameters / 1e9:.2f} B parameters, {args.batch} x {args.sequence} tokens, {args.model} model; "
        f"target {TARGET:g} x bf16 in the same mode, stretch {STRETCH:g}"
    )
    print(
        f"{'run':<22}{'mode':<9}{'ms':>8}{'tokens/s':>10}{'x bf16':>8}{'x eager':>9}{'GiB':>7}{'host':>7}{'busy':>7}"
        f"{'launches':>10}{'passes':>8}"
        "   device ms by kind"
    )
    for row in rows:
        if "error" in row:
            print(f"{row['run']:<22}{row['mode']:<9}FAILED: {row['error'][:200]}")
            continue
        nan = float("nan")
        kinds = row.get("device", {}).get("by_kind_ms", {})
        print(
            f"{row['run']:<22}{row['mode']:<9}{row['step_ms']:>8.2f}{row['tokens_per_s']:>10.0f}"
            f"{row.get('times_bf16', nan):>8.3f}{row.get('times_bf16_eager', nan):>9.3f}"
            f"{row.get('peak_gib', nan):>7.1f}"
            f"{100 * row['host_ms'] / row['step_ms']:>6.0f}%{100 * row.get('busy_share', nan):>6.0f}%"
            f"{row.get('device', {}).get('launches', nan):>10}{row.get('passes_ms', nan):>8.2f}   "
            + ", ".join(f"{kind} {ms:.1f}" for kind, ms in kinds.items())
        )
    for row in rows:
        for title, entries in (
            ("kernels", row.get("device", {}).get("kernels")),
            ("CUDA calls of the host", row.get("device", {}).get("cuda_calls")),
            ("Python functions by their own time, under cProfile", row.get("host", {}).get("functions")),
        ):
            if entries:
                print(f"\n{row['run']} {row['mode']}: {title} of one step")
                profiling.show_top(entries)
    sys.stdout.flush()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", help=f"some of {','.join(RUNS)} (default: {','.join(IN_STACK)})")
    parser.add_argument("--modes", default="eager,compile" if on_gpu else "eager", help="eager, compile or both")
    parser.add_argument("--size", choices=SIZES, default="8b-stack" if on_gpu else "tiny-gqa")
    parser.add_argument("--model", choices=("plain", "transformers"), default="plain")
    parser.add_argument("--part", choices=("step", "blocks"), default="step", help="blocks: the layers alone")
    parser.add_argument("--layers", type=whole(1), help="default: those of the size")
    parser.add_argument("--batch", type=whole(1), default=1, help="sequences in a step")
    parser.add_argument("--sequence", type=whole(1), default=8192 if on_gpu else 128, help="tokens in a sequence")
    parser.add_argument("--warmup", type=whole(0), default=4 if on_gpu else 1, help="steps before timing")
    parser.add_argument("--steps", type=whole(1), default=15 if on_gpu else 2, help="timed steps")
    parser.add_argument("--profile", type=whole(0), default=0, metavar="N", help="print N kernels and Python functions")
    parser.add_argument("--out", type=new_file, default="runs/fp8_stack.json", help="JSON file")
    args = parser.parse_args(argv)
    args.size = SIZES[args.size]
    if args.layers:
        args.size = replace(args.size, layers=args.layers)
    args.runs = args.runs or ",".join(IN_STACK)
    choose(args, parser)
    return args


def main() -> None:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    result = head_of("fp8_stack", device) | {"finished": False, "stack": []}
    for mode in args.modes:
        for run in args.runs:
            result["stack"].append(measure(run, mode, args, device))
            add_ratios(result["stack"])
            write_result(args.out, result)
            last = result["stack"][-1]
            print(f"{run} {mode}: {last.get('error') or round(last['step_ms'], 1)} ms per step", flush=True)
    show(result["stack"], args)
    write_result(args.out, result | {"finished": True})
    failed = [row["run"] for row in result["stack"] if "error" in row]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
