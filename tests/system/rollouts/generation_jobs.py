"""Jobs about generation inside an engine that trains, run on ranks."""

from __future__ import annotations

import gc
import time
from functools import partial
from itertools import chain

import deepspeed
import torch
import torch.distributed as dist
from frozen_expert_jobs import mixture
from frozen_jobs import TARGETS, frozen, with_lora
from models import batches, full_weights, llama, section, train
from running import Spec, run, same, step

import zeropp_fp8
from zeropp_fp8 import sharded

NEW_TOKENS = 6


def several_adapters(model):
    """Two active adapters of different ranks, scalings and layers."""
    from peft import LoraConfig

    model = with_lora(model)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.base_model.set_adapter(["default", "second"])
    return model


def some_adapters(model, **options):
    """One adapter with PEFT's options."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, **options))


# What `lora` may be: True, or one of these, and how many layers of a block have a forward of their own in generation.
ADAPTERS = {
    False: (lambda model: model, 0),
    True: (with_lora, 3),
    "several": (several_adapters, 4),
    "ranks": (
        lambda model: some_adapters(
            model, rank_pattern={"v_proj": 1, "down_proj": 9}, alpha_pattern={"v_proj": 5}, use_rslora=True
        ),
        3,
    ),
    "dora": (lambda model: some_adapters(model, use_dora=True), 0),
}


def spec_of(fields=None, recipe="lossless", lora=False, dtype="fp32", zero_init=False, layers=2, **overrides):
    """Of the small Llama, with `fields` of the section."""
    model, adapted = partial(llama, layers), ADAPTERS[lora][0]
    options = {"model": model, "lr": 1e-2, "zero_init": zero_init, "adapted": adapted}
    return Spec(section(recipe, **(fields or {})), dtype, overrides, **options)


def engine_of(*args, **kwargs):
    return spec_of(*args, **kwargs).engine()


def prompts(rank=0):
    """Left-padded prompts, different on each rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    tokens = torch.randint(3, 64, (3, 5), generator=generator)
    mask = torch.ones_like(tokens)
    tokens[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": tokens, "attention_mask": mask}


def seen_weights(engine):
    """{name: what a forward pass computes with}, of all parameters, on every rank."""
    seen = {}

    def reading(prefix):
        def hook(module, *_):
            for name, param in module.named_parameters(recurse=getattr(module, "_z3_leaf", False)):
                operand = sharded.known(param).operand
                value = param if operand is None else operand.dequantize(param.dtype)
                seen[f"{prefix}{name}"] = value.detach().float().clone()

        return hook

    # Hooks that come after DeepSpeed's own.
    handles = [
        module.register_forward_pre_hook(reading(f"{name}." if name else ""))
        for name, module in engine.module.named_modules()
    ]
    logits_of(engine.module, 0)
    for handle in handles:
        handle.remove()
    return {name: value for name, value in seen.items() if value.numel()}


def greedy(model, **more):
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(**prompts(dist.get_rank()), **{**options, **more})


def logits_of(model, rank):
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(**prompts(rank)).logits
    model.train(training)
    return logits


def living_bytes():
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = max(storage.nbytes(), storages.get(storage.data_ptr(), 0))
    return sum(storages.values())


def grown_since(before):
    """Bytes more than `before`. A thread of gloo's may still hold what it has sent: 4 bytes, of generate's flag."""
    until = time.monotonic() + 30
    while (grown := living_bytes() - before) > 0 and time.monotonic() < until:
        time.sleep(0.05)
    return grown


def _kinds_of_adapters():
    """(whether embeddings are tied, PEFT's configuration) of adapters that PEFT cannot merge as generation needs it."""
    import peft

    lora = partial(peft.LoraConfig, r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    return {
        "embedding": (True, lora(target_modules=["embed_tokens", "q_proj"])),
        "head": (True, lora(target_modules=["lm_head", "q_proj"])),
        "bias": (False, lora(lora_bias=True)),
        "aLoRA": (False, lora(alora_invocation_tokens=[3, 4], task_type="CAUSAL_LM")),
        "norms": (False, peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"])),
        "IA3": (False, peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[], init_ia3_weights=False)),
    }


def kinds_of_adapters(recipe):
    """By kind and way, under inference mode: the error of logits; after all, that of training's, names, a loss."""
    import peft

    found = {}
    for kind, (tied, config) in _kinds_of_adapters().items():

        def adapted(model, config=config):
            torch.manual_seed(3)
            model = peft.get_peft_model(model, config)
            for param in (param for param in model.parameters() if param.requires_grad):
                param.data += 0.05 * torch.randn_like(param)
            return model

        engine = Spec(section(recipe), "fp32", model=partial(llama, tie=tied), adapted=adapted).engine()
        names = [name for name, param in engine.module.named_parameters() if param.requires_grad]
        expected, errors = logits_of(engine.module, 0), {}
        for way in ("values", "codes", "sharded"):
            with torch.inference_mode(), zeropp_fp8.generation(engine, weights=way) as model:
                errors[way] = (logits_of(model, 0) - expected).abs().max().item()
                greedy(model, max_new_tokens=2)
        errors["after"] = (logits_of(engine.module, 0) - expected).abs().max().item()
        same_names = names == [name for name, param in engine.module.named_parameters() if param.requires_grad]
        found[kind] = errors, same_names, train(engine, 1)[0]
        engine.destroy()
    return found


def equals_a_plain_model(fields=None, recipe="lossless", lora=False, ways=(("values", False),), dtype="fp32", **more):
    """Train, generate in several ways, train on; beside it a model without DeepSpeed that has the same weights."""
    engine = engine_of(fields, recipe, lora, dtype, **more)
    losses = train(engine, 2)
    plain = llama()
    plain = ADAPTERS[lora][0](plain).to(next(engine.module.parameters()).dtype)
    plain.load_state_dict({name: value.to(plain.dtype) for name, value in seen_weights(engine).items()})
    plain.eval()
    rank = dist.get_rank()
    expected, expected_logits = greedy(plain), logits_of(plain, rank)
    seen = []
    for weights, merge in ways:
        before = living_bytes()
        hooks = [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in engine.module.modules()]
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=merge) as model:
            inside = living_bytes()
            caches = []
            inner = next(m for m in model.modules() if type(m).__name__ == "LlamaForCausalLM")
            handle = inner.register_forward_hook(
                lambda m, i, out, caches=caches: caches.append(out.past_key_values is not None)
            )
            tokens = greedy(model)
            handle.remove()
            logits = logits_of(model, rank)
            training = model.training
            adapted = [m for m in model.modules() if hasattr(m, "lora_A")]
            direct = sum("forward" in m.__dict__ for m in adapted)
            merged = sum(bool(getattr(m, "merged", False)) for m in model.modules())
        equal = torch.equal(tokens, expected)
        error = float((logits - expected_logits).abs().max() / expected_logits.abs().max())
        del tokens, logits, model, inner, handle, adapted
        seen.append(
            {
                "way": (weights, merge),
                "chosen": engine.optimizer.parameter_offload.announced,
                "tokens_equal": equal,
                "error": error,
                "training_inside": training,
                "training_after": all(m.training for m in engine.module.modules()),
                "cached": all(caches) and len(caches) == NEW_TOKENS,
                "grown": grown_since(before),
                "held": inside - before,
                "direct": direct,
                "merged_inside": merged,
                "merged_after": any(getattr(m, "merged", False) for m in engine.module.modules()),
                "hooks_are_back": hooks
                == [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in engine.module.modules()],
                "forwards_are_back": not any("forward" in m.__dict__ for m in engine.module.modules()),
                "generate_is_back": "generate" not in engine.module.__dict__,
            }
        )
    return {
        "losses": losses + train(engine, 2, seed=5),
        "ways": seen,
        "numel": sum(p.ds_numel for p in engine.module.parameters()),
        "weights": full_weights(engine.module),
    }


def of_a_mixture(kind, recipe, fields, ways=("values", "codes", "sharded")):
    """By way: (largest error of logits, whether tokens are the same, bytes kept), against the engine's own; the loss
    of a training step after all."""
    model = partial(mixture, kind, use_cache=True)
    engine = Spec(section(recipe, **fields), model=model, lr=1e-2, adapted=with_lora_on_attention).engine()
    train(engine, 1)
    expected, found = logits_of(engine.module, dist.get_rank()), {}
    for weights in ways:
        before = living_bytes()
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=False) as kept:
            held = living_bytes() - before
            error = float((logits_of(kept, dist.get_rank()) - expected).abs().max())
            tokens = greedy(kept).tolist()
        found[weights] = error, tokens, held, grown_since(before)
    return found, train(engine, 1, seed=5)[0]


