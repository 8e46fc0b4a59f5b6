"""Speed of FP8 linear layers against bf16: one layer, what bounds it, and a training step of an 8B-shaped Llama stack.

    python benchmarks/fp8_linear.py --out fp8_linear.json
    python benchmarks/fp8_linear.py --part stack --runs bf16,current --modes eager,compile --profile 25

One GPU; on a CPU a small layer and a small stack, which shows that it runs and nothing else. Runs:

    bf16                           nn.Linear
    current, delayed, per_channel, block       this project's scalings, E4M3 throughout
    current-hybrid, delayed-hybrid             the same with gradients in E5M2
    mxfp8                          emulated on Hopper, which has no MX GEMM: for information, it cannot be faster
    torchao-tensorwise, -rowwise   torchao.float8.convert_to_float8_training, where torchao can be imported

Part "linear": forward and backward (three GEMMs) of one layer. Times are medians of CUDA events over all rounds; runs
take turns, so that all see the same clocks; inputs rotate and an iteration touches more than the L2 cache holds; the
device sleeps first until the host is ahead, whose own time stands beside. Then the parts: the three GEMMs with operands
ready, which no casts can beat, and the casts as the layer does them. torchao is measured eager and with torch.compile.

Part "stack": forward, backward and torch's fused AdamW (weights, gradients and moments in bf16); embedding, lm_head and
attention stay in bf16. "compile" compiles each transformer layer, in which this project's linear layers stay kernels of
their own. "host" is how long Python takes to issue a step, "busy" how long the device computed in a step under the
profiler, both as a share of the step's time without it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # the package, where it is not installed
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
from environment import describe
from llama import Llama, Size
from options import new_file, several, whole
from profile_step import busy_ms, host_profile, kind_of, top
from torch import Tensor, nn

from zeropp_fp8.compute import ConversionReport, convert_linear_layers
from zeropp_fp8.compute.gemm import has_fp8_gemm, matmul_nt
from zeropp_fp8.compute.operand import Float8Operand

BF16 = "bf16"
OURS = {
    "current": {"format": "fp8", "scaling": "current"},
    "delayed": {"format": "fp8", "scaling": "delayed"},
    "per_channel": {"format": "fp8", "scaling": "per_channel"},
    "block": {"format": "fp8", "scaling": "block"},
    "current-hybrid": {"format": "fp8_hybrid", "scaling": "current"},
    "delayed-hybrid": {"format": "fp8_hybrid", "scaling": "delayed"},
    "mxfp8": {"format": "mxfp8_e4m3"},
}
TORCHAO = "torchao-"
RUNS = (BF16, *OURS, TORCHAO + "tensorwise", TORCHAO + "rowwise")
COMPILED = " compiled"
# Times bf16 of one layer, and of a step of the stack.
LINEAR_TARGETS = {"current": 1.35, "delayed": 1.35, "per_channel": 1.25, "block": 1.1}
LINEAR_STRETCH = {"current": 1.5}
STACK_TARGET, STACK_STRETCH = 1.25, 1.35
IN_STACK = (BF16, "current", "delayed", "per_channel", "block", TORCHAO + "tensorwise", TORCHAO + "rowwise")

SIZES = {
    "8b": Size(hidden=4096, intermediate=14336, layers=8, heads=32, kv_heads=8, vocabulary=32000),
    "tiny": Size(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocabulary=512),
}
SHAPES = {"8b": "4096x14336,14336x4096,4096x4096", "tiny": "256x512"}  # in x out
ROTATING_INPUTS = 3
SLEEP_CYCLES_PER_S = 2.0e9  # at least the device's clock: it sleeps as long as asked for, or longer
# Parts of the names of this project's cast kernels.
CAST_KERNELS = (
    "cast_tensor",
    "cast_rows",
    "cast_whole_rows",
    "cast_blocks",
    "cast_tiles",
    "amax_kernel",
    "scales_kernel",
    "swiglu_cast",
    "rms_norm_cast",
    "row_statistics",
    "round_trip",
)


# -- making runs ----------------------------------------------------------------------------------------------------


def converted(module: nn.Module, run: str) -> tuple[nn.Module, ConversionReport | None]:
    """The module with the linear layers of a run, and this project's report of it.

    Raises:
        RuntimeError: not one layer was converted.
    """
    if run == BF16:
        return module, None
    if run.startswith(TORCHAO):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(run.removeprefix(TORCHAO))
        return convert_to_float8_training(
            module, config=config, module_filter_fn=lambda module, name: "lm_head" not in name
        ), None
    report = convert_linear_layers(module, OURS[run])
    if not report.converted:
        raise RuntimeError(f"{run}: {report}")
    return module, report


def has_torchao() -> bool:
    """Whether torchao can be imported."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return False
    return True


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# -- timing ---------------------------------------------------------------------------------------------------------


