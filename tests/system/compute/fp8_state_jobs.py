"""Jobs about engines whose gradients and optimizer states rest in low precision, that run on ranks."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import running
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from models import KEPT, batches, full_fp32_weights, full_weights, llama, section, with_lora
from ranks import attempt, printed
from running import Spec, accumulated, backward, equal, evaluate, forward, run, see, step, update
from torch import nn


def spec_of(recipe, dtype="bf16", config=None, node_size=None, fields=None, **options):
    """Of a recipe without FP8 GEMMs, so that what is compared is gradients and states; None is stock."""
    if recipe is None:
        return Spec(None, dtype, {"zero_optimization": KEPT, **(config or {})}, **options)
    the_section = section(recipe, node_size, compute={"format": "none"}, **(fields or {}))
    return Spec(the_section, dtype, config or {}, **options)


def are_rounded(state, dtype):
    """Whether a model's weights are exactly the master weights in the model's dtype."""
    return all(torch.equal(state["weights"][n], master.to(dtype).float()) for n, master in state["masters"].items())


def model_is_rounded(engine):
    state = {"weights": full_weights(engine.module), "masters": full_fp32_weights(engine.module)}
    return are_rounded(state, next(engine.module.parameters()).dtype)


def norm_of(engine):
    return float(engine.optimizer._global_grad_norm)


def beside_a_reference(recipes):
    """{recipe: the first loss of an engine that trains, and that of one without an optimizer}."""
    tokens, found = next(batches(1, dist.get_rank())), {}
    for recipe in recipes:
        spec = Spec(section(recipe))
        found[recipe] = run(spec, [forward]).losses, run(replace(spec, optimizer=None), [evaluate(tokens)]).losses
    return found


def adam_of(kind):
    """Make the function that makes the optimizer of a kind of training."""

    def make(params):
        if kind == "adam":
            return torch.optim.Adam(params, lr=1e-3, weight_decay=0.1)
        if kind == "groups":
            first = {"params": params[:7], "lr": 3e-3, "weight_decay": 0.3}
            return torch.optim.AdamW([first, {"params": params[7:], "betas": (0.8, 0.9)}], lr=1e-3)
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)

    return make


def fp32_through_compressed_states(kinds, steps=6):
    """{kind: traces of stock and of CompressedStates whose formats are all fp32}, with clipping and a schedule.

    They have seen whether states are compressed, and the last gradient norm.
    """
    from zeropp_fp8.config import PluginConfig

    running.allow_fp16_on_cpu()
    PluginConfig.stores_states_in_low_precision = property(lambda self: True)
    warmup = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 2e-3}}}
    look = [see(is_compressed), *[step] * steps, see(norm_of)]
    found = {}
    for kind in kinds:
        config = {"gradient_clipping": 0.3, **({} if kind == "groups" else warmup)}
        stock = Spec(None, "fp16" if kind == "fp16" else "fp32", config, optimizer=adam_of(kind))
        mine = replace(stock, section=section("lossless", gather_granularity="module"))
        stock = replace(stock, config={**config, "zero_optimization": KEPT})
        found[kind] = [run(spec, look, ("masters",)) for spec in (stock, mine)]
    return found


def is_compressed(engine):
    session = getattr(engine, "zeropp_fp8_session", None)
    return session is not None and session.state_formats is not None


def held_by(engine):
    """Return what there is of gradients and states."""
    optimizer = engine.optimizer
    compressed, scales = engine.zeropp_fp8_session.state_formats is not None, optimizer.reducer.scales
    return {
        "gradients": optimizer.gradients.store.num_bytes(),
        "states": optimizer.states.compressed.num_bytes() if compressed else None,
        "groups": [(g.matrices, g.segments.padded_numel, len(g.params)) for g in optimizer.state_groups],
        "flat": sum(t.numel() for t in optimizer.fp32_partitioned_groups_flat),
        "buffer": optimizer.grad_partitions_flat_buffer.numel(),
        "report": scales and scales.report(),
    }


def training_beside_stock(steps=15):
    """Traces of stock, O1 and O2: these see what is held, and whether weights are the rounded masters."""
    found, looks = {}, [see(model_is_rounded), see(held_by)]
    for name, recipe in (("stock", None), ("o1", "fp8-lm-o1"), ("o2", "fp8-lm-o2")):
        spec = spec_of(recipe, config={"gradient_clipping": 1.0}, lr=2e-3)
        at_ends = looks if recipe else []
        found[name] = run(spec, [*at_ends, *[step] * steps, *at_ends])
    return found


def gradients_that_are_not_finite(dtype):
    """Inf or NaN on one rank: the step is skipped on all, and nothing has changed; training goes on."""
    running.allow_fp16_on_cpu()

    def snapshot(engine):
        optimizer = engine.optimizer
        compressed = optimizer.states.compressed
        buffers = [b for group in compressed.groups for b in compressed._buffers[id(group)].values()]
        return {
            "weights": full_weights(engine.module),
            "states": [(b.codes.clone(), None if b.scales is None else b.scales.clone()) for b in buffers],
            "steps": dict(compressed.steps),
            "scales": optimizer.reducer.scales.state_dict(),
            "loss scale": optimizer.loss_scale,
            "overflow": optimizer.overflow,
        }

    def bad_step(factor, rank):
        bad = running.scaled(factor if dist.get_rank() == rank else 1.0)
        return [see(snapshot), forward, bad, backward, update, see(snapshot)]

    spec = spec_of("fp8-lm-o2", dtype, {"gradient_clipping": 1.0})
    events = [step, step, *bad_step(math.inf, 3), *bad_step(math.nan, 2), *[step] * 4]
    trace, log = run(spec, [*events, see(lambda engine: engine.skipped_steps)]), []
    for before, after in (trace.seen[:2], trace.seen[2:4]):
        assert after["overflow"]
        # fp16's new loss scale makes gradients, and so their history, smaller.
        factor, history = after["loss scale"] / before["loss scale"], before["scales"]["amax_history"]
        moved = torch.cat([history[1:], history[-1:]]) * factor
        log.append({name: equal(before[name], after[name]) for name in ("weights", "states", "steps")})
        log[-1]["mu"] = equal(before["scales"]["mu"], after["scales"]["mu"])
        log[-1]["history"] = equal(moved, after["scales"]["amax_history"])
        log[-1]["factor"] = factor
    return log, trace.losses, trace.seen[4], printed()


def refusals():
    """Return what each optimizer that is no Adam, and each option that has no place, is answered."""

    class OwnUpdate(torch.optim.AdamW):
        def step(self, closure=None):
            raise NotImplementedError

    class OnlyAName(torch.optim.AdamW):
        pass

    adam, adamw = torch.optim.Adam, torch.optim.AdamW
    makers = {
        "sgd": torch.optim.SGD,
        "own update": OwnUpdate,
        "amsgrad": functools.partial(adamw, amsgrad=True),
        "maximize": functools.partial(adam, maximize=True),
        "only a name": OnlyAName,
    }
    model = functools.partial(llama, layers=1)
    return {
        name: attempt(spec_of("fp8-lm-o2", model=model, optimizer=functools.partial(make, lr=0.1)).engine)
        for name, make in makers.items()
    }


def accumulation_in_the_engine(cases, micro_batches=3):
    """Of each (dtype, "accumulate_in"): of each step of stock and O1 what `_beside_stock` says."""
    running.allow_fp16_on_cpu()
    found = []
    for dtype, accumulate_in in cases:
        config = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": 0.2}
        mine = spec_of("fp8-lm-o1", dtype, config, fields={"gradients": {"accumulate_in": accumulate_in}})
        *micro, last = accumulated(micro_batches)
        looked_at = [*micro, see(mean_gradients), last, see(norm_of)] * 2
        stock, mine = (run(spec, looked_at).seen for spec in (spec_of(None, dtype, config), mine))
        found.append([_beside_stock(*stock[place : place + 2], *mine[place : place + 2]) for place in (0, 2)])
    return found


def mean_gradients(engine):
    scale = engine.optimizer.loss_scale
    return [safe_get_full_grad(p).double().flatten() / scale for p in engine.module.parameters()]


def _beside_stock(stock, stock_norm, mine, norm):
    """Cosine of mean gradients, ratio of norms; the norm of the step against what was read.

    The last in parts of what torch's own codes of those numbers are off by, over scales (root mean square): of numbers
    in bf16, which are few, it is up to seven times what independent roundings would give.
    """

    def of_codes(shift):
        """The norm of torch's codes of gradients, each scaled by its largest number and 2^-shift."""
        scales = [448 / grad.abs().max() * 2.0**-shift for grad in mine]
        codes = [(grad * scale).to(torch.float8_e4m3fn) for grad, scale in zip(mine, scales)]
        return torch.cat([code.double() / scale for code, scale in zip(codes, scales)]).norm()

    exact = torch.cat(mine).norm()
    usual = torch.stack([of_codes(k / 16) / exact - 1 for k in range(16)]).square().mean().sqrt()
    cosine = nn.functional.cosine_similarity(torch.cat(stock), torch.cat(mine), dim=0)
    return cosine.item(), norm / stock_norm, ((norm / exact - 1) / usual).item()


