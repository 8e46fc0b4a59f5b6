"""Jobs about FP8 exchanges of activations that run on ranks, and the inputs that ranks and tests compute alike."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from models import llama, section
from ranks import attempt
from running import Running, Spec, backward, evaluate, evaluated, forward, on_engine, run, see, step, stepped, update
from torch import nn

import zeropp_fp8
from zeropp_fp8.comm import ActivationExchange, WireLedger, fp8_all_to_all
from zeropp_fp8.zero.fall_back import fall_back

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# For 2 ranks: [ranks, sequence, batch, heads, head_dim] or [ranks, sequence, batch, heads * head_dim]
SHAPES = {
    "heads": (2, 12, 3, 4, 32),
    "joined": (2, 9, 2, 96),
    "odd": (2, 7, 3, 5, 13),
    "one token": (2, 1, 1, 1, 67),
    "short tokens": (2, 31, 5, 3, 3),
    "long tokens": (2, 2, 1, 2, 8200),
    "flat": (2, 301),
}
SPECIALS = (math.nan, math.inf, -math.inf)
SPECIAL_SHAPE = (2, 6, 2, 4, 32)


def normal(seed, *shape, dtype=torch.float32):
    """Numbers of which tokens differ in magnitude."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    if len(shape) > 2:
        values *= torch.exp2(torch.randint(-8, 9, (*shape[:3], *[1] * (len(shape) - 3)), generator=generator))
    return values.to(dtype)


def activation(rank, name, dtype, gradient=False):
    """Return what a rank sends, forward or (its gradient) backward."""
    return normal(100 * rank + 7 * list(SHAPES).index(name) + 50 * gradient, *SHAPES[name], dtype=DTYPES[dtype])


def specials(rank):
    """Each token of rank 1 for rank 0 that is named here holds something that is no number."""
    values = normal(rank, *SPECIAL_SHAPE)
    if rank == 1:
        for token, special in enumerate(SPECIALS):
            values[0, token, 1, 2, 5] = special
    return values


