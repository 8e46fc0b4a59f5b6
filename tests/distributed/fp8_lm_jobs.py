"""Jobs about FP8 gradients with shared scales and optimizer states in low precision that run on ranks."""

from __future__ import annotations

import types

import torch
import torch.distributed as dist
from models import batches, build, ds_config, full_fp32_weights, full_weights, llama, make_engine, section
from parity_jobs import allow_fp16_on_cpu, switch
from ranks import printed
from zero_jobs import shared_folder

from zeropp_fp8.config import resolve
from zeropp_fp8.zero.gradient_scales import GradientScales
from zeropp_fp8.zero.gradient_store import GradientStore
from zeropp_fp8.zero.gradients import GradientReducer
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.state_groups import make_state_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = ((97, 33), (64,), (40, 50))  # no multiple of 4 ranks, a vector between two matrices


# -- reductions without an engine ----------------------------------------------------------------------------------


class Reduction:
    """Session, scales and reducer over parameters that have nothing but a shape.

    Gradients are given for all ranks: every rank can work out what the mean should be.
    """

    def __init__(self, ranks_per_node=2, shapes=SHAPES, dtype=torch.float32, **gradients):
        fields = {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "scales": "tensor", **gradients}
        the_section = {"topology": {"ranks_per_node": ranks_per_node}, "gradients": fields}
        config = resolve({"zero_optimization": {"stage": 3}, "zeropp_fp8": the_section})
        self.session = Session(config, dist.group.WORLD)
        self.world, self.rank = self.session.topology.world_size, self.session.topology.rank
        self.dtype = dtype
        self.params = [
            types.SimpleNamespace(ds_id=7 + i, ds_shape=torch.Size(shape), ds_numel=torch.Size(shape).numel())
            for i, shape in enumerate(shapes)
        ]
        self.scales = GradientScales(self.session, self.params)
        self.reducer = GradientReducer(self.session)
        self.reducer.scales = self.scales
        self.names = [f"p{i}" for i in range(len(shapes))]

    def draw(self, seed, std=1.0):
        """Gradients of all ranks: [rank][parameter]."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [(torch.randn(p.ds_shape, generator=generator) * std).to(self.dtype) for p in self.params]
            for _ in range(self.world)
        ]

    def reduce(self, grads, dtype=torch.float32):
        """Full mean gradients, fp32, and the step's end is not reached yet."""
        mine = self.reducer.reduce(self.params, [g.clone() for g in grads[self.rank]], self.names, dtype)
        return self.whole(mine)

    def whole(self, parts):
        every = [None] * self.world
        dist.all_gather_object(every, parts)
        return [
            torch.cat([rank[i].float() for rank in every]).view(p.ds_shape).double() for i, p in enumerate(self.params)
        ]

    def step(self, grads):
        means = self.reduce(grads)
        self.scales.end_step(overflow=False)
        return means


def exact_mean(grads):
    return [torch.stack([rank[i].double() for rank in grads]).mean(dim=0) for i in range(len(grads[0]))]


def agreement(means, expected):
    """(cosine, norm over expected norm) of the matrices taken together."""
    a, b = (torch.cat([t.flatten() for t in ts if t.dim() == 2]) for ts in (means, expected))
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item(), (a.norm() / b.norm()).item()


def reduction_accuracy(node_size):
    """Agreement with the float64 mean by (policy, dtype, std): first step (no history) and fifth."""
    found = {}
    for policy in ("pre", "post", "auto"):
        for dtype_name, dtype in DTYPES.items():
            for std in (1.0, 1e-2, 1e-4):
                job = Reduction(node_size, dtype=dtype, scale_policy=policy)
                first = job.draw(0, std)
                at_first = agreement(job.step(first), exact_mean(first))
                for seed in range(1, 4):
                    job.step(job.draw(seed, std))
                last = job.draw(9, std)
                means = job.step(last)
                found[(policy, dtype_name, std)] = at_first, agreement(means, exact_mean(last))
                vector = exact_mean(last)[1]
                error = (means[1] - vector).abs().max() / vector.abs().max()
                assert error < (1e-6 if dtype == torch.float32 else 1e-2), "vectors travel exactly"
    return found


def scale_semantics(node_size):
    """Codes are FP8(g e), the mean is their sum times a factor: both recovered from what two gradients do."""
    results = {}
    for policy in ("pre", "post", "auto"):
        job = Reduction(node_size, scale_policy=policy)
        job.step(job.draw(0))
        job.scales.mu.fill_(0.25 if policy == "auto" else 1.0)
        job.scales._encode, job.scales._decode = job.scales._multipliers(job.scales.history.largest())
        encode, decode = job.scales._encode.clone(), job.scales._decode.clone()
        amax = torch.stack([torch.stack([r[i].abs().amax() for r in job.draw(0)]).amax() for i in range(3)])
        results[policy] = (encode / (448 / amax)).tolist(), (encode * decode * job.world).tolist()
        # Numbers that are codes already lose nothing: the mean is exact.
        numbers = torch.tensor([1.0, -2.0, 0.5, 3.0]) / encode[0]
        grads = [[torch.zeros(p.ds_shape) for p in job.params] for _ in range(job.world)]
        for rank, one in enumerate(grads):
            one[0].view(-1)[::5] = numbers[rank]
        mean = job.reduce(grads)[0]
        assert abs(mean.view(-1)[::5].unique().item() / (2.5 * decode[0].item()) - 1) < 1e-6
        assert abs(mean.view(-1)[5].item() / (numbers.sum().item() / job.world) - 1) < 1e-5
        assert not mean.view(-1)[1::5].any()
    return results


