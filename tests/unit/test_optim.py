"""FP8AdamW as a torch.optim.Optimizer."""

import copy
import io
import warnings

import pytest
import torch

from zeropp_fp8.optim import FP8AdamW

FP32 = {"master_format": "fp32", "exp_avg_format": "fp32", "exp_avg_sq_format": "fp32"}
SHAPES = [(33, 7), (5,), (), (0, 3), (1500,)]
CONFIGURATIONS = [
    {},
    {"scales": "block"},
    {"rounding": "stochastic", "seed": 7},
    {"master_format": "bf16", "exp_avg_format": "fp8_e5m2", "exp_avg_sq_format": "bf16", "rounding": "stochastic"},
    {"maximize": True, "master_format": "fp32"},
    FP32,
]


def make_params(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, steps, first=0, skip=()):
    """Steps with gradients that depend on the step alone; `skip`: (step, index) without a gradient."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1000 + step)
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = None if (step, index) in skip or not p.requires_grad else grad
        optimizer.step()
    return params


def assert_equal_runs(one, two):
    """Parameters and every tensor of the state, bit for bit."""
    for p, q in zip(*([p for g in o.param_groups for p in g["params"]] for o in (one, two))):
        assert torch.equal(p, q)
        assert set(one.state.get(p, {})) == set(two.state.get(q, {}))
        for name, value in one.state.get(p, {}).items():
            assert value.dtype == two.state[q][name].dtype and torch.equal(value, two.state[q][name]), name


def quadratic_loss(optimizer_class, steps=300, **options):
    """How far a least-squares problem is solved."""
    generator = torch.Generator().manual_seed(0)
    inputs, truth = torch.randn(256, 40, generator=generator), torch.randn(40, 8, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(40, 8))
    optimizer = optimizer_class([weight], lr=3e-2, weight_decay=0.0, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (inputs @ weight - inputs @ truth).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("options", [{}, {"maximize": True}, {"weight_decay": 0.0}, {"betas": (0.5, 0.9), "eps": 1e-3}])
def test_in_fp32_it_is_adamw(options):
    mine, theirs = make_params(), make_params()
    train(FP8AdamW(mine, lr=1e-2, **FP32, **options), 50)
    train(torch.optim.AdamW(theirs, lr=1e-2, **options), 50)
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("options", CONFIGURATIONS[:4])
def test_it_learns(options):
    """From a loss of 40: torch.optim.AdamW ends below 1e-4; in low precision the noise of rounding is left."""
    assert quadratic_loss(torch.optim.AdamW) < 1e-4
    assert quadratic_loss(FP8AdamW, **options) < 2e-2


def test_six_bytes_a_parameter():
    params = make_params(torch.bfloat16, [(1024, 1024)])
    optimizer = FP8AdamW(params, scales="block")
    train(optimizer, 1)
    numel = 1 << 20
    # with the gradient in FP8 one more
    assert optimizer.num_state_bytes() == 5 * numel + 3 * numel / 128
    optimizer = FP8AdamW(params)
    train(optimizer, 1)
    assert optimizer.num_state_bytes() == 5 * numel + 3


def test_state_is_plain_tensors():
    p = make_params(torch.bfloat16, [(33, 7)])[0]
    optimizer = FP8AdamW([p], scales="block", block_size=64)
    train(optimizer, 2)
    described = {name: (value.dtype, tuple(value.shape)) for name, value in optimizer.state[p].items()}
    assert described == {
        "step": (torch.float32, ()),
        "master": (torch.float16, (33, 7)),
        "master_scale": (torch.uint8, (4,)),
        "exp_avg": (torch.uint8, (33, 7)),
        "exp_avg_scale": (torch.uint8, (4,)),
        "exp_avg_sq": (torch.float16, (33, 7)),
        "exp_avg_sq_scale": (torch.uint8, (4,)),
    }
    assert optimizer.state[p]["step"] == 2
    master = optimizer.state[p]["master"].float().flatten()
    scales = 2.0 ** (optimizer.state[p]["master_scale"].float() - 127)
    assert torch.equal((master * scales.repeat_interleave(64)[:231]).bfloat16(), p.detach().flatten())


def test_a_parameter_of_the_masters_format_is_its_own_master():
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        p = make_params(dtype, [(40,)])[0]
        optimizer = FP8AdamW([p], master_format=name)
        train(optimizer, 1)
        assert "master" not in optimizer.state[p]
        p = make_params(torch.float16, [(40,)])[0]
        optimizer = FP8AdamW([p], master_format=name)
        train(optimizer, 1)
        assert optimizer.state[p]["master"].dtype == dtype


@pytest.mark.parametrize("way", ["direct", "deepcopy", "torch.save"])
@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_resuming_is_exact(options, way):
    """torch's own load_state_dict would cast codes to the parameter's dtype; and one run must not change the other."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        first = FP8AdamW(make_params(dtype), lr=1e-2, **options)
        train(first, 3, skip={(0, 1), (2, 4)})
        saved = first.state_dict()
        if way == "deepcopy":
            saved = copy.deepcopy(saved)
        elif way == "torch.save":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        params = [torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
        second = FP8AdamW(params, lr=5.0, **{**options, "seed": 3})
        second.load_state_dict(saved)
        assert second.param_groups[0]["lr"] == 1e-2
        assert_equal_runs(first, second)
        train(second, 3, first=3, skip={(3, 0)})
        train(first, 3, first=3, skip={(3, 0)})
        assert_equal_runs(first, second)


def test_a_copied_optimizer_continues_alone():
    first = FP8AdamW(make_params(), lr=1e-2)
    train(first, 2)
    second = copy.deepcopy(first)
    assert_equal_runs(first, second)
    train(second, 2, first=2)
    assert not torch.equal(first.param_groups[0]["params"][0], second.param_groups[0]["params"][0])
    train(first, 2, first=2)
    assert_equal_runs(first, second)


def test_users_hooks_see_plain_state():
    first = FP8AdamW(make_params(), lr=1e-2)
    train(first, 1)
    second = FP8AdamW(make_params(), lr=1e-2)
    seen = []

    def before(optimizer, state_dict):
        seen.append(state_dict["state"][0]["exp_avg"].dtype)

    second.register_load_state_dict_pre_hook(before)
    second.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].dtype)
    )
    second.load_state_dict(first.state_dict())
    assert seen == [torch.uint8, torch.uint8]
    steps = []
    second.register_step_post_hook(lambda *_: steps.append(1))
    train(second, 2)
    assert len(steps) == 2


