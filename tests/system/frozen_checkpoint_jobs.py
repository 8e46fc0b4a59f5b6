"""Jobs about checkpoints of models with a frozen store, that run on ranks."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from frozen_jobs import codes_of, load_into, with_lora
from models import batches, build, ds_config, full_fp32_weights, full_weights, llama, section
from running import loss_of, stepped, switch

from zeropp_fp8.zero.fragment import QuantizedFragment
from zeropp_fp8.zero.frozen.store import stored_weight

STATES = ("exp_avg", "exp_avg_sq")


def engine_of(fields, seed=0, dtype="fp32", zero_init=False, more=None, plugin=True, lora=with_lora, **overrides):
    """An engine over a Llama with adapters, of a base model that `seed` chooses."""
    import deepspeed

    switch(plugin)
    more = {"recipe": "lossless", **(more or {})}
    chosen = section(frozen=fields, **more) if plugin else None
    config = ds_config(chosen, dtype, **overrides)

    def make():
        return llama(seed=seed, attention_bias=True)  # biases are frozen and not stored: numbers beside codes

    model = build(make, config, zero_init)
    model = lora(load_into(model, make().state_dict()) if zero_init else model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def steps(engine, which, total=4):
    """Losses of the training steps `which` of `total`."""
    losses = []
    for index, tokens in enumerate(batches(total, dist.get_rank())):
        if index in which:
            losses.append(stepped(engine, tokens))
    return losses


@torch.no_grad()
def evaluation(engine):
    """The loss on one batch, the same on every rank."""
    tokens = next(batches(1, 77))
    return float(loss_of(engine, tokens))


def numpy_of(tensors):
    return {name: tensor.detach().float().numpy() for name, tensor in tensors.items()}


def state_of(engine, moments=STATES):
    """What a checkpoint must bring back: all weights, fp32 weights and moments, in full."""
    from deepspeed.utils import safe_get_full_optimizer_state

    trained = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
    return {
        "weights": numpy_of(full_weights(engine.module)),
        "fp32": numpy_of(full_fp32_weights(engine.module)),
        **{key: numpy_of({n: safe_get_full_optimizer_state(p, key) for n, p in trained.items()}) for key in moments},
    }


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


def same(mine, others):
    return set(mine) == set(others) and all(torch.equal(mine[n], others[n]) for n in mine)


def original(seed=0, **options):
    """{name: full tensor} of the frozen weights before they were stored, named as in the engine's model."""
    return {n: p.detach() for n, p in with_lora(llama(seed=seed, attention_bias=True), **options).named_parameters()}


# -- saving, loading ---------------------------------------------------------------------------------------------------


def train_and_save(folder, fields, dtype="fp32", more=None, zero_init=False, universal=False):
    """Two steps, a checkpoint, two steps. Returns the losses, the state at the checkpoint and a loss there."""
    engine = engine_of(fields, dtype=dtype, more=more, zero_init=zero_init)
    before = codes_of(engine.module)
    losses = steps(engine, [0, 1])
    engine.save_checkpoint(folder, tag="two")
    fragments = torch.load(engine._get_ckpt_name(folder, "two"), weights_only=False)["frozen_param_fragments"].values()
    codes = [f for f in fragments if isinstance(f, QuantizedFragment)]
    assert all(f.payload.untyped_storage().nbytes() == f.payload.numel() for f in codes), "no view of a unit's buffer"
    state, loss = state_of(engine), evaluation(engine)
    losses += steps(engine, [2, 3])
    assert same(codes_of(engine.module), before)
    if universal and dist.get_rank() == 0:
        make_universal(folder)
    dist.barrier()
    return {"losses": losses, "state": state, "evaluation": loss, "stored": len(before)}


def make_universal(folder):
    from deepspeed.checkpoint import ds_to_universal

    ds_to_universal.main(
        argparse.Namespace(
            input_folder=f"{folder}/two",
            output_folder=f"{folder}/universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=False,
        )
    )


def load_and_train(
    folder, fields, dtype="fp32", more=None, zero_init=False, tag="two", plugin=True, load=None, **other
):
    """Load into an engine that began elsewhere, and go on. Codes must be those of weights that are stored afresh."""
    engine = engine_of(fields, seed=9, dtype=dtype, more=more, zero_init=zero_init, plugin=plugin, **other)
    elsewhere = codes_of(engine.module)
    path, _ = engine.load_checkpoint(folder, tag=tag, **(load or {}))
    codes = codes_of(engine.module)
    assert path is not None and all(not torch.equal(codes[n], elsewhere[n]) for n in codes if elsewhere[n].any())
    state, loss = state_of(engine, () if load else STATES), evaluation(engine)
    return {
        "fresh": same(codes, fresh_codes(engine, original())),
        "state": state,
        "evaluation": loss,
        "losses": steps(engine, [2, 3]),
        "stored": len(codes),
    }


def load_in_the_middle(folder, fields, more=None):
    """Load over an engine that has trained, which holds copies of what it had."""
    engine = engine_of(fields, seed=9, more=more)
    steps(engine, [0])
    engine.load_checkpoint(folder, tag="two")
    return evaluation(engine), steps(engine, [2, 3])


