"""Weights for an engine that generates elsewhere."""

from __future__ import annotations

from benchmarks.report.blocks import Block, table
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


BLOCKS = {"handover": Block(handover, ("handover/cpu-2-gloo",))}
