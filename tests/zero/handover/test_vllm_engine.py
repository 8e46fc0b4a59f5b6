"""vLLM's classes around a source, without vLLM, and its worker engine's arguments."""

import sys
import types

import pytest
import torch
import vllm_shape

from zeropp_fp8.handover import ParamMeta, vllm_transfer
from zeropp_fp8.zero.handover import vllm_engine


class Source:
    """A source of two tensors."""

    gives_adapters = False

    def __init__(self):
        self.ended = 0

    def metadata(self):
        return [ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (3,))]

    def __iter__(self):
        yield "a", torch.ones(2)
        yield "b", torch.ones(3)
        self.ended += 1


def test_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"needs vLLM 0.33 or newer .*`pip install 'vllm>=0.33'`, or send with zerop"):
        vllm_transfer(Source(), None, None)


@pytest.fixture
def vllm(monkeypatch):
    """vLLM's names, with classes of the shape of its own."""
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", vllm_shape)
    return vllm_shape


def test_with_classes_like_those_of_vllm(vllm):
    """The factory gets one of vLLM's sources, with vLLM's own metadata, and all of its weights at each hand-over."""
    source = Source()
    transfer = vllm_transfer(source, "info", "client")
    transfer.send_weights()
    transfer.send_weights()
    declared = [vllm.ParamMeta("a", torch.float32, (2,)), vllm.ParamMeta("b", torch.float32, (3,))]
    assert transfer.engine.sent == [(declared, ["a", "b"])] * 2
    assert transfer.engine.source.metadata is transfer.engine.source.metadata
    transfer.shutdown()
    assert transfer.engine.source is None


def test_adapters_apart_are_not_for_vllm(vllm):
    source = Source()
    source.gives_adapters = True
    with pytest.raises(ValueError, match=r'takes no adapters this way: use WeightSource\(..., weights="merged"\)'):
        vllm_transfer(source, "info", "client")


def test_an_older_vllm(vllm, monkeypatch):
    """Its sources were iterated themselves."""
    monkeypatch.delattr(vllm.WeightSource, "iter_full")
    with pytest.raises(ImportError, match=r"needs vLLM 0.33 or newer .*no attribute 'iter_full'; install it with `pip"):
        vllm_transfer(Source(), None, None)


@pytest.mark.parametrize("failing, error", [("start", "refused"), ("finish", "reset")])
def test_vllm_that_fails(vllm, failing, error):
    """Where nobody has begun to iterate, or all has been: others wait in no gather."""
    source = Source()
    transfer = vllm_transfer(source, "info", "client")
    transfer.engine.failing = failing
    with pytest.raises(RuntimeError, match=f"send_weights failed on rank 0: OSError: connection {error}"):
        transfer.send_weights()
    assert source.ended == 1


def test_an_older_vllm_does_not_learn_of_the_backend(monkeypatch, caplog):
    """vLLM itself goes on."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    vllm_engine.register()
    assert "the weight transfer of zeropp_fp8 needs vLLM 0.33 or newer" in caplog.text
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        vllm_engine.Engine  # noqa: B018
