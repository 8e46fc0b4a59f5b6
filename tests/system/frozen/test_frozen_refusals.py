"""Refusals of the frozen store, after which nothing is lost once the input is put right."""

import frozen_refusal_jobs as jobs
import pytest
from frozen_jobs import frozen
from frozen_models import KEPT_LIVE
from ranks import run_ranks


@pytest.mark.parametrize(
    "case",
    [
        {"fields": frozen("int8")},
        {"fields": frozen("int4", double_quantize=True), "secondary": {"scope": "node"}},
        {"fields": frozen("nf4"), "overrides": KEPT_LIVE},
    ],
    ids=["dropped", "node's copy", "kept gathered"],
)
def test_bad_input_loses_nothing(case):
    key = "base_model.model.model.layers.1.self_attn.k_proj.weight is stored as "
    for log in run_ranks(jobs.bad_input, world=2, **case):
        for message in log["trained"]:
            assert (
                message.startswith(f"RuntimeError: {key}")
                and "cannot be trained; set requires_grad to False" in message
            )
        for message in (*log["written"], *log["written in a context"], *log["written while it runs"]):
            assert message.startswith(f"RuntimeError: {key}") and "was written in place, which would be lost" in message
        for step in ("frozen again", "written once", "context over", "hook removed", "nothing written"):
            assert log[step] == (True, True), step
        assert log["one written"] == ["model.layers.1.self_attn.k_proj.weight"] and log["requantized"]
        assert log["a part written"] and log["goes on"] == 1


def test_engines_that_do_not_fit_are_refused():
    logs = run_ranks(jobs.refused_engines, world=2, fields=frozen("int8"), other=frozen("int4"))
    for log in logs:
        section, query = '"zeropp_fp8.frozen"', "model.layers.0.self_attn.q_proj"
        assert log["trained"].startswith(
            f"ConfigError: {section}: {query}.weight is to be trained, but was stored as int8"
        )
        assert "freeze it (PEFT does)" in log["trained"]
        assert "was stored as int8 (block 16) codes" in log["other format"]
        assert "this engine asks for int4 (block 16)" in log["other format"]
        assert "this engine asks for none" in log["no format"]
        assert "is stored as codes (frozen store), which stock DeepSpeed would take for numbers" in log["stock"]
        assert 'v_proj.weight is to be trained, and "frozen.modules" names it' in log["trained by name"]
        for message in log["names nothing"]:
            assert message.startswith(
                'ConfigError: "zeropp_fp8.frozen.modules": no weight of the model that may be stored'
            )
            assert '["q_porj", "lm_head"]; correct them or "frozen.skip_modules", or set it to "all-lin' in message
        assert log["after all"] == (True, True, True)
        assert log["stored of a trained model"] == (0, 1) and log["stored of a skipped model"] == 0
        for message in log["nothing to store"]:
            assert message.startswith('ConfigError: "zeropp_fp8.frozen.format": the model has no weight to store')
            assert 'freeze the base model before the engine is made (PEFT does), or set "frozen.format" to' in message
        assert log["stored for evaluation"] == 14
