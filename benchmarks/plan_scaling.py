"""Modelled speed-up over stock ZeRO-3 from 8 to 1,024 GPUs, beside what ZeRO++ published and what was measured here.

    python -m benchmarks.plan_scaling --out plan_scaling

Writes plan_scaling.png and plan_scaling.json. Every figure says what it is: "modelled" (zeropp_fp8.plan),
"published" (by others, on their machines) or "measured" (4 H200, benchmarks/results and the peers). Needs no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.harness.environment import describe
from benchmarks.harness.results import RESULTS, write_result
from benchmarks.plan_fit.fit import check, machine_of
from benchmarks.plan_fit.points import load_points
from examples.options import finite, whole
from zeropp_fp8.plan import (
    EMULATED_H200,
    METHODS,
    PRESETS,
    V100,
    Cluster,
    Hardware,
    Job,
    Model,
    estimate,
)

RATES = (100, 200, 400, 800)  # Gbit/s that a node can send
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
RANKS_PER_NODE = 8
CURVES = ("zeropp-4bit", "zeropp", "in-tree")
COLORS = {"zeropp": "#0072b2", "zeropp-4bit": "#d55e00", "in-tree": "#009e73"}

# Throughput of ZeRO++ over ZeRO-3 on 384 V100 (24 DGX-2 of 16), models of 18 to 138 billion parameters: arXiv
# 2306.10209, and figures 6 and 7 of its announcement (DeepSpeed, blogs/zeropp).
PUBLISHED_GPUS = 384
PUBLISHED_PARAMETERS = (18e9, 138e9)
PUBLISHED = (
    {"gbit": 100, "tokens": (1024, 2048), "typical": 2.0, "highest": 2.2, "says": "up to 2.2 x, about 2 x on average"},
    {"gbit": 400, "tokens": (1024,), "lowest": 1.28, "highest": 1.36, "says": "28 % to 36 % at 1k tokens per GPU"},
    {"gbit": 400, "tokens": (2048,), "lowest": 1.24, "highest": 1.29, "says": "24 % to 29 % at 2k tokens per GPU"},
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=finite(above=0), default=18e9, help="parameters of the model")
    parser.add_argument("--tokens", type=whole(1), default=1024, help="tokens of one GPU in a step")
    parser.add_argument("--gpu", choices=PRESETS, default="h200")
    parser.add_argument("--results", type=Path, default=RESULTS, help="measured points: JSON of two_nodes.py")
    parser.add_argument("--out", type=Path, default=Path("runs/plan_scaling"), help="without suffix")
    return parser.parse_args(argv)


def speed_up(method: str, job: Job, hardware: Hardware) -> float:
    """Step time of stock ZeRO-3 over that of `method`."""
    return estimate(METHODS["stock"], job, hardware).step_s / estimate(METHODS[method], job, hardware).step_s


def without_latency(hardware: Hardware) -> Hardware:
    return replace(hardware, net_latency_us=0.0, node_latency_us=0.0)


def curves(model: Model, tokens: int, hardware: Hardware) -> list[dict]:
    """Modelled speed-ups for every rate and number of GPUs. The headline leaves out the latency of a ring's hops: it
    was not measured here, and beyond some 128 GPUs it favours two levels over stock's ring more and more."""
    rows = []
    for gbit in RATES:
        for gpus in GPUS:
            job = Job(model, Cluster(gpus // RANKS_PER_NODE, RANKS_PER_NODE, gbit), tokens)
            plain = without_latency(hardware)
            rows.append(
                {
                    "kind": "modelled",
                    "gbit": gbit,
                    "gpus": gpus,
                    "speed_up": {name: speed_up(name, job, plain) for name in CURVES},
                    "speed_up_with_latency": {name: speed_up(name, job, hardware) for name in CURVES},
                    "step_s": {name: estimate(METHODS[name], job, plain).step_s for name in ("stock", *CURVES)},
                }
            )
    return rows


def published_cluster() -> list[dict]:
    """Each published figure with the model's range for that cluster: `in-tree` on 24 x 16 V100, both model sizes, with
    activation checkpointing, from no overlap of wire and GPU to full overlap."""
    rows = []
    for figure in PUBLISHED:
        modelled = {}
        for name, overlap in (("no overlap", 0.0), ("full overlap", 1.0)):
            values = []
            for parameters in PUBLISHED_PARAMETERS:
                for tokens in figure["tokens"]:
                    model = Model.from_parameters(parameters, vocabulary=50304)
                    cluster = Cluster(PUBLISHED_GPUS // 16, 16, figure["gbit"])
                    job = Job(model, cluster, tokens, 1024, kept_parameters=1e9, checkpointing=True)
                    values.append(speed_up("in-tree", job, replace(V100, overlap=overlap)))
            modelled[name] = [min(values), max(values)]
        rows.append({"kind": "published", **figure, "modelled": modelled})
    return rows


def measured(results: Path) -> list[dict]:
    """Measured step times of 4 GPUs, as two emulated nodes or one, with the model's. Runs on 1 and 2 are of machines
    whose host differs."""
    points = [point for point in load_points(results) if point.run in METHODS and not point.phase]
    points = [point for point in points if point.job.cluster.world_size == 4]
    machine = machine_of(points, EMULATED_H200)  # its host and GPU; links and kernels stay as they are
    return [
        {
            "kind": "measured",
            "run": residual.point.label,
            "source": residual.point.source,
            "measured_s": residual.point.step_s,
            "modelled_s": residual.modelled_s,
            "error": residual.error,
        }
        for residual in check(points, machine)
    ]


def draw_rate(axes, gbit: int, rows: list[dict]) -> None:
    """Speed-up over GPUs at one rate."""
    here = [row for row in rows if row["gbit"] == gbit]
    gpus = [row["gpus"] for row in here]
    for name in CURVES:
        speeds, with_latency = ([row[key][name] for row in here] for key in ("speed_up", "speed_up_with_latency"))
        axes.plot(gpus, speeds, "o-", ms=3, color=COLORS[name], label=f"{name}, modelled")
        axes.plot(gpus, with_latency, ":", lw=1, color=COLORS[name])
    figures = [figure for figure in PUBLISHED if figure["gbit"] == gbit]
    for figure in figures:
        color, offset = (("#000000", 1.0), ("#56b4e9", 1.0), ("#cc79a7", 1.15))[PUBLISHED.index(figure)]
        ends = [figure.get("lowest", figure.get("typical")), figure["highest"]]
        tokens = " and ".join(f"{count // 1024}k" for count in figure["tokens"])
        label = f"ZeRO++, published, 384 V100, {tokens} tokens"
        axes.plot([PUBLISHED_GPUS * offset] * 2, ends, "_-", color=color, lw=3, label=label)
    axes.axhline(1, color="#999999", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(GPUS, [str(count) for count in GPUS])
    axes.set_ylim(0, 18)
    axes.set(title=f"{gbit} Gbit/s per node", xlabel="GPUs, 8 per node", ylabel="speed-up over stock ZeRO-3")


def draw_published(axes, rows: list[dict]) -> None:
    """Published ranges beside the model's for the same cluster."""
    marks = {"no overlap": ("#56b4e9", 0.0), "full overlap": ("#e69f00", 0.22)}
    for index, row in enumerate(rows):
        low = row.get("lowest", row.get("typical"))
        axes.plot([index - 0.22] * 2, [low, row["highest"]], "k_-", lw=3, label="" if index else "published")
        for name, (color, offset) in marks.items():
            label = "" if index else f"modelled, {name} of wire and GPU"
            axes.plot([index + offset] * 2, row["modelled"][name], "_-", color=color, lw=3, label=label)
    names = [f"{row['gbit']} Gbit/s\n{' and '.join(f'{t // 1024}k' for t in row['tokens'])} tokens" for row in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="#999999", lw=0.8)
    axes.set(title="ZeRO++ (in-tree) on 384 V100", ylabel="speed-up over ZeRO-3")
    axes.legend(fontsize=7)


def draw_measured(axes, rows: list[dict]) -> None:
    """Modelled over measured step time."""
    own = [row for row in rows if row["run"].startswith("zeropp")]
    others = [row for row in rows if row not in own]
    for group, color, label in ((others, "#555555", "stock, peers, lossless"), (own, "#0072b2", "zeropp, zeropp-4bit")):
        axes.plot(
            [1e3 * r["measured_s"] for r in group],
            [1e3 * r["modelled_s"] for r in group],
            "o",
            color=color,
            label=label,
        )
    ends = [80, 6000]
    axes.plot(ends, ends, color="#999999", lw=0.8)
    axes.fill_between(
        ends, [0.85 * e for e in ends], [1.15 * e for e in ends], color="#999999", alpha=0.2, label="within 15 %"
    )
    axes.loglog()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set(title="Step time of 4 H200, as two nodes or one", xlabel="measured, ms", ylabel="modelled, ms")
    axes.legend(fontsize=7)


def draw(result: dict, path: Path) -> None:
    """The figure: four rates, the published cluster, the measured points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(15, 9), layout="constrained")
    panels = axes.flatten()
    for panel, gbit in zip(panels, RATES):
        draw_rate(panel, gbit, result["modelled"])
    draw_published(panels[4], result["published"])
    draw_measured(panels[5], result["measured"])
    labelled = {label: line for panel in panels[:4] for line, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{result['parameters'] / 1e9:g} B parameters, {result['tokens']:,} tokens per GPU, modelled for "
        f"{result['gpu'].upper()} (dotted: with NCCL's tabled latency of a hop)"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the JSON and the plot, and print the speed-ups."""
    arguments = parse(argv)
    hardware = PRESETS[arguments.gpu]
    model = Model.from_parameters(arguments.params)
    head = describe("plan_scaling")
    result = {name: head[name] for name in ("question", "date", "commit", "command")} | {
        "gpu": arguments.gpu,
        "hardware": asdict(hardware),
        "parameters": arguments.params,
        "tokens": arguments.tokens,
        "modelled": curves(model, arguments.tokens, hardware),
        "published": published_cluster(),
        "measured": measured(arguments.results) if arguments.results.exists() else [],
    }
    write_result(f"{arguments.out}.json", result | {"finished": True})
    draw(result, Path(f"{arguments.out}.png"))
    for row in result["modelled"]:
        speeds = "  ".join(f"{name} {value:.2f} x" for name, value in row["speed_up"].items())
        print(f"modelled  {row['gbit']:>4} Gbit/s {row['gpus']:>5} GPUs  {speeds}")
    for row in result["published"]:
        ranges = "  ".join(
            f"modelled, {name}: {low:.2f} to {high:.2f} x" for name, (low, high) in row["modelled"].items()
        )
        print(f"published {row['gbit']:>4} Gbit/s   384 V100  {row['says']}  {ranges}")


if __name__ == "__main__":
    main()
