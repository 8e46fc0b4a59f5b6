"""Steps, what is done between them, and what each step is said to send."""

from __future__ import annotations

import random

import deepspeed
import torch
import torch.distributed as dist
from looking_jobs import LOOKS, STORED
from models import batches, ds_config, llama, make_engine
from recipes import section_of
from running import loss_of, shared_folder, switch

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
    with torch.no_grad():
        for tokens in batches(2, dist.get_rank(), seed=9):
            engine(input_ids=tokens, labels=tokens)
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
    config = section_of("zeropp", frozen=STORED) if way == "stored" else section_of(way)
    model, chosen = llama(), random.Random(0)
    for name, param in model.named_parameters():
        param.requires_grad_(way != "stored" or "mlp" not in name)
    engine = make_engine(model, ds_config(config, "bf16", zero_optimization=STAYS[stays]))
    foreseen = predicted_bytes(engine.zeropp_fp8_session, engine.optimizer.gatherer)
    metrics, rows = StepMetrics(engine.zeropp_fp8_session), []
    # Steps after these work more: copies of frozen weights, and those that differences are added to, come anew when the
    # weights were written; and after an evaluation in another order a step learns the order of fetches anew.
    more = {"write"} if way in ("stored", "zeropp-diff") else set()
    more |= {"last layers first"} if stays == "all" else set()
    names = sorted(BETWEEN.keys() - more)
    for tokens in batches(STEPS, dist.get_rank()):
        between = chosen.sample(names, chosen.randrange(4)) if rows else []
        for name in between:
            BETWEEN[name](engine, folder)
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        found = metrics().items()
        rows.append((between, {name: value for name, value in found if name.startswith(("mb_", "of_stock"))}))
    engine.destroy()
    return rows, foreseen


def sent(cases):
    """{(way, what stays): `_sent`}."""
    switch(True)
    folder = shared_folder()
    return {case: _sent(*case, folder) for case in cases}


def log_of_trainer(folder):
    """What the Trainer's log says of each step's bytes between nodes, while it evaluates and saves every other step."""
    from trainer_feature_jobs import _automatic, _text, _trainer

    every_other = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = _trainer("zeropp", folder, 7, llama(), _text(), config=_automatic("zeropp"), **every_other)
    zeropp_fp8.integrations.log_metrics(trainer)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    names = "mb_between_nodes", "of_stock_between_nodes"
    return [{name: round(entry[f"zeropp_fp8/{name}"], 9) for name in names} for entry in log]
