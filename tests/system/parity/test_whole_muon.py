"""Muon on owners of whole matrices: each step is the one written out, in recipes with other formats; and it resumes."""

import pytest
import whole_muon_jobs as jobs
from ranks import run_ranks, run_two
from running import equal, universal

# Of a change of a matrix, and of the largest element of a momentum. Gradients of few tokens have singular values of
# 1e-7 of the largest, which are fp32's rounding; the iteration makes them 3.44^5 = 480 times as large.
EXACT, COARSE = (1e-3, 1e-6), (1.0, 2**-3)
WITHIN = {"fp8-lm": COARSE, "16-bit momentum": (1e-3, 2**-8), "8-bit momentum": (1e-3, 2**-4)}


@pytest.mark.parametrize("name", jobs.SECTIONS)
def test_steps_are_those_written_out(name):
    """With fp32 states to fp32's digits; in FP8-LM's formats within a step of theirs. A momentum in fewer bits is
    rounded after the step, which takes it as the last step has left it."""
    of_weight, of_momentum = WITHIN.get(name, EXACT)
    for found in run_two(jobs.trained_and_resumed, names=[name]):
        weight_error, momentum_error, losses, others = found[name]
        assert weight_error < of_weight and momentum_error < of_momentum, (weight_error, momentum_error)
        assert losses[-1] < losses[0] and not others


def close(found, expected, within):
    """Each tensor within a part of its norm, and no element off by more than 100 times that part of the largest.

    An embedding's element whose gradient is little more than rounding may move by a part of lr in either direction.
    """
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        off, values = found[name].double() - values.double(), values.double()
        assert off.norm() <= within * values.norm(), (name, off.norm() / values.norm())
        assert off.abs().max() <= 100 * within * values.abs().max(), name


def test_beside_deepspeeds_own():
    """Muon of a ds_config over 20 steps in fp32, where DeepSpeed's with ZeRO-1 and 2 has every matrix whole."""
    for found in run_two(jobs.beside_deepspeed, steps=20, timeout=300):
        losses, weights = found.pop(2)
        for others, of_others in found.values():
            assert others == pytest.approx(losses, rel=1e-5)
            close(of_others, weights, 1e-5)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_accumulation_and_clipping(clip):
    """One batch, four micro-batches of it and plain torch are one update."""
    for whole, in_parts, plain in run_two(jobs.accumulated, steps=5, clip=clip):
        close(whole, plain, 1e-5)
        close(in_parts, plain, 1e-5)


@pytest.mark.parametrize("name", ["zeropp", "fp8-lm"])
def test_a_checkpoint_on_other_ranks(name, tmp_path):
    saved = run_ranks(jobs.save_for_others, folder=str(tmp_path), name=name)
    universal(str(tmp_path), "u")
    for trace, resumed in zip(saved, run_two(jobs.load_from_others, folder=str(tmp_path), name=name)):
        weights, momenta, muons = resumed.seen
        assert equal([weights, momenta], trace.seen) and any(muons) and not all(muons)
        assert resumed.losses[0] == pytest.approx(trace.losses[2], rel=2e-2)


def test_a_model_that_is_partitioned_while_it_is_made():
    assert run_two(jobs.partitioned_while_made, steps=3) == [{}, {}]


FUSED = {
    "Phi3": {(1, (64, 32, 32), True): "qkv_proj", (1, (96, 96), True): "gate_up_proj"},
    "GPTNeoX": {(4, (16, 16, 16), True): "query_key_value"},
    "Qwen3Moe": {(1, (24, 24), True): "gate_up_proj"},
}


@pytest.mark.parametrize("kind", FUSED)
def test_fused_matrices_of_transformers(kind):
    for made, losses in run_two(jobs.trained_fused, kind=kind):
        (of_one,) = [names for rows, names in made.items() if rows is None]
        assert {rows for rows in made if rows} == set(FUSED[kind])
        for rows, leaf in FUSED[kind].items():
            assert made[rows] and all(name.removesuffix(".weight").endswith(leaf) for name in made[rows])
            assert not any(name.removesuffix(".weight").endswith(leaf) for name in of_one)
        assert losses[-1] < losses[0]


def test_one_matrix_per_head():
    """DeepSpeed's "per_head_muon": each head's rows alone."""
    for before, grads, after in run_two(jobs.per_head):
        (name,) = [name for name in before if name.endswith("0.self_attn.q_proj.weight")]
        for head in range(4):
            rows = slice(16 * head, 16 * head + 16)
            expected = jobs.written_out(grads[name][rows].double())
            moved = (before[name][rows] - after[name][rows]).double() / jobs.LR
            assert (moved - expected).abs().max() < 1e-3


def test_what_does_not_go_with_it():
    for slices, vectors, unknown, l2, sliced, deepspeeds in run_two(jobs.refusals):
        assert vectors.startswith("ConfigError: (64,) is no matrix; put what Muon does not update into a param group")
        assert slices.startswith('ConfigError: "zeropp_fp8.partition": the update of Muon is one of whole tensors; set')
        assert '"optimizer.params": Muon has no nesterow; it has lr, momentum' in unknown
        assert '"optimizer.params.adam_w_mode": the Adam beside Muon is AdamW here; remove the key' in l2
        assert 'set "zeropp_fp8.partition" to "whole_tensor"' in sliced
        assert "does not go with DeepSpeed's MuonWithAuxAdam" in deepspeeds
