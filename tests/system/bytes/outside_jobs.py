"""Steps, what is done between them, and what each step is said to send."""

from __future__ import annotations

import random

import deepspeed
import torch
import torch.distributed as dist
from looking_jobs import LOOKS, STORED
from models import batches, llama
from recipes import section_of
from running import Spec, evaluated, freezing, on_engine, run, see, shared_folder, step

import zeropp_fp8.integrations
from zeropp_fp8.zero.report import predicted_bytes
from zeropp_fp8.zero.telemetry import StepMetrics

# What stays gathered: nothing; small parameters; and all that a step needs again.
_SMALL = {"stage3_param_persistence_threshold": 5000}
STAYS = {
    "nothing": {},
    "small": _SMALL,
    "all": {**_SMALL, "stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": 10**9}
    | {"stage3_prefetch_bucket_size": 30000},
}
STEPS = 9


def _evaluate(engine, folder):
    engine.eval()
    for tokens in batches(2, dist.get_rank(), seed=9):
        evaluated(engine, tokens)
    engine.train()


def _look(engine, folder):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pass


def _write(engine, folder):
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            for param in engine.module.parameters():
                param.data.mul_(1.01)


def _generate(engine, folder):
    with zeropp_fp8.generation(engine, weights="values") as model:
        model.generate(torch.arange(5).view(1, 5), max_new_tokens=2, do_sample=False)


BETWEEN = {**LOOKS, "evaluate": _evaluate, "look": _look, "write": _write, "generate": _generate}


def _sent(way, stays, folder):
    """(what is done before it, what it is said to send) of each step; and what the start table says."""
    stored, chosen, metrics = way == "stored", random.Random(0), []
    whole = {"weights": {"difference": "none"}}  # bytes of differences are those of what a step has changed
    config = section_of("zeropp", frozen=STORED, **whole) if stored else section_of(way, **whole)
    spec = Spec(config, "bf16", {"zero_optimization": STAYS[stays]}, adapted=freezing(*["mlp"] * stored))
    # Steps after these work more: copies of frozen weights come anew when the weights were written; and after an
    # evaluation in another order a step learns the order of fetches anew.
    more = {"write"} if way == "stored" else set()
    more |= {"last layers first"} if stays == "all" else set()
    names = sorted(BETWEEN.keys() - more)
    done = [(), *(chosen.sample(names, chosen.randrange(4)) for _ in range(STEPS - 1))]

    def begin(engine):
        metrics.append(StepMetrics(engine.zeropp_fp8_session))
        return predicted_bytes(engine.zeropp_fp8_session, engine.optimizer.gatherer)

    def sent(engine):
        return {name: value for name, value in metrics[0]().items() if name.startswith(("mb_", "of_stock"))}

    events = [event for names in done for event in (*(on_engine(BETWEEN[n], folder) for n in names), step, see(sent))]
    foreseen, *rows = run(spec, [see(begin), *events]).seen
    return list(zip(done, rows)), foreseen


def sent(cases):
    """{(way, what stays): `_sent`}."""
    folder = shared_folder()
    return {case: _sent(*case, folder) for case in cases}


def log_of_trainer(folder):
    """Return each step's bytes between nodes in the Trainer's log, while it evaluates and saves every other step."""
    from trainer_feature_jobs import _automatic, _text, _trainer

    every_other = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    config = _automatic("zeropp")
    config["zeropp_fp8"] = section_of("zeropp", ranks_per_node=1, weights={"difference": "none"})
    trainer = _trainer("zeropp", folder, 7, llama(), _text(), config=config, **every_other)
    zeropp_fp8.integrations.log_metrics(trainer)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = "mb_between_nodes", "of_stock_between_nodes"
    return [{name: round(entry[f"zeropp_fp8/{name}"], 9) for name in names} for entry in log]
