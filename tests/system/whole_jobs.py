"""Jobs about parameters with owners ("partition": "whole_tensor") that run on ranks."""

from __future__ import annotations

import math
from unittest import mock

import torch
import torch.distributed as dist
from models import KEPT, batches, build, ds_config, full_weights, llama, make_engine, section, train
from running import forward_backward, shared_folder, switch, trained

import zeropp_fp8

EXACT = {"gradients": {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "block_size": 32}}


def fields(split="none", **more):
    """A section without any other low precision: FP8 gradients only, which whole tensors need."""
    return {"partition": "whole_tensor", "partition_split": split, **EXACT, **more}


def ownership(engine):
    """{name: [(owner, elements)]} of all parameters."""
    placement = engine.zeropp_fp8_session.placement
    return {n: [(p.owner, p.numel) for p in placement.parts(q)] for n, q in engine.module.named_parameters()}


def what_ranks_hold(split, world_init):
    """(who owns what, elements of each shard on this rank, shards joined by hand equal the full weights)."""
    switch(True)
    config = ds_config(section("lossless", **fields(split)))
    model = build(lambda: llama(hidden=128, layers=2), config, zero_init=world_init)
    engine = make_engine(model, config)
    owned = ownership(engine)
    shards = {n: p.ds_tensor.detach().clone() for n, p in engine.module.named_parameters()}
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, shards)
    joined = {}
    for name, parts in owned.items():
        taken = [0] * len(everybody)
        pieces = []
        for owner, numel in parts:
            pieces.append(everybody[owner][name].view(-1)[taken[owner] : taken[owner] + numel])
            taken[owner] += numel
        joined[name] = torch.cat(pieces)
    weights = full_weights(engine.module)
    equal = all(torch.equal(joined[n].float(), w.view(-1)) for n, w in weights.items())
    return owned, {n: s.numel() for n, s in shards.items()}, equal, str(engine.zeropp_fp8_session.placement.balance)


def losses_of(
    options,
    dtype="bf16",
    steps=3,
    ranks_per_node=None,
    zero_init=False,
    accumulation=1,
    tie=False,
    lora=False,
    optimizer="adamw",
    clip=1.0,
):
    """(losses, full weights, wire report) of a run with these fields of the section."""
    switch(True)
    chosen = dict(options)
    recipe = chosen.pop("recipe", "lossless")
    config = ds_config(
        section(recipe, ranks_per_node=ranks_per_node, **chosen),
        dtype,
        gradient_clipping=clip,
        gradient_accumulation_steps=accumulation,
    )

    def make():
        model = llama(tie=tie, hidden=128)
        return with_lora(model) if lora else model

    lr = 1e-3 if optimizer == "adamw" else 0.3
    engine = make_engine(build(make, config, zero_init), config, optimizer, lr=lr)
    losses = train(engine, steps, accumulation=accumulation)
    return losses, full_weights(engine.module), zeropp_fp8.wire_report(engine)


def with_lora(model):
    """PEFT's LoRA on all linear layers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def looking_and_changing(recipe):
    """What safe_get_* and safe_set_* and GatheredParameters see and change."""
    import deepspeed
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    switch(True)
    chosen = {} if recipe == "fp8-lm" else fields()
    engine = make_engine(llama(hidden=128), ds_config(section(recipe, **chosen), "bf16"))
    train(engine, 1)
    tokens = next(batches(1, dist.get_rank(), seed=3))
    forward_backward(engine, tokens)
    log = {}
    params = dict(engine.module.named_parameters())
    weights = full_weights(engine.module)
    param = params["model.layers.0.self_attn.q_proj.weight"]
    master = safe_get_full_fp32_param(param)
    log["master"] = (master.bfloat16().float() - weights["model.layers.0.self_attn.q_proj.weight"]).abs().max().item()
    grad = safe_get_full_grad(param)
    log["grad"] = (tuple(grad.shape), grad.isfinite().all().item(), grad.abs().max().item() > 0)
    moment = safe_get_full_optimizer_state(param, "exp_avg")
    log["moment"] = (tuple(moment.shape), moment.abs().max().item() > 0)
    values = torch.arange(master.numel(), dtype=torch.float32).view_as(master) % 64 / 64
    safe_set_full_fp32_param(param, values)
    log["set master"] = torch.equal(safe_get_full_fp32_param(param), values)
    safe_set_full_optimizer_state(param, values + 1, "exp_avg_sq")
    log["set moment"] = torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), values + 1)
    log["local"] = safe_get_local_fp32_param(param).numel()
    engine.step()
    after = full_weights(engine.module)["model.layers.0.self_attn.q_proj.weight"]
    log["follows master"] = (after - values).abs().max().item()
    with deepspeed.zero.GatheredParameters(param, modifier_rank=1):
        if dist.get_rank() == 1:
            param.data.copy_(values.to(param.dtype) + 1)
    log["written"] = (
        (full_weights(engine.module)["model.layers.0.self_attn.q_proj.weight"] - values - 1).abs().max().item()
    )
    return log


def checkpoints(recipe, lora=False):
    """Save and resume, exchange with stock, zero_to_fp32 and the consolidated 16-bit weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = shared_folder()
    tokens = list(batches(6, dist.get_rank()))
    chosen = {} if recipe == "fp8-lm" else fields("balance")
    own = ds_config(section(recipe, **chosen), "bf16", gradient_clipping=1.0)
    stock = ds_config(None, "bf16", gradient_clipping=1.0, zero_optimization=KEPT)

    def engine_of(config, seed):
        switch(config is own)
        model = llama(hidden=128, seed=seed)
        return make_engine(with_lora(model) if lora else model, config)

    def resumed(config, tag, seed):
        engine = engine_of(config, seed)
        engine.load_checkpoint(folder, tag=tag)
        return engine

    def same(a, b):
        return all(torch.equal(a[name].float(), b[name].float()) for name in b)

    engine = engine_of(own, 0)
    trained(engine, tokens[:3])
    engine.save_checkpoint(folder, tag="own")
    saved = full_weights(engine.module)
    uninterrupted = trained(engine, tokens[3:])
    final = full_weights(engine.module)
    again = resumed(own, "own", 9)
    at_load = full_weights(again.module)
    resumed_losses = trained(again, tokens[3:])
    log = {
        "at load": same(at_load, saved),
        "resume": (uninterrupted, resumed_losses),
        "resume weights": same(full_weights(again.module), final),
    }
    consolidated = again._zero3_consolidated_16bit_state_dict()
    log["consolidated"] = dist.get_rank() != 0 or same(consolidated, final)
    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, tag="own")
    log["zero_to_fp32"] = same({n: w.bfloat16() for n, w in fp32.items()}, saved)
    in_stock = resumed(stock, "own", 5)
    log["stock weights"] = same(full_weights(in_stock.module), saved)
    log["stock"] = (uninterrupted, trained(in_stock, tokens[3:]))
    in_stock.save_checkpoint(folder, tag="stock")
    stock_weights = full_weights(in_stock.module)
    log["from stock"] = max(
        ((w - stock_weights[n]).abs() / stock_weights[n].abs().clamp_min(1e-6)).max().item()
        for n, w in full_weights(resumed(own, "stock", 7).module).items()
    )
    return log


