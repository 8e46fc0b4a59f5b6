"""Jobs about FP8 and MX compute that run on ranks."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from gather_memory_jobs import alive, watching
from models import batches, full_weights, llama, section, with_lora
from ranks import printed
from running import Spec, backward, differing, evaluated, forward, on_engine, resumed, run, see, step, update, within

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.compute import products
from zeropp_fp8.formats import UnquantizedFormat


def adapted(model, lora=False, checkpointing=None):
    model = with_lora(model) if lora else model
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    return model


def small_llama(hidden=128, seed=0):
    """Of sizes of which rank slices cut rows and tiles: 384 x 128 over 4 ranks are 96 rows, 128 x 128 are 32."""
    return llama(hidden=hidden, intermediate=3 * hidden, seed=seed)


def spec_of(compute, weights="none", node_size=None, dtype="bf16", recipe=None, fields=None, **options):
    """Of a small Llama whose decoder layers compute as `compute` says; `options` of the Spec."""
    fields = {**({"compute": compute} if compute else {}), **(fields or {})}
    if weights is not None:
        fields["weights"] = {"format": weights}
    the_section = section(recipe or "lossless", ranks_per_node=node_size, **fields)
    return Spec(the_section, dtype, **{"model": small_llama, **options})


def trained(steps=6, accumulation=1, only_gemm_weights=False, lora=False, checkpointing=None, **options):
    """(trace, what was printed); `only_gemm_weights`: all other weights travel as they are."""

    def let_others_be(engine):
        route = engine.optimizer.gatherer.route
        of_session = route.format_of
        route.format_of = lambda p: of_session(p) if p in route.gemm_weights else UnquantizedFormat(p.dtype)

    options["config"] = {"gradient_accumulation_steps": accumulation}
    options["adapted"] = functools.partial(adapted, lora=lora, checkpointing=checkpointing)
    events = [on_engine(let_others_be)] * only_gemm_weights + [step] * steps * accumulation
    return run(spec_of(**options), events, ("weights",)), printed()


def cast_and_gathered(**kwargs):
    """Traces where layers cast their weights, and where codes of them are gathered; what was printed."""
    cast, _ = trained(weights="none", **kwargs)
    return cast, *trained(weights="fp8_e4m3", only_gemm_weights=True, **kwargs)


def operands_are_the_payload(compute, node_size, fields=None):
    """Where the operands of forward GEMMs lie, how many weights are gathered so, reductions, and what was printed."""
    shared, reductions, made, real = [], [], [], products.matmul_nt

    @contextlib.contextmanager
    def watched(engine):
        units = engine.optimizer.gatherer.units

        def matmul_nt(a, b, *args, **kwargs):
            storages = {ref.cdata for ref in made if not ref.expired()}
            storages |= {unit.secondary.untyped_storage()._cdata for unit in units if unit.secondary is not None}
            shared.append(b.codes.untyped_storage()._cdata in storages)
            return real(a, b, *args, **kwargs)

        with watching(made), mock.patch.object(products, "matmul_nt", matmul_nt):
            yield

    def are_released(engine):
        assert not any(sharded.known(p).operand for p in engine.module.parameters()), "released"
        assert not alive(made, none_is_due=True)

    count = on_engine(lambda engine: reductions.append(count_reductions()))
    look = see(lambda engine: reductions[0]())
    events = [within(watched, forward), count, backward, update, look, forward, look, backward, on_engine(are_released)]
    gathered = see(lambda engine: len(engine.optimizer.gatherer.route.gemm_weights))
    trace = run(spec_of(compute, "fp8_e4m3", node_size, fields=fields), [gathered, *events])
    return shared, *trace.seen, printed()


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


Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def values_of_a_gathered_operand():
    """Return the values of a weight that is there as codes, for who reads it, gathers it, writes it, evaluates."""
    values, tokens = [], next(batches(1, dist.get_rank()))

    def look(module, args):
        values.append(module.weight.detach().clone())

    def use(engine):
        layer = engine.module.model.layers[0].self_attn.q_proj
        param = layer.weight
        # In a way that nobody notices, and in one that is noticed.
        hooks = [layer.register_forward_pre_hook(lambda module, args: values.append(param.detach().clone()))]
        hooks += [layer.register_forward_pre_hook(look)]
        engine(input_ids=tokens, labels=tokens)
        for hook in hooks:
            hook.remove()
        before = full_weights(engine.module)[Q_PROJ]
        engine.eval()
        first = evaluated(engine, tokens)
        with torch.no_grad():
            with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
                if dist.get_rank() == 0:
                    layer.weight.mul_(0)
            changed = evaluated(engine, tokens)
            generated = engine.module.generate(input_ids=tokens[:, :4], max_new_tokens=3, do_sample=False).shape
        return before, full_weights(engine.module)[Q_PROJ], first, changed, tuple(generated)

    spec = spec_of({"format": "fp8", "scaling": "current"}, "fp8_e4m3", 4)
    (found,) = run(spec, [see(use)]).seen
    return bool(values[0].isnan().all()), values[1].float(), *found


def resume(compute, weights):
    """How a run that resumes in its fourth step differs from one that goes on, and that one's losses."""
    _, *both = resumed(spec_of(compute, weights), [step] * 3, [step] * 3, ("weights", "masters"))
    return differing(*both), both[0].losses


def amax_histories(steps=3):
    """The amax histories of delayed scaling and how many reductions the steps made."""
    reductions = []

    def look(engine):
        scaling = engine.zeropp_fp8_session.conversion.scaling
        return scaling.state_dict(), reductions[0](), zeropp_fp8.wire_report(engine)

    count = on_engine(lambda engine: reductions.append(count_reductions()))
    return run(spec_of({"format": "fp8", "scaling": "delayed"}), [count, *[step] * steps, see(look)]).seen[0]


def two_engines_over_one_model():
    """A second engine over a model that the first has not let go of."""
    spec = spec_of({"format": "fp8"})
    spec.engine(spec.engine().module)


def nothing_to_convert():
    spec_of({"format": "fp8", "scaling": "block"}, model=functools.partial(small_llama, hidden=64)).engine()
