"""Jobs with mixtures of experts whose packed experts compute in low precision."""

from __future__ import annotations

import functools
from collections import Counter

import compute_jobs
import torch
import torch.distributed as dist
import transformers
from frozen_jobs import with_lora
from models import batches, section
from ranks import printed
from running import Spec, differing, on_engine, other, resumed, run, see, step

import zeropp_fp8
from zeropp_fp8.compute.experts import Projection
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.gather.attached import unit_of

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "Qwen3Moe": {
        **{"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
        "head_dim": 16,
    },
    "GptOss": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
COMPUTE = {"format": "fp8", "min_features": 32}


def mixture(kind, seed=0):
    torch.manual_seed(seed)
    options = {"vocab_size": 256, "use_cache": False, "pad_token_id": None, **SIZES, **KINDS[kind]}
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**options))


def experts_of(engine):
    """How many projections of experts compute in low precision, and how many weights arrive as their operands."""
    layers = engine.zeropp_fp8_session.conversion.converted.values()
    weights = [layer.weight for layer in layers if isinstance(layer, Projection)]
    route = engine.optimizer.gatherer.route
    return len(weights), sum(weight in route.gemm_weights for weight in weights)


def cast_and_gathered(kind, scaling, **options):
    """How runs differ whose layers cast their weights, and whose weights arrive as codes; losses."""
    compute, model = {**COMPUTE, "scaling": scaling}, functools.partial(mixture, kind)
    cast, gathered, _ = compute_jobs.cast_and_gathered(compute=compute, model=model, steps=3, **options)
    return differing(gathered, cast), cast.losses


def beside_stock(kind, runs):
    """{run: (losses, `experts_of`)} of sections; stock's without the latter."""
    model, data, found = functools.partial(mixture, kind), list(batches(4, dist.get_rank())), {}
    found["stock"] = run(Spec(dtype="bf16", model=model), [step] * 4, data=data).losses
    for name, (recipe, fields) in runs.items():
        spec = Spec(section(recipe, **fields), "bf16", model=model)
        trace = run(spec, [*[step] * 4, see(experts_of)], data=data)
        found[name] = trace.losses, *trace.seen
    return found


def _operands(engine):
    """How many stacks, and how many attention weights, arrive as what is multiplied."""
    found = Counter()
    for name, param in engine.module.named_parameters():
        unit, attention = unit_of(param), "self_attn" in name
        if stored_weight(param) is not None:
            found[attention] += param in unit.storage.operands
        else:
            found[attention] += unit.sent_as_operand(param)
    return found[False], found[True]


def on_parameters(names, model):
    """LoRA by PEFT's `target_parameters`, whose effect is not zero from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {"target_modules": [], "target_parameters": names, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(r=4, **options), autocast_adapter_dtype=False)


ADAPTED = {
    "matrices": with_lora,
    "stacks": functools.partial(on_parameters, ["experts.gate_up_proj", "experts.down_proj"]),
    "one stack and matrices": functools.partial(on_parameters, ["experts.gate_up_proj", "q_proj.weight"]),
}


def with_adapters(lora, recipe, fields, scaling):
    """Losses, `_operands` and the start table's line on them; losses where all computes in 16 bits."""
    model, data, found = functools.partial(mixture, "Mixtral"), list(batches(3, dist.get_rank())), []
    before = len(printed())
    for section_of in (section(recipe, **fields, compute={**COMPUTE, "scaling": scaling}), section("zeropp", **fields)):
        spec = Spec(section_of, "bf16", model=model, adapted=ADAPTED[lora])
        trace = run(spec, [see(_operands), *[step] * 3], data=data)
        found.append((trace.losses, *trace.seen))
    lines = [line for line in printed()[before:].splitlines() if line.startswith("  adapted weights")]
    return *found, lines


def read_by_others():
    """The shapes that other code sees of a stack that arrives as an operand; losses, and those without such code."""
    shapes, model = set(), functools.partial(mixture, "Mixtral")

    def look(module, _):
        shapes.add(tuple(module.gate_up_proj.shape))

    def hook(engine):
        for module in engine.module.modules():
            if hasattr(module, "projections"):
                module.register_forward_pre_hook(look)

    spec, data = Spec(section("fp8-lm", compute=COMPUTE), "bf16", model=model), list(batches(3, dist.get_rank()))
    read = run(spec, [on_engine(hook), *[step] * 3], data=data).losses
    return shapes, read, run(spec, [step] * 3, data=data).losses


def generated(recipe, fields):
    """Tokens that engines generate in each way."""
    spec, found = Spec(section(recipe, **fields), "bf16", model=functools.partial(mixture, "Mixtral")), {}
    tokens = next(batches(1, 0))[:, :6]

    def generate(engine):
        for weights in ("codes", "values"):
            with zeropp_fp8.generation(engine, weights=weights) as model, torch.no_grad():
                found[weights] = model.generate(input_ids=tokens, max_new_tokens=3, do_sample=False).shape
        return found

    return run(spec, [step, see(generate), step], data=list(batches(2, dist.get_rank()))).seen[0]


def resumes(kind, recipe, fields):
    """How a run that resumes differs from one that goes on."""
    spec = Spec(section(recipe, **fields), "bf16", model=functools.partial(mixture, kind))
    data = list(batches(5, dist.get_rank()))
    _, went_on, again = resumed(spec, [step] * 3, [step] * 2, ("weights",), other(spec), data)
    return differing(went_on, again)
