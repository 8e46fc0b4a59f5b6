"""Measured step times: peers, and what benchmarks/two_nodes.py and other benchmarks of training steps write."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.harness.sizes import MIXTURES
from zeropp_fp8.plan import METHODS, Cluster, Job, Lora, Model, PlanError
from zeropp_fp8.plan.job import require_positive

# The models of benchmarks/two_nodes.py.
MODELS = {
    "1.3b": Model(parameters=1345423360, hidden=2048, layers=24, vocabulary=32000),
    "small": Model(parameters=5795072, hidden=256, layers=6, vocabulary=2048),
    "tiny": Model(parameters=935040, hidden=128, layers=4, vocabulary=512),
}
NODES, RANKS_PER_NODE = 2, 2  # of benchmarks/two_nodes.py
ONE_NODE = (None, "nvlink")  # values of "gbit" that mean: all ranks in one node
UNSHAPED_GBIT = 72.0  # "gbit" 0: the link is there but not shaped; NCCL over its TCP moves about 9 GB/s
ALIASES = {"intree": "in-tree", "zero++": "in-tree", "intree-leaf": "in-tree-leaf", "zero++-leaf": "in-tree-leaf"}
# Runs of benchmarks/harness/lora.py, and the adapters that all of them train.
ALIASES |= {"stock-lora": "stock-leaf", "lossless-lora": "lossless", "zeropp-lora": "zeropp"}
ALIASES |= {"nf4-dq": "qlora", "nf4-dq-rank": "qlora-rank"}
# Until then recipes sent all codes, and a run of another name what had changed in them.
WHOLE_UNTIL, WHOLE = "2026-11-28", "-whole"
ALIASES |= {f"{name}-difference": name for name in ("zeropp", "fp8-lm-zeropp")}
LORA = Lora(rank=16)
OF_LORA = ("lora_step", "lora_memory", "lora_limits")  # values of "question"
NOTHING_KEPT = ("lora_memory", "lora_limits", "fp8_lm_memory")  # ran with stage3_max_live_parameters 0
UNSTEADY = 2.0
RLHF, RLHF_LIMITS = "rlhf_step", "rlhf_limits"  # a step is an iteration of PPO
# Runs of benchmarks/harness/rlhf_runs.py: method, and whether adapters are trained. Stock's blocks are leaf modules.
RLHF_RUNS = {
    "stock-lora": ("stock-leaf", True),
    "stock-four": ("stock-leaf", True),
    "qlora": ("qlora", True),
    "stock-full": ("stock-leaf", False),
    "zeropp": ("zeropp", False),
    "fp8-lm": ("fp8-lm", False),
    "fp8-lm-zeropp": ("fp8-lm-zeropp", False),
}
PHASES = ("experience", "training")


@dataclass(frozen=True)
class MeasuredPoint:
    """The median step time of one run; `steady`: its slowest step took less than UNSTEADY times its fastest.

    Of steps in which TCP did not wait to send lost data again, where that was counted; with no such step, not steady.

    `phase`: of an iteration of RLHF (PHASES), whose time it is; empty: a training step. `gpu`: its name, where known.
    """

    run: str
    job: Job
    step_s: float
    source: str = ""
    peak_bytes: float | None = None
    steady: bool = True
    phase: str = ""
    gpu: str = ""

    def __post_init__(self) -> None:
        require_positive(step_s=self.step_s)

    @property
    def label(self) -> str:
        cluster = self.job.cluster
        link = f"{cluster.inter_gbit:g} Gbit/s" if cluster.nodes > 1 else "one node"
        trains = " (LoRA)" if self.job.lora else ""
        phase = f" {self.phase}" if self.phase else ""
        return f"{self.run}{trains}{phase} @ {link}, {self.job.tokens} tokens"


def emulated_job(
    gbit: float | str | None,
    model: Model = MODELS["1.3b"],
    tokens: int = 1024,
    sequence: int | None = None,
    nodes: int = NODES,
    ranks_per_node: int = RANKS_PER_NODE,
    micro_batches: int = 1,
) -> Job:
    """The job of benchmarks/two_nodes.py: `gbit` Gbit/s, 0 for its link as it is, "nvlink" for one node of all ranks.

    Raises:
        PlanError: a rate that is none of these.
    """
    if gbit in ONE_NODE:
        return Job(model, Cluster(1, nodes * ranks_per_node), tokens, sequence, micro_batches)
    try:
        rate = float(gbit)
    except ValueError:
        raise PlanError(f'gbit must be a rate in Gbit/s, 0 (not shaped) or "nvlink" (one node); got {gbit!r}') from None
    return Job(model, Cluster(nodes, ranks_per_node, rate or UNSHAPED_GBIT), tokens, sequence, micro_batches)


def _peers() -> tuple[MeasuredPoint, ...]:
    """4 H200 as 2 emulated nodes x 2 (veth pair shaped to the rate, NCCL over TCP), 1.35 B Llama, bf16, micro-batch 1,
    sequence 1024, DeepSpeed 0.19.8, torch 2.11; "nvlink" is the same GPUs as one node. Medians, 2026-11-20."""
    step_ms = {
        ("stock", 25): 1839,
        ("stock", 10): 4569,
        ("in-tree-qwz", 25): 1252,
        ("in-tree-hpz", 25): 1307,
        ("in-tree-qgz", 25): 1309,
        ("in-tree", 25): 575,
        ("in-tree-leaf", 25): 535,
        ("in-tree", 10): 1096,
        ("fsdp2", 25): 1853,
        ("hsdp", 25): 902,
        ("hsdp", 10): 2190,
        ("stock", "nvlink"): 292,
        ("stock-leaf", "nvlink"): 184,  # 178 to 190
        ("fsdp2", "nvlink"): 98,
    }
    points = [
        MeasuredPoint(run, emulated_job(gbit), milliseconds / 1e3, "peers")
        for (run, gbit), milliseconds in step_ms.items()
    ]
    # Four sequences of 2048 tokens per GPU; FSDP2 with torch.compile.
    large = emulated_job("nvlink", tokens=8192, sequence=2048)
    points += [MeasuredPoint("stock", large, 0.309, "peers"), MeasuredPoint("fsdp2", large, 0.191, "peers")]
    return tuple(points)


PEERS = _peers()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.rglob("*.json"))
    if not path.exists():
        raise PlanError(f"there is no file or folder {path}")
    return [path]


def _rows(result: dict) -> Iterator[dict]:
    """Each row with what it inherits: {"gbit": .., "rows": [..]}, {"rates": [{"gbit": .., "rows": [..]}]}, {"settings":
    {"gbit": ..}, "rows": [..]}, and rows that carry "gbit", "model" or "tokens" themselves."""
    inherited = {key: value for key, value in result.items() if key not in ("rows", "rates", "settings")}
    inherited |= result.get("settings", {})
    for rate in result.get("rates", []):
        yield from _rows({**inherited, **rate})
    for row in result.get("rows", []):
        if isinstance(row, dict):
            yield {**inherited, **row}


def _ran_on_gpu(result: dict) -> bool:
    """By "hardware", or "device" in older files; a file that says neither did."""
    if "hardware" in result:
        return bool(result["hardware"].get("gpus"))
    return "NVIDIA" in str(result.get("device", "NVIDIA"))


def _gpu(row: dict) -> str:
    return str(row.get("hardware", {}).get("gpu", ""))


def run_name(row: dict) -> str:
    """The method of a row, with what its file says of all."""
    name = str(row["run"]).lower().replace("_", "-")
    if name.endswith("-difference"):
        return ALIASES[name]
    # The model reduces FSDP's gradients in 16 bits.
    return _as_sent(ALIASES.get(name, name), row) + ("-fp32-gradients" if row.get("reduce_dtype") == "fp32" else "")


def _as_sent(method: str, row: dict) -> str:
    """The method's name today, of one that a recipe had when the row was measured."""
    earlier = "date" in row and row["date"] <= WHOLE_UNTIL
    return method + WHOLE if earlier and f"{method}{WHOLE}" in METHODS else method


def llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Model:
    """The Llama of these sizes (benchmarks/harness/sizes.py)."""
    attention = 2 * hidden**2 * (1 + kv_heads / heads)
    blocks = layers * (attention + 3 * hidden * intermediate + 2 * hidden)
    return Model(blocks + 2 * vocabulary * hidden + hidden, hidden, layers, vocabulary)


def _model(row: dict, source: str) -> Model:
    """By its name, or its sizes."""
    name = row.get("model", "1.3b")
    if isinstance(name, dict):
        return llama(**name)
    if name not in MODELS:
        raise PlanError(f"{source}: model {name!r} is not known; models are {', '.join(MODELS)}")
    return MODELS[name]


def _of_mixture(row: dict) -> bool:
    """Whether a model is one of experts, of which the plan knows nothing."""
    model = row.get("model")
    return "experts" in model if isinstance(model, dict) else model in MIXTURES


def _apart(row: dict, rows: list[dict]) -> Cluster | None:
    """Ranks of one node with nothing but a shaped link each (benchmarks/one_node.py): as nodes of one GPU. A host may
    move less than the rate: the link is what an all-gather has reached on it, in the middle of the run's rounds."""
    if not isinstance(link := row.get("link"), (int, float)):
        return None
    reached = median(other["reached_gbit"] for other in rows if (other["run"], other["link"]) == (row["run"], link))
    return Cluster(row["ranks"], 1, round(min(reached, link or math.inf), 1))


