"""Jobs about hpZ, gradients, accuracy and checkpoints that run on ranks."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from models import KEPT, batches, build, ds_config, full_weights, llama, make_engine, secondary_bytes, section, train
from ranks import printed
from running import Spec, allow_fp16_on_cpu, evaluated, forward_backward, loss_of, same, shared_folder, switch, trained

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import SENT
from zeropp_fp8.zero.gather.adopted import unit_of

# -- hpZ -----------------------------------------------------------------------------------------------------------


class InterCounter:
    """Bytes this rank sent between nodes, in and outside steps, since the last call."""

    def __init__(self, engine):
        self.ledger = engine.zeropp_fp8_session.ledger
        self.last = 0
        self()

    def __call__(self):
        counters = self.ledger.outside, self.ledger.pending, self.ledger.of_run.bytes
        now = sum(n for each in counters for (table, *_, link), n in each.items() if (table, link) == (SENT, "inter"))
        now, self.last = now - self.last, now
        return now


def secondary_shards(scope, node_size=2):
    """What each action moves between nodes, and how many bytes the secondary shards hold."""
    import deepspeed

    switch(True)
    config = ds_config(
        section(
            "zeropp",
            ranks_per_node=node_size,
            secondary={"scope": scope},
            gradients={"intra_format": "none", "inter_format": "none"},
        ),
        gradient_accumulation_steps=3,
    )
    engine = make_engine(llama(), config)
    gatherer = engine.optimizer.gatherer
    tokens = list(batches(8, dist.get_rank()))
    moved = InterCounter(engine)
    log = {}

    def forward():
        return loss_of(engine, tokens[0])

    with torch.no_grad():
        first = forward().item()
        log["first evaluation"] = moved()
        assert forward().item() == first
        log["second evaluation"] = moved()
    log["held"] = secondary_bytes(gatherer)
    loss = forward()
    assert loss.item() == first
    log["training forward"] = moved()
    engine.backward(loss)
    engine.step()
    moved()
    loss = forward()
    log["second micro-batch"] = moved()
    engine.backward(loss)
    engine.step()
    engine.backward(forward())
    moved()
    engine.step()
    log["held after step"] = secondary_bytes(gatherer)
    moved()
    with torch.no_grad():
        assert forward().item() != first
        log["after step"] = moved()
        generated = engine.module.generate(input_ids=tokens[0][:, :4], max_new_tokens=3, do_sample=False)
        log["generation"] = moved()
    assert generated.shape == (2, 7)

    # GatheredParameters is exact, also for parameters that are there in quantized form, and a write is seen.
    weight = engine.module.model.embed_tokens.weight
    before = full_weights(engine.module)
    shard = weight.ds_tensor.clone()
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
        exact = torch.equal(weight.detach(), before["model.embed_tokens.weight"])
    log["exact"] = exact and torch.equal(weight.ds_tensor, shard)
    with torch.no_grad():
        with_weights = forward().item()
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            if dist.get_rank() == 0:
                weight.mul_(0)
        log["write is seen"] = forward().item() != with_weights
    return log


def persistent_parameters_stay_exact():
    """With DeepSpeed's default thresholds all parameters persist; what GatheredParameters shows must be the shards."""
    import deepspeed

    switch(True)
    engine = make_engine(
        llama(), ds_config(section("zeropp"), zero_optimization={"stage3_param_persistence_threshold": 10**6})
    )
    train(engine, 2)
    lossy = [p for p in engine.module.parameters() if sharded.known(p).lossy]
    shards = {name: p.ds_tensor.clone() for name, p in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        shown = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    rank = dist.get_rank()
    for name, p in engine.module.named_parameters():
        assert torch.equal(p.ds_tensor, shards[name])
        size = p.ds_tensor.numel()
        own = shown[name].reshape(-1)[rank * size : (rank + 1) * size]
        assert torch.equal(own, shards[name][: own.numel()])
    report = zeropp_fp8.wire_report(engine)
    return len(lossy), report


def several_inits_with_hpz():
    """Four models under zero.Init with the in-tree hpZ key, as RLHF needs; two with optimizers, two without."""
    import deepspeed

    switch(True)
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
    config = ds_config(zero_optimization=keys, dtype="bf16")
    tokens = next(batches(1, dist.get_rank()))
    losses = []
    for index in range(4):
        model = build(lambda i=index: llama(seed=i % 2), config, zero_init=True)
        engine = make_engine(model, config, optimizer="adamw" if index < 2 else None)
        losses.append(evaluated(engine, tokens))
        if index >= 2:
            assert isinstance(engine.optimizer, deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload)
            report = zeropp_fp8.wire_report(engine)
            assert report["steps"] == 0 and report["outside_steps"]["inter"] > 0
    return losses, printed()


def quantized_nontrainable_weights():
    """The in-tree key alone: frozen matrices rest and travel in int8, trainable ones in full."""
    switch(True)
    model = llama()
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1." in name)
    engine = make_engine(model, ds_config(zero_optimization={"zero_quantized_nontrainable_weights": True}))
    losses = train(engine, 2)
    formats = {name: repr(unit_of(p).format_of(p)) for name, p in engine.module.named_parameters()}
    at_rest = {name: p.ds_tensor.dtype for name, p in engine.module.named_parameters()}
    return losses, formats, at_rest, {n: p.requires_grad for n, p in engine.module.named_parameters()}, printed()


class _PairGroups:
    """A model-parallel unit whose data-parallel groups are every second rank, as with tensor parallelism of 2."""

    def __init__(self):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.mine = groups[dist.get_rank() % 2]

    def get_data_parallel_group(self):
        return self.mine


def data_parallel_group_is_not_the_world():
    """Topology and collectives follow the data-parallel group: 2 of 4 ranks, one on each node."""
    from zeropp_fp8.comm import make_topology, quantized_all_gather, quantized_reduce_scatter
    from zeropp_fp8.formats import make_format

    rank = dist.get_rank()
    topology = make_topology(_PairGroups().mine, ranks_per_node=1)
    assert (topology.nodes, topology.ranks_per_node, topology.rank) == (2, 1, rank // 2)
    gathered = quantized_all_gather(torch.full((64,), float(rank)), make_format("int8"), topology)
    reduced = quantized_reduce_scatter(
        [torch.full((8, 8), float(rank))], topology, make_format("int8"), make_format("int8")
    )
    return gathered[0].item(), gathered[-1].item(), reduced[0].unique().tolist()


def padding_of_shards(recipe, fields):
    """(loss, loss with NaN beyond the end of every parameter, shards that have such a part)."""
    switch(True)
    engine = make_engine(llama(), ds_config(section(recipe, ranks_per_node=1, **fields)))
    session, tokens = engine.zeropp_fp8_session, next(batches(1, 0))
    losses, padded = [], 0
    for _ in range(2):
        losses.append(evaluated(engine, tokens))
        for param in engine.module.parameters():
            beyond = param.ds_tensor.data.view(-1)[session.own_numel(param) :]
            beyond.fill_(torch.nan)
            padded += bool(beyond.numel())
        engine.optimizer.gatherer.weights_changed()
    return *losses, padded


def a_part_called_by_itself(calls):
    """(fetches that the order of an engine without optimizer holds, units that a call fetches ahead)."""
    switch(True)
    zero = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**6}
    config = ds_config(section("zeropp", ranks_per_node=1, secondary={"scope": "none"}), zero_optimization=zero)
    engine = make_engine(llama(layers=3), config, optimizer=None)
    offload, seen = engine.optimizer, []
    start = offload.gatherer.hops.start
    offload.gatherer.hops.start = lambda unit, ahead=False: (seen.append(ahead), start(unit, ahead))
    for _ in range(calls):
        seen.clear()
        with torch.no_grad():
            engine.module.model(input_ids=next(batches(1, 0)))
    trace = offload.param_coordinator._trace
    return len(trace._now) + len(trace._known), sum(seen)


# -- gradients -----------------------------------------------------------------------------------------------------


FORMATS = {
    "int8/int8": {"intra_format": "int8", "inter_format": "int8", "hadamard": False},
    "int8/int4-hadamard": {"intra_format": "int8", "inter_format": "int4"},
    "e4m3/e4m3": {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "hadamard": False},
}


def reduced_gradient(dtype, formats, sequences=128):
    """Cosine and ratio of norms of the reduced gradient of one batch to stock's; weights travel exactly."""
    from deepspeed.utils import safe_get_full_grad

    if dtype == "fp16":
        allow_fp16_on_cpu()
    per_rank = sequences // dist.get_world_size()
    tokens = next(batches(1, dist.get_rank(), batch=per_rank, length=48))

    def gradient(fields):
        switch(fields is not None)
        the_section = None if fields is None else section("zeropp", weights={"format": "none"}, gradients=fields)
        engine = make_engine(
            llama(layers=2, hidden=96), ds_config(the_section, dtype, train_micro_batch_size_per_gpu=per_rank)
        )
        forward_backward(engine, tokens)
        scale = engine.optimizer.loss_scale if dtype == "fp16" else 1.0
        grads = [safe_get_full_grad(p).double().flatten() / scale for p in engine.module.parameters()]
        return torch.cat(grads)

    stock, mine = gradient(None), gradient(FORMATS[formats])
    return torch.nn.functional.cosine_similarity(mine, stock, dim=0).item(), (mine.norm() / stock.norm()).item()


def overflow_is_seen():
    """A gradient with Inf on one rank skips the step on every rank, and training goes on."""
    allow_fp16_on_cpu()
    switch(True)
    fields = {"gradients": {"error_feedback": True}}
    config = ds_config(section("zeropp", **fields), fp16={"enabled": True, "initial_scale_power": 8})
    engine = make_engine(llama(), config)
    tokens = list(batches(6, dist.get_rank()))
    forward_backward(engine, tokens[0])
    engine.step()
    kept = len(engine.optimizer.reducer.error_feedback)
    before = full_weights(engine.module)
    loss = loss_of(engine, tokens[1])
    engine.backward(loss * (float("inf") if dist.get_rank() == 3 else 1.0))
    engine.step()
    dropped = len(engine.optimizer.reducer.error_feedback)
    after = full_weights(engine.module)
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    losses = [forward_backward(engine, t) or engine.step() for t in tokens[2:3]]
    engine.step()
    return engine.optimizer.overflow, unchanged, kept, dropped, losses, engine.skipped_steps


# -- accuracy ------------------------------------------------------------------------------------------------------


def library_bytes(limit=400_000):
    """Source text of the Python standard library as byte values."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data[:limit]), dtype=torch.uint8).long()


def held_out_losses(dtype, runs, ranks, steps=20, batch=8, length=32, peak_lr=2e-3):
    """{(recipe, seed): held-out loss} of each of `runs` after training on real text, and {(recipe, "report")}.

    Recipe None is stock. There are `ranks` streams of text, one a rank; on one rank that has the sequences of all, a
    batch is the same and nothing has to be sent.
    """
    text = library_bytes()
    train_text, held_out = text[:-40_000], text[-40_000:]
    streams = range(ranks) if dist.get_world_size() == 1 else [dist.get_rank()]
    results = {}

    def draw(text, generators, count):
        starts = torch.cat([torch.randint(0, len(text) - length, (count,), generator=g) for g in generators])
        return torch.stack([text[start : start + length] for start in starts])

    for recipe, seed in runs:
        switch(recipe is not None)
        kept = {} if recipe else KEPT
        config = ds_config(
            section(recipe) if recipe else None,
            dtype,
            train_micro_batch_size_per_gpu=batch * len(streams),
            zero_optimization=kept,
        )
        engine = make_engine(llama(seed=seed), config, lr=peak_lr)
        generators = [torch.Generator().manual_seed(100 * seed + stream) for stream in streams]
        for step in range(steps):
            for group in engine.optimizer.param_groups:
                group["lr"] = peak_lr * min(1.0, (step + 1) / 10)
            forward_backward(engine, draw(train_text, generators, batch))
            engine.step()
        tokens = draw(held_out, [torch.Generator().manual_seed(stream) for stream in streams], 32)
        with torch.no_grad():
            loss = loss_of(engine, tokens).detach().float()
        dist.all_reduce(loss)
        results[(recipe, seed)] = loss.item() / dist.get_world_size()
        if recipe is not None:
            results[(recipe, "report")] = zeropp_fp8.wire_report(engine)
        engine.destroy()
    return results


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoints(recipe, fields=None, dtype="bf16", evaluates=False, persistent=0, exchanges=True):
    """Save and resume; if it `exchanges`, also with stock, zero_to_fp32 and the consolidated 16-bit weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = shared_folder()
    tokens = list(batches(8, dist.get_rank()))
    zero = {"stage3_param_persistence_threshold": persistent}
    own = Spec(section(recipe, **(fields or {})), dtype, {"gradient_clipping": 1.0, "zero_optimization": zero})
    stock = Spec(None, dtype, {"gradient_clipping": 1.0})

    def resumed(spec, tag, seed):
        engine = spec.engine(llama(seed=seed))
        engine.load_checkpoint(folder, tag=tag)
        return engine

    engine = own.engine()
    trained(engine, tokens[:4])
    if evaluates:  # which encodes the weights that are saved
        evaluated(engine, tokens[0])
    engine.save_checkpoint(folder, tag="own")
    uninterrupted = trained(engine, tokens[4:])
    final = full_weights(engine.module)

    again = resumed(own, "own", seed=9)
    at_save = full_weights(again.module)
    losses = trained(again, tokens[4:])
    found = {"resume losses": (uninterrupted, losses), "resume weights": same(full_weights(again.module), final)}
    if not exchanges:
        return found

    in_stock = resumed(stock, "own", seed=9)
    found["stock losses"] = uninterrupted, trained(in_stock, tokens[4:])
    in_stock.save_checkpoint(folder, tag="stock")
    stock_weights = full_weights(in_stock.module)

    back = resumed(own, "stock", seed=5)
    back_weights = full_weights(back.module)
    consolidated = back._zero3_consolidated_16bit_state_dict()
    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, tag="own")
    lp = torch.bfloat16 if dtype == "bf16" else torch.float32

    def holds(these, those):
        return all(torch.equal(these[name].float(), those[name].float()) for name in those)

    return found | {
        "stock to own": same(back_weights, stock_weights),
        "consolidated": dist.get_rank() != 0 or holds(consolidated, back_weights),
        "zero_to_fp32": holds({name: weight.to(lp) for name, weight in fp32.items()}, at_save),
    }


