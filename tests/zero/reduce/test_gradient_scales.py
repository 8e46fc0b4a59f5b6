"""Scales of FP8 gradients and the store of reduced ones, in one process; several ranks: distributed/test_fp8_lm.py."""

import pytest
import torch
from gradient_store_cases import SHAPES, fake_params, fake_session, filled_store, names

from zeropp_fp8.formats import amax_history
from zeropp_fp8.zero.reduce import gradient_scales
from zeropp_fp8.zero.reduce.gradient_scales import GROWTH, LARGEST_MU, SMALLEST_MU, GradientScales

CPU = torch.device("cpu")


@pytest.fixture
def reductions(monkeypatch):
    """Replaces collectives: every rank has what this one has, so a sum is multiplied and a maximum stays."""
    seen = []

    def all_reduce(tensor, op, group, async_op):
        seen.append((tensor.numel(), op))
        if op == gradient_scales.dist.ReduceOp.SUM:
            tensor *= 4

    monkeypatch.setattr(gradient_scales.dist, "all_reduce", all_reduce)
    return seen


def make_scales(world=4, nodes=2, shapes=((8, 8), (5,), (4, 4)), **gradients):
    session = fake_session(world=world, nodes=nodes, **gradients)
    params = fake_params(shapes)
    return GradientScales(session, params, names(params)), params, session


def gradients_of(params, value):
    return [torch.full(p.ds_shape, value * (i + 1)) for i, p in enumerate(params)]


def test_the_scale_is_that_of_the_paper(reductions):
    """e = s mu; the factor of the mean's decoding is 1 / (N e)."""
    scales, params, _ = make_scales()
    scales.mu.fill_(0.5)
    shared = scales.of(params, gradients_of(params, 2.0))
    s = 448 / torch.tensor([2.0, 1.0, 6.0])
    assert shared.encode[[0, 2]].tolist() == pytest.approx((s * 0.5)[[0, 2]].tolist(), rel=1e-6)
    assert shared.decode[[0, 2]].tolist() == pytest.approx((0.5 / s)[[0, 2]].tolist(), rel=1e-6)
    assert torch.allclose((shared.encode * shared.decode * 4)[[0, 2]], torch.ones(2))


def test_current_amax_is_taken_while_there_is_no_history_only(reductions):
    scales, params, session = make_scales()
    scales.of(params, gradients_of(params, 2.0))
    assert [numel for numel, _ in reductions] == [2], "one collective for both matrices, vectors have no scale"
    scales.history.current.copy_(torch.tensor([2.0, 0.0, 0.0]))
    scales.end_step(overflow=False)
    reductions.clear()
    shared = scales.of(params, gradients_of(params, 100.0))
    assert [numel for numel, _ in reductions] == [1], "the last parameter was nothing but zeros"
    assert shared.encode[0].item() == pytest.approx(448 / 2.0 * GROWTH, rel=1e-6), "delayed: 2, not 100"
    assert shared.encode[2].item() == pytest.approx(448 / 300.0 * GROWTH, rel=1e-6)
    assert len(session.sent) == 2 + 2


def test_a_gradient_that_is_not_finite_gives_no_scale(reductions):
    scales, params, _ = make_scales()
    grads = gradients_of(params, 2.0)
    grads[0][1, 1] = float("inf")
    grads[2][1, 1] = float("nan")
    shared = scales.of(params, grads)
    assert shared.encode.tolist()[::2] == [1.0, 1.0] and shared.decode.isfinite().all()


def count(scales, gradients=(0, 0), partial_sums=(0, 0), results=(0, 0)):
    """Return what this rank, and each of the 4, has counted."""
    scales._counts.copy_(torch.tensor([gradients, partial_sums, results]))


