"""Two-level quantized collectives on gloo against float64 references, for many worlds, shapes and dtypes."""

import functools
import math

import comm_jobs as jobs
import pytest
import torch
from comm_jobs import BLOCK, DTYPES, GATHER_FORMATS, PLANS, SHAPES, SHARDS
from error_bounds import UNIT_ROUNDOFF, error_bound, payload_size, signal_to_noise_db
from ranks import RankError, run_ranks

from zeropp_fp8.comm import WireLedger

TOPOLOGIES = [
    (world, per_node) for world in (1, 2, 3, 4, 6) for per_node in range(1, world + 1) if not world % per_node
]
EVERY_TOPOLOGY = pytest.mark.parametrize(
    ("world", "per_node"), TOPOLOGIES, ids=[f"{world // per_node}x{per_node}" for world, per_node in TOPOLOGIES]
)


def once(run):
    """Run only once with the same arguments; many tests look at one run. An error is kept too, and raised again."""

    @functools.cache
    def outcome(*arguments):
        try:
            return run(*arguments), None
        except RankError as error:
            return None, error

    def cached(*arguments):
        value, error = outcome(*arguments)
        if error is not None:
            raise error
        return value

    return cached


@once
def run_world(world):
    """One start of `world` ranks, which go through all their topologies."""
    return run_ranks(jobs.collectives, world=world, topologies=[p for w, p in TOPOLOGIES if w == world])


def results(world, per_node):
    """Results by rank."""
    return [result[per_node] for result in run_world(world)]


# --- topology ---------------------------------------------------------------------------------------------------


@EVERY_TOPOLOGY
def test_ranks_are_numbered_node_by_node(world, per_node):
    places = [result["place"] for result in results(world, per_node)]
    nodes = world // per_node
    assert places == [(n, i, nodes, per_node) for n in range(nodes) for i in range(per_node)]


def test_worlds_that_cannot_be_cut():
    for answers in run_ranks(jobs.bad_topologies, world=3, numbers=[0, -1, 2, 4, 6]):
        for number, answer in answers.items():
            assert answer == f"ValueError: 3 ranks cannot be cut into nodes of {number}"


@pytest.mark.parametrize(
    ("world", "members", "per_node"), [(6, [[1, 2, 4, 5]], 2), (4, [[0, 2], [1, 3]], 1), (4, [[0, 2], [1, 3]], 2)]
)
def test_groups_come_from_the_data_parallel_group(world, members, per_node):
    outcome = run_ranks(jobs.in_groups, world=world, members=members, per_node=per_node)
    fmt = jobs.gather_format("int8", "fp32")
    for ranks in members:
        expected = torch.cat([through(fmt, jobs.shard(rank, 300, "fp32")) for rank in ranks])
        mean = torch.stack([jobs.gradient(rank, "odd", "fp32").double() for rank in ranks]).mean(dim=0)
        for rank in ranks:
            assert outcome[rank]["rank"] == ranks.index(rank)
            assert outcome[rank]["same_groups"]
            assert torch.equal(outcome[rank]["gathered"], expected)
        reduced = torch.cat([outcome[rank]["reduced"] for rank in ranks])[: mean.numel()]
        torch.testing.assert_close(reduced.double(), mean.view(-1), rtol=0, atol=1e-7)
    assert all((outcome[rank] is None) != any(rank in ranks for ranks in members) for rank in range(world))


# --- all-gather -------------------------------------------------------------------------------------------------


def through(fmt, tensor):
    return fmt.decode(fmt.encode(tensor), tensor.shape, tensor.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GATHER_FORMATS)
@EVERY_TOPOLOGY
def test_all_gather_is_the_concatenation_of_decoded_shards(world, per_node, name, dtype):
    fmt = jobs.gather_format(name, dtype)
    for numel in SHARDS:
        shards = [jobs.shard(rank, numel, dtype) for rank in range(world)]
        expected = torch.cat([through(fmt, x) for x in shards])
        for result in results(world, per_node):
            gathered = result["gathered"][name, dtype, numel]
            assert gathered.dtype == DTYPES[dtype] and torch.equal(gathered, expected)
        if name == "none":
            assert torch.equal(expected, torch.cat(shards))


@EVERY_TOPOLOGY
def test_all_gather_of_nothing(world, per_node):
    for result in results(world, per_node):
        gathered = result["empty_gather"]
        assert isinstance(gathered, torch.Tensor) and gathered.shape == (0,), gathered


@once
def run_secondary(world):
    return run_ranks(jobs.secondary_gathers, world=world, per_node=4, sub_groups=[1, 2, 4, None])


