"""FP8-LM: steps, exchange, memory, limits, losses, scaling policies, its optimizer, and plans of whole tensors."""

from __future__ import annotations

import statistics

from benchmarks.harness.sizes import SIZES, Size
from benchmarks.report.blocks import Block, bold, code_of, paragraph, table
from benchmarks.report.rows import GIB

LABELS = {
    "stock": "stock ZeRO-3, bf16",
    "stock-leaf": "stock ZeRO-3, decoder layers as z3 leaf modules",
    "lossless": "`lossless`",
    "fp8-compute": "FP8 compute alone",
    "fp8-lm-o1": "`fp8-lm-o1`",
    "fp8-lm-o2": "`fp8-lm-o2`",
    "fp8-lm": "`fp8-lm`",
}


def lines_of(*results: dict) -> dict[str, dict]:
    """Return what was compared, by run; the first result that has a run counts."""
    found: dict[str, dict] = {}
    for result in results:
        for line in result["comparison"]:
            found.setdefault(line["run"], line)
    return found


def step(*results: dict) -> str:
    """A step between two nodes."""
    lines, rows = lines_of(*results), []
    best = min(line["step_ms"] for line in lines.values())
    for run, line in lines.items():
        times = f"{lines['stock']['step_ms'] / line['step_ms']:.2f}"
        sent = line.get("inter_bytes_per_node_step") or line["tx_bytes_per_node_step"]
        row = [LABELS[run], f"{line['step_ms']:.0f}", bold(times) if line["step_ms"] == best else times]
        rows.append([*row, f"{sent / 1e6:.0f}", f"{line['peak_gib']:.1f}"])
    return table(["", "ms per step", "x stock", "MB a node sends", "peak of a rank, GiB"], rows)


def step_says(*results: dict) -> str:
    """Return what bounds a step."""
    floor = {run: f"{line['floor_ms']:.0f}" for run, line in lines_of(*results).items() if line["floor_ms"]}
    assert floor["lossless"] == floor["fp8-compute"] and floor["fp8-lm-o1"] == floor["fp8-lm-o2"]
    return paragraph(
        f"""The bytes alone need {floor["lossless"]} ms without FP8 gradients, {floor["fp8-lm-o2"]} ms with `fp8-lm-o1`
        and `fp8-lm-o2`, and {floor["fp8-lm"]} ms with `fp8-lm`: the link bounds all of them."""
    )


def exchange(result: dict) -> str:
    """The exchange of gradients, in all ways."""
    labels = {
        "fp32": "fp32, one reduce-scatter",
        "bf16": "bf16, one reduce-scatter",
        "bf16-two-hop": "bf16, two hops",
        "fp8": "FP8, shared scales (`fp8-lm-*`)",
        "int8-int4": "INT8 / INT4 (`zeropp`)",
    }
    rows = []
    for line in result["comparison"]:
        below = f"{line['time_below_bf16']:.0f} %" if line["time_below_bf16"] > 0 else ""
        row = [labels[line["run"]], *(f"{line[key]:.0f}" for key in ("ms", "megabytes", "megabytes_between_nodes"))]
        rows.append([*row, bold(below) if line["run"] == "fp8" else below])
    return table(["", "ms", "MB a rank sends", "of these between nodes", "time below bf16"], rows)


def one_gpu(result: dict, slow: dict) -> str:
    """Tokens per second where nothing is sent, and on a host whose Python bounds steps in FP8."""
    lines, slower, rows = lines_of(result), lines_of(slow), []
    best = max(line["mfu"] for line in lines.values())
    for run, line in lines.items():
        share = f"{100 * line['mfu']:.1f} %"
        rows.append([LABELS[run], f"{line['tokens_per_s']:,.0f}", bold(share) if line["mfu"] == best else share])
    times = {run: slower["lossless"]["step_ms"] / slower[run]["step_ms"] for run in ("fp8-compute", "fp8-lm")}
    steps = [ms for row in slow["rows"] if row["run"] == "fp8-lm" for ms in row["times_ms"]]
    said = paragraph(
        f"""On a host with a slower CPU, where steps of `fp8-lm` take {min(steps):.0f} to {max(steps):.0f} ms, FP8
        compute alone reaches {times["fp8-compute"]:.2f} of the tokens/s of `lossless`, and `fp8-lm`
        {times["fp8-lm"]:.2f}."""
    )
    return table(["", "tokens/s", "of the GPU's bf16 peak"], rows) + f"\n\n{said}"