def save_universal(folder):
    """Train, save, and say what the weights and the next loss are."""
    switch(True)
    engine = make_engine(llama(hidden=128), ds_config(section("fp8-lm"), "bf16"))
    train(engine, 3)
    engine.save_checkpoint(folder, tag="u")
    return full_weights(engine.module), train(engine, 1, seed=8)


def load_universal(folder):
    """Resume from a universal checkpoint at another world size."""
    switch(True)
    config = ds_config(section("fp8-lm"), "bf16", checkpoint={"load_universal": True})
    engine = make_engine(llama(hidden=128, seed=4), config)
    engine.load_checkpoint(folder, tag="u_universal")
    moment = engine.optimizer.get_full_hp_param(next(engine.module.parameters()), "exp_avg")
    return full_weights(engine.module), moment.abs().max().item(), train(engine, 1, seed=8)


def after_destroy():
    """Losses of a stock engine, and of one with owners, over a model that an engine with owners has given back."""
    switch(True)
    model = llama(hidden=128)
    first = make_engine(model, ds_config(section("lossless", **fields("balance"))))
    weights = full_weights(model)
    first.destroy()
    slices = all(
        p.ds_tensor.numel() == math.ceil(p.ds_numel / dist.get_world_size()) == p.partition_numel()
        for p in model.parameters()
    )
    same = all(torch.equal(w, full_weights(model)[n]) for n, w in weights.items())
    second = make_engine(model, ds_config(section("lossless")))
    losses = train(second, 2)
    second.destroy()
    third = make_engine(model, ds_config(section("lossless", **fields())))
    return slices, same, losses + train(third, 1)


def left_without_destroy():
    """A model whose engine was collected, not destroyed, under a new engine with slices."""
    import gc

    switch(True)
    model = llama(hidden=128)
    engine = make_engine(model, ds_config(section("lossless", **fields("balance"))))
    weights = full_weights(model)
    engine.__del__()
    del engine
    gc.collect()
    second = make_engine(model, ds_config(section("lossless")))
    same = all(torch.equal(w, full_weights(model)[n]) for n, w in weights.items())
    return same, train(second, 2)


def sub_groups():
    """Sub-groups smaller than the model: their number must be the same on every rank; some ranks own nothing there."""
    switch(True)
    config = ds_config(section("lossless", **fields()), zero_optimization={"sub_group_size": 5000})
    engine = make_engine(llama(hidden=128), config)
    flats = [flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat]
    return len(flats), flats, train(engine, 3)


def peak_of_initialization():
    """Largest sum of parameter elements that this rank has ever held while an engine with owners was made."""
    from zeropp_fp8.sharded import Shard

    switch(True)
    config = ds_config(section("lossless", **fields("balance")))
    model = build(lambda: llama(hidden=128, layers=4), config, zero_init=True)
    total = sum(p.ds_numel for p in model.parameters())
    held = []
    put = Shard.put

    def watching(shard, param):
        held.append(sum(p.data.numel() + p.ds_tensor.numel() for p in model.parameters()))
        put(shard, param)

    with mock.patch.object(Shard, "put", watching):
        make_engine(model, config)
    return total, max(held)


def counted(options, node_size):
    """The ledger's counts of this rank, and what it says of all ranks: of steps, an evaluation and a gather."""
    import deepspeed

    switch(True)
    chosen = dict(options)
    engine = make_engine(
        llama(hidden=128), ds_config(section(chosen.pop("recipe"), ranks_per_node=node_size, **chosen), "bf16")
    )
    train(engine, 2)
    with torch.no_grad():
        engine(input_ids=next(batches(1, 0)))
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pass
    return zeropp_fp8.wire_report(engine), zeropp_fp8.wire_report(engine, total=True)
