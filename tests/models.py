"""Small models, data and training loops for tests."""

from __future__ import annotations

import contextlib
import copy
import os
from unittest import mock

import torch
from torch import nn


def llama(layers=2, hidden=64, vocab=256, heads=4, tie=False, seed=0, intermediate=None, **kwargs):
    """A random transformers Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate or hidden * 2 + 24,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        use_cache=False,
        **kwargs,
    )
    return LlamaForCausalLM(config)


def needs_16_bits(section):
    """Whether a section is refused with weights in fp32."""
    from zeropp_fp8.config import RECIPES

    weights = {**RECIPES.get(section.get("recipe"), {}).get("weights", {}), **section.get("weights", {})}
    return weights.get("difference") == "exact" and weights.get("format", "none") == "none"


def ds_config(section=None, dtype="fp32", **overrides):
    """A ds_config for tests: nothing stays gathered between forward and backward, so every path is exercised."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
    if dtype == "bf16" or (dtype == "fp32" and needs_16_bits(section or {})):
        config["bf16"] = {"enabled": True}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    if section is not None:
        config["zeropp_fp8"] = copy.deepcopy(section)
        topology = config["zeropp_fp8"].get("topology", {})
        if topology.get("ranks_per_node", 0) is None:
            topology["ranks_per_node"] = int(os.environ.get("LOCAL_WORLD_SIZE", 2))
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key] = {**config[key], **value}
        else:
            config[key] = value
    return config


# For stock runs that others are compared with. Which parameters stay gathered changes no bit, but three quarters of the
# time: with `ds_config` alone, a step of stock makes 42 gathers.
KEPT = {"stage3_param_persistence_threshold": 10**6}


def section(recipe="zeropp", ranks_per_node=None, **fields):
    """A zeropp_fp8 section; where `ds_config` is called on ranks, for as many per node as they were started for."""
    return {"recipe": recipe, "topology": {"ranks_per_node": ranks_per_node}, "report": {"every": 0}, **fields}


def batches(steps, rank, batch=2, length=32, vocab=256, seed=1):
    """Deterministic token batches that differ by rank, with some structure to learn."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    for _ in range(steps):
        start = torch.randint(0, vocab, (batch, 1), generator=generator)
        stride = torch.randint(1, 4, (batch, 1), generator=generator)
        yield (start + stride * torch.arange(length)) % vocab


def make_engine(model, config, optimizer="adamw", lr=1e-3, **given):
    """deepspeed.initialize with torch's AdamW (no compiler), or what `optimizer` makes of a list of parameters."""
    import deepspeed

    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimizer is None:
        return deepspeed.initialize(model=model, config=copy.deepcopy(config), **given)[0]
    if callable(optimizer):
        chosen = optimizer(parameters)
    else:
        chosen = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer](parameters, lr=lr)
    return deepspeed.initialize(model=model, optimizer=chosen, config=copy.deepcopy(config), **given)[0]


@contextlib.contextmanager
def compiled_by(backend):
    """`torch.compile` without a backend uses this one: kernels of the default one take a minute to compile on a CPU."""
    compile_it = torch.compile

    def compile_by(function, **options):
        return compile_it(function, **{"backend": backend, **options})

    with mock.patch.object(torch, "compile", compile_by):
        yield


def secondary_bytes(gatherer):
    """Bytes of secondary shards that a rank can use now."""
    return sum(unit.secondary.numel() for unit in gatherer.units if unit.secondary_is_current)


def full_weights(module):
    """{name: full tensor as float32} of a ZeRO-3 model, exact."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return {name: p.detach().float().clone() for name, p in module.named_parameters()}


def full_fp32_weights(module):
    """{name: full tensor of the optimizer's fp32 weights} of the trainable parameters, exact."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p) for name, p in module.named_parameters() if p.requires_grad}


def full_moments(module):
    """{"exp_avg of name": full tensor} of both moments of the trainable parameters."""
    from deepspeed.utils import safe_get_full_optimizer_state

    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    keys = ("exp_avg", "exp_avg_sq")
    return {f"{key} of {name}": safe_get_full_optimizer_state(p, key) for key in keys for name, p in trained}


def with_lora(model, targets=("q_proj", "v_proj"), seed=1, **options):
    """A model with adapters of PEFT on some of its layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    targets = targets if isinstance(targets, str) else list(targets)
    return get_peft_model(model, LoraConfig(r=4, target_modules=targets, **options))


def build(make, config, zero_init=False):
    """Make a model, under zero.Init when asked."""
    import deepspeed

    context = deepspeed.zero.Init(config_dict_or_path=config) if zero_init else contextlib.nullcontext()
    with context:
        return make()


def train(engine, steps, accumulation=1, batch=2, vocab=256, seed=1, length=32):
    """Losses of `steps` optimizer steps on a causal LM."""
    rank = torch.distributed.get_rank()
    losses = []
    for index, tokens in enumerate(batches(steps * accumulation, rank, batch, length, vocab, seed)):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if (index + 1) % accumulation == 0:
            losses.append(float(loss))
    return losses


class Mlp(nn.Module):
    """The simple model of DeepSpeed's own tests: a few linear layers and a cross-entropy loss."""

    def __init__(self, hidden=16, layers=3, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linears = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(layers)])

    def forward(self, x, y):
        for linear in self.linears:
            x = torch.relu(linear(x))
        return nn.functional.cross_entropy(x, y)