def memory(result: dict) -> str:
    """Model states and the peak of a step."""
    lines = lines_of(result)
    peaks = {row["run"]: row["peak_bytes"] / GIB for row in result["rows"]}

    def cells(run: str) -> list[str]:
        return [f"{lines[run]['states_per_parameter']:.1f}", f"{peaks[run]:.1f} GiB"]

    assert cells("fp8-lm-o2") == cells("fp8-lm")
    states, peak = cells("fp8-lm-o2")
    weights = lines["fp8-lm-o2"]["weights_per_parameter"]
    states += f" ({weights:.0f} weights, {lines['fp8-lm-o2']['states_per_parameter'] - weights:.0f} states)"
    rows = [["stock ZeRO-3, bf16, fp32 AdamW", *cells("stock-leaf")], [LABELS["fp8-lm-o1"], *cells("fp8-lm-o1")]]
    below = 100 * (1 - peaks["fp8-lm-o2"] / peaks["stock-leaf"])
    rows.append(["`fp8-lm-o2`, `fp8-lm`", states, f"{peak}, {below:.0f} % less"])
    return table(["", "bytes per parameter", "peak of a step"], rows)


def limits_say(batch: dict, context: dict) -> str:
    """The largest batch and context."""
    (batch_base, batch_o2), (base, o2) = (
        [lines_of(result)[run]["largest"] for run in ("lossless", "fp8-lm-o2")] for result in (batch, context)
    )
    assert lines_of(context)["fp8-lm-o2"]["too_large"] is None, "nobody knows what does not fit"
    return paragraph(
        f"""With `fp8-lm-o2` instead of `lossless` the largest batch of 1,024 tokens grows from
        {batch_base["micro_batch"]} ({batch_base["tokens_per_s"]:,.0f} tokens/s) to {batch_o2["micro_batch"]}
        ({batch_o2["tokens_per_s"]:,.0f} tokens/s), and the longest sequence from {base["sequence"]:,}
        ({base["tokens_per_s"]:,.0f} tokens/s) to at least {o2["sequence"]:,} tokens ({o2["tokens_per_s"]:,.0f}
        tokens/s; {code_of("fp8_lm_limits")})."""
    )


def convergence_of(result: dict) -> str:
    """Return what the table of losses is."""
    line = lines_of(result)["bf16"]
    return paragraph(
        f"""{result["rows"][0]["parameters"] / 1e6:.0f} M parameters, {result["rows"][0]["tokens"] / 1e6:.0f} million
        tokens, one H200 (`python -m benchmarks.fp8_lm_convergence`). The seeds of bf16 differ by
        {line["seed_spread_percent"]:.1f} %; differences are to bf16 of the same seeds:"""
    )


def convergence(result: dict) -> str:
    """Held-out losses."""
    labels = {
        "bf16": "bf16, fp32 AdamW",
        "fp8-lm-o2": "`fp8-lm-o2`",
        "fp8-lm-o1": "`fp8-lm-o1`",
        "scales_block": "`fp8-lm-o2`, scales per block",
        "master_fp8": "`fp8-lm-o2`, master weights FP8",
        "exp_avg_sq_fp8": "`fp8-lm-o2`, second moment FP8",
    }
    lines, rows = lines_of(result), []
    for run, label in labels.items():
        line = lines[run]
        above = line["percent_above_bf16"]
        text = "diverged" if above > 100 else f"{above:+.{0 if above > 10 else 2}f} %"
        rows.append([label, f"{line['held_out_loss']:.4f}", "" if run == "bf16" else text, str(len(line["seeds"]))])
    return table(["", "held-out loss", "against bf16", "seeds"], rows)


