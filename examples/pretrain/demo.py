"""Three short runs of train.py on the same text and seed: stock ZeRO-3, recipe zeropp, recipe zeropp-4bit.

    python examples/pretrain/demo.py                # or: make demo

Four ranks under the real `deepspeed` launcher, treated as 2 nodes x 2 ranks: on the CPU with gloo, or on 4 or 2 GPUs
with NCCL. Writes summary.json, summary.png, the ds_configs and the loss of each step to runs/demo.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path

from data import check_places
from models import is_small

import zeropp_fp8

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/

from launching import computes_in_bf16, device, hardware, launch
from options import Parser, finite, generator_seed, model_config, new_folder, refusals, whole

HERE = Path(__file__).resolve().parent
DS_CONFIGS = HERE.parent.parent / "ds_configs"
RUNS = ("stock", "zeropp", "zeropp-4bit")
NODES = 2
MEGA = 1e6
COLORS = {"stock": "#555555", "zeropp": "#0072b2", "zeropp-4bit": "#d55e00"}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-small", help="see train.py")
    parser.add_argument("--data", nargs="+", default=["stdlib"], help="see train.py")
    parser.add_argument("--steps", type=whole(1), default=80, help="optimizer steps of each run")
    parser.add_argument("--micro-batch", type=whole(1), default=8, help="sequences a rank takes in a step")
    parser.add_argument("--sequence-length", type=whole(2), default=128, help="tokens in a sequence")
    parser.add_argument("--lr", type=finite(least=0), default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=generator_seed, default=0, help="initial weights and order of the data")
    parser.add_argument("--out", type=new_folder, default="runs/demo", help="folder for the results")
    arguments = parser.parse_args()
    arguments.out = Path(arguments.out)
    return arguments


def ds_config_of(run: str, arguments: argparse.Namespace, accelerator: str, ranks: int) -> dict:
    """ds_configs/<run>.json with what differs in a demo."""
    config = json.loads((DS_CONFIGS / f"{run}.json").read_text())
    config["train_micro_batch_size_per_gpu"] = arguments.micro_batch
    config["bf16"]["enabled"] = computes_in_bf16(accelerator)
    # DeepSpeed would keep weights as small as these gathered from forward to backward, and from step to step; a real
    # model does not fit, so let each pass gather them as it would there.
    for key in ("param_persistence_threshold", "max_live_parameters", "max_reuse_distance"):
        config["zero_optimization"][f"stage3_{key}"] = 0
    if "zeropp_fp8" in config:
        config["zeropp_fp8"] |= {"topology": {"ranks_per_node": ranks // NODES}, "report": {"every": 0}}
    return config


def train(run: str, arguments: argparse.Namespace, accelerator: str, ranks: int) -> dict:
    """Train once, with this process's own standard output; returns the figures of train.py and the losses of all steps.

    Raises:
        SystemExit: the run failed.
    """
    config_path, log, summary = (arguments.out / f"{run}{suffix}" for suffix in (".json", ".jsonl", ".figures.json"))
    config_path.write_text(json.dumps(ds_config_of(run, arguments, accelerator, ranks), indent=2) + "\n")
    command = ["--deepspeed_config", config_path, "--loss-log", log, "--summary", summary]
    command += ["--model", arguments.model, "--data", *arguments.data]
    for name in ("steps", "sequence_length", "lr", "seed"):
        command += ["--" + name.replace("_", "-"), getattr(arguments, name)]
    launch(run, HERE / "train.py", command, accelerator, ranks)
    figures = json.loads(summary.read_text())
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    figures["losses"] = [entry["loss"] for entry in entries if "loss" in entry]
    return figures


def total_bytes(per_step: dict) -> dict[str, float]:
    return {f"{link}_bytes": sum(kind[link] for kind in per_step.values()) for link in ("inter", "intra")}


def summarize(results: dict[str, dict]) -> dict[str, dict]:
    """The figures of each run. Bytes are those of one step, sent by all ranks together.

    Stock DeepSpeed counts no bytes; what it would have sent for the same gathers and reductions comes from the zeropp
    run: one ring over all ranks, in 16 bits.
    """
    runs = {}
    for run, figures in results.items():
        report = figures["wire_report"]
        sent = report["per_step"] if report else results["zeropp"]["wire_report"]["stock_per_step"]
        runs[run] = {key: figures[key] for key in ("loss_start", "loss_end", "held_out_loss", "step_s")} | total_bytes(
            sent
        )
    return runs


def table(runs: dict[str, dict]) -> str:
    """The comparison as text."""
    head = f"{'':<13}{'loss':>7}{'loss':>8}{'held-out':>10}{'step':>9}{'between nodes':>17}{'':>9}{'within nodes':>16}"
    units = (
        f"{'':<13}{'start':>7}{'end':>8}{'loss':>10}{'s':>9}"
        + f"{'MB per step':>17}{'x stock':>9}{'MB per step':>16}{'x stock':>9}"
    )
    lines = [head, units]
    stock = runs["stock"]
    for run, row in runs.items():
        lines.append(
            f"{run:<13}{row['loss_start']:>7.3f}{row['loss_end']:>8.3f}{row['held_out_loss']:>10.4f}{row['step_s']:>9.3f}"
            f"{row['inter_bytes'] / MEGA:>17.3f}{row['inter_bytes'] / stock['inter_bytes']:>9.3f}"
            f"{row['intra_bytes'] / MEGA:>16.3f}{row['intra_bytes'] / stock['intra_bytes']:>9.3f}"
        )
    return "\n".join(lines)


def draw(results: dict[str, dict], runs: dict[str, dict], title: str, path: Path) -> None:
    """summary.png: the loss curves, how far they are from stock's, and the bytes of a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(12.5, 5.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.2, 1), height_ratios=(2.2, 1))
    top = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=top)
    right = figure.add_subplot(grid[:, 1])

    stock = results["stock"]["losses"]
    for run, style in zip(RUNS, ("-", "--", ":")):
        losses = results[run]["losses"]
        steps = range(1, len(losses) + 1)
        label = f"{run}: {runs[run]['held_out_loss']:.3f} held out"
        top.plot(steps, losses, style, color=COLORS[run], linewidth=2, label=label)
        below.plot(steps, [100 * (a / b - 1) for a, b in zip(losses, stock)], color=COLORS[run], linewidth=1.6)
    top.set(ylabel="nats per token", title="Training loss")
    top.legend(frameon=False)
    top.tick_params(labelbottom=False)
    below.set(xlabel="step", ylabel="% of stock's", title="Difference to stock")
    reach = max(1.0, *(abs(limit) for limit in below.get_ylim()))
    below.set_ylim(-reach, reach)

    width, keys = 0.27, ("inter_bytes", "intra_bytes")
    for index, (run, row) in enumerate(runs.items()):
        heights = [row[key] / MEGA for key in keys]
        texts = [f"{row[key] / MEGA:.2f} MB\n{row[key] / runs['stock'][key]:.2f} x" for key in keys]
        label = "stock (formula: ring, 16 bits)" if run == "stock" else run
        bars = right.bar(
            [k + (index - 1) * width for k in (0, 1)], heights, 0.94 * width, color=COLORS[run], label=label
        )
        right.bar_label(bars, texts, padding=3, fontsize=9)
    right.set_xticks([0, 1], ["between nodes", "within nodes"])
    right.set(ylabel="MB per step, all ranks together", title="Bytes sent")
    right.margins(y=0.3)
    right.legend(frameon=False, loc="upper center", ncols=3, columnspacing=1.2, handlelength=1.2)

    for axes in (top, below, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    figure.suptitle(title, fontsize=11, color="#444444")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    arguments = parse_arguments()
    with refusals():
        if not is_small(arguments.model):
            model_config("--model", arguments.model)
        check_places(arguments.data)
    arguments.out.mkdir(parents=True, exist_ok=True)
    accelerator, ranks = device(multiple_of=NODES)
    dtype = "bf16" if computes_in_bf16(accelerator) else "fp32"
    setting = (
        f"{arguments.model}, {dtype}, {NODES} nodes x {ranks // NODES} ranks emulated on one machine's "
        f"{'GPUs' if accelerator == 'cuda' else 'CPU'}, "
        f"{arguments.micro_batch} sequences of {arguments.sequence_length} tokens per rank"
    )
    print(f"zeropp_fp8 demo: {' / '.join(RUNS)}; {setting}; {arguments.steps} steps each", flush=True)
    results = {run: train(run, arguments, accelerator, ranks) for run in RUNS}
    runs = summarize(results)
    summary = {
        "runs": runs,
        "bytes": "one step, all ranks together; stock by the ring formula in 16 bits",
        "setting": {"model": arguments.model, "data": arguments.data, "dtype": dtype, "nodes": NODES, "ranks": ranks}
        | {name: getattr(arguments, name) for name in ("steps", "micro_batch", "sequence_length", "lr", "seed")},
        "hardware": hardware(accelerator),
        "versions": {"python": platform.python_version(), "zeropp_fp8": zeropp_fp8.__version__}
        | {name: version(name) for name in ("deepspeed", "torch", "transformers")},
        "command": shlex.join(["python", *sys.argv]),
    }
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(results, runs, setting, arguments.out / "summary.png")
    print(f"\n{table(runs)}")
    print("Bytes of all ranks together. Stock's are those of a ring in 16 bits; gloo's own algorithms send more.")
    print("Here all ranks share one machine: the step time shows what quantizing costs, not what a slow network gains.")
    print(f"Written: {arguments.out / 'summary.json'}, {arguments.out / 'summary.png'}")


if __name__ == "__main__":
    main()