def sequence_groups(size=2):
    """This rank's group of `size` ranks in a row; collective over the world."""
    starts = range(0, dist.get_world_size(), size)
    made = [dist.new_group(list(range(start, start + size))) for start in starts]
    return made[dist.get_rank() // size]


# -- the exchange itself -------------------------------------------------------------------------------------------


def exchanges(dtype, block_size=None):
    """{shape: (output, gradient of the input)} over pairs of ranks, each from random numbers of the ranks."""
    group, rank = sequence_groups(), dist.get_rank()
    exchange = ActivationExchange(dist.get_rank() // 2, block_size=block_size)
    out = {}
    for name in SHAPES:
        source = activation(rank, name, dtype).requires_grad_()
        output = fp8_all_to_all(source, exchange, group)
        output.backward(activation(rank, name, dtype, gradient=True))
        out[name] = output.detach(), source.grad
    return out


def special_exchange():
    source = specials(dist.get_rank())
    return fp8_all_to_all(source, ActivationExchange(0), sequence_groups())


def left_as_they_are():
    """Exchanges of what is no activation: all must arrive bit for bit, and no byte is counted for them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    ledger = WireLedger(1, world)
    exchange = ActivationExchange(0, ledger)
    sent = {
        "position ids": torch.arange(world * 40).view(world, 40) + 1000 * rank,
        "mask": torch.arange(world * 40).view(world, 40) % (2 + rank) == 0,
        "fp64": normal(rank, world, 10, 2, 64).double() / 3,
        "small": normal(rank, world, 3) / 3,
        "empty": torch.zeros(world, 0, 8),
    }
    received = {name: fp8_all_to_all(tensor, exchange) for name, tensor in sent.items()}
    group = sequence_groups(1)
    alone = normal(rank, 1, 10, 2, 64) / 3
    assert torch.equal(fp8_all_to_all(alone, exchange, group), alone)
    ledger.end_step()
    return sent, received, ledger.report()


UNEVEN = (5, 3, 0, 7)  # rows for rank r, from every rank


def uneven_exchange(backward):
    """Shares that differ by rank, started and waited for later."""
    rank = dist.get_rank()
    ledger = WireLedger(2, 2)
    source = normal(rank, sum(UNEVEN), 3, 1, 50)
    output = torch.full((4 * UNEVEN[rank], 3, 1, 50), 123.0)
    exchange = ActivationExchange(dist.get_rank() // 2, ledger)
    pending = exchange.start(output, source, None, [UNEVEN[rank]] * 4, list(UNEVEN), backward=backward)
    before = bool((output == 123.0).all())
    pending.wait()
    pending.wait()
    ledger.end_step()
    return source, output, before, ledger.report()


LEDGER_SHAPES = ((2, 5, 3, 4, 32), (2, 6, 1, 100))


def counted(per_node, size):
    """The ledger of: forward, backward and one recomputation of both shapes in a step, and an evaluation."""
    ledger = WireLedger(dist.get_world_size() // per_node, per_node)
    exchange, group = ActivationExchange(dist.get_rank() // per_node, ledger), sequence_groups(size)
    for shape in LEDGER_SHAPES:
        source = normal(1, size, *shape[1:]).requires_grad_()
        fp8_all_to_all(source, exchange, group)
        fp8_all_to_all(source, exchange, group).sum().backward()
        fp8_all_to_all(source, exchange, group, evaluating=True)
    ledger.end_step()
    return ledger.report(), ledger.report(total=True)


# -- in DeepSpeed --------------------------------------------------------------------------------------------------


class Replaced:
    """The replacements of plugin/install.py, with a way back."""

    def __init__(self):
        self.before = []

    def __call__(self, owner, name, value):
        self.before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def restore(self):
        while self.before:
            owner, name, value = self.before.pop()
            setattr(owner, name, value)


def sequence_parallel(size=2):
    """DeepSpeed's own sequence-parallel state (an mpu) over groups of `size` ranks in a row."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
    from deepspeed.utils import groups

    mpu.initialize_sequence_parallel(size)
    groups.mpu = mpu
    return mpu


class Exchanging(nn.Module):
    """A module that exchanges by a function, as an attention module does."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.spg = None

    def forward(self, *args):
        return self.function(*args)


# (batch dim, scatter, gather, local shape for 4 ranks): heads out and sequence in, or back; 6 heads are uneven.
LAYOUTS = {
    "sequence first": (1, 2, 0, (5, 2, 8, 40)),
    "sequence first, back": (1, 0, 2, (20, 2, 2, 40)),
    "batch first": (0, 2, 1, (2, 5, 8, 40)),
    "batch first, back": (0, 1, 2, (2, 20, 2, 40)),
    "uneven heads": (1, 2, 0, (5, 2, 6, 40)),
    "uneven heads, batch first": (0, 2, 1, (2, 5, 6, 40)),
}


def deepspeed_layouts():
    """{layout: results of DeepSpeed's exchange and its gradient, as it is and in FP8}."""
    # Without hooks, with hooks taken off and with DeepSpeed's names restored it is as it was, bit for bit.
    from deepspeed.sequence import layer

    from zeropp_fp8.zero.ulysses import ActivationHooks, replace_exchanges

    mpu, rank = sequence_parallel(4), dist.get_rank()
    replaced, out = Replaced(), {}
    module = Exchanging(lambda *args: layer._SeqAllToAll.apply(mpu.get_sequence_parallel_group(), *args))
    exchange = ActivationExchange(dist.get_rank() // 2)

    def run(name):
        batch_dim, scatter, gather, shape = LAYOUTS[name]
        source = normal(rank, *shape).requires_grad_()
        output = module(source, scatter, gather, batch_dim)
        output.backward(normal(50 + rank, *output.shape))
        return output.detach(), source.grad

    for name in LAYOUTS:
        try:
            exact = run(name)
        except RuntimeError:
            continue  # until 0.19.0 DeepSpeed cannot bring the sequence back where it comes first
        replace_exchanges(replaced)
        without_hooks = run(name)
        hooks = ActivationHooks(module, exchange)
        in_fp8 = run(name)
        hooks.remove()
        removed = run(name)
        replaced.restore()
        for again in (without_hooks, removed, run(name)):
            assert all(torch.equal(a, b) for a, b in zip(again, exact)), name
        out[name] = exact, in_fp8
    return out


def overlapped():
    """DeepSpeed's asynchronous exchange of dq: the handle waits, the function after it brings it into order."""
    from deepspeed.sequence import layer

    from zeropp_fp8.zero.ulysses import ActivationHooks, replace_exchanges

    mpu = sequence_parallel(4)
    group, rank = mpu.get_sequence_parallel_group(), dist.get_rank()
    source = normal(rank, 2, 20, 2, 64)
    exact = layer.single_all_to_all(source, 1, 2, 0, group)
    replace_exchanges(Replaced())
    handles = {}

    def start():
        return layer.single_all_to_all(source, 1, 2, 0, group, True, handles, "dq")

    module = Exchanging(start)
    ActivationHooks(module, ActivationExchange(0))
    shape = module().shape
    handles["dq_work"].wait()
    result = handles["dq_post_all2all_func"](handles["dq_grad"])
    assert shape == result.shape
    return exact, result


class SplitAttention(nn.Module):
    """Causal attention whose sequence is split over ranks, by DeepSpeed's DistributedAttention."""

    def __init__(self, hidden, heads, group):
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.attention = DistributedAttention(_Core(), group, scatter_idx=2, gather_idx=1)

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).unbind(2)
        return self.out(self.attention(q, k, v, 0).reshape(batch, length, hidden))


class _Core(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class SplitModel(nn.Module):
    """A small causal language model over a part of the sequence."""

    def __init__(self, group, hidden=128, heads=4, layers=2, vocab=256, length=32, checkpointing=None):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(hidden),
                    "attention": SplitAttention(hidden, heads, group),
                    "mlp": nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 2 * hidden), nn.GELU()),
                    "down": nn.Linear(2 * hidden, hidden),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab)
        self.checkpointing = checkpointing

    def forward(self, tokens, positions, labels):
        x = self.embed(tokens) + self.place(positions)
        for block in self.blocks:
            attended = block["norm"](x)
            if self.checkpointing is None:
                x = x + block["attention"](attended)
            else:
                x = x + torch.utils.checkpoint.checkpoint(
                    block["attention"], attended, use_reentrant=self.checkpointing == "reentrant"
                )
            x = x + block["down"](block["mlp"](x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), labels.flatten())


def parts(steps, length=32, batch=2, vocab=256, size=2, seed=1):
    """This rank's part of each batch: tokens, positions and the tokens that come next."""
    replica, place = divmod(dist.get_rank(), size)
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    mine = slice(place * length // size, (place + 1) * length // size)
    for _ in range(steps):
        start = torch.randint(0, vocab, (batch, 1), generator=generator)
        stride = torch.randint(1, 4, (batch, 1), generator=generator)
        tokens = (start + stride * torch.arange(length + 1)) % vocab
        positions = torch.arange(length).expand(batch, length)
        yield tokens[:, :-1][:, mine], positions[:, mine], tokens[:, 1:][:, mine]


def hooks_of(engine):
    from zeropp_fp8.zero.ulysses import ActivationHooks

    return next((part for part in engine.zeropp_fp8_session.parts if isinstance(part, ActivationHooks)), None)


def without_sequence_parallelism():
    """Return what engines without sequence parallelism make of a wire format: an error, or no hooks."""
    fp8, detect = (Spec(section("lossless", activations={"wire_format": each}), "bf16") for each in ("fp8", "detect"))
    return attempt(fp8.engine), *run(detect, [see(hooks_of)]).seen


def means_over_ranks(losses):
    total = torch.tensor(losses)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def spec_of(model, mpu, recipe="lossless", fp8=False):
    whole = {"weights": {"difference": "none"}}  # bytes of differences are those of what a step has changed
    fields = {"activations": {"wire_format": "fp8"}} if fp8 else {}
    return Spec(section(recipe, **whole, **fields), "bf16", model=model, given={"mpu": mpu})


def train_split(fp8, steps=8, recipe="lossless", checkpointing=None):
    """Losses (means over ranks) and wire report: DistributedAttention, sequence parallel 2 x data parallel 2."""
    mpu = sequence_parallel()
    model = functools.partial(SplitModel, mpu.get_sequence_parallel_group(), checkpointing=checkpointing)
    look, evaluation = see(zeropp_fp8.wire_report), evaluate(next(parts(1)))
    events = [*[step] * steps, look, on_engine(lambda engine: engine.eval()), evaluation, look]
    trace = run(spec_of(model, mpu, recipe, fp8), events, data=parts(steps))
    before, after = trace.seen
    assert after["per_step"] == before["per_step"]
    outside = after["outside_steps"]["intra"] - before["outside_steps"]["intra"]
    return means_over_ranks(trace.losses[:steps]), after, outside


def two_engines(steps=4):
    """Losses of two engines over one sequence-parallel group, the first one in FP8, whose passes interleave."""
    mpu = sequence_parallel()
    model = functools.partial(SplitModel, mpu.get_sequence_parallel_group())
    both = [Running(spec_of(model, mpu, fp8=fp8).engine(), parts(steps)) for fp8 in (True, False)]
    engines = [running.engine for running in both]
    for _ in range(steps):
        for running in both:
            forward(running)
        for running in reversed(both):
            backward(running)
            update(running)
    losses = tuple(means_over_ranks(running.trace.losses) for running in both)
    reports = [zeropp_fp8.wire_report(engine)["per_step"]["activations"]["intra"] for engine in engines]
    # A forward that raises leaves nothing switched on for whoever comes next.
    batch = next(parts(1))
    for engine in engines:
        engine.eval()
    before = [evaluated(engine, batch) for engine in engines]
    with contextlib.suppress(IndexError):
        evaluated(engines[0], (batch[0], batch[1] + 1000, batch[2]))
    after = [evaluated(engine, batch) for engine in reversed(engines)][::-1]
    hooks, said = hooks_of(engines[0]), fall_back(engines[0].optimizer)
    fallen = evaluated(engines[0], batch)
    hooks.remove()
    return losses, reports, before, after, evaluated(engines[0], batch), (said, fallen)


def shared_model(fp8):
    """Two engines over one model, the first trains with `fp8`, the second only evaluates without, or the other way.

    Returns:
        Their losses, and the first one's bytes of activations in a step, together; then each over a model of its own.
    """
    mpu, found = sequence_parallel(), []
    for shared in (True, False):
        make = functools.partial(SplitModel, mpu.get_sequence_parallel_group())
        model, (batch, *_) = make(), list(parts(2))
        policy = spec_of(None, mpu, fp8=fp8).engine(model)
        reference = replace(spec_of(None, mpu, fp8=not fp8), optimizer=None).engine(model if shared else make())
        losses = [evaluated(policy, batch), evaluated(reference, batch), stepped(policy, batch)]
        found.append((losses, zeropp_fp8.wire_report(policy)["per_step"]["activations"]["intra"]))
        reference.destroy()
        found[-1] += (stepped(policy, batch),)
        policy.destroy()
    return found


class OfLogits(nn.Module):
    """A causal LM whose loss is of labels that are shifted already."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, positions, labels):
        logits = self.model(input_ids=tokens, position_ids=positions).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train_llama(fp8, steps=8, checkpointing=None):
    """The same for a transformers Llama through UlyssesSPAttentionHF."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    model = llama(hidden=128, attn_implementation="sdpa")
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=2
    )
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    spec = spec_of(lambda: OfLogits(model), mpu, fp8=fp8)
    trace = run(spec, [*[step] * steps, see(zeropp_fp8.wire_report)], data=parts(steps))
    return means_over_ranks(trace.losses), *trace.seen


def compiled():
    """An exchange of UlyssesSPAttentionHF inside torch.compile: output, gradient and bytes, eager and compiled."""
    from deepspeed.runtime.sequence_parallel import ulysses_sp
    from deepspeed.sequence.layer import register_all_to_all_group

    from zeropp_fp8.zero.ulysses import ActivationHooks, replace_exchanges

    replace_exchanges(Replaced())
    group, rank = sequence_groups(), dist.get_rank()
    register_all_to_all_group(group)
    model = Exchanging(lambda x: ulysses_sp._dim_zero_all_to_all(group, x * 2).cos())
    out = []
    for module in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        ledger = WireLedger(2, 2)
        exchange = ActivationExchange(dist.get_rank() // 2, ledger)
        exchange.route(group)
        hooks = ActivationHooks(model, exchange)
        source = normal(rank, *SHAPES["heads"]).requires_grad_()
        output = module(source)
        output.backward(normal(50 + rank, *SHAPES["heads"]))
        hooks.remove()
        ledger.end_step()
        out.append((output.detach(), source.grad, ledger.report()["per_step"]["activations"]))
    return out
