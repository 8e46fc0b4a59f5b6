"""Packed experts in FP8 and MX under ZeRO-3: weights that arrive as operands, losses beside stock's, resuming."""

import expert_compute_jobs as jobs
import pytest
from ranks import run_two
from thinning import thinned

FP8 = {"compute": jobs.COMPUTE}
AT_REST = {"frozen": {"format": "fp8_e4m3", "scales": "tensor"}}
RUNS = {
    "fp8-lm": ("fp8-lm", FP8),
    "fp8-lm-zeropp": ("fp8-lm-zeropp", FP8),
    "rows": ("zeropp", {"compute": {**jobs.COMPUTE, "scaling": "per_channel"}}),
    "mxfp8": ("mxfp8", {"compute": {"min_features": 32}}),
}


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
@pytest.mark.parametrize("options", [{}, {"fields": {"secondary": {"scope": "node"}}, "accumulation": 2}])
def test_codes_from_the_wire_equal_a_cast_of_the_gathered_weight(kind, options):
    """The same codes of each stack, so the same bits."""
    for differs, losses in run_two(jobs.cast_and_gathered, kind=kind, scaling="current", **options):
        assert not differs and len(set(losses)) == len(losses)


@pytest.mark.parametrize("kind", jobs.KINDS)
def test_losses_beside_stock(kind):
    """Of recipes that send the codes that are multiplied, of scales per row, and of MX."""
    for found in run_two(jobs.beside_stock, kind=kind, runs=RUNS):
        stock = found.pop("stock")
        for name, (losses, (projections, operands)) in found.items():
            assert losses == pytest.approx(stock, rel=2e-2), name
            # 48 columns are no blocks of 32.
            assert projections == (0 if (kind, name) == ("Qwen3Moe", "mxfp8") else 4), name
            assert operands == (4 if name.startswith("fp8-lm") else 0), name


def test_a_run_resumes():
    """The histories of experts' operands come back with the checkpoint."""
    assert run_two(jobs.resumes, kind="Mixtral", recipe="fp8-lm-zeropp", fields=FP8) == [{}] * 2


OPERANDS = {"stacks": (0, 8), "one stack and matrices": (2, 6), "matrices": (4, 8)}
SENT_AS_OPERANDS = {
    "at rest": ("zeropp", AT_REST, "current"),
    "zeropp": ("zeropp", {"weights": {"format": "fp8_e4m3"}}, "current"),
    "at rest, delayed": ("zeropp", AT_REST, "delayed"),
    "fp8-lm": ("fp8-lm", {}, "delayed"),
    "fp8-lm-zeropp": ("fp8-lm-zeropp", {}, "delayed"),
}


@pytest.mark.parametrize("way, lora", thinned(SENT_AS_OPERANDS, OPERANDS))
def test_weights_with_adapters_are_operands_unless_these_add_to_them(way, lora):
    """PEFT's `target_parameters` add to the values in each forward; what else the layers multiply arrives as codes."""
    case = dict(zip(("recipe", "fields", "scaling"), SENT_AS_OPERANDS[way]))
    for rank, ((losses, operands), (plain, _), lines) in enumerate(run_two(jobs.with_adapters, lora=lora, **case)):
        assert losses == pytest.approx(plain, rel=2e-2) and operands == OPERANDS[lora]
        assert len(lines) == (rank == 0 and lora != "matrices")
        assert all("as values" in line and "gate_up_proj" in line for line in lines)


def test_stacks_that_arrive_as_operands_are_decoded_for_who_reads_them():
    """In the first forward, and gathered so in the next ones."""
    for shapes, read, plain in run_two(jobs.read_by_others):
        assert shapes == {(4, 192, 64)} and read == plain


@pytest.mark.parametrize("recipe", ["fp8-lm", "fp8-lm-zeropp"])
def test_generation(recipe):
    for found in run_two(jobs.generated, recipe=recipe, fields=FP8):
        assert found == {"codes": (2, 9), "values": (2, 9)}
