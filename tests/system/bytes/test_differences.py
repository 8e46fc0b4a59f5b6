"""Nodes exchange how weights have changed: what they hold is the same everywhere, and near the weights."""

import math
import re

import difference_jobs as jobs
import pytest
from config_cases import refusal
from ranks import run_ranks, run_two

from zeropp_fp8.config import resolve
from zeropp_fp8.plan import METHODS, Cluster, Job, Model, memory_per_gpu

INT8_DB = 43.0  # of these weights in INT8 and blocks of 256: 43.1
M = 2 * 124_224  # bytes of models.llama() in 16 bits
IN_INT8 = {"weights": {"format": "int8"}}
OWNED = {"partition": "whole_tensor"}
TWO_BITS = {"recipe": "zeropp-2bit"}


@pytest.mark.parametrize(
    "case, at_least",
    [
        ({}, 53),
        ({"dtype": "bf16"}, 52),
        ({"weights": {"difference": {"format": "int3"}}}, 47),
        ({"weights": {"difference": {"format": "int8"}}}, 75),
        (TWO_BITS, 41.5),
        ({**TWO_BITS, "lr": 3e-4}, 50),
        (IN_INT8, 42),
        ({**TWO_BITS, **IN_INT8}, 38),
        ({"secondary": {"scope": "rank"}}, 53),
        ({"accumulation": 2}, 53),
        (OWNED, 53),
        ({**OWNED, **IN_INT8}, 42),
    ],
    ids=["int4", "bf16", "int3", "int8", "2 bits", "2 bits, 3e-4", "rests in INT8", "2 bits in INT8", "rank"]
    + ["accumulation", "whole tensors", "whole tensors in INT8"],
)
def test_held_weights_stay_near_the_weights_and_the_same_on_all_holders(case, at_least):
    """From the tenth step on at least as near as INT8 is, except where that is what they rest in."""
    run = run_two if case.keys() & {"dtype", "lr", "weights", "accumulation"} else run_ranks
    case = {"steps": 30 if not case else 14, "at": [1, 2, 10, 14, 30], **case}
    for found, _ in run(jobs.fidelity, **case):
        assert all(same for _, _, same in found)
        late = found[2:]
        assert late and all(own >= at_least for own, _, _ in late)
        assert all(own >= int8 for own, int8, _ in late) or at_least < INT8_DB


def test_more_nodes_and_ranks_that_do_not_divide_tensors():
    for world, per_node in ((3, 1), (6, 2)):
        for fields in ({}, OWNED):
            options = {"world": world, "ranks_per_node": per_node, "steps": 3, "at": [1, 2, 3], **fields}
            for found, _ in run_ranks(jobs.fidelity, **options):
                assert all(same and own > INT8_DB for own, _, same in found)


@pytest.fixture(scope="module")
def sent():
    """By rank: what weights as they are, INT4, 2 bits, and INT4 to whole tensors send."""
    cases = [{"recipe": "zeropp"}, {"recipe": "zeropp-diff"}, TWO_BITS, {"recipe": "zeropp-diff", **OWNED}]
    return run_ranks(jobs.many, job="sent", cases=[{**case, "dtype": "bf16"} for case in cases])


def test_every_step_sends_less_after_the_first(sent):
    links = ("weights_forward", "weights_backward", "gradients")
    in_m = [[sum(step[kind]["inter, all ranks"] for kind in links) / M for step in steps] for steps, _, _ in sent[0]]
    assert in_m[0] == pytest.approx([0.77] * 3, abs=0.01)
    # The first sends weights as they are. Padding and norms of this model are 0.006 M.
    assert in_m[1] == pytest.approx([1.26, 0.521, 0.521], abs=0.005)
    assert in_m[2] == pytest.approx([1.26, 0.404, 0.404], abs=0.005)
    assert in_m[3] == pytest.approx([1.26, 0.521, 0.521], abs=0.005)
    for rank in sent:
        plain, four, two, owned = (losses for _, losses, _ in rank)
        assert four == pytest.approx(plain, rel=1e-3) and two == pytest.approx(plain, rel=1e-2)
        assert owned == pytest.approx(plain, rel=1e-3)
        assert all(math.isfinite(loss) for _, losses, _ in rank for loss in losses)


@pytest.mark.parametrize("recipe, at_most", [("zeropp-diff", 0.516), ("zeropp-2bit", 0.40)])
def test_bytes_of_large_models(recipe, at_most):
    """Parts of M between nodes, scales counted."""
    method, job = METHODS[recipe], Job(Model(7e9, 4096, 32, 32000), Cluster(64, 8, 10), 4096)
    passes = (method.forward_traffic(job), method.backward_traffic(job), method.gradient_traffic(job))
    assert sum(one.inter for one in passes) / (2 * 7e9) <= at_most


