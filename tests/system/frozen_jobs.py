"""Jobs about the frozen store that run on ranks."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from models import KEPT, build, ds_config, full_fp32_weights, full_weights, llama, make_engine, section, train
from running import switch

import zeropp_fp8
from zeropp_fp8.zero.frozen.store import stored_weight
from zeropp_fp8.zero.frozen.unit import Stored, StoredUnit
from zeropp_fp8.zero.gather.attached import unit_of

TARGETS = ["q_proj", "v_proj", "down_proj"]


def frozen(name="int4", **fields):
    """A "frozen" section."""
    if fields.get("scales") == "tensor":
        return {"format": name, **fields}
    return {"format": name, "block_size": 32 if name.startswith("mx") else 16, **fields}


def with_lora(model, rank=4, targets=TARGETS):
    """LoRA adapters whose effect is not zero from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=rank, target_modules=targets, init_lora_weights=False))


def wire_format_of(fields):
    from zeropp_fp8.config import FrozenConfig
    from zeropp_fp8.zero.frozen.store import store_format

    return store_format(FrozenConfig(**fields))


def load_into(model, state):
    """Write the weights of {name: full tensor} into a model, whether it is partitioned or not."""
    import deepspeed

    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if dist.get_rank() == 0 or not hasattr(param, "ds_id"):
                param.data.copy_(state[name])
    return model


def round_linear_weights(model, fields, dtype=torch.float32):
    """Let the linear layers of a plain model, all but the head, hold what their codes decode to; their names."""
    wire_format, names = wire_format_of(fields), []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head"):
            weight = module.weight.data.to(dtype)
            module.weight.data = wire_format.decode(wire_format.encode(weight), weight.shape, dtype).to(torch.float32)
            names.append(name)
    return names


def stored_kinds(engine):
    return [kind for kind in engine.optimizer.gatherer.ownership.storages if isinstance(kind, Stored)]


def run(fields=None, dtype="fp32", zero_init=False, steps=4, round_as=None, plugin=True, lora=with_lora, **overrides):
    """Train LoRA on a Llama; `fields` of the section, `round_as` a frozen section that rounds plain weights."""
    switch(plugin)
    fields = fields or {}
    config = ds_config(section("lossless", **fields) if plugin else None, dtype, **overrides)
    model = load_into(build(llama, config, zero_init), llama().state_dict())
    if round_as is not None:
        round_linear_weights(model, round_as, torch.bfloat16 if dtype == "bf16" else torch.float32)
    engine = make_engine(lora(model), config, lr=1e-2)
    losses = train(engine, steps, config["gradient_accumulation_steps"])
    stored = {n: repr(stored_weight(p).wire_format) for n, p in engine.module.named_parameters() if stored_weight(p)}
    return {
        "losses": losses,
        "stored": stored,
        "weights": full_weights(engine.module),
        "fp32": full_fp32_weights(engine.module),
        "report": zeropp_fp8.wire_report(engine) if plugin else None,
        "operands": sum(len(kind.operands) for kind in stored_kinds(engine)) if plugin else 0,
        "bytes": {n: p.ds_tensor.numel() for n, p in engine.module.named_parameters() if stored_weight(p)},
    }


def equals_rounded_weights(fields, dtype="fp32", zero_init=False, **more):
    """Training on stored weights, and on weights that were rounded beforehand."""
    importlib.import_module("torch._dynamo")
    stored = run({"frozen": fields, **more}, dtype, zero_init)
    rounded = run(more, dtype, round_as=fields, zero_optimization=KEPT)
    return stored, rounded


def traffic(scope, name, world_steps=3):
    """MB between and within nodes that each of some steps sends for weights; memory at rest and of secondary shards."""
    switch(True)
    fields = {"frozen": frozen(name), "secondary": {"scope": scope}}
    engine = make_engine(with_lora(llama()), ds_config(section("lossless", **fields)), lr=1e-2)
    meter, log = engine.zeropp_fp8_session.ledger.meter(), []
    for _ in range(world_steps):
        train(engine, 1)
        log.append({link: meter.of_link(link)[0] for link in ("inter", "intra")})
        meter.set_to_zero()
    stored = [p for p in engine.module.parameters() if stored_weight(p)]
    gatherer = engine.optimizer.gatherer
    units = [unit for unit in gatherer.units if isinstance(unit, StoredUnit)]
    return {
        "steps": log,
        "at rest": sum(p.ds_tensor.numel() for p in stored),
        "numel": sum(p.ds_numel for p in stored),
        "all frozen": sum(unit_of(p).bytes_of(p) for p in engine.module.parameters() if not p.requires_grad),
        "held": sum(unit.secondary.numel() for unit in units if unit.secondary_is_current),
        "one storage a unit": all(
            len({p.ds_tensor.untyped_storage().data_ptr() for p in unit.params}) == 1 for unit in units
        ),
        "units": len(units),
        "rests in the copy": all(
            p.ds_tensor.untyped_storage().data_ptr() == unit.secondary.untyped_storage().data_ptr()
            for unit in units
            for p in (unit.params if unit.keeps_secondary else ())
        ),
        "own again": _rests_apart(engine, stored),
    }


def _rests_apart(engine, stored):
    """Whether codes keep no more memory than they have, once their engine is gone."""
    before = [p.ds_tensor.clone() for p in stored]
    engine.destroy()
    after = [p.ds_tensor for p in stored]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in after}
    return sum(storages.values()) <= sum(t.nbytes for t in after) and all(map(torch.equal, before, after))


def codes_of(model):
    """{name: this rank's payload} of stored parameters."""
    return {n: p.ds_tensor.clone() for n, p in model.named_parameters() if stored_weight(p)}


def equals_a_cast(dtype="bf16", **more):
    """Training on weights stored in FP8 with one scale, and on the weights themselves, which FP8 layers cast so."""
    importlib.import_module("torch._dynamo")
    fields = {"format": "fp8_e4m3", "scales": "tensor", "modules": ["*.self_attn.*"]}  # what layers multiply in FP8
    more["compute"] = {"format": "fp8", "scaling": "current"}
    stored = run({"frozen": fields, **more}, dtype)
    return stored, run(more, dtype, zero_optimization=KEPT)


def same_codes_on_any_number_of_ranks(**fields):
    """Odd-shaped weights as they were, as anybody sees them in the store, and the store's format."""
    switch(True)
    fields = frozen(**fields)
    config = ds_config(section("lossless", ranks_per_node=1, frozen=fields))
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(53, 37), torch.nn.Linear(37, 96), torch.nn.Linear(96, 200))
    for param in model.parameters():
        param.requires_grad_(param.dim() == 1)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = make_engine(model, config)
    return weights, full_weights(engine.module), wire_format_of(fields)
