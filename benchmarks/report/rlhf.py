"""RLHF: steps of PPO, memory, batches, SFT, and what quantized models learn."""

from __future__ import annotations

from benchmarks.report.blocks import Block, bold, paragraph, table
from benchmarks.report.rows import GIB, by_run, link_says

# run -> label, the run of stock that it is compared with
STEPS = {
    "stock-lora": ("LoRA, stock ZeRO-3, layers as z3 leaf modules", "stock-lora"),
    "qlora": ("LoRA, `qlora`", "stock-lora"),
    "stock-full": ("all weights, stock ZeRO-3, the same", "stock-full"),
    "zeropp": ("all weights, `zeropp`", "stock-full"),
    "fp8-lm": ("all weights, `fp8-lm`", "stock-full"),
}
FEW_BYTES = ("qlora", "zeropp")


def rlhf_step(*results: dict) -> str:
    """Milliseconds of the training phase; the runs of the second and third machine are in two results each."""
    two, four, nvlink = by_run(results[0]), by_run(*results[1:3]), by_run(*results[3:])
    rows = []
    for run, (label, stock) in STEPS.items():
        cells = []
        for found in (two, four, nvlink):
            factor = f"{found[stock]['training_ms'] / found[run]['training_ms']:.1f}"
            cells += [f"{found[run]['training_ms']:.0f}", bold(factor) if run in FEW_BYTES else factor]
        sent = f"{four[run]['training_tx_bytes_per_node'] / 1e6:.0f}"
        rows.append([label, *cells[:4], sent, *cells[4:]])
    head = ["", "2 x 1, 25 Gbit/s", "x stock", "2 x 2, 25 Gbit/s", "x stock", "MB a node sends (2 x 2)"]
    return table([*head, "NVLink", "x stock"], rows)


def rlhf_step_says(two: dict, full: dict, nvlink: dict) -> str:
    """Where the network no longer is the limit, and where it is."""
    found, sent = by_run(nvlink), {row["run"]: row["training_tx_bytes_per_node"] for row in full["rows"]}
    qlora, stock = (found[run]["training_ms"] for run in ("qlora", "stock-lora"))
    of_two = by_run(two)
    stock_two, least = of_two["stock-full"], of_two["zeropp"]["training_ms"]
    return paragraph(
        f"""With `qlora` and `zeropp` the network no longer bounds a step (`qlora` on four GPUs over NVLink: {qlora:.0f}
        ms, stock {stock:.0f} ms, {stock / qlora:.1f} x). `fp8-lm` sends {sent["fp8-lm"] / sent["zeropp"]:.1f} times the
        bytes of `zeropp`. In the run of 2 x 1 with all weights
        {link_says(two, stock_two["training_tx_bytes_per_node"], stock_two["training_ms"], least)}"""
    )


def rlhf_step_h100(result: dict) -> str:
    """All weights on two H100, FP8 with few bytes between nodes."""
    found, settings = by_run(result), result["settings"]
    stock, ours = found["stock-full"], found["fp8-lm-zeropp"]

    def both(key: str, unit: float = 1.0, digits: int = 0) -> str:
        return f"{ours[key] / unit:,.{digits}f} instead of stock's {stock[key] / unit:,.{digits}f}"

    return paragraph(
        f"""Two H100 as two nodes at {settings["gbit"]:.0f} Gbit/s, all weights trained: with `fp8-lm-zeropp` training
        takes {both("training_ms")} ms ({stock["training_ms"] / ours["training_ms"]:.1f} x), experience
        {both("experience_ms")} ms; a node sends {both("training_tx_bytes_per_node", 1e6)} MB, and the peak is
        {both("peak_bytes", GIB, 1)} GiB."""
    )


def rlhf_gives(*results: dict) -> str:
    """The training phase of PPO in one sentence, and where the rest is."""
    of_gpu = [by_run(result) for result in results]
    ms = [{run: row["training_ms"] for run, row in found.items()} for found in of_gpu]
    parts = [
        f"`{run}` {each[run]:,.0f} ms instead of stock's {each['stock-full']:,.0f} on two {gpus} "
        f"({each['stock-full'] / each[run]:.1f} x)"
        for each, run, gpus in zip(ms, ("zeropp", "fp8-lm-zeropp"), ("H200", "H100"))
    ]
    return paragraph(
        f"""Two nodes of one GPU at {results[0]["settings"]["gbit"]:.0f} Gbit/s: a step of actor and critic of 1.3 B
        parameters each, all weights trained, takes {", and ".join(parts)}. Speed and memory are in
        [Results](results-features.md#rlhf), what is learned in [Quality](results-quality.md#rlhf)."""
    )


