"""Jobs about checkpoints of models with a frozen store, that run on ranks."""

from __future__ import annotations

import functools
import os
import shutil

import torch
import torch.distributed as dist
from deepspeed import zero
from deepspeed.utils import zero_to_fp32
from frozen_jobs import codes_of, load_into, with_lora
from models import batches, full_fp32_weights, full_weights, llama, section
from ranks import attempt
from running import Spec, equal, evaluate, loaded, on_engine, run, saved, see, state_of, step, universal

from zeropp_fp8.zero.fragment import QuantizedFragment
from zeropp_fp8.zero.frozen.store import stored_weight

EVALUATED = next(batches(1, 77))  # the same on every rank


def spec_of(fields, seed=0, dtype="fp32", zero_init=False, more=None, plugin=True, lora=with_lora, **config):
    """Of a Llama with adapters, of a base model that `seed` chooses."""
    chosen = section(**{"recipe": "lossless", "frozen": fields, **(more or {})}) if plugin else None
    model = functools.partial(llama, seed=seed, attention_bias=True)  # frozen biases are not stored: beside codes

    def adapted(partitioned):
        return lora(load_into(partitioned, model().state_dict()) if zero_init else partitioned)

    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False)
    return Spec(chosen, dtype, config, model, adamw, zero_init=zero_init, adapted=adapted)


def weights_of(engine):
    return full_weights(engine.module)


def codes_in(engine):
    return codes_of(engine.module)


def fresh_codes(engine, weights):
    """{name: this rank's payload} of weights that are stored afresh, from {name: full tensor}."""
    fresh = {}
    for name, param in engine.module.named_parameters():
        stored = stored_weight(param)
        if stored is not None:
            fresh[name] = torch.empty_like(param.ds_tensor)
            first = dist.get_rank() * stored.part_numel
            flat = weights[name].to(stored.dtype).flatten()
            stored.wire_format.encode_part(flat, first, stored.part_numel, fresh[name])
    return fresh


def original(seed=0, **options):
    """{name: full tensor} of the frozen weights before they were stored, named as in the engine's model."""
    return {n: p.detach() for n, p in with_lora(llama(seed=seed, attention_bias=True), **options).named_parameters()}


# -- saving, loading ---------------------------------------------------------------------------------------------------

FROM_THE_CHECKPOINT = [evaluate(EVALUATED), step, step]


def train_and_save(folder, fields, dtype="fp32", more=None, zero_init=False, universally=False):
    """Two steps, a checkpoint, an evaluation, two steps. It has seen the state at the checkpoint."""

    def are_payloads_alone(engine):
        states = torch.load(engine._get_ckpt_name(folder, "two"), weights_only=False)["frozen_param_fragments"].values()
        payloads = [fragment.payload for fragment in states if isinstance(fragment, QuantizedFragment)]
        assert all(p.untyped_storage().nbytes() == p.numel() for p in payloads), "no view of a unit's buffer"

    save = [saved(folder, "two"), on_engine(are_payloads_alone), see(state_of)]
    events = [see(codes_in), step, step, *save, *FROM_THE_CHECKPOINT, see(codes_in)]
    trace = run(spec_of(fields, dtype=dtype, more=more, zero_init=zero_init), events)
    before, state, after = trace.seen
    assert equal(before, after) and len(before) == (0 if fields["format"] == "none" else 14)
    if universally and dist.get_rank() == 0:
        universal(folder, "two")
    dist.barrier()
    trace.seen = [state]
    return trace


def load_and_train(folder, fields, tag="two", load=None, plugin=True, **options):
    """Load into an engine that began elsewhere, and go on. Codes must be those of weights that are stored afresh."""

    def state(engine):
        codes = codes_in(engine)
        assert equal(codes, fresh_codes(engine, original())) and len(codes) == (14 if plugin else 0)
        # Without states there are no moments.
        return (
            {"weights": weights_of(engine), "masters": full_fp32_weights(engine.module)} if load else state_of(engine)
        )

    spec = spec_of(fields, seed=9, plugin=plugin, **options)
    events = [see(codes_in), loaded(folder, tag, **(load or {})), see(codes_in), see(state), *FROM_THE_CHECKPOINT]
    trace = run(spec, events, data=list(batches(4, dist.get_rank()))[2:])
    elsewhere, codes, *trace.seen = trace.seen
    assert all(not torch.equal(codes[name], before) for name, before in elsewhere.items() if before.any())
    return trace


def load_in_the_middle(folder, fields, more=None):
    """Losses from the checkpoint on, loaded over an engine that has trained, which holds copies of what it had."""
    data = list(batches(4, dist.get_rank()))
    events = [step, loaded(folder, "two"), *FROM_THE_CHECKPOINT]
    return run(spec_of(fields, seed=9, more=more), events, data=[data[0], *data[2:]]).losses[1:]


