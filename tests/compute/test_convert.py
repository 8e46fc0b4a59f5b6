"""Conversion of whole models: what is converted, what is not and why, and that nothing else changes."""

import copy
import io
import math

import pytest
import torch
from error_bounds import signal_to_noise_db
from models import llama
from torch import nn

from zeropp_fp8.compute import LowPrecisionLinear, convert_linear_layers, restore_linear_layers
from zeropp_fp8.config import (
    MX_FORMATS,
    ComputeConfig,
    ConfigError,
    checked_compute,
    operand_formats,
)

COMPUTE = {"format": "fp8", "scaling": "current"}
# vocabulary, width, layers, heads, length: widths are multiples of 128, so every scaling takes every layer
VOCAB, WIDTH, LAYERS, HEADS, LENGTH = 128, 128, 2, 4, 64


def llama_like(config_class, model_class, **fields):
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=LENGTH,
        **fields,
    )
    return model_class(config)


def make_llama(**fields):
    from transformers import LlamaConfig, LlamaForCausalLM

    return llama_like(LlamaConfig, LlamaForCausalLM, tie_word_embeddings=False, **fields)


def make_mistral():
    from transformers import MistralConfig, MistralForCausalLM

    return llama_like(MistralConfig, MistralForCausalLM, sliding_window=16)


def make_qwen2():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return llama_like(Qwen2Config, Qwen2ForCausalLM)


def make_opt():
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        dropout=0.0,
    )
    return OPTForCausalLM(config)


def make_gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def with_lora(model, **fields):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0, **fields))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros at first: then the gradients of lora_A would be too
            nn.init.normal_(parameter, std=0.05)
    return model


def make_lora_llama():
    return with_lora(make_llama())


# how many layers of a transformer block are linear
MODELS = {
    "llama": (make_llama, 7),
    "mistral": (make_mistral, 7),
    "qwen2": (make_qwen2, 7),
    "opt": (make_opt, 6),
    "gpt2": (make_gpt2, 4),
    "lora": (make_lora_llama, 7),
}


def make(name):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():  # as initialized, logits hardly depend on the blocks
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def tokens(seed=0, batch=2, length=20):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_and_grads(model, seed=0):
    model.zero_grad()
    ids = tokens(seed)
    out = model(input_ids=ids, labels=ids, use_cache=False)
    out.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.loss.detach(), out.logits.detach(), grads


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "compute",
    [COMPUTE, {"format": "fp8_hybrid", "scaling": "delayed"}, {"format": "fp8", "scaling": "block"},
     {"format": "mxfp8_e4m3"}],
    ids=["current", "delayed", "block", "mx"],
)  # fmt: skip
@pytest.mark.parametrize("name", list(MODELS))
def test_models_train_and_generate(name, compute):
    model = make(name)
    plain = copy.deepcopy(model)
    keys, parameters = list(model.state_dict()), dict(model.named_parameters())
    report = convert_linear_layers(model, compute)
    assert len(report.converted) == LAYERS * MODELS[name][1]
    assert all(dict(model.named_modules())[layer] is module for layer, module in report.converted.items())

    # nothing but the classes of the layers is new
    assert list(model.state_dict()) == keys
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    for module in report.converted.values():
        assert set(module.__dict__) - {"precision", "number", "casts_input", "kind"} <= set(
            nn.Linear(1, 1).__dict__
        ) | {
            "nf",
            "nx",
            "_is_hf_initialized",
        }

    for seed in range(2):
        loss, logits, grads = loss_and_grads(model, seed)
        plain_loss, plain_logits, plain_grads = loss_and_grads(plain, seed)
        assert loss != plain_loss  # something is quantized
        assert abs(loss - plain_loss) < 0.02 * plain_loss
        assert signal_to_noise_db(plain_logits, logits) > 15
        assert list(grads) == list(plain_grads)
        for parameter in grads:
            if name == "opt" and "k_proj.bias" in parameter:
                continue  # softmax does not change when all keys move: its gradient is nothing but rounding
            assert signal_to_noise_db(plain_grads[parameter], grads[parameter]) > 6, parameter
        report.scaling.end_step()

    model.eval()
    generated = [
        model.generate(input_ids=tokens(batch=1, length=5), max_new_tokens=6, do_sample=False, eos_token_id=None)
        for _ in range(2)
    ]
    assert generated[0].shape == (1, 11) and torch.equal(*generated)


