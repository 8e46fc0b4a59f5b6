"""Jobs on ranks whose gradients of several micro-batches add up inside the node."""

from __future__ import annotations

import os
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from late_key_jobs import ON_CPU, UNMANAGED
from models import batches, full_fp32_weights, section
from ranks import attempt, printed
from running import (
    Spec,
    accumulated,
    allow_fp16_on_cpu,
    backward,
    forward,
    on_engine,
    run,
    same,
    see,
    step,
    update,
)

from zeropp_fp8.comm import ErrorFeedback, make_topology
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan, Reduction, Rings
from zeropp_fp8.formats import make_format


def spec_of(recipe, accumulate_in, dtype="fp32", offload=False, gradients=None, **options):
    """Of a small Llama; recipe None: stock."""
    chosen = None
    if recipe is not None:
        given = {"accumulate_in": accumulate_in} if accumulate_in else {}
        chosen = section(recipe, gradients={**given, **(gradients or {})})
    options = {"gradient_clipping": 0.5, **(ON_CPU if offload else {}), **options}
    return Spec(chosen, dtype, options)


def train(recipe, micro_batches, accumulate_in=None, style="managed", **options):
    """Three steps, with the norms of their gradients. `style`: who says when the step follows."""
    if style == "managed":
        options["gradient_accumulation_steps"] = micro_batches
    if style == "unmanaged":
        options.update(UNMANAGED)
    norm = see(lambda engine: float(engine.get_global_grad_norm()))
    left = ("masters",) if recipe is None else ("masters", "bytes")
    return run(spec_of(recipe, accumulate_in, **options), [*accumulated(micro_batches, style), norm] * 3, left)


def runs(cases):
    """A run for each."""
    return [train(**case) for case in cases]


def _format(name):
    return None if name == "none" else make_format(name, block_size=32)


# -- the two hops apart ------------------------------------------------------------------------------------------------


def hops_apart(format_names, dtype, passes, residuals, seed):
    """(what `run` gives of the sum of all passes, what the hops apart give, the exact mean of the sum).

    Tensors of odd shapes; a matrix smaller than the number of ranks, too.
    """
    topology = make_topology(ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    device = torch.device("cpu")
    formats = [_format(name) for name in format_names]
    shapes = [(33, 17), (5,), (1, 3), (64, 8)]
    plan = ReduceScatterPlan(shapes, [dtype] * len(shapes), topology, *formats, device)
    here = Lane.here()

    def reduction():
        names = [str(i) for i in range(len(shapes))]
        feedback = ErrorFeedback() if residuals else None
        return Reduction(Rings.on(device), here, here, error_feedback=feedback, keys=names)

    generators = [torch.Generator().manual_seed(seed + rank) for rank in range(topology.world_size)]
    of_ranks = [[[torch.randn(s, generator=g).to(dtype) for s in shapes] for _ in range(passes)] for g in generators]
    mine = of_ranks[topology.rank]
    exact = [
        sum(grads[i].double() for of_rank in of_ranks for grads in of_rank) / topology.world_size
        for i in range(len(shapes))
    ]
    own = []
    for full, size in zip(exact, plan.slice_numels):
        flat = torch.nn.functional.pad(full.view(-1), (0, size * topology.world_size - full.numel()))
        own.append(flat[topology.rank * size : (topology.rank + 1) * size])

    apart = [torch.full((size,), 7.0) for size in plan.slice_numels]
    sums, used = plan.new_sums(torch.float32), reduction()
    for index, grads in enumerate(mine):
        for _ in plan.sum_in_node(grads, sums, used, accumulate=index > 0):
            pass
    for _ in plan.spread(sums, apart, used, accumulate=False):
        pass
    whole = [torch.zeros(size) for size in plan.slice_numels]
    used = reduction()
    for index, grads in enumerate(mine):
        for _ in plan.run(grads, whole, used, accumulate=index > 0):
            pass
    return whole, apart, own


def makes_nothing_anew(format_names):
    """Sum and spread twice; the second time `torch.tensor`, whose result a GPU waits for, raises."""
    topology = make_topology(ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]))
    device, shapes = torch.device("cpu"), [(33, 17), (5,)]
    formats = [_format(name) for name in format_names]
    plan = ReduceScatterPlan(shapes, [torch.float32] * 2, topology, *formats, device)
    here = Lane.here()
    reduction = Reduction(Rings.on(device), here, here)
    sums, results = plan.new_sums(torch.float32), [torch.empty(size) for size in plan.slice_numels]

    def once():
        for steps in (
            plan.sum_in_node([torch.ones(shape) for shape in shapes], sums, reduction, accumulate=False),
            plan.spread(sums, results, reduction, accumulate=False),
        ):
            for _ in steps:
                pass

    once()
    with mock.patch.object(torch, "tensor", side_effect=AssertionError("a tensor is made from numbers")):
        once()
    return [result.sum().item() for result in results]


