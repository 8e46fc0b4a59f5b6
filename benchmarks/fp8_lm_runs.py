"""The trainings that the FP8-LM benchmarks compare: ZeRO-3 engines over the same plain Llama.

stock, stock-leaf   DeepSpeed's ZeRO-3 in bf16 with fp32 AdamW; with every layer as a z3 leaf module
lossless            the same through this project: what the levels of FP8-LM are added to
fp8-compute         lossless, linear layers in FP8
fp8-lm-o1           + FP8 gradients, on the wire and until the step
fp8-lm-o2           + AdamW's states in 5 bytes a parameter
fp8-lm              + whole tensors and FP8 weights on the wire (O3)
"""

from __future__ import annotations

import gc
import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from emulated_nodes import launch
from environment import append_to, dumped, forget_memory, read_result
from llama import Llama, Size
from torch import Tensor

SIZES = {
    "7b": Size(hidden=4096, intermediate=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000),
    "4b": Size(hidden=3072, intermediate=8192, layers=32, heads=24, kv_heads=24, vocabulary=32000),
    "2b": Size(hidden=2560, intermediate=6912, layers=24, heads=20, kv_heads=20, vocabulary=32000),
    "1.3b": Size(hidden=2048, intermediate=5504, layers=24, heads=16, kv_heads=16, vocabulary=32000),
    "small": Size(hidden=256, intermediate=688, layers=6, heads=4, kv_heads=4, vocabulary=2048),
    "tiny": Size(hidden=128, intermediate=352, layers=4, heads=4, kv_heads=4, vocabulary=512),
}
STOCK = ("stock", "stock-leaf")
SECTIONS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "stock-leaf": None,
    "lossless": {"recipe": "lossless"},
    "fp8-compute": {"recipe": "lossless", "compute": {"format": "fp8"}},
    "fp8-lm-o1": {"recipe": "fp8-lm-o1"},
    "fp8-lm-o2": {"recipe": "fp8-lm-o2"},
    "fp8-lm": {"recipe": "fp8-lm"},
}
LEVELS = ("fp8-lm-o1", "fp8-lm-o2", "fp8-lm")
PEAK_FLOPS = 989e12  # of an H200 (and H100) in dense bf16; the same for all runs, so that FP8 may exceed its half


# -- one training ---------------------------------------------------------------------------------------------------


def ds_config(section: dict | None, micro_batch: int, size: Size, lean: bool) -> dict:
    """A ds_config.

    Args:
        section: of the plugin; None for stock.
        lean: small buffers, and no weight stays gathered, so that a rank at rest has its model states and little else;
            without, the settings of two_nodes.py.
    """
    bucket, kept = (10**7, 0) if lean else (10**8, 2 * 10**8)
    zero: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": bucket,
        "stage3_prefetch_bucket_size": bucket,
        "stage3_max_live_parameters": kept,
        "stage3_max_reuse_distance": kept,
    }
    if size.hidden < 1024:  # every tensor of a small model is below the limits, and it would stay gathered
        zero |= {
            "reduce_bucket_size": 100_000,
            "stage3_prefetch_bucket_size": 100_000,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
        }
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    if section is not None:
        config["zeropp_fp8"] = {"report": {"every": 0}, **section}
    return config


def refusal(section: dict | None) -> str | None:
    """Why this version does not take a section; None where it does."""
    from zeropp_fp8.config import ConfigError, resolve

    try:
        resolve(ds_config(section, 1, SIZES["tiny"], False))
    except ConfigError as error:
        return str(error)
    return None


def without_refused(sections: dict[str, dict | None]) -> list[str]:
    """The names of those sections that this version takes; the others are printed with the reason."""
    taken = []
    for name, section in sections.items():
        reason = refusal(section)
        if reason is None:
            taken.append(name)
        else:
            print(f"{name} is left out: {reason}", flush=True)
    return taken


class EngineRun:
    """A bf16 Llama in a ZeRO-3 engine.

    Args:
        section: the plugin's; None for stock DeepSpeed.
        leaf: make every layer a z3 leaf module (stock only).
        dtype: of the initial weights; fp32 weights are drawn on the CPU, so that they are the same on every device.
        groups: what to call for the optimizer's groups of a model; all parameters alike without it.
        optimizer: keywords of torch.optim.AdamW.
    """

    def __init__(
        self,
        section: dict | None,
        size: Size,
        device: torch.device,
        *,
        leaf: bool = False,
        micro_batch: int = 1,
        checkpointing: bool = False,
        lean: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        groups=None,
        optimizer: dict | None = None,
    ) -> None:
        import deepspeed

        import zeropp_fp8

        zeropp_fp8.disable() if section is None else zeropp_fp8.enable()
        self.device, self.found_bytes = device, live_bytes(device)
        torch.manual_seed(seed)
        if dtype == torch.float32:
            model = Llama(size, checkpointing).to(device)
        else:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            with device:
                model = Llama(size, checkpointing)
            torch.set_default_dtype(before)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.weight_bytes = live_bytes(device) - self.found_bytes
        if leaf:
            deepspeed.utils.set_z3_leaf_modules(model, ["Block"])
        chosen = torch.optim.AdamW(
            model.parameters() if groups is None else groups(model),
            **({"lr": 1e-4} | (optimizer or {})),
            fused=device.type == "cuda",
        )
        config = ds_config(section, micro_batch, size, lean)
        self.engine = deepspeed.initialize(model=model, optimizer=chosen, config=config)[0]
        self.with_plugin = section is not None

    def step(self, tokens: Tensor) -> Tensor:
        """One training step on int64 tokens [micro-batch, length]; the loss, fp32 []."""
        loss = self.engine(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def wire(self) -> dict | None:
        """Bytes of all ranks so far, by the plugin's count."""
        import zeropp_fp8

        return zeropp_fp8.wire_report(self.engine, total=True) if self.with_plugin else None

    def gradient_scales(self) -> dict[str, float] | None:
        """mu and the shares of the last step, where gradients have scales that ranks share."""
        scales = getattr(self.engine.optimizer, "scales", None)
        return None if scales is None else scales.report()

    def close(self) -> None:
        """Free what can be freed."""
        import zeropp_fp8

        self.engine.destroy()
        del self.engine
        zeropp_fp8.disable()
        forget_memory(self.device)


def live_bytes(device: torch.device) -> int:
    """Bytes of living tensors: by the CUDA allocator; on a CPU the sum over all storages that Python can find."""
    if device.type == "cuda":
        return forget_memory(device)
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), Tensor) or thing.is_meta:
            continue
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def random_tokens(size: Size, micro_batch: int, length: int, device: torch.device) -> Iterator[Tensor]:
    """int64 [micro_batch, length], the same in every run; different ones on every rank."""
    generator = torch.Generator().manual_seed(7 + torch.distributed.get_rank())
    while True:
        yield torch.randint(size.vocabulary, (micro_batch, length), generator=generator).to(device)