def host_ms(work: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    """How long the host takes to issue `work`, median."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    synchronize(device)
    return statistics.median(times)


def interleaved_ms(works: dict[str, Callable[[], None]], device: torch.device, rounds: int, repeats: int) -> dict:
    """Median device time of each of `works`, which take turns: every round runs each of them `repeats` times."""
    issue_s = {}
    for name, work in works.items():
        for _ in range(3):
            work()
        issue_s[name] = host_ms(work, device, 3) / 1e3
    times = defaultdict(list)
    for _ in range(rounds):
        for name, work in works.items():
            if device.type != "cuda":
                times[name] += [host_ms(work, device, 1) for _ in range(repeats)]
                continue
            events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
            torch.cuda._sleep(int(SLEEP_CYCLES_PER_S * min(0.2, 1.5 * repeats * issue_s[name])))
            work()  # not timed: it finds another run's data in the cache
            events[0].record()
            for event in events[1:]:
                work()
                event.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(end) for start, end in itertools.pairwise(events)]
    return {name: statistics.median(found) for name, found in times.items()}


# -- one layer ------------------------------------------------------------------------------------------------------


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


def measure_layer(shape: tuple[int, int], args, device: torch.device) -> list[dict]:
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


def show_layer(rows: list[dict], tokens: int) -> None:
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
    target = LINEAR_TARGETS.get(run)
    return "" if target is None else f"{target:g}" + (f"/{LINEAR_STRETCH[run]:g}" if run in LINEAR_STRETCH else "")


# -- the stack ------------------------------------------------------------------------------------------------------


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


def made_model(args) -> tuple[nn.Module, nn.Module]:
    """(a Llama of the size asked for, the module of it that has `layers`)."""
    size: Size = args.size
    if args.model == "plain":
        model = Llama(size)
        return model, model
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=args.sequence,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model, model.model


def measure_stack(run: str, mode: str, args, device: torch.device) -> dict:
    """The row of one run."""
    row = {"run": run, "mode": mode, "batch": args.batch, "sequence": args.sequence, "layers": args.size.layers}
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
            row["device"] = device_profile(trainer.step, args.profile)
            row["busy_share"] = row["device"]["busy_ms"] / row["step_ms"]
        if args.profile:
            # backward, too, which else runs in a thread of its own
            with torch.autograd.set_multithreading_enabled(False):
                row["host"] = host_profile(trainer.step, args.profile)
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


def device_profile(step: Callable[[], None], count: int) -> dict:
    """One step under torch.profiler: device time by kind of kernel, and the `count` kernels with most time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    by_kind, by_name = defaultdict(float), defaultdict(lambda: [0, 0.0])
    for event in kernels:
        name = event["name"]
        kind = "casts" if any(part in name for part in CAST_KERNELS) else kind_of(name)
        by_kind[kind] += event["dur"] / 1e3
        by_name[name[:100]][0] += 1
        by_name[name[:100]][1] += event["dur"] / 1e3
    calls = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]][0] += 1
            calls[event["name"]][1] += event["dur"] / 1e3
    return {
        "busy_ms": busy_ms([(event["ts"], event["ts"] + event["dur"]) for event in kernels]),
        "launches": len(kernels),
        "by_kind_ms": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "kernels": top(by_name, count),
        "cuda_calls": top(calls, min(count, 10)),
    }


def add_ratios(rows: list[dict]) -> None:
    """Speed against bf16 in the same mode, and against bf16 in eager mode."""
    bf16 = {row["mode"]: row["step_ms"] for row in rows if row["run"] == BF16 and "step_ms" in row}
    for row in rows:
        if "step_ms" not in row:
            continue
        for key, mode in (("times_bf16", row["mode"]), ("times_bf16_eager", "eager")):
            if mode in bf16:
                row[key] = bf16[mode] / row["step_ms"]


