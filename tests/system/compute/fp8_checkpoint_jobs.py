"""Jobs about what is read, written, saved and loaded of FP8 gradients and states, that run on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fp8_state_jobs import NO_COMPUTE, named, rounded_masters
from models import KEPT, batches, ds_config, full_fp32_weights, full_weights, llama, make_engine, section
from running import forward_backward, loss_of, shared_folder, stepped, switch

import zeropp_fp8

OPTIONS = {
    "master_format": "bf16",
    "exp_avg_sq_format": "fp8_e4m3",
    "scales": "block",
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
    stock = ds_config(None, "bf16", gradient_clipping=1.0, zero_optimization=KEPT)

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
        stepped(engine, t)
    engine.save_checkpoint(folder, tag="own")
    at_save, masters = full_weights(engine.module), full_fp32_weights(engine.module)
    first, second = moments(engine, "exp_avg"), moments(engine, "exp_avg_sq")
    uninterrupted = [stepped(engine, t) for t in tokens[4:]]
    final, report = full_weights(engine.module), engine.optimizer.reducer.scales.report()

    result = {}
    again = engine_of(own, 9, "own")
    result["at load"] = same(full_weights(again.module), at_save) and same(full_fp32_weights(again.module), masters)
    result["moments"] = same(moments(again, "exp_avg"), first) and same(moments(again, "exp_avg_sq"), second)
    result["losses"] = (uninterrupted, [stepped(again, t) for t in tokens[4:]])
    result["weights"] = same(full_weights(again.module), final) and again.optimizer.reducer.scales.report() == report

    fp32 = get_fp32_state_dict_from_zero_checkpoint(folder, tag="own")
    result["zero_to_fp32"] = same({n: w.float() for n, w in fp32.items()}, masters)

    in_stock = engine_of(stock, 9, "own")
    result["stock"] = same(full_fp32_weights(in_stock.module), masters) and same(
        moments(in_stock, "exp_avg_sq"), second
    )
    result["stock losses"] = [stepped(in_stock, t) for t in tokens[4:]]
    in_stock.save_checkpoint(folder, tag="stock")
    theirs = full_fp32_weights(in_stock.module)

    back = engine_of(own, 5, "stock")
    mine, exact = rounded_masters(back)
    off = max(((mine[n] - theirs[n]).abs().max() / theirs[n].abs().max()).item() for n in theirs)
    result["back"] = exact, off
    if back.zeropp_fp8_session.state_formats is not None:
        result["steps"] = set(back.optimizer.states.compressed.steps.values())
    result["back losses"] = stepped(back, tokens[0])
    engine.destroy()
    assert zeropp_fp8.wire_report(engine)["gradient_scaling"] == report, "an engine that has ended still tells"
    return result


def reading_and_writing(recipe, node_size=2):
    """safe_get_* and safe_set_*, full and local, of gradients, master weights and moments."""
    from deepspeed import utils

    switch(True)
    engine = make_engine(llama(), ds_config(section(recipe, node_size, **NO_COMPUTE), gradient_clipping=0.0))
    tokens, world = list(batches(4, dist.get_rank())), dist.get_world_size()
    stepped(engine, tokens[0])
    loss = loss_of(engine, tokens[1])
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

    loss = loss_of(engine, tokens[2])
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
        kept = {} if plugin else KEPT
        config = ds_config(the_section if plugin else None, "bf16", gradient_clipping=0.5, zero_optimization=kept)
        config["gradient_accumulation_steps"] = gas
        return make_engine(llama(seed=seed), config)

    def backward(engine, some):
        for t in some:
            forward_backward(engine, t)

    errors = []
    for gas in (1, micro_batches):
        exact, mine = engine_of(True, gas, "none"), engine_of(True, gas)
        for engine in (exact, mine):
            for index, t in enumerate(tokens[:gas]):
                forward_backward(engine, t)
                if index < gas - 1:
                    engine.step()
        mine.optimizer.gradients.store.close()
        squares = 0.0
        for p, q in zip(exact.module.parameters(), mine.module.parameters()):
            full, size = safe_get_full_grad(p).flatten(), p.partition_numel()
            got = safe_get_full_grad(q).flatten()
            squares += got.double().square().sum()
            if len(p.ds_shape) == 2:
                for a, b in zip(full.split(size), got.split(size)):  # of one rank each
                    a, b = (torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 64) for x in (a, b))
                    # amax / 448 rounded up to a power of two, half a spacing of the largest binade is 16 codes.
                    limit = a.abs() * 2**-4 + a.abs().amax(dim=1, keepdim=True) / 448 * 2 * 2**-10
                    errors.append(((a - b).abs() / limit.clamp_min(1e-30)).max().item())
        mine.step()
        result["norm"] = abs(float(mine.optimizer._global_grad_norm) / squares.sqrt().item() - 1)
    result["errors"] = [max(errors)]
    stock, engine = engine_of(False, 1), engine_of(True, 1)
    result["stock"] = []
    for t in tokens[:8]:
        switch(False)
        result["stock"].append(stepped(stock, t))
    switch(True)
    result["losses"] = []
    for index, t in enumerate(tokens[:8]):
        if index == 6:
            engine.save_checkpoint(folder, tag="blocks")
        result["losses"].append(stepped(engine, t))
    again = engine_of(True, 1, seed=3)
    again.load_checkpoint(folder, tag="blocks")
    result["resumed"] = [stepped(again, t) for t in tokens[6:8]]
    result["bytes"] = engine.optimizer.gradients.store.num_bytes()
    padded = {True: 0, False: 0}
    for group in engine.optimizer.state_groups:
        padded[group.matrices] += group.segments.padded_numel
    result["expected bytes"] = padded[True] + padded[True] // 64 + 2 * padded[False]
    loss = loss_of(engine, tokens[8])
    engine.backward(loss * (float("inf") if dist.get_rank() == 1 else 1.0))
    engine.step()
    result["skipped"] = engine.skipped_steps
    result["after"] = stepped(engine, tokens[9])
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
            stepped(saved, t)
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
            steps = set(engine.optimizer.states.compressed.steps.values())
            result[(name, how)] = close, moments, steps, rounded_masters(engine)[1], stepped(engine, tokens[2])
    return result


def before_the_first_step():
    """By options: whether a new engine of other weights has the saved ones, bit for bit; losses of both from there."""
    switch(True)
    folder = shared_folder()
    tokens = list(batches(3, dist.get_rank()))
    result = {}
    for name, fields in (("o2", {}), ("options", {"optimizer": OPTIONS})):
        config = ds_config(section("fp8-lm-o2", **NO_COMPUTE, **fields))
        saved, loaded = make_engine(llama(), config), make_engine(llama(seed=4), config)
        expected = full_weights(saved.module)
        saved.save_checkpoint(folder, tag=name)
        loaded.load_checkpoint(folder, tag=name)
        weights = full_weights(loaded.module)
        equal = all(torch.equal(weights[n], w) for n, w in expected.items())
        rounded = any(not torch.equal(w, w.half().float()) for w in expected.values())
        losses = [[stepped(engine, t) for t in tokens] for engine in (saved, loaded)]
        result[name] = equal, rounded, losses, rounded_masters(loaded)[1]
    return result


def save_for_universal(folder):
    """Train, save, and let DeepSpeed's converter make a universal checkpoint; returns what was saved."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils import safe_get_full_optimizer_state

    switch(True)
    engine = make_engine(llama(), ds_config(section("fp8-lm-o2", **NO_COMPUTE), "bf16"))
    for t in batches(3, dist.get_rank()):
        stepped(engine, t)
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
            set(engine.optimizer.states.compressed.steps.values()),
            stepped(engine, next(batches(1, dist.get_rank()))),
        )
    return found
