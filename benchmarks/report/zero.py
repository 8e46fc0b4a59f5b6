"""ZeRO-3 itself: the demo, step time and bytes between nodes of four GPUs, kernels, accuracy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice, pairwise

from benchmarks.harness.memory import OWNERS
from benchmarks.harness.profiling import PHASES
from benchmarks.harness.sizes import SIZES
from benchmarks.report.blocks import Block, bold, paragraph, since, table

LABELS = {
    "hsdp": "HSDP (FSDP2, a full copy in each node)",
    "zeropp": "**`zeropp`**",
    "zeropp-4bit": "**`zeropp-4bit`**",
}
FOUR_GPUS = {
    "stock-leaf": "stock ZeRO-3, decoder layers as z3 leaf modules",
    "in-tree-leaf": "DeepSpeed's ZeRO++, decoder layers as z3 leaf modules",
    "fsdp2": "FSDP2",
    "hsdp": LABELS["hsdp"],
    "lossless": "**`lossless`**",
    "zeropp-exact": "**`zeropp-exact`**: only weight changes are sent, without loss",
    "zeropp-difference": "**`zeropp`**: only changes of the 8-bit weight codes are sent",
    "zeropp": "`zeropp` with all codes in each step",
    "zeropp-4bit": "**`zeropp-4bit`**: all 4-bit weight codes are sent",
    "fp8-lm-zeropp-difference": "**`fp8-lm-zeropp`**",
    "fp8-lm-zeropp": "`fp8-lm-zeropp` with all codes in each step",
    "fp8-lm": "**`fp8-lm`**",
}
IN_README = (
    "stock-leaf",
    "in-tree-leaf",
    "fsdp2",
    "hsdp",
    "zeropp-exact",
    "zeropp-difference",
    "zeropp",
    "zeropp-4bit",
)
QUANTIZED = ("zeropp", "zeropp-4bit")


def demo(result: dict) -> str:
    """Losses, step time and bytes of the demo's runs."""
    stock, rows = result["runs"]["stock"], []
    for name, run in result["runs"].items():
        row = [name if name == "stock" else f"`{name}`", f"{run['loss_start']:.3f}", f"{run['loss_end']:.3f}"]
        row += [f"{run['held_out_loss']:.4f}", f"{run['step_s']:.3f}"]
        for link in ("inter_bytes", "intra_bytes"):
            row += [f"{run[link] / 1e6:.3f}", f"{run[link] / stock[link]:.3f}"]
        rows.append(row)
    head = ["", "loss, start", "loss, end", "held-out loss", "step, s"]
    return table(head + ["MB between nodes", "x stock", "MB within nodes", "x stock"], rows)


def demo_output(result: dict) -> str:
    """Return what `examples/pretrain/demo.py` prints of these runs."""
    stock = result["runs"]["stock"]
    lines = [
        f"{'':<13}{'loss':>7}{'loss':>8}{'held-out':>10}{'step':>9}{'between nodes':>17}{'':>9}{'within nodes':>16}"
    ]
    lines.append(f"{'':<13}{'start':>7}{'end':>8}{'loss':>10}{'s':>9}")
    lines[-1] += f"{'MB per step':>17}{'x stock':>9}{'MB per step':>16}{'x stock':>9}"
    for name, run in result["runs"].items():
        line = f"{name:<13}{run['loss_start']:>7.3f}{run['loss_end']:>8.3f}{run['held_out_loss']:>10.4f}"
        line += f"{run['step_s']:>9.3f}"
        for link, width in (("inter_bytes", 17), ("intra_bytes", 16)):
            line += f"{run[link] / 1e6:>{width}.3f}{run[link] / stock[link]:>9.3f}"
        lines.append(line)
    return "\n".join(["```", *lines, "```"])


def by_rate(*results: dict) -> dict[tuple[str, object], dict]:
    """Rows by (run, rate)."""
    return {(row["run"], row["gbit"]): row for result in results for row in result["rows"]}


RATES = (25.0, 10.0, "nvlink")


