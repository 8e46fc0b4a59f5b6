"""Weights for an engine that generates elsewhere."""

from __future__ import annotations

from benchmarks.report.blocks import Block, paragraph, table
from benchmarks.report.rows import fastest

LABELS = {
    "trl": "all trained: TRL, stock",
    "merged": "`zeropp`, all weights",
    "changes": "`zeropp`, the elements that a step has changed",
    "updates": "`zeropp`, exact differences of a step",
    "fp8": '`zeropp` with FP8 compute, `format="fp8"`',
    "trl-lora": "LoRA: TRL, stock",
    "merged-lora": "`zeropp`, merged",
    "changes-lora": "`zeropp`, merged, the elements that a step has changed",
    "updates-lora": "`zeropp`, merged, exact differences of a step",
    "adapters-lora": "`zeropp`, the adapter",
    "merged-qlora": "`qlora`, merged",
    "adapters-qlora": "`qlora`, the adapter",
}


def handover(result: dict) -> str:
    """Bytes and milliseconds of a hand-over, of the fastest round; bytes between nodes as the interface counts them."""
    found, counted = fastest(result, "ms"), result["settings"]["gbit"] is not None
    keys = ("payload_bytes", "tx_bytes_per_node" if counted else "gathered_bytes_per_rank", "there_bytes")
    rows = []
    for run in (run for run in LABELS if run in found):
        row = found[run]
        megabytes = ["" if row[key] is None else f"{row[key] / 1e6:.2f}" for key in keys]
        rows.append([LABELS[run], *megabytes, f"{row['ms']:.0f}"])
    sends = f"MB a {'node' if counted else 'rank'} sends for it"
    return table(["", "MB to the engine", sends, "MB of weights there at once", "ms"], rows)


def handover_nccl(result: dict) -> str:
    """The same between two GPUs."""
    rows, gbit = fastest(result, "ms"), result["settings"]["gbit"]
    merged, trl = rows["merged"], rows["trl-lora"]
    gathered = merged["gathered_bytes_per_rank"]
    said = f"""A rank gathers {gathered / 1e6:,.0f} MB for all weights in {merged["ms"]:.0f} ms, which {gbit:.0f} Gbit/s
        need {8e-6 * gathered / gbit:.0f} ms for. With LoRA TRL has {trl["there_bytes"] / 1e9:.1f} GB of weights
        there at once and takes {trl["ms"]:.0f} ms, merging block by block
        {rows["merged-lora"]["there_bytes"] / 1e9:.2f} GB and {rows["merged-lora"]["ms"]:.0f} ms; the
        adapter alone, whose matrices stay gathered between steps, takes {rows["adapters-lora"]["ms"]:.0f} ms."""
    return f"{handover(result)}\n\n{paragraph(said)}"


ACROSS = {
    "whole": "all weights",
    "exact": "exact differences",
    "exact-background": "exact differences, `wait=False`",
}


def handover_link(result: dict) -> str:
    """Hand-overs across a slow link, until they are applied."""
    found = {row["run"]: row for row in result["rows"]}
    keys = (("tx_bytes", 1e-6, ".1f"), ("seconds", 1, ".3f"), ("stalled", 1, ".3f"))
    rows = [
        [ACROSS[run], f"{row['bits_per_weight']:.3f}", *(f"{row[key] * unit:{form}}" for key, unit, form in keys)]
        for run, row in found.items()
    ]
    whole, exact, background = (found[run] for run in ACROSS)
    waits = background["stalled"]
    said = f"""Differences take 1/{whole["seconds"] / exact["seconds"]:.0f} of the time of all weights. In the
        background training waits {1e3 * waits:.0f} ms, {100 * waits / whole["seconds"]:.1f} % of the time of all
        weights and {100 * waits / background["seconds"]:.0f} % of their own: as long as it takes to compare and
        encode."""
    head = ["", "bits per weight", "MB over the link", "seconds until applied", "seconds that training waits"]
    return f"{table(head, rows)}\n\n{paragraph(said)}"


BLOCKS = {
    "handover_link": Block(handover_link, ("handover_link/h200-2-1gbit",)),
    "handover": Block(handover, ("handover/cpu-2-gloo",)),
    "handover_nccl": Block(handover_nccl, ("handover/h100-2-25gbit",)),
}
