"""Weights handed over block by block: what comes, what is there meanwhile, what is sent, and what fails."""

import handover_jobs as jobs
import pytest
import torch
from ranks import run_two

from benchmarks import handover

CASES = {
    "slices": ("zeropp", False, "bf16"),
    "tied": ("lossless", True, "fp32"),
    "node's copy": ("FP8 operands, node's copy", False, "bf16"),
    "owners": ("fp8-lm", False, "bf16"),
    "differences": ("zeropp-exact", False, "bf16"),
}


def test_whole_models():
    """Every bit, whatever weights travel and rest in; no more than a block is there; training goes on as without."""
    stateful = ("node's copy", "differences")  # which keep something between gathers
    for found in run_two(jobs.whole_models, cases=CASES, stateful=stateful):
        for case, of in found.items():
            assert of["equal"] and of["declared"], case
            assert of["most"] <= 1 < of["whole"], case
            assert of["losses"] == of["losses"][:1] * (2 if case in stateful else 1), case
            assert of["dtypes"] == {"torch.bfloat16" if CASES[case][2] == "bf16" else "torch.float32"}, case


MERGED = [
    ("lora", "bf16", False, True),
    ("lora", "bf16", True, False),
    ("dora", "fp32", False, False),
    ("embedding", "bf16", False, False),
    ("modules to save", "fp32", False, False),
    ("parameters", "bf16", False, False),
    ("parameters", "fp32", True, False),
]


def test_merged_models_are_those_of_merge_and_unload():
    """Bit for bit beside PEFT's merging of decoded weights in fp32, rounded once; and the base without adapters."""
    for found in run_two(jobs.merged_models, cases=MERGED):
        for case, of in found.items():
            assert of["names"] and of["declared"] and of["off"] == [] == of["base off"], (case, of)
            assert of["dtypes"] == {"torch.bfloat16" if case[1] == "bf16" else "torch.float32"}, case


def test_adapters_alone(tmp_path):
    """As PEFT saves and loads them."""
    for found in run_two(jobs.adapters_alone, kinds=("lora", "dora", "modules to save"), folder=str(tmp_path)):
        for kind, (equal, declared, names) in found.items():
            assert equal and declared, kind
            assert all(name.startswith("base_model.model.") and ".default" not in name for name in names)
            assert any("norm" in name for name in names) == (kind == "modules to save")
            assert any("magnitude" in name for name in names) == (kind == "dora")


def test_a_rank_that_only_gathers():
    """It merges nothing and yields nothing; nobody merges to declare."""
    taking, gathering = run_two(jobs.taking_part)
    assert taking[:3] == (0, 3 * 2, taking[3]) and len(taking[3]) == 3 * 9 + 3
    assert gathering == (0, 0, [], taking[3])


FP8 = {"format": "fp8", "min_features": 16, "skip_modules": ["lm_head"]}
FLOAT8 = {
    "a scale per row": ("zeropp", {"weights": {"format": "fp8_e4m3"}, "compute": {**FP8, "scaling": "per_channel"}}),
    "a scale per tile": ("zeropp", {"weights": {"format": "fp8_e4m3"}, "compute": {**FP8, "scaling": "block"}}),
    "a scale per tensor": ("zeropp", {"weights": {"format": "fp8_e4m3"}, "compute": {**FP8, "scaling": "current"}}),
    "owners": ("fp8-lm", {"compute": {**FP8, "scaling": "delayed"}}),
    "in 16 bits": ("zeropp", {}),
}


def test_float8_weights():
    """The codes that training multiplies, where it does; else a cast of the weight, with a scale per row."""
    for found in run_two(jobs.float8_weights, ways=FLOAT8):
        for way, of in found.items():
            assert of["declared"] and of["names"] and of["others"], (way, of)
            assert of["as multiplied"] == [True] * (0 if way == "in 16 bits" else 21), way
            assert len(of["as written out"]) == 21, way
            assert set(of["as written out"].values()) == {(True, True)}, (way, of["as written out"])
            assert of["dtypes"] == {"torch.bfloat16", "torch.float8_e4m3fn", "torch.float32"}
            (group,) = of["config"]["config_groups"].values()
            assert of["config"]["ignore"] == ["lm_head"], way
            assert group["weights"]["strategy"] == ("block" if way == "a scale per tile" else "channel")


def test_under_inference_mode():
    """The next step of training computes with what a hand-over leaves."""
    for found in run_two(jobs.under_inference_mode, ways=["fp8-lm", "FP8 operands, node's copy", "zeropp"]):
        for way, (without, under) in found.items():
            assert under == without, way


def test_adapters_merged_into_float8():
    """Rounded once, from fp32: half a step of bf16 besides would be seen in a scale, which is of the largest number."""
    for close, declared, ignored in run_two(jobs.merged_into_float8):
        assert len(close) == 21 and set(close.values()) == {(True, True)} and declared and ignored == ["lm_head"]


