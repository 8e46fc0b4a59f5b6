"""The pipeline inside an engine: limits do not change results, bytes are exact, writes are seen, and it can end."""

import pipeline_jobs as jobs
import pytest
from ranks import run_ranks, run_two

WORLD, NODES, PER_NODE = 4, 2, 2
NO_COPY = {"secondary": {"scope": "none"}}


SOME_LIMITS = ("none", "far ahead", "kept")


@pytest.mark.parametrize(
    ("recipe", "fields", "names"),
    [("lossless", None, SOME_LIMITS), ("zeropp", None, tuple(jobs.LIMITS)), ("zeropp", NO_COPY, SOME_LIMITS)],
    ids=["lossless", "zeropp", "no copy"],
)
def test_limits_do_not_change_a_bit(recipe, fields, names):
    """Each case has fetched ahead as its limits allow, and moved the same bytes or fewer."""
    ranks = run_ranks(jobs.train_with_limits, recipe=recipe, fields=fields, names=names, persistent_below=(100,))
    for results in ranks:
        losses, ahead, plain = results[("none", 0)]
        assert ahead == 0 and len(set(losses)) == len(losses)
        for case, (others, started, sent) in results.items():
            assert others == losses, case
            name = case[0]
            assert (started > 0) == (name in ("tiny", "small", "far ahead", "default")), case
            assert sent["gradients"] == plain["gradients"]
            for kind in ("weights_forward", "weights_backward"):
                if case[1] == 0:  # persistent parameters are fetched once more, at the start
                    assert all(sent[kind][link] <= plain[kind][link] for link in plain[kind])
        kept = results[("kept", 0)][2]
        assert kept["weights_forward"] == plain["weights_forward"]
        assert kept["weights_backward"]["intra"] == plain["weights_backward"]["intra"] / 3, "only the first of 3 steps"


def grown(after, before):
    return {link: after[link] - before[link] for link in before}


@pytest.mark.parametrize(
    ("recipe", "granularity"), [("zeropp", "block"), ("zeropp", "parameter"), ("lossless", "block")]
)
def test_bytes_of_a_step(recipe, granularity):
    """Exactly what the formats say: not less either, as from a gather that is left out or counted elsewhere."""
    for found in run_ranks(jobs.bytes_of_a_step, recipe=recipe, granularity=granularity):
        payloads = found["payloads"]
        least = found["quantized numel"] / WORLD * (1 if recipe == "zeropp" else 4)
        assert least < payloads < 1.1 * least
        gather = {"inter": payloads * (NODES - 1), "intra": payloads * NODES * (PER_NODE - 1)}
        within_node = {**gather, "inter": 0}
        from_copy = gather if recipe == "lossless" else within_node
        start, *steps, evaluated, again = found["reports"]
        for number, report in enumerate(steps, start=1):
            sent = report["per_step"]
            assert report["steps"] == number
            assert sent["weights_forward"] == gather and sent["weights_backward"] == from_copy
            assert sent["gradients"] == found["predicted"]["gradients"] and min(sent["gradients"].values()) > 0
            assert report["outside_steps"] == start["outside_steps"], "training counts as steps"
        assert evaluated["per_step"] == again["per_step"] == steps[-1]["per_step"]
        assert grown(evaluated["outside_steps"], steps[-1]["outside_steps"]) == gather
        assert grown(again["outside_steps"], evaluated["outside_steps"]) == from_copy


@pytest.mark.parametrize(
    ("recipe", "limits", "fields"),
    [
        ("lossless", "far ahead", None),
        ("zeropp", "default", None),
        ("zeropp", "small", NO_COPY),
    ],
    ids=["lossless", "zeropp", "no copy"],
)
def test_evaluations_between_steps_change_nothing(recipe, limits, fields):
    """In inference mode too; and what they say is of the weights before the step."""
    for alone, *between in run_two(jobs.interleaved, recipe=recipe, limits=limits, fields=fields):
        assert between == [alone] * 3 and len(set(alone)) == 3


