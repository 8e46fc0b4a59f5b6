"""What the parts of frozen.py have measured, compared with the targets and printed."""

from __future__ import annotations

import statistics
import sys

import frozen_dequantize
import limits
from fp8_lm_tables import cell
from frozen_runs import BNB, QLORA, STOCK, ZEROPP

# Bytes a frozen parameter on the ranks, at most.
AT_REST_TARGETS = {"int8": 1.04, "int4": 0.54, "int4-dq": 0.52, "nf4-dq": 0.52}
PEAK_OF_STOCK = 0.5  # of stock's, below which the peak of a step with QLORA must be
TARGET_GBIT = 25.0
TIMES_STOCK = {ZEROPP: 2.0}  # faster than stock at that rate between two nodes, at least
TIMES_STOCK_STORED = 4.0


def short_line(row: dict) -> str:
    """What is printed once a row is there."""
    if row["part"] == "dequantize":
        return f"{row['run']}: {row['us']:.1f} us"
    text = f"{row['run']}: {row['frozen_per_parameter']:.4f} bytes a frozen parameter"
    if row["peak_bytes"] is not None:
        text += f", peak of a step {row['peak_bytes'] / 2**30:.2f} GiB"
    return text + (f", {row['step_ms']:.1f} ms a step" if "step_ms" in row else "")


def compare_memory(rows: list[dict]) -> list[dict]:
    """Bytes a frozen parameter and the peak of a step, against the targets."""
    by_run, lines = {row["run"]: row for row in rows}, []
    peaks = {run: row["peak_bytes"] for run, row in by_run.items() if row["peak_bytes"] is not None}
    for run, row in by_run.items():
        line = {"run": run, "frozen_per_parameter": row["frozen_per_parameter"]}
        if run in AT_REST_TARGETS:
            line["at_rest_target"] = AT_REST_TARGETS[run]
            line["at_rest_met"] = row["frozen_per_parameter"] <= AT_REST_TARGETS[run]
        for name, other in (("stock", STOCK), ("bnb", BNB)):
            if run in peaks and other in peaks:
                line[f"peak_of_{name}"] = peaks[run] / peaks[other]
        if run == QLORA:
            if "peak_of_stock" in line:
                line["peak_of_stock_met"] = line["peak_of_stock"] < PEAK_OF_STOCK
            if "peak_of_bnb" in line:
                line["peak_of_bnb_met"] = line["peak_of_bnb"] <= 1
        lines.append(line)
    return lines


def show_memory(result: dict) -> None:
    settings, rows = result["settings"], {row["run"]: row for row in result["rows"]}
    some = next(iter(rows.values()))
    name, unit = unit_of(some)
    print(
        f"\nMemory of LoRA on each of {settings['ranks']} rank(s): {some['parameters'] / 1e9:.3f} B parameters, "
        f"{some['frozen_parameters'] / 1e9:.3f} B of them in linear layers of blocks; {settings['micro_batch']} x "
        f"{settings['sequence']} tokens, checkpointing {'on' if settings['checkpointing'] else 'off'}. {name} but for "
        f"the first column. Targets for {QLORA}: peak below {PEAK_OF_STOCK:g} x {STOCK}, at most {BNB}'s"
    )
    columns = ("model_bytes", 8), ("making_peak_bytes", 12), ("engine_bytes", 8), ("engine_peak_bytes", 8)
    columns += ("rest_bytes", 8), ("peak_bytes", 9)
    print(
        f"{'':<15}{'bytes a frozen':>15}{'at':>7}{'model':>8}{'peak while':>12}{'engine':>8}{'peak':>8}{'after':>8}"
        f"{'peak of':>9}{'x':>8}{'x':>8}\n"
        f"{'':<15}{'parameter':>15}{'most':>7}{'':>8}{'making it':>12}{'':>8}{'so far':>8}{'steps':>8}{'a step':>9}"
        f"{'stock':>8}{'bnb':>8}"
    )
    for line in result["comparison"]:
        row = rows[line["run"]]
        print(
            f"{line['run']:<15}{line['frozen_per_parameter']:>15.4f}{cell(line.get('at_rest_target'), 2):>7}"
            + "".join(f"{cell(row[column], 2, unit):>{width}}" for column, width in columns)
            + f"{cell(line.get('peak_of_stock'), 3):>8}{cell(line.get('peak_of_bnb'), 3):>8}{_verdict(line):>9}"
        )
    timed = [row for row in rows.values() if "step_ms" in row]
    if timed:
        print("ms a step: " + ", ".join(f"{row['run']} {row['step_ms']:.1f}" for row in timed))


def unit_of(row: dict) -> tuple[str, int]:
    """The unit of bytes for a model of that size."""
    return ("GiB", 2**30) if row["parameters"] > 1e8 else ("MiB", 2**20)