@pytest.mark.parametrize("sub_group", [1, 2, 4, None])
@pytest.mark.parametrize("world", [4, 8])
def test_gather_through_a_secondary_shard(world, sub_group):
    """Rank order is right, and a gather from what the ranks hold sends no byte between nodes."""
    nodes, k = world // 4, sub_group or 4
    fmt = jobs.gather_format("int8", "fp32")
    expected = torch.cat([through(fmt, jobs.shard(rank, 300, "fp32")) for rank in range(world)])
    size = payload_size(300, bits=8, block_size=BLOCK)
    across = (4 // k - 1) * nodes * size  # to the other sub-groups of the node
    inside = (k - 1) * world // k * size  # to the other ranks of the sub-group
    for result in run_secondary(world):
        gathered, held, forward, backward = result[sub_group]
        assert torch.equal(gathered, expected)
        assert held == world // k  # payloads, 1/k of the model
        assert forward == {"inter": (nodes - 1) * size, "intra": across + inside}
        assert backward == {"inter": 0, "intra": inside}


# --- reduce-scatter ---------------------------------------------------------------------------------------------


def sliced(tensors, world):
    """float64 [len(tensors), world, slice]: flat tensors padded with zeros to equal slices."""
    size = math.ceil(tensors[0].numel() / world)
    out = torch.zeros(len(tensors), world * size, dtype=torch.float64)
    for row, tensor in zip(out, tensors):
        row[: tensor.numel()] = tensor.double().reshape(-1)
    return out.view(len(tensors), world, size)


def is_sent_exactly(shape, options):
    return options is None or len(SHAPES[shape]) < 2


def slice_bound(contributions, per_node, shape, dtype, plan):
    """float64 [slice]: the largest error of a reduced slice, from `contributions` [world, slice] of each rank.

    A hop with b ranks averages b rounding errors. The second hop rounds the means of nodes, which are off by the
    errors of the first. fp32 sums add a little.
    """
    world = contributions.shape[0]
    nodes = world // per_node
    within, between = PLANS[plan]
    torch_dtype = DTYPES[dtype]
    by_node = contributions.view(nodes, per_node, -1)
    partial = by_node.mean(dim=1)
    error = torch.zeros_like(partial)

    def rounding(values, options):
        if is_sent_exactly(shape, options):
            return UNIT_ROUNDOFF[torch_dtype] * values.abs() + 2.0**-25 * (torch_dtype == torch.float16)
        return error_bound(values, options["name"], BLOCK, False, torch.float32)

    if per_node > 1 and not is_sent_exactly(shape, within):
        error = torch.stack([torch.stack([rounding(x, within) for x in node]).mean(dim=0) for node in by_node])
    error = error + 2.0**-22 * by_node.abs().mean(dim=1)
    if nodes > 1 and (per_node > 1 or not is_sent_exactly(shape, between)):
        # Errors of the first hop may raise a block's amax, and with it the step of the second.
        error = error + torch.stack([rounding(x, between) for x in partial.abs() + error])
    return error.mean(dim=0) + 2.0**-22 * contributions.abs().mean(dim=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "hadamard" not in plan])
@EVERY_TOPOLOGY
def test_reduce_scatter_is_the_mean_within_its_error_bound(world, per_node, plan, dtype):
    ranks = results(world, per_node)
    for shape in SHAPES:
        exact = sliced([jobs.gradient(rank, shape, dtype) for rank in range(world)], world)
        for rank, result in enumerate(ranks):
            reduced = result["reduced"][plan][shape, dtype]
            assert reduced.dtype == torch.float32 and reduced.shape == exact.shape[2:]
            error = (reduced.double() - exact[:, rank].mean(dim=0)).abs()
            bound = slice_bound(exact[:, rank], per_node, shape, dtype, plan)
            assert (error <= bound).all(), f"{shape}, rank {rank}: {error.max()} over {bound.max()}"
            padding = rank * reduced.numel() + torch.arange(reduced.numel()) >= math.prod(SHAPES[shape])
            assert not reduced[padding].any()


@pytest.mark.parametrize("dtype", DTYPES)
@EVERY_TOPOLOGY
def test_reduce_scatter_with_rotation(world, per_node, dtype):
    """A rotated block has no useful bound per element: its error is spread, so its energy is looked at."""
    ranks = results(world, per_node)
    for shape in SHAPES:
        tensors = [jobs.gradient(rank, shape, dtype) for rank in range(world)]
        mean = torch.stack([x.double().reshape(-1) for x in tensors]).mean(dim=0)
        slices = [result["reduced"]["int8_int4_hadamard"][shape, dtype] for result in ranks]
        reduced = torch.cat(slices)[: mean.numel()].double()
        least = 17.5 if world > per_node else 38.0
        assert signal_to_noise_db(mean, reduced) > (least if len(SHAPES[shape]) > 1 else 50.0), shape