def times_of(found: dict[tuple[str, object], dict], run: str) -> list[str]:
    """Milliseconds per step at each rate, with compiled decoder layers in brackets; in one node nothing differs."""
    cells = []
    for rate in RATES:
        run = run.removesuffix("-difference") if rate == "nvlink" else run
        times = [found.get((run + suffix, rate), {}).get("step_ms") for suffix in ("", "-compiled")]
        eager, compiled = ("" if ms is None else f"{ms:.0f}" for ms in times)
        cells.append(f"{eager} ({compiled})" if eager and compiled else eager or compiled)
    return cells


def step_time(*results: dict) -> str:
    """Milliseconds a step of all runs at three rates, bytes between nodes, memory."""
    found, rows = by_rate(*results), []
    for run, label in FOUR_GPUS.items():
        row = found.get((run, 25.0)) or found[run, "nvlink"]
        sent = [row.get(f"{count}_bytes_per_node_step") for count in ("ledger", "tx")]
        counts = " / ".join(f"{count / 1e6:,.0f}" for count in sent if count is not None)
        rows.append([label, *times_of(found, run), counts, f"{row['peak_gib']:.1f}"])
    head = ["ms per step (compiled)", "25 Gbit/s", "10 Gbit/s", "one node, NVLink"]
    return table([*head, "MB a node sends, by the ledger / by the interface", "peak GiB"], rows)


def step_time_says(*results: dict) -> str:
    """Exact differences beside stock and the in-tree ZeRO++, and beside their goals."""
    found = {key: row["step_ms"] for key, row in by_rate(*results).items()}

    def times(peer: str, rate: float, mode: str = "") -> str:
        return f"{found[peer, rate] / found[f'zeropp-exact{mode}', rate]:.1f}"

    def both(rate: float, mode: str = "") -> str:
        return f"{times('stock-leaf', rate, mode)} and {times('in-tree-leaf', rate, mode)}"

    def outcome(peer: str, goal: float) -> str:
        return "met" if found[peer, 25.0] / found["zeropp-exact-compiled", 25.0] >= goal else "missed"

    return paragraph(
        f"""At 25 Gbit/s `zeropp-exact` is {times("stock-leaf", 25.0)} times as fast as stock ZeRO-3 and
        {times("in-tree-leaf", 25.0)} times as fast as DeepSpeed's ZeRO++ (compiled: {both(25.0, "-compiled")} times),
        at 10 Gbit/s {both(10.0)} times (compiled: {both(10.0, "-compiled")}). Goals at 25 Gbit/s, compiled: 10 times
        stock ({outcome("stock-leaf", 10)}), 3.3 times ZeRO++ ({outcome("in-tree-leaf", 3.3)})."""
    )


def at_a_large_rate(result: dict) -> str:
    """Differences of codes in pretraining."""
    found = by_rate(result)
    runs = {"zeropp-difference": "`zeropp`", "fp8-lm-zeropp-difference": "`fp8-lm-zeropp`"}
    runs |= {"zeropp-4bit": "`zeropp-4bit`, all codes in each step"}
    rows = [[label, *(f"{found[run, rate]['step_ms']:.0f}" for rate in RATES[:2])] for run, label in runs.items()]
    return table([f"ms per step, learning rate {result['lr']:g}", "25 Gbit/s", "10 Gbit/s"], rows)


def nvlink_large(result: dict) -> str:
    """Steps over NVLink with many tokens per GPU."""
    labels = {"stock": "stock ZeRO-3", **FOUR_GPUS, "zeropp": LABELS["zeropp"]}
    rows = [[labels[row["run"]].partition(":")[0], f"{row['step_ms']:.0f}"] for row in result["rows"]]
    return table(["", f"ms per step, {result['micro_batch']} x {result['tokens']:,} tokens per GPU"], rows)


def readme_demo(result: dict) -> str:
    """The demo's output, with what it was measured on."""
    said = f"On {result['hardware']['cores']} CPU cores it prints"
    return f"{said} (`benchmarks/results/demo/cpu-4-gloo.json`, {since(result)}):\n\n{demo_output(result)}"