def _verdict(line: dict) -> str:
    verdicts = [line[key] for key in line if key.endswith("met")]
    return "" if not verdicts else "met" if all(verdicts) else "MISSED"


def compare_throughput(rows: list[dict], settings: dict) -> list[dict]:
    """A line a run over its rounds; its speed against stock and against weights that travel as INT8."""
    lines = []
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run]
        medians = [row["step_ms"] for row in mine]
        line = {
            "run": run,
            "step_ms": statistics.median(medians),
            "step_ms_by_round": medians,
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in mine),
            "losses": [mine[0]["losses"][0], mine[0]["losses"][-1]],
        }
        for key in ("first_ms", "floor_ms", "tx_bytes_per_node_step", "wire", "frozen_per_parameter"):
            line[key] = mine[-1].get(key)
        for key in ("rest_bytes", "peak_bytes"):
            line[key] = max((row[key] for row in mine if row[key] is not None), default=None)
        lines.append(line)
    by_run = {line["run"]: line for line in lines}
    for name, other in (("times_stock", by_run.get(STOCK)), ("times_zeropp", by_run.get(ZEROPP))):
        for line in lines:
            line[name] = None if other is None else other["step_ms"] / line["step_ms"]
    if settings["gbit"] == TARGET_GBIT and STOCK in by_run:
        for line in lines:
            is_stored = line["frozen_per_parameter"] < 2 and line["run"] != BNB
            target = TIMES_STOCK_STORED if is_stored else TIMES_STOCK.get(line["run"])
            if target is not None:
                line |= {"times_stock_target": target, "times_stock_met": line["times_stock"] >= target}
    return lines


def show_throughput(result: dict) -> None:
    settings, some = result["settings"], result["rows"][0]
    gbit = settings["gbit"]
    name, unit = unit_of(some)
    link = "one node" if gbit is None else f"{settings['nodes']} nodes, {gbit:g} Gbit/s" if gbit else "link not shaped"
    print(
        f"\nLoRA on {some['parameters'] / 1e9:.3f} B parameters, {settings['ranks']} rank(s) in {link}, "
        f"{settings['micro_batch']} x {settings['sequence']} tokens a rank, checkpointing "
        f"{'on' if settings['checkpointing'] else 'off'}; MB that a node sends a step"
    )
    print(
        f"{'':<15}{'ms':>9}{'lowest..highest round':>24}{'first':>9}{'tokens/s':>10}{'x stock':>9}{'at least':>9}"
        f"{'x zeropp':>9}{'between':>10}{'interface':>10}{'within':>10}{'floor':>8}{f'rest {name}':>9}{'peak':>8}  loss"
    )
    for line in result["comparison"]:
        medians, wire = line["step_ms_by_round"], line["wire"] or {}
        met = {True: " met", False: " MISSED", None: ""}[line.get("times_stock_met")]
        print(
            f"{line['run']:<15}{line['step_ms']:>9.1f}{f'{min(medians):.1f} .. {max(medians):.1f}':>24}"
            f"{line['first_ms']:>9.1f}{line['tokens_per_s']:>10.0f}{cell(line['times_stock'], 2):>9}"
            f"{cell(line.get('times_stock_target'), 0):>9}{cell(line['times_zeropp'], 2):>9}"
            f"{cell(wire.get('inter'), 1, 1e6):>10}{cell(line['tx_bytes_per_node_step'], 1, 1e6):>10}"
            f"{cell(wire.get('intra'), 1, 1e6):>10}{cell(line['floor_ms']):>8}{cell(line['rest_bytes'], 2, unit):>9}"
            f"{cell(line['peak_bytes'], 2, unit):>8}  {line['losses'][0]:.3f} -> {line['losses'][1]:.3f}{met}"
        )


def compared(result: dict) -> dict:
    """The result with its comparison."""
    part, rows = result["settings"]["part"], result["rows"]
    if part == "throughput":
        result["comparison"] = compare_throughput(rows, result["settings"])
    else:
        compare = {"memory": compare_memory, "limits": limits.compare, "dequantize": frozen_dequantize.compare}[part]
        result["comparison"] = compare(rows)
    return result


def show(result: dict) -> None:
    """Print a result that has its comparison."""
    part = result["settings"]["part"]
    shown = {
        "memory": show_memory,
        "limits": limits.show,
        "dequantize": frozen_dequantize.show,
        "throughput": show_throughput,
    }
    if result["rows"]:
        shown[part](result)
    else:
        print(f"\n{part}: nothing was measured")
    for failure in result["failed"]:
        print(f"failed: {failure['run']}: {failure['error']}")
    sys.stdout.flush()
