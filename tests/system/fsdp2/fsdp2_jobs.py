"""Jobs with models of fully_shard, whose collectives are the project's."""

from __future__ import annotations

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import batches, llama
from ranks import attempt, printed
from running import shared_folder
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from zeropp_fp8 import fsdp2

FP16 = MixedPrecisionPolicy(param_dtype=torch.float16)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
EXACT = {"weights": {"format": "none"}}  # gradients alone are rounded
WHOLE = {"weights": {"difference": "none"}}


class Odd(nn.Module):
    """Sizes that no number of ranks divides: rows of parameters, of which some ranks have none."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(67, 33)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(33, 35), nn.GELU(), nn.Linear(35, 33)) for _ in range(2))
        self.head = nn.Linear(33, 67, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.model = self  # as in models of transformers

    @property
    def config(self):
        return None

    def forward(self, input_ids, labels=None, skip=()):
        if labels is None:  # a loss that not all of the model's own parameters have a part in
            return self.head(self.embed(input_ids % 67)).square().mean()
        x = self.embed(input_ids % 67)
        for index, layer in enumerate(self.layers):
            x = x if index in skip else x + layer(x) * self.scale.sum()
        logits = self.head(x[:, :-1]).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten() % 67)
        return _Output(loss)


class _Output:
    def __init__(self, loss):
        self.loss = loss


def odd():
    model = Odd()
    del model.__dict__["_modules"]["model"]  # no circle
    return model


def blocks_of(model):
    return model.layers if isinstance(model, Odd) else model.model.layers


def sharded(policy=None, make=llama, wrap=None, adapt=None, mesh=None, **options):
    """A model that is sharded block by block."""
    torch.manual_seed(0)
    model = make()
    if adapt is not None:
        adapt(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    options = {"mesh": mesh, **({"mp_policy": policy} if policy else {}), **options}
    layers = blocks_of(model)
    for index, block in enumerate(layers):
        layers[index] = wrap(block) if wrap else block
        fully_shard(layers[index], **options)
    return fully_shard(model, **options)


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def adamw(model, lr=1e-3):
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)


def trained(model, data, optimizer=None, **options):
    """Losses of a step per micro-batch."""
    optimizer, losses = optimizer or adamw(model), []
    for tokens in data:
        loss = model(input_ids=tokens, labels=tokens, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def full(model):
    return {name: param.full_tensor().detach().clone() for name, param in model.named_parameters()}


def run(recipe, data, fields=None, options=None, **how):
    """(losses, weights, bytes per step) of a recipe; None: of stock."""
    model = sharded(**how)
    if recipe:
        fsdp2.apply(model, recipe, **(fields or {}))
    losses = trained(model, data, **(options or {}))
    return losses, full(model), fsdp2.wire_report(model)["per_step"] if recipe else None


def beside_stock(recipes, steps=4, fields=None, **how):
    """`run` by recipe."""
    data = list(batches(steps, dist.get_rank()))
    return {recipe: run(recipe, data, fields if recipe else None, **how) for recipe in (None, *recipes)}


def whole_and_differences(policy, recipe="zeropp"):
    """Runs with whole codes, and with differences of them."""
    data = list(batches(5, dist.get_rank()))
    return [run(recipe, data, {"weights": {"difference": which}}, policy=policy) for which in ("none", "exact")]


def _inter(model):
    report = fsdp2.wire_report(model)
    return report["outside_steps"]["inter"]


def copies():
    """Bytes between nodes of evaluations, one after the other, and the losses of a model without copies."""
    model, plain = (sharded() for _ in range(2))
    fsdp2.apply(model, "zeropp")
    fsdp2.apply(plain, "zeropp", secondary={"scope": "none"}, **WHOLE)
    tokens, seen = next(batches(1, dist.get_rank())), []

    def evaluate(what):
        with torch.no_grad():
            losses = [loss_of(each, tokens).item() for each in (model, plain)]
        for each in (model, plain):
            each.reshard()  # torch leaves the root's parameters whole
        seen.append((what, _inter(model), losses))

    evaluate("first")
    evaluate("again")
    with torch.no_grad():
        for each in (model, plain):
            for param in each.parameters():
                param.mul_(0.9)
    evaluate("written in place")
    for each in (model, plain):
        each.lm_head.weight.to_local().data.mul_(0.5)
        fsdp2.weights_changed(each)
    evaluate("told")
    with torch.no_grad():
        state = {name: value * 1.5 for name, value in model.state_dict().items()}
    for each in (model, plain):
        each.load_state_dict(state)
    evaluate("loaded")
    folder = shared_folder()
    dcp.save({name: 1.1 * value for name, value in state.items()}, checkpoint_id=folder)
    for each in (model, plain):
        dcp.load(each.state_dict(), checkpoint_id=folder)
    evaluate("into a state dict")
    if dist.get_rank() == 0:
        model.state_dict()  # nothing is moved, and nothing written
    evaluate("looked at by one rank")
    return seen


def averages():
    """Losses of a step after weights were replaced for an evaluation through `.data`, of models with copies and not."""
    data, found = list(batches(4, dist.get_rank())), []
    for fields in ({}, {"secondary": {"scope": "none"}, **WHOLE}):
        model = fsdp2.apply(sharded(), "zeropp", **fields)
        losses, optimizer = [], adamw(model)
        losses += trained(model, data[:2], optimizer)
        model.reshard()
        locals_of = [param.to_local().data for param in model.parameters()]
        own = [local.clone() for local in locals_of]
        for local in locals_of:
            local.mul_(0.5)
        with torch.no_grad():
            losses += [loss_of(model, data[0]).item() for _ in range(2)]
        model.reshard()
        for local, value in zip(locals_of, own):
            local.copy_(value)
        losses += trained(model, data[2:], optimizer)
        found.append(losses)
    return found


def evaluated_between_steps(recipe, policy, context):
    """Losses of steps with evaluations in between, in a context."""
    data, losses = list(batches(4, dist.get_rank())), []
    model = fsdp2.apply(sharded(policy), recipe)
    optimizer = adamw(model)
    for first in (0, 2):
        losses += trained(model, data[first : first + 2], optimizer)
        with context():
            losses.append(loss_of(model, data[0]).item())
        model.reshard()
    return losses


def written_by_one_rank(recipe, policy=None):
    """(losses, stock's) where one rank alone writes some of its part after a step."""
    data, found = list(batches(4, dist.get_rank())), []
    for name in (recipe, None):
        model = sharded(policy)
        if name:
            fsdp2.apply(model, name)
        optimizer = adamw(model)
        losses = trained(model, data[:2], optimizer)
        if dist.get_rank() == 0:
            with torch.no_grad():
                model.model.embed_tokens.weight.to_local()[0].zero_()
        found.append(losses + trained(model, data[2:], optimizer))
    return found


def left_exact(wrap):
    """(bytes of weights between nodes per step, the start table) where some modules are left exact behind wrappers."""
    before, found = len(printed()), {}
    for pattern in ("layers.0.mlp", "nowhere"):
        model = fsdp2.apply(sharded(BF16, wrap=wrap), "zeropp", weights={"skip_modules": [pattern]})
        trained(model, batches(2, dist.get_rank()))
        found[pattern] = fsdp2.wire_report(model)["per_step"]["weights_forward"]["inter"]
    return found, printed()[before:]


def accumulated(recipe, how, policy=None):
    """Gradients of three micro-batches, and bytes of gradients between nodes: None, by "sync", or by "last"."""
    data = list(batches(3, dist.get_rank()))
    model = sharded(policy)
    if recipe:
        fsdp2.apply(model, recipe, **EXACT)
    for index, tokens in enumerate(data):
        last = index == len(data) - 1
        if how == "sync":
            model.set_requires_gradient_sync(last)
        if how == "last":
            model.set_is_last_backward(last)
        loss_of(model, tokens).backward()
    grads = {name: param.grad.full_tensor().clone() for name, param in model.named_parameters()}
    if recipe is None:
        return grads, None
    optimizer = adamw(model)
    optimizer.step()
    return grads, fsdp2.wire_report(model)["per_step"]["gradients"]["inter"]


def micro_batches_cut_short():
    """Gradients after micro-batches that another optimizer's step, or zero_grad(), came between, and errors of a step
    without a last one, and of a last one that leaves parameters out."""
    data, found = list(batches(2, dist.get_rank())), {}

    def begun():
        model = fsdp2.apply(sharded(make=odd), "zeropp", **EXACT)
        model.set_is_last_backward(False)
        loss_of(model, data[0]).backward()
        return model, adamw(model)

    def ended(model):
        model.set_is_last_backward(True)
        loss_of(model, data[1]).backward()
        return {name: param.grad.full_tensor().clone() for name, param in model.named_parameters()}

    found["both"] = ended(begun()[0])
    model, _ = begun()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    other(torch.ones(2)).sum().backward()
    optimizer.step()
    found["another optimizer"] = ended(model)
    model, optimizer = begun()
    optimizer.zero_grad()
    found["dropped"] = ended(model)
    found["second"] = ended(fsdp2.apply(sharded(make=odd), "zeropp", **EXACT))
    model, optimizer = begun()
    optimizer.zero_grad(set_to_none=False)
    found["zeros"] = attempt(lambda: ended(model))
    model, optimizer = begun()
    found["no last"] = attempt(optimizer.step)
    model, _ = begun()
    model.set_is_last_backward(True)
    found["left out"] = attempt(lambda: model(data[1]).backward())
    model, optimizer = begun()
    optimizer.zero_grad()
    model.set_is_last_backward(True)
    model(input_ids=data[1], labels=data[1], skip=(1,)).loss.backward()
    found["given up, and skipped"] = attempt(optimizer.step)
    return found


def unfrozen_between_steps(recipe, on=None):
    """Gradients of two micro-batches with other parameters frozen in each step, and what a change between them says."""
    data = list(batches(2, dist.get_rank()))
    model = on_copies(recipe, EXACT if recipe else {}) if on == "copies" else sharded()
    if recipe and on != "copies":
        fsdp2.apply(model, recipe, **EXACT)
    optimizer, found = adamw(model, lr=0.0), []

    def accumulate(trained, between=()):
        for index, (tokens, frozen) in enumerate(zip(data, (trained, between or trained))):
            for name, param in model.named_parameters():
                param.requires_grad_(any(part in name for part in frozen))
            model.set_is_last_backward(index == 1)
            loss_of(model, tokens).backward()
        return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}

    for trained in (["q_proj", "o_proj"], ["k_proj", "o_proj"], ["q_proj", "k_proj", "o_proj"], ["o_proj"]):
        found.append(accumulate(trained))
        optimizer.step()
        optimizer.zero_grad()
    said = attempt(lambda: accumulate(["q_proj"], ["q_proj", "k_proj"])) if recipe else None
    return found, said