def beside_fsdp2(results: Sequence[dict], mode: str = "") -> list[float]:
    """The step time of `zeropp` over FSDP2's on NVLink, of each result that has both; `mode`: "-compiled" or none."""
    found = []
    for result in results:
        rows = result.get("comparison", result["rows"])
        ms = {row["run"]: row["step_ms"] for row in rows if "nvlink" in (row.get("gbit"), row.get("link"))}
        if {f"zeropp{mode}", f"fsdp2{mode}"} <= set(ms):
            found.append(ms[f"zeropp{mode}"] / ms[f"fsdp2{mode}"])
    return found


def readme_step_time(*results: dict) -> str:
    """The step times that README.md shows, how far other hosts and commits differ, and where their results are."""
    remaining = iter(results)
    results, elsewhere, few, many = (
        list(islice(remaining, len(files))) for files in (HEADLINE, ELSEWHERE, FEW_TOKENS, MANY_TOKENS)
    )
    found, other = by_rate(*results), by_rate(*elsewhere)
    rows = []
    for run in IN_README:
        cells, label = times_of(found, run), FOUR_GPUS[run]
        rows.append([label, *(bold(cell) if cell and label.startswith("**") else cell for cell in cells)])
    (commit,) = {result["commit"] for result in results}
    in_one_node = [beside_fsdp2(of_size) for of_size in ((*elsewhere, *few), many)]
    compiled = [beside_fsdp2((*few, *many), "-compiled")]
    spans = [f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in in_one_node + compiled]
    source = paragraph(
        f"""From `benchmarks/results/two_nodes/h200-4-*`, commit `{commit}`, all on one day and host (the file of 25 and
        10 Gbit/s was cut short). [Hosts and commits differ](docs/results.md#step-time-in-one-node). On another host
        DeepSpeed's ZeRO++ took {other["in-tree-leaf", 25.0]["step_ms"]:.0f} ms at 25 Gbit/s, and stock ZeRO-3
        {other["stock-leaf", "nvlink"]["step_ms"]:.0f} ms in one node. In one node `zeropp` takes {spans[0]} of FSDP2's
        time with few tokens, and {spans[1]} with 4 x 2,048 per GPU. Compiled, it takes {spans[2]} of it."""
    )
    return f"{table(['', '25 Gbit/s', '10 Gbit/s', 'one node, NVLink'], rows)}\n\n{source}"


def step_time_elsewhere(*results: dict) -> str:
    """Milliseconds per step of the same runs on another host; recipes sent all codes then."""
    found = by_rate(*results)
    runs = [run for run in ("stock", *FOUR_GPUS) if (run, 25.0) in found or (run, "nvlink") in found]
    labels = {"stock": "stock ZeRO-3", **FOUR_GPUS}
    rows = [[labels[run].partition(":")[0], *times_of(found, run)] for run in runs]
    return table(["ms per step, another host", "25 Gbit/s", "10 Gbit/s", "one node, NVLink"], rows)


def slower_link(at_25: dict, slower: dict) -> str:
    """The rate at which `zeropp` takes as long as stock at 25 Gbit/s, between two that were measured."""
    ms = by_rate(at_25)["stock", 25.0]["step_ms"]
    times = sorted((1 / rate, row["step_ms"]) for (run, rate), row in by_rate(slower).items() if run == "zeropp")
    (inverse, low), (inverse_after, high) = next(pair for pair in pairwise(times) if pair[1][1] >= ms)
    rate = 1 / (inverse + (ms - low) / (high - low) * (inverse_after - inverse))
    return paragraph(
        f"""`zeropp` with all codes needs a link of {rate:.1f} Gbit/s for the step time that stock ZeRO-3 has at 25
        Gbit/s (interpolated between {1 / inverse_after:.0f} and {1 / inverse:.0f} Gbit/s)."""
    )


def model_bytes(result: dict) -> float:
    """M, the 16-bit weights: a ring of all ranks sends (ranks - 1) M of gradients, nodes/ranks of it between nodes."""
    row = by_rate(result)["zeropp", 25.0]
    nodes, ranks = 2, result["ranks"]
    return row["wire"]["stock_per_step"]["gradients"]["inter"] * ranks / (nodes * (ranks - 1))


