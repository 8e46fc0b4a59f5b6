"""Jobs on ranks for test_comm.py, and the inputs that ranks and tests compute alike. No DeepSpeed in here."""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist

from zeropp_fp8.comm import ErrorFeedback, WireLedger, make_topology
from zeropp_fp8.comm.all_gather import gather_through, rows_by_rank
from zeropp_fp8.comm.lanes import Lane
from zeropp_fp8.comm.reduce_scatter import ReduceScatterPlan, Reduction, Rings
from zeropp_fp8.formats import make_format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# No size is a multiple of every world, some are smaller than the world.
SHAPES = {
    "scalar": (),
    "one": (1,),
    "seven": (7,),
    "vector": (301,),
    "column": (7, 1),
    "small": (3, 5),
    "odd": (33, 61),
    "cube": (5, 3, 67),
    "big": (64, 120),
}
SHARDS = (1, 7, 300)
BLOCK = 64
# name: (format within the node, format between nodes) as arguments of make_format; None sends the tensor's dtype
PLANS = {
    "exact": (None, None),
    "int8": ({"name": "int8"}, {"name": "int8"}),
    "int8_int4": ({"name": "int8"}, {"name": "int4"}),
    "between_only": (None, {"name": "fp8_e4m3"}),
    "within_only": ({"name": "fp8_e5m2"}, None),
    "int8_int4_hadamard": ({"name": "int8"}, {"name": "int4", "hadamard": True}),
}
GATHER_FORMATS = {
    "none": {"name": "none"},
    "int8": {"name": "int8", "block_size": BLOCK},
    "int4_hadamard": {"name": "int4", "block_size": BLOCK, "hadamard": True},
    "fp8_e4m3": {"name": "fp8_e4m3", "block_size": None},
}
SPECIALS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
SPECIAL_SHAPE, SPECIAL_INDEX = (40, 67), 1203


def random(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).mul_(0.01).to(dtype)


def shard(rank, numel, dtype):
    """Return what a rank contributes to an all-gather."""
    return random(1000 * numel + rank, numel, dtype=DTYPES[dtype])


def gradient(rank, shape, dtype):
    """Return what a rank contributes to a reduce-scatter; ranks differ in magnitude and share a common part."""
    shape_of = SHAPES[shape]
    own, common = random(rank + 1, *shape_of), random(0, *shape_of)
    return ((rank + 1) * (own + common)).to(DTYPES[dtype])


def special_gradient(rank, world, value, dtype):
    """Finite everywhere but for one element of the last rank."""
    x = random(rank + 50, *SPECIAL_SHAPE, dtype=DTYPES[dtype])
    if rank == world - 1:
        x.view(-1)[SPECIAL_INDEX] = value
    return x


def plan_formats(plan):
    return [options and make_format(block_size=BLOCK, **options) for options in PLANS[plan]]


def gather_format(name, dtype):
    options = GATHER_FORMATS[name]
    return make_format(**options, dtype=DTYPES[dtype]) if name == "none" else make_format(**options)


def quantized_all_gather(own, wire_format, topology, ledger=None):
    """All ranks' flat shards, equally long, sent in `wire_format`."""
    levels = list(itertools.chain(*topology.gather_levels()))
    rows = rows_by_rank(gather_through(wire_format.encode(own), levels, ledger), [level.size for level in levels])
    return wire_format.decode_rows(rows, own.numel(), own.dtype).view(-1)


@torch.no_grad()
def quantized_reduce_scatter(tensors, topology, intra_format, inter_format, **more):
    """For each tensor this rank's slice of the mean over ranks, in fp32; `more`: fields of the reduction."""
    shapes, dtypes, device = [t.shape for t in tensors], [t.dtype for t in tensors], tensors[0].device
    plan = ReduceScatterPlan(shapes, dtypes, topology, intra_format, inter_format, device)
    results, here = [torch.zeros(size, device=device) for size in plan.slice_numels], Lane.here()
    for _ in plan.run(tensors, results, Reduction(Rings.on(device), here, here, **more)):
        pass
    return results