def load_from_numbers(folder, fields, dtype="fp32", into="fp32"):
    """A checkpoint of 16- or 32-bit slices, of stock or of the plugin, into a store with values `into`."""
    result = {}
    for tag, plugin in (("stock", False), ("plugin", True)):
        engine = engine_of({"format": "none"}, dtype=dtype, plugin=plugin)
        steps(engine, [0, 1])
        engine.save_checkpoint(folder, tag=tag)
        weights = full_weights(engine.module)
        again = engine_of(fields, seed=9, dtype=into)
        states = dtype == into  # DeepSpeed looks for optimizer states under a name that depends on the dtype
        again.load_checkpoint(folder, tag=tag, load_optimizer_states=states, load_module_only=not states)
        mine, stored = full_weights(again.module), codes_of(again.module)
        others, values = [n for n in weights if n not in stored], next(again.module.parameters()).dtype
        result[tag] = {
            "fresh": same(stored, fresh_codes(again, weights)),
            "others": all(torch.equal(mine[n], weights[n].to(values).float()) for n in others),
            "trains": steps(again, [2, 3]),
        }
    return result


def refusals(folder, saved, plain):
    """What cannot be loaded: the messages, and whether it left everything as it was."""
    result = {}

    def attempt(name, engine, **load):
        before = numpy_of(full_weights(engine.module))
        try:
            engine.load_checkpoint(folder, tag=load.pop("tag", "two"), **load)
            result[name] = "loaded"
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
        after = numpy_of(full_weights(engine.module))
        result[name, "kept"] = all((before[n] == after[n]).all() for n in before)

    attempt("other format", engine_of(plain, seed=9))
    attempt("no store", engine_of({"format": "none"}, seed=9))
    attempt("no store, module only", engine_of({"format": "none"}, seed=9), load_optimizer_states=False)
    attempt("skipped", engine_of({**saved, "skip_modules": ["lm_head", "*embed*", "q_proj"]}, seed=9))
    attempt("stock", engine_of(saved, seed=9, plugin=False))
    engine = engine_of(saved, seed=9)
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.merge_adapter()
    attempt("merged", engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.unmerge_adapter()
    attempt("unmerged", engine)
    attempt("excluded", engine_of(saved, seed=9), tag="excluded")
    engine = engine_of(saved, seed=9)
    before = codes_of(engine.module)
    attempt("excluded, not strict", engine, tag="excluded", load_module_strict=False)
    result["codes of excluded"] = same(codes_of(engine.module), before)
    attempt("other shape", engine_of(saved, lora=lambda _: with_lora(llama(hidden=32))), load_module_strict=False)
    attempt("no frozen parameter", engine_of(saved, lora=lambda model: with_lora(model, targets=["q_proj"])))
    return result


def save_merged_state(folder, fields):
    """A checkpoint while an adapter is merged has the codes from before; so has the engine afterwards."""
    import deepspeed

    engine = engine_of(fields)
    before = codes_of(engine.module)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.merge_adapter()
    changed = any(not torch.equal(before[n], c) for n, c in codes_of(engine.module).items())
    engine.save_checkpoint(folder, tag="two")
    again = engine_of(fields, seed=9)
    again.load_checkpoint(folder, tag="two")
    return changed, same(codes_of(again.module), before)


def readers_of_numbers(folder):
    """What DeepSpeed's own readers make of codes: {reader: message, or result}."""
    from deepspeed.utils.zero_to_fp32 import (
        convert_zero_checkpoint_to_fp32_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
    )

    found = {}
    for name, reader in (
        ("dict", lambda: get_fp32_state_dict_from_zero_checkpoint(folder, tag="two")),
        ("lazy", lambda: get_fp32_state_dict_from_zero_checkpoint(folder, tag="two", lazy_mode=True)),
        ("files", lambda: convert_zero_checkpoint_to_fp32_state_dict(folder, f"{folder}/converted", tag="two")),
    ):
        try:
            reader()
            found[name] = "read"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    without = get_fp32_state_dict_from_zero_checkpoint(folder, tag="two", exclude_frozen_parameters=True)
    return found, numpy_of(without)


def save_excluded(folder, fields):
    """A checkpoint without frozen parameters, as the Trainer saves it for PEFT models."""
    engine = engine_of(fields)
    steps(engine, [0, 1])
    engine.save_checkpoint(folder, tag="excluded", save_latest=False, exclude_frozen_parameters=True)
    path = engine._get_ckpt_name(folder, "excluded")
    saved = torch.load(path, weights_only=False)
    return state_of(engine), saved["frozen_param_fragments"], os.path.getsize(path)


def some_files_are_missing(folder, into, fields):
    """A universal checkpoint of which a rank finds fewer files than were saved."""
    import shutil

    if dist.get_rank() == 0:
        shutil.copytree(f"{folder}/universal", f"{into}/universal")
        os.remove(f"{into}/universal/zero_pp_rank_3_mp_rank_00_model_states.pt")
    dist.barrier()
    engine = engine_of(fields, seed=9, checkpoint={"load_universal": True})
    try:
        engine.load_checkpoint(into, tag="universal")
    except RuntimeError as error:
        return str(error)


def states_by_hand(folder, fields):
    """`load_module_state_dict` without a folder, of a rank of a larger world."""
    engine = engine_of(fields, seed=9)
    states = torch.load(f"{folder}/two/zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    try:
        engine.load_module_state_dict(states)
    except RuntimeError as error:
        return str(error)