def parameters_that_are_not_always_used():
    """A parameter without gradient for three steps, and one (an expert) that only rank 2 uses."""
    job = Reduction()
    log = []
    for step in range(6):
        grads = job.draw(step)
        for rank in range(job.world):
            if step < 3:
                grads[rank][0].zero_()
            if rank != 2:
                grads[rank][2].zero_()
        before = set(job.scales._without_history)
        means = job.step(grads)
        expected = exact_mean(grads)
        errors = [((m - e).norm() / e.norm().clamp_min(1e-30)).item() for m, e in zip(means, expected)]
        log.append((errors, before, set(job.scales._without_history), job.scales.history.newest.tolist()))
        newest = [torch.stack([r[i].abs().amax() for r in grads]).amax().item() for i in range(3)]
        for i in (0, 2):
            if newest[i]:
                assert job.scales.history.newest[i].item() == newest[i]
    return log


def accumulated_reductions(dtype_name):
    """Two micro-batches into a store: their sum, exactly; FP8 afterwards, with this rank's own scale."""
    dtype = DTYPES[dtype_name]
    job = Reduction(store_format="fp8_e4m3", dtype=dtype)
    for seed in range(2):
        job.step(job.draw(seed))
    own = job.session.own_numel
    groups = make_state_groups([job.params], own, job.session.device)
    store = GradientStore(job.session.inter_format, job.scales, groups, dtype)
    micro = [job.draw(7), job.draw(8, std=3.0)]
    apart = [job.reducer.reduce(job.params, [g.clone() for g in grads[job.rank]], job.names, dtype) for grads in micro]
    for index, grads in enumerate(micro):
        last = index == 1
        results = [store.destination(p, last, again=index > 0) for p in job.params]
        job.reducer.start(job.params, [g.clone() for g in grads[job.rank]], job.names, results, accumulate=index > 0)
        job.reducer.drain()
    for p, first, second in zip(job.params, *apart):
        assert torch.equal(store.read(p), (first + second).float()), "the sum of separate reductions"
    store.close()
    errors = []
    for i, p in enumerate(job.params):
        expected = (apart[0][i] + apart[1][i]).float()
        got = store.read(p)
        errors.append(((got - expected).norm() / expected.norm()).item() if expected.numel() else 0.0)
        if p.ds_shape != (64,) and expected.numel():
            assert abs(got.abs().max() / expected.abs().max() - 1) < 1e-6, "nothing is cut off"
    squares = sum(store.read(p).double().square().sum() for p in job.params)
    assert abs(store.square_sum(0) / squares - 1) < 1e-6
    without = store.square_sum(0, counted=lambda p: p is not job.params[2])
    assert abs(without / (squares - store.read(job.params[2]).double().square().sum()) - 1) < 1e-6
    # What is read does not change with the scales of the next step, and a second close changes nothing.
    before = [store.read(p) for p in job.params]
    job.scales.end_step(overflow=False)
    store.close()
    assert all(torch.equal(store.read(p), b) for p, b in zip(job.params, before))
    # A value set by hand is scaled by itself, however large.
    values = torch.full((own(job.params[0]),), 123.0)
    store.write(job.params[0], values)
    store.close()
    assert torch.allclose(store.read(job.params[0]), values, rtol=1e-6)
    return errors


def one_micro_batch_is_codes(world_expected):
    """Without accumulation results are codes that decode to what a reduction in numbers gives, but for one rounding."""
    job = Reduction(ranks_per_node=min(2, world_expected), store_format="fp8_e4m3")
    for seed in range(3):
        job.step(job.draw(seed))
    groups = make_state_groups([job.params], job.session.own_numel, job.session.device)
    store = GradientStore(job.session.inter_format, job.scales, groups, torch.float32)
    grads = job.draw(5)
    numbers = job.reducer.reduce(job.params, [g.clone() for g in grads[job.rank]], job.names, torch.float32)
    results = [store.destination(p, True, again=False) for p in job.params]
    assert [r.dtype for r in results] == [torch.uint8, torch.float32, torch.uint8]
    job.reducer.start(job.params, [g.clone() for g in grads[job.rank]], job.names, results, accumulate=False)
    job.reducer.drain()
    decode = job.scales.decode_of(job.params)
    for i, p in enumerate(job.params):
        if i == 1:
            assert torch.equal(store.read(p), numbers[i])
            continue
        sums = (numbers[i].double() / decode[i].double() * 512).round() / 512  # sums of E4M3 numbers, exactly
        codes = sums.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.allclose(store.read(p), codes.float() * decode[i], rtol=1e-6, atol=0)
    # A second gradient in the same backward adds to the first.
    results = [store.destination(job.params[2], True, again=True)]
    before = store.read(job.params[2])
    job.reducer.start([job.params[2]], [grads[job.rank][2].clone()], ["p2"], results, accumulate=True)
    job.reducer.drain()
    assert torch.allclose(store.read(job.params[2]), before + numbers[2], rtol=1e-6, atol=1e-9)
    if job.world == 1:  # an exact oracle: code of the gradient, then of itself
        encode = job.scales._encode[0]
        codes = (grads[0][0].flatten() * encode).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(store.read(job.params[0]), codes.float() * decode[0])
    return store.num_bytes()


# -- mu --------------------------------------------------------------------------------------------------------------


def e4m3_code(values):
    """fp32 numbers that fp32 `values` become in E4M3, cut off at 448."""
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).float()


