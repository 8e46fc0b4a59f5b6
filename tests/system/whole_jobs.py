"""Jobs about parameters with owners ("partition": "whole_tensor") that run on ranks."""

from __future__ import annotations

import functools
import gc
import math
from unittest import mock

import deepspeed
import running
import torch
import torch.distributed as dist
from deepspeed import utils
from models import KEPT, batches, full_weights, llama, section, with_lora
from running import Spec, backward, equal, forward, on_engine, run, see, step, update

import zeropp_fp8

EXACT = {"gradients": {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "block_size": 32}}
CLIPPED = {"gradient_clipping": 1.0}


def fields(split="none", **more):
    """A section without any other low precision: FP8 gradients only, which whole tensors need."""
    return {"partition": "whole_tensor", "partition_split": split, **EXACT, **more}


def spec_of(options, dtype="bf16", config=None, node_size=None, model=None, lora=False, **more):
    """Of fields of a section, the recipe among them; `model`: options of a Llama."""
    the_section = section(ranks_per_node=node_size, **{"recipe": "lossless", **options})
    make = functools.partial(llama, hidden=128, **(model or {}))
    adapted = functools.partial(with_lora, targets="all-linear", lora_alpha=8) if lora else None
    return Spec(the_section, dtype, config or {}, make, adapted=adapted, **more)


def what_ranks_hold(split, zero_init):
    """(who owns what, elements of each shard on this rank, shards joined by hand equal the full weights)."""

    def look(engine):
        placement = engine.zeropp_fp8_session.placement
        params = dict(engine.module.named_parameters())
        owned = {name: [(part.owner, part.numel) for part in placement.parts(p)] for name, p in params.items()}
        shards = {name: p.ds_tensor.detach().clone() for name, p in params.items()}
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, shards)
        joined = {}
        for name, parts in owned.items():
            taken = [0] * len(everybody)
            pieces = []
            for owner, numel in parts:
                pieces.append(everybody[owner][name].view(-1)[taken[owner] : taken[owner] + numel].float())
                taken[owner] += numel
            joined[name] = torch.cat(pieces).view(params[name].ds_shape)
        sizes = {name: shard.numel() for name, shard in shards.items()}
        return owned, sizes, equal(joined, full_weights(engine.module)), placement.balance

    return run(spec_of(fields(split), "fp32", zero_init=zero_init), [see(look)]).seen[0]


def with_both(options, sliced, config, **more):
    """Traces of three steps with owners, and with slices."""
    steps = [step] * 3 * config.get("gradient_accumulation_steps", 1)
    return [run(spec_of(chosen, config=config, **more), steps, ("weights", "bytes")) for chosen in (options, sliced)]


NAME = "model.layers.0.self_attn.q_proj.weight"


def looking_and_changing(recipe):
    """Return what safe_get_* and safe_set_* and GatheredParameters see and change."""
    log = {}

    def weight_of(engine):
        return full_weights(engine.module)[NAME]

    def look(engine):
        param = dict(engine.module.named_parameters())[NAME]
        master = utils.safe_get_full_fp32_param(param)
        log["master"] = (master.bfloat16().float() - weight_of(engine)).abs().max().item()
        grad = utils.safe_get_full_grad(param)
        log["grad"] = (tuple(grad.shape), grad.isfinite().all().item(), grad.abs().max().item() > 0)
        moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
        log["moment"] = (tuple(moment.shape), moment.abs().max().item() > 0)
        utils.safe_set_full_fp32_param(param, values)
        log["set master"] = torch.equal(utils.safe_get_full_fp32_param(param), values)
        utils.safe_set_full_optimizer_state(param, values + 1, "exp_avg_sq")
        log["set moment"] = torch.equal(utils.safe_get_full_optimizer_state(param, "exp_avg_sq"), values + 1)
        log["local"] = utils.safe_get_local_fp32_param(param).numel()

    def write(engine):
        param = dict(engine.module.named_parameters())[NAME]
        log["follows master"] = (weight_of(engine) - values).abs().max().item()
        with deepspeed.zero.GatheredParameters(param, modifier_rank=1):
            if dist.get_rank() == 1:
                param.data.copy_(values.to(param.dtype) + 1)
        log["written"] = (weight_of(engine) - values - 1).abs().max().item()

    values = torch.arange(128 * 128, dtype=torch.float32).view(128, 128) % 64 / 64
    options = {"recipe": recipe} if recipe == "fp8-lm" else fields()
    run(spec_of(options), [step, forward, backward, on_engine(look), update, on_engine(write)])
    return log