@pytest.mark.parametrize("name", list(MODELS))
def test_restored_models_are_the_original(name):
    model = make(name)
    plain = copy.deepcopy(model)
    convert_linear_layers(model, COMPUTE)
    loss_and_grads(model)
    restore_linear_layers(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    assert repr(model) == repr(plain)
    assert not any("precision" in module.__dict__ for module in model.modules())
    restored, expected = loss_and_grads(model), loss_and_grads(plain)
    assert torch.equal(restored[0], expected[0]) and torch.equal(restored[1], expected[1])
    assert all(torch.equal(grad, expected[2][key]) for key, grad in restored[2].items())


def test_report_restores_its_own_layers():
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    first, second = convert_linear_layers(model[0], COMPUTE), convert_linear_layers(model[1], COMPUTE)
    first.restore()
    assert [type(layer) for layer in model] == [nn.Linear, LowPrecisionLinear]
    second.restore()
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_lora_over_a_converted_model():
    """The other order: layers that were converted are wrapped, merged and unwrapped like any others."""
    torch.manual_seed(0)
    model = make_llama()
    plain = copy.deepcopy(model)
    convert_linear_layers(model, COMPUTE)
    model, plain = with_lora(model), with_lora(plain)
    plain.load_state_dict(model.state_dict())
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert type(layer.base_layer) is LowPrecisionLinear
    loss, _, grads = loss_and_grads(model)
    plain_loss, _, plain_grads = loss_and_grads(plain)
    assert abs(loss - plain_loss) < 0.02 * plain_loss and list(grads) == list(plain_grads)
    assert layer.base_layer.weight.grad is None
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].mlp.up_proj) is LowPrecisionLinear
    torch.testing.assert_close(merged.state_dict(), plain.merge_and_unload().state_dict())


def test_gpt2_layers_are_transposed():
    """A Conv1D [in, out] gives what an nn.Linear with the transposed weight gives, bit for bit."""
    from transformers.pytorch_utils import Conv1D

    for compute in (COMPUTE, {"format": "fp8", "scaling": "delayed"}, {"format": "fp8", "scaling": "per_channel"},
                    {"format": "fp8", "scaling": "block"}, {"format": "fp8_hybrid", "scaling": "current"},
                    {"format": "mxfp4"},
                    {"format": {"weights": "mxfp4", "activations": "mxfp4", "gradients": "none"}}):  # fmt: skip
        torch.manual_seed(0)
        conv, linear = Conv1D(256, 128), nn.Linear(128, 256)
        with torch.no_grad():
            linear.weight.copy_(conv.weight.t())
            linear.bias.copy_(conv.bias.normal_())
        reports = convert_linear_layers(conv, compute), convert_linear_layers(linear, compute)
        for _ in range(2):
            results = []
            for layer in (conv, linear):
                layer.zero_grad()
                x = torch.linspace(-1, 1, 3 * 5 * 128).sin().view(3, 5, 128).requires_grad_()
                y = layer(x)
                y.backward(torch.linspace(1, 3, y.numel()).cos().view_as(y))
                weight_grad = layer.weight.grad.t() if layer is conv else layer.weight.grad
                results.append((y.detach(), x.grad, weight_grad, layer.bias.grad))
            for one, other in zip(*results):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            for report in reports:
                report.scaling.end_step()
        torch.testing.assert_close(conv.eval()(x), linear.eval()(x), rtol=1e-5, atol=1e-5)
        assert "mxfp4" in repr(conv) or "fp8_e4m3" in repr(conv)


# -- routers ---------------------------------------------------------------------------------------------------------

