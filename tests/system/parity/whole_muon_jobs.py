"""Jobs with Muon on owners of whole matrices."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import breadth_jobs
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from frozen_jobs import load_into
from models import batches, full_fp32_weights, llama, section
from ranks import attempt
from running import Spec, backward, changed, differing, forward, loaded, run, saved, see, shared_folder, step, update
from update_jobs import numbers

from zeropp_fp8.optim import Muon
from zeropp_fp8.optim.muon import COEFFICIENTS
from zeropp_fp8.plugin import muon as plugin_muon

LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0, "use_muon": False}
NO_PERMISSION = {"zero_allow_untested_optimizer": False}  # as in a ds_config of a user's
EIGHT_BITS = {"exp_avg_format": "fp8_e4m3", "scales": "block"}
SECTIONS = {
    "lossless": section("lossless", partition="whole_tensor"),
    "zeropp": section("zeropp", partition="whole_tensor"),
    "zeropp-4bit": section("zeropp-4bit", partition="whole_tensor", partition_split="none"),
    "zeropp-exact": section("zeropp-exact", partition="whole_tensor"),
    "16-bit momentum": section("zeropp", partition="whole_tensor", optimizer={"exp_avg_format": "bf16"}),
    "8-bit momentum": section("zeropp", partition="whole_tensor", optimizer=EIGHT_BITS),
    "fp8-lm": section("fp8-lm", compute={"format": "fp8", "min_features": 16}),
}


def muon(params):
    """Of all matrices; AdamW of vectors."""
    params = list(params)
    matrices, vectors = (
        [p for p in params if (len(getattr(p, "ds_shape", p.shape)) > 1) is many] for many in (True, False)
    )
    of_matrices = {"params": matrices, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
    return Muon([of_matrices, {"params": vectors, **ADAM}])


def spec_of(the_section, seed=0, **options):
    model = functools.partial(llama, layers=1, seed=seed)
    return Spec(the_section, config=NO_PERMISSION, model=model, optimizer=muon, **options)


def seen_of_states(engine):
    """fp32 weights and momenta of matrices."""
    (weights,) = numbers(engine, safe_get_full_fp32_param)
    momenta = {
        name: safe_get_full_optimizer_state(param, "momentum_buffer").double()
        for name, param in engine.module.named_parameters()
        if len(param.ds_shape) > 1
    }
    return weights, momenta


def written_out(matrix, steps=5):
    a, b, c = COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


def trained_and_resumed(names, steps=4):
    """{section: (largest error of a matrix over its change, of a momentum over its amax, losses, what differs in a run
    that has gone on from a checkpoint)}. Errors are those of steps written out in float64.
    """
    found = {}
    for name in names:
        folder, half = shared_folder(), steps // 2
        data = list(batches(steps, dist.get_rank()))
        seen = [forward, backward, see(seen_of_states), see(numbers, safe_get_full_grad), update, see(seen_of_states)]
        trace = run(spec_of(SECTIONS[name]), [*seen * half, saved(folder, "half"), *seen * half], data=data)
        weight_error, momentum_error = 0.0, 0.0
        for (weights, momenta), (grads,), (after, written) in zip(*[iter(trace.seen)] * 3):
            for which, held in momenta.items():
                momentum = held.lerp(grads[which], 1 - MOMENTUM)
                rows, columns = held.shape
                direction = written_out(grads[which].lerp(momentum, MOMENTUM)) * max(1, rows / columns) ** 0.5
                change = LR * (direction + DECAY * weights[which])
                off = (after[which] - weights[which] + change).abs().max()
                weight_error = max(weight_error, (off / change.abs().max()).item())
                momentum_error = max(
                    momentum_error, ((written[which] - momentum).abs().max() / momentum.abs().max()).item()
                )
        events = [loaded(folder, "half"), *[step] * half, see(seen_of_states)]
        resumed = run(spec_of(SECTIONS[name], seed=3), events, data=data[half:])
        others = [which for pair in zip(trace.seen[-1], resumed.seen[0]) for which in changed(*pair)]
        found[name] = weight_error, momentum_error, trace.losses, others
    return found


# -- made by a ds_config ---------------------------------------------------------------------------------------------

# With DeepSpeed's eps, 1e-10, an embedding's element whose gradient is nothing but rounding moves by a whole lr.
PARAMS = {"lr": LR, "adam_lr": 1e-3, "momentum": MOMENTUM, "weight_decay": DECAY, "eps": 1e-8, "torch_adam": True}
MODEL = functools.partial(llama, layers=2, hidden=64, intermediate=96)


def partitioned_while_made(steps):
    """How a run of a model made under zero.Init differs from one of a model that the engine partitions."""
    options = {"adapted": lambda model: load_into(model, MODEL().state_dict())}
    specs = [by_config(SECTIONS["lossless"], zero_init=early, **options) for early in (True, False)]
    return differing(*[run(spec, [step] * steps, ["masters"]) for spec in specs])


def by_config(the_section, params=PARAMS, stage=3, **options):
    """A Spec whose ds_config makes Muon."""
    config = NO_PERMISSION | options.pop("config", {})
    made = {"optimizer": {"type": "Muon", "params": params}, "zero_optimization": {"stage": stage}, **config}
    return Spec(the_section, config=made, **{"model": MODEL, "optimizer": None, **options})


def whole_weights(engine):
    """fp32 weights; of ZeRO-1 and 2 as they are."""
    if engine.zero_optimization_stage() == 3:
        return full_fp32_weights(engine.module)
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def deepspeeds_in_fp32():
    """Let DeepSpeed's iteration be eager and in fp32: it compiles for minutes, and takes fp16 of a CPU that has it."""
    torch.compiler.set_stance("force_eager")
    original_muon.ns_compute_dtype = lambda *method: torch.float32


