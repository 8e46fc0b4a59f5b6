"""Jobs in which DeepSpeed's comms logger looks at what the plugin sends."""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict

import torch
import torch.distributed as dist
from models import batches, ds_config, llama, make_engine
from recipes import section_of
from running import loss_of, trained

import zeropp_fp8

STEPS = 2


def _trained(way, dtype, fields=None, **logger):
    """(engine, losses) of some steps, seen by a comms logger that begins empty."""
    from deepspeed import comm as ds_comm

    ds_comm.comms_logger.reset_data()
    ds_comm.configure(enabled=False)
    config = ds_config(section_of(way, **(fields or {})), dtype, **({"comms_logger": logger} if logger else {}))
    engine, losses = make_engine(llama(), config), []
    ds_comm.comms_logger.reset_data()  # what making an engine has sent is no step's
    losses += trained(engine, batches(STEPS, dist.get_rank()))
    return engine, losses


def _of_kinds(record):
    """{kind: bytes} of the plugin's rows of a comms logger."""
    sent = defaultdict(float)
    for name, messages in record.items():
        if name.startswith("zeropp_fp8 "):
            sent[name.split(" of ")[1].split()[0]] += sum(size * seen[0] for size, seen in messages.items())
    return dict(sent)


def logged(ways, dtype="bf16"):
    """{way: what a comms logger and the ledger say of the same steps}."""
    from deepspeed import comm as ds_comm

    zeropp_fp8.enable()
    found = {}
    for way in ways:
        plain, losses = _trained(way, dtype)
        silent = _of_kinds(ds_comm.comms_logger.get_raw_data())
        plain.destroy()
        engine, logged_losses = _trained(way, dtype, enabled=True, prof_all=True, verbose=False, debug=False)
        record = ds_comm.comms_logger.get_raw_data()
        report = zeropp_fp8.wire_report(engine, total=True)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            ds_comm.log_summary(show_straggler=True)
        summary = ds_comm.log_summary(return_dict=True)["summary"]
        engine.destroy()
        found[way] = {
            "losses": (losses, logged_losses),
            "silent": silent,
            "logged": _of_kinds(record),
            "ledger": {kind: sum(links.values()) * STEPS for kind, links in report["per_step"].items()},
            "names": sorted(name for name in record if name.startswith("zeropp_fp8 ")),
            "stock": {name: {size: seen[0] for size, seen in record[name].items()} for name in record},
            "times": [ms for row in record.values() for seen in row.values() for ms in seen[1]],
            "rates": [
                (size * 8 / ms / 1e6, rate)
                for name, row in record.items()
                if name.startswith("zeropp_fp8 ")
                for size, seen in row.items()
                for ms, rate in zip(seen[1], seen[3])
            ],
            "printed": printed.getvalue(),
            "summary": sorted(summary),
        }
    ds_comm.configure(enabled=False)
    return found


def with_samples(path):
    """What a comms logger and the ledger say of "other" bytes of all ranks, without and with samples and a watch."""
    from deepspeed import comm as ds_comm

    zeropp_fp8.enable()
    found = []
    for numerics in ({}, {"every": 1, "parts": 1, "file": path, "watch": "stop"}):
        logger = {"enabled": True, "prof_all": True, "verbose": False, "debug": False}
        engine, _ = _trained("zeropp", "bf16", {"numerics": numerics}, **logger)
        logged = _of_kinds(ds_comm.comms_logger.get_raw_data()).get("other", 0) * dist.get_world_size()
        found.append((logged, sum(zeropp_fp8.wire_report(engine, total=True)["per_step"]["other"].values()) * STEPS))
        engine.destroy()
    ds_comm.configure(enabled=False)
    return found