def with_lora_on_attention(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def graphs_as_if_on_a_gpu():
    """CUDA graphs are recordings of operators from here on; the list gets an entry for each."""
    import recording

    from zeropp_fp8.zero.generation import context, replayed

    made = []

    def recorded(step):
        replay, outputs = recording.recorded(step)
        made.append(0)

        def counted():
            made[-1] += 1
            replay()

        return counted, outputs

    check = context.check_replayable
    replayed.recorded = recorded
    context.check_replayable = lambda module, device: check(module, torch.device("cuda"))
    return made


def replays(fields=None, recipe="lossless", lora=False, ways=("values", "codes"), **more):
    """By way: tokens of steps that are replayed beside those without a graph, how many were, and what is left."""
    engine = engine_of(fields, recipe, lora, **more)
    losses, made, found = train(engine, 2), graphs_as_if_on_a_gpu(), {}
    model = next(m for m in engine.module.modules() if type(m).__name__ == "LlamaForCausalLM")
    asked = [{}, {"max_new_tokens": 4}, {"output_hidden_states": True}]
    asked.append({"num_return_sequences": 2, "do_sample": True, "top_k": 1})
    for weights in ways:
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=False) as kept:
            _said(kept)  # its gathers may want larger buffers for differences, which stay
        before = living_bytes()
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=False) as kept:
            expected = [_said(kept, **some) for some in asked]
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=False, graph=True) as kept, torch.no_grad():
            got = []
            for some in asked:
                got.append(_said(kept, **some))
                logits_of(kept, 0)  # a pass between two sequences, of what is decoded for it
            replayed, _ = list(made), made.clear()
            beams = raising(partial(greedy, kept, num_beams=2))
            other = raising(partial(greedy, kept, cache_implementation="dynamic"))
            model.model.rotary_emb.register_forward_pre_hook(_asks)
            asks = raising(partial(greedy, kept))
            model.model.rotary_emb._forward_pre_hooks.clear()
            made.clear()
        same = all(torch.equal(a, b) for mine, theirs in zip(got, expected) for a, b in zip(mine[:1], theirs[:1]))
        error = max(float((a - b).abs().max()) for mine, theirs in zip(got, expected) for a, b in zip(mine, theirs))
        del got, expected, kept
        left = living_bytes() - before
        found[weights] = (same, error, replayed, left, "forward" in model.__dict__, beams, other, asks)
    return found, losses + train(engine, 2, seed=5)


