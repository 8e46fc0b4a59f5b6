"""Several runs of the RLHF scripts, or several jobs about them, one after the other in the same processes.

Processes take 1 s to be made and to do what is done once (transformers compiles 1000 regular expressions), a picture of
the log takes 1 s, and most runs here 0.5 s.
"""

from __future__ import annotations

import gc
import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import rlhf_jobs
import torch
import torch.distributed as dist
from ranks import printed, run_ranks
from safetensors.torch import load_file


@dataclass(frozen=True)
class Run:
    """One run of a script.

    Args:
        argv: its command line, without --deepspeed_config and --out.
        folder: for --out.
        stopped: (folder, step): first `folder` gets what the run in that one left, as if stopped after that step.
        without: pattern of files that are then lost.
        rows: (source, target): a file is copied before the run.
        draws: at the end it draws its log.
    """

    script: str
    argv: list[str]
    config: dict
    folder: Path
    stopped: tuple[Path, int] | None = None
    without: str | None = None
    rows: tuple[Path, Path] | None = None
    draws: bool = False


def run_in_turn(runs):
    """{name: Run} -> {name: (what it raised or None, its log without times, what it printed)}, on two ranks."""
    first, second = run_ranks(scripts, world=2, runs=runs)
    assert [raised is None for raised, *_ in first.values()] == [raised is None for raised, *_ in second.values()]
    return first


def scripts(runs):
    results = {}
    for name, run in runs.items():
        if dist.get_rank() == 0:
            if run.stopped:
                _copy_stopped(*run.stopped, run.folder, run.without)
            if run.rows:
                shutil.copyfile(*run.rows)
            run.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        importlib.import_module(run.script).shut_down = _end_engines
        before = len(printed())
        (raised,), log, said = rlhf_jobs.script(run.script, run.config, str(run.folder), [run.argv], run.draws)
        results[name] = raised, log, said[before:]
        gc.collect()
    return results


def jobs_in_turn(calls):
    """{name: (job, its arguments)} -> {name: what it returns on each of two ranks}."""
    of_ranks = run_ranks(several, world=2, calls=calls)
    return {name: [results[name] for results in of_ranks] for name in calls}


def several(calls):
    return {name: job(**arguments) for name, (job, arguments) in calls.items()}


def _end_engines(*engines):
    """Do what shut_down does, for processes that go on."""
    for engine in engines:
        engine.destroy()
    dist.barrier()


def _copy_stopped(run, step, to, without):
    """`to` gets what a run left that was stopped after `step`, which was not its last one."""
    shutil.copytree(run, to)
    for path in (to / "checkpoints").glob("step*"):
        if path.name != f"step{step}":
            shutil.rmtree(path)
    (to / "checkpoints" / "latest").write_text(f"step{step}")
    for path in (*to.glob("*model*.safetensors"), *(to.glob(without) if without else ())):
        path.unlink()


# -- what tests compare -----------------------------------------------------------------------------------------------


def same_models(first, second):
    """Whether two folders hold the same weights, bit for bit."""
    (one,), (other,) = (list(folder.glob("*model*.safetensors")) for folder in (first, second))
    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def logprobs_of(model, ids, attention=None, temperature=1.0):
    """float32 [B, L-1] in plain torch."""
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
