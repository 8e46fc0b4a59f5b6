"""Jobs with mixtures of experts whose packed experts compute in low precision."""

from __future__ import annotations

import functools

import compute_jobs
import torch
import torch.distributed as dist
import transformers
from frozen_jobs import with_lora
from models import batches, section
from running import Spec, differing, other, resumed, run, see, step

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


def _operands_at_rest(engine):
    """How many of the experts' weights are multiplied as they rest."""
    stacks = [p for p in engine.module.parameters() if len(p.ds_shape) == 3]
    return sum(p in unit_of(p).storage.operands for p in stacks if stored_weight(p) is not None)


def frozen_stacks():
    """Of LoRA over experts that rest in FP8 with a scale per stack: losses, which weights arrive as operands, and the
    same where experts compute in 16 bits."""
    fields = {"frozen": {"format": "fp8_e4m3", "scales": "tensor"}, "compute": {**COMPUTE, "scaling": "current"}}
    plain = {"frozen": fields["frozen"]}
    found = []
    for each in (fields, plain):
        spec = Spec(section("zeropp", **each), "bf16", model=functools.partial(mixture, "Mixtral"), adapted=with_lora)
        operands = see(_operands_at_rest)
        trace = run(spec, [*[step] * 3, operands], data=list(batches(3, dist.get_rank())))
        found.append((trace.losses, *trace.seen))
    return found


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