def test_bytes_do_not_depend_on_micro_batches_or_what_is_in_between():
    cases = [{"recipe": "zeropp-diff", "accumulation": k} for k in (1, 3)]
    for one, three in run_two(jobs.many, job="sent", cases=cases):
        for step, of_three in zip(one[0], three[0]):
            for kind in ("weights_forward", "gradients"):
                assert step[kind]["inter"] == of_three[kind]["inter"] > 0


def test_nothing_of_frozen_weights_crosses_after_the_first_step():
    cases = [{"recipe": "zeropp-diff", "frozen": frozen} for frozen in ((), ("layers",), ("layers", "embed"))]
    for every, some, head in run_ranks(jobs.many, job="sent", cases=cases):
        first, second, third = (
            [run[0][step]["weights_forward"]["inter"] for run in (every, some, head)] for step in (0, 1, 2)
        )
        assert first[0] == first[1] == first[2] and second == third
        # The head has a row of 256 for each of 64 features, a quarter of it on a rank, which is sent to one other.
        assert second[2] == 256 * 64 // 4 * (0.5 + 2 / 128) + 64 and second[0] > second[1] > second[2]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_done_in_between_changes_nothing(accumulation):
    """Between micro-batches, too."""
    whats = ["", "evaluate", "look", "look to write", "save"]
    cases = [{"what": what, "accumulation": accumulation} for what in whats]
    for (plain, _), *others in run_two(jobs.many, job="disturbed", cases=cases):
        for what, (losses, same) in zip(whats[1:], others):
            assert losses == plain and same, what


MASTERS = ("masters", "masters after a step", "masters beside another engine")
WRITERS = ("gathered", *MASTERS, "of one rank", "loaded")
WRITTEN = {"as they are": {}, "INT8": IN_INT8, "whole tensors": OWNED, "frozen": {"frozen": ("layers.0", "embed")}}


@pytest.fixture(scope="module")
def without_differences():
    """By writer: what a training sees that sends all weights as they are."""
    cases = [{"how": how, "recipe": "lossless", "secondary": {"scope": "node"}} for how in WRITERS]
    return dict(zip(WRITERS, run_two(jobs.many, job="written", cases=cases)[0]))


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_written_from_outside(name, without_differences):
    """They cross as they are."""
    writers = WRITERS if name != "frozen" else ("gathered",)
    cases = [{"how": how, **WRITTEN[name]} for how in writers]
    for of_rank in run_two(jobs.many, job="written", cases=cases):
        for how, found in zip(writers, of_rank):
            assert all(same for _, same, _ in found), how
            near = [own for own, _, _ in found]
            assert min(near) > (INT8_DB if name != "INT8" else 41), how
            if name != "frozen" and (how, name) != ("of one rank", "whole tensors"):  # a rank has other elements there
                wanted = [loss for _, _, loss in without_differences[how]]
                assert [loss for _, _, loss in found] == pytest.approx(wanted, rel=2e-3), how


@pytest.mark.parametrize("alone", [False, True])
def test_master_weights_that_were_written_and_saved_before_a_step(alone):
    """They are the weights where they are loaded; and where others are loaded, the next step is one like others."""
    for (own, _), (later, steps) in run_two(jobs.loaded_after_a_write, alone=alone):
        assert min(own, later) > INT8_DB and steps == {3}