def beside_stock(accumulations):
    """{(accumulation, whether it is stock): the comms logger's {row: {bytes: times}}} of `lossless`, by modules."""
    from deepspeed import comm as ds_comm
    from models import section
    from running import switch

    found = {}
    for accumulation in accumulations:
        for stock in (True, False):
            switch(not stock)
            ds_comm.configure(enabled=False)
            logger = {"enabled": True, "prof_all": True, "verbose": False, "debug": False}
            options = {"gradient_accumulation_steps": accumulation, "comms_logger": logger}
            the_section = None if stock else section("lossless", gather_granularity="module")
            engine = make_engine(llama(), ds_config(the_section, "bf16", **options))
            ds_comm.comms_logger.reset_data()
            for tokens in batches(STEPS * accumulation, dist.get_rank()):
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                engine.step()
            record = ds_comm.comms_logger.get_raw_data()
            found[accumulation, stock] = {n: {size: seen[0] for size, seen in row.items()} for n, row in record.items()}
            engine.destroy()
    ds_comm.configure(enabled=False)
    return found


class _Backend:
    """Counts the collectives, and the bytes for other ranks, that are handed to the backend inside of it."""

    def __init__(self):
        self.calls, self.sent = defaultdict(int), 0

    def __enter__(self):
        from zeropp_fp8.comm import all_gather

        self._module, self._stock = all_gather, (all_gather._all_gather_single, dist.all_to_all_single)

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
        self._module._all_gather_single, dist.all_to_all_single = self._stock


def handed_over(cases, dtype="bf16"):
    """{case: ({operation: messages}, the same by what is handed to the backend, bytes for others by both)}.

    cases: {name: (way, accumulation, fields)}. Bytes of all ranks.
    """
    from deepspeed import comm as ds_comm

    zeropp_fp8.enable()
    found = {}
    for name, (way, accumulation, fields) in cases.items():
        logger = {"enabled": True, "prof_all": True, "verbose": False, "debug": False}
        options = {"gradient_accumulation_steps": accumulation, "comms_logger": logger}
        engine = make_engine(llama(), ds_config(section_of(way, **fields), dtype, **options))
        ds_comm.comms_logger.reset_data()
        with _Backend() as backend:
            for tokens in batches(STEPS * accumulation, dist.get_rank()):
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                engine.step()
        logged, num_bytes = defaultdict(int), 0.0
        for row, messages in ds_comm.comms_logger.get_raw_data().items():
            operation = row.split()[1] if row.startswith("zeropp_fp8 ") else None
            if operation in backend.calls:
                logged[operation] += sum(seen[0] for seen in messages.values())
                num_bytes += sum(size * seen[0] for size, seen in messages.items())
        totals = torch.tensor([num_bytes, backend.sent], dtype=torch.float64)
        dist.all_reduce(totals)
        engine.destroy()
        found[name] = dict(logged), dict(backend.calls), totals.tolist()
    ds_comm.configure(enabled=False)
    return found


def some_operations(way="zeropp"):
    """Names in the record of a logger that is asked for reductions only."""
    from deepspeed import comm as ds_comm

    zeropp_fp8.enable()
    logger = {"enabled": True, "prof_all": False, "prof_ops": ["all_to_all_single"], "verbose": False, "debug": False}
    engine, _ = _trained(way, "bf16", **logger)
    names = sorted(ds_comm.comms_logger.get_raw_data())
    ds_comm.configure(enabled=False)
    engine.destroy()
    return names


def _lora_llama():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