def load_from_numbers(folder, fields, dtype="fp32", into="fp32"):
    """A checkpoint of 16- or 32-bit slices, of stock or of the plugin, into a store with values `into`."""
    result, states = {}, dtype == into  # DeepSpeed looks for optimizer states under a name that depends on the dtype
    for tag, plugin in (("stock", False), ("plugin", True)):
        spec = spec_of({"format": "none"}, dtype=dtype, plugin=plugin)
        weights = run(spec, [step, step, saved(folder, tag)], ("weights",)).weights
        load = loaded(folder, tag, load_optimizer_states=states, load_module_only=not states)
        looks = [see(codes_in), see(fresh_codes, weights), see(weights_of)]
        again = run(spec_of(fields, seed=9, dtype=into), [load, *looks, step, step])
        stored, fresh, mine = again.seen
        values = torch.bfloat16 if into == "bf16" else torch.float32
        result[tag] = {
            "fresh": equal(stored, fresh),
            "others": all(torch.equal(mine[n], w.to(values).float()) for n, w in weights.items() if n not in stored),
            "trains": again.losses,
        }
    return result


def refusals(folder, of_saved, plain):
    """Return what cannot be loaded: the messages, and whether it left everything as it was."""
    result = {}

    def load(name, tag="two", **options):
        def event(engine):
            before = weights_of(engine)
            result[name] = attempt(lambda: engine.load_checkpoint(folder, tag=tag, **options))
            result[name, "kept"] = equal(weights_of(engine), before)

        return on_engine(event)

    def merge(engine, what="merge_adapter"):
        with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            getattr(engine.module, what)()

    run(spec_of(plain, seed=9), [load("other format")])
    module_only = load("no store, module only", load_optimizer_states=False)
    run(spec_of({"format": "none"}, seed=9), [load("no store"), module_only])
    run(spec_of({**of_saved, "skip_modules": ["lm_head", "*embed*", "q_proj"]}, seed=9), [load("skipped")])
    run(spec_of(of_saved, seed=9, plugin=False), [load("stock")])
    excluded = [load("excluded", "excluded"), see(codes_in)]
    excluded += [load("excluded, not strict", "excluded", load_module_strict=False), see(codes_in)]
    unmerged = [on_engine(merge, "unmerge_adapter"), *excluded, load("unmerged")]
    seen = run(spec_of(of_saved, seed=9), [on_engine(merge), load("merged"), *unmerged]).seen
    result["codes of excluded"] = equal(*seen)
    small = spec_of(of_saved, lora=lambda _: with_lora(llama(hidden=32)))
    run(small, [load("other shape", load_module_strict=False)])
    fewer = spec_of(of_saved, lora=lambda model: with_lora(model, targets=["q_proj"]))
    run(fewer, [load("no frozen parameter")])
    return result


def save_merged_state(folder, fields):
    """A checkpoint while an adapter is merged has the codes from before; so has the engine afterwards."""

    def merge(engine):
        with zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            engine.module.merge_adapter()

    events = [see(codes_in), on_engine(merge), see(codes_in), saved(folder, "two")]
    before, merged = run(spec_of(fields), events).seen
    again = run(spec_of(fields, seed=9), [loaded(folder, "two"), see(codes_in)]).seen
    return not equal(before, merged), equal(again, [before])


def readers_of_numbers(folder):
    """Return what DeepSpeed's own readers make of codes: {reader: message, or result}."""
    read = functools.partial(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint, folder, tag="two")
    to_files = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    found = {
        "dict": attempt(read),
        "lazy": attempt(lambda: read(lazy_mode=True)),
        "files": attempt(lambda: to_files(folder, f"{folder}/converted", tag="two")),
    }
    return found, {name: w.detach().float() for name, w in read(exclude_frozen_parameters=True).items()}


def save_excluded(folder, fields):
    """A checkpoint without frozen parameters, as the Trainer saves it for PEFT models."""
    exclude = {"save_latest": False, "exclude_frozen_parameters": True}
    path = see(lambda engine: engine._get_ckpt_name(folder, "excluded"))
    (path,) = run(spec_of(fields), [step, step, saved(folder, "excluded", **exclude), path]).seen
    return torch.load(path, weights_only=False)["frozen_param_fragments"], os.path.getsize(path)


def files_are_missing(folder, into, fields):
    """Return the errors of a universal checkpoint of which a rank finds fewer files than were saved, and of one rank's.

    The other is `load_module_state_dict` without a folder, of a rank of a larger world.
    """
    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/universal", f"{into}/universal")
        os.remove(f"{into}/universal/zero_pp_rank_3_mp_rank_00_model_states.pt")
    dist.barrier()
    states = torch.load(f"{folder}/two/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    spec = spec_of(fields, seed=9, checkpoint={"load_universal": True})
    loads = (
        see(lambda engine: attempt(lambda: engine.load_checkpoint(into, tag="universal"))),
        see(lambda engine: attempt(lambda: engine.load_module_state_dict(states))),
    )
    return run(spec, loads).seen