class Schedule:
    """FP8-LM's rule for mu written out for all ranks in one place, 2 nodes of 2 ranks."""

    def __init__(self, history=16):
        self.mu = torch.ones(1)
        self.history = history
        self.amax = []  # by step, of every matrix
        self.shares = (0.0, 0.0)

    def step(self, grads, stored):
        matrices = [[g.float() for g in rank if g.dim() == 2] for rank in grads]
        newest = [max(rank[i].abs().amax().item() for rank in matrices) for i in range(len(matrices[0]))]
        held = [max(row[i] for row in self.amax[-self.history :]) for i in range(len(newest))] if self.amax else newest
        counts, numbers = {}, {}
        for i, amax in enumerate(held):
            encode = self.mu / (torch.tensor([amax]) / 448.0)
            codes = [e4m3_code(rank[i] * encode) for rank in matrices]
            partial = [codes[0] + codes[1], codes[2] + codes[3]]
            hop = [e4m3_code(p) for p in partial]
            total = hop[0] + hop[1]
            stages = [("gradients", codes, [rank[i] for rank in matrices]), ("partial", hop, partial)]
            if stored:
                stages.append(("results", [e4m3_code(total)], [total]))
            for name, rounded, before in stages:
                found = counts.setdefault(name, [0, 0])
                found[0] += sum((r.abs() == 448).sum().item() for r in rounded)
                found[1] += sum(((r == 0) & (b != 0)).sum().item() for r, b in zip(rounded, before))
                numbers[name] = numbers.get(name, 0) + sum(r.numel() for r in rounded)
        self.shares = tuple(max(counts[name][k] / numbers[name] for name in counts) for k in range(2))
        self.amax.append(newest)
        self.mu = self.mu * 0.5 if self.shares[0] > 1e-5 else self.mu * 2.0 ** (1 / 1000)


def same_sign(job, seed, size=1.0):
    """Gradients that all ranks agree about: sums are four times as large as what they are made of."""
    generator = torch.Generator().manual_seed(seed)
    grads = [[torch.rand(p.ds_shape, generator=generator) * size for p in job.params] for _ in range(job.world)]
    for rank in grads:
        rank[0][0, 0] = size  # the same largest magnitude in every step
    return grads


def mu_follows_its_schedule(stored):
    """mu, and what it is decided by, step by step beside the rule written out; saved and resumed on the way."""
    job = Reduction(store_format="fp8_e4m3" if stored else "none")
    schedule = Schedule()
    groups = make_state_groups([job.params], job.session.own_numel, job.session.device)
    log, resumed = [], None
    for step in range(14):
        # The size jumps up in step 8, where the history does not hold it, and stays.
        grads = same_sign(job, step, size=40.0 if step >= 8 else 1.0)
        for one in (job, resumed):
            if one is None:
                continue
            if stored:
                store = GradientStore(one.session.inter_format, one.scales, groups, torch.float32)
                results = [store.destination(p, True, again=False) for p in one.params]
                one.reducer.start(one.params, [g.clone() for g in grads[one.rank]], one.names, results, False)
                one.reducer.drain()
            else:
                one.reduce(grads)
            one.scales.end_step(overflow=False)
        schedule.step(grads, stored)
        report = job.scales.report()
        log.append((report["mu"], report["saturated"], report["vanished"]))
        assert report["mu"] == schedule.mu.item(), (step, report, schedule.mu, schedule.shares)
        assert abs(report["saturated"] - schedule.shares[0]) < 1e-12
        assert abs(report["vanished"] - schedule.shares[1]) < 1e-12
        if resumed is not None:
            assert resumed.scales.report() == report
        if step == 4:
            state = job.scales.state_dict()
            resumed = Reduction(store_format="fp8_e4m3" if stored else "none")
            resumed.params = job.params
            resumed.scales.load_state_dict(state)
    return log


def what_a_fixed_mu_loses():
    """Relative error of the stored mean, and shares, by policy: sums that overflow; gradients with small numbers."""
    results = {}
    for case in ("same sign", "small numbers"):
        for policy in ("post", "pre", "auto", "fixed 2^-9"):
            fixed = policy.startswith("fixed")
            job = Reduction(2, store_format="fp8_e4m3", scale_policy="auto" if fixed else policy)
            groups = make_state_groups([job.params], job.session.own_numel, job.session.device)
            for step in range(12):
                if case == "same sign":
                    grads = same_sign(job, step)
                else:
                    grads = job.draw(step, std=1e-4)
                    for index, rank in enumerate(grads):  # outliers of 100,000 standard deviations, of one rank each
                        rank[0].view(-1)[index] = rank[2].view(-1)[index] = 10.0 * (-1) ** step
                if fixed:
                    job.scales.mu.fill_(2.0**-9)
                    largest = job.scales.history.largest()
                    job.scales._encode, job.scales._decode = job.scales._multipliers(largest)
                store = GradientStore(job.session.inter_format, job.scales, groups, torch.float32)
                places = [store.destination(p, True, again=False) for p in job.params]
                job.reducer.start(job.params, grads[job.rank], job.names, places, False)
                job.reducer.drain()
                means = job.whole([store.read(p) for p in job.params])
                job.scales.end_step(overflow=False)
            mine, exact = (torch.cat([one[0].flatten(), one[2].flatten()]) for one in (means, exact_mean(grads)))
            small = exact.abs() < 1.0
            error = (mine - exact)[small].norm() / exact[small].norm()
            results[(case, policy)] = error.item(), job.scales.report()
    return results


def bounds_and_overflow():
    """mu stays between 2^-24 and 2^24; an overflow moves nothing; a change of the loss scale moves the history."""
    job = Reduction()
    zeros = [[torch.zeros(p.ds_shape) for p in job.params] for _ in range(job.world)]
    job.scales.mu.fill_(2.0**24)
    job.step(zeros)
    largest = job.scales.mu.item()
    for step in range(3):
        job.step(job.draw(step))
    job.scales.mu.fill_(2.0**-24)
    wild = [[g * 1e38 for g in rank] for rank in job.draw(3)]
    job.step(wild)
    smallest = job.scales.mu.item()
    before = job.scales.state_dict()
    job.reduce(job.draw(4, std=1e30))
    job.scales.end_step(overflow=True)
    after = job.scales.state_dict()
    unchanged = torch.equal(before["mu"], after["mu"])
    unchanged &= torch.equal(before["amax_history"].amax(0), after["amax_history"].amax(0))
    job.reduce(job.draw(4))
    newest = torch.stack([torch.stack([r[i].abs().amax() for r in job.draw(4)]).amax() for i in (0, 2)])
    job.scales.end_step(overflow=False, loss_scale_change=0.5)
    halved = torch.equal(job.scales.history.newest[[0, 2]], newest * 0.5)
    return largest, smallest, unchanged, halved