def _asks(module, args):
    """A hook that waits for the device."""
    assert args[0].abs().max().item() > 0


def _said(model, **more):
    """(tokens, the scores of each, hidden states if asked for)."""
    said = greedy(model, return_dict_in_generate=True, output_logits=True, **more)
    hidden = [layer[:, -1] for step in said.get("hidden_states") or () for layer in step]
    return [said.sequences, *said.logits, *hidden]


def replays_each(cases):
    return [replays(**case) for case in cases]


def both(**options):
    """`equals_a_plain_model` beside the same steps without generation."""
    generated = equals_a_plain_model(**options)
    options.pop("ways", None)
    data = (batches(2, dist.get_rank(), seed=seed) for seed in (1, 5))
    alone = run(spec_of(**options), [step] * 4, ("weights",), chain(*data))
    same_weights = same(alone.weights, generated["weights"])
    return generated | {"weights": None, "alone": alone.losses, "same_weights": same_weights}


def changed_inside():
    """Errors of logits with adapters that are changed inside the context, against a plain model's with the same."""
    found = {}
    engine = engine_of({"frozen": frozen("nf4")}, "qlora", "several")
    train(engine, 1)
    plain = several_adapters(llama())
    plain.load_state_dict(seen_weights(engine))
    plain.eval()
    for weights in ("values", "codes"):

        def note(name, weights=weights, **more):
            with torch.no_grad():
                mine, theirs = (m(**prompts(), **more).logits for m in (engine.module, plain))
            found[f"{weights}, {name}"] = float((mine - theirs).abs().max() / theirs.abs().max()), float(mine.sum())

        with (
            engine.module.disable_adapter(),
            plain.disable_adapter(),
            zeropp_fp8.generation(engine, weights=weights),
        ):
            note("disabled before")
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=False) as model:
            note("both")
            note("each its own", adapter_names=["default", "__base__", "second"])
            with model.disable_adapter(), plain.disable_adapter():
                note("disabled")
            for m in (model, plain):
                m.set_adapter("second", inference_mode=True)
            note("second")
            for m in (model, plain):
                m.base_model.set_adapter(["default", "second"], inference_mode=True)
            note("both again")
    return found


