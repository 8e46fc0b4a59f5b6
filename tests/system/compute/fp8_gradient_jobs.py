"""Jobs about FP8 gradients with shared scales, without an engine, that run on ranks."""

from __future__ import annotations

import types

import torch
import torch.distributed as dist

from zeropp_fp8.config import resolve
from zeropp_fp8.zero.reduce.gradient_scales import GradientScales
from zeropp_fp8.zero.reduce.reducer import GradientReducer
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import make_state_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SHAPES = ((97, 33), (64,), (40, 50))  # no multiple of 4 ranks, a vector between two matrices


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
        self.names = [f"p{i}" for i in range(len(shapes))]
        self.scales = GradientScales(self.session, self.params, self.names)
        self.reducer = GradientReducer(self.session)
        self.reducer.scales = self.scales
        self.reducer.names = {param.ds_id: name for param, name in zip(self.params, self.names)}
        self.unit = self.reducer.unit_of(self.params)

    def draw(self, seed, std=1.0):
        """Gradients of all ranks: [rank][parameter]."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [(torch.randn(p.ds_shape, generator=generator) * std).to(self.dtype) for p in self.params]
            for _ in range(self.world)
        ]

    def reduce(self, grads, dtype=torch.float32):
        """Full mean gradients, fp32, and the step's end is not reached yet."""
        mine = self.reducer.reduce(self.unit, [g.clone() for g in grads[self.rank]], dtype)
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


def reduction_accuracy(node_size, cases):
    """Agreement with the float64 mean by (dtype, std): first step (no history) and fifth."""
    found = {}
    for dtype_name, std in cases:
        job, dtype = Reduction(node_size, dtype=DTYPES[dtype_name]), DTYPES[dtype_name]
        first = job.draw(0, std)
        at_first = agreement(job.step(first), exact_mean(first))
        for seed in range(1, 4):
            job.step(job.draw(seed, std))
        last = job.draw(9, std)
        means = job.step(last)
        found[(dtype_name, std)] = at_first, agreement(means, exact_mean(last))
        vector = exact_mean(last)[1]
        error = (means[1] - vector).abs().max() / vector.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 1e-2), "vectors travel exactly"
    return found


def scale_semantics(node_size):
    """Codes are FP8(g e), the mean is their sum times a factor: both recovered from what two gradients do."""
    job = Reduction(node_size)
    job.step(job.draw(0))
    job.scales.mu.fill_(0.25)
    job.scales.table.update(*job.scales._multipliers(job.scales.history.largest()))
    encode, decode = job.scales.table.encode.clone(), job.scales.table.decode.clone()
    amax = torch.stack([torch.stack([r[i].abs().amax() for r in job.draw(0)]).amax() for i in range(3)])
    # Numbers that are codes already lose nothing: the mean is exact.
    numbers = torch.tensor([1.0, -2.0, 0.5, 3.0]) / encode[0]
    grads = [[torch.zeros(p.ds_shape) for p in job.params] for _ in range(job.world)]
    for rank, one in enumerate(grads):
        one[0].view(-1)[::5] = numbers[rank]
    mean = job.reduce(grads)[0]
    assert abs(mean.view(-1)[::5].unique().item() / (2.5 * decode[0].item()) - 1) < 1e-6
    assert abs(mean.view(-1)[5].item() / (numbers.sum().item() / job.world) - 1) < 1e-5
    assert not mean.view(-1)[1::5].any()
    return (encode / (448 / amax)).tolist(), (encode * decode * job.world).tolist()


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
    store = GradientStore(job.session.formats.between, job.scales, groups, dtype)
    micro = [job.draw(7), job.draw(8, std=3.0)]
    apart = [job.reducer.reduce(job.unit, [g.clone() for g in grads[job.rank]], dtype) for grads in micro]
    for index, grads in enumerate(micro):
        last = index == 1
        results = store.destinations(job.params, last, again=index > 0)
        job.reducer.start(job.unit, [g.clone() for g in grads[job.rank]], results, accumulate=index > 0)
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
    store = GradientStore(job.session.formats.between, job.scales, groups, torch.float32)
    grads = job.draw(5)
    numbers = job.reducer.reduce(job.unit, [g.clone() for g in grads[job.rank]], torch.float32)
    results = store.destinations(job.params, True, again=False)
    assert [r.dtype for r in results] == [torch.uint8, torch.float32, torch.uint8]
    job.reducer.start(job.unit, [g.clone() for g in grads[job.rank]], results, accumulate=False)
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
    results = store.destinations(job.params[2:3], True, again=True)
    before = store.read(job.params[2])
    job.reducer.start(job.reducer.unit_of([job.params[2]]), [grads[job.rank][2].clone()], results, accumulate=True)
    job.reducer.drain()
    assert torch.allclose(store.read(job.params[2]), before + numbers[2], rtol=1e-6, atol=1e-9)
    if job.world == 1:  # an exact oracle: code of the gradient, then of itself
        encode = job.scales.table.encode[0]
        codes = (grads[0][0].flatten() * encode).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(store.read(job.params[0]), codes.float() * decode[0])
    return store.num_bytes()


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
                store = GradientStore(one.session.formats.between, one.scales, groups, torch.float32)
                results = store.destinations(one.params, True, again=False)
                one.reducer.start(one.unit, [g.clone() for g in grads[one.rank]], results, False)
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
        for policy, fixed in (("post", 1.0), ("pre", 0.25), ("auto", None), ("fixed 2^-9", 2.0**-9)):
            job = Reduction(2, store_format="fp8_e4m3")
            groups = make_state_groups([job.params], job.session.own_numel, job.session.device)
            for step in range(12):
                if case == "same sign":
                    grads = same_sign(job, step)
                else:
                    grads = job.draw(step, std=1e-4)
                    for index, rank in enumerate(grads):  # outliers of 100,000 standard deviations, of one rank each
                        rank[0].view(-1)[index] = rank[2].view(-1)[index] = 10.0 * (-1) ** step
                if fixed:
                    job.scales.mu.fill_(fixed)
                    largest = job.scales.history.largest()
                    job.scales.table.update(*job.scales._multipliers(largest))
                store = GradientStore(job.session.formats.between, job.scales, groups, torch.float32)
                places = store.destinations(job.params, True, again=False)
                job.reducer.start(job.unit, grads[job.rank], places, False)
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
        lambda: job.scales.load_state_dict({"names": [*job.names, "other"], "amax_history": torch.zeros(16, 4)}),
    ):
        try:
            action()
        except ValueError as error:
            messages.append(str(error))
    runs = job.scales.runs([job.params[1], job.params[2], job.params[0], job.params[1]])
    job.step(job.draw(0))
    job.scales.load_state_dict(None)
    return messages, runs, job.scales.mu.item(), sorted(job.scales._without_history)
