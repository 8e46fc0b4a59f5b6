"""The cost model: bytes against hand-computed counts and the ledger, times and memory by hand, and its errors."""

import itertools
import json
import math
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from hang_guard import HANG

from benchmarks import plan_scaling
from benchmarks.plan_fit.points import emulated_job, run_name
from tests.places import ROOT
from zeropp_fp8.config import RECIPES, PluginConfig, difference_bits
from zeropp_fp8.plan import (
    EMULATED_H200,
    H200,
    LORA_METHODS,
    METHODS,
    TABLE_METHODS,
    V100,
    Cluster,
    Hardware,
    Job,
    Lora,
    Model,
    PlanError,
    estimate,
    memory_per_gpu,
    method_named,
    method_of,
)
from zeropp_fp8.plan.__main__ import main
from zeropp_fp8.plan.memory import MARGIN, memory_for_copies
from zeropp_fp8.plan.methods import LORA_TABLE_METHODS, element_bytes
from zeropp_fp8.plan.step_time import codec_bytes, optimizer_seconds, overlapped

RESULTS = ROOT / "benchmarks/results/two_nodes"
PARAMETERS = 1345423360  # of the benchmark's Llama
M = 2 * PARAMETERS
NONE_KEPT = replace(emulated_job(25), kept_parameters=0)
OF_ALL_WEIGHTS = [name for name, method in METHODS.items() if method.stored_bytes is None]


def moved(name, job=NONE_KEPT, hardware=EMULATED_H200):
    return estimate(METHODS[name], job, hardware).inter_bytes


# -- bytes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stock", 3 * 3 / 4 * M),  # a ring of 4 ranks carries 3/4 of M over each node's link, three times
        ("lossless", (1 / 2 + 1 / 2 + 3 / 4) * M),  # gathers in two levels; DeepSpeed's own reduce-scatter
        ("zeropp-whole", (1 + 2 / 256) * PARAMETERS / 2 + (1 / 2 + 2 / 128) * PARAMETERS / 2),
        ("zeropp", (0.18 / 8 + 1 / 2 + 2 / 128) * PARAMETERS / 2),
        ("fp8-lm-zeropp", (0.17 / 8 + 1 / 2 + 2 / 128) * PARAMETERS / 2),
        ("zeropp-4bit", 2 * (1 / 2 + 2 / 128) * PARAMETERS / 2),
        ("zeropp-exact", (0.75 / 8 + 1 / 2 + 2 / 128) * PARAMETERS / 2),
        ("in-tree", (1 + 4 / 8000) * PARAMETERS * 3 / 4 + (1 / 2 + 4 / 2048) * PARAMETERS / 2),
        ("in-tree-hpz", 2 * 3 / 4 * M),
        ("hsdp", 2 * 1 / 2 * M),  # all-reduce between 2 nodes
        ("fsdp2", 3 / 4 * (3 * M - 2 * 2 * 32000 * 2048)),  # embeddings stay gathered
    ],
)
def test_bytes_between_two_nodes(name, expected):
    assert moved(name) == pytest.approx(expected, rel=1e-12)


def test_bytes_of_the_zeropp_recipe_in_gigabytes():
    """0.67 GB of INT8 weights and 0.33 GB of INT4 gradients leave a node per step, plus their scales."""
    method, job = METHODS["zeropp-whole"], NONE_KEPT
    assert method.forward_traffic(job).inter / 1e9 == pytest.approx(0.67, abs=0.01)
    assert method.backward_traffic(job).inter == 0
    assert method.gradient_traffic(job).inter / 1e9 == pytest.approx(0.33, abs=0.02)


def test_published_volumes_at_many_nodes():
    """3 M for ZeRO-3, 0.75 M for ZeRO++ (arXiv 2306.10209, table 1); the factors (W-1)/W and the scales are small."""
    job = replace(NONE_KEPT, cluster=Cluster(1000, 8, 100))
    assert moved("stock", job) / M == pytest.approx(3, rel=1e-3)
    assert moved("in-tree", job) / M == pytest.approx(0.75, rel=3e-3)
    assert moved("zeropp-whole", job) / M == pytest.approx(0.75, rel=0.02)