def _point(row: dict, source: str, rows: list[dict]) -> MeasuredPoint:
    if isinstance(row.get("gbit"), (list, tuple)):
        raise PlanError(f'{source}: row {row["run"]!r} must say which of the rates {row["gbit"]} it ran at in "gbit"')
    sequence, nodes = row.get("sequence", row.get("tokens", 1024)), row.get("nodes", NODES)
    model, question = _model(row, source), row.get("question")
    job = emulated_job(
        row.get("gbit"),
        model,
        row.get("micro_batch", 1) * sequence,
        sequence,
        nodes,
        row.get("ranks_per_node", row.get("ranks", nodes * RANKS_PER_NODE) // nodes),
        row.get("accumulation", 1),
    )
    job = replace(
        job,
        cluster=_apart(row, rows) or job.cluster,
        kept_parameters=0 if question in NOTHING_KEPT else job.kept_parameters,
        checkpointing=bool(row.get("checkpointing", False)),
        lora=LORA if question in OF_LORA else None,
        learning_rate=row.get("lr", job.learning_rate),
    )
    peak = row["peak_gib"] * 2**30 if row.get("peak_gib") else row.get("peak_bytes")
    step_ms, fastest, slowest = row["step_ms"], row.get("min_ms", math.inf), row.get("max_ms", 0)
    # Where TCP lost data on an emulated link, it waited 200 ms or more: not of the method, nor of a real link.
    waits = row.get("tcp_timeouts") or []
    undisturbed = [ms for ms, waited in zip(row.get("times_ms", ()), waits) if not waited]
    if undisturbed:
        step_ms, fastest, slowest = median(undisturbed), min(undisturbed), max(undisturbed)
    steady = slowest < UNSTEADY * fastest and bool(undisturbed or not waits)
    return MeasuredPoint(run_name(row), job, step_ms / 1e3, source, peak, steady, gpu=_gpu(row))


def _phases(row: dict, source: str) -> list[MeasuredPoint]:
    """Of an iteration of RLHF."""
    method, lora = RLHF_RUNS[row["run"]]
    method = _as_sent(method, row)
    sequence, nodes = row["prompt"] + row["tokens"], row["nodes"]
    job = emulated_job(
        row["gbit"], _model(row, source), row["batch"] * sequence, sequence, nodes, row["ranks"] // nodes
    )
    job = replace(job, checkpointing=bool(row.get("checkpointing", False)), lora=LORA if lora else None)
    points = []
    for phase in PHASES:
        times, peak = row[f"{phase}_times_ms"], row["peak_bytes"] if phase == "training" else None
        steady = max(times) < UNSTEADY * min(times)
        points.append(MeasuredPoint(method, job, row[f"{phase}_ms"] / 1e3, source, peak, steady, phase, _gpu(row)))
    return points


def _over_rounds(points: list[tuple[str | None, MeasuredPoint]]) -> list[MeasuredPoint]:
    """Rounds of one run, of one version of the code, as one point: median step time, largest peak."""
    rounds: dict[tuple, list[MeasuredPoint]] = {}
    for version, point in points:
        rounds.setdefault((point.run, point.job, version), []).append(point)
    return [
        replace(
            one[0],
            step_s=median(point.step_s for point in one),
            peak_bytes=max((point.peak_bytes for point in one if point.peak_bytes), default=None),
            steady=all(point.steady for point in one),
        )
        for one in rounds.values()
    ]


def load_points(path: str | Path) -> list[MeasuredPoint]:
    """Points of a result of a benchmark that times training steps, or of every *.json below a folder. Rows without a
    step time (a run that failed), files without rows, runs on a CPU and largest batches of RLHF are left out. An
    iteration of RLHF gives a point a phase.

    Raises:
        PlanError: no such file, no JSON, a model that is not known, a row that does not say its rate, or something
            else where numbers and lists belong.
    """
    return [point for file in _files(Path(path)) for point in _points_of(file)]


def _points_of(file: Path) -> list[MeasuredPoint]:
    try:
        result = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{file}: not JSON ({error})") from None
    if not isinstance(result, dict) or not {"rows", "rates"} & set(result):
        return []
    try:
        if not _ran_on_gpu(result) or result.get("question") == RLHF_LIMITS:
            return []
        if result.get("question") == RLHF:
            return [point for row in _rows(result) if "training_ms" in row for point in _phases(row, file.name)]
        rows = [row for row in _rows(result) if row.get("step_ms") and "run" in row and not _of_mixture(row)]
        return _over_rounds([(row.get("version"), _point(row, file.name, rows)) for row in rows])
    except PlanError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        # Anything may stand where a number or list belongs.
        raise PlanError(f"{file}: not as benchmarks/two_nodes.py writes it ({error})") from None