MIXTURE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MIXTURE |= {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 96}
ROUTERS = {
    "Afmoe": (
        {"num_experts": 64, "num_dense_layers": 1, "moe_intermediate_size": 64, "num_shared_experts": 1},
        ["model.layers.1.mlp.router.gate"],
    ),
    "HunYuanMoEV1": ({"num_experts": 80}, [f"model.layers.{i}.mlp.gate.wg" for i in (0, 1)]),
    "Gemma4": (
        {
            "num_experts": 64,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
            "hidden_size_per_layer_input": 0,
        },
        [f"model.layers.{i}.router.proj" for i in (0, 1)],
    ),
    # Its router is a parameter, and its shared expert has as many features as there are experts.
    "Qwen3Next": ({"num_experts": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}, []),
}


def mixture(kind):
    import transformers

    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma4" else f"{kind}Config")
    return getattr(transformers, f"{kind}ForCausalLM")(config(**MIXTURE, **ROUTERS[kind][0]))


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("compute", [COMPUTE, {"format": "mxfp8_e4m3"}], ids=["fp8", "mx"])
def test_routers_stay_as_they_are(kind, compute):
    report = convert_linear_layers(model := mixture(kind), compute)
    skipped = [name for name, reason in report.skipped.items() if "a router" in reason]
    assert skipped == ROUTERS[kind][1]
    assert all(type(model.get_submodule(name)) is nn.Linear for name in skipped)
    assert any("shared" in name or "gate_proj" in name for name in report.converted)


def test_routers_of_experts_on_several_ranks():
    """Experts have those of one rank, and the module around them knows how many there are."""
    model = mixture("Afmoe")
    block = model.model.layers[1].mlp
    block.num_experts, block.router.gate = 128, nn.Linear(128, 128)
    assert "a router" in convert_linear_layers(model, COMPUTE).skipped["model.layers.1.mlp.router.gate"]


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "router.gate"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["router"]},
        {
            "target_modules": ["q_proj"],
            "modules_to_save": ["router.gate"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ],
    ids=["LoRA", "trained with its module", "trained, LoRA of experts"],
)
def test_routers_that_peft_wraps(options):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(mixture("Afmoe"), LoraConfig(r=4, **options))
    report = convert_linear_layers(model, COMPUTE)
    routers = [name for name, reason in report.skipped.items() if "a router" in reason]
    assert len(routers) == 1 + ("modules_to_save" in options)
    assert not [name for name in report.converted if ".router" in name]


# -- what is skipped -------------------------------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_report_says_what_is_skipped_and_why():
    tied = nn.Linear(64, 64)
    owner = nn.Linear(64, 64)
    tied.weight = owner.weight
    twice = nn.Linear(64, 64)
    model = nn.ModuleDict(
        {
            "lm_head": nn.Linear(64, 64),
            "block": nn.ModuleDict({"lm_head": nn.Linear(64, 64), "router": nn.Linear(64, 64)}),
            "small_in": nn.Linear(48, 64),
            "small_out": nn.Linear(64, 48),
            "misaligned": nn.Linear(72, 64),
            "tied": tied,
            "owner": owner,
            "own_forward": OwnForward(64, 64),
            "attention": nn.MultiheadAttention(64, 4),
            "norm": nn.LayerNorm(64),
            "embed": nn.Embedding(64, 64),
            "good": nn.Linear(64, 80),
            "twice": twice,
            "twice_again": twice,
        }
    )
    report = convert_linear_layers(model, {**COMPUTE, "skip_modules": ["lm_head", "block.rout*"]})
    assert list(report.converted) == ["good", "twice"]  # one module with two names is one layer
    assert report.skipped == {
        "lm_head": "named in skip_modules",
        "block.lm_head": "named in skip_modules",
        "block.router": "named in skip_modules",
        "small_in": "fewer than 64 features",
        "small_out": "fewer than 64 features",
        "misaligned": "features are not multiples of 16",
        "tied": "its weight is shared with another module",
        "owner": "its weight is shared with another module",
        "own_forward": "a OwnForward, which has a forward of its own",
        "attention.out_proj": "a NonDynamicallyQuantizableLinear, which has a forward of its own",
    }
    assert [type(m) for m in (model["tied"], model["norm"], model["own_forward"])] == [
        nn.Linear,
        nn.LayerNorm,
        OwnForward,
    ]
    assert str(report).startswith("2 linear layers converted; left as they are: 3 x named in skip_modules; ")
    for reason in report.skipped.values():
        assert reason in str(report)