def step_bytes(result: dict) -> str:
    """Bytes between nodes by two counts, memory, and what a node keeps."""
    found, size = {run: row for (run, _), row in by_rate(result).items()}, model_bytes(result)
    columns = ("zeropp", "zeropp-4bit", "in-tree", "stock")

    def sent(run: str) -> str:
        ledger, interface = (found[run][f"{count}_bytes_per_node_step"] for count in ("ledger", "tx"))
        return f"{'-' if ledger is None else f'{ledger / 1e6:.0f}'} / {interface / 1e6:.0f}"

    def kept(run: str) -> float:
        """Codes beside 16 bits: of what is gathered inside a node for backward."""
        gathered = [found[name]["wire"]["per_step"]["weights_backward"]["intra"] for name in (run, "lossless")]
        return gathered[0] / gathered[1]

    times = [f"{2 * found[run]['ledger_bytes_per_node_step'] / size:.3f} M" for run in QUANTIZED]
    rows = [
        ["sent by a node per step, by the ledger / by the interface (MB)", *map(sent, columns)],
        ["the same over (N-1)/N, in sizes M of the 16-bit model", *times, "", ""],
        [
            "peak memory of the 25 Gbit/s runs (GiB per GPU)",
            *(f"{found[run]['peak_gib']:.2f}" for run in columns),
        ],
        ["secondary shard, of the 16-bit one", *(f"{kept(run):.3f}" for run in QUANTIZED), "1", ""],
    ]
    return table(["", "`zeropp`", "`zeropp-4bit`", "in-tree ZeRO++", "stock"], rows)


def profile_says(result: dict) -> str:
    """How much Python a step is."""
    calls = {row["run"]: f"{round(row['host']['calls'], -3):,}" for row in result["rows"]}
    return paragraph(
        f"""Stock ZeRO-3 makes {calls["stock"]} Python calls per step, `zeropp` {calls["zeropp"]}, FSDP2
        {calls["fsdp2"]} (main thread only, 4 H200, an older commit)."""
    )


def memory_of_step(result: dict) -> str:
    """GiB of a step on GPUs: the peaks of its phases, and by owner at the highest of them."""
    of_run = {row["run"]: row["memory"] for row in result["rows"]}
    rows = [["peak of all steps, the first among them", *(f"{row['highest_gib']:.2f}" for row in result["rows"])]]
    rows += [["peak of a later step", *(f"{found['peak_gib']:.2f}" for found in of_run.values())]]
    rows += [["reserved", *(f"{found['reserved_gib']:.2f}" for found in of_run.values())]]
    for title, key, names in (("", "phases_gib", PHASES), ("at the peak: ", "at_peak_gib", OWNERS)):
        sizes = [found[key] for found in of_run.values()]
        for name in (name for name in names if any(name in found for found in sizes)):
            label = title + name.replace("held before", "in memory before")  # the name in results
            rows.append([label, *(f"{found[name]:.2f}" if name in found else "" for found in sizes)])
    return table(["GiB", *(f"`{run}`" for run in of_run)], rows)


def work_of_step(result: dict) -> str:
    """The host's work for a step on GPUs, and that over the number of blocks."""
    rows, layers = result["rows"], SIZES[result["model"]].layers

    def counted(what: str, of: Callable[[dict], int]) -> list[str]:
        return [what, *(f"{of(row):,} ({of(row) / layers:,.0f})" for row in rows)]

    return table(
        ["of a step (over the number of blocks)", *(f"`{row['run']}`" for row in rows)],
        [
            counted("Python calls", lambda row: row["host"]["calls"]),
            counted("launches, copies, fills", lambda row: row["device"]["launches"]),
            counted("allocations", lambda row: row["memory"]["allocations"]),
            counted("events recorded and waited for", lambda row: row["device"]["stream_operations"]),
            ["ms on the device", *(f"{row['device']['computing_ms']:.0f}" for row in rows)],
            ["ms until the host returns", *(f"{row['host_returns_after_ms']:.0f}" for row in rows)],
        ],
    )


