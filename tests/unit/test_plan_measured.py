"""The plan's model beside measured steps: what files it reads, what is fitted, how near it comes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.sizes import SIZES
from zeropp_fp8.plan import (
    EMULATED_H200,
    METHODS,
    PEERS,
    Cluster,
    Model,
    PlanError,
    calibrate,
    calibrate_machine,
    check,
    estimate,
    load_points,
)
from zeropp_fp8.plan.__main__ import main
from zeropp_fp8.plan.measured import MODELS, emulated_job

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks/results/two_nodes"


def test_peers_are_met_within_15_percent():
    for residual in check(PEERS, EMULATED_H200):
        assert abs(residual.error) < 0.15, residual.point.label


def of_four_ranks(point):
    """Measured on one machine; those with two are of other days."""
    return point.job.cluster.world_size == 4


def test_several_micro_batches_are_met_within_15_percent():
    """Of another machine, with two constants fitted to it: there hardly anything overlapped."""
    points = load_points(RESULTS / "h200-2-25_10gbit-k8.json")
    assert {p.job.micro_batches for p in points} == {8} and len(points) == 10
    machine = calibrate(points, EMULATED_H200, ("host_per_block_ms", "overlap"))
    for residual in check(points, machine):
        assert abs(residual.error) < 0.15, residual.point.label


def test_compiled_runs_are_met_within_15_percent():
    points = load_points(RESULTS / "h200-2-nvlink-compiled.json")
    assert {p.run for p in points} == {"fsdp2-compiled", "zeropp-compiled", "lossless-compiled", "zeropp"}
    for residual in check(points, calibrate(points, EMULATED_H200, ("host_per_block_ms",))):
        assert abs(residual.error) < 0.15, residual.point.label


def test_fp8_is_predicted_from_16_bits():
    """With a GPU's rate from runs in 16 bits alone, those in FP8 of the same file are within 15 %."""
    of_all = 0
    for name in ("limits/h200-1-local-batch", "limits/h200-1-local-sequence", "step/h200-1-local"):
        points = [p for p in load_points(RESULTS.parent / f"fp8_lm_{name}.json") if p.steady]
        in_16_bits = [p for p in points if p.run == "lossless"]
        fast_host = replace(EMULATED_H200, host_per_block_ms=1.0)
        in_fp8 = [p for p in points if METHODS[p.run].fp8_products]
        of_all += len(in_fp8)
        for residual in check(in_fp8, calibrate(in_16_bits, fast_host, ("achieved_tflops",))):
            assert abs(residual.error) < 0.15, residual.point.label
    assert of_all == 4 + 4 + 3


def test_every_run_measured_together_is_met_within_15_percent():
    """Four constants of GPU and host are fitted to the machine of that day; links and kernels stay as they are."""
    points = [p for p in load_points(RESULTS) + load_points(RESULTS.parent / "step_profile") if of_four_ranks(p)]
    assert len(points) > 25
    for residual in check(points, calibrate_machine(points, EMULATED_H200)):
        assert abs(residual.error) < 0.15, residual.point.label


def test_quantized_runs_on_slow_links_need_no_fit():
    """Where the wire bounds the step, the constants fitted to other people's runs predict this project's."""
    points = [p for p in load_points(RESULTS) if p.run.startswith("zeropp") and p.job.cluster.nodes > 1]
    points = [p for p in points if of_four_ranks(p)]
    assert len(points) == 8
    for residual in check(points, EMULATED_H200):
        assert abs(residual.error) < 0.05, residual.point.label


def test_slow_links_are_predicted_from_fast_ones():
    """Fitted without the 10 Gbit/s points, it predicts them."""

    def at_10(point):
        return point.job.cluster.inter_gbit == 10

    start = replace(EMULATED_H200, host_per_tensor_ms=1.0, host_per_gather_ms=0.2, link_efficiency=0.7)
    fields = ("host_per_tensor_ms", "host_per_gather_ms", "link_efficiency")
    fitted = calibrate([point for point in PEERS if not at_10(point)], start, fields)
    held_out = [point for point in PEERS if at_10(point)]
    assert len(held_out) == 3
    for residual in check(held_out, fitted):
        assert abs(residual.error) < 0.05, residual.point.label


def test_calibration_finds_what_made_the_points():
    truth = replace(EMULATED_H200, host_per_tensor_ms=0.9, link_efficiency=0.6)
    jobs = [emulated_job(25), emulated_job(None)]
    points = [
        replace(point, step_s=estimate(METHODS[point.run], point.job, truth).step_s)
        for point in PEERS
        if point.job in jobs
    ]
    found = calibrate(points, EMULATED_H200, ["host_per_tensor_ms", "link_efficiency"])
    assert found.host_per_tensor_ms == pytest.approx(0.9, rel=1e-3)
    assert found.link_efficiency == pytest.approx(0.6, rel=1e-3)
    assert replace(found, host_per_tensor_ms=0, link_efficiency=1) == replace(
        truth, host_per_tensor_ms=0, link_efficiency=1
    )


