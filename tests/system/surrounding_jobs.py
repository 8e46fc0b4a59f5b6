"""Trainings inside of what a script may put around forward and backward."""

from __future__ import annotations

import contextlib

import torch
from recipes import section_of
from running import Spec, backward, differing, forward, run, update, within


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
    """Three steps; `way` None: stock DeepSpeed."""
    context, with_backward = SURROUNDINGS[around]
    spec = Spec(way and section_of(way), "bf16", {"gradient_clipping": 0.5})
    inside, outside = ((forward, backward), ()) if with_backward else ((forward,), (backward,))
    return run(spec, [within(lambda engine: context(), *inside), *outside, update] * 3, ("masters",))


def differences(ways, trained=trained, kinds=tuple(SURROUNDINGS)):
    """{(way, kind): how the training differs from the one with the first of the kinds, which is nothing}."""
    found = {}
    for way in ways:
        plain = trained(way, kinds[0])
        for kind in kinds[1:]:
            found[way, kind] = differing(trained(way, kind), plain)
    return found
