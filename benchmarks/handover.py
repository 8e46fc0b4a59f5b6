"""Weights for an engine that generates elsewhere: milliseconds, bytes, and how much of the model is there at a time.

    python -m benchmarks.handover --ranks 4 --gbit 25 --out handover.json      # two emulated nodes; as root
    python -m benchmarks.handover --ranks 2                                    # a small model on a CPU

A random Llama after a training step; bf16 on GPUs. What is measured is the trainer's side: gathering, merging, rounding
and comparing; what comes of it goes nowhere. All of the weights are trained, or LoRA beside them:

trl, trl-lora      stock DeepSpeed, and what TRL with vLLM iterates over: parameter by parameter; with LoRA the whole
                   model at once, merged in its own dtype
merged, ...-lora   zeropp: `weights="merged"`, block by block, adapters merged in fp32
fp8                zeropp with FP8 compute and weights that are sent in FP8: `format="fp8"`, the codes of training
changes, ...-lora  zeropp: `Changes`, the elements that a step has changed, places and values
updates, ...-lora  zeropp: `Updates`, exact differences
adapters-lora      zeropp: `weights="adapters"`
merged-qlora, adapters-qlora   on frozen weights that are stored in NF4

"payload" is what the engine gets, "gathered" what a rank of the trainer sends for it by the ledger of the plugin (stock
has none; `--gbit` counts at the interface for all), "there" the largest part of the weights that is gathered at once.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.harness.command import add_link, choose_runs, command, cut_into_nodes
from benchmarks.harness.hf_llama import sharded_model
from benchmarks.harness.lora import adamw, with_adapters
from benchmarks.harness.measuring import Meter, random_tokens, timed
from benchmarks.harness.nodes import sent_bytes, set_rate_everywhere
from benchmarks.harness.question import Question
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.tables import cell
from benchmarks.harness.zero3 import ds_config
from examples.options import finite, whole

FP8 = {"compute": {"format": "fp8", "scaling": "current"}, "weights": {"format": "fp8_e4m3"}}
# run: (section of the plugin, LoRA, arguments of WeightSource)
RUNS: dict[str, tuple[dict | None, bool, dict]] = {
    "trl": (None, False, {}),
    "merged": ({"recipe": "zeropp"}, False, {}),
    "changes": ({"recipe": "zeropp"}, False, {}),
    "updates": ({"recipe": "zeropp"}, False, {}),
    "fp8": ({"recipe": "zeropp", **FP8}, False, {"format": "fp8"}),
    "trl-lora": (None, True, {}),
    "merged-lora": ({"recipe": "zeropp"}, True, {}),
    "changes-lora": ({"recipe": "zeropp"}, True, {}),
    "updates-lora": ({"recipe": "zeropp"}, True, {}),
    "adapters-lora": ({"recipe": "zeropp"}, True, {"weights": "adapters"}),
    "merged-qlora": ({"recipe": "qlora"}, True, {}),
    "adapters-qlora": ({"recipe": "qlora"}, True, {"weights": "adapters"}),
}


def engine_of(run: str, args, device: torch.device):
    """A ZeRO-3 engine that has trained a step, and the function that trains another."""
    import deepspeed

    import zeropp_fp8

    section, lora, _ = RUNS[run]
    zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
    size = SIZES[args.size]
    config = ds_config(section, 1, small=size.small, lean=True, bf16=args.bf16)
    model = sharded_model(size, config)
    model = with_adapters(model, 0) if lora else model
    engine = deepspeed.initialize(model=model, optimizer=adamw(model, device, lr=args.lr), config=config)[0]
    batches = random_tokens(size.vocabulary, 1, 64, device)

    def step() -> None:
        tokens = next(batches)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    step()
    return engine, step


class OfTrl:
    """The weights that TRL iterates over, as a source. A first pass over all weights finds names, and is not timed."""

    def __init__(self, engine) -> None:
        from trl.generation.vllm_generation import DistributedBackend, VLLMGeneration

        trl = VLLMGeneration.__new__(VLLMGeneration)
        plugin = SimpleNamespace(zero_stage=3)
        trl.model, trl._dist = (
            engine.module,
            DistributedBackend(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))),
        )
        self._weights: Callable[[], Iterator[tuple[str, Tensor]]] = trl._iter_named_params
        self._declared = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def metadata(self) -> list:
        from zeropp_fp8.handover import ParamMeta

        return [ParamMeta(*declared) for declared in self._declared]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights()

    def take_part(self) -> Iterator[tuple[str, Tensor]]:
        """TRL's other ranks iterate as the first one does."""
        return self._weights()


class Iterated:
    """Takes all weights of a source on rank 0, and sends them nowhere.

    Attributes:
        sent_bytes: what an engine would have got so far.
    """

    def __init__(self, source) -> None:
        self._source, self.sent_bytes = source, 0

    def send_weights(self) -> None:
        taken = self._source if torch.distributed.get_rank() == 0 else self._source.take_part()
        self.sent_bytes += sum(tensor.nbytes for _, tensor in taken)


class OfChanges:
    """Takes what has changed, as elements or as exact differences, and sends it nowhere."""

    def __init__(self, changes) -> None:
        self._changes, self.sent_bytes = changes, 0

    def send_weights(self) -> None:
        for came in filter(None, self._changes):
            patches = [(patch.indices, patch.values) for patch in came] if isinstance(came, list) else []
            tensors = chain.from_iterable(patches) if patches else came.tensors.values()
            self.sent_bytes += sum(tensor.nbytes for tensor in tensors)


