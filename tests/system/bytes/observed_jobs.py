"""Jobs in which DeepSpeed's comms logger looks at what the plugin sends."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed import comm as ds_comm
from deepspeed.profiling.flops_profiler import get_model_profile
from models import batches, llama, section
from recipes import section_of
from running import Spec, backward, forward, on_engine, run, see, step, update, within

import zeropp_fp8
from zeropp_fp8.comm import all_gather, issue, reduce_scatter
from zeropp_fp8.zero import bound

STEPS = 2
EVERYTHING = {"enabled": True, "prof_all": True, "verbose": False, "debug": False}
SOME = {**EVERYTHING, "prof_all": False, "prof_ops": ["all_to_all_single"]}


def _run(the_section, logger, micro_batches, *looks, context=contextlib.nullcontext):
    """Some steps and looks of an engine, seen by a comms logger that begins empty; None: that is off."""
    ds_comm.comms_logger.reset_data()
    ds_comm.configure(enabled=False)
    config = {"gradient_accumulation_steps": micro_batches, **({"comms_logger": logger} if logger else {})}

    def forget(engine):  # what making an engine has sent is no step's
        ds_comm.comms_logger.reset_data()

    steps = within(lambda engine: context(), *[step] * STEPS * micro_batches)
    trace = run(Spec(the_section, "bf16", config), [on_engine(forget), steps, *looks])
    ds_comm.configure(enabled=False)
    return trace


def _rows(engine=None):
    """{row of the comms logger: {bytes: times}}."""
    rows = ds_comm.comms_logger.get_raw_data().items()
    return {name: {size: seen[0] for size, seen in row.items()} for name, row in rows}


def _ours(rows):
    """(operation, kind, bytes, times) of the plugin's rows."""
    for name, messages in rows.items():
        if name.startswith("zeropp_fp8 "):
            operation, kind = name.split()[1], name.split(" of ")[1].split()[0]
            yield from ((operation, kind, size, times) for size, times in messages.items())


class _Backend:
    """Counts the collectives, and the bytes for other ranks, that are handed to the backend inside of it."""

    def __init__(self):
        self.calls, self.sent = defaultdict(int), 0

    def __enter__(self):
        self._stock = all_gather._all_gather_single, dist.all_to_all_single

        def gather(output, payload, group=None, **options):
            self.calls["all_gather_into_tensor"] += 1
            self.sent += (dist.get_world_size(group) - 1) * payload.numel() * payload.element_size()
            return self._stock[0](output, payload, group=group, **options)

        def exchange(output, given, output_splits=None, splits=None, group=None, **options):
            self.calls["all_to_all_single"] += 1
            own = splits[dist.get_rank(group)] if splits else given.numel() // dist.get_world_size(group)
            self.sent += (given.numel() - own) * given.element_size()
            return self._stock[1](output, given, output_splits, splits, group=group, **options)

        gather.__name__, exchange.__name__ = "all_gather_into_tensor", "all_to_all_single"
        all_gather._all_gather_single, dist.all_to_all_single = gather, exchange
        return self

    def __exit__(self, *exc):
        all_gather._all_gather_single, dist.all_to_all_single = self._stock


def logged(cases):
    """{name: what a comms logger, the ledger and the backend say of the same steps}.

    cases: {name: (way, a logger or None, micro-batches, fields)}.
    """
    return {name: _logged(*case) for name, case in cases.items()}


def _logged(way, logger, micro_batches, fields):
    backend = _Backend()

    def told(engine):
        rows, record = _rows(), ds_comm.comms_logger.get_raw_data()
        kinds, operations, num_bytes, printed = defaultdict(float), defaultdict(int), 0.0, io.StringIO()
        for operation, kind, size, times in _ours(rows):
            kinds[kind] += size * times
            if operation in backend.calls:
                operations[operation] += times
                num_bytes += size * times
        totals = torch.tensor([num_bytes, backend.sent], dtype=torch.float64)
        dist.all_reduce(totals)
        report = zeropp_fp8.wire_report(engine, total=True)
        with contextlib.redirect_stdout(printed):
            ds_comm.log_summary(show_straggler=True)
        return {
            "logged": dict(kinds),
            "ledger": {kind: sum(links.values()) * STEPS for kind, links in report["per_step"].items()},
            "names": sorted(name for name in rows if name.startswith("zeropp_fp8 ")),
            "all names": sorted(rows),
            "times": [ms for row in record.values() for seen in row.values() for ms in seen[1]],
            "rates": [
                (size * 8 / ms / 1e6, rate)
                for name, row in record.items()
                if name.startswith("zeropp_fp8 ")
                for size, seen in row.items()
                for ms, rate in zip(seen[1], seen[3])
            ],
            "printed": printed.getvalue(),
            "summary": sorted(ds_comm.log_summary(return_dict=True)["summary"]),
            "handed over": (dict(operations), dict(backend.calls), totals.tolist()),
        }

    trace = _run(section_of(way, **fields), logger, micro_batches, *[see(told)] * bool(logger), context=lambda: backend)
    return {"losses": trace.losses, "silent": _rows(), **(trace.seen[0] if logger else {})}