def test_alignment_depends_on_the_scaling():
    for compute, converted in (
        ({"format": "fp8", "scaling": "block"}, {"128 x 256"}),
        (COMPUTE, {"80 x 64", "128 x 256"}),
        ({"format": "mxfp4"}, {"72 x 67", "80 x 64", "128 x 256"}),
        ({**COMPUTE, "min_features": 100}, {"128 x 256"}),
        ({**COMPUTE, "min_features": 1, "skip_modules": ["128*"]}, {"80 x 64", "16 x 32"}),
    ):
        model = nn.ModuleDict({f"{i} x {o}": nn.Linear(i, o) for i, o in ((72, 67), (80, 64), (128, 256), (16, 32))})
        assert set(convert_linear_layers(model, compute).converted) == converted


def test_tied_head_and_small_lora_matrices_stay():
    torch.manual_seed(0)
    tied = llama(tie=True)
    report = convert_linear_layers(tied, {**COMPUTE, "skip_modules": []})
    assert report.skipped["lm_head"] == "its weight is shared with another module"
    # 152 inner features are no multiple of 16
    assert report.skipped["model.layers.0.mlp.up_proj"] == "features are not multiples of 16"
    assert len(report.converted) == 2 * 4

    lora = make_lora_llama()
    report = convert_linear_layers(lora, COMPUTE)
    assert all(name.endswith(".base_layer") for name in report.converted)
    skipped = [name for name in report.skipped if "lm_head" not in name]
    assert len(skipped) == 2 * LAYERS * 7
    assert all(report.skipped[name] == "fewer than 64 features" and "lora_" in name for name in skipped)


def test_partitioned_parameters_are_judged_by_their_full_shape():
    """ZeRO-3 leaves a parameter empty and keeps its shape in ds_shape."""
    layer = nn.Linear(128, 64)
    layer.weight.ds_shape = layer.weight.shape
    layer.weight.data = torch.empty(0)
    assert convert_linear_layers(layer, COMPUTE).converted == {"": layer}


def test_a_layer_by_itself():
    layer = nn.Linear(64, 64)
    assert convert_linear_layers(layer, ComputeConfig(**COMPUTE)).converted == {"": layer}
    assert type(layer) is LowPrecisionLinear and isinstance(layer, nn.Linear)
    assert "fp8_e4m3" in repr(layer) and "scaling=current" in repr(layer)


def test_converting_twice_raises_and_changes_nothing():
    model = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
    convert_linear_layers(model[1], COMPUTE)
    with pytest.raises(ValueError, match="1 was converted before; call restore_linear_layers"):
        convert_linear_layers(model, COMPUTE)
    assert [type(layer) for layer in model] == [nn.Linear, LowPrecisionLinear]
    restore_linear_layers(model)
    restore_linear_layers(model)  # nothing left to do
    assert len(convert_linear_layers(model, COMPUTE).converted) == 2
    with pytest.raises(ValueError, match='"none"; name a format'):
        convert_linear_layers(nn.Linear(64, 64), {"format": "none"})


# -- copies, casts, state dicts --------------------------------------------------------------------------------------


def train_step(model, report, seed):
    grads = loss_and_grads(model, seed)[2]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter -= 0.01 * grads[name]
    report.scaling.end_step()


def test_copied_models_train_on_their_own():
    """copy.deepcopy copies the amax history too, and shares nothing."""
    model = make("gpt2")
    report = convert_linear_layers(model, {"format": "fp8", "scaling": "delayed"})
    train_step(model, report, 0)
    copied = copy.deepcopy(model)
    scales = {id(m.precision.scaling) for m in copied.modules() if hasattr(m, "precision")}
    assert len(scales) == 1 and id(report.scaling) not in scales
    before = {key: value.clone() for key, value in copied.state_dict().items()}
    expected = loss_and_grads(copied, 1)
    train_step(model, report, 1)
    assert all(torch.equal(value, before[key]) for key, value in copied.state_dict().items())
    again = loss_and_grads(copied, 1)
    assert torch.equal(again[1], expected[1])


