"""Jobs about what is read, written, saved and loaded of FP8 gradients and states, that run on ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import running
import torch
import torch.distributed as dist
from deepspeed import utils
from fp8_state_jobs import are_rounded, held_by, model_is_rounded, norm_of, spec_of
from models import KEPT, batches, full_weights, section
from ranks import attempt
from running import Spec, backward, forward, on_engine, run, see, state_of, step, update

import zeropp_fp8

OPTIONS = {"optimizer": {"master_format": "bf16", "exp_avg_sq_format": "fp8_e4m3", "scales": "block"}}
OF_OPTIONS = {"o2": {}, "options": OPTIONS}


def steps_of(engine):
    """Numbers of updates that states have had."""
    return set(engine.optimizer.states.compressed.steps.values())


def scales_of(engine):
    return engine.optimizer.reducer.scales.report()


def checkpoints_of_states(case, node_size=2):
    """Save and resume, exchange with stock, zero_to_fp32, and loading at another time than the first."""
    config, ended = {"gradient_clipping": 1.0}, []
    own = spec_of("fp8-lm-o1" if case == "o1" else "fp8-lm-o2", "bf16", config, node_size, OF_OPTIONS.get(case))
    at_end = [see(scales_of), on_engine(ended.append)]
    back = [step] if case == "o1" else [see(steps_of), step]
    found = running.exchanged(own, spec_of(None, "bf16", config), 4, at_end, back)
    state, report = found["own"].seen
    in_stock, theirs, mine = found["stock"].seen[0], found["stock"].masters, found["back"].seen[0]
    assert zeropp_fp8.wire_report(ended[0])["gradient_scaling"] == report, "an engine that has ended still tells"
    return {
        "differing": found["differing"],
        "zero_to_fp32": running.equal({n: w.float() for n, w in found["zero_to_fp32"].items()}, state["masters"]),
        "stock": running.equal(in_stock["masters"], state["masters"])
        and running.equal(second_of(in_stock), second_of(state)),
        "losses": [found[name].losses for name in ("own", "stock", "back")],
        "rounded": are_rounded(mine, torch.bfloat16),
        "off": max(((mine["masters"][n] - w).abs().max() / w.abs().max()).item() for n, w in theirs.items()),
        "steps": found["back"].seen[1:],
    }


def second_of(state):
    return {name: moment for name, moment in state["moments"].items() if name.startswith("exp_avg_sq")}


def reading_and_writing(recipe, node_size=2):
    """safe_get_* and safe_set_*, full and local, of gradients, master weights and moments."""
    result = {}
    first = [step, forward, backward, on_engine(read_and_write, result, fp8=recipe == "fp8-lm-o2")]
    then = [forward, backward, on_engine(others_read_and_write, result), update]
    run(spec_of(recipe, "fp32", node_size=node_size), [*first, on_engine(update_by_hand, result), *then])
    return result


MATRIX, VECTOR = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
ODD, UNTOUCHED = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
OF_MASTERS = (
    utils.safe_get_full_fp32_param,
    utils.safe_set_full_fp32_param,
    utils.safe_get_local_fp32_param,
    utils.safe_set_local_fp32_param,
)
OF_MOMENTS = (
    utils.safe_get_full_optimizer_state,
    utils.safe_set_full_optimizer_state,
    utils.safe_get_local_optimizer_state,
    utils.safe_set_local_optimizer_state,
)


def read_and_write(engine, result, fp8):
    """Return what is written is read, of gradients exactly."""
    params, world = dict(engine.module.named_parameters()), dist.get_world_size()
    matrix, vector, odd = (params[name] for name in (MATRIX, VECTOR, ODD))
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
        for calls, key in ((OF_MASTERS, ()), (OF_MOMENTS, ("exp_avg",)), (OF_MOMENTS, ("exp_avg_sq",))):
            get, put, get_local, put_local = calls
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


def update_by_hand(engine, result):
    """A step whose gradient was set."""
    params = dict(engine.module.named_parameters())
    matrix, untouched = params[MATRIX], params[UNTOUCHED]
    # A gradient set by hand is what the step uses: zeros leave the weight where weight decay puts it.
    utils.safe_set_full_grad(matrix, torch.full(matrix.ds_shape, 1000.0))
    before = utils.safe_get_full_fp32_param(matrix)
    squares = sum(utils.safe_get_full_grad(p).double().square().sum() for p in params.values())
    mean = utils.safe_get_full_grad(untouched)
    engine.step()
    result["moved"] = (utils.safe_get_full_fp32_param(matrix) < before).float().mean().item()
    result["norm"] = abs(float(engine.get_global_grad_norm()) / squares.sqrt().item() - 1)
    # Gradients can still be read after the step.
    result["after"] = torch.equal(utils.safe_get_full_grad(untouched), mean)


def others_read_and_write(engine, result):
    """DeepSpeed's other ways to gradients, and what cannot be done."""
    params = dict(engine.module.named_parameters())
    matrix, odd = params[MATRIX], params[ODD]
    mean = utils.safe_get_full_grad(odd)
    engine.optimizer.update_fp32_grad_for_param_vectorized(lambda full, p: full * 2, [odd])
    result["vectorized"] = torch.equal(utils.safe_get_full_grad(odd), mean * 2)
    partitions = engine.optimizer.get_fp32_grad_partitions()
    result["partitions"] = sum(len(part) for part in partitions.values()) == len(params)
    result["device"] = str(engine.optimizer.get_hp_param_device(odd))
    actions = (
        lambda: utils.safe_set_full_fp32_param(matrix, torch.zeros(3)),
        lambda: utils.safe_set_local_fp32_param(matrix, torch.zeros(3)),
        lambda: utils.safe_set_local_grad(matrix, torch.zeros(3)),
        lambda: utils.safe_get_full_optimizer_state(matrix, "max_exp_avg_sq"),
        lambda: engine.offload_states(),
    )
    result["messages"] = [attempt(action) for action in actions]