def several_hops_apart(cases):
    return [hops_apart(**case) for case in cases]


# -- what happens in the middle of a step ------------------------------------------------------------------------------


def in_the_middle(recipe, offload, folder):
    """Looks, failures and saves between the micro-batches of a step; what became of each."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad

    found, looked = {}, []
    tokens = list(batches(4, dist.get_rank()))
    options = {"offload": offload, "gradient_accumulation_steps": 3}

    def refused(engine):
        if engine.optimizer.reduction.sums_numel:
            found["refused"] = attempt(lambda: safe_get_local_grad(next(engine.module.parameters())))

    def local(engine):
        found["local"] = safe_get_local_grad(next(engine.module.parameters())) is not None

    def begin_again(engine):
        engine.optimizer.zero_grad()
        engine.micro_steps = 0

    full_grads = see(lambda engine: {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()})
    looks = [step, step, on_engine(refused), *[full_grads] * (not offload), forward, backward, full_grads]
    # In 8 bits, whose errors are small enough to see anything else.
    gradients = {"inter_format": "int8"} if recipe == "zeropp" else {}
    for way in ("world", "node"):
        spec = spec_of(recipe, way, gradients=gradients, **options)
        trace = run(spec, [*looks, on_engine(local), update], ("masters",), tokens)
        looked += [*trace.seen, trace.masters]

    spec = spec_of(recipe, "node", **options)
    saves = [on_engine(lambda engine, tag=tag: engine.save_checkpoint(folder, tag=tag)) for tag in ("a", "b", "c")]
    cases = {
        "again": ([step, on_engine(begin_again), step, step, step], [tokens[3], *tokens]),
        "fresh": ([step, step, step], tokens),
        "saved": ([event for save in saves for event in (save, step)], tokens),
    }
    weights = {name: run(spec, events, ("masters",), data).masters for name, (events, data) in cases.items()}
    return found | {"looked": looked} | weights


def skipped_and_right_again(recipe):
    """fp16: a gradient of Inf in the first of three micro-batches on one rank; whether steps were skipped, weights."""
    allow_fp16_on_cpu()

    def overflow(running):
        if dist.get_rank() == 1:
            running.loss = running.loss * float("inf")

    spec = spec_of(recipe, "node", dtype="fp16", gradient_accumulation_steps=3)
    look = see(lambda engine: (engine.skipped_steps, full_fp32_weights(engine.module)))
    bad = [forward, overflow, backward, update, step, step]
    seen = run(spec, [look, step, step, step, look, *bad, look, step, step, step, look]).seen
    assert all(weight.isfinite().all() for _, weights in seen for weight in weights.values())
    return [skipped for skipped, _ in seen[1:]], [not same(this, that) for (_, this), (_, that) in pairwise(seen)]


def table_of(memory):
    """The start table where a device has so much memory."""
    found = SimpleNamespace(total=memory * (1 + dist.get_rank()), available=memory)
    with mock.patch("psutil.virtual_memory", lambda: found):
        spec_of("zeropp", None).engine().destroy()
    return printed()
