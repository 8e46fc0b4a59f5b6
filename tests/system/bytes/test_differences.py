"""Nodes exchange what has changed in weights: all is as without, bit for bit, in fewer bytes."""

import math
import re

import difference_jobs as jobs
import pytest
import torch
from config_cases import refusal
from ranks import run_ranks, run_two

from zeropp_fp8.config import difference_bits, resolve
from zeropp_fp8.plan import METHODS, Cluster, Job, Model, memory_per_gpu

M = 2 * 124_224  # bytes of models.llama() in 16 bits
OWNED = {"partition": "whole_tensor"}
FEEDBACK = {"error_feedback": True}
TWICE = {"accumulation": 2}
ZERO = {"kept gathered": {"stage3_param_persistence_threshold": 5000}, "offload": {"offload_param": {"device": "cpu"}}}
WAYS = {
    "zeropp's gradients": {},
    "stock's gradients": {"recipe": "lossless"},
    "fp16": {"dtype": "fp16"},
    "a large rate": {"lr": 1e-2},
    "rank": {"secondary": {"scope": "rank"}},
    "error feedback": {"gradients": FEEDBACK},
    "2 micro-batches": TWICE,
    "2 micro-batches in the node": {"gradients": {**FEEDBACK, "accumulate_in": "node"}, **TWICE},
    "by module": {"gather_granularity": "module"},
    "by parameter": {"gather_granularity": "parameter"},
    "some": {"secondary": {"memory_gb": 1.8e-4}},
    "whole tensors": OWNED,
    "whole tensors, never cut": {**OWNED, "partition_split": "none"},
    "whole tensors by module": {**OWNED, "gather_granularity": "module"},
    "FP8 compute": {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}},
    **{name: {"config": {"zero_optimization": options}} for name, options in ZERO.items()},
    "compiled": {"compile": "blocks"},
    "zero.Init": {"zero_init": True},
    "frozen": {"frozen": ("layers.0", "embed")},
    "frozen, stored": {"frozen": ("layers.0", "embed"), "store": "int8"},
}
# Of codes, whose rounding differences leave as it is.
OF_CODES = {
    "INT8": {"recipe": "zeropp"},
    "INT8, rank": {"recipe": "zeropp", "secondary": {"scope": "rank"}, "lr": 1e-2},
    "INT8, whole tensors": {"recipe": "zeropp", **OWNED},
    "INT8 of fp32": {"recipe": "zeropp", "dtype": "fp32"},
    "INT8 without one layer": {"recipe": "zeropp", "weights": {"skip_modules": ["*.layers.0.*"]}},
    "FP8": {"recipe": "zeropp", "weights": {"format": "fp8_e4m3", "block_size": 128}},
    "FP8-LM": {"recipe": "fp8-lm-zeropp", "compute": {"format": "fp8", "min_features": 16}},
    "FP8-LM, current": {"recipe": "fp8-lm-zeropp", "compute": {"min_features": 16, "scaling": "current"}},
}


def equal(one, other):
    """The same names, and every bit of their values."""
    bits = [{name: w.contiguous().view(torch.uint8) for name, w in weights.items()} for weights in (one, other)]
    return bits[0].keys() == bits[1].keys() and all(torch.equal(bits[0][name], bits[1][name]) for name in bits[0])


def check(plain, found, exactly=True):
    """Both of `jobs.looked`: weights of a gather without differences, of which all holders have the same copy.

    exactly: weights travel in 16 bits.
    """
    assert equal(found[0], plain[0]) and found[2]
    assert equal(found[0], found[1]) or not exactly


@pytest.mark.parametrize("name", [*WAYS, *OF_CODES])
def test_every_weight_is_that_of_a_gather_without_differences(name):
    """In each step, and so losses are."""
    for of_rank in run_two(jobs.pairs, job="trained", cases={name: {**WAYS, **OF_CODES}[name]}):
        (expected, plain), (losses, seen) = of_rank[name]
        assert losses == expected and all(map(math.isfinite, losses))
        for place, (before, now) in enumerate(zip(plain, seen)):
            check(before, now, exactly=name in WAYS)
            assert torch.equal(now[4], before[4]), "payloads"
            # A look gathers what a step has written.
            assert now[3] == {place + 1} or name in ("frozen", "frozen, stored", "some")
        assert any(steps > 0 for steps in seen[-1][3])


def test_more_nodes_and_ranks_that_do_not_divide_tensors():
    for world, per_node in ((3, 1), (6, 2)):
        cases = {"slices": {"steps": 3}, "whole tensors": {"steps": 3, **OWNED}}
        for of_rank in run_ranks(jobs.pairs, job="trained", cases=cases, world=world, ranks_per_node=per_node):
            for (expected, plain), (losses, seen) in of_rank.values():
                assert losses == expected
                for before, now in zip(plain, seen):
                    check(before, now)


RATES = (1e-6, 1e-5, 1e-4)


