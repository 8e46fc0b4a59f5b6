"""The hand-over of weights with vLLM's own classes, and whether the stand-ins of the ordinary tests have their shape.

    make test-upstream SUITE=vllm UPSTREAM=/path/to/unpacked/wheel

Which of vLLM's modules are stand-ins, and what to unpack: vllm_stubs.py.
"""

import dataclasses
import inspect
import os
from functools import cached_property
from pathlib import Path

import pytest
import vllm_shape
from ranks import run_two

from tests.upstream import vllm_jobs, vllm_stubs

WHEEL = os.environ.get("UPSTREAM_VLLM")
pytestmark = pytest.mark.skipif(not WHEEL, reason="UPSTREAM_VLLM names no unpacked wheel of vLLM")


@pytest.fixture(scope="module")
def vllm():
    vllm_stubs.install(Path(WHEEL))
    from vllm.distributed import weight_transfer

    return weight_transfer


def test_stand_ins_have_the_shape_of_vllm(vllm):
    """Of all that the plugin calls, or that calls the plugin."""
    fields = [[(f.name, f.kw_only) for f in dataclasses.fields(m.ParamMeta)] for m in (vllm, vllm_shape)]
    assert fields[0] == fields[1]
    for name in ("iter_full", "iter_local"):
        real, ours = (inspect.signature(getattr(m.WeightSource, name)) for m in (vllm, vllm_shape))
        assert list(real.parameters) == list(ours.parameters)
    assert isinstance(vllm.WeightSource.metadata, property) and vllm.WeightSource.__abstractmethods__ == {"metadata"}
    assert vllm_shape.WeightSource.__abstractmethods__ == {"metadata"}
    real, ours = (inspect.signature(m.WeightTransferTrainerFactory.trainer_init) for m in (vllm, vllm_shape))
    assert {p.name: p.kind for p in real.parameters.values()} == {p.name: p.kind for p in ours.parameters.values()}
    for module in (vllm, vllm_shape):
        with pytest.raises(TypeError, match=r"must be a functools\.cached_property"):
            type("Changing", (module.WeightSource,), {"metadata": lambda self: []})
        type("Fixed", (module.WeightSource,), {"metadata": cached_property(lambda self: [])})()


@pytest.mark.parametrize("packed", [False, True])
def test_weights_through_vllm_s_own_engines(packed):
    """Its trainer engine checks what comes against the metadata; its worker engine loads every bit, unpacked by it."""
    first, second = run_two(vllm_jobs.to_vllm, wheel=WHEEL, packed=packed)
    assert first["messages"] == 30 if not packed else 1 < first["messages"] < 30
    for found in (first, second):
        assert found["first"] and found["stepped"] and found["then"]
        assert found["failing"] == "RuntimeError: send_weights failed on rank 0: OSError: finish is not to be had"
        assert found["adapters"].startswith("ValueError: vllm_transfer: vLLM takes no adapters this way")
    assert first["calls"] == ["init", *["start", "update", "finish"] * 4] and second["calls"] == []
    assert first["sent"] > 0 == second["sent"]


WAYS = {
    "slices": ("zeropp", "none", {}),
    "owners": ("fp8-lm", "none", {"compute": {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}}),
    "LoRA": ("zeropp", "lora", {}),
}


def test_changes_through_vllm_s_own_engines():
    """Its sparse engines load every bit; all at first and after a failure; where nothing changed nothing is said."""
    first, second = run_two(vllm_jobs.changes_to_vllm, wheel=WHEEL, ways=WAYS)
    for found in (first, second):
        assert found.pop("codes").startswith("ValueError: vllm_transfer: ")
        assert set(found) == set(WAYS)
        for rounds in found.values():
            said, failed = [each[0] for each in rounds], "RuntimeError: send_weights failed on rank 0: "
            assert [said[n] for n in (0, 1, 2, 4)] == ["nothing raised"] * 4
            assert said[3] == f"{failed}OSError: update is not to be had"
            assert said[5].startswith(f"{failed}RuntimeError: model.norm.weight has values that are NaN")
            assert all(same for _, same, *_ in rounds[:3] + rounds[4:5])
    calls = ["finish", "start", "update"]
    for way, rounds in first.items():
        sent = [each[2] for each in rounds]
        assert sent[0] == sent[4] >= sent[2] > sent[1] == 0, (way, sent)
        assert [each[3] for each in rounds[:5]] == [calls, [], calls, ["start", "update"], calls]
        assert [each[4] for each in rounds[:5]] == ["1", "1", "3", "3", "5"]
    assert all(not each[2] and not each[3] for rounds in second.values() for each in rounds)


def test_updates_through_our_engine_in_vllm():
    """vLLM's factory knows it; its loader gets what an update has changed; NaN, which it cannot say, is refused."""
    first, second = run_two(vllm_jobs.updates_to_vllm, wheel=WHEEL)
    for found, codes in (first, second):
        assert (
            "RuntimeError: send_weights failed on rank 0: ValueError: zeropp_fp8: vLLM's patches hold weights" in codes
        )
        assert [(said, same) for said, same, _ in found[:4]] == [("nothing raised", True)] * 4
        assert (
            found[4][0].startswith("RuntimeError: send_weights failed on rank 0: ValueError: ") and "NaN" in found[4][0]
        )
    loaded = [elements for _, _, elements in first[0]]
    assert loaded[0] > loaded[2] > loaded[1] == 0 and loaded[3] == loaded[0]