def flops(ways, models=("llama", "lora")):
    """{(model, way): (FLOPs, MACs) of a forward pass}; with "plain" (no engine), "stock", and of
    each way inside generation too.

    By DeepSpeed's profiler: of an engine as its ds_config asks for, of a plain model by get_model_profile.
    """
    import torch.nn.functional as F
    from deepspeed.profiling.flops_profiler import get_model_profile
    from running import switch

    (tokens,) = batches(1, 0)
    quiet = {"print_profile": False, "as_string": False}
    inputs = {"input_ids": tokens, "use_cache": False}
    makers = {"llama": llama, "lora": _lora_llama}
    # Before any engine of DeepSpeed, which replaces torch's linear function for good.
    found = {(name, "plain"): get_model_profile(makers[name](), kwargs=inputs, **quiet)[:2] for name in models}
    for name in models:
        make = makers[name]
        for way in ("stock", *ways):
            switch(way != "stock")
            profiler = {"enabled": True, "profile_step": 0, "detailed": False, "output_file": "/dev/null"}
            section = None if way == "stock" else section_of(way)
            options = {"flops_profiler": profiler, "gradient_accumulation_steps": 2}
            engine = make_engine(make(), ds_config(section, "bf16", **options))
            before, by_micro_batch = F.linear, []
            for _ in range(2):
                loss = engine(**inputs, labels=tokens).loss
                assert F.linear is before
                if dist.get_rank() == 0:  # where DeepSpeed profiles
                    counted = engine.flops_profiler
                    by_micro_batch.append((counted.get_total_flops(), counted.get_total_macs()))
                engine.backward(loss)
                engine.step()
            if by_micro_batch:  # DeepSpeed counts each anew, and prints the last of the step
                found[name, way], again = by_micro_batch
                assert again == found[name, way]
            assert engine.module(**inputs).logits.isfinite().all()
            if way != "stock":
                engine.eval()
                for weights in ("values", "codes"):
                    with torch.no_grad(), zeropp_fp8.generation(engine, weights, merge_adapters=False) as model:
                        found[name, f"{way}, {weights}"] = get_model_profile(model, kwargs=inputs, **quiet)[:2]
            engine.destroy()
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
        """DeepSpeed's own reduction of gradients, around all ranks."""

        def slowed(*arguments, **options):
            self.buckets += 1
            self.now += seconds
            return reduce(*arguments, **options)

        return slowed


def watched(cases, recipe="zeropp", steps=9):
    """{name: what was measured, printed and sent} of a run in which links of one kind take a second a message.

    cases: {name: (link that is slow, or "none"; seconds that each step computes beside it; fields of the section)}.
    """
    from types import SimpleNamespace

    from deepspeed.runtime.zero import stage3 as by_deepspeed
    from models import section

    from zeropp_fp8.comm import all_gather, issue, reduce_scatter
    from zeropp_fp8.zero import bound

    zeropp_fp8.enable()
    gather, exchange, found = all_gather._all_gather_single, dist.all_to_all_single, {}
    reduce_bucket = by_deepspeed.reduce_scatter_coalesced
    for name, (link, computing, fields) in cases.items():
        clock, printed = _Clock(), io.StringIO()
        issue.time = bound.time = clock
        engine = make_engine(llama(), ds_config(section(**{"recipe": recipe, **fields}), "bf16"))
        by_deepspeed.reduce_scatter_coalesced = clock.slow_bucket(reduce_bucket, link == "inter")
        topology, per_step = engine.zeropp_fp8_session.topology, []
        slow = {"inter": topology.between.group, "intra": topology.within.group, "none": None}[link]
        all_gather._all_gather_single = clock.slow(gather, slow)
        reduce_scatter.dist = SimpleNamespace(all_to_all_single=clock.slow(exchange, slow))
        with contextlib.redirect_stdout(printed):
            for tokens in batches(steps, dist.get_rank()):
                loss = loss_of(engine, tokens)
                engine.backward(loss)
                clock.now += computing
                before = clock.now
                engine.step()
                clock.now = before
                per_step.append(engine.zeropp_fp8_session.ledger.times is not None)
        all_gather._all_gather_single, reduce_scatter.dist = gather, dist
        by_deepspeed.reduce_scatter_coalesced = reduce_bucket
        shares = next((p.shares for p in engine.zeropp_fp8_session.parts if isinstance(p, bound.StepWatch)), None)
        text = [line for line in printed.getvalue().splitlines() if "speed-up" in line]
        engine.destroy()
        found[name] = shares, text, per_step, clock.buckets / steps
    return found