@pytest.mark.parametrize("name", ["25gbit", "10_6_4gbit"])
def test_bytes_against_the_ledger_and_the_interface(name):
    """The plan says what the two-node benchmark counted, in the ledger and on the network interface."""
    result = json.loads((RESULTS / f"h200-4-{name}.json").read_text())
    assert len(result["rows"]) > 5
    for row in result["rows"]:
        modelled = moved(run_name({**result, **row}), emulated_job(row["gbit"]))
        # Stock keeps somewhat other parameters from forward to backward than the settings say; with hpZ none matter.
        # In-tree ZeRO++ sends some tensors in 16 bits after all; those are not modelled.
        tolerance = {"zeropp": 0.006, "zeropp-4bit": 0.006}.get(row["run"], 0.05)
        assert modelled == pytest.approx(row["tx_bytes_per_node_step"], rel=tolerance), row["run"]
        if row["run"].startswith("zeropp"):
            assert modelled == pytest.approx(row["ledger_bytes_per_node_step"], rel=2e-3)


def test_formats_have_the_size_that_they_travel_in():
    """The plan imports no torch, so it counts bits and scales a second time."""
    from zeropp_fp8.config import FIXED_BLOCKS, FROZEN_FORMATS, WIRE_FORMATS
    from zeropp_fp8.formats import DOUBLE_QUANTIZED_NAMES, make_format

    names = {*WIRE_FORMATS, *FROZEN_FORMATS} - {"none"}
    assert len(names) > 10 and element_bytes("none", 8) == 2
    for name, block_size in itertools.product(sorted(names), (64, 128, 256)):
        ways = [{}] if name in FIXED_BLOCKS else [{"block_size": block_size}]
        if name in DOUBLE_QUANTIZED_NAMES:
            ways.append({"block_size": block_size, "double_quantize": True})
        for options in ways:
            sized = element_bytes(name, block_size, options.get("double_quantize", False))
            assert sized == pytest.approx(make_format(name, **options).bits_per_element / 8, rel=1e-12), (name, options)


def test_every_recipe_is_planned():
    assert RECIPES.keys() < METHODS.keys() and RECIPES.keys() - {"qlora"} < set(TABLE_METHODS)
    assert "qlora" in LORA_TABLE_METHODS and set(LORA_TABLE_METHODS) <= set(LORA_METHODS)


def test_what_recipes_compute_in():
    for name, section in RECIPES.items():
        if name in METHODS and METHODS[name].stored_bytes is None:
            computes = section.get("compute", {}).get("format", "none")
            assert (METHODS[name].cast_bytes > 0) == (computes != "none"), name
            assert METHODS[name].fp8_products == (computes == "fp8"), name


def test_gradient_accumulation_gathers_and_reduces_again_only_without_copies_and_sums_in_the_node():
    job = replace(NONE_KEPT, micro_batches=4)
    zeropp = METHODS["zeropp"]
    assert moved("stock", job) == 4 * moved("stock")
    assert moved("zeropp", job) == zeropp.forward_traffic(job).inter + zeropp.gradient_traffic(job).inter
    one, four = (estimate(zeropp, each, H200) for each in (NONE_KEPT, job))
    assert four.intra_bytes > 3.5 * one.intra_bytes
    # For it each rank of a node keeps its share of the gradient in 16 bits.
    in_node = 2 * job.model.parameters / job.cluster.ranks_per_node
    assert four.memory.gradients - one.memory.gradients == pytest.approx(in_node)
    alone = replace(job, cluster=Cluster(1, job.cluster.ranks_per_node))
    assert (
        estimate(zeropp, alone, H200).memory.gradients
        == estimate(zeropp, replace(alone, micro_batches=1), H200).memory.gradients
    )


@pytest.mark.parametrize("name", OF_ALL_WEIGHTS)
def test_one_gpu_and_one_node(name):
    alone = estimate(METHODS[name], replace(NONE_KEPT, cluster=Cluster(1, 1)), H200)
    assert alone.inter_bytes == alone.intra_bytes == 0
    node = estimate(METHODS[name], replace(NONE_KEPT, cluster=Cluster(1, 4)), H200)
    assert node.inter_bytes == 0 < node.intra_bytes
    one_each = estimate(METHODS[name], replace(NONE_KEPT, cluster=Cluster(4, 1, 25)), H200)
    assert one_each.intra_bytes == 0 < one_each.inter_bytes


PCIE = METHODS["zeropp-pcie-whole"]
# One node of 4 GPUs without NVLink: as it is, and as nodes of a GPU each.
ALONE = [replace(NONE_KEPT, cluster=cluster) for cluster in (Cluster(1, 4), Cluster(4, 1, 64))]


def sent_by_a_gpu(job):
    one = estimate(PCIE, job, H200)
    return one.inter_bytes + one.intra_bytes


