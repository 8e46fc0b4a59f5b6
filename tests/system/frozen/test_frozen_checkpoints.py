"""Checkpoints of models with a frozen store: resuming on as many ranks and on others, what stock reads, refusals."""

import contextlib
import io
from pathlib import Path

import frozen_checkpoint_jobs as jobs
import pytest
import torch
from frozen_jobs import frozen
from ranks import run_ranks, run_two
from running import differing, equal

from zeropp_fp8.export import export_checkpoint, main
from zeropp_fp8.zero.checkpoint.manifest import damage, read_manifest
from zeropp_fp8.zero.fragment import QuantizedFragment

NF4 = frozen("nf4", block_size=16, double_quantize=True)
UNIVERSAL = {"checkpoint": {"load_universal": True}}
CODES = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight was saved by zeropp_fp8 as nf4 (block 16"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, what 4 ranks did): NF4 with double quantization, also as a universal checkpoint."""
    folder = str(tmp_path_factory.mktemp("saved"))
    return folder, run_ranks(jobs.train_and_save, folder=folder, fields=NF4, universally=True)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_resumes_bit_for_bit(saved):
    """2 steps, a checkpoint, 2 steps in new processes: as 4 steps at once. All 14 linear weights are codes."""
    folder, runs = saved
    for run, resumed in zip(runs, run_ranks(jobs.load_and_train, folder=folder, fields=NF4)):
        assert resumed.losses == run.losses[2:] and equal(resumed.seen, run.seen)


@pytest.mark.parametrize(
    "fields, dtype, zero_init, more",
    [
        (frozen("int8"), "bf16", False, {"secondary": {"scope": "node"}, "weights": {"format": "int8"}}),
        (NF4, "bf16", True, {"recipe": "qlora"}),
        (frozen("mxfp6_e2m3"), "fp32", True, {}),
        (frozen("int4"), "bf16", False, {"recipe": "zeropp", "partition": "whole_tensor"}),
        (
            frozen("fp8_e4m3", scales="tensor"),
            "bf16",
            True,
            {"recipe": "fp8-lm", "compute": {"format": "fp8", "scaling": "current"}},
        ),
    ],
    ids=[
        "int8 with a secondary shard",
        "qlora under zero.Init",
        "mxfp6 under zero.Init",
        "int4 beside owned tensors",
        "fp8 with one scale",
    ],
)
def test_resumes_in_other_settings(fields, dtype, zero_init, more, tmp_path):
    options = {"folder": str(tmp_path), "fields": fields, "dtype": dtype, "zero_init": zero_init, "more": more}
    runs = run_two(jobs.train_and_save, **options)
    for run, resumed in zip(runs, run_two(jobs.load_and_train, **options)):
        assert resumed.losses == run.losses[2:] and equal(resumed.seen, run.seen)


def test_loading_replaces_copies_of_the_weights_before(saved):
    """Into an engine that has trained: payloads of units and secondary shards are those of other codes."""
    folder, runs = saved
    more = {"secondary": {"scope": "node"}}
    for run, losses in zip(runs, run_ranks(jobs.load_in_the_middle, folder=folder, fields=NF4, more=more)):
        assert losses == run.losses[2:]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_other_numbers_of_ranks_by_the_universal_checkpoint(world, saved):
    """Codes are those of weights stored afresh by that many ranks; frozen biases, norms and embeddings come too."""
    folder, runs = saved
    for resumed in run_ranks(
        jobs.load_and_train, world=world, ranks_per_node=1, folder=folder, fields=NF4, tag="universal", **UNIVERSAL
    ):
        evaluation, first, second = resumed.losses
        assert evaluation == runs[0].losses[2] and equal(resumed.seen, runs[0].seen) and second != first


@pytest.mark.parametrize("world", [4, 2])
def test_weights_without_optimizer_states(world, saved):
    """DeepSpeed then puts the model together from all ranks' files, on fewer ranks too."""
    folder, runs = saved
    load = {"load_optimizer_states": False, "load_module_only": True}
    for resumed in run_ranks(jobs.load_and_train, world=world, ranks_per_node=1, folder=folder, fields=NF4, load=load):
        ((state,), (saved,)) = resumed.seen, runs[0].seen
        assert resumed.losses[0] == runs[0].losses[2]
        assert set(state) == {"weights", "masters"} and all(equal(state[kind], saved[kind]) for kind in state)


# -- numbers into codes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, into", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")])
def test_a_checkpoint_of_numbers_is_encoded(dtype, into, tmp_path):
    for results in run_ranks(
        jobs.load_from_numbers, world=3, ranks_per_node=3, folder=str(tmp_path), fields=NF4, dtype=dtype, into=into
    ):
        for result in results.values():
            assert result["fresh"] and result["others"] and result["trains"][1] != result["trains"][0]


def test_a_universal_checkpoint_of_numbers_is_encoded(tmp_path):
    options = {"folder": str(tmp_path), "dtype": "bf16"}
    run_ranks(jobs.train_and_save, fields={"format": "none"}, universally=True, world=3, ranks_per_node=1, **options)
    run_two(jobs.load_and_train, fields=frozen("int4"), tag="universal", **options, **UNIVERSAL)


# -- what is left out, or refused --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def excluded(saved):
    """A checkpoint without frozen parameters beside the one that is saved."""
    return run_ranks(jobs.save_excluded, folder=saved[0], fields=NF4)


def test_frozen_parameters_can_be_left_out(excluded):
    for fragments, num_bytes in excluded:
        assert fragments is None and num_bytes < 30_000, "no codes"


def test_what_does_not_fit_is_refused_before_anything_is_changed(saved, excluded):
    folder, _ = saved
    for results in run_ranks(jobs.refusals, folder=folder, of_saved=NF4, plain=frozen("int8")):
        for name in ("other format", "no store", "no store, module only", "skipped"):
            message = results[name]
            assert message.startswith('ConfigError: "zeropp_fp8.frozen.format": the checkpoint holds base_model.model.')
            assert "as nf4 (block 16, double-quantized scales) codes, this engine keeps it" in message
            assert "python -m zeropp_fp8 export CHECKPOINT NEW_FOLDER" in message
            assert ("as int8 (block 16) codes" if name == "other format" else "in float32") in message
        assert results["stock"].startswith(f"RawCodesError: {CODES}")
        assert "an adapter is merged into" in results["merged"] and "unmerge adapters" in results["merged"]
        assert "Missing key(s) in state_dict" in results["excluded"]
        assert "has slices of 4096 elements on 4 ranks, this model's tensor has 8192 elements" in results["other shape"]
        assert results["no frozen parameter"].startswith("RuntimeError: the checkpoint has no frozen parameter base_")
        kept = {name[0]: as_before for name, as_before in results.items() if isinstance(name, tuple)}
        assert [name for name in kept if results[name] == "nothing raised"] == ["excluded, not strict", "unmerged"]
        assert [name for name in kept if not kept[name]] == ["stock", "excluded, not strict", "unmerged"]
        assert results["codes of excluded"]


def test_files_of_other_ranks_that_are_missing(saved, tmp_path):
    for missing, one in run_two(jobs.files_are_missing, folder=saved[0], into=str(tmp_path), fields=NF4):
        assert "frozen weights that 4 ranks saved are read by 2 ranks from the files of all" in missing
        assert "this one lacks" in missing and "zero_pp_rank_3_mp_rank_00_model_states.pt" in missing
        assert "call load_checkpoint instead of load_module_state_dict" in one


def test_a_merged_adapter_is_not_saved_into_the_codes(tmp_path):
    for changed, as_before in run_two(jobs.save_merged_state, folder=str(tmp_path), fields=frozen("int8")):
        assert changed and as_before


# -- stock's readers, and the exported copy ----------------------------------------------------------------------------


def test_readers_of_numbers_are_told(saved):
    folder, runs = saved
    found, trained = run_ranks(jobs.readers_of_numbers, world=1, ranks_per_node=1, folder=folder)[0]
    assert set(found) == {"dict", "lazy", "files"}
    for message in found.values():
        assert message.startswith(f"RawCodesError: {CODES}") and "python -m zeropp_fp8 export" in message
    assert equal(trained, runs[0].seen[0]["masters"])


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    """The exported copy, made by the command."""
    out = tmp_path_factory.mktemp("exported") / "new"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main([saved[0], str(out), "--tag", "two"])
    assert said.getvalue() == f"zeropp_fp8.export: {out} has 14 weights as numbers that {saved[0]} has as codes\n"
    return str(out)


def test_the_exported_copy_has_a_manifest_of_its_own(saved, exported):
    old, new = (read_manifest(Path(folder, "two")) for folder in (saved[0], exported))
    assert new["global_steps"] == old["global_steps"] and set(new["files"]) == set(old["files"])
    assert not any(damage(Path(exported, "two", name), file) for name, file in new["files"].items())
    changed = {name for name in new["files"] if new["files"][name] != old["files"][name]}
    assert changed == {name for name in new["files"] if "model_states" in name}


def test_zero_to_fp32_reads_the_exported_copy(saved, exported):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(exported)
    found = {name: tensor.detach().float() for name, tensor in weights.items()}
    assert equal(found, saved[1][0].seen[0]["weights"])


def test_stock_resumes_from_the_exported_copy(saved, exported):
    """With the same states, and the losses of the plugin's run.

    By module: stock's hooks there split what a block's backward adds up, (a + b) + c, into a + (b + c).
    """
    by_module = {"more": {"gather_granularity": "module"}, "folder": saved[0]}
    for run, stock in zip(
        run_ranks(jobs.load_and_train, fields=NF4, **by_module),
        run_ranks(jobs.load_and_train, folder=exported, fields=NF4, plugin=False),
    ):
        assert not differing(stock, run)


def test_a_universal_checkpoint_is_exported_too(saved, tmp_path):
    assert export_checkpoint(saved[0], tmp_path / "new", "universal") == 14
    assert (tmp_path / "new" / "latest_universal").read_text() == "universal"
    assert (tmp_path / "new" / "universal" / "zero" / "optimizer_state.pt").is_file()
    files = list((tmp_path / "new" / "universal").glob("*_model_states.pt"))
    assert len(files) == 4
    for file in files:
        fragments = torch.load(file, weights_only=False)["frozen_param_fragments"]
        assert not any(isinstance(fragment, QuantizedFragment) for fragment in fragments.values())