def payload_bytes(numel):
    """Of INT4 in blocks of 128: two codes a byte, two bytes a scale, each of them padded to 16 bytes."""
    return -(-numel // 32) * 16 + -(-numel // 1024) * 16


def test_lora():
    """After the first step nothing crosses but how adapters have changed; frozen weights are there bit for bit."""
    cases = [{"recipe": "lossless", "secondary": {"scope": "node"}}, {}, OWNED]
    for (plain, *_), *others in run_two(jobs.many, job="adapted", cases=cases):
        for losses, resumed, by_step, _, (own, frozen_exact, same) in others:
            assert losses == pytest.approx(plain, rel=1e-3) and resumed == losses[4:]
            assert own > INT8_DB and frozen_exact and same
            assert by_step[0] > 20 * by_step[1] and by_step[1:] == [by_step[1]] * 7
        _, _, by_step, slices, _ = others[0]
        assert by_step[1] == sum(map(payload_bytes, slices))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_checkpoint_on_other_nodes(ranks_per_node, tmp_path):
    """As many ranks on other nodes begin with all weights, and go on."""
    options = {"folder": str(tmp_path)}
    expected = run_ranks(jobs.moved, save=True, ranks_per_node=3 - ranks_per_node, world=4, **options)
    for (loss, same, own), (wanted, *_) in zip(
        run_ranks(jobs.moved, save=False, ranks_per_node=ranks_per_node, world=4, **options), expected
    ):
        assert loss == pytest.approx(wanted, rel=1e-4) and same and own > INT8_DB


@pytest.mark.parametrize("fields", [{}, OWNED], ids=["slices", "whole tensors"])
def test_a_checkpoint_for_copies_in_another_format(fields, tmp_path):
    """Rows of as many bytes that say other numbers: all weights cross."""
    formats = [{"format": "int8"}, {"format": "int8", "hadamard": True}]
    first, second = ({"folder": str(tmp_path), "weights": weights, **fields} for weights in formats)
    (expected, *_), _ = run_two(jobs.moved, save=True, **first)
    for loss, same, own in run_two(jobs.moved, save=False, **second):
        assert loss == pytest.approx(expected, rel=1e-3) and same and own > 41


@pytest.mark.parametrize("fields", [{}, OWNED], ids=["slices", "whole tensors"])
def test_a_difference_that_does_not_fit(fields):
    """All weights cross in the step after."""
    for found in run_ranks(jobs.jump, lr=0.1, **fields):
        assert all(same for _, same, _ in found)
        assert [steps for _, _, steps in found] == [1, 2, 3, 0, 1, 2, 3]
        assert found[2][0] < 30 and found[3][0] == math.inf and found[4][0] > 80
    for found in run_two(jobs.jump, lr=1e-3, **fields):
        assert [steps for _, _, steps in found] == [1, 2, 3, 4, 5, 6, 7]


def test_padding_is_no_difference():
    """Of a shard that is padding alone: DeepSpeed leaves there what was in the memory."""
    for steps in run_ranks(jobs.padding, ranks_per_node=1):
        assert steps == [[step] * 2 for step in range(4)]


def test_a_step_that_is_skipped():
    for losses, skipped, (own, same) in run_ranks(jobs.skipped):
        assert skipped == 1 and same and own > INT8_DB and all(map(math.isfinite, losses))


def test_a_reference_that_follows_the_policy():
    for losses, ((policy, same), (reference, too)) in run_two(jobs.two_engines):
        assert same and too and policy > INT8_DB and reference == math.inf
        assert all(map(math.isfinite, losses))


def test_what_differences_go_with():
    for found in run_two(jobs.ways):
        plain, accumulated = found["plain"][0], found["2 micro-batches, lossless"][0]
        for name, (losses, own, same) in found.items():
            assert same and own > INT8_DB, name
            if "micro-batches" in name:
                assert losses == pytest.approx(accumulated, rel=1e-3), name
                continue
            if name in ("offload", "compiled"):
                assert losses == plain, name
            elif name != "zero.Init":  # which draws other numbers
                assert losses == pytest.approx(plain, rel=3e-3 if "bits" in name else 1e-3), name
        assert found["some"][1] > found["plain"][1], "what is gathered each time is exact"
        for name in ("error feedback", "gradients in 3 bits", "gradients in 2 bits"):
            assert found[name][0] != plain


def test_generation():
    for found, loss in run_two(jobs.generated):
        assert found["codes"] == found["values"] == found["sharded"] and math.isfinite(loss)


def test_the_start_table(sent):
    _, _, table = sent[0][1]
    assert re.search(r"weights +bfloat16 +123904  16 tensors; in each node, where differences are added to them", table)
    assert re.search(
        r"weight differences +int4 \(block 128\) +123904  16 tensors; all of them cross at start; added to copies of "
        r"0.000124 GB per rank",
        table,
    )
    assert re.search(r"weights forward +0.016 +0.124\n +weights backward +0.000 +0.124", table)
    table = run_ranks(jobs.table_of, world=2, ranks_per_node=2)[0]
    assert re.search(r"weight differences +none +one rank or one node: no copy", table)


def test_the_plan_counts_as_engines_do(sent):
    """Bytes of weights and what stays; up to norms and padding."""
    steps, _, _ = sent[0][1]
    job = Job(Model(124_224, 64, 2, 256), Cluster(2, 2, 10), 64, kept_parameters=0)
    method = METHODS["zeropp-diff"]
    for traffic, kind in (
        (method.forward_traffic(job), "weights_forward"),
        (method.backward_traffic(job), "weights_backward"),
    ):
        sent = steps[-1][kind]
        assert traffic.inter == pytest.approx(sent["inter, all ranks"] / 2, rel=0.06)
        assert traffic.intra == pytest.approx(sent["intra"], rel=0.02)
    assert memory_per_gpu(method, job).secondary == pytest.approx(2 * 124_224 / 2, rel=0.02)


def test_the_recipe():
    config = resolve({"zero_optimization": {"stage": 3}, "zeropp_fp8": {"recipe": "zeropp-diff"}})
    assert config.weights.format == "none" and config.weights.difference.format == "int4"
    assert config.secondary.scope == "node" and config.quantizes
    part = refusal({"recipe": "zeropp-diff", "weights": {"difference": {"block_size": 12}}})
    assert "a multiple of 8" in part
