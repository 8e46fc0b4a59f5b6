"""Recommendations of the plan, in situations that the documentation speaks of; nothing is measured for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.report.blocks import Block, table
from zeropp_fp8.plan import H200, Cluster, Hardware, Job, Lora, Model
from zeropp_fp8.plan.recommend import Advice, recommend

GIB = 2**30


@dataclass(frozen=True)
class Situation:
    """A job on H200, or on GPUs with as fast products and other links or memory."""

    words: str
    cluster: Cluster
    tokens: int = 2048
    parameters: float = 7e9
    lora: bool = False
    gpu_gib: float | None = None
    hardware: Hardware = H200

    @property
    def advice(self) -> Advice:
        model, lora = Model.from_parameters(self.parameters), Lora(16) if self.lora else None
        job = Job(model, self.cluster, self.tokens, min(self.tokens, 2048), lora=lora)
        return recommend(job, self.hardware, self.gpu_gib and self.gpu_gib * GIB)


def _eight(gbit: float) -> Cluster:
    return Cluster(8, 8, gbit)


SITUATIONS = (
    Situation("one GPU", Cluster(1, 1)),
    Situation("one GPU of 80 GiB", Cluster(1, 1), gpu_gib=80),
    Situation("one node of 8 GPUs, NVLink", Cluster(1, 8)),
    Situation("one node of 4 GPUs, PCIe (8 GB/s per GPU)", Cluster(1, 4), hardware=replace(H200, intra_gbs=8)),
    Situation("8 nodes of 8, 1,600 Gbit/s", _eight(1600)),
    Situation("8 nodes of 8, 800 Gbit/s", _eight(800)),
    Situation("8 nodes of 8, 400 Gbit/s", _eight(400)),
    Situation("8 nodes of 8, 400 Gbit/s, 8,192 tokens", _eight(400), tokens=8192),
    Situation("8 nodes of 8, 100 Gbit/s", _eight(100)),
    Situation("8 nodes of 8, 100 Gbit/s, 8,192 tokens", _eight(100), tokens=8192),
    Situation("8 nodes of 8, 25 Gbit/s", _eight(25)),
    Situation("2 nodes of 8, 25 Gbit/s, 1,024 tokens, 14 GiB", Cluster(2, 8, 25), 1024, gpu_gib=14),
    Situation("2 nodes of 8, 25 Gbit/s, 1,024 tokens, 12 GiB", Cluster(2, 8, 25), 1024, gpu_gib=12),
    Situation("2 nodes of 8, 25 Gbit/s, 1,024 tokens, 9.5 GiB", Cluster(2, 8, 25), 1024, gpu_gib=9.5),
    Situation("LoRA, 8 nodes of 8, 100 Gbit/s", _eight(100), lora=True),
    Situation("LoRA of 13 B, one GPU of 24 GiB", Cluster(1, 1), 512, 13e9, lora=True, gpu_gib=24),
)


def recommended() -> str:
    """A line for each situation."""
    rows = []
    for situation in SITUATIONS:
        advice = situation.advice
        stock, chosen = advice.estimates[0], next(one for one in advice.estimates if one.method == advice.recipe)
        more = ", ".join(f"`{one.method}` ({chosen.step_s / one.step_s:.2f} x)" for one in advice.offered)
        gain = "" if chosen is stock else f"{stock.step_s / chosen.step_s:.2f} x"
        rows.append([situation.words, "stock" if chosen is stock else f"`{chosen.method}`", gain, chosen.bound, more])
    columns = ["where", "recommended", "x stock", "a step is bound by", "rounds more (x the recommended)"]
    return table(columns, rows)


BLOCKS = {"recommended": Block(recommended)}
