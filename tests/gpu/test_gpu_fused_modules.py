"""Norms and SwiGLU that hand FP8 codes on, natively on a GPU: against the modules as they were written."""

import copy

import pytest
import torch
import torch.nn.functional as F
from error_bounds import signal_to_noise_db
from models import llama

from zeropp_fp8.compute import casts, convert_linear_layers
from zeropp_fp8.compute.fused_module import restore_fused
from zeropp_fp8.compute.rms_norm import gradients_of_rms_norm

pytestmark = pytest.mark.gpu
DELAYED = {"format": "fp8", "scaling": "delayed"}


@pytest.fixture
def casts_made(monkeypatch):
    """Names of the casts that were called."""
    calls = []
    for name in ("swiglu", "rms_norm", "per_tensor"):
        real = getattr(casts, name)
        monkeypatch.setattr(
            casts, name, lambda *a, _real=real, _name=name, **k: (calls.append(_name), _real(*a, **k))[1]
        )
    return calls


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_a_model_trains_as_unfused(casts_made, checkpointing):
    fused = llama(hidden=256, intermediate=512).cuda().bfloat16()
    plain = copy.deepcopy(fused)
    models = []
    for model, restore in ((fused, False), (plain, True)):
        report = convert_linear_layers(model, DELAYED)
        if restore:
            for module in report.fused:
                restore_fused(module)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        models.append((model, report.scaling))
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0)).cuda()
    for step in range(3):
        losses, gradients = [], []
        for model, scaling in models:
            casts_made.clear()
            model.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            scaling.end_step()
            losses.append(loss.item())
            gradients.append([p.grad.clone() for p in model.parameters()])
            forwards = 1 if checkpointing is None else 2
            expected = 2 * forwards if step and model is fused else 0
            assert casts_made.count("swiglu") == expected, "once a layer and forward, from the second step on"
            assert casts_made.count("rms_norm") == 2 * expected
        assert losses[0] == pytest.approx(losses[1], rel=2e-3) if step else losses[0] == losses[1]
        assert all(signal_to_noise_db(b, a) > (20 if step else 200) for a, b in zip(*gradients) if b.any())


def test_the_layer_gets_what_was_handed_on(casts_made):
    """The fused operands are found: inputs of q_proj, gate_proj and down_proj are not cast again."""
    model = llama(hidden=256, intermediate=512, layers=1).cuda().bfloat16()
    report = convert_linear_layers(model, DELAYED)
    tokens = torch.arange(64, device="cuda").view(1, 64)
    for _ in range(2):
        casts_made.clear()
        model(input_ids=tokens, labels=tokens).loss.backward()
        report.scaling.end_step()
    # 7 weights twice and 7 gradients; of inputs only that of o_proj
    assert casts_made.count("per_tensor") == 7 * 3 + 1


def test_swiglu_in_a_graph_has_the_result_of_eager_code():
    """Bit for bit, as the operands: from the first step, in which no scale is known; of 97 rows, which are padded."""
    found = []
    for compiled in (False, True):
        module = llama(hidden=256, intermediate=512, layers=1).cuda().bfloat16().model.layers[0].mlp
        report = convert_linear_layers(module, DELAYED)
        assert len(report.fused) == 1
        run = torch.compile(module, backend="aot_eager") if compiled else module
        for step in range(3):
            x = torch.randn(97, 256, generator=torch.Generator().manual_seed(step)).cuda().bfloat16().requires_grad_()
            module.zero_grad()
            y = run(x)
            y.backward(torch.ones_like(y))
            report.scaling.end_step()
            found.append((y.detach(), module.down_proj.weight.grad))
    for one, other in zip(found[:3], found[3:]):
        assert all(torch.equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers_train_as_eager_ones(casts_made, backend):
    """As the modules were written, with one cast of an input that layers share."""
    eager = llama(hidden=256, intermediate=512).cuda().bfloat16()
    models = []
    for model in (eager, copy.deepcopy(eager)):
        report = convert_linear_layers(model, DELAYED)
        if models:
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(backend=backend)
        models.append((model, report.scaling))
    tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0)).cuda()
    for _ in range(3):
        losses, gradients = [], []
        for model, scaling in models:
            casts_made.clear()
            model.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            scaling.end_step()
            losses.append(loss.item())
            gradients.append([p.grad.clone() for p in model.parameters()])
        assert losses[1] == pytest.approx(losses[0], rel=2e-3)
        assert all(signal_to_noise_db(a, b) > 20 for a, b in zip(*gradients) if a.any())
    # of each layer 7 weights twice, 7 gradients, and the inputs of q, k and v, of o, of gate and up, and of down
    assert casts_made == ["per_tensor"] * 2 * (7 * 2 + 7 + 4)


