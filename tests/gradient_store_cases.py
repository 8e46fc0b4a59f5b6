"""A GradientStore with gradients in it, in one process and on any device."""

from __future__ import annotations

import types

import torch

from zeropp_fp8.config import resolve
from zeropp_fp8.formats import SharedScaleFormat
from zeropp_fp8.zero.reduce import gradient_scales
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import make_state_groups

CPU = torch.device("cpu")
SHAPES = ((70, 30), (33,), (1, 5), (64, 64), (7,), (0, 4))


def fake_params(shapes=SHAPES):
    return [
        types.SimpleNamespace(ds_id=10 + 3 * i, ds_shape=torch.Size(shape), ds_numel=torch.Size(shape).numel())
        for i, shape in enumerate(shapes)
    ]


def names(params):
    """As in a checkpoint."""
    return [f"parameter {p.ds_id}" for p in params]


def fake_session(device=CPU, world=1, nodes=1, **gradients):
    """Make a session with the parts that GradientScales needs; its ledger only counts."""
    fields = {"intra_format": "fp8_e4m3", "inter_format": "fp8_e4m3", "scales": "tensor", **gradients}
    config = resolve({"zero_optimization": {"stage": 3}, "zeropp_fp8": {"gradients": fields}})
    sent = []
    return types.SimpleNamespace(
        config=config,
        device=device,
        formats=types.SimpleNamespace(within=SharedScaleFormat(fields["intra_format"])),
        topology=types.SimpleNamespace(world_size=world, nodes=nodes, group=None),
        ledger=types.SimpleNamespace(
            sent_around_ring=lambda num_bytes, rounds=1.0: sent.append(num_bytes * rounds),
            comms_logger=None,
            times=None,
            kind="other",
            world_size=world,
        ),
        sent=sent,
    )


def filled_store(device):
    """Sums of two micro-batches for all parameters but the first, which has codes at once."""
    params = fake_params()
    session = fake_session(device)
    scales = gradient_scales.GradientScales(session, params, names(params))
    groups = make_state_groups([params], lambda p: p.ds_numel, device)
    store = GradientStore(session.formats.within, scales, groups, torch.float32)
    generator = torch.Generator().manual_seed(0)
    for i, p in enumerate(params):
        values = torch.randn(p.ds_numel, generator=generator) * 10.0 ** (i - 3)
        if i == 0:
            codes = torch.randint(0, 0x70, (p.ds_numel,), generator=generator).to(torch.uint8)
            store.destinations([p], True, again=False)[0].copy_(codes)
        else:
            store.destinations([p], False, again=False)[0].copy_(values)
            store.destinations([p], True, again=True)[0].add_(values.to(device) ** 2)
    return store
