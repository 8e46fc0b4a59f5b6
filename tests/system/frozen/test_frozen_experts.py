"""Packed experts of a mixture in a frozen store, with LoRA on them by PEFT's `target_parameters`."""

import itertools

import frozen_expert_jobs as jobs
import pytest
from frozen_jobs import frozen
from ranks import run_ranks, run_two
from thinning import thinned

FORMATS = {
    "int4": frozen("int4", block_size=32, double_quantize=True),
    "int8": frozen("int8", block_size=32),
    "nf4": frozen("nf4", block_size=32),
    "fp8_e4m3": frozen("fp8_e4m3", block_size=32),
}
PACKED = {f"model.layers.{layer}.mlp.experts.{name}" for layer in (0, 1) for name in jobs.EXPERTS}


@pytest.mark.parametrize("name, kind, zero_init", thinned(FORMATS, jobs.KINDS, [False, True]))
def test_training_equals_training_on_rounded_weights(name, kind, zero_init):
    for names, losses, expected in run_two(jobs.equals_rounded, kind=kind, fields=FORMATS[name], zero_init=zero_init):
        assert set(names) > PACKED
        assert losses == expected


@pytest.mark.parametrize("way", ["blocks", "engine.compile"])
def test_compiled_training_equals_training_that_is_not(way):
    """engine.compile() of a mixture rounds apart without store and adapters, too."""
    for differs, losses, compiled in run_two(jobs.compiled, way=way, fields=FORMATS["int4"]):
        assert not differs or way == "engine.compile"
        assert compiled == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("zero_init", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_routers_are_stored_only_where_they_are_named(zero_init, named):
    """Also those that are linear layers."""
    fields = {**FORMATS["int8"], **({"modules": ["q_proj", "router.gate"]} if named else {})}
    for names, losses, expected in run_two(jobs.equals_rounded, kind="Afmoe", fields=fields, zero_init=zero_init):
        assert ("model.layers.1.mlp.router.gate.weight" in names) == named
        assert "model.layers.1.self_attn.q_proj.weight" in names and losses == expected
        assert named or {"model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.shared_experts.up_proj.weight"} < {
            *names
        }


@pytest.fixture(scope="module", params=jobs.KINDS)
def checkpoint(request, tmp_path_factory):
    """A small sharded safetensors checkpoint, in which every expert has matrices of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    jobs.mixture(request.param).bfloat16().save_pretrained(folder, max_shard_size="60KB")
    return str(folder)


def test_checkpoints_stream_into_the_store(checkpoint):
    for names, as_rounded, exact in run_two(jobs.loaded_from, folder=checkpoint, fields=FORMATS["int4"]):
        assert set(names) > PACKED and as_rounded and exact


LACKED = ["layers.1.mlp.experts", "layers.0.self_attn.k_proj"]


@pytest.mark.parametrize(
    "missing, said, options",
    [
        (["o_proj"], 0, {}),
        (LACKED, 3, {}),
        (LACKED, 3, {"fields": {}, "adapt": jobs.trained}),
        (["o_proj", "model.norm"], 0, {"fields": {}, "adapt": jobs.trained}),
        (LACKED, 3, {"fields": {}, "adapt": jobs.trained, "head": True}),
        (["lm_head"], 0, {"fields": {}, "adapt": jobs.trained, "head": True}),
        (["lm_head"], 0, {"adapt": jobs.with_a_trained_head, "head": True}),
    ],
)
def test_what_a_checkpoint_lacks(tmp_path, missing, said, options):
    """Weights that no file has are named, but for what a model computes itself (here `o_proj`), adapters, and trained
    ones outside of blocks, such as a new head."""
    model = jobs.mixture("Qwen3Moe").bfloat16()
    model.save_pretrained(tmp_path, save_original_format=False)
    first, _ = run_two(jobs.incomplete, folder=str(tmp_path), missing=missing, **{"fields": FORMATS["int4"], **options})
    names = [n for n, _ in model.named_parameters() if any(part in n for part in missing)]
    lines = [line for line in first.splitlines() if "NOT LOADED" in line]
    if said:
        (line,) = lines
        assert len(names) == said and all(name.rpartition(".")[2] in line for name in names), line
    else:
        assert names and not lines


@pytest.mark.parametrize("world", [1, 2])
def test_no_rank_holds_the_model_in_16_bits(world, tmp_path):
    """Beside what stays, five times the largest parameter, which is less than the largest file."""
    model = jobs.mixture("Qwen3Moe", num_hidden_layers=8, num_experts=32, hidden_size=256, moe_intermediate_size=128)
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="25MB")
    largest = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    gate_up = 2 * model.model.layers[0].mlp.experts.gate_up_proj.numel()
    options = {"folder": str(tmp_path), "fields": FORMATS["int4"]}
    for peak, rests, stored in run_ranks(jobs.memory_of_loading, world=world, ranks_per_node=1, **options):
        assert stored == 8 * 6 and (peak - rests) <= 5 * gate_up < 1.2 * largest, (peak, rests, largest)


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_merging(kind):
    for log in run_two(jobs.merge_and_unmerge, kind=kind, fields=FORMATS["int8"]):
        assert set(log["experts"]) == PACKED and set(log["codes changed"]) > PACKED
        assert log["merged"] and log["requantized"] and log["unloaded"]
        assert log["after one context"] and log["after two contexts"]
        after, before = log["merged loss"]
        assert after != before and after == pytest.approx(before, rel=2e-3)


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_the_model_with_adapters_merged_in(kind, tmp_path):
    for others in run_two(jobs.saved_merged, kind=kind, fields=FORMATS["int4"], folder=str(tmp_path)):
        assert not others


def test_checkpoints(tmp_path):
    options = {"kind": "Qwen3Moe", "fields": FORMATS["int4"], "folder": str(tmp_path)}
    for same_losses, others in run_ranks(jobs.checkpoints, **options):
        assert same_losses and not others


def test_written_in_place():
    for said in itertools.chain(*run_two(jobs.written_in_place, kind="Mixtral", fields=FORMATS["int8"])):
        assert "down_proj is stored as int8 (block 32) codes and was written in place" in said


def test_adapters_after_the_engine():
    """They compute as those that were there, gathered or not before; of a matrix as a parameter they are refused."""
    for losses, said in run_two(jobs.adapted_late, kind="Mixtral", fields=FORMATS["int8"]):
        expected, *late = losses
        assert late == [expected, expected]
        assert "k_proj.weight is stored as int8 (block 32) codes" in said and "before the engine is made" in said
