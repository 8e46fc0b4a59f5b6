"""Jobs about engines whose gradients and optimizer states rest in low precision, that run on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import KEPT, batches, build, ds_config, full_fp32_weights, full_weights, llama, make_engine, section
from ranks import printed
from running import allow_fp16_on_cpu, loss_of, stepped, switch

NO_COMPUTE = {"compute": {"format": "none"}}  # FP8 GEMMs apart, so that what is compared is gradients and states


def named(engine):
    return dict(engine.module.named_parameters())


def rounded_masters(engine):
    """{name: decoded master weight in the model's dtype}, and whether the model's weights are exactly these."""
    masters = full_fp32_weights(engine.module)
    weights = full_weights(engine.module)
    dtype = next(engine.module.parameters()).dtype
    return masters, all(torch.equal(weights[n], masters[n].to(dtype).float()) for n in masters)


def beside_a_reference(recipes):
    """{recipe: whether the first loss of an engine that trains is that of one without an optimizer, bit for bit}."""
    switch(True)
    tokens = next(batches(1, dist.get_rank()))
    equal = {}
    for recipe in recipes:
        config = ds_config(section(recipe))
        engines = make_engine(llama(), config), make_engine(llama(), config, optimizer=None)
        engines[1].eval()
        with torch.no_grad():
            expected = engines[1](input_ids=tokens, labels=tokens).loss
        equal[recipe] = torch.equal(engines[0](input_ids=tokens, labels=tokens).loss, expected)
        for engine in engines:
            engine.destroy()
    return equal


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
        kept = {} if plugin else KEPT
        the_section = section("lossless", gather_granularity="module") if plugin else None
        config = ds_config(the_section, dtype, gradient_clipping=0.3, zero_optimization=kept)
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 2e-3}}
        if kind == "groups":
            config.pop("scheduler")
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        assert not plugin or engine.zeropp_fp8_session.state_formats is not None
        losses = [stepped(engine, t) for t in batches(steps, dist.get_rank())]
        return losses, full_fp32_weights(engine.module), float(engine.optimizer._global_grad_norm)

    stock, mine = run(False), run(True)
    largest = max((stock[1][n] - mine[1][n]).abs().max().item() for n in stock[1])
    moved = max((w - stock[1][n]).abs().max().item() for n, w in full_cpu(llama()).items())
    return stock[0], mine[0], largest, moved, stock[2], mine[2]


def full_cpu(model):
    return {name: p.detach().float() for name, p in model.named_parameters()}


def training_beside_stock(steps=15):
    """Losses of stock, O1 and O2 (computing in bf16), bytes held, and whether weights are the rounded masters."""
    found = {}
    for name, recipe in (("stock", None), ("o1", "fp8-lm-o1"), ("o2", "fp8-lm-o2")):
        switch(recipe is not None)
        the_section = section(recipe, **NO_COMPUTE) if recipe else None
        kept = {} if recipe else KEPT
        config = ds_config(the_section, "bf16", gradient_clipping=1.0, zero_optimization=kept)
        engine = make_engine(llama(), config, lr=2e-3)
        at_start = rounded_masters(engine)[1] if name == "o2" else True
        losses = [stepped(engine, t) for t in batches(steps, dist.get_rank())]
        held = {}
        if recipe:
            optimizer = engine.optimizer
            held["gradients"] = optimizer.gradients.store.num_bytes()
            held["states"] = optimizer.states.compressed.num_bytes() if recipe == "fp8-lm-o2" else None
            held["groups"] = [(g.matrices, g.segments.padded_numel, len(g.params)) for g in optimizer.state_groups]
            held["flat"] = sum(t.numel() for t in optimizer.fp32_partitioned_groups_flat)
            held["buffer"] = optimizer.grad_partitions_flat_buffer.numel()
            held["report"] = optimizer.reducer.scales.report()
        found[name] = losses, held, at_start and (name != "o2" or rounded_masters(engine)[1])
        engine.destroy()
    return found


def gradients_that_are_not_finite(dtype):
    """Inf or NaN on one rank: the step is skipped on all, and nothing has changed; training goes on."""
    if dtype == "fp16":
        allow_fp16_on_cpu()
    switch(True)
    engine = make_engine(llama(), ds_config(section("fp8-lm-o2", **NO_COMPUTE), dtype, gradient_clipping=1.0))
    optimizer = engine.optimizer
    tokens = list(batches(8, dist.get_rank()))
    losses = [stepped(engine, t) for t in tokens[:2]]
    log = []

    def snapshot():
        buffers = [
            b
            for group in optimizer.states.compressed.groups
            for b in optimizer.states.compressed._buffers[id(group)].values()
        ]
        raw = [(b.codes.clone(), None if b.scales is None else b.scales.clone()) for b in buffers]
        return (
            full_weights(engine.module),
            raw,
            dict(optimizer.states.compressed.steps),
            optimizer.reducer.scales.state_dict(),
        )

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
        loss = loss_of(engine, t)
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
    losses += [stepped(engine, t) for t in tokens[4:]]
    return log, losses, engine.skipped_steps, printed()


def refusals():
    """What each optimizer that is no Adam, and each option that has no place, is answered."""
    import deepspeed

    switch(True)

    class OwnUpdate(torch.optim.AdamW):
        def stepped(self, closure=None):
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


def accumulation_in_the_engine(dtype, accumulate_in, micro_batches=3):
    """Of stock and O1: cosine of mean gradients, ratio of norms; the norm of the step against what was read.

    The last in parts of what torch's own codes of those numbers are off by, over scales (root mean square): of numbers
    in bf16, which are few, it is up to seven times what independent roundings would give.
    """
    from deepspeed.utils import safe_get_full_grad

    if dtype == "fp16":
        allow_fp16_on_cpu()
    found = []
    for plugin in (False, True):
        switch(plugin)
        gradients = {"accumulate_in": accumulate_in}
        the_section = section("fp8-lm-o1", gradients=gradients, **NO_COMPUTE) if plugin else None
        config = ds_config(
            the_section,
            dtype,
            gradient_accumulation_steps=micro_batches,
            gradient_clipping=0.2,
            zero_optimization={} if plugin else KEPT,
        )
        engine = make_engine(llama(), config)
        log = []
        for index, t in enumerate(batches(2 * micro_batches, dist.get_rank())):
            last = index % micro_batches == micro_batches - 1
            loss = loss_of(engine, t)
            engine.backward(loss)
            if last:
                scale = engine.optimizer.loss_scale
                grads = [safe_get_full_grad(p).double().flatten() / scale for p in named(engine).values()]
            engine.step()
            if last:
                log.append((grads, float(engine.optimizer._global_grad_norm)))
        found.append(log)

    def of_codes(grads, shift):
        """The norm of torch's codes of gradients, each scaled by its largest number and 2^-shift."""
        scales = [448 / grad.abs().max() * 2.0**-shift for grad in grads]
        codes = [(grad * scale).to(torch.float8_e4m3fn) for grad, scale in zip(grads, scales)]
        return torch.cat([code.double() / scale for code, scale in zip(codes, scales)]).norm()

    def deviation(norm, grads):
        exact = torch.cat(grads).norm()
        usual = torch.stack([of_codes(grads, k / 16) / exact - 1 for k in range(16)]).square().mean().sqrt()
        return (norm / exact - 1) / usual

    return [
        (
            torch.nn.functional.cosine_similarity(torch.cat(a), torch.cat(b), dim=0).item(),
            norm_b / norm_a,
            deviation(norm_b, b).item(),
        )
        for (a, norm_a), (b, norm_b) in zip(*found)
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
        the_section = section("fp8-lm-o2", **NO_COMPUTE) if plugin else None
        config = ds_config(the_section, "bf16", zero_optimization={} if plugin else KEPT)
        model = build(lambda: llama(tie=case == "tied"), config, zero_init=case == "zero.Init")
        if case == "lora":
            from peft import LoraConfig, get_peft_model

            torch.manual_seed(3)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        engine = make_engine(model, config, lr=1e-2 if case == "lora" else 1e-3)
        found.append([stepped(engine, t) for t in batches(5, dist.get_rank())])
        if plugin:
            weights, exact = rounded_masters(engine)
            moved = all(w.abs().sum() > 0 for n, w in weights.items() if "lora_B" in n)  # they start as zeros
            found.append((exact and moved, len(weights), engine.optimizer.states.compressed.num_bytes()))
    return found
