"""How weights get into the frozen store: from checkpoints, by PEFT, by the Trainer and Accelerate."""

import frozen_loading_jobs as jobs
import pytest
import torch
from frozen_jobs import frozen
from frozen_models import DTYPES, LINEAR, same
from models import llama
from ranks import run_ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small sharded safetensors checkpoint."""
    folder = tmp_path_factory.mktemp("small")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return str(folder)


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory):
    """67 MB in 16 bits, 8 of them a decoder layer."""
    folder = tmp_path_factory.mktemp("large")
    llama(layers=8, hidden=512, intermediate=2048).to(torch.bfloat16).save_pretrained(folder, max_shard_size="10MB")
    return str(folder)


@pytest.mark.parametrize("world, share", [(1, 0.55), (2, 0.35)])
def test_no_rank_holds_the_model_in_16_bits(large_checkpoint, world, share):
    """Of the model's bytes in 16 bits; int4 codes are 0.27 of them, and a decoder layer is 0.125."""
    store = {"format": "int4", "block_size": 64}
    for peak, rests, stored in run_ranks(
        jobs.memory_of_loading, world=world, ranks_per_node=1, folder=large_checkpoint, fields=store
    ):
        assert stored == 56 and rests < 0.3 / world
        assert rests < peak < share


def test_the_meter_sees_a_model_in_16_bits(large_checkpoint):
    """Nothing is frozen while the checkpoint streams in: "frozen" stores when the engine is made."""
    late = {"format": "int4", "block_size": 64, "modules": "frozen"}
    peak, rests, stored = run_ranks(
        jobs.memory_of_loading, world=1, ranks_per_node=1, folder=large_checkpoint, fields=late
    )[0]
    assert stored == 56 and rests < 0.3 and peak > 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_checkpoint_streams_into_the_store(checkpoint, dtype):
    fields = frozen("int4", skip_modules=["lm_head", "score", "layers.1.mlp", "k_proj"])
    kept = [n for n in LINEAR if "k_proj" not in n and "layers.1.mlp" not in n]
    for log in run_ranks(jobs.loaded, world=2, folder=checkpoint, dtype=dtype, fields=fields):
        assert log["stored while loading"] == sorted(kept)
        assert log["equal to encoding"] and log["others are exact"]
        third = [n.replace(".0.", ".2.") for n in kept if ".0." in n]
        assert log["stored of a classifier"] == sorted(kept + third)
        assert log["what no checkpoint has"] == pytest.approx((0.02, 0.02), rel=0.1)  # transformers initializes it
        streamed, whole, with_adapters = log["streamed"], log["whole"], log["made with adapters"]
        assert same(streamed["codes"], whole["codes"])
        assert streamed["losses"] == whole["losses"]
        assert sorted(with_adapters["codes"]) == sorted(kept)
        for kind in (streamed, whole, with_adapters):
            assert kind["unchanged"] and kind["dtypes"] == {DTYPES[dtype]}
            assert {"default", "embed_tokens", "norm", "lm_head", "k_proj"} <= set(kind["not stored"])


def test_several_adapters(checkpoint, tmp_path):
    logs = run_ranks(jobs.several_adapters, world=2, folder=checkpoint, adapter_folder=str(tmp_path))
    for log in logs:
        assert log["stored"] == sorted(LINEAR)
        assert log["loaded adapter"] == [(torch.bfloat16, torch.bfloat16, False)]
        assert log["unchanged"]
    assert logs[0]["loaded is as saved"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_trainer(checkpoint, tmp_path, dtype):
    fields = frozen("nf4", block_size=64, double_quantize=True)
    for log in run_ranks(
        jobs.with_trainer, world=2, folder=checkpoint, output=str(tmp_path), dtype=dtype, fields=fields
    ):
        assert log["stored"] == sorted(LINEAR) and log["unchanged"]
        assert sum(log["losses"][-3:]) < sum(log["losses"][:3])
        assert log["adapter as saved"]
        on_all, on_one = log["loss after training"]
        assert on_all < log["losses"][0] and log["loss after loading"] == on_one


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_accelerate(checkpoint, tmp_path, dtype):
    for log in run_ranks(
        jobs.with_accelerate, world=2, folder=checkpoint, output=str(tmp_path), dtype=dtype, fields=frozen("int4")
    ):
        assert log["stored"] == sorted(LINEAR) and log["unchanged"]
        assert sum(log["losses"][-3:]) < sum(log["losses"][:3])
        assert log["adapter as saved"]