def test_state_dicts_travel_between_plain_and_converted_models():
    model, plain = make("llama"), make("llama")
    convert_linear_layers(model, COMPUTE)
    loss_and_grads(model)
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    state = torch.load(stored, weights_only=True)
    for parameter in plain.parameters():
        nn.init.zeros_(parameter)
    plain.load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), model.parameters()))
    model.load_state_dict(plain.state_dict())


def test_whole_models_can_be_pickled():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    report = convert_linear_layers(model, {"format": "fp8", "scaling": "delayed"})
    x = torch.randn(4, 64)
    model(x).sum().backward()
    report.scaling.end_step()
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(x), model(x))


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(torch.float16), lambda m: m.to("cpu", torch.half)])
def test_cast_to_fp16_is_refused(cast):
    model = nn.Sequential(nn.Linear(64, 64))
    convert_linear_layers(model, COMPUTE)
    with pytest.raises(
        RuntimeError, match=r'0 computes in fp8_e4m3.*use bfloat16, or set "compute.allow_fp16" to true'
    ):
        cast(model)
    assert model[0].weight.dtype == torch.float32
    restore_linear_layers(model)
    assert cast(model)[0].weight.dtype == torch.float16
    allowed = nn.Sequential(nn.Linear(64, 64))
    convert_linear_layers(allowed, {**COMPUTE, "allow_fp16": True})
    assert cast(allowed)[0].weight.dtype == torch.float16
    y = allowed(torch.randn(4, 64).half())
    assert y.dtype == torch.float16 and y.isfinite().all()


def test_other_casts_and_moves():
    model = nn.Sequential(nn.Linear(64, 64))
    convert_linear_layers(model, COMPUTE)
    for moved in (model.to("cpu"), model.bfloat16(), model.to(torch.float32), model.cpu(), model.float()):
        assert moved is model
    assert model.bfloat16()[0].weight.dtype == torch.bfloat16
    assert model(torch.randn(4, 64).bfloat16()).dtype == torch.bfloat16
    model.share_memory()
    assert model.to("meta")[0].weight.is_meta
    assert model.to_empty(device="cpu")[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(MODELS))
def test_evaluation_computes_as_training_does(name):
    model, ids = make(name), tokens()
    convert_linear_layers(model, COMPUTE)
    with torch.no_grad():
        evaluated, trained = (model.train(mode)(input_ids=ids).logits for mode in (False, True))
        assert torch.equal(evaluated, trained)


# -- the "compute" section -------------------------------------------------------------------------------------------

KEY = r'"zeropp_fp8\.compute\.'
FP8_PAIR = {"weights": "fp8_e4m3", "activations": "fp8_e4m3"}
MX_PAIR = {"weights": "mxfp4", "activations": "mxfp6_e3m2"}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"format": "fp9"}, KEY + r"format\": \"fp9\" is not allowed .*it takes one of none, fp8, fp8_hybrid"),
        ({"format": "mxfp8_e4m2"}, KEY + r"format\": \"mxfp8_e4m2\" .*mxfp8_e4m3"),
        ({"format": "int8"}, KEY + r"format\": \"int8\" is not allowed"),
        ({"format": {"weight": "fp8_e4m3"}}, KEY + r"format\.weight\": unknown key .*did you mean \"weights\""),
        ({"format": {"weights": "fp8_e4m3"}}, KEY + r"format\.activations\" is missing; it takes one of fp8_e4m3"),
        ({"format": {"activations": "mxfp4"}}, KEY + r"format\.weights\" is missing; it takes one of fp8_e4m3"),
        ({"format": {**FP8_PAIR, "weights": "fp8"}}, KEY + r"format\.weights\": \"fp8\" .*it takes one of fp8_e4m3, "),
        ({"format": {**MX_PAIR, "weights": "none"}}, KEY + r"format\.weights\": \"none\" .*it takes one of fp8_e4m3, "),
        ({"format": {**MX_PAIR, "gradients": "mxfp5"}}, KEY + r"format\.gradients\": \"mxfp5\" .*mxfp4.*none"),
        (
            {"format": "fp8", "scaling": "mx"},
            KEY + r"scaling\": \"mx\" goes with MX formats, .*mxfp8_e4m3.*\"delayed\"",
        ),
        (
            {"format": {**MX_PAIR, "gradients": "fp8_e5m2"}},
            KEY + r"scaling\": \"mx\" goes with MX formats, but gradients are fp8_e5m2; use an MX format",
        ),
        (
            {"format": "mxfp4", "scaling": "delayed"},
            KEY + r"scaling\": \"delayed\" goes with FP8, but weights are mxfp4; use \"scaling\": \"mx\", or ",
        ),
        (
            {"format": {**FP8_PAIR, "gradients": "mxfp4"}, "scaling": "block"},
            KEY + r"scaling\".*gradients are mxfp4; use",
        ),
        (
            {"format": {**FP8_PAIR, "gradients": "none"}},
            KEY + r"format\.gradients\": \"none\".*use fp8_e4m3 or fp8_e5m2",
        ),
        ({"format": {**FP8_PAIR, "weights": "fp8_e5m2"}}, KEY + r"format\.weights\": \"fp8_e5m2\" .*two E5M2"),
        ({"format": {**FP8_PAIR, "activations": "fp8_e5m2"}}, KEY + r"format\.activations\": \"fp8_e5m2\" .*two E5M2"),
        ({"format": "fp8_hybrid", "scaling": "block"}, KEY + r"format\": gradients in E5M2 .*use \"fp8\""),
        (
            {"format": {**FP8_PAIR, "gradients": "fp8_e5m2"}, "scaling": "block"},
            KEY + r"format\": gradients in E5M2 .*use \"fp8\"",
        ),
    ],
)
def test_sections_that_cannot_work_are_errors_with_a_remedy(fields, message):
    model = nn.Linear(64, 64)
    with pytest.raises(ConfigError, match=message):
        checked_compute(fields)
    with pytest.raises(ConfigError, match=message):
        convert_linear_layers(model, fields)
    assert type(model) is nn.Linear