def errors_of_scales():
    """Messages of what is refused."""
    messages = []
    job = Reduction()
    for action in (
        lambda: job.scales.of([job.params[0], job.params[2]], []),
        lambda: job.scales.load_state_dict({"amax_history": torch.zeros(16, 9)}),
    ):
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
    runs = job.scales.runs([job.params[1], job.params[2], job.params[0], job.params[1]])
    job.step(job.draw(0))
    job.scales.load_state_dict(None)
    return messages, runs, job.scales.mu.item(), sorted(job.scales._without_history)


# -- states --------------------------------------------------------------------------------------------------------

NO_COMPUTE = {"compute": {"format": "none"}}  # FP8 GEMMs apart, so that what is compared is gradients and states


def step(engine, tokens):
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def named(engine):
    return dict(engine.module.named_parameters())


def rounded_masters(engine):
    """{name: decoded master weight in the model's dtype}, and whether the model's weights are exactly these."""
    masters = full_fp32_weights(engine.module)
    weights = full_weights(engine.module)
    dtype = next(engine.module.parameters()).dtype
    return masters, all(torch.equal(weights[n], masters[n].to(dtype).float()) for n in masters)


def beside_fp8_adamw(dtype, steps=5):
    """One rank: FP8AdamW given the same gradients arrives at the same weights, bit for bit."""
    from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state

    from zeropp_fp8.optim import FP8AdamW

    switch(True)
    engine = make_engine(llama(), ds_config(section("fp8-lm-o2", 1, **NO_COMPUTE), dtype))
    # In fp32, so that gradients are not rounded to the model's dtype; the master weights are FP16 on both sides.
    alone = [torch.nn.Parameter(p.detach().clone()) for p in llama().parameters()]
    at_start = rounded_masters(engine)[1]
    lp = next(engine.module.parameters()).dtype
    with torch.no_grad():
        for mine in alone:
            mine.copy_(mine.to(lp))
    optimizer = FP8AdamW(alone, lr=1e-3)
    for tokens in batches(steps, 0):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        for mine, p in zip(alone, engine.module.parameters()):
            mine.grad = safe_get_full_grad(p)
        engine.step()
        optimizer.step()
    weights = full_weights(engine.module)
    equal = [torch.equal(mine.detach().to(lp).float(), w) for mine, w in zip(alone, weights.values())]
    moments = [
        torch.equal(
            safe_get_full_optimizer_state(p, "exp_avg_sq").flatten(),
            decoded(optimizer, mine, "exp_avg_sq"),
        )
        for mine, p in zip(alone, engine.module.parameters())
    ]
    return all(equal), all(moments), at_start, rounded_masters(engine)[1]


def decoded(optimizer, param, name):
    """fp32 of one parameter's state of FP8AdamW."""
    for bucket in optimizer._buckets:
        for segment, p in enumerate(bucket.params):
            if p is param:
                return bucket.buffers[name].decode(segment)
    raise KeyError(name)


def fp32_through_compressed_states(kind, steps=6):
    """Losses and weights of stock and of CompressedStates whose formats are all fp32, with clipping and a schedule."""
    from zeropp_fp8.config import PluginConfig

    if kind == "fp16":
        allow_fp16_on_cpu()

    def run(plugin):
        import deepspeed

        switch(plugin)
        PluginConfig.stores_states_in_low_precision = property(lambda self: True)
        model = llama()
        params = list(model.parameters())
        if kind == "adam":
            optimizer = torch.optim.Adam(params, lr=1e-3, weight_decay=0.1)
        elif kind == "groups":
            groups = [
                {"params": params[:7], "lr": 3e-3, "weight_decay": 0.3},
                {"params": params[7:], "betas": (0.8, 0.9)},
            ]
            optimizer = torch.optim.AdamW(groups, lr=1e-3)
        else:
            optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
        dtype = "fp16" if kind == "fp16" else "fp32"
        config = ds_config(section("lossless") if plugin else None, dtype, gradient_clipping=0.3)
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 2e-3}}
        if kind == "groups":
            config.pop("scheduler")
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert not plugin or engine.optimizer.states is not None
        losses = [step(engine, t) for t in batches(steps, dist.get_rank())]
        return losses, full_fp32_weights(engine.module), float(engine.optimizer._global_grad_norm)

    stock, mine = run(False), run(True)
    largest = max((stock[1][n] - mine[1][n]).abs().max().item() for n in stock[1])
    moved = max((w - stock[1][n]).abs().max().item() for n, w in full_cpu(llama()).items())
    return stock[0], mine[0], largest, moved, stock[2], mine[2]


def full_cpu(model):
    return {name: p.detach().float() for name, p in model.named_parameters()}


def training_beside_stock(steps=25):
    """Losses of stock, O1 and O2 (computing in bf16), bytes held, and whether weights are the rounded masters."""
    found = {}
    for name, recipe in (("stock", None), ("o1", "fp8-lm-o1"), ("o2", "fp8-lm-o2")):
        switch(recipe is not None)
        the_section = section(recipe, **NO_COMPUTE) if recipe else None
        engine = make_engine(llama(), ds_config(the_section, "bf16", gradient_clipping=1.0))
        at_start = rounded_masters(engine)[1] if name == "o2" else True
        losses = [step(engine, t) for t in batches(steps, dist.get_rank())]
        held = {}
        if recipe:
            optimizer = engine.optimizer
            held["gradients"] = optimizer.store.num_bytes()
            held["states"] = optimizer.states.num_bytes() if optimizer.states else None
            held["groups"] = [(g.matrices, g.segments.padded_numel, len(g.params)) for g in optimizer.state_groups]
            held["flat"] = sum(t.numel() for t in optimizer.fp32_partitioned_groups_flat)
            held["buffer"] = optimizer.grad_partitions_flat_buffer.numel()
            held["report"] = optimizer.scales.report()
        found[name] = losses, held, at_start and (name != "o2" or rounded_masters(engine)[1])
        engine.destroy()
    return found


