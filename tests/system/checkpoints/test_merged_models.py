"""The whole model in 16 bits, with adapters merged or not, and adapters alone: what is saved, and that it is read."""

import merged_jobs as jobs
import pytest
from frozen_jobs import frozen
from ranks import run_two

NF4 = frozen("nf4", block_size=16, double_quantize=True)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("lora", {}),
        ("lora", {"dtype": "bf16"}),
        ("lora", {"merged": True, "dtype": "bf16"}),
        ("lora", {"tie": True}),
        ("rank-stabilized", {}),
        ("dora", {}),
        ("bias", {"merged": True}),
        ("embedding", {"merged": True}),
        ("modules to save", {}),
        ("modules to save", {"tie": True}),
        ("parameters", {"dtype": "bf16"}),
        ("parameters", {"merged": True}),
        ("none", {"tie": True}),
    ],
)
def test_merged_models_are_those_of_merge_and_unload(kind, options, tmp_path):
    """Bit for bit beside PEFT's merging of decoded weights in fp32, rounded once; read by from_pretrained."""
    (kept, available, found), (other_kept, other_available) = run_two(
        jobs.merged_model, folder=str(tmp_path), fields=NF4, kind=kind, **options
    )
    assert kept and other_kept and not available and not other_available
    assert found["names"] and found["off"] == 0.0
    assert found["dtypes"] == {"torch.bfloat16" if options.get("dtype") == "bf16" else "torch.float32"}
    assert found["class"] == "LlamaForCausalLM" and {"config.json", "generation_config.json"} < set(found["files"])
    assert found["tied"] == (options.get("tie", False) and kind != "modules to save")
    assert len(found["sizes"]) >= 3 and all(size < 101_000 for size in found["sizes"])


def test_an_earlier_save_is_replaced(tmp_path):
    for files in run_two(jobs.saving_again, folder=str(tmp_path), fields=NF4):
        weights = [[name for name in names if name.startswith("model")] for names in files]
        assert len(weights[0]) == 7 and weights[0][-1] == "model.safetensors.index.json"
        assert weights[1] == ["model.safetensors"]
        assert weights[2] == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), weights[0][-1]]


def test_what_fails_on_one_rank_is_raised_on_all(tmp_path):
    for messages, losses in run_two(jobs.merging_that_fails, folder=str(tmp_path), fields=NF4):
        assert messages["size"].startswith("ValueError: a size is a positive number of bytes or like")
        assert messages["no size"].startswith("ValueError: a size is a positive number")
        assert messages["a file is in the way"].startswith("RuntimeError: save_merged_16bit failed on rank 0: FileExis")
        assert messages["the disk is full"].endswith("failed on rank 0: OSError: No space left on device")
        assert messages["prompt"].startswith("ValueError: save_merged_16bit: PeftType.PROMPT_TUNING adds tokens")
        assert messages["then"] == "nothing raised" and losses[1] != losses[0]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_16_bit_models_and_adapters_as_the_trainer_saves_them(dtype, tmp_path):
    """`save_16bit_model` has decoded weights; adapters alone come back through PeftModel.from_pretrained."""
    first, second = run_two(jobs.saved_for_trainers, folder=str(tmp_path), fields=NF4, dtype=dtype)
    assert first["codes"] and second["codes"], "gathering for it has changed nothing"
    assert first["gathered"] and second["gathered"], "adapters that were saved inside GatheredParameters"
    assert first["16 bit"] and first["adapter"]
    assert first["dtypes"] == {"torch.bfloat16" if dtype == "bf16" else "torch.float32"}
    assert {"adapter_model.safetensors", "adapter_config.json"} < set(first["files"])