@pytest.mark.parametrize(("plan", "cosine", "norm"), [("int8", 0.9999, 0.0012), ("int8_int4_hadamard", 0.99, 0.03)])
@EVERY_TOPOLOGY
def test_reduced_gradient_keeps_direction_and_norm(world, per_node, plan, cosine, norm):
    ranks = results(world, per_node)
    for dtype in DTYPES:
        tensors = [jobs.gradient(rank, "big", dtype) for rank in range(world)]
        mean = torch.stack([x.double().view(-1) for x in tensors]).mean(dim=0)
        reduced = torch.cat([result["reduced"][plan]["big", dtype] for result in ranks])[: mean.numel()].double()
        assert torch.cosine_similarity(mean, reduced, dim=0) > cosine
        assert abs(reduced.norm() / mean.norm() - 1) < norm


@pytest.mark.parametrize("plan", PLANS)
@EVERY_TOPOLOGY
def test_result_does_not_depend_on_bucketing(world, per_node, plan):
    for result in results(world, per_node):
        assert all(result["same_alone"][plan])
        assert result["inputs_kept"]


@pytest.mark.parametrize("special", jobs.SPECIALS)
@pytest.mark.parametrize("plan", PLANS)
@EVERY_TOPOLOGY
def test_special_values_spoil_exactly_their_block(world, per_node, plan, special):
    """Sent exactly, a NaN or Inf stays one element; on a quantized hop its block of the slice becomes NaN."""
    ranks = results(world, per_node)
    size = math.ceil(math.prod(jobs.SPECIAL_SHAPE) / world)
    owner, index = divmod(jobs.SPECIAL_INDEX, size)
    within, between = PLANS[plan]
    quantized = (per_node > 1 and within is not None) or (world > per_node and between is not None)
    for rank, result in enumerate(ranks):
        reduced = result["special"][plan, special]
        spoiled = torch.zeros(size, dtype=torch.bool)
        if rank == owner:
            start = index // BLOCK * BLOCK if quantized else index
            spoiled[start : start + (BLOCK if quantized else 1)] = True
        assert torch.equal(~reduced.isfinite(), spoiled)
        if quantized:
            assert torch.equal(reduced.isnan(), spoiled)


@EVERY_TOPOLOGY
def test_vectors_are_not_quantized(world, per_node):
    for result in results(world, per_node):
        exact = result["reduced"]["int8"]["vector", "fp32"]
        assert torch.equal(result["vector_as_row"], exact) == (world == 1)


@EVERY_TOPOLOGY
def test_fp16_sums_do_not_overflow(world, per_node):
    for rank, result in enumerate(results(world, per_node)):
        reduced = result["near_largest"]
        own = min(reduced.numel(), 150 - rank * reduced.numel())
        assert torch.equal(reduced[:own], torch.full((own,), 60000.0))


@pytest.mark.parametrize("name", ["empty_matrix", "empty_vector"])
@EVERY_TOPOLOGY
def test_an_empty_tensor_in_a_bucket(world, per_node, name):
    for result in results(world, per_node):
        reduced = result[name]
        assert isinstance(reduced, torch.Tensor) and reduced.shape == (0,), reduced


# --- error feedback ---------------------------------------------------------------------------------------------

STEPS = 32


@once
def run_error_feedback(per_node):
    return run_ranks(jobs.error_feedback, world=4, per_node=per_node, steps=STEPS)


@pytest.mark.parametrize("per_node", [1, 2])
def test_error_feedback_converges_to_the_mean(per_node):
    """The error of the mean of k results falls like 1/k with feedback and stays without."""
    exact = sliced([jobs.gradient(rank, "odd", "fp32") for rank in range(4)], 4).mean(dim=0)
    for rank, result in enumerate(run_error_feedback(per_node)):
        assert torch.equal(result["first"][0], result["plain"][0])
        plain = (result["plain"][0] - exact[rank]).norm()
        with_feedback = (result["mean"][0] - exact[rank]).norm()
        assert plain > 0.05 * exact[rank].norm()
        assert with_feedback < plain / (STEPS / 2)


def test_error_feedback_keeps_8_bits_for_quantized_tensors_only():
    for result in run_error_feedback(2):
        numel = math.ceil(33 * 61 / 4)
        assert result["stored"] == 1 and result["state_dtypes"] == {torch.uint8}
        assert result["state_bytes"] == {"odd": 2 * payload_size(numel, bits=8, block_size=128)}
        assert torch.equal(result["first"][1], result["next"][1])


def test_error_feedback_state_and_reset():
    for result in run_error_feedback(2):
        assert torch.equal(result["next"][0], result["next_from_state"][0])
        assert not torch.equal(result["next"][0], result["plain"][0])
        assert result["stored_after_reset"] == 0
        assert torch.equal(result["after_reset"][0], result["plain"][0])
        assert result["spoiled"][0].isnan().all()
        assert torch.equal(result["after_nan"][0], result["plain"][0])
        assert torch.equal(result["second"][0], result["second_reversed"][0])


