"""Jobs about hpZ, gradients, accuracy and checkpoints that run on ranks."""

from __future__ import annotations

import functools
import itertools
import sysconfig
from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import safe_get_full_grad
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from models import KEPT, batches, full_weights, llama, secondary_bytes, section
from ranks import attempt, printed
from running import (
    LEFT,
    Spec,
    allow_fp16_on_cpu,
    backward,
    evaluate,
    evaluated,
    forward,
    loaded,
    on_engine,
    run,
    same,
    saved,
    scaled,
    see,
    shared_folder,
    step,
    update,
)

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.comm.ledger import SENT
from zeropp_fp8.zero.gather.attached import unit_of

# -- hpZ -----------------------------------------------------------------------------------------------------------


class Moved:
    """Bytes this rank has sent between nodes since the last count, in and outside steps, by the name of the count."""

    def __init__(self):
        self.last, self.log = 0, {}

    def __call__(self, name="something"):
        return on_engine(self.count, name)

    def count(self, engine, name):
        ledger = engine.zeropp_fp8_session.ledger
        counters = ledger.outside, ledger.pending, ledger.of_run.bytes
        now = sum(n for each in counters for (table, *_, link), n in each.items() if (table, link) == (SENT, "inter"))
        self.log[name], self.last = now - self.last, now


def secondary_shards(scope, node_size=2):
    """Return what each action moves between nodes, and how many bytes the secondary shards hold."""
    tokens, moved = next(batches(1, dist.get_rank())), Moved()
    log = moved.log

    def held(name):
        return on_engine(lambda engine: log.update({name: secondary_bytes(engine.optimizer.gatherer)}))

    def generate(engine):
        with torch.no_grad():
            generated = engine.module.generate(input_ids=tokens[:, :4], max_new_tokens=3, do_sample=False)
        assert generated.shape == (2, 7)

    def look(engine):
        """GatheredParameters is exact, also for parameters that are there in quantized form."""
        weight, before = engine.module.model.embed_tokens.weight, full_weights(engine.module)
        shard = weight.ds_tensor.clone()
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
            exact = torch.equal(weight.detach(), before["model.embed_tokens.weight"])
        log["exact"] = exact and torch.equal(weight.ds_tensor, shard)

    def write(engine):
        weight = engine.module.model.embed_tokens.weight
        with deepspeed.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            if dist.get_rank() == 0:
                weight.mul_(0)

    evaluation = evaluate(tokens)
    events = [
        *(moved(), evaluation, moved("first evaluation"), evaluation, moved("second evaluation"), held("held")),
        *(forward, moved("training forward"), backward, update, moved()),
        *(forward, moved("second micro-batch"), backward, update),
        *(forward, backward, moved(), update, held("held after step"), moved()),
        *(evaluation, moved("after step"), on_engine(generate), moved("generation")),
        *(on_engine(look), evaluation, on_engine(write), evaluation),
    ]
    exact = {"intra_format": "none", "inter_format": "none"}
    fields = {"secondary": {"scope": scope}, "weights": {"difference": "none"}}
    the_section = section("zeropp", ranks_per_node=node_size, gradients=exact, **fields)
    spec = Spec(the_section, config={"gradient_accumulation_steps": 3})
    losses = run(spec, events, data=itertools.repeat(tokens)).losses
    assert losses[0] == losses[1] == losses[2] != losses[5]
    return {**log, "write is seen": losses[7] != losses[6]}