@pytest.mark.parametrize("stage, copies", [("gradients", 4), ("partial_sums", 2), ("results", 1)])
def test_mu_goes_down_above_the_tolerated_share_of_any_stage(reductions, stage, copies):
    """0.001 % of each stage's numbers: every rank's gradients, every node's sums, the results, 4 + 2 + 1 an element."""
    numel = 1000 * 1000
    for saturated, halved in ((copies * 10, False), (copies * 10 + 4, True)):
        scales, params, _ = make_scales(shapes=((1000, 1000), (9,)))
        scales.mu.fill_(0.25)
        scales._without_history.clear()
        scales.of(params, [])
        scales.history.current.fill_(1.0)
        count(scales, **{stage: (saturated // 4, 3)})
        total = saturated // 4 * 4
        scales.end_step(overflow=False)
        report = scales.report()
        assert report["saturated"] == pytest.approx(total / (copies * numel), rel=1e-12)
        assert report["vanished"] == pytest.approx(12 / (copies * numel), rel=1e-12)
        assert (total / (copies * numel) > 1e-5) == halved
        assert report["mu"] == pytest.approx(0.125 if halved else 0.25 * 2 ** (1 / 1000), rel=1e-7)


def test_mu_doubles_in_1000_steps_and_has_bounds(reductions):
    scales, params, _ = make_scales()
    scales._without_history.clear()
    for _ in range(1000):
        scales.of(params, [])
        scales.end_step(overflow=False)
    assert scales.mu.item() == pytest.approx(2.0, rel=1e-4)
    scales.mu.fill_(LARGEST_MU)
    scales.end_step(overflow=False)
    assert scales.mu.item() == LARGEST_MU
    scales.mu.fill_(SMALLEST_MU)
    scales.of(params, [])
    count(scales, gradients=(50, 0))
    scales.end_step(overflow=False)
    assert scales.mu.item() == SMALLEST_MU


def test_a_skipped_step_leaves_everything_as_it_was(reductions):
    scales, params, _ = make_scales()
    for amax in (2.0, 3.0):
        scales.of(params, gradients_of(params, amax))
        scales.history.current.fill_(amax)
        scales.end_step(overflow=False)
    before, encode, shares = scales.state_dict(), scales.table.encode.clone(), scales.report()
    scales.of(params, gradients_of(params, 1e9))
    scales.history.current.fill_(1e9)
    count(scales, gradients=(50, 0))
    scales.end_step(overflow=True)
    after = scales.state_dict()
    assert (
        torch.equal(after["mu"], before["mu"])
        and torch.equal(scales.table.encode, encode)
        and scales.report() == shares
    )
    assert after["amax_history"].amax() == 3.0 and after["without_history"] == before["without_history"]
    # What the skipped step counted is not added to the next one's.
    scales.of(params, gradients_of(params, 1.0))
    scales.end_step(overflow=False)
    assert scales.report()["saturated"] == 0
    # A loss scale halved makes the history half as large.
    scales.end_step(overflow=True, loss_scale_change=0.5)
    assert scales.history.largest().tolist() == [1.5, 1.5, 1.5]


def test_checkpoint(reductions, monkeypatch):
    monkeypatch.setattr(amax_history, "STEPS", 3)
    scales, params, _ = make_scales()
    for amax in (9.0, 2.0, 3.0, 4.0):
        scales.of(params, gradients_of(params, amax))
        scales.history.current[0] = amax
        scales.end_step(overflow=False)
    state = scales.state_dict()
    assert state["without_history"] == names(params)[2:] and state["amax_history"][:, 0].tolist() == [2.0, 3.0, 4.0]
    again, _, _ = make_scales()
    again.load_state_dict(state)
    assert torch.equal(again.table.encode, scales.table.encode) and torch.equal(again.table.decode, scales.table.decode)
    assert again._without_history == {2} and again.mu.item() == scales.mu.item()
    monkeypatch.setattr(amax_history, "STEPS", 1)  # as in a checkpoint of an earlier version
    shorter, _, _ = make_scales()
    shorter.load_state_dict(state)
    assert shorter.history.largest()[0] == 4.0
    for empty in (None, {}):
        again.load_state_dict(empty)
        assert again.mu.item() == 1.0 and again._without_history == {0, 2} and not again.history.largest().any()
    other, _, _ = make_scales(shapes=((8, 8),))
    with pytest.raises(ValueError, match="of other tensors than this model's: parameter 13"):
        other.load_state_dict(state)
    del state["names"]
    with pytest.raises(ValueError, match="do not say of which tensors they are"):
        again.load_state_dict(state)


def test_a_checkpoint_in_another_order_of_reduction(reductions):
    """Every tensor keeps its own history: another gather unit, or other groups, change the order."""
    scales, params, session = make_scales()
    scales.of(params, gradients_of(params, 2.0))
    scales.history.current[0] = 2.0
    scales.end_step(overflow=False)
    order = params[::-1]
    again = GradientScales(session, order, names(order))
    again.load_state_dict(scales.state_dict())
    assert again.history.largest().tolist() == [0.0, 0.0, 2.0] and again._without_history == {0}
    assert torch.equal(again.decode_of(params), scales.decode_of(params))


def test_neighbours(reductions):
    scales, params, _ = make_scales()
    assert scales.runs([params[1], params[2], params[0]]) == [[0, 1], [2]]
    with pytest.raises(ValueError, match="neighbours in the order of reduction"):
        scales.of([params[0], params[2]], [])
    whole, part = scales.of(params, gradients_of(params, 1.0)), scales.of(params[1:], gradients_of(params, 1.0)[1:])
    assert part.amax.data_ptr() == whole.amax[1:].data_ptr() and part.amax.numel() == 2


# -- the store ---------------------------------------------------------------------------------------------------------


def test_store_of_sums():
    """Codes of sums, with their own scales; those that came as codes keep theirs; the norm; empty tensors."""
    store = filled_store(CPU)
    params = [p for group in store.groups for p in group.params]
    params.sort(key=lambda p: p.ds_id)
    before = [store.read(p) for p in params]
    store.close()
    after = [store.read(p) for p in params]
    for i, (shape, old, new) in enumerate(zip(SHAPES, before, after)):
        assert new.shape == old.shape == (torch.Size(shape).numel(),)
        if i == 0 or len(shape) == 1:
            assert torch.equal(new, old)
        elif old.numel():
            assert not torch.equal(new, old) and new.abs().max() == pytest.approx(old.abs().max().item(), rel=1e-6)
            # Half a spacing: 2^-4 of normal numbers, 2^-10 of a code's 448 below.
            assert ((new - old).abs() <= 2**-4 * old.abs() + old.abs().max() * 2**-10 / 448 * 1.01).all()
    expected = sum(values.double().square().sum().item() for values in after)
    assert store.square_sum(0).item() == pytest.approx(expected, rel=1e-6)
    assert store.square_sum(1).item() == 0
    store.write(params[3], torch.full((4096,), float("nan")))
    store.close()
    assert store.read(params[3]).isnan().all() and store.square_sum(0).isnan()
    for k in (1, 4):
        assert torch.equal(store.read(params[k]), before[k])


def test_store_in_which_a_later_step_replaces_codes():
    store = filled_store(CPU)
    store.close()
    group = next(group for group in store.groups if group.matrices)
    first = group.params[0]
    store.scales.table.decode.fill_(0.5)
    assert store.of(group).multipliers[0] == 1.0, "until the next gradient codes mean what they meant"
    store.destinations([first], True, again=False)[0].fill_(0x38)  # 1.0
    assert store.read(first).unique().tolist() == [0.5]
    store.close()
    assert store.of(group).multipliers.tolist() == [0.5] * len(group.params)
    assert store.num_bytes() == sum(g.segments.padded_numel * (5 if g.matrices else 4) for g in store.groups)
