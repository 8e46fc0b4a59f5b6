"""What the parts of fp8_lm.py have measured, compared with the targets and printed."""

from __future__ import annotations

import statistics
import sys

import fp8_lm_exchange
import fp8_lm_profile
import limits
from fp8_lm_runs import STOCK

BASE = "lossless"  # bf16 with fp32 AdamW, what others are compared with where it was run; else stock
# Bytes a parameter of gradients, master weights and moments, without weights and scales.
STATE_TARGETS = {"fp8-lm-o2": 6.0, "fp8-lm": 6.0}
STATE_TOLERANCE = 5.0  # percent of states and weights together
PEAK_TARGET = 30.0  # percent that the step's peak is below the base's
MAX_SLOWDOWN = 10.0  # percent that fp8-lm may be slower than fp8-lm-o2 between nodes


def cell(value: float | None, digits: int = 1, unit: float = 1.0, sign: str = "") -> str:
    return "-" if value is None else f"{value / unit:{sign}.{digits}f}"


def short_line(row: dict) -> str:
    """What is printed once a row is there."""
    if row["part"] == "memory":
        return f"{row['run']}: {row['states_per_parameter']:.3f} bytes a parameter"
    if row["part"] == "exchange":
        return f"{row['run']}: {row['ms']:.1f} ms"
    return f"{row['run']}, round {row['round']}: {row['step_ms']:.1f} ms a step, {row['tokens_per_s']:.0f} tokens/s"


def base_of(by_run: dict[str, dict]) -> dict | None:
    """The line that others are compared with."""
    return next((by_run[run] for run in (BASE, *reversed(STOCK)) if run in by_run), None)


def compare_memory(rows: list[dict]) -> list[dict]:
    """Bytes a parameter of each run, and whether they meet the targets; the base is the leanest run in bf16."""
    by_run, lines = {row["run"]: row for row in rows}, []
    base_peaks = [row["peak_bytes"] for row in rows if row["run"] in (BASE, *STOCK) and row["peak_bytes"] is not None]
    for run, row in by_run.items():
        line = {"run": run}
        line |= {key: row[key] for key in row if key.endswith("_per_parameter")}
        if run in STATE_TARGETS:
            expected = STATE_TARGETS[run] + row["weights_per_parameter"]
            line["states_percent_above_target"] = 100 * (row["states_per_parameter"] / expected - 1)
            line["states_met"] = line["states_percent_above_target"] <= STATE_TOLERANCE
        if base_peaks and row["peak_bytes"] is not None:
            line["peak_percent_below_base"] = 100 * (1 - row["peak_bytes"] / min(base_peaks))
            if run in STATE_TARGETS:
                line["peak_met"] = line["peak_percent_below_base"] >= PEAK_TARGET
        lines.append(line)
    return lines


def show_memory(result: dict) -> None:
    settings, rows = result["settings"], {row["run"]: row for row in result["rows"]}
    numel = next(iter(rows.values()))["parameters"]
    print(
        f"\nBytes a parameter on each of {settings['ranks']} rank(s), {numel / 1e9:.3f} B parameters, micro-batch "
        f"{settings['micro_batch']} x {settings['sequence']} tokens. Targets: states 6 + weights, at most "
        f"{STATE_TOLERANCE:g} % more; peak at least {PEAK_TARGET:g} % below bf16 with fp32 AdamW"
    )
    print(
        f"{'':<14}{'weights':>9}{'states':>9}{'of':>9}{'codes':>9}{'after':>9}{'peak':>9}{'peak':>9}{'peak':>12}\n"
        f"{'':<14}{'':>9}{'':>9}{'target':>9}{'alone':>9}{'a step':>9}{'':>9}{'GiB':>9}{'below base':>12}"
    )
    for line in result["comparison"]:
        row = rows[line["run"]]
        above, below = line.get("states_percent_above_target"), line.get("peak_percent_below_base")
        verdicts = [line[key] for key in ("states_met", "peak_met") if key in line]
        verdict = "" if not verdicts else "met" if all(verdicts) else "MISSED"
        print(
            f"{line['run']:<14}{line['weights_per_parameter']:>9.3f}{line['states_per_parameter']:>9.3f}"
            f"{'-' if above is None else f'{above:+.1f} %':>9}{cell(line['codes_per_parameter'], 3):>9}"
            f"{line['rest_per_parameter']:>9.3f}"
            f"{cell(line['peak_per_parameter'], 2):>9}{cell(row['peak_bytes'], 2, 2**30):>9}"
            f"{'-' if below is None else f'{below:.1f} %':>12}{verdict:>9}"
        )