def gradients(recipe=None, change=None, policy=None, skip=(), make=llama):
    """Gradients of a batch."""
    model = sharded(policy, make=make)
    if change is not None:
        change(model)
    if recipe:
        fsdp2.apply(model, recipe, **EXACT)
    tokens = next(batches(1, dist.get_rank()))
    more = {"skip": skip} if skip else {}
    model(input_ids=tokens, labels=tokens, **more).loss.backward()
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients_beside_stock(change=None, skip=(), make=llama, recipe="zeropp", factor=1.0):
    """(gradients of a recipe, stock's times a factor), where `change` was called on the recipe's model alone."""
    stock = gradients(skip=skip, make=make)
    return gradients(recipe, change, skip=skip, make=make), {name: factor * grad for name, grad in stock.items()}


def divided_by(number, model):
    for module in filter(lambda each: isinstance(each, FSDPModule), model.modules()):
        module.set_gradient_divide_factor(number)


def summed(model):
    for module in filter(lambda each: isinstance(each, FSDPModule), model.modules()):
        module.set_force_sum_reduction_for_comms(True)


def freeze(model):
    for name, param in model.named_parameters():
        param.requires_grad_("mlp" in name)


OFFLOADED = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


def loaded_anew():
    """Losses of models whose parameters were replaced by others after fully_shard, as loading does."""
    data, found = list(batches(3, dist.get_rank())), []
    for recipe in (None, "lossless", "zeropp"):
        model = sharded()
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(1.25 * param.detach()))
        if recipe:
            fsdp2.apply(model, recipe)
        found.append(trained(model, data))
    return found


