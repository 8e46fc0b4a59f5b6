"""ZeRO-3 itself: the demo, step time and bytes between nodes, kernels."""

from __future__ import annotations

from benchmarks.report.blocks import Block, bold, paragraph, table

LABELS = {
    "stock": "stock ZeRO-3",
    "stock-leaf": "stock, decoder layers as z3 leaf modules",
    "in-tree": "DeepSpeed's ZeRO++",
    "in-tree-leaf": "DeepSpeed's ZeRO++, leaf modules",
    "fsdp2": "FSDP2",
    "hsdp": "HSDP (FSDP2, a full copy in each node)",
    "lossless": "**`lossless`**",
    "zeropp": "**`zeropp`**",
    "zeropp-4bit": "**`zeropp-4bit`**",
}
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


def by_rate(*results: dict) -> dict[tuple[str, object], dict]:
    """Rows by (run, rate)."""
    return {(row["run"], row["gbit"]): row for result in results for row in result["rows"]}


def step_time(*results: dict) -> str:
    """Milliseconds a step of all runs at three rates, and how much faster the quantized ones are."""
    found, rates = by_rate(*results), (25.0, 10.0, "nvlink")

    def cell(run: str, rate) -> str:
        row = found.get((run, rate))
        if row is None:
            return ""
        text = f"{row['step_ms']:.0f}"
        if run in QUANTIZED:
            text = bold(text) + (f" (floor {row['floor_ms']:.0f})" if rate != "nvlink" else "")
        return text

    rows = [[label, *(cell(run, rate) for rate in rates)] for run, label in LABELS.items()]
    for run in QUANTIZED:
        cells = []
        for rate in rates:
            ms = found[run, rate]["step_ms"]
            times = [found["stock", rate]["step_ms"] / ms]
            in_tree = [found[name, rate]["step_ms"] for name in ("in-tree", "in-tree-leaf") if (name, rate) in found]
            times += [min(in_tree) / ms] if in_tree else []
            cells.append(" / ".join(f"{factor:.1f} x" for factor in times))
        rows.append([f"`{run}` against stock / the best in-tree ZeRO++", *cells])
    return table(["ms a step", "25 Gbit/s", "10 Gbit/s", "one node, NVLink"], rows)


def nvlink_says(nvlink: dict, larger: dict, profile: dict) -> str:
    """What bounds the runs over NVLink."""
    ms = {row["run"]: f"{row['step_ms']:.0f}" for row in larger["rows"]}
    busy = {row["run"]: row["device"]["compute_stream_busy_ms"] for row in profile["rows"]}
    return paragraph(
        f"""On NVLink all of these wait for Python, not for the GPU (busy {min(busy.values()):.0f} to
        {max(busy.values()):.0f} ms of a step), so those figures vary by 10 % and more with what else the host does;
        stock pays Python for every parameter, this project for every block. With 4 x 2,048 tokens a GPU on NVLink:
        stock {ms["stock"]} ms, with leaf modules {ms["stock-leaf"]}, `lossless` {ms["lossless"]}, `zeropp`
        {ms["zeropp"]}, FSDP2 {ms["fsdp2"]}."""
    )


BLOCKS = {
    "demo": Block(demo, ("demo/cpu-4-gloo",)),
    "step_time": Block(
        step_time, ("two_nodes/h200-4-25gbit", "two_nodes/h200-4-10_6_4gbit", "two_nodes/h200-4-nvlink")
    ),
    "nvlink_says": Block(
        nvlink_says,
        ("two_nodes/h200-4-nvlink", "two_nodes/h200-4-nvlink-4x2048", "step_profile/h200-4-nvlink"),
    ),
}
