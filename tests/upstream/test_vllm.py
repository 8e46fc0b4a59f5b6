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


def test_weights_through_vllm_s_own_engines():
    """Its trainer engine checks what comes against the metadata; its worker engine loads every bit."""
    first, second = run_two(vllm_jobs.to_vllm, wheel=WHEEL)
    for found in (first, second):
        assert found["first"] and found["stepped"] and found["then"]
        assert found["failing"] == "RuntimeError: send_weights failed on rank 0: OSError: finish is not to be had"
        assert found["adapters"].startswith("ValueError: vllm_transfer: vLLM takes no adapters this way")
    assert first["calls"] == ["init", *["start", "update", "finish"] * 4] and second["calls"] == []
    assert first["sent"] > 0 == second["sent"]
