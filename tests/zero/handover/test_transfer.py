"""Parts of a hand-over that need no engine: how bytes are cut, and vLLM's classes around a source."""

import sys
import types

import pytest
import torch
import vllm_shape
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.handover import ParamMeta, Transfer, TransferInit, received, vllm_transfer
from zeropp_fp8.zero.handover.transfer import buckets, num_bytes, update_info

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(st.lists(st.tuples(DTYPES, SHAPES), max_size=12), st.integers(1, 400))
def test_buckets_and_what_is_received_of_them(tensors, limit):
    """A message ends with the tensor that makes it larger than the limit; bytes come back under their names."""
    generator = torch.Generator().manual_seed(len(tensors))
    bits = [
        torch.randint(0, 2, (num_bytes(ParamMeta("", d, s)),), generator=generator, dtype=torch.uint8)
        for d, s in tensors
    ]
    declared = [ParamMeta(str(n), dtype, shape) for n, (dtype, shape) in enumerate(tensors)]
    cut = list(buckets(declared, limit))
    assert [meta for bucket in cut for meta in bucket] == declared
    for bucket in cut:
        assert sum(map(num_bytes, bucket[:-1])) <= limit
    assert all(sum(map(num_bytes, bucket)) > limit for bucket in cut[:-1])
    stream = torch.cat([*bits, torch.empty(0, dtype=torch.uint8)])
    sent = []

    def broadcast(tensor, src):
        start = sum(sent)
        tensor.copy_(stream[start : start + tensor.numel()])
        sent.append(tensor.numel())

    group = types.SimpleNamespace(broadcast=broadcast)
    got = list(received(update_info(declared), group, limit, torch.device("cpu")))
    assert [(name, t.dtype, tuple(t.shape)) for name, t in got] == declared
    assert all(torch.equal(t.view(-1).view(torch.uint8), expected) for (_, t), expected in zip(got, bits))


class Source:
    """A source of two tensors that are not those it declares, if told so."""

    gives_adapters = False

    def __init__(self, wrong=None):
        self.wrong, self.ended = wrong, 0

    def metadata(self):
        return [ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (3,))]

    def __iter__(self):
        yield "a", torch.ones(2)
        if self.wrong == "another shape":
            yield "b", torch.ones(4)
        elif self.wrong != "too few":
            yield "b", torch.ones(3)
        if self.wrong == "too many":
            yield "c", torch.ones(1)
        self.ended += 1


class Client:
    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, init_info):
        self.calls.append(init_info)

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, update_info):
        self.calls.append(update_info)

    def finish_weight_update(self, weight_version=None):
        self.calls.append("finish")


def transfer_of(source, client, **more):
    group = types.SimpleNamespace(broadcast=lambda tensor, src: None)
    return Transfer.trainer_init(TransferInit(lambda: group, rank=0, **more), client=client, source=source)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("another shape", r"'b', .*shape=\(3,\)\) was declared, and b torch.float32 \(4,\) came"),
        ("too few", r"'b', .* was declared, and nothing torch.float32 \(0,\) came"),
        ("too many", "c came, and was not declared"),
    ],
)
def test_a_source_that_does_not_keep_its_word(wrong, said):
    """It is named before the engine is told that all has come."""
    source, client = Source(wrong), Client()
    with pytest.raises(RuntimeError, match=f"send_weights failed on rank 0: RuntimeError: .*{said}"):
        transfer_of(source, client).send_weights()
    assert "finish" not in client.calls


def test_what_the_engine_is_told():
    client = Client()
    transfer = transfer_of(Source(), client, receivers={"master_port": 5}, packed_buffer_size_bytes=10)
    transfer.send_weights()
    told = {"names": ["a", "b"], "dtype_names": ["float32", "float32"], "shapes": [[2], [3]]}
    init = {"master_port": 5, "packed": True, "packed_buffer_size_bytes": 10}
    assert client.calls == [init, "start", told, "finish"]
    assert (transfer.sent_bytes, transfer.peak_bucket_bytes) == (20, 20)
    with pytest.raises(ValueError, match="packed_buffer_size_bytes is 0: give a positive size"):
        transfer_of(Source(), client, packed_buffer_size_bytes=0)


def test_an_engine_that_cannot_be_joined():
    class Refusing(Client):
        def init_weight_transfer_engine(self, init_info):
            raise OSError("connection refused")

    with pytest.raises(RuntimeError, match="joining the receivers of weights failed on rank 0: OSError: connection"):
        transfer_of(Source(), Refusing())


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