IN_BLOCKS = {
    "gradients": {
        "intra_format": "int8",
        "inter_format": "int8",
        "hadamard": False,
        "scales": "block",
        "block_size": 64,
        "store_format": "fp8_e4m3",
    },
    "optimizer": {"master_format": "fp16", "exp_avg_format": "fp8_e4m3", "exp_avg_sq_format": "fp16"},
}


def stored_in_blocks():
    """Gradients that travel in int8, as zeropp's, stored in FP8 blocks; states as in O2."""
    result = {"errors": [], "norms": []}
    for micro_batches in (1, 2):
        config = {"gradient_clipping": 0.5, "gradient_accumulation_steps": micro_batches}
        mine = Spec(section("lossless", **IN_BLOCKS), "bf16", config)
        exact = replace(mine, section=section("lossless", **{**IN_BLOCKS, "gradients": UNSTORED}))
        *micro, last = running.accumulated(micro_batches)
        (of_numbers,) = run(exact, [*micro, see(slices_of_gradients)]).seen
        close = on_engine(lambda engine: engine.optimizer.gradients.store.close())
        of_codes, norm = run(mine, [*micro, close, see(slices_of_gradients), last, see(norm_of)]).seen
        for a, b in zip(of_numbers, of_codes):
            if a.dim() == 2:
                # amax / 448 rounded up to a power of two, half a spacing of the largest binade is 16 codes.
                limit = a.abs() * 2**-4 + a.abs().amax(dim=1, keepdim=True) / 448 * 2 * 2**-10
                result["errors"].append(((a - b).abs() / limit.clamp_min(1e-30)).max().item())
        squares = sum(part.double().square().sum() for part in of_codes)
        result["norms"].append(abs(norm / squares.sqrt().item() - 1))
    once = {**config, "gradient_accumulation_steps": 1}
    mine, stock = replace(mine, config=once), Spec(None, "bf16", {**once, "zero_optimization": KEPT})
    bad = [forward, running.scaled(math.inf if dist.get_rank() == 1 else 1.0), backward, update]
    skipped = [*bad, see(lambda engine: engine.skipped_steps), step]
    result["stock"] = run(stock, [step] * 8).losses
    until, *both = running.resumed(mine, [step] * 6, [step, step, see(held_by), *skipped])
    return {
        **result,
        "losses": until.losses + both[0].losses,
        "seen": both[0].seen,
        "differing": running.differing(*both),
    }


