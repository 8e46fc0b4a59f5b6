"""Edges of FP8 compute under ZeRO-3: readers of weights, ends of engines, ranks that differ, steps that are skipped."""

import itertools
from types import SimpleNamespace

import compute_edge_jobs as jobs
import compute_jobs
import numpy as np
import pytest
import torch
from ranks import RankError, run_ranks, run_two, run_two_once
from torch import nn

from zeropp_fp8.compute import convert_linear_layers
from zeropp_fp8.zero.gather.gemm_weights import GemmWeights
from zeropp_fp8.zero.placement import Slices

# -- who reads the values of a weight


def test_a_model_that_reads_weights_gets_their_values():
    """In forward and in backward; the other weights stay codes, and nothing is left after destroy()."""
    cases = [("block", False), ("block", True), ("parameter", False)]
    plain, found = run_two(jobs.weights_read_as_numbers, cases=cases)[0]
    for case, (losses, read, left) in zip(cases, found, strict=True):
        assert losses == pytest.approx(plain, rel=5e-3), case
        assert read == [f"blocks.{block}.{name}.weight" for block in (0, 1) for name in ("down", "up")], case
        assert left == 0, case


def test_dora_reads_the_weight_it_adapts():
    """Also after a forward in inference mode, of weights that stay gathered."""
    plain, codes, after_inference = run_two(jobs.dora)[0]
    assert codes == pytest.approx(plain, rel=5e-3) and after_inference == pytest.approx(plain, rel=5e-3)


def test_weights_have_gradients_in_eval_mode():
    norms = run_ranks(jobs.gradients_in_eval_mode, world=2)[0]
    assert norms["fp8_e4m3"] == pytest.approx(norms["none"], rel=0.05)


def test_linear_takes_its_input_by_name():
    layers = nn.ModuleList([nn.Linear(64, 64)])
    x = torch.randn(4, 64)
    plain = layers[0](input=x)
    convert_linear_layers(layers, {"format": "fp8", "scaling": "current"})
    assert (layers[0](input=x) - plain).norm() < 0.1 * plain.norm()