def source_of(run: str, engine):
    """Return what is handed over."""
    from zeropp_fp8.handover import WeightSource

    return OfTrl(engine) if RUNS[run][0] is None else WeightSource(engine, **RUNS[run][2])


def transfer_of(run: str, source):
    """A transfer to nowhere."""
    from zeropp_fp8.handover import Changes, Updates

    kinds = {"changes": Changes, "updates": Updates}
    kind = kinds.get(run.partition("-")[0])
    return Iterated(source) if kind is None else OfChanges(kind(source))


def there_at_once(engine, source: Iterable) -> int:
    """The most bytes of gathered weights, over one more hand-over; a byte per element where there are but codes."""
    from zeropp_fp8 import sharded

    most, params = 0, list(engine.module.parameters())
    for _ in source:
        there = [p for p in params if sharded.is_full(p)]
        most = max(
            most, sum(p.ds_numel * (1 if sharded.known(p).operand is not None else p.element_size()) for p in there)
        )
    return most


def gathered_bytes(run: str, engine) -> int | None:
    """Return what this rank has sent outside of steps; None without the plugin."""
    if RUNS[run][0] is None:
        return None
    import zeropp_fp8

    return sum(zeropp_fp8.wire_report(engine)["outside_steps"].values())


def measure(run: str, args, device: torch.device) -> dict:
    """The row of a run: the fastest of several hand-overs, a step between them."""
    if args.gbit is not None:
        set_rate_everywhere(None)
    engine, step = engine_of(run, args, device)
    source = source_of(run, engine)
    transfer = transfer_of(run, source)
    meter = Meter(device)
    transfer.send_weights()
    if args.gbit:
        set_rate_everywhere(args.gbit)
    times, sent_by_node = [], 0
    for _ in range(args.repeats):
        step()
        sent, payload = gathered_bytes(run, engine), transfer.sent_bytes
        before = sent_bytes() if args.gbit is not None else 0
        meter.start_peak()
        times.append(timed(transfer.send_weights, device)[0])
        torch.distributed.barrier()
        sent_by_node = sent_bytes() - before if args.gbit is not None else None
        gathered = None if sent is None else gathered_bytes(run, engine) - sent
        payload = transfer.sent_bytes - payload
        peak = meter.peak()
    step()
    row = {
        "run": run,
        "ms": min(times),
        "payload_bytes": payload,
        "gathered_bytes_per_rank": gathered,
        "tx_bytes_per_node": sent_by_node,
        "tensors": len(source.metadata()),
        "there_bytes": there_at_once(engine, source) if isinstance(transfer, Iterated) else None,
        "peak_bytes": peak,
    }
    engine.destroy()
    return {"round": args.round, **row}


def show(result: dict) -> None:
    """Print the table."""
    settings, rows = result["settings"], {}
    for row in sorted(result["rows"], key=lambda row: -row["ms"]):
        rows[row["run"]] = row  # of several rounds the fastest
    link = f", {settings['gbit']:g} Gbit/s between nodes" if settings["gbit"] else ""
    where = f"{settings['nodes']} node(s), {settings['ranks']} rank(s){link}"
    print(f"\nHanding weights over: Llama {settings['size']}, {where}")
    print(
        f"{'':<16}{'ms':>9}{'payload':>10}{'gathered':>13}{'between':>13}{'there':>9}{'peak':>9}\n"
        f"{'':<25}{'MB':>10}{'MB per rank':>13}{'MB per node':>13}{'MB':>9}{'MB':>9}"
    )
    keys = ("payload_bytes", "gathered_bytes_per_rank", "tx_bytes_per_node", "there_bytes", "peak_bytes")
    for run in (run for run in RUNS if run in rows):
        row = rows[run]
        cells = (cell(row[key], 2, 1e6, width) for key, width in zip(keys, (10, 13, 13, 9, 9)))
        print(f"{run:<16}{row['ms']:>9.1f}" + "".join(cells))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = command(__doc__, "handover", RUNS, SIZES, "1.3b" if on_gpu else "tiny-gqa")
    add_link(parser)
    parser.add_argument("--lr", type=finite(above=0), default=1e-6, help="of steps (default %(default)g)")
    parser.add_argument("--repeats", type=whole(1), default=3, help="hand-overs; the fastest counts")
    parser.add_argument("--rounds", type=whole(1), default=1, help="every other one backwards")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=on_gpu)
    args = parser.parse_args(argv)
    cut_into_nodes(args, parser)
    has_trl = importlib.util.find_spec("trl") is not None
    choose_runs(args, parser, [run for run in RUNS if has_trl or RUNS[run][0] is not None])
    return args


QUESTION = Question(
    name="handover",
    parse=parse,
    settings=("size", "ranks", "nodes", "gbit", "lr", "repeats", "bf16"),
    work=measure,
    line=lambda row: f"{row['run']}: {row['ms']:.1f} ms, {row['payload_bytes'] / 1e6:.2f} MB",
    compared=lambda result: {},
    show=show,
)

if __name__ == "__main__":
    QUESTION.answer()