def rlhf_memory(result: dict) -> str:
    """Return what four models take on one GPU; states of all weights are some hundred times those of LoRA."""
    labels = {
        "stock-four": ("stock, LoRA, four models in bf16", 2),
        "qlora": ("`qlora`", 2),
        "stock-full": ("stock, all weights", 1),
        "fp8-lm": ("`fp8-lm`, all weights", 1),
    }
    found, compared, rows = by_run(result), {run["run"]: run for run in result["comparison"]}, []
    for run, (label, digits) in labels.items():
        row, gib = found[run], {part: size / GIB for part, size in found[run]["bytes"].items()}
        weights, less = f"{gib['weights']:.2f}", 1 - compared[run]["of_bf16_measured"]
        if less:
            weights = f"{bold(weights) if less > 0.5 else weights}, {less:.0%} less".replace("%", " %")
        states = f"{gib['states']:.{digits}f} ({compared[run]['states_per_trained_parameter']:.0f})"
        rows.append([label, weights, bold(states) if run == "fp8-lm" else states, f"{gib['all']:.{digits}f}"])
        rows[-1] += [f"{row['peak_bytes'] / GIB:.1f}", f"{row['training_ms']:.0f}"]
    head = ["", "weights of all four", "states (bytes per trained parameter)", "all stored", "peak of a step"]
    return table([*head, "training, ms"], rows)


def rlhf_limits(*results: dict) -> str:
    """The largest minibatch, and tokens/s with it."""
    rows = []
    for result in results:
        stock, ours = result["comparison"]
        what = {"stock-four": "LoRA, four models in bf16", "stock-full": "all weights"}[stock["run"]]
        before, after = stock["largest"], ours["largest"]
        speed = f"{after['tokens_per_s']:,.0f}"
        rows.append([f"{result['settings']['gib']:.0f} GiB, {what}", str(before["micro_batch"])])
        rows[-1] += [f"{before['tokens_per_s']:,.0f}", f"`{ours['run']}`", str(after["micro_batch"])]
        rows[-1].append(bold(speed) if after["tokens_per_s"] > 1.5 * before["tokens_per_s"] else speed)
    head = ["one H200, of which a process may have", "stock: sequences", "tokens/s", "", "sequences", "tokens/s"]
    return table(head, rows)