def show_stack(rows: list[dict], args) -> None:
    """Print the table, and the profiles asked for."""
    size = args.size
    parameters = next((row["parameters"] for row in rows if "parameters" in row), 0)
    print(
        f"\nTraining step, {size.layers} layers of hidden {size.hidden} and intermediate {size.intermediate}, "
        f"{parameters / 1e9:.2f} B parameters, {args.batch} x {args.sequence} tokens, {args.model} model; "
        f"target {STACK_TARGET:g} x bf16 in the same mode, stretch {STACK_STRETCH:g}"
    )
    print(
        f"{'run':<22}{'mode':<9}{'ms':>8}{'tokens/s':>10}{'x bf16':>8}{'x eager':>9}{'GiB':>7}{'host':>7}{'busy':>7}"
        "   device ms by kind"
    )
    for row in rows:
        if "error" in row:
            print(f"{row['run']:<22}{row['mode']:<9}FAILED: {row['error'][:200]}")
            continue
        nan = float("nan")
        kinds = row.get("device", {}).get("by_kind_ms", {})
        print(
            f"{row['run']:<22}{row['mode']:<9}{row['step_ms']:>8.1f}{row['tokens_per_s']:>10.0f}"
            f"{row.get('times_bf16', nan):>8.3f}{row.get('times_bf16_eager', nan):>9.3f}"
            f"{row.get('peak_gib', nan):>7.1f}"
            f"{100 * row['host_ms'] / row['step_ms']:>6.0f}%{100 * row.get('busy_share', nan):>6.0f}%   "
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
                for name, calls, ms in entries:
                    print(f"  {ms:9.3f} ms {calls:6d} x {name}")
    sys.stdout.flush()


# -- command line ---------------------------------------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("linear", "stack", "both"), default="both")
    parser.add_argument("--runs", help=f"some of {','.join(RUNS)} (default: all; of the stack {','.join(IN_STACK)})")
    parser.add_argument("--modes", default="eager,compile" if on_gpu else "eager", help="eager, compile or both")
    parser.add_argument("--size", choices=SIZES, default="8b" if on_gpu else "tiny")
    parser.add_argument("--tokens", type=whole(1), default=8192 if on_gpu else 256, help="of one layer")
    parser.add_argument(
        "--shapes", type=several(several(whole(1), "x")), help='of one layer, in x out, e.g. "4096x14336,4096x4096"'
    )
    parser.add_argument("--rounds", type=whole(1), default=8 if on_gpu else 1, help="in which the runs take turns")
    parser.add_argument("--repeats", type=whole(1), default=5 if on_gpu else 2, help="of a run in a round")
    parser.add_argument("--model", choices=("plain", "transformers"), default="plain", help="of the stack")
    parser.add_argument("--layers", type=whole(1), help="of the stack")
    parser.add_argument("--batch", type=whole(1), default=1, help="sequences in a step of the stack")
    parser.add_argument("--sequence", type=whole(1), default=8192 if on_gpu else 128, help="tokens in a sequence")
    parser.add_argument("--warmup", type=whole(0), default=4 if on_gpu else 1, help="steps of the stack before timing")
    parser.add_argument("--steps", type=whole(1), default=15 if on_gpu else 2, help="timed steps of the stack")
    parser.add_argument("--profile", type=whole(0), default=0, metavar="N", help="print N kernels and Python functions")
    parser.add_argument("--out", type=new_file, help="JSON file")
    args = parser.parse_args(argv)
    args.shapes = [tuple(map(int, shape.split("x"))) for shape in (args.shapes or SHAPES[args.size]).split(",")]
    args.size = SIZES[args.size]
    if args.layers:
        args.size = Size(**{**vars(args.size), "layers": args.layers})
    args.modes = args.modes.split(",")
    args.stack_runs = args.runs.split(",") if args.runs else list(IN_STACK)
    args.runs = args.runs.split(",") if args.runs else list(RUNS)
    unknown = [run for run in args.runs if run not in RUNS]
    unknown += [mode for mode in args.modes if mode not in ("eager", "compile")]
    if unknown:
        parser.error(f"unknown: {unknown[0]}; runs are {', '.join(RUNS)}, modes eager and compile")
    return args


def main() -> None:
    args = parse()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        torch.set_num_threads(1)
    if any(run.startswith(TORCHAO) for run in args.runs) and not has_torchao():
        print("torchao cannot be imported: not measured")
        args.runs, args.stack_runs = (
            [run for run in runs if not run.startswith(TORCHAO)] for runs in (args.runs, args.stack_runs)
        )
    result = describe("benchmarks/fp8_linear.py", sys.argv[1:])
    if has_torchao():
        import torchao

        result["versions"]["torchao"] = torchao.__version__
    result["tokens"] = args.tokens
    result["fp8_gemms"] = {kind: has_fp8_gemm(device, kind) for kind in ("tensor", "row", "block", "tile")}
    if not all(result["fp8_gemms"].values()):
        missing = ", ".join(kind for kind, there in result["fp8_gemms"].items() if not there)
        print(f"This device has no FP8 GEMM with scales per {missing}: there it is emulated, and times mean nothing.")
    result["linear"], result["stack"] = [], []

    def write() -> None:
        if args.out:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(json.dumps(result, indent=1) + "\n")

    for shape in args.shapes if args.part != "stack" else ():
        rows = measure_layer(shape, args, device)
        show_layer(rows, args.tokens)
        result["linear"] += rows
        write()
    for mode in args.modes if args.part != "linear" else ():
        for run in args.stack_runs:
            result["stack"].append(measure_stack(run, mode, args, device))
            add_ratios(result["stack"])
            write()
            last = result["stack"][-1]
            print(f"{run} {mode}: {last.get('error') or round(last['step_ms'], 1)} ms a step", flush=True)
    if result["stack"]:
        show_stack(result["stack"], args)
    write()
    failed = [row["run"] for row in result["linear"] + result["stack"] if "error" in row]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
