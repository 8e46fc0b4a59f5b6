"""Jobs whose optimizer updates some elements after the others, as on large models, that run on ranks."""

from __future__ import annotations

import functools
from unittest import mock

import torch
from deepspeed.utils import safe_get_full_grad
from models import section
from ranks import attempt
from running import (
    Spec,
    allow_fp16_on_cpu,
    backward,
    differing,
    forward,
    on_engine,
    resumed,
    run,
    scaled,
    see,
    step,
    update,
)
from whole_jobs import fields

from zeropp_fp8.zero import chunks
from zeropp_fp8.zero.as_deepspeed import GRAD_PARTITIONS

CHUNK = 1024  # of 31,000 to 62,000 elements of a rank
LEFT = ("weights", "masters")
CLIPPED = {"gradient_clipping": 0.05}
SUB_GROUPS = {"zero_optimization": {"sub_group_size": 9_999}}
ADAM = functools.partial(torch.optim.Adam, lr=1e-3, weight_decay=0.1)
# {name: (dtype, config, optimizer)}
CASES = {
    "fp32": ("fp32", SUB_GROUPS, "adamw"),
    "bf16, clipped": ("bf16", CLIPPED, functools.partial(ADAM, amsgrad=True, fused=True)),
    "bf16, clipped, sub-groups": ("bf16", {**CLIPPED, **SUB_GROUPS}, functools.partial(ADAM, foreach=True)),
    "fp16": ("fp16", {**CLIPPED, **SUB_GROUPS}, "adamw"),
    "offload": ("bf16", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "adamw"),
    "momentum": ("bf16", {}, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
}


def overflowed(engine):
    assert engine.optimizer.overflow


OVERFLOWS = [forward, scaled(1e6), backward, update, on_engine(overflowed)]
STORES = {
    "scale per tensor": {"recipe": "fp8-lm-o1", "compute": {"format": "none"}},
    "scale per block": {"recipe": "zeropp", "gradients": {"store_format": "fp8_e4m3", "block_size": 128}},
}


def kept(engine):
    """Names and values of the optimizer's own states, in their order; only DeepSpeed's flat tensors have any."""
    state, flats = engine.optimizer.optimizer.state, engine.optimizer.fp32_partitioned_groups_flat
    assert set(map(id, state)) == set(map(id, flats))
    return [[(name, torch.as_tensor(value).clone()) for name, value in state[flat].items()] for flat in flats]


def gradients(engine):
    return {name: safe_get_full_grad(param) for name, param in engine.module.named_parameters()}


def trained(spec, chunk, overflows=False):
    """Traces of `resumed`, with the sizes of the updates."""
    sizes, by_chunks = [], chunks.step_by_chunks

    def counted(optimizer, flat, step_of):
        def seen(start, part):
            sizes.append(part.numel())
            step_of(start, part)

        by_chunks(optimizer, flat, seen)

    with mock.patch.object(chunks, "CHUNK", chunk), mock.patch("zeropp_fp8.zero.as_deepspeed.step_by_chunks", counted):
        half = [step, *OVERFLOWS * overflows, forward, backward, see(gradients), update, step, see(kept)]
        return resumed(spec, half, half, LEFT), sizes


def beside_stock(case):
    """(how each trace of the plugin differs from stock's, sizes of updates)."""
    dtype, config, optimizer = CASES[case]
    if dtype == "fp16":
        allow_fp16_on_cpu()
    stock = Spec(None, dtype, config, optimizer=optimizer, leaves=("LlamaDecoderLayer",))
    own = Spec(section("lossless"), dtype, config, optimizer=optimizer)
    expected, _ = trained(stock, CHUNK, overflows=dtype == "fp16")
    found, sizes = trained(own, CHUNK, overflows=dtype == "fp16")
    return [differing(*pair) for pair in zip(found, expected)], sizes


def beside_whole(given):
    """The same beside the plugin whose updates are of all elements at once, for a section."""
    spec = Spec(section(**given), "bf16", {**CLIPPED, **SUB_GROUPS})
    expected, whole = trained(spec, 10**9)
    found, sizes = trained(spec, CHUNK)
    return [differing(*pair) for pair in zip(found, expected)], sizes, whole


def whole_tensors():
    return beside_whole({"recipe": "lossless", **fields()})


def stored(store):
    """And how often FP8 gradients that are read by ranges differ from those read by parameters."""
    wrong = run(Spec(section(**STORES[store]), "bf16", SUB_GROUPS), [forward, backward, see(ranges_that_differ)])
    return *beside_whole(STORES[store]), sum(wrong.seen)


def ranges_that_differ(engine):
    stage, wrong = engine.optimizer, 0
    stage.gradients.norms()  # the step begins
    for index, params in enumerate(stage.fp16_groups):
        expected = torch.cat([stage._get_fp32_grad_state_partition(param, False)[0] for param in params])
        assert expected.any()
        for start, stop in ((0, expected.numel()), (1, 1500), (1023, 1024), (1024, 5000), (700, expected.numel())):
            out = torch.full((max(0, min(stop, expected.numel()) - start),), torch.nan)
            stage.gradients.copy_range(index, start, out)
            wrong += not torch.equal(out, expected[start:stop])
    return wrong


def gradients_at_rest(section_of, offload):
    """Bytes of gradients before and after each backward and update, and what reading one says after the update."""

    def held(engine):
        partitions = getattr(engine.optimizer, GRAD_PARTITIONS).values()
        return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in partitions}.values())

    def read(engine):
        return attempt(lambda: safe_get_full_grad(engine.module.model.norm.weight))

    config = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}} if offload else {}
    events = [forward, see(held), backward, see(held), see(gradients), update, see(held), see(read)]
    return run(Spec(section(section_of), "bf16", config), events * 2).seen