def shown_and_there(engine):
    """(parameters that travel in low precision, bytes of a step); GatheredParameters shows what the shards are."""
    lossy = sum(sharded.known(p).lossy for p in engine.module.parameters())
    shards = {name: p.ds_tensor.clone() for name, p in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        shown = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    rank = dist.get_rank()
    for name, p in engine.module.named_parameters():
        assert torch.equal(p.ds_tensor, shards[name])
        size = p.ds_tensor.numel()
        own = shown[name].reshape(-1)[rank * size : (rank + 1) * size]
        assert torch.equal(own, shards[name][: own.numel()])
    return lossy, LEFT["bytes"](engine)


def persistent_parameters_stay_exact():
    """With DeepSpeed's default thresholds all parameters persist; what GatheredParameters shows must be the shards."""
    return run(Spec(section("zeropp"), config={"zero_optimization": KEPT}), [step, step, see(shown_and_there)]).seen[0]


def several_inits_with_hpz():
    """Four models under zero.Init with the in-tree hpZ key, as RLHF needs; two with optimizers, two without."""
    keys = {"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
    spec = Spec(None, "bf16", {"zero_optimization": keys}, zero_init=True, plugin=True)
    tokens, engines, losses = next(batches(1, dist.get_rank())), [], []
    for index in range(4):
        model, optimizer = functools.partial(llama, seed=index % 2), "adamw" if index < 2 else None
        engines.append(replace(spec, model=model, optimizer=optimizer).engine())
        losses.append(evaluated(engines[-1], tokens))
    for engine in engines[2:]:
        assert isinstance(engine.optimizer, DeepSpeedZeRoOffload)
        report = zeropp_fp8.wire_report(engine)
        assert report["steps"] == 0 and report["outside_steps"]["inter"] > 0
    return losses, printed()


def quantized_nontrainable_weights():
    """The in-tree key alone: frozen matrices rest and travel in int8, trainable ones in full."""

    def freeze(model):
        for name, p in model.named_parameters():
            p.requires_grad_("layers.1." in name)
        return model

    def look(engine):
        named = dict(engine.module.named_parameters())
        formats = {name: repr(unit_of(p).format_of(p)) for name, p in named.items()}
        at_rest = {name: p.ds_tensor.dtype for name, p in named.items()}
        return formats, at_rest, {name: p.requires_grad for name, p in named.items()}

    config = {"zero_optimization": {"zero_quantized_nontrainable_weights": True}}
    trace = run(Spec(None, config=config, adapted=freeze, plugin=True), [step, step, see(look)])
    return trace.losses, *trace.seen[0], printed()


class _PairGroups:
    """A model-parallel unit whose data-parallel groups are every second rank, as with tensor parallelism of 2."""

    def __init__(self):
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.mine = groups[dist.get_rank() % 2]

    def get_data_parallel_group(self):
        return self.mine


def data_parallel_group_is_not_the_world():
    """Topology and collectives follow the data-parallel group: 2 of 4 ranks, one on each node."""
    from comm_jobs import quantized_all_gather, quantized_reduce_scatter

    from zeropp_fp8.comm import make_topology
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

    def spoil(engine):
        padded = 0
        for param in engine.module.parameters():
            beyond = param.ds_tensor.data.view(-1)[engine.zeropp_fp8_session.own_numel(param) :]
            beyond.fill_(torch.nan)
            padded += bool(beyond.numel())
        engine.optimizer.gatherer.weights_changed()
        return padded

    evaluation = evaluate(next(batches(1, 0)))
    spec = Spec(section(recipe, ranks_per_node=1, **fields))
    trace = run(spec, [evaluation, see(spoil), evaluation])
    return *trace.losses, *trace.seen


def a_part_called_by_itself(numbers_of_calls):
    """For each: (fetches in the order of an engine without optimizer, units that a call fetches ahead)."""
    zero = {"stage3_prefetch_bucket_size": 10**6, "stage3_max_live_parameters": 10**6}
    the_section = section("zeropp", ranks_per_node=1, secondary={"scope": "none"})
    spec = Spec(the_section, "fp32", {"zero_optimization": zero}, functools.partial(llama, layers=3), None)

    def look(engine, calls):
        offload, seen = engine.optimizer, []
        start = offload.gatherer.hops.start
        offload.gatherer.hops.start = lambda unit, ahead=False: (seen.append(ahead), start(unit, ahead))
        for _ in range(calls):
            seen.clear()
            with torch.no_grad():
                engine.module.model(input_ids=next(batches(1, 0)))
        trace = offload.param_coordinator._trace
        return len(trace._now) + len(trace._known), sum(seen)

    return [run(spec, [see(look, calls)]).seen[0] for calls in numbers_of_calls]


# -- gradients -----------------------------------------------------------------------------------------------------


# {formats: (section, least cosine, how far the norm may be off)}: right to a per mille with int8, to 3 % with int4.
FORMATS = {
    "int8/int8": ({"intra_format": "int8", "inter_format": "int8", "hadamard": False}, 0.9995, 0.005),
    "int8/int4-hadamard": ({"intra_format": "int8", "inter_format": "int4"}, 0.99, 0.03),
    "e4m3/e4m3": ({"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "hadamard": False}, 0.999, 0.005),
}


def reduced_gradient(dtype, formats, sequences=128):
    """Cosine and ratio of norms of the reduced gradient of one batch to stock's; weights travel exactly."""
    if dtype == "fp16":
        allow_fp16_on_cpu()
    per_rank = sequences // dist.get_world_size()
    tokens = next(batches(1, dist.get_rank(), batch=per_rank, length=48))

    def look(engine):
        scale = engine.optimizer.loss_scale if dtype == "fp16" else 1.0
        return torch.cat([safe_get_full_grad(p).double().flatten() / scale for p in engine.module.parameters()])

    def gradient(the_section):
        model = functools.partial(llama, hidden=96)
        spec = Spec(the_section, dtype, {"train_micro_batch_size_per_gpu": per_rank}, model)
        return run(spec, [forward, backward, see(look)], data=[tokens]).seen[0]

    stock = gradient(None)
    mine = gradient(section("zeropp", weights={"format": "none"}, gradients=FORMATS[formats][0]))
    return torch.nn.functional.cosine_similarity(mine, stock, dim=0).item(), (mine.norm() / stock.norm()).item()


def overflow_is_seen():
    """A gradient with Inf on one rank skips the step on every rank, and training goes on."""
    allow_fp16_on_cpu()
    look = see(lambda engine: (len(engine.optimizer.reducer.error_feedback), full_weights(engine.module)))
    infinite = scaled(float("inf") if dist.get_rank() == 3 else 1.0)
    end = see(lambda engine: (engine.optimizer.overflow, engine.skipped_steps))
    events = [step, look, forward, infinite, backward, update, look, step, end]
    trace = run(Spec(section("zeropp", gradients={"error_feedback": True}), "fp16"), events)
    (kept, before), (dropped, after), (overflow, skipped) = trace.seen
    return overflow, same(before, after), kept, dropped, trace.losses[2:], skipped


# -- accuracy ------------------------------------------------------------------------------------------------------


# Files that are the same from Python 3.10 to 3.13: with all files a loss would depend on the interpreter.
LIBRARY = ["tracemalloc", "stringprep", "_markupbase", "pyclbr", "xml/sax/handler", "xml/sax/saxutils"]
LIBRARY += ["xml/dom/xmlbuilder", "email/_encoded_words", "multiprocessing/heap", "multiprocessing/reduction"]
LIBRARY += ["json/__init__", "urllib/robotparser", "difflib", "optparse"]


def library_bytes():
    """Source text of the Python standard library as byte values, 294,072."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(folder.joinpath(f"{name}.py").read_bytes() for name in LIBRARY)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


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

    def set_rate(engine, rate):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate

    rates = [peak_lr * min(1.0, (number + 1) / 10) for number in range(steps)]
    held_out = draw(held_out, [torch.Generator().manual_seed(stream) for stream in streams], 32)
    for recipe, seed in runs:
        config = {"train_micro_batch_size_per_gpu": batch * len(streams), "zero_optimization": {} if recipe else KEPT}
        spec = Spec(recipe and section(recipe), dtype, config, functools.partial(llama, seed=seed), lr=peak_lr)
        generators = [torch.Generator().manual_seed(100 * seed + stream) for stream in streams]
        data = (draw(train_text, generators, batch) for _ in range(steps))
        events = [event for rate in rates for event in (on_engine(set_rate, rate), step)]
        reports = [see(zeropp_fp8.wire_report)] * (recipe is not None)
        trace = run(spec, [*events, evaluate(held_out), *reports], data=data)
        loss = torch.tensor(trace.losses[-1])
        dist.all_reduce(loss)
        results[(recipe, seed)] = loss.item() / dist.get_world_size()
        if recipe is not None:
            (results[(recipe, "report")],) = trace.seen
    return results


# -- checkpoints ---------------------------------------------------------------------------------------------------


def checkpoints(recipe, fields=None, dtype="bf16", evaluates=False, persistent=0, exchanges=True):
    """Save and resume; if it `exchanges`, also with stock, zero_to_fp32 and the consolidated 16-bit weights."""
    folder, tokens, steps = shared_folder(), list(batches(8, dist.get_rank())), [step] * 4
    zero = {"stage3_param_persistence_threshold": persistent}
    own = Spec(section(recipe, **(fields or {})), dtype, {"gradient_clipping": 1.0, "zero_optimization": zero})
    stock = Spec(None, dtype, {"gradient_clipping": 1.0})

    def resumed(spec, tag, seed, events):
        spec = replace(spec, model=functools.partial(llama, seed=seed))
        return run(spec, [loaded(folder, tag), *events], ("weights",), tokens[4:])

    encoded = [evaluate(tokens[0])] * evaluates  # the weights that are saved
    trace = run(own, [*steps, *encoded, saved(folder, "own"), *steps], ("weights",), tokens)
    uninterrupted = trace.losses[-4:]
    again = resumed(own, "own", 9, [see(LEFT["weights"]), *steps])
    found = {"resume losses": (uninterrupted, again.losses), "resume weights": same(again.weights, trace.weights)}
    if not exchanges:
        return found

    in_stock = resumed(stock, "own", 9, [*steps, saved(folder, "stock")])
    back = resumed(own, "stock", 5, [see(methodcaller("_zero3_consolidated_16bit_state_dict"))])
    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, tag="own")
    lp = torch.bfloat16 if dtype == "bf16" else torch.float32

    def holds(these, those):
        return all(torch.equal(these[name].float(), those[name].float()) for name in those)

    return found | {
        "stock losses": (uninterrupted, in_stock.losses),
        "stock to own": same(back.weights, in_stock.weights),
        "consolidated": dist.get_rank() != 0 or holds(back.seen[0], back.weights),
        "zero_to_fp32": holds({name: weight.to(lp) for name, weight in fp32.items()}, again.seen[0]),
    }


def load_with_frozen_parameters():
    """hpZ and frozen parameters: after load_checkpoint outputs come from the loaded weights, not from old copies."""
    folder, evaluation = shared_folder(), evaluate(next(batches(1, dist.get_rank())))

    def freeze(model):
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
        return model

    spec = Spec(section("zeropp"), adapted=freeze)
    losses = run(spec, [saved(folder, "a"), evaluation]).losses
    other = replace(spec, model=functools.partial(llama, seed=1))
    # The first fills secondary shards, frozen parameters' too.
    return losses + run(other, [evaluation, loaded(folder, "a"), evaluation]).losses


# -- refusals ------------------------------------------------------------------------------------------------------


def refusals(cases):
    """Return the errors on this rank for fields of the section and keys of the ds_config, also by zero.Init alone."""
    messages = {}
    for name, (fields, config, through_init) in cases.items():
        model = (lambda: None) if through_init else llama
        messages[name] = attempt(
            Spec(section("zeropp", **fields), "fp32", config, model, zero_init=through_init).engine
        )
    return messages


def start_table(fields=None):
    """Return what a quantized engine and a stock engine print at start."""
    run(Spec(section("zeropp", **{**(fields or {}), "report": {"every": 2}})), [step, step])
    Spec(plugin=True).engine()
    return printed()