def rlhf_limits_says(result: dict) -> str:
    """How tokens/s grow with the batch, of the runs of `qlora` that had room for the most."""
    speed = {row["micro_batch"]: row["tokens_per_s"] for row in result["rows"] if row["run"] == "qlora" and row["fits"]}
    last = max(speed)
    few, many = (speed[batch] / speed[batch // 2] for batch in (last // 2, last))
    return paragraph(
        f"""Twice the sequences are {few:.1f} x the tokens/s with {last // 2} instead of {last // 4}, where Python
        bounds an iteration, and {many:.1f} x with {last} instead of {last // 2}, where the GPU is busy (`qlora`,
        {result["settings"]["gib"]:.0f} GiB)."""
    )


def rlhf_sft(result: dict) -> str:
    """Tokens/s, memory and losses of SFT with each recipe."""
    labels = {"stock": "stock ZeRO-3, bf16", "lossless": "`lossless`, bf16", "fp8-lm": "`fp8-lm`"}
    found, rows = {row["recipe"]: row for row in result["rows"]}, []
    for recipe, label in labels.items():
        row = found[recipe]
        factor = f"{row['tokens_s'] / found['lossless']['tokens_s']:.2f}"
        rows.append([label, f"{row['tokens_s']:,.0f}", bold(factor) if recipe == "fp8-lm" else factor])
        rows[-1] += [f"{row['memory_gb']:.1f} GB", ", ".join(f"{loss:.3f}" for loss in row["losses"])]
    steps = result["settings"]["warmup"] + result["settings"]["steps"]
    return table(["", "tokens/s", "x bf16", "peak", f"loss of the first and of the {steps}th step"], rows)


def rlhf_sft_says(stack: dict, memory: dict) -> str:
    """How much of it FP8 compute alone gives, and what the optimizer adds."""
    delayed = next(row for row in stack["stack"] if (row["run"], row["mode"]) == ("delayed", "eager"))
    states = {run["run"]: f"{run['states_per_trained_parameter']:.0f}" for run in memory["comparison"]}
    return paragraph(
        f"""FP8 compute alone gives {delayed["times_bf16"]:.2f} x; the recipe's optimizer also reads and writes
        {states["fp8-lm"]} bytes per parameter instead of {states["stock-full"]}."""
    )


def rlhf_quality(result: dict) -> str:
    """Rates of exact answers, with intervals over seeds."""
    found = {(line["recipe"], line["policy"]): line for line in result["lines"]}

    def interval(bounds: list[float]) -> str:
        return f"[{', '.join(f'{100 * bound:.1f}' for bound in bounds)}]"

    rows = []
    for recipe in dict.fromkeys(line["recipe"] for line in result["lines"]):
        rows.append(["bf16" if recipe == "stock" else f"`{recipe}`"])
        for policy in ("sft", "ppo", "grpo"):
            line = found[recipe, policy]
            rows[-1].append(f"{100 * line['mean']:.1f} % {interval(line['interval'])}")
            if policy != "sft":
                rows[-1].append(f"{100 * line['gain']:+.1f} {interval(line['gain_interval'])}")
    return table(["", "SFT", "after PPO", "gain of PPO", "after GRPO", "gain of GRPO"], rows)


def _gained(row: dict) -> tuple[str, str]:
    """Rates before and after PPO, and the points between them with their interval."""
    low, high = (f"{100 * bound:.1f}" for bound in row["gain_interval"])
    rates = (f"{100 * row[policy]['exact_match']:.1f} %" for policy in ("sft", "ppo"))
    return " to ".join(rates), f"{100 * row['gain']:+.1f} points [{low}, {high}]"


def rlhf_demo(result: dict) -> str:
    """Return what the demo comes to, here and with another CPU's instructions; and by the reward model alone."""
    found = {row["run"]: row for row in result["rows"]}
    demo, other, alone = (_gained(found[run]) for run in ("demo", "AVX2", "reward model alone"))
    keys = ("sft", "ppo", "curves")
    repeats = all(found["demo"][key] == found["again"][key] for key in keys)
    again = "the same figures, to the last digit" if repeats else f"{_gained(found['again'])[0]}"
    equal = all(found["demo"][key] == found["AVX2"][key] for key in keys)
    differs = "gives the same" if equal else f"gives {other[0]}, {other[1]}"
    return paragraph(
        f"""With seed {found["demo"]["seed"]} on {result["hardware"]["cpu_cores"]} cores of an
        {result["hardware"]["cpu"]} it took {found["demo"]["seconds"] / 60:.0f} minutes beside other work, and PPO took
        the rate of exact answers from {demo[0]}: {demo[1]}. A second run there gave {again}. With the seed and all
        else equal, but products as on CPUs without AVX-512, the same machine {differs}: sums in another order round
        differently, hundreds of steps and samples follow from that, and so another machine, or another version of
        torch, has other figures. By the reward model alone the rate goes from {alone[0]}, {alone[1]}."""
    )


TWO_NODES = "rlhf_step/h200-2-25gbit"
STEP_FILES = tuple(f"rlhf_step/h200-{name}{part}" for name in ("4-25gbit", "2-nvlink") for part in ("", "-full"))
FULL_H100 = "rlhf_step/h100-2-25gbit-full"
LIMITS = tuple(f"rlhf_limits/h200-1-local-{part}" for part in ("lora_24gib", "lora_40gib", "full_64gib"))


def rlhf_exact(result: dict) -> str:
    """Scores with exact differences of weights, which are stock's where gradients are exact too."""
    scores = {
        (row["recipe"], row["seed"]): [row[policy] for policy in ("sft", "ppo", "grpo")] for row in result["rows"]
    }
    seeds = sorted({seed for _, seed in scores})
    assert all(scores["stock", seed] == scores["lossless-exact", seed] for seed in seeds)
    said = paragraph(
        f"""With exact weight differences and the gradients of `lossless`, SFT, PPO and GRPO score the same as stock
        ZeRO-3, digit for digit, with each of {len(seeds)} seeds ({result["settings"]["ranks"]} CPU ranks as
        {result["settings"]["ranks"]} nodes, {result["settings"]["iterations"]} iterations). With quantized gradients
        (`zeropp-exact`) the means are inside stock's intervals, which are wide with so few seeds:"""
    )
    return f"{said}\n\n{rlhf_quality(result)}"


BLOCKS = {
    "rlhf_step": Block(rlhf_step, (TWO_NODES, *STEP_FILES), cut_short=("rlhf_step/h200-4-25gbit",)),
    "rlhf_step_says": Block(rlhf_step_says, (TWO_NODES, "rlhf_step/h200-4-25gbit-full", "rlhf_step/h200-4-nvlink")),
    "rlhf_step_h100": Block(rlhf_step_h100, (FULL_H100,)),
    "rlhf_gives": Block(rlhf_gives, (TWO_NODES, FULL_H100)),
    "rlhf_memory": Block(rlhf_memory, ("rlhf_step/h200-1-local",)),
    "rlhf_limits": Block(rlhf_limits, LIMITS),
    "rlhf_limits_says": Block(rlhf_limits_says, (LIMITS[1],), sourced=False),  # the table above names it
    "rlhf_sft": Block(rlhf_sft, ("rlhf_sft/h200-1-local",)),
    "rlhf_sft_says": Block(rlhf_sft_says, ("fp8_stack/h200-1-local-transformers", "rlhf_step/h200-1-local")),
    "rlhf_quality": Block(rlhf_quality, ("rlhf_quality/h200-1-local",)),
    "rlhf_exact": Block(rlhf_exact, ("rlhf_quality/cpu-2-gloo-exact",), cut_short=("rlhf_quality/cpu-2-gloo-exact",)),
    "rlhf_demo": Block(rlhf_demo, ("rlhf_demo/cpu-2-gloo",)),
}