def test_evaluation_and_generation(casts_made):
    model = llama(hidden=256, intermediate=512).cuda().bfloat16()
    report = convert_linear_layers(model, DELAYED)
    tokens = torch.arange(64, device="cuda").view(1, 64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    report.scaling.end_step()
    before = report.scaling.state_dict()
    model.eval()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            casts_made.clear()
            assert model(input_ids=tokens).logits.isfinite().all() and casts_made.count("swiglu") == 2
            assert model.generate(input_ids=tokens[:, :4], max_new_tokens=3, do_sample=False).shape == (1, 7)
    assert torch.equal(report.scaling._amax, torch.zeros_like(report.scaling._amax))
    assert torch.equal(report.scaling.state_dict()["history"], before["history"])


@pytest.mark.parametrize("gemm, expected", [("output", 0), ("grad_input", 1), ("grad_weight", 1)])
def test_before_a_gemm_in_high_precision(casts_made, gemm, expected):
    """Without codes for the output there is nothing to hand on; gradients are as those of modules as written."""
    found = []
    for restore in (False, True):
        model = llama(hidden=256, intermediate=512, layers=1).cuda().bfloat16()
        report = convert_linear_layers(model, DELAYED | {"high_precision_gemms": {gemm: ["q_proj", "down_proj"]}})
        for module in report.fused if restore else ():
            restore_fused(module)
        tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(0)).cuda()
        for _ in range(2):
            casts_made.clear()
            model.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            report.scaling.end_step()
        assert casts_made.count("swiglu") == (0 if restore else expected)
        assert casts_made.count("rms_norm") == (0 if restore else 1 + expected)  # that before gate_proj too
        found.append([param.grad for param in model.parameters()])
    assert all(signal_to_noise_db(one, other) > 20 for one, other in zip(*found))


def test_swiglu_gradients():
    from zeropp_fp8.kernels.casts.swiglu import swiglu_backward

    for dtype in (torch.bfloat16, torch.float16):
        gate, up, grad = ((torch.randn(1001, 517, device="cuda") * 4).to(dtype) for _ in range(3))
        gate.requires_grad_(), up.requires_grad_()
        (F.silu(gate) * up).backward(grad)
        actual = swiglu_backward(grad, gate.detach(), up.detach())
        assert torch.equal(actual[1], up.grad)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(actual[0], gate.grad, rtol=2 * eps, atol=1e-6)


@pytest.mark.parametrize("shape", [(1000, 512), (3, 70, 2048), (1, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_rms_norm(dtype, shape):
    """The bits of torch's own backward where it has the same 1 / rms; with that of the cast, the last bit of few."""
    x, grad = ((torch.randn(shape, device="cuda") * 4).to(dtype) for _ in range(2))
    weight = torch.rand(shape[-1:], device="cuda").to(dtype)
    x.requires_grad_(), weight.requires_grad_()
    F.rms_norm(x, weight.shape, weight, 1e-5).backward(grad)
    values = x.detach(), weight.detach()
    _, torchs = torch.ops.aten._fused_rms_norm(values[0], weight.shape, values[1], 1e-5)
    for one, expected in zip(gradients_of_rms_norm(grad, *values, torchs, (True, True)), (x.grad, weight.grad)):
        assert torch.equal(one, expected)
    # Its sum of squares has another order: 1 / rms may be another fp32 number, by some of its last bits.
    ours = casts.inverse_rms(values[0].flatten(0, -2), 1e-5).view(*shape[:-1], 1)
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=0)
    found, ulp = gradients_of_rms_norm(grad, *values, ours, (True, True)), torch.finfo(dtype).eps
    for one, expected in zip(found, (x.grad, weight.grad)):
        torch.testing.assert_close(one, expected, rtol=2 * ulp, atol=1e-2 * ulp * expected.abs().max().item())
        assert (one != expected).float().mean() < 0.02
    # Against the formula in fp64.
    numbers = (values[0].double().requires_grad_(), values[1].double().requires_grad_())
    inverse = (numbers[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    (numbers[1] * (numbers[0] * inverse)).backward(grad.double())
    assert all(signal_to_noise_db(n.grad, one.double()) > 45 for n, one in zip(numbers, found))
    only = gradients_of_rms_norm(grad, *values, ours, (True, False))
    assert torch.equal(only[0], found[0]) and only[1] is None
    only = gradients_of_rms_norm(grad, *values, ours, (False, True))
    assert torch.equal(only[1], found[1]) and only[0] is None


def test_nan_is_handed_on():
    model = llama(hidden=256, intermediate=512, layers=1).cuda().bfloat16()
    report = convert_linear_layers(model, DELAYED)
    tokens = torch.arange(64, device="cuda").view(1, 64)
    model(input_ids=tokens, labels=tokens).loss.backward()
    report.scaling.end_step()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.nan
    assert model(input_ids=tokens, labels=tokens).loss.isnan()