class Branches(nn.Module):
    """Two linear layers, each of which a rank may leave out."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(24, 24)
        self.right = nn.Linear(24, 24)

    def forward(self, y, left, right):
        out = y
        if left:
            out = out + self.left(y)
        if right:
            out = out + self.right(y)
        return out


class WithBranches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 24)
        self.branches = Branches()

    def forward(self, x, left, right):
        return self.branches(self.first(x), left, right).square().mean()


def branch_inputs(rank, steps=6):
    """Return what a rank does: nobody uses `right` before the fourth step; only rank 1 uses `left`."""
    generator = torch.Generator().manual_seed(rank)
    for index in range(steps):
        yield torch.randn(4, 24, generator=generator), rank == 1, index >= 3


def parameters_unused_on_some_ranks(steps=6):
    """Losses of a block whose parameters ranks use differently, beside AdamW on the mean gradient of all ranks."""
    spec = spec_of("fp8-lm-o2", "fp32", model=WithBranches, leaves=(Branches,))
    trace = run(spec, [*[step] * steps, see(model_is_rounded)], ("masters",), branch_inputs(dist.get_rank()))
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
    off = {n: (trace.masters[n] - p.detach()).abs().max().item() for n, p in alone.named_parameters()}
    return trace.losses, expected, off, *trace.seen


MODELS = {
    "lora": {"adapted": with_lora, "lr": 1e-2},
    "tied": {"model": functools.partial(llama, tie=True)},
    "zero.Init": {"zero_init": True},
}


def models_of_all_kinds():
    """{kind: traces of O2 and of stock}; O2's sees whether weights are rounded masters, and what it holds."""
    return {
        kind: (
            run(spec_of("fp8-lm-o2", **options), [*[step] * 5, see(model_is_rounded), see(held_by)], ("masters",)),
            run(spec_of(None, **options), [step] * 5),
        )
        for kind, options in MODELS.items()
    }
