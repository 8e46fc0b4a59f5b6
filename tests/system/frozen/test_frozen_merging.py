"""Adapters merged into the weights of the frozen store, and taken out of them."""

import frozen_merge_jobs as jobs
import pytest
from frozen_jobs import frozen
from frozen_models import KEPT_LIVE, LINEAR, ON_CPU
from ranks import run_ranks

TARGETED = sorted(n for n in LINEAR if n.split(".")[-2] in ("q_proj", "v_proj", "down_proj"))


@pytest.mark.parametrize(
    "case",
    [
        {"fields": frozen("int8")},
        {
            "fields": frozen("nf4", block_size=64, double_quantize=True),
            "dtype": "bf16",
            "gather_granularity": "module",
            "overrides": ON_CPU,
        },
        {
            "fields": frozen("int4"),
            "safe_merge": True,
            "gather_granularity": "parameter",
            "secondary": {"scope": "node"},
        },
        {"fields": frozen("mxfp6_e2m3"), "use_dora": True},
        {"fields": frozen("fp8_e4m3", scales="tensor"), "dtype": "bf16"},
        {
            "fields": frozen("fp8_e4m3", scales="tensor"),
            "dtype": "bf16",
            "compute": {"format": "fp8", "scaling": "current"},
        },
    ],
    ids=[
        "int8",
        "double-quantized nf4 on the host",
        "safe merge",
        "DoRA",
        "fp8 with one scale",
        "multiplied as it rests",
    ],
)
def test_merged_adapters_come_out_bit_for_bit(case):
    for log in run_ranks(jobs.merge_and_unmerge, world=2, **case):
        assert log["shows what codes decode to"] and log["parameter by parameter"]
        assert log.get("merged", True) and log["changed by merging"] == TARGETED
        assert log["after one context"] == log["after layers"] == (True, True)
        assert set(log["codes changed"]) == set(TARGETED)
        assert log["requantized"] and log["merged stays"]
        unmerged, merged = log["losses around"]
        assert merged == pytest.approx(unmerged, abs=0.02) and merged != unmerged
        assert log["after two contexts"] == log["training goes on"] == (True, True)


def test_merge_and_unload(tmp_path):
    for log in run_ranks(jobs.merge_and_unload, world=2, fields=frozen("int4"), folder=str(tmp_path)):
        assert log["codes stay"] and log["saved"] and not log["adapters left"]
        in_plain_torch, in_the_engine = log["goes on evaluating"]
        assert in_the_engine == pytest.approx(in_plain_torch, rel=1e-6)
        assert log["nothing comes back"] and log["copies left"] == 0
        assert log["merged before"] == (True, 0, True)


@pytest.mark.parametrize("overrides", [None, KEPT_LIVE], ids=["dropped", "kept gathered"])
def test_merges_that_do_not_reach_the_codes(overrides):
    query = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    for log in run_ranks(jobs.merges_that_do_not_reach_the_codes, world=2, fields=frozen("int8"), overrides=overrides):
        said = log["merged for nothing"]
        assert f"RuntimeError: an adapter counts as merged into {query}, but its codes do not hold it" in said
        said = log["unmerged for nothing"]
        assert f"RuntimeError: the codes of {query} still hold an adapter that counts as unmerged" in said
        assert f"RuntimeError: an adapter is merged into {query} on some ranks only" in log["merged on one rank"]
        for step in ("unmerged in a context like it", "taken out", "nothing merged"):
            assert log[step] == (True, True), step