def in_a_wrapper():
    """Losses of a model of which only the blocks are sharded, inside of a module that is not; of stock and zeropp."""
    data, found = list(batches(3, dist.get_rank())), []
    for recipe in (None, "lossless", "zeropp"):
        torch.manual_seed(0)
        inner = llama()
        for block in inner.model.layers:
            fully_shard(block, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model = _Wrapper(inner)
        if recipe:
            fsdp2.apply(model, recipe)
        sharded_params = [param for block in inner.model.layers for param in block.parameters()]
        found.append(trained(model, data, torch.optim.AdamW(sharded_params, lr=1e-3)))
    return found


class _Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


def ways():
    """{way: losses and weights} of ways to shard, which are the same numbers."""
    data = list(batches(3, dist.get_rank()))
    found = {}
    for name, how in {
        "plain": {},
        "kept after forward": {"reshard_after_forward": False},
        "checkpointed": {"wrap": checkpoint_wrapper},
        "compiled": {"wrap": functools.partial(torch.compile, backend="aot_eager")},
    }.items():
        losses, weights, _ = run("zeropp", data, **how)
        found[name] = losses, {key.replace("_checkpoint_wrapped_module.", ""): w for key, w in weights.items()}
        found[name][1].update({k.replace("_orig_mod.", ""): found[name][1].pop(k) for k in list(found[name][1])})
    return found


def resumed(recipe, fields=None, copies=1):
    """(losses and weights of a run that goes on, of one that loads its checkpoint), by torch.distributed.checkpoint."""
    folder, data = shared_folder(), list(batches(4, dist.get_rank()))

    def made():
        if copies > 1:
            return on_copies(recipe, fields, copies, policy=BF16)
        return fsdp2.apply(sharded(BF16), recipe, **(fields or {}))

    model = made()
    optimizer = adamw(model)
    trained(model, data[:2], optimizer)

    def state_of(model, optimizer):
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states, "zeropp_fp8": fsdp2.extra_state(model)}

    dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    went_on = trained(model, data[2:], optimizer), full(model)
    other = made()
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(0.1)
    optimizer = adamw(other)
    trained(other, data[:1], optimizer)
    state = state_of(other, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return went_on, (trained(other, data[2:], optimizer), full(other))


def steps_after_loading():
    """Steps that the report counts: after torch's state dict has made states by an empty step, and after two more."""
    model = fsdp2.apply(sharded(), "zeropp")
    optimizer = adamw(model)
    get_state_dict(model, optimizer)
    counted = [fsdp2.wire_report(model)["steps"]]
    trained(model, batches(2, dist.get_rank()), optimizer)
    return [*counted, fsdp2.wire_report(model)["steps"]]


def in_a_list():
    """(parameters of the start table, modules of it) of a model two of whose modules were sharded as one list."""
    mesh, before = init_device_mesh("cpu", (dist.get_world_size(),)), len(printed())
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    fully_shard([model[1], model[2]], mesh=mesh)
    fsdp2.apply(fully_shard(model, mesh=mesh), "lossless")
    model(torch.ones(2, 8)).sum().backward()
    return sum(p.numel() for p in model.parameters()), printed()[before:]


def _gathering_itself():
    model = sharded()
    model.lm_head.weight._local_tensor.fsdp_pre_all_gather = None
    return model


def copies_mesh(copies=2):
    """Copies of a model, each sharded over as many of the ranks."""
    return init_device_mesh("cpu", (copies, dist.get_world_size() // copies), mesh_dim_names=("replicate", "shard"))


def on_copies(recipe, fields=None, copies=2, **how):
    """A model with copies in equal parts of the ranks; None: torch's HSDP."""
    mesh = copies_mesh(copies)
    if recipe is None:
        return sharded(mesh=mesh, **how)
    model = sharded(mesh=mesh["shard"], **how)
    return fsdp2.apply(model, recipe, replicate=mesh["replicate"], **(fields or {}))


def replicated(recipe, policy=None, make=llama, fields=None, skip=(), copies=2):
    """(losses, weights, bytes of gradients between copies per step) with copies in equal parts of the ranks."""
    model, more = on_copies(recipe, fields, copies, policy=policy, make=make), {"skip": skip} if skip else {}
    losses = trained(model, list(batches(4, dist.get_rank())), **more)
    report = fsdp2.wire_report(model) if recipe else {}
    sent = [report[table]["gradients"]["inter"] for table in ("per_step", "stock_per_step") if recipe]
    return losses, full(model), *(sent or [None, None])


def rounded_once():
    """(gradients of two copies, the mean over ranks of each one's own gradients, rounded in the wire's format)."""
    model, tokens = on_copies("zeropp", EXACT), next(batches(1, dist.get_rank()))
    wire_format = fsdp2.host_of(model).session.formats.between
    loss_of(model, tokens).backward()
    torch.manual_seed(0)
    plain = llama()
    loss_of(plain, tokens).backward()
    expected = {}
    for name, param in plain.named_parameters():
        own = param.grad
        if own.dim() > 1:
            codes = torch.empty(1, wire_format.payload_bytes(own.numel()), dtype=torch.uint8)
            wire_format.encode_rows(own.view(1, -1), codes)
            own = wire_format.decode_rows(codes, own.numel(), torch.float32).view_as(own)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own.contiguous())
        expected[name] = torch.stack(everyone).mean(0)
    return {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}, expected


def replicated_micro_batches(recipe, how, make=llama, change=None):
    """Gradients of three micro-batches on copies, bytes between them, and the error of a step that comes too early.

    `make` odd: of a loss that leaves parameters out.
    """
    data = list(batches(3, dist.get_rank()))
    model = on_copies(recipe, EXACT if recipe == "zeropp" else {}, make=make)
    if change is not None:
        change(model)
    optimizer = adamw(model)
    for index, tokens in enumerate(data):
        last = index == len(data) - 1
        say = {"sync": model.set_requires_gradient_sync, "copies": model.set_requires_all_reduce}
        say = {**say, "last": model.set_is_last_backward}.get(how)
        if say:
            say(last)
        (model(tokens) if make is odd else loss_of(model, tokens)).backward()
    grads = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    sent = fsdp2.wire_report(model)["per_step"]["gradients"]["inter"] if recipe else None
    optimizer.zero_grad()
    early = None
    if recipe and how == "copies" and make is llama:
        model.set_requires_all_reduce(False)
        loss_of(model, data[0]).backward()
        early = attempt(optimizer.step)
    return grads, sent, early


def residuals_of_three_copies():
    """Losses of stock and with residuals where, without vectors, gradients take another way between three copies."""
    data, found = list(batches(4, dist.get_rank())), []
    for recipe, fields in ((None, {}), ("zeropp", {"gradients": {"error_feedback": True}})):
        model = on_copies(recipe, fields, copies=3, make=odd)
        optimizer = adamw(model)
        losses = trained(model, data[:2], optimizer)
        for param in model.parameters():
            param.requires_grad_(param.dim() > 1)
        losses += trained(model, data[2:3], optimizer)
        model.requires_grad_(True)
        found.append(losses + trained(model, data[3:], optimizer))
    return found


def two_dtypes():
    """Losses of modules whose frozen parameters are in bf16, of stock and of a recipe; computed in fp32."""
    data, found = list(batches(3, dist.get_rank())), []
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for recipe in (None, "lossless", "zeropp"):
        model = sharded(policy, make=TwoDtypes)
        if recipe:
            fsdp2.apply(model, recipe)
        found.append((trained(model, data), full(model)))
    return found


class TwoDtypes(Odd):
    """The first linear layer of each block is frozen, in bf16."""

    def __init__(self):
        super().__init__()
        del self.__dict__["_modules"]["model"]
        for layer in self.layers:
            layer[0].requires_grad_(False).bfloat16()
            layer[0].register_forward_pre_hook(lambda module, args: args[0].bfloat16())
            layer[1].register_forward_pre_hook(lambda module, args: args[0].float())


def _over_two_meshes():
    """A module whose parameters lie on two meshes, as torch 2.13 lets a placement function say."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    first, second = (FSDPMeshInfo(mesh[name], shard_mesh_dim=0) for name in ("a", "b"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    others = {id(param) for param in model[0].parameters()}

    def placed(param):
        return ShardPlacementResult(Shard(0), second if id(param) in others else first)

    return fully_shard(model, mesh=mesh["a"], shard_placement_fn=placed)


def _with_codes():
    """A model that is in FP32 but for a frozen parameter, which has bytes."""

    def add(model):
        codes = torch.zeros(64, 32, dtype=torch.uint8)
        blocks_of(model)[0].register_parameter("codes", nn.Parameter(codes, requires_grad=False))

    return sharded(adapt=add)


def _with_memory_of_the_group():
    model = sharded()
    model.set_allocate_memory_from_process_group_for_comm(True)
    return model


def refused():
    """Errors of apply(), by model and field, and of a model that it cannot serve."""
    world = dist.get_world_size()
    twice = fsdp2.apply(sharded(), "zeropp")
    resharded = fsdp2.apply(sharded(reshard_after_forward=2), "zeropp")
    hsdp = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    tokens = next(batches(1, dist.get_rank()))
    return {
        "not sharded": attempt(lambda: fsdp2.apply(llama())),
        "twice": attempt(lambda: fsdp2.apply(twice)),
        "HSDP": attempt(lambda: fsdp2.apply(sharded(mesh=hsdp))),
        "copies": attempt(lambda: fsdp2.apply(sharded(mesh=hsdp["shard"]), replicate=hsdp)),
        "same copy": attempt(lambda: fsdp2.apply(sharded(mesh=hsdp["shard"]), replicate=hsdp["shard"])),
        "symmetric memory": attempt(lambda: fsdp2.apply(_with_memory_of_the_group())),
        "later": attempt(lambda: twice.set_allocate_memory_from_process_group_for_comm(True)),
        "recipe": attempt(lambda: fsdp2.apply(sharded(BF16), "fp8-lm")),
        "several groups": attempt(lambda: fsdp2.apply(_over_two_meshes())),
        "no nodes": attempt(lambda: fsdp2.apply(sharded(BF16), "zeropp-pcie")),
        "added elsewhere": attempt(lambda: fsdp2.apply(sharded(), "zeropp", gradients={"accumulate_in": "world"})),
        "fp16": attempt(lambda: fsdp2.apply(sharded(FP16), "zeropp", gradients={"error_feedback": True})),
        "off": fsdp2.apply(sharded(), "zeropp", enabled=False) is not None,
        "field": attempt(lambda: fsdp2.apply(sharded(BF16), "zeropp", numerics={"every": 5})),
        "unknown": attempt(lambda: fsdp2.apply(sharded(), "zeropp", wheights={})),
        "exact in 32 bits": attempt(lambda: fsdp2.apply(sharded(), "zeropp-exact")),
        "copies print once": _printed_by_copies(),
        "nodes": attempt(lambda: fsdp2.apply(sharded(), "zeropp", ranks_per_node=3)),
        "codes": attempt(lambda: fsdp2.apply(_with_codes())),
        "gathers itself": attempt(lambda: fsdp2.apply(_gathering_itself())),
        "not applied": attempt(lambda: fsdp2.wire_report(sharded())),
        "fewer ranks": attempt(lambda: loss_of(resharded, tokens).backward()),
    }


def _printed_by_copies():
    before = len(printed())
    on_copies("zeropp")
    return printed()[before:]


def table():
    """All that rank 0 prints, at start and while it trains."""
    before = len(printed())
    model = fsdp2.apply(sharded(BF16), "zeropp", report={"every": 2})
    trained(model, batches(5, dist.get_rank()))
    fsdp2.wire_report(model)
    return printed()[before:]


def collected():
    """Whether a model that nothing refers to any more is gone, and its hook with it."""
    import gc
    import weakref

    from torch.optim import optimizer

    hooks = len(optimizer._global_optimizer_post_hooks)
    model = fsdp2.apply(sharded(), "zeropp")
    trained(model, batches(1, dist.get_rank()))
    host = weakref.ref(fsdp2.host_of(model))
    assert isinstance(model, FSDPModule)
    del model
    gc.collect()
    with contextlib.suppress(AttributeError):
        assert host() is None
    return host() is None, len(optimizer._global_optimizer_post_hooks) - hooks