def test_parameters_frozen_between_two_forwards():
    """A parameter that is frozen after the engine was made is not stored: it stays as it is."""
    for (before, after), (expected,) in run_two(jobs.frozen_between_forwards):
        assert before == after == expected


def written_out_mean(name, step):
    """float64 mean over ranks and three micro-batches, zeros where a parameter was not used; and the largest input."""
    inputs = [jobs.micro_inputs(rank + 10 * step, micro) for rank in range(WORLD) for micro in range(3)]
    used = [given[name].double() for given in inputs if name in given]
    return sum(used) / len(inputs), max(x.abs().max().item() for x in used)


def test_a_gradient_that_comes_in_two_of_three_micro_batches():
    """Two hops of int8, each off by at most half a step of 1/127 of its block's largest number, times 1 + 2^-7."""
    fields = {"gradients": {"intra_format": "int8", "inter_format": "int8", "hadamard": False}}
    for steps in run_ranks(jobs.accumulated_gradients, fields=fields):
        for step, found in enumerate(steps):
            for name, gradient in found.items():
                mean, largest = written_out_mean(name, step)
                error = (gradient - mean).abs().max().item()
                share = 2 / 3 if name == "sometimes" else 1
                bound = 2 * share * largest / 127 / 2 * 1.01 if name != "vector" else 1e-6
                assert error <= bound, (name, step)
                assert (error > 1e-6) == (name != "vector"), "matrices are quantized, vectors are not"


@pytest.mark.parametrize(
    ("recipe", "limits", "fields"),
    [("zeropp", "far ahead", None), ("zeropp", "default", NO_COPY), ("lossless", "far ahead", None)],
    ids=["zeropp, in flight", "no copy, kept", "lossless, in flight"],
)
def test_writes_are_seen_by_the_next_forward(recipe, limits, fields):
    """On every rank, and in every unit: those that were on their way or kept from before the write too."""
    ranks = run_ranks(jobs.writes_are_seen, recipe=recipe, limits=limits, fields=fields)
    assert all(results == ranks[0] for results in ranks)
    for name, (before, after, fresh, plain, under_way, live) in ranks[0].items():
        assert after == fresh == pytest.approx(plain, rel=1e-6 if recipe == "lossless" else 2e-3), name
        assert before != after, name
        assert under_way > 0 if limits == "far ahead" else live > 0, "the case did not occur"


@pytest.fixture(scope="module")
def two_engines():
    return run_two(jobs.two_engines_one_module, limits="far ahead")


def test_an_engine_can_end(two_engines):
    for log in two_engines:
        assert log["during"] == log["second owners"] == {"zeropp_fp8"}
        assert log["under way"] > 0, "the case did not occur"
        assert log["after"] == {"deepspeed"} and log["state"] == 0
        assert log["kept"] and log["bytes held"] == 0


def test_a_second_engine_over_the_same_module(two_engines):
    """It computes what an engine over a module of its own does: nothing of the first is asked for old weights."""
    for log in two_engines:
        assert log["second"] == log["other"]


def test_the_host_does_not_wait_for_the_reduction_stream():
    for plain, without_waiting in run_two(jobs.train_as_if_streams_had_to_be_waited_for):
        assert plain == without_waiting


def test_what_is_under_way_stays_within_the_limit():
    """Also where only the first hops of a gather have been started, as on a CPU."""
    for found in run_two(jobs.most_under_way, names=("tiny", "small")):
        for limits, (most, largest) in found.items():
            assert 0 < most <= max(jobs.LIMITS[limits][0], largest)


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_optimizer_states_on_the_cpu(recipe):
    for plain, offloaded in run_two(jobs.offloaded, recipe=recipe):
        assert offloaded == plain and len(set(plain)) == 6


def test_the_table_says_where_a_gpu_has_no_kernel():
    import torch

    from zeropp_fp8.formats import make_format
    from zeropp_fp8.zero.stage_part import without_kernel

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert "torch code" in without_kernel(gpu, make_format("int8", block_size=32768))
    assert without_kernel(gpu, make_format("int8", block_size=16384)) == ""
    assert without_kernel(cpu, make_format("int8", block_size=32768)) == ""