def on_parameters(ways):
    """How far logits are from those outside of generation, with LoRA on the parameters of linear layers; and from those
    without the adapter."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    targets = {"target_modules": ["k_proj"], "target_parameters": ["q_proj.weight", "down_proj.weight"]}
    model = get_peft_model(llama(), LoraConfig(r=4, init_lora_weights=False, **targets))
    engine, rank = Spec(section("zeropp")).engine(model), dist.get_rank()
    expected, found = logits_of(engine.module, rank), {}
    for weights, merge in ways:
        with zeropp_fp8.generation(engine, weights=weights, merge_adapters=merge) as generating:
            found[weights, merge] = (logits_of(generating, rank) - expected).abs().max().item()
    with engine.module.disable_adapter():
        return found, (logits_of(engine.module, rank) - expected).abs().max().item()


def bytes_between_tokens(weights):
    """Bytes that are sent while tokens are generated, and while weights are made resident."""
    engine = engine_of({"secondary": {"scope": "none"}}, "zeropp")
    train(engine, 1)
    outside = lambda: sum(zeropp_fp8.wire_report(engine)["outside_steps"].values())  # noqa: E731
    start = outside()
    with zeropp_fp8.generation(engine, weights=weights) as model:
        entered = outside()
        # Ranks generate different numbers of tokens; only where they gather for each, they do so in step.
        greedy(model, max_new_tokens=NEW_TOKENS + dist.get_rank())
        left = outside()
    return {"entering": entered - start, "generating": left - entered}


def raising(action):
    """The message of what `action` raises, and whether the engine trains on."""
    try:
        action()
    except (RuntimeError, ValueError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def refusals():
    import deepspeed

    engine = engine_of(recipe="zeropp")
    train(engine, 1)
    found = {}

    def unknown():
        with zeropp_fp8.generation(engine, weights="some"):
            pass

    def graph():
        with zeropp_fp8.generation(engine, graph=True):
            pass

    def sharded_graph():
        graphs_as_if_on_a_gpu()
        with zeropp_fp8.generation(engine, weights="sharded", graph=True):
            pass

    def nested():
        with zeropp_fp8.generation(engine), zeropp_fp8.generation(engine):
            pass

    def gradients():
        with zeropp_fp8.generation(engine) as model:
            model(**prompts())

    def gathering():
        with zeropp_fp8.generation(engine) as model, deepspeed.zero.GatheredParameters(list(model.parameters())):
            pass

    def in_a_pass():
        def enter(*_):
            with zeropp_fp8.generation(engine):
                pass

        handle = engine.module.model.layers[0].mlp.register_forward_pre_hook(enter)
        try:
            engine(input_ids=prompts()["input_ids"])
        finally:
            handle.remove()

    def own_error():
        with zeropp_fp8.generation(engine):
            raise RuntimeError("a rank's own")

    def no_memory():
        import psutil

        real = psutil.virtual_memory
        if dist.get_rank() == 1:  # on one rank only: all of them must refuse
            psutil.virtual_memory = lambda: real()._replace(available=1000)
        try:
            with zeropp_fp8.generation(engine, weights="values"):
                pass
        finally:
            psutil.virtual_memory = real

    for action in (unknown, graph, sharded_graph, nested, gradients, gathering, own_error, no_memory, in_a_pass):
        found[action.__name__] = raising(action)
        if action is not in_a_pass:  # after which a module counts as in use until the next backward
            found[f"{action.__name__}, then"] = train(engine, 1)[0]
    found["stock"] = raising(lambda: zeropp_fp8.generation(torch.nn.Linear(2, 2)).__enter__())
    return found


def least_memory_decides():
    """ "auto" on every rank is what the rank with the least memory can do."""
    import psutil

    engine = engine_of({"secondary": {"scope": "none"}}, "zeropp", layers=8)
    train(engine, 1)
    real, chosen = psutil.virtual_memory, []
    numel = sum(p.ds_numel for p in engine.module.parameters())
    # Values take 4 bytes per parameter, codes and two decoded blocks of eight 2.2.
    for bytes_a_parameter in (100, 3, 1):
        if dist.get_rank() == 2:
            free = bytes_a_parameter * numel * 2 * 2  # two ranks a node share it; half is for weights
            psutil.virtual_memory = lambda free=free: real()._replace(available=free)
        with zeropp_fp8.generation(engine) as model:
            greedy(model)
            chosen.append(engine.optimizer.parameter_offload.announced)
        psutil.virtual_memory = real
    return chosen


def without_an_optimizer():
    """An engine that never trains: a reference model."""
    spec = Spec(section("qlora", frozen=frozen("int8")), "bf16", optimizer=None)
    engine = spec.engine(llama().requires_grad_(False))
    with zeropp_fp8.generation(engine, weights="codes") as kept:
        tokens = greedy(kept)
    with zeropp_fp8.generation(engine, weights="values") as kept:
        plain_tokens = greedy(kept)
    return torch.equal(tokens, plain_tokens), tokens.shape[1]


def after_a_change():
    """Weights that stay gathered between steps were written to, and so dropped: whether tokens are a plain model's."""
    engine = engine_of(zero_optimization={"stage3_param_persistence_threshold": 5000})
    train(engine, 1)
    params, equal = list(engine.module.parameters()), {}
    for weights in ("values", "codes"):
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            if dist.get_rank() == 0:
                for param in params:
                    param.data.mul_(1.5)
        with zeropp_fp8.generation(engine, weights=weights) as model:
            tokens = greedy(model)
        plain = llama()
        plain.load_state_dict(full_weights(engine.module))
        equal[weights] = torch.equal(tokens, greedy(plain.eval()))
    return equal, train(engine, 1)[0]