def attempt(function):
    """The function's result, or its error as text: the same on every rank, so none waits for another."""
    try:
        return function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def collectives(topologies):
    """{ranks_per_node: everything test_comm.py looks at} on this rank."""
    return {per_node: _collectives(make_topology(ranks_per_node=per_node)) for per_node in topologies}


def _collectives(topology):
    rank, world = topology.rank, topology.world_size
    names = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    gradients = [gradient(rank, shape, dtype) for shape, dtype in names]
    before = [x.clone() for x in gradients]
    out = {"place": (topology.node, topology.local_rank, topology.nodes, topology.ranks_per_node)}

    out["gathered"] = {
        (name, dtype, numel): quantized_all_gather(shard(rank, numel, dtype), gather_format(name, dtype), topology)
        for name in GATHER_FORMATS
        for dtype in DTYPES
        for numel in SHARDS
    }
    out["reduced"], out["same_alone"], out["special"] = {}, {}, {}
    for plan in PLANS:
        formats = plan_formats(plan)
        together = quantized_reduce_scatter(gradients, topology, *formats)
        out["reduced"][plan] = dict(zip(names, together))
        alone = [quantized_reduce_scatter([x], topology, *formats)[0] for x in gradients[::-1]][::-1]
        out["same_alone"][plan] = [torch.equal(a, b) for a, b in zip(together, alone)]
        for special, dtype in (("nan", "fp32"), ("inf", "fp16"), ("-inf", "bf16")):
            x = special_gradient(rank, world, SPECIALS[special], dtype)
            out["special"][plan, special] = quantized_reduce_scatter([x], topology, *formats)[0]
    out["inputs_kept"] = all(torch.equal(a, b) for a, b in zip(gradients, before))

    int8 = plan_formats("int8")
    out["vector_as_row"] = quantized_reduce_scatter([gradient(rank, "vector", "fp32").view(1, -1)], topology, *int8)[0]
    near_largest = torch.full((3, 50), 60000.0, dtype=torch.float16)
    out["near_largest"] = quantized_reduce_scatter([near_largest], topology, None, None)[0]
    # Slices come from different tensors of one bucket: an empty tensor between others moves nothing.
    for name, shape in (("empty_matrix", (0, 4)), ("empty_vector", (0,))):
        tensors = [gradients[0], torch.empty(shape), gradients[-1]]
        out[name] = attempt(lambda tensors=tensors: quantized_reduce_scatter(tensors, topology, *int8)[1])
    out["empty_gather"] = attempt(lambda: quantized_all_gather(torch.empty(0), make_format("int8"), topology))
    out["ledger"] = _count(topology)
    return out


LEDGER_SHARD, LEDGER_SHAPES = 300, ((33, 61), (37,))


def _count(topology):
    """(this rank's report, the total as one rank alone sees it) after two steps with known traffic."""
    ledger = WireLedger(topology.nodes, topology.ranks_per_node)
    piece = random(topology.rank, LEDGER_SHARD, dtype=torch.bfloat16)
    gradients = [random(1, *shape, dtype=torch.bfloat16) for shape in LEDGER_SHAPES]
    quantized_all_gather(piece, make_format("int8", block_size=128), topology, ledger)  # outside steps
    for step in range(2):
        with ledger.counting("weights_forward"):
            quantized_all_gather(piece, make_format("int4", block_size=128), topology, ledger)
            if step == 0:  # a report is the mean over steps
                quantized_all_gather(piece, make_format("int4", block_size=128), topology, ledger)
        with ledger.counting("gradients"):
            formats = make_format("int8", block_size=64), make_format("int4", block_size=128, hadamard=True)
            quantized_reduce_scatter(gradients, topology, *formats, ledger=ledger)
            ledger.stock_would_send(1000)
        with ledger.counting("other"):
            ledger.sent_around_ring(96, rounds=2)
        ledger.end_step()
    # One rank alone asks for the total; were that a collective, the others' next one would not match it.
    total = ledger.report(total=True) if topology.rank == topology.world_size - 1 else None
    dist.barrier()
    return ledger.report(), total


