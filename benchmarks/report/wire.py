"""The blocks of wire_convergence, where a result is one run and their number grows, and of weight_fidelity."""

from __future__ import annotations

import math
import statistics

from benchmarks.harness import seeds
from benchmarks.harness.results import RESULTS
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.wire_runs import IN_TREE, LOSSLESS, ORDER, REFERENCES, groups_of
from benchmarks.report.blocks import Block, paragraph, since, table
from benchmarks.weight_changes import MANY, compare
from benchmarks.weight_fidelity import RUNS
from zeropp_fp8.config import difference_bits

QUESTION = "wire_convergence"
FILES = tuple(f"{QUESTION}/{path.stem}" for path in sorted((RESULTS / QUESTION).glob("*.json")))
LR = 6e-4  # of all large runs that are compared with each other
MUON = ("lossless-muon", "zeropp-int8-muon", "zeropp-muon")
_LARGE, _SMALL = "h200-2-sockets-pretrain-100m", "cpu-2-gloo-pretrain-tiny-bytes"
OF_MUON = tuple(
    name
    for name in FILES
    if ("-muon-" in name and name.partition("/")[2].startswith((_LARGE, _SMALL)))
    or name
    in {
        f"{QUESTION}/{_LARGE}-lossless-0",
        f"{QUESTION}/{_LARGE}-lossless-0-lr1.2e-3",
        *(f"{QUESTION}/{_SMALL}-lossless-{seed}-150_steps" for seed in range(3)),
    }
)
CASES = {"pretrain": "Pretraining", "sft": "Fine-tuning on docstrings"}


def compared(*results: dict) -> str:
    """A table for each group of runs that can be compared, large models first; Muon has a page of its own."""
    if not results:
        return "No results are kept yet."
    groups = groups_of([result for result in results if result["run"] not in MUON])
    groups = [group for group in groups if len({row["run"] for row in group["rows"]}) > 1]
    groups.sort(key=lambda group: -group["rows"][0]["parameters"])
    return "\n\n".join(_of_group(group) for group in groups)


def _of_group(group: dict) -> str:
    row, chosen = group["rows"][0], group["settings"]
    commits = ", ".join(dict.fromkeys(since(each) for each in group["rows"]))
    reference = next((line["reference"] for line in group["comparison"] if "reference" in line), None)
    millions, experts = row["parameters"] / 1e6, chosen.get("model", {}).get("experts")
    chosen_by = f" of a mixture ({chosen['model']['chosen']} of {experts} experts per token)" if experts else ""
    head = f"""{CASES[chosen["case"]]}, {millions:.{0 if millions >= 1 else 1}f} M parameters{chosen_by},
        {row["tokens"] / 1e6:.1f} M tokens, {chosen["ranks"]} ranks as {chosen["nodes"]} nodes,
        {group["hardware"]["gpu"] or group["hardware"]["cpu"]},
        {_rate(chosen)}"""
    if reference:
        head += f"; differences are from `{reference}`"
    rows = [
        [
            f"`{line['run']}`",
            str(line["runs"]),
            _with_half(line["mean"], line["half_width"], ".4f"),
            "" if line["stdev"] is None else f"{line['stdev']:.4f}",
            f"{line['percent']:+.2f} %" if "percent" in line else "",
            {True: "yes", False: "below" if line.get("percent", 0) < 0 else "no", None: ""}[
                line.get("inside_interval")
            ],
            _with_half(line["paired_percent"], line["paired_half_width"], "+.2f", " %")
            if "paired_percent" in line
            else "",
        ]
        for line in group["comparison"]
    ]
    columns = [
        "",
        "runs",
        "held-out loss",
        "spread",
        "mean's difference",
        "in the interval",
        "paired by seed",
    ]
    text = f"{paragraph(f'{head} ({commits}):')}\n\n{table(columns, rows)}"
    apart = {line["run"]: line["apart_by_seed"].values() for line in group["comparison"] if line["apart_by_seed"]}
    says = [
        f"Repeated runs of one seed of `{run}` differ by up to {', '.join(f'{each:.2f}' for each in percents)} %."
        for run, percents in apart.items()
    ]
    return "\n\n".join([text, *map(paragraph, says)])


def _rate(chosen: dict) -> str:
    least = chosen["least_rate"]
    after = "constant" if least == 1 else f"cosine to {100 * least:g} %"
    return f"learning rate {chosen['lr']:g} ({after})"