OPTIONS = {
    "master_format": "bf16",
    "exp_avg_sq_format": "fp8_e4m3",
    "scales": "block",
    "rounding": "stochastic",
    "expand_range": True,
}


def checkpoints_of_states(case, node_size=2):
    """Save and resume, exchange with stock, zero_to_fp32, and loading at another time than the first."""
    from deepspeed.utils import safe_get_full_optimizer_state
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    folder = shared_folder()
    tokens = list(batches(8, dist.get_rank()))
    recipe = "fp8-lm-o1" if case == "o1" else "fp8-lm-o2"
    fields = {"optimizer": OPTIONS} if case == "options" else {}
    own = ds_config(section(recipe, node_size, **NO_COMPUTE, **fields), "bf16", gradient_clipping=1.0)
    stock = ds_config(None, "bf16", gradient_clipping=1.0)

    def engine_of(config, seed, tag=None, **load):
        switch(config is own)
        engine = make_engine(llama(seed=seed), config)
        if tag:
            engine.load_checkpoint(folder, tag=tag, **load)
        return engine

    def moments(engine, name):
        return {n: safe_get_full_optimizer_state(p, name) for n, p in named(engine).items()}

    def same(a, b):
        return all(torch.equal(a[n], b[n]) for n in b)

    engine = engine_of(own, 0)
    for t in tokens[:4]:
        step(engine, t)
    engine.save_checkpoint(folder, tag="own")
    at_save, masters = full_weights(engine.module), full_fp32_weights(engine.module)
    first, second = moments(engine, "exp_avg"), moments(engine, "exp_avg_sq")
    uninterrupted = [step(engine, t) for t in tokens[4:]]
    final, report = full_weights(engine.module), engine.optimizer.scales.report()

    result = {}
    again = engine_of(own, 9, "own")
    result["at load"] = same(full_weights(again.module), at_save) and same(full_fp32_weights(again.module), masters)
    result["moments"] = same(moments(again, "exp_avg"), first) and same(moments(again, "exp_avg_sq"), second)
    result["losses"] = (uninterrupted, [step(again, t) for t in tokens[4:]])
    result["weights"] = same(full_weights(again.module), final) and again.optimizer.scales.report() == report

    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, tag="own")
    result["zero_to_fp32"] = same({n: w.float() for n, w in fp32.items()}, masters)

    in_stock = engine_of(stock, 9, "own")
    result["stock"] = same(full_fp32_weights(in_stock.module), masters) and same(
        moments(in_stock, "exp_avg_sq"), second
    )
    result["stock losses"] = [step(in_stock, t) for t in tokens[4:]]
    in_stock.save_checkpoint(folder, tag="stock")
    theirs = full_fp32_weights(in_stock.module)

    back = engine_of(own, 5, "stock")
    mine, exact = rounded_masters(back)
    off = max(((mine[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)
    result["back"] = exact, off
    if back.optimizer.states is not None:
        result["steps"] = set(back.optimizer.states.steps.values())
    result["back losses"] = step(back, tokens[0])
    return result


def reading_and_writing(recipe, node_size=2):
    """safe_get_* and safe_set_*, full and local, of gradients, master weights and moments."""
    from deepspeed import utils

    switch(True)
    engine = make_engine(llama(), ds_config(section(recipe, node_size, **NO_COMPUTE), gradient_clipping=0.0))
    tokens, world = list(batches(4, dist.get_rank())), dist.get_world_size()
    step(engine, tokens[0])
    loss = engine(input_ids=tokens[1], labels=tokens[1]).loss
    engine.backward(loss)
    params = named(engine)
    matrix, vector = params["model.layers.0.self_attn.q_proj.weight"], params["model.norm.weight"]
    odd = params["model.layers.1.mlp.up_proj.weight"]
    result = {}
    fp8 = recipe == "fp8-lm-o2"
    for name, p in (("matrix", matrix), ("vector", vector), ("odd", odd)):
        grad = utils.safe_get_full_grad(p)
        assert grad.shape == p.ds_shape and grad.dtype == torch.float32 and grad.abs().sum() > 0
        rank, size = dist.get_rank(), p.partition_numel()
        local = utils.safe_get_local_grad(p)
        padded = torch.nn.functional.pad(grad.flatten(), (0, size * world - grad.numel()))
        assert torch.equal(local.flatten(), padded[rank * size : (rank + 1) * size])
        utils.safe_set_full_grad(p, grad * 2)
        assert torch.equal(utils.safe_get_full_grad(p), grad * 2)
        utils.safe_set_local_grad(p, local)
        assert torch.equal(utils.safe_get_full_grad(p), grad)
        for get, put, get_local, put_local, key in (
            (
                utils.safe_get_full_fp32_param,
                utils.safe_set_full_fp32_param,
                utils.safe_get_local_fp32_param,
                utils.safe_set_local_fp32_param,
                (),
            ),
            (
                utils.safe_get_full_optimizer_state,
                utils.safe_set_full_optimizer_state,
                utils.safe_get_local_optimizer_state,
                utils.safe_set_local_optimizer_state,
                ("exp_avg",),
            ),
            (
                utils.safe_get_full_optimizer_state,
                utils.safe_set_full_optimizer_state,
                utils.safe_get_local_optimizer_state,
                utils.safe_set_local_optimizer_state,
                ("exp_avg_sq",),
            ),
        ):
            before = get(p, *key)
            assert before.shape == p.ds_shape and before.abs().sum() > 0
            put(p, before * 3, *key)
            limit = {"exp_avg": 2**-4, "exp_avg_sq": 2**-11}.get(key[0] if key else None, 2**-11) if fp8 else 0
            after = get(p, *key)
            assert ((after - before * 3).abs() <= limit * (before * 3).abs() + 1e-9 * fp8).all(), (name, key)
            put_local(p, get_local(p, *key) * 0 + 0.5, *key)
            assert (get(p, *key) == 0.5).all()
            put(p, before, *key)
            assert torch.equal(get(p, *key), before)
        result[name] = True
    # A gradient set by hand is what the step uses: zeros leave the weight where weight decay puts it.
    utils.safe_set_full_grad(matrix, torch.full(matrix.ds_shape, 1000.0))
    before = utils.safe_get_full_fp32_param(matrix)
    squares = sum(utils.safe_get_full_grad(p).double().square().sum() for p in params.values())
    untouched = params["model.embed_tokens.weight"]
    mean = utils.safe_get_full_grad(untouched)
    engine.step()
    result["moved"] = (utils.safe_get_full_fp32_param(matrix) < before).float().mean().item()
    result["norm"] = abs(float(engine.get_global_grad_norm()) / squares.sqrt().item() - 1)
    # Gradients can still be read after the step.
    result["after"] = torch.equal(utils.safe_get_full_grad(untouched), mean)

    def doubled(full, p):
        return full * 2

    loss = engine(input_ids=tokens[2], labels=tokens[2]).loss
    engine.backward(loss)
    mean = utils.safe_get_full_grad(odd)
    engine.optimizer.update_fp32_grad_for_param_vectorized(doubled, [odd])
    result["vectorized"] = torch.equal(utils.safe_get_full_grad(odd), mean * 2)
    partitions = engine.optimizer.get_fp32_grad_partitions()
    result["partitions"] = sum(len(part) for part in partitions.values()) == len(params)
    result["device"] = str(engine.optimizer.get_hp_param_device(odd))
    messages = []
    for action in (
        lambda: utils.safe_set_full_fp32_param(matrix, torch.zeros(3)),
        lambda: utils.safe_set_local_fp32_param(matrix, torch.zeros(3)),
        lambda: utils.safe_set_local_grad(matrix, torch.zeros(3)),
        lambda: utils.safe_get_full_optimizer_state(matrix, "max_exp_avg_sq"),
        lambda: engine.offload_states(),
    ):
        try:
            action()
            messages.append(None)
        except (ValueError, KeyError, RuntimeError, AssertionError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    result["messages"] = messages
    engine.step()
    return result


def gradients_that_are_not_finite(dtype):
    """Inf or NaN on one rank: the step is skipped on all, and nothing has changed; training goes on."""
    if dtype == "fp16":
        allow_fp16_on_cpu()
    switch(True)
    engine = make_engine(llama(), ds_config(section("fp8-lm-o2", **NO_COMPUTE), dtype, gradient_clipping=1.0))
    optimizer = engine.optimizer
    tokens = list(batches(8, dist.get_rank()))
    losses = [step(engine, t) for t in tokens[:2]]
    log = []

    def snapshot():
        raw = [
            {name: {k: v.clone() if torch.is_tensor(v) else v for k, v in one.items()} for name, one in group.items()}
            for group in optimizer.states.raw()
        ]
        return full_weights(engine.module), raw, dict(optimizer.states.steps), optimizer.scales.state_dict()

    def equal(a, b):
        if torch.is_tensor(a):
            return torch.equal(a, b)
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b))
        return a == b

    for index, bad in enumerate((float("inf"), float("nan"))):
        before = snapshot()
        scale = optimizer.loss_scale
        t = tokens[2 + index]
        loss = engine(input_ids=t, labels=t).loss
        engine.backward(loss * (bad if dist.get_rank() == 3 - index else 1.0))
        engine.step()
        after = snapshot()
        assert optimizer.overflow
        names = ("weights", "states", "steps")
        log.append({name: equal(a, b) for name, a, b in zip(names, before, after)})
        log[-1]["mu"] = equal(before[3]["mu"], after[3]["mu"])
        # fp16's new loss scale makes gradients, and so their history, smaller.
        factor = optimizer.loss_scale / scale
        history = before[3]["amax_history"]
        moved = torch.cat([history[1:], history[-1:]]) * factor
        log[-1]["history"] = equal(moved, after[3]["amax_history"])
        log[-1]["factor"] = factor
    losses += [step(engine, t) for t in tokens[4:]]
    return log, losses, engine.skipped_steps, printed()


def stored_in_blocks(micro_batches=2):
    """Gradients that travel in int8 and int4, as zeropp's, stored in FP8 blocks; states as in O2."""
    from deepspeed.utils import safe_get_full_grad

    folder = shared_folder()
    fields = {"intra_format": "int8", "inter_format": "int8", "hadamard": False, "scales": "block", "block_size": 64}
    optimizer = {"master_format": "fp16", "exp_avg_format": "fp8_e4m3", "exp_avg_sq_format": "fp16"}
    tokens = list(batches(10, dist.get_rank()))
    result = {}

    def engine_of(plugin, gas, store="fp8_e4m3", seed=0):
        switch(plugin)
        the_section = section("lossless", gradients={**fields, "store_format": store}, optimizer=optimizer)
        config = ds_config(the_section if plugin else None, "bf16", gradient_clipping=0.5)
        config["gradient_accumulation_steps"] = gas
        return make_engine(llama(seed=seed), config)

    def backward(engine, some):
        for t in some:
            engine.backward(engine(input_ids=t, labels=t).loss)

    errors = []
    for gas in (1, micro_batches):
        exact, mine = engine_of(True, gas, "none"), engine_of(True, gas)
        for engine in (exact, mine):
            for index, t in enumerate(tokens[:gas]):
                engine.backward(engine(input_ids=t, labels=t).loss)
                if index < gas - 1:
                    engine.step()
        mine.optimizer.store.close()
        squares = 0.0
        for p, q in zip(exact.module.parameters(), mine.module.parameters()):
            full, size = safe_get_full_grad(p).flatten(), p.partition_numel()
            got = safe_get_full_grad(q).flatten()
            squares += got.double().square().sum()
            if len(p.ds_shape) == 2:
                for rank in range(4):
                    for a, b in zip(*(x[rank * size : (rank + 1) * size].split(64) for x in (full, got))):
                        # amax / 448 rounded up to a power of two, half a spacing of the largest binade is 16 codes.
                        limit = a.abs() * 2**-4 + a.abs().max() / 448 * 2 * 2**-10
                        errors.append(((a - b).abs() / limit.clamp_min(1e-30)).max().item())
        mine.step()
        result["norm"] = abs(float(mine.optimizer._global_grad_norm) / squares.sqrt().item() - 1)
    result["errors"] = [max(errors)]
    stock, engine = engine_of(False, 1), engine_of(True, 1)
    result["stock"] = []
    for t in tokens[:8]:
        switch(False)
        result["stock"].append(step(stock, t))
    switch(True)
    result["losses"] = []
    for index, t in enumerate(tokens[:8]):
        if index == 6:
            engine.save_checkpoint(folder, tag="blocks")
        result["losses"].append(step(engine, t))
    again = engine_of(True, 1, seed=3)
    again.load_checkpoint(folder, tag="blocks")
    result["resumed"] = [step(again, t) for t in tokens[6:8]]
    result["bytes"] = engine.optimizer.store.num_bytes()
    padded = {True: 0, False: 0}
    for group in engine.optimizer.state_groups:
        padded[group.matrices] += group.segments.padded_numel
    result["expected bytes"] = padded[True] + padded[True] // 64 + 2 * padded[False]
    loss = engine(input_ids=tokens[8], labels=tokens[8]).loss
    engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    result["skipped"] = engine.skipped_steps
    result["after"] = step(engine, tokens[9])
    return result


def loading_weights_only():
    """load_module_only and load_optimizer_states=False: weights are loaded, states are those of a new run."""
    from deepspeed.utils import safe_get_full_optimizer_state

    switch(True)
    folder = shared_folder()
    tokens = list(batches(4, dist.get_rank()))
    result = {}
    for name, fields in (("o2", {}), ("options", {"optimizer": OPTIONS})):
        config = ds_config(section("fp8-lm-o2", **NO_COMPUTE, **fields), "bf16")
        saved = make_engine(llama(), config)
        for t in tokens[:2]:
            step(saved, t)
        saved.save_checkpoint(folder, tag=name)
        expected = full_weights(saved.module)
        for how, load in (
            ("module only", {"load_module_only": True, "load_optimizer_states": False}),
            ("no states", {"load_optimizer_states": False, "load_lr_scheduler_states": False}),
        ):
            engine = make_engine(llama(seed=4), config)
            engine.load_checkpoint(folder, tag=name, **load)
            weights = full_weights(engine.module)
            close = max(((weights[n] - w).abs().max() / w.abs().max()).item() for n, w in expected.items())
            moments = sum(
                safe_get_full_optimizer_state(p, key).abs().sum().item()
                for p in engine.module.parameters()
                for key in ("exp_avg", "exp_avg_sq")
            )
            steps = set(engine.optimizer.states.steps.values())
            result[(name, how)] = close, moments, steps, rounded_masters(engine)[1], step(engine, tokens[2])
    return result


def fp8_adamw_in_the_stage():
    """FP8AdamW given to deepspeed.initialize: its options, a checkpoint, and one of stock's AdamW."""
    import deepspeed

    from zeropp_fp8.optim import FP8AdamW

    folder = shared_folder()
    tokens = list(batches(6, dist.get_rank()))
    config = ds_config(section("fp8-lm-o2", 1, **NO_COMPUTE), "bf16")

    def engine_of(seed, optimizer_class=FP8AdamW, **options):
        model = llama(seed=seed)
        optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    switch(True)
    runs = {}
    for name, optimizer_class in (("fp8", FP8AdamW), ("torch", torch.optim.AdamW)):
        engine = engine_of(0, optimizer_class, weight_decay=0.1)
        losses = [step(engine, t) for t in tokens[:3]]
        engine.save_checkpoint(folder, tag=name)
        runs[name] = losses + [step(engine, t) for t in tokens[3:]]
    for name, optimizer_class in (("fp8", FP8AdamW), ("torch", FP8AdamW), ("fp8", torch.optim.AdamW)):
        engine = engine_of(3, optimizer_class)
        engine.load_checkpoint(folder, tag=name)
        runs[(name, optimizer_class.__name__)] = [step(engine, t) for t in tokens[3:]]
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.1
    # Where the section names no formats, FP8AdamW's own are used.
    config["zeropp_fp8"] = section("lossless", 1)
    engine = engine_of(0, exp_avg_format="bf16")
    formats = engine.optimizer.states.formats
    runs["own formats"] = formats.master, formats.exp_avg, formats.exp_avg_sq, step(engine, tokens[0])
    return runs


def refusals():
    """What each optimizer that is no Adam, and each option that has no place, is answered."""
    import deepspeed

    switch(True)

    class OwnUpdate(torch.optim.AdamW):
        def step(self, closure=None):
            raise NotImplementedError

    class OnlyAName(torch.optim.AdamW):
        pass

    messages = {}
    for name, make in {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "own update": lambda p: OwnUpdate(p, lr=0.1),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        "maximize": lambda p: torch.optim.Adam(p, lr=0.1, maximize=True),
        "only a name": lambda p: OnlyAName(p, lr=0.1),
    }.items():
        model = llama(layers=1)
        try:
            config = ds_config(section("fp8-lm-o2", **NO_COMPUTE))
            deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=config)
            messages[name] = None
        except ValueError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def accumulation_in_the_engine(dtype, micro_batches=3):
    """Of stock and O1: cosine of mean gradients, ratio of norms, norm of the step over that of what was read."""
    from deepspeed.utils import safe_get_full_grad

    if dtype == "fp16":
        allow_fp16_on_cpu()
    found = []
    for plugin in (False, True):
        switch(plugin)
        the_section = section("fp8-lm-o1", **NO_COMPUTE) if plugin else None
        config = ds_config(the_section, dtype, gradient_accumulation_steps=micro_batches, gradient_clipping=0.2)
        engine = make_engine(llama(), config)
        log = []
        for index, t in enumerate(batches(3 * micro_batches, dist.get_rank())):
            last = index % micro_batches == micro_batches - 1
            loss = engine(input_ids=t, labels=t).loss
            engine.backward(loss)
            if last:
                scale = engine.optimizer.loss_scale
                grads = [safe_get_full_grad(p).double().flatten() / scale for p in named(engine).values()]
                flat = torch.cat(grads)
            engine.step()
            if last:
                log.append((flat, float(engine.optimizer._global_grad_norm), flat.norm().item()))
        found.append(log)
    return [
        (torch.nn.functional.cosine_similarity(a, b, dim=0).item(), norm_b / norm_a, norm_b / exact_b)
        for (a, norm_a, _), (b, norm_b, exact_b) in zip(*found)
    ]


class Branches(torch.nn.Module):
    """Two linear layers, each of which a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(24, 24)
        self.right = torch.nn.Linear(24, 24)

    def forward(self, y, left, right):
        out = y
        if left:
            out = out + self.left(y)
        if right:
            out = out + self.right(y)
        return out


class WithBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(24, 24)
        self.branches = Branches()

    def forward(self, x, left, right):
        return self.branches(self.first(x), left, right).square().mean()


def branch_inputs(rank, steps=6):
    """What a rank does: nobody uses `right` before the fourth step; only rank 1 uses `left`."""
    generator = torch.Generator().manual_seed(rank)
    for index in range(steps):
        yield torch.randn(4, 24, generator=generator), rank == 1, index >= 3


def parameters_unused_on_some_ranks():
    """Losses of a block whose parameters ranks use differently, beside AdamW on the mean gradient of all ranks."""
    import deepspeed

    switch(True)
    model = WithBranches()
    deepspeed.utils.set_z3_leaf_modules(model, [Branches])
    engine = make_engine(model, ds_config(section("fp8-lm-o2", **NO_COMPUTE)))
    losses = []
    for x, left, right in branch_inputs(dist.get_rank()):
        loss = engine(x, left=left, right=right)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    alone = WithBranches()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    expected = []
    for inputs in zip(*(branch_inputs(rank) for rank in range(4))):
        mine = [alone(*one) for one in inputs]
        (sum(mine) / 4).backward()
        for p in alone.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        optimizer.zero_grad()
        expected.append(mine[dist.get_rank()].item())
    weights, exact = rounded_masters(engine)
    off = {n: (weights[n] - p.detach()).abs().max().item() for n, p in alone.named_parameters()}
    return losses, expected, off, exact


def models_of_all_kinds(case):
    """Losses with O2 and with stock; whether weights are rounded masters, how many there are, bytes of states."""
    found = []
    for plugin in (True, False):
        switch(plugin)
        config = ds_config(section("fp8-lm-o2", **NO_COMPUTE) if plugin else None, "bf16")
        model = build(lambda: llama(tie=case == "tied"), config, zero_init=case == "zero.Init")
        if case == "lora":
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        engine = make_engine(model, config, lr=1e-2 if case == "lora" else 1e-3)
        found.append([step(engine, t) for t in batches(8, dist.get_rank())])
        if plugin:
            weights, exact = rounded_masters(engine)
            moved = all(w.abs().sum() > 0 for n, w in weights.items() if "lora_B" in n)  # they start as zeros
            found.append((exact and moved, len(weights), engine.optimizer.states.num_bytes()))
    return found


def save_for_universal(folder):
    """Train, save, and let DeepSpeed's converter make a universal checkpoint; returns what was saved."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils import safe_get_full_optimizer_state

    switch(True)
    engine = make_engine(llama(), ds_config(section("fp8-lm-o2", **NO_COMPUTE), "bf16"))
    for t in batches(3, dist.get_rank()):
        step(engine, t)
    engine.save_checkpoint(folder, tag="own")
    masters = full_fp32_weights(engine.module)
    second = {n: safe_get_full_optimizer_state(p, "exp_avg_sq") for n, p in named(engine).items()}
    dist.barrier()
    if dist.get_rank() == 0:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=f"{folder}/own",
                output_folder=f"{folder}/universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=False,
            )
        )
        with open(f"{folder}/latest_universal", "w") as f:
            f.write("universal")
    return {n: w.numpy() for n, w in masters.items()}, {n: w.numpy() for n, w in second.items()}


def load_universal(folder, masters, second):
    """At another world size: the same masters and moments, but for rounding with other slices' scales."""
    from deepspeed.utils import safe_get_full_optimizer_state

    switch(True)
    config = ds_config(section("fp8-lm-o2", 1, **NO_COMPUTE), "bf16", checkpoint={"load_universal": True})
    found = {}
    for name, load in (("all", {}), ("weights only", {"load_optimizer_states": False})):
        engine = make_engine(llama(seed=8), config)
        engine.load_checkpoint(folder, tag="universal", **load)
        mine, exact = rounded_masters(engine)
        moments = {n: safe_get_full_optimizer_state(p, "exp_avg_sq") for n, p in named(engine).items()}
        found[name] = (
            max((mine[n] - torch.from_numpy(w)).abs().max().item() / abs(w).max() for n, w in masters.items()),
            max((moments[n] - torch.from_numpy(w)).abs().max().item() / abs(w).max() for n, w in second.items()),
            exact,
            set(engine.optimizer.states.steps.values()),
            step(engine, next(batches(1, dist.get_rank()))),
        )
    return found