UNSTORED = {**IN_BLOCKS["gradients"], "store_format": "none"}


def slices_of_gradients(engine):
    """Full gradients, those of matrices as blocks of 64, none of which lies on two ranks."""
    found = []
    for p in engine.module.parameters():
        full = utils.safe_get_full_grad(p).flatten()
        if len(p.ds_shape) == 2:
            slices = full.split(p.partition_numel())
            full = torch.cat([torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 64) for x in slices])
        found.append(full)
    return found


def loading_weights_only():
    """load_module_only and load_optimizer_states=False: weights are loaded, states are those of a new run."""
    folder, tokens, result = running.shared_folder(), list(batches(3, dist.get_rank())), {}
    no_states = {"load_optimizer_states": False}
    for name, fields in OF_OPTIONS.items():
        spec = spec_of("fp8-lm-o2", fields=fields)
        expected = run(spec, [step, step, running.saved(folder, name)], ("weights",), tokens).weights
        for how, load in (
            ("module only", {**no_states, "load_module_only": True}),
            ("no states", {**no_states, "load_lr_scheduler_states": False}),
        ):
            looks = [see(state_of), see(steps_of), see(model_is_rounded)]
            trace = run(running.other(spec), [running.loaded(folder, name, **load), *looks, step], data=tokens[2:])
            state, *seen = trace.seen
            close = max(((state["weights"][n] - w).abs().max() / w.abs().max()).item() for n, w in expected.items())
            moments = sum(moment.abs().sum().item() for moment in state["moments"].values())
            result[name, how] = close, moments, *seen, *trace.losses
    return result


def before_the_first_step():
    """By options: how a resumed run differs, and whether its weights are more than FP16 master weights hold."""
    result, weights = {}, see(lambda engine: full_weights(engine.module))
    for name, fields in OF_OPTIONS.items():
        spec = spec_of("fp8-lm-o2", "fp32", fields=fields)
        _, *both = running.resumed(spec, [], [weights, *[step] * 3, see(model_is_rounded)])
        at_load, rounded = both[1].seen
        finer = any(not torch.equal(w, w.half().float()) for w in at_load.values())
        result[name] = running.differing(*both), finer, rounded, both[1].losses
    return result


def save_for_universal(folder):
    """Train, save, and let DeepSpeed's converter make a universal checkpoint; returns what was saved."""
    trace = run(spec_of("fp8-lm-o2"), [*[step] * 3, running.saved(folder, "own")], ("masters", "moments"))
    dist.barrier()
    if dist.get_rank() == 0:
        running.universal(folder, "own")
    return trace


def load_universal(folder, trace):
    """At another world size: the same masters and moments, but for rounding with other slices' scales."""
    spec = spec_of("fp8-lm-o2", config={"checkpoint": {"load_universal": True}}, node_size=1)
    found, looks = {}, [see(state_of), see(model_is_rounded), see(steps_of)]

    def off(mine, theirs):
        return max(((mine[n] - w).abs().max() / w.abs().max()).item() for n, w in theirs.items())

    for name, load in (("all", {}), ("weights only", {"load_optimizer_states": False})):
        again = run(running.other(spec), [running.loaded(folder, "universal", **load), *looks, step])
        state, *seen = again.seen
        moments = off(second_of(state), second_of({"moments": trace.moments}))
        found[name] = off(state["masters"], trace.masters), moments, *seen, *again.losses
    return found