@pytest.fixture(scope="module")
def sent():
    """By rank: bytes of what crosses whole, of exact differences at some rates, and to whole tensors."""
    cases = [{"exact": False}, *({"lr": lr} for lr in RATES), OWNED]
    return run_ranks(jobs.many, job="sent", cases=cases)


def test_every_step_sends_less_after_the_first(sent):
    """The fewer, the smaller the rate; all ranks count the same."""
    for plain, *rates, owned in sent:
        whole = [step["weights_forward"]["inter, all ranks"] for step in plain[0]]
        assert whole[0] == whole[1] == whole[2] == pytest.approx(M, rel=0.01)
        last = []
        for steps, losses, _ in (*rates, owned):
            crossed = [step["weights_forward"]["inter, all ranks"] for step in steps]
            assert crossed[0] == pytest.approx(M, rel=0.01) and all(map(math.isfinite, losses))
            assert steps[0]["bits"] is None
            for step, num_bytes in zip(steps[1:], crossed[1:]):
                # Each crosses once; the rest are norms, and how long payloads are.
                assert num_bytes == pytest.approx(step["bits"] * M / 16, rel=0.03, abs=600)
            last.append(crossed[-1])
        assert last[0] < last[1] < last[2] < 0.3 * M
    of_all = [[step["weights_forward"]["inter, all ranks"] for step in run[0]] for rank in sent for run in rank]
    assert of_all == of_all[: len(sent[0])] * len(sent)


def test_bytes_of_large_models():
    """Parts of M between nodes at the usual rate of fine-tuning."""
    job = Job(Model(7e9, 4096, 32, 32000), Cluster(64, 8, 10), 4096, learning_rate=1e-5)
    method = METHODS["zeropp-exact"]
    passes = (method.forward_traffic(job), method.backward_traffic(job), method.gradient_traffic(job))
    assert sum(one.inter for one in passes) / (2 * 7e9) <= 0.26 + difference_bits(1e-5) / 16 + 0.001


def test_bytes_do_not_depend_on_micro_batches():
    for one, three in run_two(jobs.many, job="sent", cases=[{"accumulation": k} for k in (1, 3)]):
        first = [run[0][0]["weights_forward"]["inter"] for run in (one, three)]
        assert first[0] == first[1]
        for step, of_three in zip(one[0][1:], three[0][1:]):
            found = [each["weights_forward"]["inter"] for each in (step, of_three)]
            assert 0 < max(found) < 1.5 * min(found), "each weight crosses once, changed a little more or less"


