"""Weights that another library packed: their bits arrive, or they are refused at the start."""

import packed_jobs as jobs
import pytest
from ranks import run_two

REST = {"weights": {"skip_modules": ["lm_head", "embed_tokens"]}}  # of the weights only the codes could be rounded


def arrives(found):
    """Before a step losses are stock's, bit for bit, and near them after one, whose gradients were rounded."""
    for losses in found.values():
        assert losses[0] == found[None][0] and losses[1] == pytest.approx(found[None][1], rel=1e-2)
    return True


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_codes_in_a_dtype_of_numbers(storage):
    recipes = [None, "zeropp", "zeropp-4bit", "zeropp-pcie"]
    if storage == "bfloat16":  # DeepSpeed casts other numbers to it
        assert all(map(arrives, run_two(jobs.losses_of, storage=storage, recipes=recipes, **REST)))
    recipes = [None, "zeropp", "zeropp-4bit"]
    assert all(map(arrives, run_two(jobs.losses_under_fsdp2, storage=storage, recipes=recipes, **REST)))


def test_codes_in_bytes():
    for found in run_two(jobs.losses_of, storage="uint8", recipes=[None, "lossless", "zeropp"]):
        assert len(found[None]) == 2
        for recipe in ("lossless", "zeropp"):
            said = found[recipe]
            assert said.startswith("ConfigError: model.layers.0.self_attn.q_proj.weight is in torch.uint8, and only")
            assert "bnb_4bit_quant_storage=torch.bfloat16" in said and '"zeropp_fp8.frozen"' in said


def test_they_are_not_stored_as_numbers():
    (said,) = {found["qlora"] for found in run_two(jobs.losses_of, storage="bfloat16", recipes=["qlora"])}
    assert 'ConfigError: "zeropp_fp8.frozen.format": the model has no weight to store' in said
