"""Jobs on ranks whose gradients of several micro-batches add up inside the node."""

from __future__ import annotations

import os
from unittest import mock

import torch
import torch.distributed as dist
from late_key_jobs import ON_CPU, UNMANAGED
from models import batches, full_fp32_weights, section
from running import Spec, accumulated, allow_fp16_on_cpu, forward_backward, loss_of, run, see

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
    """In blocks of 32, where the format leaves a choice."""
    if name == "none":
        return None
    return make_format(name) if name == "nvfp4" else make_format(name, block_size=32)


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


def in_the_middle(recipe, offload=False):
    """Looks, failures and saves between the micro-batches of a step; what became of each."""
    from deepspeed.utils import safe_get_full_grad, safe_get_local_grad

    found = {}
    tokens = list(batches(6, dist.get_rank()))

    def backward(engine, which):
        forward_backward(engine, tokens[which])

    def full_grads(engine):
        return {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}

    # In 8 bits, whose errors are small enough to see anything else.
    gradients = {"inter_format": "int8"} if recipe == "zeropp" else {}

    def engines():
        options = {"offload": offload, "gradients": gradients, "gradient_accumulation_steps": 3}
        return (spec_of(recipe, way, **options).engine() for way in ("world", "node"))

    looked = []
    for engine in engines():
        for which in range(2):
            backward(engine, which)
            engine.step()
        if engine.optimizer.reduction.sums_numel:
            try:
                safe_get_local_grad(next(engine.module.parameters()))
            except RuntimeError as error:
                found["refused"] = str(error)
        if not offload:
            looked.append(full_grads(engine))
        backward(engine, 2)
        looked.append(full_grads(engine))
        found["local"] = safe_get_local_grad(next(engine.module.parameters())) is not None
        engine.step()
        looked.append(full_fp32_weights(engine.module))
        engine.destroy()
    found["looked"] = looked

    engine = spec_of(recipe, "node", offload=offload, gradient_accumulation_steps=3).engine()
    backward(engine, 3)
    engine.step()
    engine.optimizer.zero_grad()  # begins the step again
    engine.micro_steps = 0
    for which in range(3):
        backward(engine, which)
        engine.step()
    found["again"] = full_fp32_weights(engine.module)
    engine.destroy()
    return found


def fresh(recipe, offload, saves_in=None):
    """Weights after the first step of an engine that has done nothing before, but saved between its micro-batches."""
    engine = spec_of(recipe, "node", offload=offload, gradient_accumulation_steps=3).engine()
    for place, tokens in enumerate(batches(3, dist.get_rank())):
        if saves_in is not None:
            engine.save_checkpoint(saves_in, tag=f"before {place}")
        forward_backward(engine, tokens)
        engine.step()
    weights = full_fp32_weights(engine.module)
    engine.destroy()
    return weights


def skipped_and_right_again(recipe):
    """fp16: a gradient of Inf in the first of three micro-batches on one rank; whether steps were skipped, weights."""

    allow_fp16_on_cpu()
    engine = spec_of(recipe, "node", dtype="fp16", gradient_accumulation_steps=3).engine()
    data, skipped, changed = batches(9, dist.get_rank()), [], []
    for step in range(3):
        before = full_fp32_weights(engine.module)
        for place in range(3):
            tokens = next(data)
            loss = loss_of(engine, tokens)
            bad = step == 1 and place == 0 and dist.get_rank() == 1
            engine.backward(loss * float("inf") if bad else loss)
            engine.step()
        skipped.append(engine.skipped_steps)
        after = full_fp32_weights(engine.module)
        changed.append(any(not torch.equal(before[name], after[name]) for name in before))
        assert all(weight.isfinite().all() for weight in after.values())
    engine.destroy()
    return skipped, changed


def table_of(memory):
    """The start table where a device has so much memory."""
    from deepspeed.accelerator import get_accelerator
    from ranks import printed

    accelerator = type(get_accelerator())
    accelerator.total_memory = lambda self, index=None: memory * (1 + dist.get_rank())
    spec_of("zeropp", None).engine().destroy()
    return printed()