@pytest.mark.parametrize("job", ALONE, ids=["one node", "a node a GPU"])
def test_copies_on_every_gpu_send_weights_once(job):
    weights, gradients = (1 + 2 / 256) * PARAMETERS * 3 / 4, (0.5 + 2 / 128) * PARAMETERS * 3 / 4
    assert sent_by_a_gpu(job) == pytest.approx(weights + gradients)
    assert sent_by_a_gpu(replace(job, micro_batches=5)) == pytest.approx(weights + gradients)
    half = replace(job, copies=0.5 * (1 + 2 / 256) * PARAMETERS)
    assert sent_by_a_gpu(half) == pytest.approx(1.5 * weights + gradients)
    none = replace(job, copies=0, micro_batches=3)
    assert sent_by_a_gpu(none) == pytest.approx(6 * weights + gradients)
    assert estimate(PCIE, none, H200).step_s > estimate(PCIE, replace(job, micro_batches=3), H200).step_s


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (4, 1), (2, 4), (3, 2)])
def test_ranks_that_count_as_nodes_exchange_gradients_one_by_one(nodes, per_node):
    """Each sends each of the others a slice of all gradients, whichever node that is on: message by message."""
    ranks = range(nodes * per_node)
    sent = {True: 0.0, False: 0.0}
    for sender, receiver in itertools.permutations(ranks, 2):
        sent[sender // per_node == receiver // per_node] += (0.5 + 2 / 128) * PARAMETERS / len(ranks)
    method, job = METHODS["zeropp-pcie"], replace(NONE_KEPT, cluster=Cluster(nodes, per_node, 25), micro_batches=3)
    traffic = method.gradient_traffic(job)
    assert (traffic.inter, traffic.intra) == pytest.approx((sent[False] / nodes, sent[True] / len(ranks)))
    assert method.gradient_traffic(job, last=False) == replace(
        traffic, inter=0, intra=0, net_hops=0, node_hops=0, at_once=False
    )
    assert memory_per_gpu(method, job).gradients == pytest.approx(2 * PARAMETERS * (1 + 1 / len(ranks)))


@pytest.mark.parametrize("job", ALONE, ids=["one node", "a node a GPU"])
def test_copies_and_residuals_take_memory(job):
    whole = memory_per_gpu(PCIE, job)
    assert whole.secondary == pytest.approx((1 + 2 / 256) * PARAMETERS)
    assert whole.residuals == pytest.approx((1 + 2 / 128) * PARAMETERS)
    some = memory_per_gpu(PCIE, replace(job, copies=1e8))
    assert some.secondary == pytest.approx(1e8) and whole.held - some.held == pytest.approx(whole.secondary - 1e8)
    assert memory_per_gpu(PCIE, replace(job, copies=1e12)) == whole
    several = memory_per_gpu(PCIE, replace(job, micro_batches=2))
    assert several.gradients - whole.gradients == pytest.approx(2 * PARAMETERS), "sums rest on each GPU"
    # A quarter of the GPU is left; what there is without copies has been taken.
    without = memory_per_gpu(PCIE, replace(job, copies=0)).held
    assert memory_for_copies(PCIE, job, 24e9) == pytest.approx(0.75 * 24e9 - without)
    assert memory_for_copies(PCIE, job, 1e9) == 0


def test_frozen_weights_are_copied_first():
    job = replace(ALONE[1], lora=Lora(16), copies=PARAMETERS)  # bytes: of all but some of the embeddings
    adapters, blocks, embeddings = PCIE.copied(job)
    assert adapters[1] == 0 and blocks[1] == 1 and 0 < embeddings[1] < 1


def test_the_margin_is_the_one_of_the_recipe():
    from zeropp_fp8.zero.gather.secondary import MARGIN as OF_THE_ENGINE

    assert MARGIN == OF_THE_ENGINE


def test_command_line_bounds_copies(capsys):
    shared = ["--params", "1.35e9", "--nodes", "4", "--ranks-per-node", "1", "--kept", "0", "--methods", "zeropp-pcie"]

    def planned(*more):
        with suppress(SystemExit):  # where it does not fit
            main([*shared, *more, "--json"])
        return json.loads(capsys.readouterr().out)["methods"][0]

    whole, some = planned(), planned("--secondary-gb", "0.5")
    auto, small = (planned("--secondary-gb", "auto", "--gpu-gb", size) for size in ("80", "1"))
    assert some["memory"]["secondary"] == pytest.approx(5e8) and small["memory"]["secondary"] == 0
    assert auto == whole and whole["inter_bytes"] < some["inter_bytes"] < small["inter_bytes"]
    for wrong in (["--secondary-gb", "auto"], ["--secondary-gb", "much"], ["--secondary-gb", "-1"]):
        with pytest.raises(SystemExit):
            main([*shared, *wrong])


# -- time


def pipeline(wire, busy, blocks):
    """Two stages, simulated block by block."""
    on_wire = on_gpu = 0.0
    for _ in range(blocks):
        on_wire += wire / blocks
        on_gpu = max(on_gpu, on_wire) + busy / blocks
    return on_gpu


@pytest.mark.parametrize(("wire", "busy", "blocks"), itertools.product((0.0, 1.0, 3.5), (0.0, 0.7, 8.0), (1, 2, 33)))
def test_overlap_is_a_two_stage_pipeline(wire, busy, blocks):
    assert overlapped(wire, busy, blocks) == pytest.approx(pipeline(wire, busy, blocks))
    assert overlapped(wire, busy, blocks, overlap=0.0) == pytest.approx(wire + busy)


def test_a_wire_bound_step_by_hand():
    """Stock over 1 Gbit/s: 9/4 M bytes at 0.125 GB/s; nothing else is near."""
    job = replace(NONE_KEPT, cluster=Cluster(2, 2, 1))
    hardware = replace(EMULATED_H200, link_efficiency=1.0)
    one = estimate(METHODS["stock"], job, hardware)
    assert one.step_s == pytest.approx(9 / 4 * M / 0.125e9, rel=0.01)
    assert one.step_s > 9 / 4 * M / 0.125e9
    assert one.bound == "wire between nodes"


def test_what_bounds_a_step():
    def bound(name, **changes):
        return estimate(METHODS[name], replace(NONE_KEPT, **changes), H200).bound

    assert bound("stock", cluster=Cluster(1, 4)) == "host"
    assert bound("stock", cluster=Cluster(1, 4), tokens=1 << 16) == "compute"
    assert bound("stock") == "wire between nodes"
    slow = replace(H200, codec_efficiency=0.001)
    assert estimate(METHODS["zeropp"], NONE_KEPT, slow).bound == "quantizing"
    far = replace(H200, net_latency_us=1e4)
    assert estimate(METHODS["stock"], replace(NONE_KEPT, cluster=Cluster(64, 1, 1e6)), far).bound == "latency"


@pytest.mark.parametrize("name", OF_ALL_WEIGHTS)
def test_monotonic(name):
    def steps(jobs, hardware=H200):
        return [estimate(METHODS[name], job, hardware).step_s for job in jobs]

    rates = steps(replace(NONE_KEPT, cluster=Cluster(4, 8, gbit)) for gbit in (10, 25, 100, 400, 1600))
    assert rates == sorted(rates, reverse=True)
    tokens = steps(replace(NONE_KEPT, tokens=count) for count in (1024, 4096, 1 << 14, 1 << 17))
    assert tokens == sorted(tokens)
    sizes = steps(replace(NONE_KEPT, model=Model.from_parameters(size)) for size in (1e9, 7e9, 3e10, 7e10))
    assert sizes == sorted(sizes)
    nodes = [moved(name, replace(NONE_KEPT, cluster=Cluster(count, 8, 100))) for count in (1, 2, 4, 64, 128)]
    assert nodes == sorted(nodes)
    kept = steps(replace(NONE_KEPT, kept_parameters=count) for count in (1e9, 2e8, 0))
    assert kept == sorted(kept)
    batches = steps(replace(NONE_KEPT, micro_batches=count) for count in (1, 2, 8))
    assert batches == sorted(batches)
    faster = [steps([NONE_KEPT], replace(H200, overlap=share))[0] for share in (1.0, 0.5, 0.0)]
    assert faster == sorted(faster)
    assert steps([replace(NONE_KEPT, checkpointing=True, tokens=1 << 17)]) > steps([replace(NONE_KEPT, tokens=1 << 17)])


def test_computing_in_fp8_by_hand():
    """4 layers of 1,024 and 2,730.7 wide, 2 x 512 tokens; nothing but computing and casts takes time."""
    model = Model(4 * 12 * 1024**2 + 2 * 32000 * 1024, 1024, 4)
    job = Job(model, Cluster(1, 1), 1024, 512, checkpointing=True)
    hardware = replace(H200, achieved_tflops=400, matrix_tflops=800, fp8_tflops=1600, codec_efficiency=1)
    hardware = replace(hardware, host_per_block_ms=0)
    low, high = (estimate(METHODS[name], job, hardware) for name in ("fp8-compute", "lossless"))
    in_blocks = 2 * 1024 * 4 * 12 * 1024**2
    inputs, gradients = (1024 * 4 * (a * 1024 + b * 8 / 3 * 1024) for a, b in ((3, 1), (5, 2)))
    casts, saved = 4 / 4300e9, 1 / 800e12 - 1 / 1600e12
    weights = 2 * 12 * 1024**2  # half of them in each pass
    assert low.forward_s == pytest.approx(high.forward_s - in_blocks * saved + (inputs + weights) * casts)
    again = inputs + gradients + 2 * weights  # the forward pass once more
    assert low.backward_s == pytest.approx(high.backward_s - 3 * in_blocks * saved + again * casts)
    mx = estimate(METHODS["mxfp8"], job, hardware)
    assert mx.forward_s == pytest.approx(high.forward_s + 2 * (inputs + weights) * casts)
    arrived = estimate(METHODS["fp8-lm"], job, hardware)  # weights are codes already
    assert arrived.forward_s == pytest.approx(low.forward_s - weights * casts)
    # However fast all together is said to be, products take no longer than all.
    fast = estimate(METHODS["fp8-compute"], job, replace(hardware, achieved_tflops=1e5, memory_gbs=1e9))
    assert fast.forward_s > 0


def test_the_update_is_that_of_the_method():
    job = replace(NONE_KEPT, cluster=Cluster(1, 1))
    for name, num_bytes in (("stock", 132), ("lossless", 132), ("fp8-lm-o1", 132), ("in-tree", 132), ("zeropp", 84)):
        assert optimizer_seconds(METHODS[name], job, H200) == pytest.approx(num_bytes * PARAMETERS / 4300e9), name
    for name, num_bytes in (("zeropp-exact", 84), ("mxfp8", 84), ("fp8-lm-zeropp", 57), ("fsdp2", 30), ("hsdp", 30)):
        assert optimizer_seconds(METHODS[name], job, H200) == pytest.approx(num_bytes * PARAMETERS / 4300e9), name


def test_a_gpu_without_fp8_gains_nothing_by_it():
    job = replace(NONE_KEPT, cluster=Cluster(1, 1), tokens=1 << 16)
    low, high = (estimate(METHODS[name], job, V100) for name in ("fp8-compute", "lossless"))
    assert low.forward_s > high.forward_s


# -- memory


def test_memory_by_hand():
    """8 GPUs, 2 nodes: 2 + 12 + 2 bytes per parameter over 8; the INT8 copy over the 4 ranks of a node."""
    job = Job(Model.from_parameters(7e9), Cluster(2, 4, 100), 1024)
    stock = memory_per_gpu(METHODS["stock"], job)
    assert stock.held == pytest.approx(16 * 7e9 / 8)
    assert memory_per_gpu(METHODS["zeropp"], job).secondary == pytest.approx(7e9 * (1 + 2 / 256) / 4)
    assert memory_per_gpu(METHODS["zeropp-4bit"], job).secondary == pytest.approx(7e9 * (0.5 + 2 / 128) / 4)
    assert memory_per_gpu(METHODS["zeropp-exact"], job).secondary == pytest.approx(7e9 * 2 / 4)
    assert memory_per_gpu(METHODS["in-tree"], job).secondary == pytest.approx(7e9 * 2 / 4)
    assert memory_per_gpu(METHODS["fp8-lm-o1"], job).held == pytest.approx(15 * 7e9 / 8)
    kept = memory_per_gpu(METHODS["fp8-lm-zeropp"], job)
    assert kept.secondary == pytest.approx(7e9 / 4)
    assert kept.held - kept.secondary == pytest.approx((8 + 1 / 128) * 7e9 / 8)
    for name in ("fp8-lm-o2", "fp8-lm"):  # 2 per weight, 6 of states and gradient
        assert memory_per_gpu(METHODS[name], job).held == pytest.approx(8 * 7e9 / 8)
    assert memory_per_gpu(METHODS["hsdp"], job).held == pytest.approx(16 * 7e9 / 4)
    assert stock.held < stock.peak == stock.held + max(stock.gathered + stock.activations, stock.update)


def test_checkpointing_saves_activations_and_costs_time():
    job = Job(Model.from_parameters(7e9), Cluster(1, 8), 8192)
    saved = replace(job, checkpointing=True)
    assert memory_per_gpu(METHODS["stock"], saved).activations < memory_per_gpu(METHODS["stock"], job).activations / 2
    assert estimate(METHODS["stock"], saved, H200).step_s > estimate(METHODS["stock"], job, H200).step_s


# -- what cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0, 8, 100), "nodes must be a whole number, at least 1, got 0"),
        (lambda: Cluster(2, 1.5, 100), "ranks_per_node must be a whole number"),
        (lambda: Cluster(2, 8), "2 nodes need a link between them"),
        (lambda: Cluster(2, 8, -1), "inter_gbit"),
        (lambda: Model(-1, 128, 2), "parameters must be above 0"),
        (lambda: Model(float("nan"), 128, 2), "parameters must be above 0"),
        (lambda: Model(1e9, 128, float("nan")), "layers must be a whole number"),
        (
            lambda: Model(1e6, 4096, 2),
            r"2 embedding\(s\) of 32000 x 4096 have 2.62e.08 parameters, more than the whole",
        ),
        (lambda: replace(NONE_KEPT, tokens=0), "tokens must be a whole number"),
        (lambda: replace(NONE_KEPT, tokens=1000, sequence=300), "must be a multiple of sequence"),
        (lambda: replace(NONE_KEPT, kept_parameters=-1), "kept_parameters must be 0 or more"),
        (lambda: replace(NONE_KEPT, learning_rate=0), "learning_rate must be above 0"),
        (lambda: replace(NONE_KEPT, steps=-1), "steps must be 0 or more and finite, got -1"),
        (lambda: Hardware(0, 4300, 400), "intra_gbs must be above 0"),
        (lambda: replace(H200, link_efficiency=1.2), "link_efficiency is a share"),
        (lambda: replace(H200, host_per_block_ms=-1), "host_per_block_ms must be 0 or more"),
        (lambda: method_named("zeropp-4bits"), 'did you mean "zeropp-4bit"'),
        (
            lambda: estimate(METHODS["stock"], Job(Model(100, 1, 1, 2), Cluster(64, 8, 10), 1), H200),
            "512 ranks cannot share 100 parameters",
        ),
    ],
)
def test_impossible_inputs(make, message):
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize("parameters", [1.3e9, 7e9, 13e9, 70e9, 175e9])
def test_a_usual_shape_for_a_size(parameters):
    model = Model.from_parameters(parameters)
    blocks = 12 * model.layers * model.hidden**2
    assert blocks + model.embedding_parameters == pytest.approx(parameters, rel=0.05)
    assert model.hidden % 128 == 0 and 64 < model.hidden / model.layers < 192
    given = Model.from_parameters(parameters, hidden=model.hidden, layers=model.layers)
    assert given == model