def test_state_of_other_formats_is_refused():
    first = FP8AdamW(make_params(), lr=1e-2)
    train(first, 1)
    for options in ({"scales": "block"}, {"exp_avg_format": "bf16"}):
        second = FP8AdamW(make_params(), **options)
        with pytest.raises(ValueError, match="make the optimizer with the formats of the saved state"):
            second.load_state_dict(first.state_dict())
        assert not second.state
    theirs = torch.optim.AdamW(make_params())
    train(theirs, 1)
    with pytest.raises(ValueError, match="master_format=None"):
        FP8AdamW(make_params()).load_state_dict(theirs.state_dict())
    damaged = copy.deepcopy(first.state_dict())
    damaged["state"][0]["exp_avg"] = damaged["state"][0]["exp_avg"].float()
    with pytest.raises(ValueError, match="the saved exp_avg is torch"):
        FP8AdamW(make_params()).load_state_dict(damaged)
    del damaged["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match="the saved state of a parameter holds"):
        FP8AdamW(make_params()).load_state_dict(damaged)


def test_groups_have_their_own_options():
    """Each as if it were alone, but for stochastic rounding, where a parameter's place counts."""
    shapes = [(40,), (50,)]
    options = [{"lr": 1e-2, "weight_decay": 0.5}, {"lr": 1e-3, "betas": (0.5, 0.6), "eps": 1e-4, "scales": "block"}]
    together = make_params(shapes=shapes)
    train(FP8AdamW([{"params": [p], **o} for p, o in zip(together, options)]), 4)
    for index in range(2):
        alone = make_params(shapes=shapes)
        groups = [{"params": [p], **(options[index] if i == index else {"lr": 0.0})} for i, p in enumerate(alone)]
        train(FP8AdamW(groups), 4)
        assert torch.equal(alone[index], together[index])
    assert not torch.equal(together[1], make_params(shapes=shapes)[1])


def test_noise_differs_between_parameters_of_all_groups():
    """The same values and gradients in the same place of two groups and of one: rounded in three ways."""
    params = [torch.nn.Parameter(torch.ones(500)) for _ in range(3)]
    optimizer = FP8AdamW([{"params": params[:1]}, {"params": params[1:]}], lr=1e-4, rounding="stochastic")
    for p in params:
        p.grad = torch.ones(500)
    optimizer.step()
    for i in range(3):
        assert params[i].unique().numel() == 2
        assert not torch.equal(params[i], params[i - 1])


def test_schedulers_and_tensor_learning_rates():
    mine, theirs = make_params(), make_params()
    for params, cls, options in ((mine, FP8AdamW, FP32), (theirs, torch.optim.AdamW, {})):
        optimizer = cls(params, lr=torch.tensor(0.1) if cls is FP8AdamW else 0.1, **options)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        for step in range(5):
            train(optimizer, 1, first=step)
            scheduler.step()
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def test_groups_added_later_and_late_gradients():
    """A parameter's steps count from its first gradient."""
    params = make_params(shapes=[(40,), (50,), (60,)])
    optimizer = FP8AdamW(params[:2], lr=1e-2, **FP32)
    train(optimizer, 2, skip={(0, 1), (1, 1)})
    assert params[1] not in optimizer.state
    optimizer.add_param_group({"params": [params[2]], "lr": 1e-3})
    train(optimizer, 3, first=2, skip={(3, 0)})
    assert [int(optimizer.state[p]["step"]) for p in params] == [4, 3, 3]
    theirs = make_params(shapes=[(40,), (50,), (60,)])
    reference = torch.optim.AdamW(theirs[:2], lr=1e-2)
    train(reference, 2, skip={(0, 1), (1, 1)})
    reference.add_param_group({"params": [theirs[2]], "lr": 1e-3})
    train(reference, 3, first=2, skip={(3, 0)})
    for p, q in zip(params, theirs):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_frozen_parameters_and_their_values_stay():
    params = make_params()
    params[0].requires_grad_(False)
    before = params[0].clone()
    optimizer = FP8AdamW(params)
    train(optimizer, 2)
    assert torch.equal(params[0], before) and params[0] not in optimizer.state
    assert set(optimizer.state_dict()["state"]) == {1, 2, 3, 4}


def test_closures_and_zero_grad():
    p = make_params(shapes=[(6,)])[0]
    optimizer = FP8AdamW([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    optimizer.zero_grad()
    before = p.detach().clone()
    assert p.grad is None and optimizer.step() is None and torch.equal(p, before)


def test_mixed_dtypes_of_parameters_and_gradients():
    """Each parameter as if it were alone."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    together = [make_params(dtype, [(40,)], seed=i)[0] for i, dtype in enumerate(dtypes)]
    optimizer = FP8AdamW(together, lr=1e-2)
    train(optimizer, 3)
    for i in range(len(dtypes)):
        alone = [make_params(d, [(40,)], seed=j)[0].requires_grad_(i == j) for j, d in enumerate(dtypes)]
        generators = FP8AdamW(alone, lr=1e-2)
        train_alone(generators, i, 3)
        assert torch.equal(alone[i], together[i])


def train_alone(optimizer, index, steps):
    """As `train`, with the gradients that parameter `index` gets there."""
    params = optimizer.param_groups[0]["params"]
    for step in range(steps):
        generator = torch.Generator().manual_seed(1000 + step)
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            p.grad = grad if i == index else None
        optimizer.step()


def test_parameters_that_are_not_contiguous():
    plain = make_params(shapes=[(8, 6), (2, 3, 4, 4)])
    strided = [
        torch.nn.Parameter(plain[0].detach().t().contiguous().t()),
        torch.nn.Parameter(plain[1].detach().to(memory_format=torch.channels_last)),
    ]
    assert not any(p.is_contiguous() for p in strided)
    for options in ({}, {"master_format": "fp32"}):
        one, two = (
            FP8AdamW([p.clone().detach().requires_grad_() for p in ps], lr=1e-2, **options) for ps in (plain, strided)
        )
        assert torch.equal(train(one, 3)[1], train(two, 3)[1])
        assert torch.equal(one.param_groups[0]["params"][0], two.param_groups[0]["params"][0])


def test_nan_is_kept():
    for options in ({}, {"scales": "block"}):
        params = make_params(shapes=[(300,), (20,)])
        optimizer = FP8AdamW(params, **options)
        train(optimizer, 1)
        params[0].grad[5] = float("nan")
        optimizer.step()
        assert params[0][5].isnan() and params[1].isfinite().all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"amsgrad": True}, "amsgrad"),
        ({"lr": -1.0}, "lr is out of range"),
        ({"betas": (1.0, 0.9)}, "betas is out of range"),
        ({"betas": (0.9, -0.1)}, "betas is out of range"),
        ({"eps": -1e-8}, "eps is out of range"),
        ({"weight_decay": -0.1}, "weight_decay is out of range"),
        ({"master_format": "int8"}, "master format must be one of"),
        ({"scales": "row"}, "scales must be one of"),
        ({"block_size": 100}, "block_size must be one of"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"seed": -1}, "seed must be an integer"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FP8AdamW(make_params(), **options)
    good = FP8AdamW(make_params())
    with pytest.raises(ValueError, match=message):
        good.add_param_group({"params": make_params(), **options})
    assert len(good.param_groups) == 1


def test_dtypes_and_gradients_that_are_refused():
    with pytest.raises(ValueError, match="fp32, bf16 or fp16, got"):
        FP8AdamW([torch.nn.Parameter(torch.ones(3, dtype=torch.float64))])
    embedding = torch.nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        FP8AdamW(embedding.parameters()).step()
    with pytest.raises(ValueError, match="empty parameter list"):
        FP8AdamW([])


def test_stochastic_rounding_does_not_touch_torchs_generator():
    """And two replicas with the same seed stay alike."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one, two = (FP8AdamW(make_params(), lr=1e-2, rounding="stochastic") for _ in range(2))
    train(one, 3), train(two, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal_runs(one, two)
    other = FP8AdamW(make_params(), lr=1e-2, rounding="stochastic", seed=1)
    assert not torch.equal(train(other, 3)[0], one.param_groups[0]["params"][0])


def test_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = FP8AdamW(make_params(), scales="block", rounding="stochastic")
        train(optimizer, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(optimizer, 1)
