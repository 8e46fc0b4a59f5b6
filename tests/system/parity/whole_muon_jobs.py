"""Jobs with Muon on owners of whole matrices."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from models import batches, llama, section
from ranks import attempt
from running import Spec, backward, changed, forward, loaded, run, saved, see, shared_folder, step, update
from update_jobs import numbers
from whole_jobs import fields

from zeropp_fp8.optim import Muon
from zeropp_fp8.optim.muon import COEFFICIENTS

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False}
SECTIONS = {
    "lossless": section("lossless", **fields()),
    "zeropp": section("zeropp", partition="whole_tensor", partition_split="none"),
    "zeropp-exact": section("zeropp-exact", partition="whole_tensor", partition_split="none"),
    "fp8-lm": section("fp8-lm", partition_split="none", compute={"format": "fp8", "min_features": 16}),
}


def muon(params):
    """Of all matrices; AdamW of vectors."""
    params = list(params)
    matrices, vectors = (
        [p for p in params if (len(getattr(p, "ds_shape", p.shape)) > 1) is many] for many in (True, False)
    )
    of_matrices = {"params": matrices, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return Muon([of_matrices, {"params": vectors, **ADAM}])


def spec_of(the_section, seed=0, **options):
    return Spec(the_section, model=functools.partial(llama, layers=1, seed=seed), optimizer=muon, **options)


def seen_of_states(engine):
    """fp32 weights and momenta of matrices."""
    (weights,) = numbers(engine, safe_get_full_fp32_param)
    momenta = {
        name: safe_get_full_optimizer_state(param, "momentum_buffer").double()
        for name, param in engine.module.named_parameters()
        if len(param.ds_shape) > 1
    }
    return weights, momenta


def written_out(matrix, steps=5):
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


def trained_and_resumed(names, steps=4):
    """{section: (largest error of a matrix over its change, of a momentum over its amax, losses, what differs in a run
    that has gone on from a checkpoint)}. Errors are those of steps written out in float64.
    """
    found = {}
    for name in names:
        folder, half = shared_folder(), steps // 2
        data = list(batches(steps, dist.get_rank()))
        seen = [forward, backward, see(seen_of_states), see(numbers, safe_get_full_grad), update, see(seen_of_states)]
        trace = run(spec_of(SECTIONS[name]), [*seen * half, saved(folder, "half"), *seen * half], data=data)
        weight_error, momentum_error = 0.0, 0.0
        for (weights, momenta), (grads,), (after, written) in zip(*[iter(trace.seen)] * 3):
            for which, held in momenta.items():
                momentum = held.lerp(grads[which], 1 - MOMENTUM)
                rows, columns = held.shape
                direction = written_out(grads[which].lerp(momentum, MOMENTUM)) * max(1, rows / columns) ** 0.5
                change = LR * (direction + DECAY * weights[which])
                off = (after[which] - weights[which] + change).abs().max()
                weight_error = max(weight_error, (off / change.abs().max()).item())
                momentum_error = max(
                    momentum_error, ((written[which] - momentum).abs().max() / momentum.abs().max()).item()
                )
        events = [loaded(folder, "half"), *[step] * half, see(seen_of_states)]
        resumed = run(spec_of(SECTIONS[name], seed=3), events, data=data[half:])
        others = [which for pair in zip(trace.seen[-1], resumed.seen[0]) for which in changed(*pair)]
        found[name] = weight_error, momentum_error, trace.losses, others
    return found


def refusals():
    """Return what is said of matrices that are cut, and of slices."""
    sections = section("zeropp", partition="whole_tensor"), section("zeropp")
    said = [attempt(spec_of(each).engine) for each in sections]
    of_all = Spec(SECTIONS["zeropp"], model=functools.partial(llama, layers=1), optimizer=Muon)
    return [*said, attempt(of_all.engine)]