def test_checkpointing_of_a_frozen_layer_that_shares_its_input():
    """The first pass finds operands that the recomputation has to make: both must save as many tensors."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"outer": nn.Linear(64, 64), "inner": nn.Linear(64, 64)})
    model["inner"].requires_grad_(False)
    convert_linear_layers(model, {"format": "fp8", "scaling": "current"})
    grads = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        x = torch.randn(8, 64).requires_grad_()
        y = model["outer"](x)
        inner = model["inner"]
        z = torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False) if checkpointed else inner(x)
        last = model["outer"](2 * x)  # another input: the operands of x are forgotten
        (y * z * last).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


# -- settings that must not matter


def test_losses_do_not_depend_on_how_codes_travel():
    settings = [
        ({}, {}),
        ({"gather_granularity": "module"}, {}),
        ({"gather_granularity": "parameter", "secondary": {"scope": "node"}}, {}),
        ({"secondary": {"scope": "rank"}}, jobs.KEPT),
        ({"secondary": {"scope": 1}}, {"stage3_prefetch_bucket_size": 10**8}),
        ({}, {"offload_param": {"device": "cpu"}}),
    ]
    first, *others = run_ranks(jobs.same_losses_whatever_the_setting, settings=settings)[0]
    assert others == [first] * 5 and len(set(first)) == 2


@pytest.mark.parametrize("scope, scaling", [("none", "block"), ("rank", "current")])
def test_a_write_to_some_weights_of_live_units_is_seen(scope, scaling):
    live, (before, *after, fresh, again) = run_two(jobs.partial_write, scope=scope, scaling=scaling)[0]
    assert live == 14 and before != after[0] and {*after, fresh, again} == {fresh}


def test_weights_from_outside_are_not_scaled_by_the_history_of_others():
    """Eight times larger weights must not saturate in the evaluation before the next step."""
    fresh, after_training = run_ranks(jobs.written_from_outside, world=2)[0]
    assert after_training == fresh


def test_weights_of_others_that_are_written_do_not_let_inputs_saturate():
    """Norms that are eight times larger give layers inputs that no step has seen."""
    fresh, after_writing = run_ranks(jobs.norms_written_from_outside, world=2)[0]
    assert after_writing == fresh


# -- ranks that differ


@pytest.mark.parametrize(
    "options",
    [
        {"compute": jobs.fp8("delayed"), "weights": "fp8_e4m3"},
        {"compute": jobs.fp8("delayed"), "weights": "none"},
        {"compute": jobs.fp8("delayed"), "weights": "fp8_e4m3", "recipe": "zeropp"},
        # Each expert is gathered by itself, and stock's buckets fill as gradients come: a layer that got no row must
        # give one, as nn.Linear does.
        {"compute": jobs.fp8("current"), "weights": "fp8_e4m3", "granularity": "module", "leaf": False, "idle": False},
    ],
    ids=["codes", "cast", "zeropp", "without tokens"],
)
def test_ranks_use_different_experts(options):
    ranks = run_two(jobs.different_experts, **options)
    high = {"compute": {"format": "none"}, "weights": "none", "idle": options.get("idle", True)}
    plain = run_two_once(jobs.different_experts, **high)
    first = ranks[0][1]
    for (losses, history, finite), (expected, _, _) in zip(ranks, plain):
        assert finite and losses == pytest.approx(expected, rel=0.03)
        assert history is None if first is None else torch.equal(history, first)


@pytest.mark.parametrize("world, shape", [(1000, (128, 128)), (7, (128, 384))])
@pytest.mark.parametrize("granularity", ["tensor", "row", "tile"])
def test_ranks_that_own_nothing_of_a_weight(world, shape, granularity):
    """Slices of all ranks, the last of which are padding: amax against numpy, codes of 0 for what nobody owns."""
    numel = shape[0] * shape[1]
    slice_numel = -(-numel // world)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    padded = torch.zeros(slice_numel * world)
    padded[:numel] = full.view(-1)
    found, codes = None, torch.full((slice_numel * world,), 0xAA, dtype=torch.uint8)
    per_rank = []
    for rank in range(world):
        shard = padded[rank * slice_numel : (rank + 1) * slice_numel].clone()
        shard.ds_numel = slice_numel
        param = SimpleNamespace(ds_tensor=shard, ds_numel=numel, ds_shape=shape, ds_id=0)
        topology = SimpleNamespace(rank=rank, world_size=world, group=None)
        session = SimpleNamespace(topology=topology, device=torch.device("cpu"), placement=Slices(rank, world))
        weights = GemmWeights(session)
        weights.granularity = granularity
        weights._add(param, SimpleNamespace(weight_is_transposed=False))
        (weight,) = weights._weights.values()
        amax = torch.zeros(weight.scale_shape)
        if granularity == "tensor":
            amax[0] = weights._own_or_zero(param).abs().max()
        else:
            weights._add_amax(weight, amax)
        found = amax if found is None else torch.maximum(found, amax)
        per_rank.append((weights, param))
    magnitudes = np.abs(full.numpy())
    expected = {
        "tensor": magnitudes.max(keepdims=True).reshape(1),
        "row": magnitudes.max(axis=1, keepdims=True),
        "tile": magnitudes.reshape(shape[0] // 128, 128, shape[1] // 128, 128).max(axis=(1, 3)),
    }[granularity]
    np.testing.assert_array_equal(found.numpy(), expected)
    scale = expected / np.float32(448)
    for rank, (weights, param) in enumerate(per_rank):
        weights._take(torch.from_numpy(scale.astype(np.float32)).reshape(-1))
        weights.encode(param, codes[rank * slice_numel : (rank + 1) * slice_numel])
    decoded = codes[:numel].view(torch.float8_e4m3fn).view(shape).float().numpy()
    spread = scale if granularity != "tile" else scale.repeat(128, axis=0).repeat(128, axis=1)
    # E4M3 has 3 bits: half a step is 1/16 of a value, and 2^-10 of the scale for subnormal codes.
    error = np.abs(decoded * spread - full.numpy())
    assert (error <= np.maximum(magnitudes / 16, spread * 2.0**-10) * 1.001).all()
    assert not codes[numel:].any()


# -- steps that are skipped, forwards that raise


def test_histories_of_gradients_follow_the_loss_scale():
    """A step that overflowed leaves no amax of gradients; where the scale doubles, so does what scales hold."""
    steps = run_ranks(jobs.loss_scales, world=1)[0]
    assert steps[0][0] and steps[0][2] == 0  # overflow, no gradient has a history
    grew = halved = 0
    for (_, scale, known, held, _), (overflow, next_scale, _, next_held, newest) in itertools.pairwise(steps):
        assert next_held >= newest * 0.999
        if known and overflow and next_scale == scale / 2:
            assert next_held == pytest.approx(held / 2, rel=1e-3)
            halved += 1
        if known and next_scale == 2 * scale:
            assert next_held >= held * 2 * 0.999
            grew += 1
    assert grew and halved


def test_training_goes_on_after_a_forward_that_raised():
    """Its modules use their parameters no more: what has been gathered may be looked at, which stock refuses."""
    said, losses, expected = run_ranks(jobs.after_a_forward_that_raised, world=2)[0]
    assert said == "nothing raised"
    assert losses == pytest.approx(expected, rel=2e-3)


# -- beginnings and ends of engines


def test_an_engine_destroyed_again_leaves_the_next_one_alone():
    counts, losses, other = run_ranks(jobs.destroyed_again, world=2)[0]
    assert counts == [0, 14, 14, 0]
    assert losses == other


def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was():
    said, left = run_ranks(jobs.failed_initialization)[0]
    assert "leaves 3 + 1 of the 4 ranks" in said and left == 0


def test_the_second_conversion_names_the_remedy():
    with pytest.raises(RankError, match=r"compute\.format.*was converted before.*call destroy\(\) on that engine"):
        run_ranks(compute_jobs.two_engines_over_one_model, world=2)


def test_four_models_of_rlhf_side_by_side():
    alone, together, left = run_ranks(jobs.four_models, world=2, order=[2, 0, 3, 1])[0]
    assert alone == together
    assert left == [[14, 14, 0, 0], [0, 14, 0, 0], [0, 14, 0, 0], [0, 0, 0, 0]]


# -- what else DeepSpeed and others do


def test_a_compiled_engine():
    plain, compiled = run_ranks(jobs.compiled, world=1, ranks_per_node=1, scaling="delayed")[0]
    assert compiled == plain


def test_a_layer_with_weight_norm():
    losses = run_ranks(jobs.weight_norm, world=2)[0]
    assert losses[-1] < losses[0]


def test_what_is_saved_is_exact(tmp_path):
    assert run_ranks(jobs.saved, world=2, folder=str(tmp_path))[0] == (14, True, True, True)


def test_trainer(tmp_path):
    losses, evaluated, same_keys, layers = run_ranks(jobs.trainer, world=2, folder=str(tmp_path))[0]
    assert len(losses) == 3 and losses[-1] < losses[0] and evaluated < losses[0] and same_keys and layers == 14
