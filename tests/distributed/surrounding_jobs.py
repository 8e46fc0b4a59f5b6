"""Trainings inside of what a script may put around forward and backward."""

from __future__ import annotations

import contextlib

import torch
from models import batches, ds_config, full_fp32_weights, llama, make_engine
from parity_jobs import switch
from recipes import section_of


def copied():
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Around forward, and whether around backward too.
SURROUNDINGS = {
    "nothing": (contextlib.nullcontext, False),
    "saved tensors copied": (copied, False),
    "saved tensors on the CPU": (torch.autograd.graph.save_on_cpu, False),
    "anomalies looked for": (lambda: torch.autograd.set_detect_anomaly(True), True),
    "deterministic": (deterministic, True),
}


def trained(way, around):
    """(losses, fp32 weights) of three steps; `way` None: stock DeepSpeed."""
    switch(way is not None)
    section = None if way is None else section_of(way)
    engine, losses = make_engine(llama(), ds_config(section, "bf16", gradient_clipping=0.5)), []
    context, with_backward = SURROUNDINGS[around]
    for tokens in batches(3, torch.distributed.get_rank()):
        with context() if with_backward else contextlib.nullcontext():
            with context() if not with_backward else contextlib.nullcontext():
                loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = full_fp32_weights(engine.module)
    engine.destroy()
    return losses, weights


def differences(ways, trained=trained, kinds=tuple(SURROUNDINGS)):
    """{(way, kind): (losses without it, with it, weights that differ)}; the first of the kinds is nothing."""
    found = {}
    for way in ways:
        losses, weights = trained(way, kinds[0])
        for kind in kinds[1:]:
            others, other_weights = trained(way, kind)
            changed = [name for name in weights if not torch.equal(weights[name], other_weights[name])]
            found[way, kind] = losses, others, changed
    return found