def four_ranks_say(one: dict, four: dict) -> str:
    """The same with sums over ranks."""
    lines = lines_of(four)
    seeds = [row["held_out_loss"] for row in one["rows"] if row["run"] == "bf16"]
    worst = max(line["held_out_loss"] for line in lines.values())
    assert min(seeds) <= worst <= max(seeds), "more than bf16's seeds differ by"
    return paragraph(
        f"""Master weights and the second moment must not be FP8, as the paper found. With four ranks (`--ranks 4`, one
        seed), where FP8 sums over ranks count too, `fp8-lm-o1` is
        {lines["fp8-lm-o1"]["percent_above_bf16"]:.2f} % and `fp8-lm` {lines["fp8-lm"]["percent_above_bf16"]:.2f} %
        above bf16 ({lines["bf16"]["held_out_loss"]:.4f}): more than the target of
        {lines["fp8-lm"]["target_percent"]} %, but inside the range of bf16's own seeds ({min(seeds):.4f} to
        {max(seeds):.4f})."""
    )


def policies(result: dict) -> str:
    """Signal to noise and what vanished, of the last ten steps."""
    rows = []
    for policy in ("pre", "post", "auto"):
        cells = []
        for row in result["rows"]:
            series = row["policies"][policy]
            assert len(series["snr_db"]) == 20
            decibels, vanished = (statistics.fmean(series[key][10:]) for key in ("snr_db", "vanished"))
            cells.append(f"{decibels:.1f} dB, {100 * vanished:.1f} %")
        rows.append([f"`{policy}`", *cells])
    return table(["", *(f"{row['ranks']} ranks" for row in result["rows"])], rows)


def optimizer(result: dict) -> str:
    """The step of the largest model."""
    labels = {
        "block scales, fp8 gradients": "FP8 AdamW, scales per block",
        "tensor scales, fp8 gradients": "FP8 AdamW, scales per tensor",
        "DeepSpeed FusedAdam, fp32": "DeepSpeed's FusedAdam, fp32",
        "torch.optim.AdamW(fused), fp32": "torch's fused AdamW, fp32",
    }
    largest = max(row["parameters"] for row in result["rows"])
    found = {row["step"]: row for row in result["rows"] if row["parameters"] == largest}
    rows = []
    for name, label in labels.items():
        row = found[name]
        figures = f"{row['ms']:.2f}", f"{row['bytes_per_parameter']:.1f}", f"{100 * row['share_of_copy']:.0f} %"
        rows.append([label, *figures])
    return table(["", "ms", "bytes moved per parameter", "of a copy's bandwidth"], rows)


def muon_step(result: dict) -> str:
    """A step of Muon on one GPU, and its iteration alone."""
    found = {row["step"]: row for row in result["rows"]}
    muon, iteration, adam = (found[name] for name in ("Muon, gram", "Newton-Schulz, gram", "all fp32, bf16 gradients"))
    standard = found["Newton-Schulz, standard"]
    return paragraph(
        f"""A step of Muon on the layers' matrices of a Llama, {muon["parameters"] / 1e6:.0f} million parameters on one
        H200, takes {muon["ms"]:.0f} ms, of which the iteration takes {iteration["ms"]:.0f}, at
        {iteration["tflops"]:.0f} TFLOP/s ({standard["ms"]:.0f} ms with the method "standard"). AdamW takes
        {adam["ms"]:.1f} ms."""
    )


def owners_plan() -> str:
    """Balance of whole tensors, planned here for two Llamas."""
    from zeropp_fp8.zero.owners.plan import balance_of, plan_parts

    models, rows = {"Llama-7B": SIZES["7b"], "Llama-3-8B": SIZES["8b"]}, []
    for name, size in models.items():
        tensors = tensors_of(size)
        for ranks in (8, 32):
            cells = []
            for split in ("none", "balance"):
                memory, _, mean_block, _ = balance_of(tensors, plan_parts(tensors, ranks, 8, split), ranks)
                cells.append(f"{memory:.3f} / {mean_block:.2f}")
            rows.append([f"{name}, {ranks} ranks", *cells])
    return table(["", "plain greedy: memory / a block's exchange (mean block)", "`balance`"], rows)