def together(*results: dict) -> str:
    """Pretraining of 85 M parameters on whatever GPUs: what a recipe costs, with the interval of that."""
    others = (IN_TREE, *MUON)
    rows = [result for result in results if result["settings"]["size"] == "100m" and result["run"] not in others]
    rows = [row for row in rows if (row["settings"]["case"], row["settings"]["lr"]) == ("pretrain", LR)]
    (tokens,) = {row["tokens"] for row in rows}
    lines = {line["run"]: line for line in seeds.compare(rows, REFERENCES)}
    base = lines[LOSSLESS]
    said = []
    for run in (run for run in ORDER if run in lines and run != LOSSLESS):
        line = lines[run]
        half = 100 * math.hypot(line["half_width"], base["half_width"]) / base["mean"]
        said.append(f"`{run}` {line['percent']:+.2f} ± {half:.2f} % ({line['runs']} runs)")
    hardware = {row["hardware"]["gpu"].removeprefix("NVIDIA ").removesuffix(" 80GB HBM3") for row in rows}
    ranks = " and ".join(str(count) for count in sorted({row["settings"]["ranks"] for row in rows}))
    return paragraph(
        f"""All runs with 85 M parameters, {tokens / 1e6:.1f} M tokens and a learning rate of {LR:g}, on {ranks}
        {" and ".join(sorted(hardware))}: difference to the mean of {base["runs"]} runs of `{LOSSLESS}`, with its 95 %
        interval: {", ".join(said)}. The target is {seeds.TARGET_PERCENT} %."""
    )


def checkpoints_say(*results: dict) -> str:
    """How much the 16-bit weights of a checkpoint are above the reference of the same seed, where codes were INT4."""
    found: dict[str, list[float]] = {}
    for group in groups_of([result for result in results if result["settings"]["size"] == "100m"]):
        lossless: dict[int, list[float]] = {}
        for row in (row for row in group["rows"] if row["run"] == LOSSLESS):
            lossless.setdefault(row["seed"], []).append(row["held_out_loss"])
        for row in (row for row in group["rows"] if row["run"] == "zeropp-4bit"):
            above = row["checkpoint_loss"] / statistics.fmean(lossless[row["seed"]]) - 1
            found.setdefault(group["settings"]["case"], []).append(100 * above)
    span = {
        case: " to ".join(dict.fromkeys((f"{min(above):.1f}", f"{max(above):.1f}"))) for case, above in found.items()
    }
    return paragraph(
        f"""With `zeropp-4bit` a checkpoint holds unrounded 16-bit weights, and the model has adapted to rounded ones:
        with 85 M parameters the loss of a checkpoint is {span["pretrain"]} % above the reference after pretraining
        and {span["sft"]} % after fine-tuning."""
    )