KERNELS = {
    "INT8, block 256": "int8 block 256",
    "INT4, block 128": "int4 block 128",
    "INT4 with Hadamard": "int4 block 128 hadamard",
    "FP8 E4M3": "fp8_e4m3 block 128",
}


def by_operation(result: dict) -> dict[tuple[str, str], dict]:
    """Rows by (operation, format)."""
    return {(row["operation"], row["format"]): row for row in result["rows"]}


def kernels(result: dict) -> str:
    """Of a copy's bandwidth, by format."""
    found = by_operation(result)
    rows = [
        [operation, *(f"{100 * found[operation, name]['share_of_copy']:.0f} %" for name in KERNELS.values())]
        for operation in ("quantize", "dequantize")
    ]
    return table(["", *KERNELS], rows)


def kernels_of_differences(result: dict) -> str:
    """Of a copy's bandwidth, by learning rate, and bits per number."""
    found = by_operation(result)
    rates = [name for operation, name in found if operation == "add difference"]
    rows = [
        [operation, *(f"{100 * found[operation, name]['share_of_copy']:.0f} %" for name in rates)]
        for operation in ("measure difference", "encode difference", "add difference")
    ]
    bits = ["bits per number", *(f"{found['add difference', name]['bits']:.2f}" for name in rates)]
    return table(["", *rates], [*rows, bits])


def kernels_say(result: dict, profile: dict) -> str:
    """Sums of ranks, the kernels' share of a step, and a plain quantization beside them."""
    found = by_operation(result)
    share = {name: f"{100 * row['share_of_copy']:.0f} %" for (kind, name), row in found.items() if kind == "sum"}
    error = {name: row["relative_error"] for (kind, name), row in found.items() if kind == "dequantize"}
    names = {bits: (f"naive {bits}, one scale", KERNELS[head]) for bits, head in zip(("int8", "int4"), KERNELS)}
    slower = [found["quantize", naive]["us"] / found["quantize", ours]["us"] for naive, ours in names.values()]
    (naive_8, ours_8), (naive_4, ours_4) = ([error[name] for name in pair] for pair in names.values())
    (step,) = (row for row in profile["rows"] if row["run"] == "zeropp")
    return paragraph(
        f"""Summing the INT8 gradients of 8 ranks in fp32 reaches {share["8 x int8 -> fp32"]}, summing and quantizing
        again {share["8 x int8 -> int4 hadamard"]}. All these kernels take
        {step["device"]["by_kind_ms"]["quantize kernels"]:.0f} of the {step["step_ms"]:.0f} ms of a profiled `zeropp`
        step on NVLink. One scale for the whole tensor, in plain torch, takes {slower[0]:.0f} (INT8) and {slower[1]:.0f}
        (INT4) times as long, with {naive_8 / ours_8:.0f} and {naive_4 / ours_4:.0f} times the relative error."""
    )


def all_well(*results: dict) -> int:
    """The number of cases, none of which failed, of files that may share some."""
    rows = [row for result in results for row in result["rows"]]
    assert all(row["well"] for row in rows)
    return len({row["case"] for row in rows})


def accuracy(lossless: dict, fp8_lm: dict, two_ranks: dict, *two_h100: dict) -> str:
    """Bit parity, counted; the other rows are what the tests named below print."""
    cases = f"{all_well(lossless, fp8_lm)} cases; {all_well(two_ranks)} on 2 H200, {all_well(*two_h100)} on 2 H100"
    steps = lossless["steps"]
    rows = [
        ["`lossless`, 30 steps, fp32 and bf16, gloo", "bit for bit stock ZeRO-3: losses and weights"],
        [
            f"`lossless`, {steps} steps on {lossless['ranks']} H200, NCCL, deterministic algorithms",
            "bit for bit stock ZeRO-3: losses, gradient norms, 16-bit and fp32 weights; also with random delays in "
            f"every layer, with accumulation and under `zero.Init` ({cases})",
        ],
        [
            "held-out loss, mean of 3 seeds, `zeropp` / `zeropp-4bit`",
            "within 1 % / 2 % of stock (asserted by tests)",
        ],
        ["reduced gradient of 128 sequences, INT8 on both hops", "cosine 0.99998, norm 1.0001 of stock's"],
        [
            "the same, INT8 inside and INT4 with Hadamard rotation between nodes",
            "cosine 0.9956, norm 1.005",
        ],
    ]
    return table(["", ""], rows)