def load_with_frozen_parameters():
    """hpZ and frozen parameters: after load_checkpoint outputs come from the loaded weights, not from old copies."""
    switch(True)
    folder = shared_folder()
    tokens = next(batches(1, dist.get_rank()))

    def engine_of(seed):
        model = llama(seed=seed)
        model.model.embed_tokens.weight.requires_grad_(False)
        for p in model.model.layers[0].parameters():
            p.requires_grad_(False)
        return make_engine(model, ds_config(section("zeropp")))

    saved = engine_of(0)
    saved.save_checkpoint(folder, tag="a")
    expected = evaluated(saved, tokens)
    other = engine_of(1)
    before = evaluated(other, tokens)  # fills secondary shards, frozen parameters' too
    other.load_checkpoint(folder, tag="a")
    return expected, before, evaluated(other, tokens)


# -- refusals ------------------------------------------------------------------------------------------------------


def refusals(cases):
    """The ConfigError each ds_config raises on this rank, from deepspeed.initialize and from zero.Init."""
    import deepspeed

    switch(True)
    messages = {}
    for name, (changes, through_init) in cases.items():
        config = ds_config(section("zeropp"))
        for path, value in changes.items():
            node = config
            *parents, last = path.split("/")
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = value
        try:
            if through_init:
                with deepspeed.zero.Init(config_dict_or_path=config):
                    pass
            else:
                make_engine(llama(), config)
            messages[name] = None
        except zeropp_fp8.ConfigError as error:
            messages[name] = str(error)
    return messages


def start_table(fields=None):
    """What a quantized engine and a stock engine print at start."""
    switch(True)
    engine = make_engine(llama(), ds_config(section("zeropp", **{**(fields or {}), "report": {"every": 2}})))
    train(engine, 2)
    make_engine(llama(), ds_config())
    return printed()
