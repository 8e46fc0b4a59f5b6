"""Jobs with the files of ds_configs as they are: tests' own ds_configs allow what a user's need not."""

from __future__ import annotations

import json

import torch.distributed as dist
from models import batches, llama, make_engine
from ranks import attempt
from running import freezing, switch, trained

from tests.places import ROOT


def trained_as_they_are(names):
    """{name: losses of two steps, or what was raised}."""
    return {name: _trained(name) for name in names}


def _trained(name):
    switch(True)
    config = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
    losses = []

    def train():
        model = llama()
        if config.get("zeropp_fp8", {}).get("recipe") == "qlora":
            freezing("mlp")(model)  # it is refused where nothing is frozen
        engine = make_engine(model, config, None if "optimizer" in config else "adamw")
        losses.extend(trained(engine, batches(2, dist.get_rank(), batch=config["train_micro_batch_size_per_gpu"])))
        engine.destroy()

    said = attempt(train)
    return said if said != "nothing raised" else losses
