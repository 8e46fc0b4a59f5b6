"""Jobs about FP8 and MX compute that run on ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from models import batches, build, ds_config, full_weights, llama, make_engine, section, train
from ranks import printed
from running import loss_of, shared_folder, switch

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.formats import UnquantizedFormat


def engine_of(compute, weights="none", node_size=None, dtype="bf16", zero_init=False, hidden=128, recipe=None, **more):
    """A small Llama whose decoder layers compute as `compute` says."""
    switch(True)
    fields = {"compute": compute, **more.pop("fields", {})} if compute else more.pop("fields", {})
    if weights is not None:
        fields["weights"] = {"format": weights}
    checkpointing = more.pop("checkpointing", None)
    lora = more.pop("lora", False)
    config = ds_config(section(recipe or "lossless", ranks_per_node=node_size, **fields), dtype, **more)
    # Sizes of which rank slices cut rows and tiles: 384 x 128 over 4 ranks are 96 rows, 128 x 128 are 32.
    model = build(lambda: llama(hidden=hidden, intermediate=3 * hidden), config, zero_init)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return make_engine(model, config)


def losses(steps=6, accumulation=1, only_gemm_weights=False, **kwargs):
    """Losses, final weights and what was printed; `only_gemm_weights`: all other weights travel as they are."""
    engine = engine_of(gradient_accumulation_steps=accumulation, **kwargs)
    if only_gemm_weights:
        route = engine.optimizer.gatherer.route
        of_session = route.format_of
        route.format_of = lambda p: of_session(p) if p in route.gemm_weights else UnquantizedFormat(p.dtype)
    return train(engine, steps, accumulation), full_weights(engine.module), printed()


def cast_and_gathered(**kwargs):
    """(losses, weights) where layers cast their weights, and where codes of them are gathered; what was printed."""
    *cast, _ = losses(weights="none", **kwargs)
    *gathered, text = losses(weights="fp8_e4m3", only_gemm_weights=True, **kwargs)
    return cast, gathered, text


def operands_are_the_payload(compute, node_size, fields=None):
    """Where the operands of forward and backward GEMMs lie, and what reading a weight's values gives meanwhile."""
    from zeropp_fp8.compute import products

    engine = engine_of(compute, "fp8_e4m3", node_size, fields=fields or {})
    gatherer = engine.optimizer.gatherer
    seen = []
    real = products.matmul_nt

    def watched(a, b, *args, **kwargs):
        buffers = [buffer for unit in gatherer.units for _, buffer in unit.lent]
        buffers += [unit.secondary for unit in gatherer.units if unit.secondary is not None]
        storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        seen.append(b.codes.untyped_storage().data_ptr() in storages)
        return real(a, b, *args, **kwargs)

    products.matmul_nt = watched
    tokens = next(batches(1, dist.get_rank()))
    loss = loss_of(engine, tokens)
    forward, seen = seen, []
    products.matmul_nt = real
    reductions = count_reductions()
    engine.backward(loss)
    engine.step()
    after_step = reductions()
    loss = loss_of(engine, tokens)
    in_next_forward = reductions()
    engine.backward(loss)
    assert not any(sharded.known(p).operand for p in engine.module.parameters()), "released"
    assert not any(unit.lent for unit in gatherer.units)
    return forward, len(gatherer.route.gemm_weights), after_step, in_next_forward, printed()


def count_reductions():
    """Shapes of all_reduce(MAX) calls since the last look."""
    real, calls = dist.all_reduce, []

    def all_reduce(tensor, op=dist.ReduceOp.SUM, *args, **kwargs):
        if op == dist.ReduceOp.MAX:
            calls.append(tensor.numel())
        return real(tensor, op, *args, **kwargs)

    dist.all_reduce = all_reduce

    def look():
        found = list(calls)
        calls.clear()
        return found

    return look


def values_of_a_gathered_operand():
    """What a weight that is there as codes holds, and what those see who read it, gather it, write it, evaluate."""
    import deepspeed

    engine = engine_of({"format": "fp8", "scaling": "current"}, "fp8_e4m3", 4)
    layer = engine.module.model.layers[0].self_attn.q_proj
    param, values = layer.weight, []

    def look(module, args):
        values.append(param.detach().clone())  # in a way that nobody notices
        values.append(module.weight.detach().clone())

    hook = layer.register_forward_pre_hook(look)
    tokens = next(batches(1, dist.get_rank()))
    engine(input_ids=tokens, labels=tokens)
    hook.remove()
    before = full_weights(engine.module)["model.layers.0.self_attn.q_proj.weight"]
    engine.eval()
    with torch.no_grad():
        evaluated = loss_of(engine, tokens).item()
        with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
            if dist.get_rank() == 0:
                layer.weight.mul_(0)
        changed = loss_of(engine, tokens).item()
        generated = engine.module.generate(input_ids=tokens[:, :4], max_new_tokens=3, do_sample=False).shape
    after = full_weights(engine.module)["model.layers.0.self_attn.q_proj.weight"]
    return bool(values[0].isnan().all()), values[1].float(), before, after, evaluated, changed, tuple(generated)


def resume(compute, weights):
    """Losses of steps 4 to 6, run through and resumed from a checkpoint of step 3."""
    engine = engine_of(compute, weights)
    folder = shared_folder()
    train(engine, 3)
    engine.save_checkpoint(folder)
    through = train(engine, 3, seed=2)
    engine.destroy()
    engine = engine_of(compute, weights)
    engine.load_checkpoint(folder)
    return through, train(engine, 3, seed=2), printed()


def amax_histories(steps=3):
    """The amax histories of delayed scaling and how many reductions a step made."""
    engine = engine_of({"format": "fp8", "scaling": "delayed"}, weights="none")
    reductions = count_reductions()
    train(engine, steps)
    scaling = engine.zeropp_fp8_session.conversion.scaling
    return scaling.state_dict(), reductions(), zeropp_fp8.wire_report(engine)


def two_engines_over_one_model():
    """A second engine over a model that the first has not let go of."""
    engine = engine_of({"format": "fp8"})
    make_engine(engine.module, ds_config(section("lossless", compute={"format": "fp8"}), "bf16"))


def nothing_to_convert():
    engine_of({"format": "fp8", "scaling": "block"}, hidden=64)