# --- ledger -----------------------------------------------------------------------------------------------------


def expected_bytes(nodes, per_node):
    """{kind: {link: bytes per step of one rank}} of the traffic in comm_jobs._count, from the formulas.

    Gather of a payload of b bytes: (nodes - 1) b between nodes, then (per_node - 1) times the nodes' payloads within.
    Reduce of slices: each other rank of the node gets one row per node, then each other node gets one row.
    """
    world = nodes * per_node
    weights = payload_size(jobs.LEDGER_SHARD, bits=4, block_size=128)
    matrix, vector = (math.ceil(math.prod(shape) / world) for shape in jobs.LEDGER_SHAPES)
    vector_bytes = math.ceil(2 * vector / 16) * 16  # bf16
    first = payload_size(matrix, bits=8, block_size=64) + vector_bytes
    second = payload_size(matrix, bits=4, block_size=128, hadamard=True) + vector_bytes
    gathers = 1.5  # three in two steps
    return {
        "weights_forward": {
            "inter": gathers * (nodes - 1) * weights,
            "intra": gathers * (per_node - 1) * nodes * weights,
        },
        "weights_backward": {"inter": 0, "intra": 0},
        "gradients": {"inter": (nodes - 1) * second, "intra": (per_node - 1) * nodes * first},
        "activations": {"inter": 0, "intra": 0},
        "other": ring_bytes(nodes, per_node, 2 * 96),
    }


def ring_bytes(nodes, per_node, num_bytes):
    """Mean bytes of a rank per link when each rank passes (world - 1)/world of the bytes on to the next rank."""
    world = nodes * per_node
    sent = {"inter": 0.0, "intra": 0.0}
    for rank in range(world):
        crosses = rank // per_node != (rank + 1) % world // per_node
        sent["inter" if crosses else "intra"] += num_bytes * (world - 1) / world / world
    return sent


def approximately(report):
    return {kind: pytest.approx(links) for kind, links in report.items()}


@EVERY_TOPOLOGY
def test_ledger_counts_what_the_formulas_say(world, per_node):
    nodes = world // per_node
    expected = expected_bytes(nodes, per_node)
    outside = payload_size(jobs.LEDGER_SHARD, bits=8, block_size=128)
    stock = {kind: {"inter": 0, "intra": 0} for kind in expected}
    stock["gradients"] = ring_bytes(nodes, per_node, 2 * 1000)
    for result in results(world, per_node):
        report, _ = result["ledger"]
        assert report["steps"] == 2
        assert report["per_step"] == approximately(expected)
        assert report["stock_per_step"] == approximately(stock)
        assert report["outside_steps"] == {"inter": (nodes - 1) * outside, "intra": (per_node - 1) * nodes * outside}


@EVERY_TOPOLOGY
def test_total_is_the_sum_over_ranks(world, per_node):
    reports = [result["ledger"][0] for result in results(world, per_node)]
    total = results(world, per_node)[-1]["ledger"][1]
    assert total["steps"] == 2
    for section in ("per_step", "stock_per_step"):
        for kind, links in total[section].items():
            for link, num_bytes in links.items():
                assert num_bytes == pytest.approx(sum(report[section][kind][link] for report in reports))
    for link, num_bytes in total["outside_steps"].items():
        assert num_bytes == sum(report["outside_steps"][link] for report in reports)


def test_an_unfinished_step_is_not_reported():
    ledger = WireLedger(nodes=2, ranks_per_node=2)
    with ledger.counting("gradients"):
        ledger.sent("inter", 10)
        with ledger.counting("other"):
            ledger.sent("intra", 3)
        ledger.sent("inter", 2)
    ledger.sent("intra", 5)  # outside of every step
    before = ledger.report()
    assert before["steps"] == 0 and not any(sum(links.values()) for links in before["per_step"].values())
    assert before["outside_steps"] == {"inter": 0, "intra": 5}
    ledger.end_step()
    after = ledger.report()
    assert after["per_step"]["gradients"] == {"inter": 12, "intra": 0}
    assert after["per_step"]["other"] == {"inter": 0, "intra": 3}
    assert ledger.report(total=True)["per_step"]["gradients"] == {"inter": 48, "intra": 0}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 8), (5, 3)])
def test_stock_is_a_ring_over_all_ranks_in_16_bits(nodes, per_node):
    ledger = WireLedger(nodes, per_node)
    with ledger.counting("weights_backward"):
        ledger.stock_would_send(12345)
    ledger.stock_would_send(99)  # outside of every step
    ledger.end_step()
    assert ledger.report()["stock_per_step"]["weights_backward"] == pytest.approx(ring_bytes(nodes, per_node, 24690))