def beside_stock(accumulations):
    """{(accumulation, whether it is stock): the comms logger's {row: {bytes: times}}} of `lossless`, by modules."""
    sections = {True: None, False: section("lossless", gather_granularity="module")}
    cases = [(accumulation, stock) for accumulation in accumulations for stock in sections]
    return {case: _run(sections[case[1]], EVERYTHING, case[0], see(_rows)).seen[0] for case in cases}


def _lora_llama():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def flops(ways, models=("llama", "lora")):
    """{(model, way): (FLOPs, MACs) of a forward pass}; with "plain" (no engine), "stock", and of
    each way inside generation too.

    By DeepSpeed's profiler: of an engine as its ds_config asks for, of a plain model by get_model_profile.
    """
    (tokens,) = batches(1, 0)
    quiet = {"print_profile": False, "as_string": False}
    inputs = {"input_ids": tokens, "use_cache": False}
    profiler = {"enabled": True, "profile_step": 0, "detailed": False, "output_file": "/dev/null"}
    makers = {"llama": llama, "lora": _lora_llama}
    # Before any engine of DeepSpeed, which replaces torch's linear function for good.
    found = {(name, "plain"): get_model_profile(makers[name](), kwargs=inputs, **quiet)[:2] for name in models}

    def counts(engine):
        assert F.linear is linear.pop()
        if dist.get_rank() == 0:  # where DeepSpeed profiles
            return engine.flops_profiler.get_total_flops(), engine.flops_profiler.get_total_macs()

    def elsewhere(engine, name, way):
        assert engine.module(**inputs).logits.isfinite().all()
        if way != "stock":
            engine.eval()
            for weights in ("values", "codes"):
                with torch.no_grad(), zeropp_fp8.generation(engine, weights, merge_adapters=False) as model:
                    found[name, f"{way}, {weights}"] = get_model_profile(model, kwargs=inputs, **quiet)[:2]

    linear = []
    micro_batch = [on_engine(lambda engine: linear.append(F.linear)), forward, see(counts), backward, update]
    for name in models:
        for way in ("stock", *ways):
            options = {"flops_profiler": profiler, "gradient_accumulation_steps": 2}
            spec = Spec(None if way == "stock" else section_of(way), "bf16", options, makers[name])
            trace = run(spec, [*micro_batch * 2, on_engine(elsewhere, name, way)], data=[tokens] * 2)
            found[name, way], again = trace.seen  # DeepSpeed counts each anew, and prints the last of the step
            assert again == found[name, way]
    return found


class _Clock:
    """A clock that collectives of one kind of link advance by a second each, and a training loop by what it likes."""

    def __init__(self):
        self.now, self.buckets = 0.0, 0

    def perf_counter(self):
        return self.now

    def slow(self, collective, group):
        def slowed(*arguments, group=group, async_op=True, slow=group):
            work = collective(*arguments, group=group, async_op=async_op)
            if work is not None:  # else there may be one under way while the clock is advanced by another
                work.wait()
            self.now += group is slow
            return work

        slowed.__name__ = collective.__name__
        return slowed

    def slow_bucket(self, reduce, seconds):
        """The reduction of gradients that are not quantized, around all ranks."""

        def slowed(*arguments, **options):
            self.buckets += 1
            self.now += seconds
            return reduce(*arguments, **options)

        return slowed


def watched(cases, recipe="zeropp", steps=9):
    """{name: what was measured, printed and sent} of a run in which links of one kind take a second a message.

    cases: {name: (link that is slow, or "none"; seconds that each step computes beside it; fields of the section)}.
    """
    return {name: _watched(*case, recipe, steps) for name, case in cases.items()}


def _watched(link, computing, fields, recipe, steps):
    clock, printed = _Clock(), io.StringIO()

    @contextlib.contextmanager
    def slow_links(engine):
        topology = engine.zeropp_fp8_session.topology
        slow = {"inter": topology.between.group, "intra": topology.within.group, "none": None}[link]
        exchange = SimpleNamespace(all_to_all_single=clock.slow(dist.all_to_all_single, slow))
        reduce = clock.slow_bucket(ds_comm.reduce_scatter_fn, link == "inter")
        with (
            mock.patch.object(all_gather, "_all_gather_single", clock.slow(all_gather._all_gather_single, slow)),
            mock.patch.object(reduce_scatter, "dist", exchange),
            mock.patch.object(ds_comm, "reduce_scatter_fn", reduce),
            contextlib.redirect_stdout(printed),
        ):
            yield

    @contextlib.contextmanager
    def compute(engine):
        clock.now += computing
        before = clock.now
        yield  # the update takes no time
        clock.now = before

    def shares(engine):
        return next((p.shares for p in engine.zeropp_fp8_session.parts if isinstance(p, bound.StepWatch)), None)

    measures = see(lambda engine: engine.zeropp_fp8_session.ledger.times is not None)
    with mock.patch.object(issue, "time", clock), mock.patch.object(bound, "time", clock):
        events = within(slow_links, *[forward, backward, within(compute, update), measures] * steps)
        *per_step, found = run(Spec(section(**{"recipe": recipe, **fields}), "bf16"), [events, see(shares)]).seen
    text = [line for line in printed.getvalue().splitlines() if "speed-up" in line]
    return found, text, per_step, clock.buckets / steps
