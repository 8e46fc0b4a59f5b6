"""Weights for an engine that generates elsewhere."""

from __future__ import annotations

from benchmarks.report.blocks import Block, paragraph, table
from benchmarks.report.rows import fastest

LABELS = {
    "trl": "all trained: TRL, stock",
    "merged": "`zeropp`, all weights",
    "fp8": '`zeropp` with FP8 compute, `format="fp8"`',
    "trl-lora": "LoRA: TRL, stock",
    "merged-lora": "`zeropp`, merged",
    "changed-lora": "`zeropp`, merged, `only_changed=True`",
    "adapters-lora": '`zeropp`, `weights="adapters"`',
    "merged-qlora": "`qlora`, merged",
    "adapters-qlora": '`qlora`, `weights="adapters"`',
}


def handover(result: dict) -> str:
    """Bytes and milliseconds of a hand-over, of the fastest round."""
    found = fastest(result, "ms")
    rows = []
    for run in (run for run in LABELS if run in found):
        row = found[run]
        gathered = row["gathered_bytes_per_rank"]
        megabytes = [
            None if size is None else size / 1e6 for size in (row["payload_bytes"], gathered, row["there_bytes"])
        ]
        rows.append([LABELS[run], *("" if size is None else f"{size:.2f}" for size in megabytes), f"{row['ms']:.0f}"])
    return table(["", "MB to the engine", "MB a rank sends for it", "MB of weights there at once", "ms"], rows)


def handover_nccl(result: dict) -> str:
    """The same between two GPUs, where TRL was not installed."""
    settings, found = result["settings"], fastest(result, "ms")
    merged = found["merged"]
    said = paragraph(
        f"""A rank gathers {merged["gathered_bytes_per_rank"] / 1e6:,.0f} MB for all weights in {merged["ms"]:.0f} ms,
        which {settings["gbit"]:.0f} Gbit/s need
        {8e-6 * merged["gathered_bytes_per_rank"] / settings["gbit"]:.0f} ms for."""
    )
    return f"{handover(result)}\n\n{said}"


BLOCKS = {
    "handover": Block(handover, ("handover/cpu-2-gloo",)),
    "handover_nccl": Block(handover_nccl, ("handover/h100-2-25gbit",)),
}