def compare_throughput(rows: list[dict], settings: dict) -> list[dict]:
    """A line a run over its rounds; its speed against the faster stock, `lossless` and FP8 compute alone."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        medians = [row["step_ms"] for row in mine]
        line = {
            "run": run,
            "step_ms": statistics.median(medians),
            "step_ms_by_round": medians,
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in mine),
            "mfu": statistics.median(row["mfu"] for row in mine),
            "losses": [mine[0]["losses"][0], mine[0]["losses"][-1]],
        }
        for key in ("peak_gib", "floor_ms", "tx_bytes_per_node_step", "gradient_bytes", "gradient_scales"):
            line[key] = mine[-1].get(key)
        if "communication_ms" in mine[-1].get("profile", ()):
            line |= {key: mine[-1]["profile"][key] for key in ("communication_ms", "exposed_ms")}
        if "wire" in mine[-1]:
            per_step = mine[-1]["wire"]["per_step"].values()
            line["inter_bytes_per_node_step"] = sum(kind["inter"] for kind in per_step) / settings["nodes"]
        lines.append(line)
    by_run = {line["run"]: line for line in lines}
    stock = min((by_run[run] for run in STOCK if run in by_run), key=lambda line: line["step_ms"], default=None)
    others = {"times_stock": stock, "times_bf16": base_of(by_run), "times_fp8_compute": by_run.get("fp8-compute")}
    for name, other in others.items():
        for line in lines:
            line[name] = None if other is None else other["step_ms"] / line["step_ms"]
    if {"fp8-lm", "fp8-lm-o2"} <= set(by_run) and settings["gbit"]:
        slower = 100 * (by_run["fp8-lm"]["step_ms"] / by_run["fp8-lm-o2"]["step_ms"] - 1)
        by_run["fp8-lm"] |= {"percent_slower_than_o2": slower, "slowdown_met": slower <= MAX_SLOWDOWN}
    return lines


def show_throughput(result: dict) -> None:
    settings = result["settings"]
    gbit = settings["gbit"]
    link = "one node" if gbit is None else f"{settings['nodes']} nodes, {gbit:g} Gbit/s" if gbit else "link not shaped"
    print(
        f"\n{result['rows'][0]['parameters'] / 1e9:.3f} B parameters, {settings['ranks']} rank(s) in {link}, "
        f"{settings['micro_batch']} x {settings['sequence']} tokens a rank"
    )
    print(
        f"{'':<14}{'ms':>9}{'lowest..highest round':>24}{'tokens/s':>11}{'MFU':>8}{'x stock':>9}"
        f"{'x bf16':>8}{'x FP8':>8}{'GiB':>8}{'MB a node':>12}{'interface':>11}{'floor':>8}"
        f"{'gradients below fp32/bf16':>27}  loss"
    )
    for line in result["comparison"]:
        below = line["gradient_bytes"] or {}
        gradients = f"{below['below_fp32']:.1f} % / {below['below_bf16']:.1f} %" if "below_fp32" in below else "-"
        medians = line["step_ms_by_round"]
        print(
            f"{line['run']:<14}{line['step_ms']:>9.1f}{f'{min(medians):.1f} .. {max(medians):.1f}':>24}"
            f"{line['tokens_per_s']:>11.0f}{100 * line['mfu']:>6.1f} %{cell(line['times_stock'], 3):>9}"
            f"{cell(line['times_bf16'], 3):>8}"
            f"{cell(line['times_fp8_compute'], 3):>8}{cell(line['peak_gib'], 2):>8}"
            f"{cell(line.get('inter_bytes_per_node_step'), 1, 1e6):>12}"
            f"{cell(line['tx_bytes_per_node_step'], 1, 1e6):>11}{cell(line['floor_ms']):>8}{gradients:>27}"
            f"  {line['losses'][0]:.4f} -> {line['losses'][1]:.4f}"
        )
        if "slowdown_met" in line:
            print(
                f"  {line['percent_slower_than_o2']:+.1f} % against fp8-lm-o2, at most {MAX_SLOWDOWN:g} %: "
                + ("met" if line["slowdown_met"] else "MISSED")
            )
    with_times = [line for line in result["comparison"] if "communication_ms" in line]
    base = base_of({line["run"]: line for line in with_times})
    for line in with_times:
        below = 100 * (1 - line["communication_ms"] / base["communication_ms"]) if base else None
        print(
            f"  {line['run']}: communication {line['communication_ms']:.1f} ms of a step, {cell(below)} % below "
            f"{base['run'] if base else '-'} (the paper: 63-65 %), exposed {line['exposed_ms']:.1f} ms"
        )
    for row in result["rows"]:
        if "profile" in row:
            fp8_lm_profile.show(f"{row['run']}, round {row['round']}", row["profile"])


def compared(result: dict) -> dict:
    """The result with its comparison."""
    part, rows = result["settings"]["part"], result["rows"]
    if part == "memory":
        result["comparison"] = compare_memory(rows)
    elif part == "limits":
        result["comparison"] = limits.compare(rows)
    elif part == "exchange":
        result["comparison"] = fp8_lm_exchange.compare(rows)
    else:
        result["comparison"] = compare_throughput(rows, result["settings"])
    return result


def show(result: dict) -> None:
    """Print a result that has its comparison."""
    shown = {"memory": show_memory, "limits": limits.show}
    part = result["settings"]["part"]
    if not result["rows"]:
        print(f"\n{part}: nothing was measured")
    elif part == "exchange":
        fp8_lm_exchange.show(result["comparison"])
    else:
        shown.get(part, show_throughput)(result)
    for failure in result["failed"]:
        print(f"failed: {failure['run']}: {failure['error']}")
    sys.stdout.flush()
