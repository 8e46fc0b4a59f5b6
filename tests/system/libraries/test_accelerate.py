"""Accelerate, unmodified, beside stock DeepSpeed: `lossless` has its bits."""

import accelerate_jobs as jobs
import pytest
from ranks import run_two

ALONE = (None, "lossless", "zeropp", "fp8-lm")
PAIRS = [(None, None), ("lossless", "lossless"), ("zeropp", "zeropp-4bit"), ("zeropp", None)]


def test_a_loop(tmp_path):
    """`accumulate`, `clip_grad_norm_`, `save_state` and `load_state`, `get_state_dict`, `unwrap_model`."""
    runs = run_two(jobs.loops, ways=ALONE, folder=str(tmp_path))[0]
    stock = runs[None]
    assert [synced for _, synced, _ in stock["first"]] == [False, True] * 2
    for way, run in runs.items():
        assert run["again"] == run["second"] and run["state dict"] and run["same"], way
        assert run["unwrapped"] == ("LlamaForCausalLM", "zeropp_fp8" if way else "deepspeed")
        for mine, theirs in zip(run["first"] + run["second"], stock["first"] + stock["second"]):
            close = pytest.approx(theirs[0], rel=0.02), theirs[1], theirs[2] and pytest.approx(theirs[2], rel=0.3)
            assert mine == (theirs if way in (None, "lossless") else close), way


def test_sequence_parallel():
    """ALST, by Accelerate's ParallelismConfig; where the recipe says so, activations travel in FP8."""
    runs = {way: run_two(jobs.sequence_parallel, way=way)[0] for way in ALONE}
    losses, _ = runs[None]
    assert len(set(losses)) == 6 and runs["lossless"][0] == losses
    for way in ("zeropp", "fp8-lm"):
        assert runs[way][0] == pytest.approx(losses, rel=0.02) and runs[way][0] != losses, way
    assert [way for way, (_, activations) in runs.items() if activations and activations["inter"]] == ["fp8-lm"]


def test_two_models():
    """A plugin of Accelerate's each, one with a section and one without; with one section what each has alone."""
    runs = run_two(jobs.two_models, pairs=PAIRS)[0]
    taught, both = runs[None, None]
    assert [synced for *_, synced in taught] == [False, True] * 3
    assert runs["lossless", "lossless"] == (taught, both)
    rounded, beside_stock = runs["zeropp", "zeropp-4bit"], runs["zeropp", None]
    for n, (ours, stock) in enumerate(zip(rounded[1], both)):
        assert ours == pytest.approx(stock, rel=0.02) and ours != stock, n
    assert [first for first, _ in beside_stock[1]] == [first for first, _ in rounded[1]]
    assert [second for _, second in beside_stock[1]] == [second for _, second in both]
    assert [extra for extra, *_ in beside_stock[0]] == [extra for extra, *_ in taught]
    assert all(extra != exact for (extra, *_), (exact, *_) in zip(rounded[0], taught))
    assert [loss for _, loss, _ in rounded[0]] == pytest.approx([loss for _, loss, _ in taught], rel=0.02)