def test_wrong_values_of_fields():
    for fields in (
        {"scaling": "tensor"},
        {"min_features": 0},
        {"allow_fp16": 1},
        {"fmt": 1},
    ):
        with pytest.raises(ValueError, match=next(iter(fields))):
            convert_linear_layers(nn.Linear(64, 64), {"format": "fp8", **fields})


def test_none_passes_whatever_else_is_set():
    checked_compute(ComputeConfig(format="none", scaling="mx"))


def test_operand_formats():
    def formats(compute_format, **fields):
        compute = checked_compute(ComputeConfig(format=compute_format, **fields))
        return compute.scaling, tuple(operand_formats(compute)[r] for r in ("weights", "activations", "gradients"))

    assert formats("fp8") == ("delayed", ("fp8_e4m3", "fp8_e4m3", "fp8_e4m3"))
    assert formats("fp8_hybrid", scaling="current") == ("current", ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"))
    assert formats(FP8_PAIR, scaling="block") == ("block", ("fp8_e4m3",) * 3)
    assert formats({**FP8_PAIR, "gradients": "fp8_e5m2"}) == ("delayed", ("fp8_e4m3", "fp8_e4m3", "fp8_e5m2"))
    for name in MX_FORMATS:
        assert formats(name) == formats(name, scaling="mx") == ("mx", (name,) * 3)
    assert formats(MX_PAIR) == ("mx", ("mxfp4", "mxfp6_e3m2", "mxfp6_e3m2"))
    assert formats({**MX_PAIR, "gradients": "none"}) == ("mx", ("mxfp4", "mxfp6_e3m2", "none"))
    assert "gradients" not in MX_PAIR  # what the user gave is left alone


def test_loss_falls_as_in_high_precision():
    """20 steps of AdamW on one batch."""
    losses = {}
    for compute in (None, COMPUTE, {"format": "fp8_hybrid"}, {"format": "mxfp8_e4m3"}):
        model = make("llama")
        report = None if compute is None else convert_linear_layers(model, compute)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(20):
            loss = loss_and_grads(model)[0]
            optimizer.step()
            if report is not None:
                report.scaling.end_step()
        losses[str(compute)] = float(loss)
    plain = losses.pop("None")
    assert plain < 0.5 * math.log(VOCAB)
    assert all(abs(loss - plain) < 0.05 * plain for loss in losses.values()), (plain, losses)