def checkpoints(recipe, lora=False):
    """Save and resume, exchange with stock, zero_to_fp32 and the consolidated 16-bit weights."""
    own = spec_of({"recipe": recipe} if recipe == "fp8-lm" else fields("balance"), config=CLIPPED, lora=lora)
    stock = Spec(None, "bf16", {**CLIPPED, "zero_optimization": KEPT}, own.model, adapted=own.adapted)
    found = running.exchanged(own, stock, 3, [see(lambda engine: engine._zero3_consolidated_16bit_state_dict())])
    state, consolidated = found["own"].seen
    weights, final, theirs = state["weights"], found["own"].weights, found["stock"].weights
    return {
        "differing": found["differing"],
        "consolidated": dist.get_rank() != 0 or all(torch.equal(consolidated[n].float(), final[n]) for n in final),
        "zero_to_fp32": all(torch.equal(found["zero_to_fp32"][n].bfloat16().float(), weights[n]) for n in weights),
        "stock weights": equal(found["stock"].seen[0]["weights"], weights),
        "losses": [found[name].losses for name in ("own", "stock")],
        "from stock": max(
            ((weight - theirs[name]).abs() / theirs[name].abs().clamp_min(1e-6)).max().item()
            for name, weight in found["back"].seen[0]["weights"].items()
        ),
    }


def decaying(params):
    """AdamW with weight decay of matrices only."""
    groups = {many: [p for p in params if (p.dim() > 1) is many] for many in (True, False)}
    return torch.optim.AdamW([{"params": groups[many], "weight_decay": 0.1 * many} for many in groups], lr=1e-3)


def save_universal(folder, recipe):
    """Train, save, and say what the weights and the next loss are."""
    weights = see(lambda engine: full_weights(engine.module))
    spec = spec_of({"recipe": recipe}, optimizer=decaying)
    return run(spec, [*[step] * 3, running.saved(folder, "u"), weights, step])


def load_universal(folder, recipe):
    """Resume from a universal checkpoint at another world size."""

    def look(engine):
        moment = engine.optimizer.get_full_hp_param(next(engine.module.parameters()), "exp_avg")
        decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
        return full_weights(engine.module), moment.abs().max().item(), decays

    config = {"checkpoint": {"load_universal": True}}
    spec = spec_of({"recipe": recipe}, config=config, model={"seed": 4}, optimizer=decaying)
    data = list(batches(4, dist.get_rank()))[3:]
    return run(spec, [running.loaded(folder, "universal"), see(look), step], data=data)


def after_destroy():
    """Losses of a stock engine, and of one with owners, over a model that an engine with owners has given back."""
    model = llama(hidden=128)
    weights = run(spec_of(fields("balance"), "fp32"), [], ("weights",), model=model).weights
    slices = all(
        p.ds_tensor.numel() == math.ceil(p.ds_numel / dist.get_world_size()) == p.partition_numel()
        for p in model.parameters()
    )
    same = equal(weights, full_weights(model))
    traces = [run(spec_of(chosen, "fp32"), [step, step], model=model) for chosen in ({}, fields())]
    return slices, same, [loss for trace in traces for loss in trace.losses]


def left_without_destroy():
    """A model whose engine was collected, not destroyed, under a new engine with slices."""
    model = llama(hidden=128)
    engine = spec_of(fields("balance"), "fp32").engine(model)
    weights = full_weights(model)
    engine.__del__()
    del engine
    gc.collect()
    trace = run(spec_of({}, "fp32"), [see(lambda engine: full_weights(model)), step, step], model=model)
    return equal(*trace.seen, weights), trace.losses


def sub_groups():
    """Elements of sub-groups smaller than the model, of which some ranks own nothing."""
    spec = spec_of(fields(), "fp32", {"zero_optimization": {"sub_group_size": 5000}})
    flats = see(lambda engine: [flat.numel() for flat in engine.optimizer.fp32_partitioned_groups_flat])
    return run(spec, [flats, *[step] * 3]).seen[0]


def peak_of_initialization():
    """Largest sum of parameter elements that this rank has ever held while an engine with owners was made."""
    from zeropp_fp8.sharded import Shard

    params, held, put = [], [], Shard.put

    def watched(model):
        params.extend(model.parameters())
        return model

    def watching(shard, param):
        held.append(sum(p.data.numel() + p.ds_tensor.numel() for p in params))
        put(shard, param)

    make = functools.partial(llama, hidden=128, layers=4)
    spec = Spec(section("lossless", **fields("balance")), model=make, zero_init=True, adapted=watched)
    with mock.patch.object(Shard, "put", watching):
        run(spec, [])
    return sum(p.ds_numel for p in params), max(held)


def counted(options, node_size):
    """The ledger's counts of this rank, and what it says of all ranks: of steps, an evaluation and a gather."""

    def look(engine):
        with torch.no_grad():
            engine(input_ids=next(batches(1, 0)))
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            pass
        return [zeropp_fp8.wire_report(engine, total=total) for total in (False, True)]

    return run(spec_of(options, node_size=node_size), [step, step, see(look)]).seen[0]