def fidelity_says(result: dict) -> str:
    """One reduction of random gradients, ours and DeepSpeed's own."""

    def span(method: str, key: str, digits: int, dtypes: tuple[str, ...]) -> str:
        values = [row[key] for row in result["rows"] if row["method"] == method and row["dtype"] in dtypes]
        return " to ".join(dict.fromkeys(f"{value:,.{digits}f}" for value in (min(values), max(values))))

    every = ("float32", "bfloat16", "float16")
    int8, int4, in_tree = "INT8 / INT8", "INT8 / INT4 hadamard", "in-tree qgZ"
    rows, columns = result["shape"]
    return paragraph(
        f"""Random gradients of {rows:,} x {columns:,} in fp32, bf16 and fp16, reduced on 4 H200 as 2 nodes x 2, against
        the mean in float64 (`benchmarks.gradient_fidelity`): cosine {span(int8, "cosine", 5, every)} and norm
        {span(int8, "norm_ratio", 4, every)} with INT8 on both hops, {span(int4, "cosine", 4, every)} and
        {span(int4, "norm_ratio", 3, every)} with INT4 between nodes. DeepSpeed's ZeRO++ kernels (INT4 on both hops)
        give {span(in_tree, "cosine", 3, ("float16",))} and {span(in_tree, "norm_ratio", 2, ("float16",))} in fp16, and
        {span(in_tree, "cosine", 2, ("bfloat16",))} and {span(in_tree, "norm_ratio", 0, ("bfloat16",))} in bf16, whose
        bits they read as fp16."""
    )


def few_bits(result: dict) -> str:
    """Gradients with few bits between nodes, one and many added up; older files have INT3 and INT2 too."""
    found = {(row["between nodes"], row["error_feedback"], row["added"]): row for row in result["sums"]}
    added = max(count for _, _, count in found)
    rows = []
    for kind in dict.fromkeys(name.removesuffix(", hadamard") for name, *_ in found):
        name = f"{kind}, hadamard"
        cosines = [
            found[name, feedback, count]["cosine"] for feedback, count in ((False, 1), (False, added), (True, added))
        ]
        rows.append([f"INT{kind[-1]}, rotated", f"{int(kind[-1]) + 16 / result['block_size']:.3f}"])
        rows[-1] += [f"{cosine:.4f}" for cosine in cosines]
    sums = f"sum of {added}", f"sum of {added}, error feedback"
    return table(["between nodes", "bits per number", "one", *sums], rows)


def added_in_node(result: dict) -> str:
    """Micro-batches that are sent between nodes once, beside one and beside those that are sent each time."""

    def cosines(method: str, digits: int) -> str:
        rows = [row for row in result["micro_batches"] if row["method"] == method]
        one, end, node = (
            {f"{row['cosine']:.{digits}f}" for row in rows if (row["micro_batches"] > 1, row["added"]) == which}
            for which in ((False, "in the node"), (True, "at the end"), (True, "in the node"))
        )
        return ", ".join(" to ".join(dict.fromkeys((min(some), max(some)))) for some in (one, end, node))

    most = max(row["micro_batches"] for row in result["micro_batches"])
    return paragraph(
        f"""Gradients of up to {most} micro-batches that are summed inside the node are as exact as single ones. Cosines
        of one gradient, of several reduced one by one, and of several sent between nodes once:
        {cosines("INT8 / INT4 hadamard", 4)} with INT8 inside and INT4 between nodes, {cosines("INT8 / INT8", 5)} with
        INT8 on both hops."""
    )


def kernels_on_cpu_say(result: dict) -> str:
    """Return what the torch code takes where there is no GPU."""
    us = {(row["operation"], row["format"]): row["us"] for row in result["rows"]}
    times = {name: us[name, "int8 block 256"] / us["copy", "bf16"] for name in ("quantize", "dequantize")}
    return paragraph(
        f"""On a CPU (torch code, one thread, bf16, INT8 in blocks of 256) dequantizing takes
        {times["dequantize"]:.1f} times and quantizing {times["quantize"]:.1f} times as long as copying the tensor."""
    )