def with_muon(*results: dict) -> str:
    """Held-out losses of Muon by seed, with gradients as they are and rounded."""
    found: dict[int, dict[str, dict[int, dict]]] = {}
    for result in results:
        rate = result.get("muon_lr") or result["settings"]["lr"]
        name = f"`{result['run']}`, {'Muon' if result['run'] in MUON else 'AdamW'} at {rate:g}"
        found.setdefault(result["parameters"], {}).setdefault(name, {})[result["seed"]] = result
    rows = []
    for parameters in sorted(found, reverse=True):
        plain = next(of for of in found[parameters].values() if any(row["run"] == MUON[0] for row in of.values()))
        for name in sorted(found[parameters]):
            of_run = [row for _, row in sorted(found[parameters][name].items())]
            losses = [row["held_out_loss"] for row in of_run]
            percents = [100 * (row["held_out_loss"] / plain[row["seed"]]["held_out_loss"] - 1) for row in of_run]
            cells = [", ".join(f"{loss:.4f}" for loss in losses)]
            cells += ["" if of_run[0]["run"] == MUON[0] else ", ".join(f"{percent:+.2f}" for percent in percents)]
            cells += ["" if of_run[0]["run"] == MUON[0] else f"{sum(percents) / len(percents):+.2f}"]
            cells += [", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in of_run))]
            rows.append([f"{parameters / 1e6:.2g} M", name, *cells])
    columns = ["parameters", "", "held-out loss, by seed", "beside `lossless-muon`, %", "mean, %", "commit"]
    return f"{table(columns, rows)}\n\nSource: the files of these runs in `benchmarks/results/{QUESTION}`."


def _with_half(mean: float, half_width: float | None, form: str, unit: str = "") -> str:
    text = f"{mean:{form}}"
    return text + ("" if half_width is None else f" ± {half_width:{form.lstrip('+')}}") + unit


def by_run(result: dict) -> dict[str, list[dict]]:
    """The rows of each run of weight_fidelity, one a seed. A result may hold runs that there are no more."""
    return {run: [row for row in result["rows"] if row["run"] == run] for run in RUNS}


def decibels(rows: list[dict], point: int, of: str = "db") -> float | None:
    """The mean over seeds after a share of the steps; None: exact."""
    values = [row["steps"][point][of] for row in rows]
    return None if None in values else statistics.fmean(values)


def weight_fidelity(result: dict) -> str:
    """Return what each format gives a forward, and takes."""
    chosen, found, row = result["settings"], by_run(result), result["rows"][0]
    hardware = result["hardware"].get("gpu") or result["hardware"]["cpu"]
    head = f"""{row["parameters"] / 1e6:.1f} M parameters, {row["tokens"] / 1e6:.1f} M tokens of the Python standard
        library's source in {chosen["steps"]} steps, {len(found["bf16"])} seeds, learning rate {chosen["lr"]:g} with a
        cosine to {100 * chosen["least_rate"]:g} %, {hardware}. *Sent*: weights between nodes per step after the first,
        in M, times (N-1)/N. *Copy*: bytes per parameter that a node keeps. *dB*: signal-to-noise ratio of the matrices
        that the forward pass uses. *Loss*: held-out loss of each seed against `bf16` with the same seed:"""

    def db(rows: list[dict], point: int, of: str = "db") -> str:
        value = decibels(rows, point, of)
        return "exact" if value is None else f"{value:.1f}"

    by_seed, table_rows, last = paired_losses(result), [], len(row["steps"]) - 1
    for run, rows in found.items():
        cells = [run, f"{sent(rows):.3f}", f"{rows[0]['kept_bytes_a_parameter']:.2f}"]
        cells += [db(rows, last // 2), db(rows, last), db(rows, last, "fp8_db"), by_seed.get(run, "")]
        table_rows.append(cells)
    columns = ["", "sent", "copy", "dB, half-way", "dB, end", "in FP8", "loss, by seed"]
    return f"{paragraph(head)}\n\n{table(columns, table_rows)}"


def sent(rows: list[dict]) -> float:
    """Of M, weights per step after the first."""
    return rows[0]["later_bytes_a_parameter"] / 2


def paired_losses(result: dict) -> dict[str, str]:
    """How much each run's held-out loss is above that of bf16 of the same seed, seed by seed."""
    lines = seeds.compare(result["rows"], ["bf16"])
    return {
        line["run"]: ", ".join(f"{percent:+.1f}" for percent in line["paired_by_seed"].values()) + " %"
        for line in lines
        if "paired_by_seed" in line
    }


def weight_fidelity_says(result: dict) -> str:
    """Whether a choice between INT8 and INT4 is worth anything beside exact differences."""
    found, last = by_run(result), len(result["rows"][0]["steps"]) - 1
    switched = [name for name in found if " at " in name]
    least = min(switched, key=lambda name: sent(found[name]))
    db = {name: f"{decibels(found[name], last):.1f}" for name in ("int8", "int4")}
    copy = {name: f"{found[name][0]['kept_bytes_a_parameter']:.2f}" for name in ("bf16", "int8", "int4")}
    exact = [f"{difference_bits(rate) / 16:.2f} M at {rate:g}" for rate in (1e-5, 1e-4, 1e-3)]
    return paragraph(
        f"""A choice that changes during training sends between {sent(found["int4"]):.3f} M of weights per step (always
        INT4) and {sent(found["int8"]):.3f} M (always INT8); the cheapest one above, `{least}`, sends
        {sent(found[least]):.3f} M. It needs memory for a copy of {copy["int8"]} bytes per parameter as soon as it uses
        INT8. At the end INT8 gives {db["int8"]} dB and INT4 {db["int4"]} dB. Exact differences lose nothing, need a
        copy of {copy["bf16"]} bytes and send, under AdamW, about {", ".join(exact)}; up to 1e-4 they send
        less than INT4. If only {copy["int4"]} bytes fit, INT4 is the only choice; without any copy, `weights.format`
        may change at each resume. So there is no "auto". Losses of such small runs differ by more between seeds than
        between formats, and decide nothing."""
    )


def weight_changes(*results: dict) -> str:
    """Bits of a weight's change in each code, the least and the most of steps after the first two, by run.

    Of larger models bf16 alone. A run that several results have is that of the first."""
    codes = {"entropy": "entropy"} | {code: f"`{code}`" for code in ("exact", "int8", "fp8")}
    rows, seen = [], set()
    for result in results:
        size = SIZES[result["settings"]["size"]]
        lines = [line for line in compare(result["rows"]) if (size, line["run"]) not in seen]
        seen |= {(size, line["run"]) for line in lines}
        for line in lines:
            if size.parameters < MANY or line["dtype"] == "bf16":
                name = line["run"] + (", critic" if line["engine"] else "")
                rows.append([f"{size.parameters / 1e6:.2g} M", name, line["dtype"], f"{line['lr']:g}"])
                rows[-1] += [f"{100 * least:.1f} to {100 * most:.1f}" for least, most in (line["changed"],)]
                rows[-1] += [f"{least:.2f} to {most:.2f}" for least, most in (line[code] for code in codes)]
    return table(["model", "run", "dtype", "largest rate", "changed, %", *codes.values()], rows)


_FIDELITY = {"files": ("weight_fidelity/cpu-1-local",), "cut_short": ("weight_fidelity/cpu-1-local",)}
BLOCKS = {
    "weight_changes": Block(
        weight_changes,
        tuple(
            f"weight_changes/{name}-1-local{what}"
            for name, what in (
                *(("h200", what) for what in ("-sft", "", "-sgd", "-ppo_1e-5", "-ppo_1e-6")),
                ("cpu", ""),
            )
        ),
        cut_short=("weight_changes/h200-1-local",),
    ),
    "muon_quality": Block(with_muon, OF_MUON, sourced=False),
    "wire_convergence_together": Block(together, FILES, sourced=False),
    "wire_convergence": Block(compared, FILES, sourced=False),
    "checkpoints_say": Block(checkpoints_say, FILES, sourced=False),
    "weight_fidelity": Block(weight_fidelity, **_FIDELITY),
    "weight_fidelity_says": Block(weight_fidelity_says, **_FIDELITY),
}