def hooks_of_users():
    """Hooks that others put on or take off meanwhile."""
    engine = engine_of(recipe="zeropp")
    train(engine, 1)
    layer, calls = engine.module.model.layers[1], []
    gone = layer.register_forward_pre_hook(lambda *_: calls.append("gone"))
    kept = layer.register_forward_pre_hook(lambda *_: calls.append("kept"))
    with zeropp_fp8.generation(engine) as model:
        gone.remove()
        layer.register_forward_pre_hook(lambda *_: calls.append("added"))
        logits_of(model, 0)
        inside, _ = list(calls), calls.clear()
    loss = train(engine, 1)[0]
    kept.remove()
    return inside, calls, loss


def inside_trl():
    """TRL's own context around generation, in ours: (tokens equal those without it, with each of its options; loss)."""
    from types import SimpleNamespace

    from trl.models.utils import unwrap_model_for_generation

    engine = engine_of(recipe="zeropp")
    train(engine, 1)
    plugin = SimpleNamespace(zero_stage=3)
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin), unwrap_model=lambda e: e.module)
    with zeropp_fp8.generation(engine) as model:
        expected = greedy(model)

    def generate(gather):
        with (
            zeropp_fp8.generation(engine),
            unwrap_model_for_generation(engine, accelerator, gather_deepspeed3_params=gather) as model,
        ):
            return greedy(model)

    return [torch.equal(generate(gather), expected) for gather in (False, True)], train(engine, 1)[0]