HEADLINE = tuple(f"two_nodes/h200-4-{case}" for case in ("25_10gbit", "25_10gbit-compiled", "nvlink-again"))
ELSEWHERE = tuple(f"two_nodes/h200-4-{case}" for case in ("25gbit", "10_6_4gbit", "nvlink"))
# Steps of `zeropp` and FSDP2 over NVLink on hosts of OVER_HOSTS, and of older commits.
OVER_HOSTS = tuple(
    f"one_node/h200-2-nvlink{shape}{host}" for host in ("", "-again", "-third", "-fourth") for shape in ("", "-4x2048")
)
FEW_TOKENS = OVER_HOSTS[::2] + tuple(
    f"two_nodes/h200-2-nvlink{case}"
    for case in (
        "_25gbit-fsdp2",
        "_25gbit-fsdp2-again",
        "_25gbit-fsdp2-compiled",
        "-compiled",
        "-compiled_zero3_linear",
    )
)
MANY_TOKENS = OVER_HOSTS[1::2] + tuple(
    f"two_nodes/h200-{case}" for case in ("4-nvlink-4x2048", "2-nvlink-4x2048-compiled_zero3_linear")
)
BLOCKS = {
    "demo": Block(demo, ("demo/cpu-4-gloo",)),
    "step_time": Block(step_time, HEADLINE, cut_short=HEADLINE[:1]),
    "step_time_says": Block(step_time_says, HEADLINE, cut_short=HEADLINE[:1], sourced=False),
    "at_a_large_rate": Block(at_a_large_rate, ("two_nodes/h200-4-25_10gbit-6e-4",)),
    "step_time_elsewhere": Block(step_time_elsewhere, ELSEWHERE),
    "readme_step_time": Block(
        readme_step_time, (*HEADLINE, *ELSEWHERE, *FEW_TOKENS, *MANY_TOKENS), cut_short=HEADLINE[:1], sourced=False
    ),
    "readme_demo": Block(readme_demo, ("demo/cpu-4-gloo",), sourced=False),
    "nvlink_large": Block(nvlink_large, ("two_nodes/h200-4-nvlink-4x2048",)),
    "slower_link": Block(slower_link, ("two_nodes/h200-4-25gbit", "two_nodes/h200-4-10_6_4gbit")),
    "step_bytes": Block(step_bytes, ("two_nodes/h200-4-25gbit",)),
    "profile_says": Block(profile_says, ("step_profile/h200-4-nvlink",)),
    "memory_of_step": Block(memory_of_step, ("step_profile/h200-2-nvlink",)),
    "work_of_step": Block(work_of_step, ("step_profile/h200-2-nvlink",)),
    "work_of_fp8_step": Block(work_of_step, ("step_profile/h200-2-nvlink-4x2048",)),
    "kernels": Block(kernels, ("kernels/h200-1-local",)),
    "kernels_of_differences": Block(kernels_of_differences, ("kernels/h200-1-local-differences",)),
    "kernels_say": Block(kernels_say, ("kernels/h200-1-local", "step_profile/h200-4-nvlink")),
    "accuracy": Block(
        accuracy,
        (
            "bit_parity/h200-4-nvlink-lossless",
            "bit_parity/h200-4-nvlink-fp8_lm",
            "bit_parity/h200-2-nvlink",
            *(f"bit_parity/h100-2-nvlink{part}" for part in ("", "-fp8", "-offload")),
        ),
    ),
    "fidelity_says": Block(fidelity_says, ("gradient_fidelity/h200-4-nvlink",)),
    "added_in_node": Block(added_in_node, ("gradient_fidelity/cpu-4-gloo",)),
    "few_bits": Block(few_bits, ("gradient_fidelity/cpu-4-gloo",)),
    "kernels_on_cpu_say": Block(kernels_on_cpu_say, ("kernels/cpu-1-local",)),
}
