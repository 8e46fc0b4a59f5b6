"""zeropp_fp8.generation: what it generates, what it sends, what it leaves behind."""

import generation_jobs as jobs
import pytest
from frozen_jobs import frozen
from ranks import run_ranks, run_two

ALL_WAYS = (("values", False), ("values", True), ("codes", True), ("sharded", True), ("auto", True))
ENGINES = {
    "lossless": {},
    "zeropp": {"recipe": "zeropp"},
    "zeropp, a copy a rank": {"recipe": "zeropp", "fields": {"secondary": {"scope": "rank"}}},
    "zeropp, int4": {"recipe": "zeropp", "fields": {"weights": {"format": "int4"}}},
    "qlora": {"recipe": "qlora", "lora": True, "fields": {"frozen": frozen("nf4", double_quantize=True)}},
    "fp8, one scale": {"lora": True, "fields": {"frozen": frozen("fp8_e4m3", scales="tensor")}},
    "int4, one node": {"lora": True, "fields": {"frozen": frozen("int4"), "topology": {"ranks_per_node": 4}}},
    "whole tensors": {
        "fields": {
            "partition": "whole_tensor",
            "gradients": {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3"},
        }
    },
    "LoRA, kept gathered": {
        "lora": True,
        "zero_optimization": {"stage3_param_persistence_threshold": 5000, "stage3_max_live_parameters": 10**9},
    },
}
FP8 = {
    "fp8-lm-o1": {"recipe": "fp8-lm-o1"},
    "qlora": {
        "recipe": "qlora",
        "lora": True,
        "fields": {
            "frozen": frozen("nf4", double_quantize=True),
            "compute": {"format": "fp8", "scaling": "current"},
        },
    },
    "stored as it is multiplied": {
        "lora": True,
        "fields": {
            "frozen": frozen("fp8_e4m3", scales="tensor"),
            "compute": {"format": "fp8", "scaling": "current"},
        },
    },
}


def check(result, lora):
    assert result["losses"] == result["alone"] and result["same_weights"]
    for way in result["ways"]:
        assert way["tokens_equal"] and way["error"] < 1e-4, way
        assert way["cached"] and not way["training_inside"] and way["training_after"], way
        assert way["hooks_are_back"] and way["forwards_are_back"] and way["generate_is_back"], way
        assert way["grown"] == 0, way
        merges = bool(lora) and way["way"][1] and way["chosen"] == "values"
        assert bool(way["merged_inside"]) == merges and not way["merged_after"], way
        assert merges or way["direct"] == (0 if way["way"][0] == "sharded" else 2 * jobs.ADAPTERS[lora][1]), way


@pytest.mark.parametrize("name", ENGINES)
def test_equals_a_plain_model(name):
    """Tokens and logits are those of a model without DeepSpeed; training goes on as if nothing had been."""
    start = run_ranks if name in ("zeropp, a copy a rank", "int4, one node", "whole tensors") else run_two
    for result in start(jobs.both, ways=ALL_WAYS, **ENGINES[name]):
        check(result, ENGINES[name].get("lora", False))
        values, _, codes, sharded, auto = result["ways"]
        assert auto["chosen"] == "values" and codes["chosen"] == "codes"
        assert values["held"] >= 3.9 * result["numel"] * 0.5 and sharded["held"] < 0.2 * values["held"]
        if name == "zeropp, a copy a rank":  # the codes are there already: it takes the values of the others
            assert codes["held"] < 0.35 * values["held"]
        elif "zeropp" in name or name in ("qlora", "int4, one node"):
            assert codes["held"] < 0.75 * values["held"]


@pytest.mark.parametrize("lora", [name for name in jobs.ADAPTERS if isinstance(name, str)])
def test_adapters(lora):
    """Of several kinds, beside codes and values: the tokens of PEFT's own forward; DoRA's are PEFT's own."""
    options = {**ENGINES["qlora"], "lora": lora, "zero_init": lora == "several"}
    ways = (("values", False), ("codes", True), ("values", True))
    # Merging DoRA leaves a norm of each weight in the layer, as PEFT does.
    for result in run_two(jobs.both, ways=ways[: 2 if lora == "dora" else 3], **options):
        check(result, lora)


def test_adapters_in_bf16():
    """One rounding less a layer than PEFT's."""
    for result in run_two(jobs.both, dtype="bf16", ways=(("codes", True),), **{**ENGINES["qlora"], "lora": "several"}):
        (way,) = result["ways"]
        assert way["error"] < 0.02 and way["direct"] == 8 and way["grown"] == 0, way
        assert result["losses"] == result["alone"] and result["same_weights"]


def test_adapters_that_change_inside():
    for found in run_two(jobs.changed_inside):
        assert all(error < 1e-4 for error, _ in found.values()), found
        assert found["codes, both"] == found["codes, both again"]
        assert found["codes, disabled"] == found["codes, disabled before"]
        assert (
            len({round(found[f"codes, {name}"][1], 1) for name in ("both", "each its own", "disabled", "second")}) == 4
        )


@pytest.mark.parametrize("recipe", ["lossless", "zeropp"])
def test_adapters_that_are_not_merged(recipe):
    """As training computes them: of tied weights the other end is as it was, and modules stay where they are."""
    for found in run_two(jobs.kinds_of_adapters, recipe=recipe):
        for kind, (errors, same_names, loss) in found.items():
            assert max(errors.values()) < 1e-5 and same_names and loss < 10, (kind, errors)


def test_adapters_on_parameters():
    """PEFT's `target_parameters` compute another weight at each call, which the layer's own forward multiplies with."""
    for found, of_adapter in run_two(jobs.on_parameters, ways=ALL_WAYS):
        assert len(found) == 5 and max(found.values()) < 1e-5 and of_adapter > 0.1


@pytest.mark.parametrize("name", ["lossless", "qlora"])
def test_one_rank(name):
    (result,) = run_ranks(jobs.both, world=1, ranks_per_node=1, ways=ALL_WAYS, **_on_one_rank(ENGINES[name]))
    check(result, ENGINES[name].get("lora", False))


REPLAYED = {
    "qlora": ENGINES["qlora"] | {"lora": "several"},
    "zeropp": ENGINES["zeropp"] | {"ways": ("codes",)},
    "dora": ENGINES["qlora"] | {"lora": "dora", "ways": ("codes",)},
}


def test_replayed_steps():
    """On recorded operators: the tokens and scores of steps by themselves; nothing a graph cannot see is needed."""
    for cases in run_two(jobs.replays_each, cases=list(REPLAYED.values())):
        for name, (found, losses) in zip(REPLAYED, cases):
            assert losses[-1] < 10
            for same, error, replayed, left, patched, beams, other, asks in found.values():
                # The prompt gives the first token, and a step by itself the second.
                new = jobs.NEW_TOKENS - 2
                assert same and error < 1e-4 and replayed == [new, 2, new, new], (name, error, replayed)
                assert left == 0 and not patched, (name, left)
                assert "does not in beam search" in beams and "not DynamicLayer: leave cache_implementation" in other
                assert "cannot be recorded as a CUDA graph; leave it out" in asks, asks


def _on_one_rank(options):
    return options | {"fields": options.get("fields", {}) | {"topology": {"ranks_per_node": 1}}}


@pytest.mark.parametrize("name", FP8)
def test_fp8_compute(name):
    """The numbers are those of the products' operands; generation multiplies them in high precision."""
    for result in run_two(jobs.both, dtype="bf16", ways=(("values", True), ("codes", True)), **FP8[name]):
        assert result["losses"] == result["alone"] and result["same_weights"]
        for way in result["ways"]:
            assert way["error"] < 0.05 and way["grown"] == 0 and way["hooks_are_back"], way
        if name == "qlora":  # layers of 152 features compute in 16 bits: their codes stay
            values, codes = result["ways"]
            assert codes["held"] < 0.5 * values["held"]


@pytest.mark.parametrize("kind, recipe", [("Qwen3Moe", "qlora"), ("Mixtral", "zeropp"), ("GptOss", "qlora")])
def test_mixtures(kind, recipe):
    """Codes of packed experts stay as codes do; of gpt-oss, which keeps them transposed, their values."""
    fields = {"frozen": frozen("nf4", double_quantize=True)} if recipe == "qlora" else {}
    for found, loss in run_two(jobs.of_a_mixture, kind=kind, recipe=recipe, fields=fields):
        (_, tokens, held, _), (_, _, held_codes, _), _ = found.values()
        for error, made, _, grown in found.values():
            assert error < 1e-5 and made == tokens and grown == 0, (error, grown, made)
        assert loss < 10 and (held_codes < 0.6 * held) == (kind != "GptOss"), found


def test_bytes():
    for row in run_ranks(jobs.bytes_between_tokens, weights="values"):
        assert row["entering"] > 0 and row["generating"] == 0
    for row in run_ranks(jobs.bytes_between_tokens, weights="sharded"):
        assert row["entering"] == 0 and row["generating"] > 0


def test_refusals():
    for found in run_two(jobs.refusals):
        assert found["unknown"] == "ValueError: generation: weights is one of auto, values, codes, sharded, not 'some'"
        assert found["graph"] == "ValueError: generation: graph=True needs a CUDA device, not cpu: leave it out"
        assert '"sharded" gathers them for each token' in found["sharded_graph"]
        assert "inside zeropp_fp8.generation already" in found["nested"]
        assert "put the pass under torch.no_grad()" in found["gradients"]
        assert "gather parameters before or after it" in found["gathering"]
        assert found["own_error"] == "RuntimeError: a rank's own"
        assert found["no_memory"].startswith("MemoryError") and '"codes" or "sharded"' in found["no_memory"]
        assert "enter it between steps" in found["in_a_pass"]
        assert "does not run with the plugin" in found["stock"]
        assert all(value < 10 for name, value in found.items() if name.endswith("then"))


def test_the_least_memory_decides():
    for chosen in run_ranks(jobs.least_memory_decides):
        assert chosen == ["values", "codes", "sharded"]


def test_without_an_optimizer():
    for equal, length in run_two(jobs.without_an_optimizer):
        assert equal and length == 5 + jobs.NEW_TOKENS


def test_after_a_change():
    for equal, loss in run_two(jobs.after_a_change):
        assert equal == {"values": True, "codes": True} and loss < 10


def test_hooks_of_users():
    for inside, after, loss in run_two(jobs.hooks_of_users):
        assert inside == ["kept", "added"] and after == ["kept", "added"] and loss < 10


def test_inside_trl():
    pytest.importorskip("trl", reason="TRL is not installed")
    for equal, loss in run_two(jobs.inside_trl):
        assert equal == [True, True] and loss < 10