def test_what_fails_on_one_rank_is_raised_on_all():
    first, second = run_two(jobs.failures)
    for said in (first, second):
        failed = "RuntimeError: the hand-over of weights failed on rank"
        assert said["merging"] == f"{failed} 1: MemoryError: no room to merge"
        assert said["then"] == "done" and len(said["loss"]) == 1
        assert said["generating"].startswith("RuntimeError: inside zeropp_fp8.generation all weights are there")
        assert said["base"].startswith("ValueError: WeightSource: adapters are merged into the weights")
    assert first["stopped"] == "OSError: the engine is gone"
    assert second["stopped"] == f"{failed} 0: RuntimeError: the iteration was ended before the last tensor"
    assert first["until then"] == 30 > second["until then"]


def test_trl_with_vllm():
    """TRL's `sync_weights` sends the same under the same names, but for one rounding; never more than a block is there.

    TRL merges in bf16, which the plugin rounds once from fp32.
    """
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    (found, replaced, still), (others, *_) = run_two(jobs.through_trl)
    (mine, most, losses), (stock, all_there, stock_losses) = found["detect"], found["stock"]
    assert replaced and not still and others["detect"][0] is None
    assert mine.keys() == stock.keys() and losses == stock_losses
    adapted = {name for name in mine if "q_proj" in name or "down_proj" in name}
    for name, tensor in mine.items():
        same = torch.equal(tensor, stock[name])
        assert same or (name in adapted and torch.allclose(tensor.float(), stock[name].float(), rtol=2**-6, atol=2**-9))
    assert most < all_there / 2


def test_benchmark(capsys):
    """The bytes of its rows are those of the model; with LoRA, TRL's own way has all of it there at once."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    args = handover.parse(["--ranks", "2", "--size", "tiny-bytes", "--repeats", "1"])
    args.round = 0
    names = ["merged", "changes", "updates", "trl-lora", "merged-lora", "changes-lora", "updates-lora", "adapters-lora"]
    rows = {row["run"]: row for row in run_two(jobs.measured, runs=names, args=args)[0]}
    size, shape = 4 * 2 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128), 4 * 128
    ends = 2 * 256 * shape + shape
    assert {rows[run]["payload_bytes"] for run in ("merged", "trl-lora", "merged-lora")} == {size + ends}
    assert 0 < rows["changes"]["payload_bytes"] <= 2 * (size + ends)  # in fp32 a place is as large as a value
    assert 0 < rows["changes-lora"]["payload_bytes"] <= 2 * (size - 4 * 2 * 2 * 128)  # not the norms
    assert all(
        0 < rows[f"updates{of}"]["payload_bytes"] <= 1.02 * (size + ends) for of in ("", "-lora")
    )  # fp32: as they are
    of_lora = rows["adapters-lora"]["payload_bytes"]
    assert 0 < of_lora < size / 2 and rows["trl-lora"]["there_bytes"] == size + ends + of_lora
    assert rows["merged-lora"]["there_bytes"] == (size + of_lora) / 2
    assert rows["merged"]["gathered_bytes_per_rank"] == (size + ends) / 2
    assert rows["trl-lora"]["gathered_bytes_per_rank"] is None
    handover.show({"rows": list(rows.values()), "settings": {**vars(args)}})
    printed = capsys.readouterr().out
    assert all(f"\n{run} " in printed for run in rows)


def test_what_cannot_be_had():
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    for rank, said in enumerate(run_two(jobs.refusals)):
        replaced, printed = said.pop("another TRL")
        assert not replaced and (rank or "this TRL hands weights to vLLM in another way than TRL 1.16" in printed)
        begins = {
            "weights": "ValueError: WeightSource: weights is one of merged, base, adapters, not 'all'",
            "format": "ValueError: WeightSource: format is one of none, fp8, not 'fp4'",
            "codes of adapters": 'ValueError: WeightSource: adapters are handed over as they are: leave format "none"',
            "no codes": 'ValueError: WeightSource: only with format="fp8" there is a quantization_config',
            "no adapters": 'ValueError: WeightSource: weights="adapters" needs a PEFT model, this is a Llama',
            "no engine": "ValueError: WeightSource: this LlamaForCausalLM does not run with the plugin",
            "in a pass": "RuntimeError: WeightSource: a pass of the engine is under way, or has ended with an error",
            "prompt": "ValueError: WeightSource: PeftType.PROMPT_TUNING adds tokens, which cannot be merged",
            "made": "ValueError: WeightSource: PEFT saves made as something that is no parameter of the model",
            "several": "ValueError: WeightSource: 2 adapters are active, one can be handed over alone; several can be "
            'handed over with weights="merged"',
            "ranks of the second": "{3}",
        }
        assert said.keys() == begins.keys()
        for name, begin in begins.items():
            assert said[name].startswith(begin), (name, said[name])