def secondary_gathers(per_node, sub_groups):
    """{ranks of a sub-group: (gathered, bytes of a whole gather, bytes of one from the secondary shard)}."""
    topology = make_topology(ranks_per_node=per_node)
    fmt = make_format("int8", block_size=BLOCK)
    out = {}
    for k in sub_groups:
        ledger = WireLedger(topology.nodes, per_node)
        payload = fmt.encode(shard(topology.rank, 300, "fp32"))
        before, after = topology.gather_levels(k)
        with ledger.counting("weights_forward"):
            held = gather_through(payload, before, ledger)
            forward = gather_through(held, after, ledger)
        with ledger.counting("weights_backward"):
            backward = gather_through(held, after, ledger)
        ledger.end_step()
        assert torch.equal(forward, backward)
        rows = rows_by_rank(forward, [level.size for level in (*before, *after)])
        report = ledger.report()["per_step"]
        out[k] = (
            fmt.decode_rows(rows, 300, torch.float32).view(-1),
            held.numel() // payload.numel(),
            report["weights_forward"],
            report["weights_backward"],
        )
    return out


def bad_topologies(numbers):
    """Return what make_topology says to each number of ranks a node."""
    return {number: attempt(lambda number=number: make_topology(ranks_per_node=number)) for number in numbers}


def in_groups(members, per_node):
    """Collectives of data-parallel groups that are not the world; ranks outside every group take no part."""
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next((index for index, ranks in enumerate(members) if dist.get_rank() in ranks), None)
    if mine is None:
        return None
    topology = make_topology(groups[mine], per_node)
    again = make_topology(groups[mine], per_node)
    fmt = make_format("int8", block_size=BLOCK)
    return {
        "rank": topology.rank,
        "same_groups": (again.between.group is topology.between.group) and again.within.group is topology.within.group,
        "gathered": quantized_all_gather(shard(dist.get_rank(), 300, "fp32"), fmt, topology),
        "reduced": quantized_reduce_scatter([gradient(dist.get_rank(), "odd", "fp32")], topology, None, None)[0],
    }


def error_feedback(per_node, steps):
    """The same gradient reduced `steps` times with and without error feedback."""
    topology = make_topology(ranks_per_node=per_node)
    formats = None, make_format("int4", block_size=128)
    names, tensors = ["odd", "vector"], [gradient(topology.rank, name, "fp32") for name in ("odd", "vector")]

    def reduce(feedback, which=slice(None)):
        return quantized_reduce_scatter(tensors[which], topology, *formats, error_feedback=feedback, keys=names[which])

    feedback, sums = ErrorFeedback(), [torch.zeros_like(x) for x in reduce(None)]
    first = None
    for _ in range(steps):
        results = reduce(feedback)
        first = results if first is None else first
        for total, result in zip(sums, results):
            total += result
    out = {
        "plain": reduce(None),
        "first": first,
        "mean": [total / steps for total in sums],
        "stored": len(feedback),
        "state_dtypes": {payload.dtype for payload in feedback.state_dict()["residuals"].values()},
        "state_bytes": {key: payload.numel() for key, payload in feedback.state_dict()["residuals"].items()},
    }
    copy = ErrorFeedback()
    copy.load_state_dict(feedback.state_dict())
    out["next"], out["next_from_state"] = reduce(feedback), reduce(copy)
    feedback.reset()
    out["stored_after_reset"], out["after_reset"] = len(feedback), reduce(feedback)
    # A step with NaN leaves nothing behind in the block that held it.
    spoiled = tensors[0].clone()
    tensors[0] = torch.full_like(spoiled, math.nan)
    out["spoiled"] = reduce(feedback)
    tensors[0] = spoiled
    out["after_nan"] = reduce(feedback)
    # Residuals belong to names, not to places in a bucket.
    by_name = ErrorFeedback()
    reduce(by_name)
    out["second"] = reduce(by_name)
    by_name = ErrorFeedback()
    for _ in range(2):
        reversed_order = reduce(by_name, slice(None, None, -1))
    out["second_reversed"] = reversed_order[::-1]
    return out