def test_calibration_leaves_a_start_where_the_field_is_hidden():
    """At the start quantizing hides behind the host; only a wide first step shows that it matters."""
    truth = replace(EMULATED_H200, codec_efficiency=0.004)
    points = [replace(PEERS[0], run="zeropp", job=emulated_job(gbit)) for gbit in (10, 25)]
    points = [replace(point, step_s=estimate(METHODS["zeropp"], point.job, truth).step_s) for point in points]
    found = calibrate(points, EMULATED_H200, ["codec_efficiency"])
    assert found.codec_efficiency == pytest.approx(0.004, rel=1e-2)


ROW = {"run": "zeropp", "dtype": "bf16", "step_ms": 500.0, "peak_gib": 2.0}


@pytest.mark.parametrize(
    ("result", "clusters"),
    [
        ({"gbit": 25, "rows": [ROW]}, [Cluster(2, 2, 25)]),
        ({"rates": [{"gbit": 25, "rows": [ROW]}, {"gbit": None, "rows": [ROW]}]}, [Cluster(2, 2, 25), Cluster(1, 4)]),
        ({"gbit": [25, 0], "rows": [ROW | {"gbit": 25}, ROW | {"gbit": 0}]}, [Cluster(2, 2, 25), Cluster(2, 2, 72)]),
        ({"gbit": "nvlink", "rows": [ROW]}, [Cluster(1, 4)]),
        ({"gbit": 10, "nodes": 4, "ranks_per_node": 8, "rows": [ROW]}, [Cluster(4, 8, 10)]),
        ({"gbit": 25, "rows": [ROW, {"run": "stock", "error": "out of memory"}]}, [Cluster(2, 2, 25)]),
        ({"gbit": 25, "device": "x86_64", "rows": [ROW]}, []),
        ({"gbit": 25, "hardware": {"gpus": 0}, "rows": [ROW]}, []),
        ({"hardware": {"gpus": 4, "gpu": "NVIDIA H200"}, "rows": [ROW | {"gbit": 25.0}]}, [Cluster(2, 2, 25)]),
        ({"rows": [[1.0, 2.0], {"dtype": "bf16", "cosine": 1.0}]}, []),
        ({"collectives": []}, []),
        ([1, 2], []),
    ],
)
def test_results_in_every_form(tmp_path, result, clusters):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/result.json").write_text(json.dumps(result))
    points = load_points(tmp_path)
    assert [point.job.cluster for point in points] == clusters
    for point in points:
        assert (point.run, point.step_s, point.peak_bytes) == ("zeropp", 0.5, 2**31)
        assert (point.job.model, point.job.tokens) == (MODELS["1.3b"], 1024)


def test_rounds_are_one_run(tmp_path):
    rounds = [ROW | {"version": "after", "round": i, "step_ms": ms} for i, ms in enumerate((100, 130, 110))]
    rounds += [ROW | {"version": "before", "round": 0, "peak_gib": 3.0, "min_ms": 400.0, "max_ms": 800.0}]
    (tmp_path / "result.json").write_text(json.dumps({"gbit": 25, "rows": rounds}))
    after, before = load_points(tmp_path)
    assert (after.step_s, after.steady, after.peak_bytes) == (0.11, True, 2**31)
    assert (before.step_s, before.steady, before.peak_bytes) == (0.5, False, 3 * 2**30)
    fitted = calibrate([after, before], EMULATED_H200, ("link_efficiency",))
    assert fitted == calibrate([after], EMULATED_H200, ("link_efficiency",)) != EMULATED_H200


def test_the_check_marks_what_it_does_not_fit_to(capsys):
    main(["--check", str(RESULTS.parent / "fp8_lm_limits/h200-1-local-sequence.json"), "--fit", "achieved_tflops"])
    (marked,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith("unsteady: not fitted to")]
    assert marked.startswith("fp8-lm-o2 @ one node, 8192 tokens")


def test_a_row_overrides_the_file(tmp_path):
    path = tmp_path / "result.json"
    row = ROW | {"tokens": 2048, "micro_batch": 4, "run": "in_tree"}
    path.write_text(
        json.dumps({"gbit": 25, "tokens": 1024, "rows": [row, ROW | {"run": "hsdp", "reduce_dtype": "fp32"}]})
    )
    one, other = load_points(path)
    assert (one.run, one.job.tokens, one.job.sequence_length) == ("in-tree", 8192, 2048)
    assert (other.run, other.job.tokens) == ("hsdp-fp32-gradients", 1024)  # no method of the model


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        (json.dumps({"model": "9b", "rows": [ROW]}), "model '9b' is not known"),
        (json.dumps({"gbit": [10, 25], "rows": [ROW]}), "must say which of the rates"),
        (json.dumps({"gbit": "fast", "rows": [ROW]}), "gbit must be a rate"),
    ],
)
def test_results_that_cannot_be_read(tmp_path, text, message):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=message):
        load_points(path)


def test_models_have_the_parameters_of_the_benchmark():
    for name in set(MODELS) & set(SIZES):
        size = SIZES[name]
        norms = (2 * size.layers + 1) * size.hidden
        total = size.layers * (4 * size.hidden**2 + 3 * size.hidden * size.intermediate)
        total += 2 * size.vocabulary * size.hidden + norms
        assert MODELS[name] == Model(total, size.hidden, size.layers, size.vocabulary)
    assert {"1.3b", "small", "tiny"} <= set(MODELS) & set(SIZES)