def beside_deepspeed(steps):
    """{stage 1, 2 of DeepSpeed, and owners, by recipe: (losses, weights at the end)}."""
    deepspeeds_in_fp32()
    found = {}
    for name, spec in {
        1: by_config(None, stage=1),
        2: by_config(None, stage=2),
        "lossless": by_config(SECTIONS["lossless"]),
    }.items():
        trace = run(spec, [*[step] * steps, see(whole_weights)])
        found[name] = trace.losses, trace.seen[0]
    return found


def in_one_process(data, clip):
    """Losses and weights of the same model and Muon, in plain torch with DeepSpeed's function for the update.

    Args:
        data: of each step, the micro-batches of all ranks.
    """
    deepspeeds_in_fp32()
    model = MODEL()
    matrices = {n: p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n and "lm_head" not in n}
    others = [p for n, p in model.named_parameters() if n not in matrices]
    adam_optimizer = torch.optim.AdamW(others, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    momenta = {name: torch.zeros_like(param) for name, param in matrices.items()}
    for together in data:
        for tokens in together:
            (model(input_ids=tokens, labels=tokens).loss / len(together)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for name, param in matrices.items():
                param.mul_(1 - LR * DECAY).add_(
                    original_muon.muon_update(param.grad, momenta[name], MOMENTUM), alpha=-LR
                )
        adam_optimizer.step()
        model.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def accumulated(steps, clip):
    """(weights after steps of one batch, of the same batch in four micro-batches, in plain torch)."""
    config = {"gradient_clipping": clip, "train_micro_batch_size_per_gpu": 4}
    batch = list(batches(steps, dist.get_rank(), batch=4))
    parts = [tokens for each in batch for tokens in each.split(1)]
    whole = run(by_config(SECTIONS["lossless"], config=config), [*[step] * steps, see(whole_weights)], data=batch)
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    in_parts = run(
        by_config(SECTIONS["lossless"], config=config), [*[step] * 4 * steps, see(whole_weights)], data=parts
    )
    of_ranks = [list(batches(steps, rank, batch=4)) for rank in range(dist.get_world_size())]
    return whole.seen[0], in_parts.seen[0], in_one_process(list(zip(*of_ranks)), clip)


def save_for_others(folder, name):
    """Train and save; the weights and momenta, and the loss after the next step."""
    spec = by_config(SECTIONS[name])
    return run(spec, [step, step, saved(folder, "u"), see(whole_weights), see(momenta_of), step, step])


def load_from_others(folder, name):
    spec = by_config(SECTIONS[name], model=functools.partial(MODEL, seed=3))
    spec.config["checkpoint"] = {"load_universal": True}
    options = see(lambda engine: [group["use_muon"] for group in engine.optimizer.optimizer.param_groups])
    events = [loaded(folder, "universal"), see(whole_weights), see(momenta_of), options, step]
    return run(spec, events, data=list(batches(3, dist.get_rank()))[2:])


def momenta_of(engine):
    return {
        name: safe_get_full_optimizer_state(param, "momentum_buffer")
        for name, param in engine.module.named_parameters()
        if param.use_muon
    }


FUSED = {
    "Phi3": {"pad_token_id": 0, "num_key_value_heads": 2},
    "GPTNeoX": {"max_position_embeddings": 128},
    "Qwen3Moe": {
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
    },
}


def fused(kind):
    """A random model whose layers hold several matrices in a parameter."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = getattr(transformers, f"{kind}Config")(vocab_size=256, use_cache=False, **sizes, **FUSED[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def trained_fused(kind):
    """{rows of matrices: names} as groups have them, and losses."""
    made = {}

    def engine_of(model):
        names = {id(param): name for name, param in model.named_parameters()}
        muon_of = plugin_muon.muon_of

        def seen(*args):
            optimizer = muon_of(*args)
            for group in optimizer.param_groups:
                made.setdefault(group["rows"], []).extend(names[id(param)] for param in group["params"])
            return optimizer

        stack.enter_context(mock.patch.object(plugin_muon, "muon_of", seen))
        return model

    params = {**PARAMS, "lr": 0.005}
    spec = by_config(SECTIONS["zeropp"], params, model=functools.partial(fused, kind), adapted=engine_of)
    with contextlib.ExitStack() as stack:
        losses = run(spec, [step] * 4, data=[*batches(1, dist.get_rank())] * 4).losses
    return made, losses


def per_head(steps=2):
    """Change of a query weight with "per_head_muon", and what DeepSpeed's function makes of the same gradient."""
    spec = by_config(SECTIONS["lossless"], {**PARAMS, "per_head_muon": True, "weight_decay": 0.0})
    seen = [see(whole_weights), forward, backward, see(numbers, safe_get_full_grad), update, see(whole_weights)]
    before, (grads,), after = run(spec, seen).seen
    return before, grads, after


def refusals():
    """Return what is said of slices, of vectors, and of parameters that there are not."""
    slices = spec_of(section("zeropp"))
    of_all = Spec(SECTIONS["zeropp"], model=functools.partial(llama, layers=1), optimizer=Muon)
    unknown = by_config(SECTIONS["zeropp"], {"lr": 0.02, "nesterow": True})
    l2 = by_config(SECTIONS["zeropp"], {"adam_w_mode": False})
    sliced = by_config(section("zeropp"))
    deepspeeds = Spec(SECTIONS["zeropp"], model=functools.partial(llama, layers=1), optimizer=breadth_jobs.muon)
    return [attempt(each.engine) for each in (slices, of_all, unknown, l2, sliced, deepspeeds)]