def tensors_of(size: Size) -> list:
    """A Llama with an untied head: 6 bytes of states and 2 of gradient an element, and one on the wire."""
    from zeropp_fp8.zero.owners.plan import TensorStates

    hidden, kv = size.hidden, size.hidden // size.heads * size.kv_heads
    matrices = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    matrices += [(size.intermediate, hidden)] * 2 + [(hidden, size.intermediate)]
    shapes = [((size.vocabulary, hidden), None)]
    shapes += [(shape, block) for block in range(size.layers) for shape in (*matrices, (hidden,), (hidden,))]
    shapes += [((hidden,), None), ((size.vocabulary, hidden), None)]
    return [TensorStates(str(number), shape, 8.0, block, 1.0) for number, (shape, block) in enumerate(shapes)]


def gives(nodes: dict, whole: dict, alone: dict, sizes: dict) -> str:
    """The summary of its page: two nodes, one GPU, memory."""
    lines, share = lines_of(nodes, whole), {run: f"{100 * each['mfu']:.1f} %" for run, each in lines_of(alone).items()}
    states = {row["run"]: f"{row['states_per_parameter']:.0f}" for row in sizes["rows"]}
    return paragraph(
        f"""Two nodes at 25 Gbit/s take {lines["fp8-lm"]["step_ms"]:.0f} ms per step instead of stock's
        {lines["stock"]["step_ms"]:.0f}, one H200 reaches {share["fp8-lm-o2"]} of its bf16 peak instead of
        {share["stock-leaf"]}, and states and weights take {states["fp8-lm"]} bytes per parameter instead of
        {states["stock-leaf"]}. Master weights and the second moment must not be FP8, as the paper found. Speed and
        memory are in [Results](results-features.md#fp8-lm), losses in [Quality](results-quality.md#fp8-lm)."""
    )


STEP = ("fp8_lm_step/h200-4-25gbit", "fp8_lm_step/h200-4-25gbit-o3")
ONE_GPU, FOUR_GPUS = "fp8_lm_convergence/h200-1-local", "fp8_lm_convergence/h200-4-nvlink"
BLOCKS = {
    "fp8_lm_step": Block(step, STEP),
    "fp8_lm_step_says": Block(step_says, STEP, sourced=False),
    "fp8_lm_exchange": Block(exchange, ("fp8_lm_exchange/h200-4-25gbit",)),
    "fp8_lm_one_gpu": Block(one_gpu, ("fp8_lm_step/h200-1-local", "fp8_lm_step/h200-1-local-slow_host")),
    "fp8_lm_memory": Block(memory, ("fp8_lm_memory/h200-1-local",)),
    # The page that the paragraph names has the sources.
    "fp8_lm_gives": Block(gives, (*STEP, "fp8_lm_step/h200-1-local", "fp8_lm_memory/h200-1-local"), sourced=False),
    "fp8_lm_limits_say": Block(limits_say, ("fp8_lm_limits/h200-1-local-batch", "fp8_lm_limits/h200-1-local-sequence")),
    "fp8_lm_convergence_of": Block(convergence_of, (ONE_GPU,), sourced=False),
    "fp8_lm_convergence": Block(convergence, (ONE_GPU,)),
    "fp8_lm_four_ranks_say": Block(four_ranks_say, (ONE_GPU, FOUR_GPUS)),
    "fp8_lm_policies": Block(policies, ("fp8_lm_policies/h200-1-local",), cut_short=("fp8_lm_policies/h200-1-local",)),
    "optimizer": Block(optimizer, ("optimizer/h200-1-local",)),
    "muon_step": Block(muon_step, ("optimizer/h200-1-local-muon",)),
    "owners_plan": Block(owners_plan),
}