def test_nothing_of_frozen_weights_crosses_after_the_first_step():
    cases = [{"frozen": frozen} for frozen in ((), ("layers",), ("layers", "embed"))]
    for every, some, head in run_ranks(jobs.many, job="sent", cases=cases):
        first, second, third = (
            [run[0][step]["weights_forward"]["inter"] for run in (every, some, head)] for step in (0, 1, 2)
        )
        assert first[0] == first[1] == first[2] and second[0] > second[1] > second[2]
        # The head has a row of 256 for each of 64 features, a quarter of it on a rank.
        assert all(0 < one[2] < 2 * 256 * 64 // 4 for one in (second, third))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_done_in_between_changes_nothing(accumulation):
    """Between micro-batches, too."""
    whats = ["", "evaluate", "look", "look to write", "save"]
    cases = [{"what": what, "accumulation": accumulation} for what in whats]
    for (plain, _), *others in run_two(jobs.many, job="disturbed", cases=cases):
        for what, (losses, same) in zip(whats[1:], others):
            assert losses == plain and same, what


WRITERS = ("gathered", "masters", "masters after a step", "masters beside another engine", "of one rank", "loaded")
WRITTEN = {"slices": {}, "whole tensors": OWNED, "frozen": {"frozen": ("layers.0", "embed")}}


@pytest.mark.parametrize("name", WRITTEN)
def test_weights_written_from_outside(name):
    writers = WRITERS if name != "frozen" else ("gathered",)
    for of_rank in run_two(jobs.pairs, job="written", cases={how: {"how": how, **WRITTEN[name]} for how in writers}):
        for how, (plain, found) in of_rank.items():
            for (expected, *before), (loss, *now) in zip(plain, found):
                assert loss == expected, how
                check(before, now)


def test_lora():
    """After the first step nothing crosses but how adapters have changed; a resumed run has the same losses."""
    for of_rank in run_two(jobs.pairs, job="adapted", cases={"slices": {}, "whole tensors": OWNED}):
        for (expected, _, _, _, plain), (losses, resumed, by_step, slices, seen) in of_rank.values():
            assert losses == expected and resumed == losses[4:]
            check(plain, seen)
            assert all(0 < crossed <= 3 * sum(slices) for crossed in by_step[1:]) and by_step[0] > 20 * by_step[1]


@pytest.mark.parametrize("fields", [{}, OWNED], ids=["slices", "whole tensors"])
@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_checkpoint_on_other_nodes(ranks_per_node, fields, tmp_path):
    """It has nothing of copies: as many ranks on other nodes begin with all weights, and go on with the same."""
    options = {"folder": str(tmp_path), "recipe": "lossless", **fields} if not fields else {"folder": str(tmp_path)}
    options |= fields
    expected = run_ranks(jobs.moved, save=True, ranks_per_node=3 - ranks_per_node, world=4, **options)
    found = run_ranks(jobs.moved, save=False, ranks_per_node=ranks_per_node, world=4, **options)
    for (wanted, before, _), (loss, now, after) in zip(expected, found):
        assert loss == wanted
        check(before, now)
        assert equal(after[0], after[1]) and after[2]


@pytest.mark.parametrize("fields", [{}, OWNED], ids=["slices", "whole tensors"])
def test_a_step_of_any_size(fields):
    """No weights are late, and none cross whole."""
    for rank in run_two(jobs.pairs, job="jump", cases={"0.1": {"lr": 0.1, **fields}}):
        plain, found = rank["0.1"]
        for place, (before, now) in enumerate(zip(plain, found)):
            check(before, now)
            assert now[3] == {place + 1}


def test_padding_is_no_difference():
    """Of a shard that is padding alone: DeepSpeed leaves there what was in the memory."""
    for plain, found in zip(*(run_ranks(jobs.padding, exact=exact, ranks_per_node=1) for exact in (False, True))):
        for before, now in zip(plain, found):
            check(before, now)


def test_a_step_that_is_skipped():
    for rank in run_ranks(jobs.pairs, job="skipped", cases={"fp16": {}}):
        (expected, _, plain), (losses, skipped, seen) = rank["fp16"]
        assert losses == expected and skipped == 1
        check(plain, seen)


def test_a_reference_that_follows_the_policy():
    for rank in run_two(jobs.pairs, job="two_engines", cases={"both": {}}):
        (expected, plain), (losses, seen) = rank["both"]
        assert losses == expected
        for before, now in zip(plain, seen):
            check(before, now)


def test_a_block_that_is_left_out_for_some_steps():
    """Its copy is of steps before; the next difference is to that."""
    for rank in run_two(jobs.pairs, job="unused", cases={"block": {}}):
        (expected, plain), (losses, seen) = rank["block"]
        assert losses == expected and len(seen[3]) > 1
        check(plain, seen)


def test_generation():
    for rank in run_two(jobs.pairs, job="generated", cases={"all": {}}):
        (tokens, expected), (found, loss) = rank["all"]
        assert found == tokens and found["values"] == found["sharded"] and loss == expected


def test_the_start_table(sent):
    _, _, table = sent[0][1]
    assert re.search(r"weights +bfloat16 +\d+  \d+ tensors; in each node, where differences are added to them", table)
    assert re.search(
        r"weight differences +exact +\d+  \d+ tensors; sent whole at start, then bits per weight by AdamW's "
        r"learning rate: 0.2 at 1e-06, 0.75 at 1e-05, 2.7 at 0.0001; added to copies of 0.000124 GB per rank",
        table,
    )
    table = run_ranks(jobs.table_of, world=2, ranks_per_node=2)[0]
    assert re.search(r"weight differences +none +one rank or one node: no copy", table)
    table = run_ranks(jobs.table_of, world=2, ranks_per_node=1, threshold=10**9)[0]
    assert re.search(r"weight differences +none +sent whole: below stage3_param_persistence_threshold", table)


def test_the_progress_line(capfd):
    table = run_ranks(jobs.sent, steps=2, report={"every": 1})[0][2]
    first, second = re.findall(r"step \d: (.*)", table)
    assert "bits" not in first and re.search(r"; weights: \d\.\d{3} bits", second)


def test_the_plan_counts_as_engines_do(sent):
    """Bytes of weights and what stays; up to norms and padding."""
    steps, _, _ = sent[0][0]
    job = Job(Model(124_224, 64, 2, 256), Cluster(2, 2, 10), 64, kept_parameters=0)
    method = METHODS["zeropp-exact"]
    backward = steps[-1]["weights_backward"]
    assert method.backward_traffic(job).inter == backward["inter"] == 0
    assert method.backward_traffic(job).intra == pytest.approx(backward["intra"], rel=0.02)
    assert method.forward_traffic(job).inter == pytest.approx(M * difference_bits(1e-5) / 16 / 2, rel=0.01)
    assert memory_per_gpu(method, job).secondary == pytest.approx(2 * 124_224 / 2, rel=0.02)


def test_the_recipe():
    ds_config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    config = resolve({**ds_config, "zeropp_fp8": {"recipe": "zeropp-exact"}})
    assert config.weights.format == "none" and config.weights.difference == "exact"
    assert config.secondary.scope == "node" and config.quantizes
    lossless = {"recipe": "lossless", "weights": {"difference": "exact"}, "secondary": {"scope": "node"}}
    assert not resolve({**ds_config, "zeropp_fp8": lossless}).quantizes, "stock's, bit for bit"
    assert '"bf16.enabled"' in refusal({"recipe": "zeropp-exact"})