def flops_per_token(size: Size, length: int) -> float:
    """Of a training step, without what checkpointing computes twice.

    6 for every weight that is multiplied (all but the embedding and the norms), and for attention half of
    12 * layers * hidden * length, because a position sees only those before it.
    """
    head_size = size.hidden // size.heads
    attention = 2 * size.hidden * size.hidden + 2 * size.hidden * size.kv_heads * head_size
    weights = size.layers * (attention + 3 * size.hidden * size.intermediate) + size.hidden * size.vocabulary
    return 6 * weights + 6 * size.layers * size.hidden * length


# -- starting ranks --------------------------------------------------------------------------------------------------


@dataclass
class Job:
    """Work for a group of ranks.

    `runs` follow one another in the same processes; the worker announces each before it begins, so that the others can
    go on without one that fails.
    """

    label: str
    runs: list[str]
    arguments: dict[str, Any] = field(default_factory=dict)


def run_jobs(
    script: str,
    jobs: Sequence[Job],
    args,
    deadline: float,
    *,
    side_by_side: int = 1,
    namespaces: bool = False,
) -> None:
    """Do all jobs on groups of args.ranks ranks in args.nodes nodes, `side_by_side` groups at a time.

    A worker is called as `script --worker JSON` with {**vars(args), **job.arguments, "runs", "label", "first_gpu"}.
    What fails, or has no time left, is added to the list "failed" of the result file args.out.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def work(place: int) -> None:
        while True:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _run_job(script, job, args, deadline, place * args.ranks, namespaces)
            except TimeoutError as error:
                append_to(args.out, "failed", {"run": job.label, "error": str(error)})
                print(f"{job.label}: {error}", flush=True)
                return

    threads = [threading.Thread(target=work, args=(place,)) for place in range(side_by_side)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run_job(script: str, job: Job, args, deadline: float, first_gpu: int, namespaces: bool) -> None:
    runs = list(job.runs)
    while runs:
        left = deadline - time.monotonic()
        if left < 1:
            raise TimeoutError(f"no time was left for {', '.join(runs)}")
        before = len(_started(args.out, job.label))
        chosen = {**vars(args), **job.arguments, "runs": runs, "label": job.label, "first_gpu": first_gpu}
        with tempfile.TemporaryDirectory() as folder:
            try:
                launch(
                    script,
                    ["--worker", json.dumps(chosen)],
                    args.ranks,
                    Path(folder, "store"),
                    left,
                    nodes=args.nodes,
                    namespaces=namespaces,
                )
                return
            except RuntimeError as error:
                started = _started(args.out, job.label)[before:]
                if not started:  # the ranks did not even find each other: no run's fault, and no use to try again
                    append_to(args.out, "failed", {"run": job.label, "error": str(error)})
                    return
                if not started[-1].get("ended"):
                    run = started[-1]["run"]
                    print(f"{job.label}, {run}: {error}; going on without it", flush=True)
                    append_to(args.out, "failed", {"run": run, "label": job.label, "error": str(error)})
                runs = runs[sum(not entry.get("ended") for entry in started) :]


def _started(path: str, label: str) -> list[dict]:
    return [entry for entry in read_result(path)["started"] if entry["label"] == label]


def announce(args, run: str, **more) -> None:
    """Rank 0 of a worker writes that a run begins, or (`ended=True`) that what ends the processes now is no failure."""
    if torch.distributed.get_rank() == 0:
        append_to(args.out, "started", {"label": args.label, "run": run, **more})


def choose_gpus(args) -> None:
    """Let this process see the GPUs of its job: before anything of CUDA, `launch` having given it the first ones."""
    visible = [number for number in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if number]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(int(number) + args.first_gpu) for number in visible)


def begin_result(path: str, head: dict) -> None:
    """Write a result file with empty lists."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(dumped({**head, "rows": [], "failed": [], "started": []}))


def end_result(path: str, **more) -> dict:
    """Add the last parts to a result file, and take out what only served to go on; what it holds then."""
    result = read_result(path)
    result.pop("started", None)
    result |= more
    Path(path).write_text(dumped(result))
    return result