# -- command line


def test_command_line_prints_every_method():
    command = [sys.executable, "-m", "zeropp_fp8.plan", "--params", "7e9", "--nodes", "8"]
    command += ["--ranks-per-node", "8", "--gbit", "100", "--tokens", "2048"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True)
    lines, advice = done.stdout.split("\nrecommended: ")
    lines = lines.splitlines()
    assert advice.startswith("zeropp-exact, ") and "\nrounds more" not in advice
    assert "7 B parameters" in lines[0] and "8 x 8 GPUs, 100 Gbit/s" in lines[0] and "modelled" in lines[0]
    assert [line.split()[0] for line in lines[3:]] == list(TABLE_METHODS)
    assert all("wire" in line for line in lines[3:])


def test_command_line_json_agrees_with_the_model(capsys):
    main(["--params", "7e9", "--gbit", "100", "--methods", "zeropp", "--tflops", "300", "--json"])
    (row,) = json.loads(capsys.readouterr().out)["methods"]
    job = Job(Model.from_parameters(7e9), Cluster(8, 8, 100), 2048)
    expected = estimate(METHODS["zeropp"], job, replace(H200, achieved_tflops=300))
    assert row["step_s"] == expected.step_s
    assert row["peak_bytes"] == expected.memory.peak
    assert row["tokens_per_s"] * row["step_s"] == pytest.approx(2048)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes: 0: give a whole number from 1 to 1000000"),
        (["--hidden", "0"], "--hidden: 0: give a whole number from 1"),
        (["--layers", "-1"], "--layers: -1: give a whole number from 1"),
        *(
            (["--params", text], f"--params: {text}: give a number above 0, at most 1e+15, such as 7e9 or 7B")
            for text in ("0", "-1", "inf", "nan", "1e30", "7Q", "B")
        ),
        (["--params", "1K"], "more than the whole model of 1e+03"),
        (["--gbit", "inf"], "--gbit: inf: give a number above 0"),
        (["--kept", "nan"], "--kept: nan: give a number at least 0"),
        (["--lr", "0"], "--lr: 0: give a number above 0"),
        (["--overlap", "nan"], "--overlap: nan: give a number at least 0, at most 1"),
        (["--tokens", "9" * 400], "give a whole number from 1 to 1000000000"),
        (["--methods", "zerop"], "there is no method 'zerop'"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    *usage, said = capsys.readouterr().err.splitlines()
    assert message in said and (not usage or usage[0].startswith("usage: "))


def test_scaling_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plan_scaling.main(["--out", str(tmp_path / "new/scaling")])
    assert (tmp_path / "new/scaling.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((tmp_path / "new/scaling.json").read_text())
    assert {row["kind"] for part in ("modelled", "published", "measured") for row in result[part]} == {
        *("modelled", "published", "measured")
    }
    assert {(row["gbit"], row["gpus"]) for row in result["modelled"]} == {
        (gbit, 8 * 2**power) for gbit in (100, 200, 400, 800) for power in range(8)
    }
    assert "published" in capsys.readouterr().out
    # What was published lies between the model without any overlap of wire and GPU and with all of it, or within 5 %.
    for row in result["published"]:
        ends = sorted(row["modelled"]["no overlap"] + row["modelled"]["full overlap"])
        assert 0.95 * ends[0] < row.get("lowest", row.get("typical")) < row["highest"] < 1.05 * ends[-1]


EXACT = METHODS["zeropp-exact"]


def test_differences_cross_once_a_step_and_take_memory_traffic():
    """The own slice is made twice, read beside what is held of it twice, and copied; the copies of all others are read
    and written once."""
    bits, four, none = 0.75 / 8, replace(NONE_KEPT, micro_batches=4), replace(NONE_KEPT, copies=0)
    own, others = PARAMETERS / 4, PARAMETERS / 2 - PARAMETERS / 4
    assert codec_bytes(EXACT, NONE_KEPT)[0] == pytest.approx((8 + 8 + 4 + bits) * own + (4 + bits) * others)
    assert codec_bytes(EXACT, four)[0] == codec_bytes(EXACT, NONE_KEPT)[0] / 4
    assert moved("zeropp-exact", four) == pytest.approx(moved("zeropp-exact"))
    # What memory has no copy of is gathered each time, in 16 bits.
    assert moved("zeropp-exact", none) > moved("zeropp", none) > moved("zeropp-whole")
    assert codec_bytes(EXACT, none)[0] == 0
    alone = replace(NONE_KEPT, cluster=Cluster(1, 4))
    assert codec_bytes(EXACT, alone)[0] == 0 and memory_per_gpu(EXACT, alone).secondary == 0


def test_differences_on_every_gpu_cross_within_the_node_too():
    own = method_of(PluginConfig(weights={"difference": "exact"}, secondary={"scope": "rank"}))
    forward = own.forward_traffic(NONE_KEPT)
    assert forward.inter == pytest.approx(0.75 / 8 * PARAMETERS / 2)
    assert forward.intra == pytest.approx(0.75 / 8 * PARAMETERS / 2)
    assert EXACT.forward_traffic(NONE_KEPT).intra == pytest.approx(2 * PARAMETERS / 2)


def test_differences_of_codes_take_fewer_bits_than_those_of_weights():
    """And half of the copy: of INT8 codes at 1e-5 0.18 bits, where a code takes 8.06."""
    method, whole = METHODS["zeropp"], METHODS["zeropp-whole"]
    assert method.forward_traffic(NONE_KEPT).inter == pytest.approx(0.18 / 8 * PARAMETERS / 2)
    assert method.backward_traffic(NONE_KEPT) == whole.backward_traffic(NONE_KEPT)
    assert memory_per_gpu(method, NONE_KEPT).secondary == memory_per_gpu(whole, NONE_KEPT).secondary


def test_a_smaller_learning_rate_sends_less():
    """At 1e-3 exact differences send less than INT8 and more than INT4; those of INT8 send least of all."""
    jobs = [replace(NONE_KEPT, learning_rate=10 ** (tenths / 10)) for tenths in range(-80, -9)]
    sent = [moved("zeropp-exact", job) for job in jobs]
    assert sent == sorted(sent) and len(set(sent[10:51])) == 41
    high = moved("zeropp-exact", replace(NONE_KEPT, learning_rate=1e-3))
    assert moved("zeropp") < moved("zeropp-4bit") < high < moved("zeropp-whole") < moved("lossless")
    assert moved("zeropp-exact", replace(NONE_KEPT, learning_rate=1e-4)) < moved("zeropp-4bit")
    for name in OF_ALL_WEIGHTS:
        of_rates = {estimate(METHODS[name], job, H200).step_s for job in jobs[::10]}
        assert (len(of_rates) == 1) == (METHODS[name].difference_of is None), name


def test_bits_of_differences():
    """Along lines in logarithms between what was measured, and no further."""
    bits = [difference_bits(rate) for rate in (1e-9, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1)]
    assert bits == sorted(bits) and bits[0] == bits[1] and bits[-1] == bits[-2]
    assert difference_bits(1e-5) == pytest.approx(0.75)
    assert difference_bits(10**-5.5) == pytest.approx(math.sqrt(0.2 * 0.75))
    by_step = [difference_bits(1e-5, steps=steps) / 0.75 for steps in (0, 1, 9, 1000)]
    assert by_step == sorted(by_step, reverse=True) and by_step[0] == pytest.approx(1.4) and 1 < by_step[-1] < 1.01


def test_the_learning_rate_is_an_option(capsys):
    def sent(*words):
        main(["--params", "7e9", "--gbit", "100", "--methods", "zeropp-exact", *words, "--json"])
        found = json.loads(capsys.readouterr().out)
        return found["job"]["learning_rate"], found["methods"][0]["inter_bytes"]

    assert sent() == sent("--lr", "1e-5") and sent("--lr", "1e-6") < sent() < sent("--lr", "2e-4")
    assert sent() < sent("--steps", "5") < sent("--steps", "0")


def test_the_tables_of_the_method():
    """docs/method.md shows what is computed here."""
    _, in_bytes, in_memory = re.split("## Bytes between nodes|## Memory", (ROOT / "docs/method.md").read_text())
    job = replace(NONE_KEPT, cluster=Cluster(8, 8, 10))
    others = {"DeepSpeed's ZeRO++": METHODS["in-tree"]}
    rows = re.findall(r"^\| (.+?) \| ([\d. |]+) \|$", in_bytes, re.M)
    assert len(rows) == 12
    for label, cells in rows:
        method = others.get(label) or METHODS[label.strip("`")]
        here = replace(job, cluster=Cluster(8, 1, 10)) if label == "`zeropp-pcie`" else job
        passes = method.forward_traffic(here), method.backward_traffic(here), method.gradient_traffic(here)
        steps = [estimate(method, replace(here, micro_batches=k), EMULATED_H200).inter_bytes for k in (1, 4)]
        copy = memory_per_gpu(method, here).secondary / PARAMETERS * here.cluster.ranks_per_node
        wanted = [*(num_bytes / M for num_bytes in (*(one.inter for one in passes), *steps)), copy]
        assert [float(cell) for cell in cells.split("|")] == pytest.approx(wanted, abs=5.1e-4), label
    of_rates = [EXACT.forward_traffic(replace(job, learning_rate=rate)).inter / M for rate in (1e-6, 1e-4, 1e-3)]
    said = "with 1e-6 its forward sends {:.3f}, with 1e-4 {:.3f}, with 1e-3 {:.3f}".format(*of_rates)
    assert said in " ".join(in_bytes.split()) and f"sends {EXACT.weight_bytes / 2 * 7 / 8:.3f} M of weights" in in_bytes
    stock, least = (memory_per_gpu(METHODS[name], job) for name in ("stock", "fp8-lm-o2"))
    each = PARAMETERS / job.cluster.world_size
    for what, shown, of_stock, of_fp8 in (
        ("weights in 16 bits", 2, stock.weights, None),
        ("gradients in 16 bits", 2, stock.gradients, least.gradients),
        ("master weights, moments", 12, stock.states, least.states),
    ):
        (cells,) = re.findall(rf"^\| {what} \| (.*)$", in_memory, re.M)
        assert cells.startswith(f"{shown} / W |") and of_stock == shown * each
        assert of_fp8 is None or f"{of_fp8 / each:.0f} / W" in cells
    assert f"| error feedback | 0 | {METHODS['zeropp-pcie'].residual_bytes:.2f} / L |" in in_memory
