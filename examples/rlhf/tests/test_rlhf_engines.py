"""Optimizers of trained models, and what frozen copies of these are stored in."""

from types import SimpleNamespace

import basics
import pytest
import torch
from common.engines import frozen_ds_config

ONE_SCALE = {"format": "fp8_e4m3", "scales": "tensor"}
# section, --frozen_format: the "frozen" section; None: the ds_config as it is
CASES = {
    "zeropp": ({"recipe": "zeropp"}, None, {"format": "int8", "block_size": 256}),
    "zeropp, int4": ({"recipe": "zeropp"}, "int4", {"format": "int4"}),
    "zeropp, as sent": ({"recipe": "zeropp"}, "int8", {"format": "int8", "block_size": 256}),
    "zeropp, 16 bits": ({"recipe": "zeropp"}, "none", {"format": "none"}),
    "fp8-lm": ({"recipe": "fp8-lm"}, None, ONE_SCALE),
    "fp8-lm, named": ({"recipe": "fp8-lm"}, "fp8_e4m3", ONE_SCALE),
    "fp8-lm, 16 bits": ({"recipe": "fp8-lm"}, "none", {"format": "none"}),
    "weights sent in 16 bits": ({"recipe": "fp8-lm-o2"}, None, ONE_SCALE),
    "FP8 in tiles": (
        {"recipe": "fp8-lm", "compute": {"format": "fp8", "scaling": "block"}},
        None,
        {"format": "fp8_e4m3", "block_size": 256},
    ),
    "FP8 of INT8": (
        {"recipe": "zeropp", "compute": {"format": "fp8"}},
        None,
        {"format": "int8", "block_size": 256},
    ),
    "mxfp8": ({"recipe": "mxfp8"}, None, {"format": "mxfp8_e4m3", "block_size": 32}),
    "lossless": ({"recipe": "lossless"}, None, {"format": "none"}),
    "qlora": ({"recipe": "qlora"}, None, None),
}


@pytest.mark.parametrize("case", CASES)
def test_frozen_ds_config(case):
    section, frozen_format, wanted = CASES[case]
    ds_config = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "zeropp_fp8": section}
    ds_config["train_micro_batch_size_per_gpu"] = 1
    made = frozen_ds_config({**ds_config, "optimizer": {"type": "AdamW"}}, frozen_format)
    if wanted is None:
        assert made == ds_config
    else:
        assert made == {**ds_config, "zeropp_fp8": {**section, "frozen": wanted}}


def test_stock():
    ds_config = {"zero_optimization": {"stage": 3}, "scheduler": {"type": "WarmupLR"}}
    assert frozen_ds_config(ds_config, "int8") == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize("device, fused", [("cpu", False), ("cuda", True)])
def test_adamw_is_fused_on_a_gpu(device, fused, monkeypatch):
    monkeypatch.setattr(basics, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    optimizer = basics.adamw(torch.nn.Linear(4, 4), lr=1e-3, weight_decay=0.1)
    assert [(group["fused"], group["weight_decay"]) for group in optimizer.param_groups] == [(fused, 0.1), (fused, 0.0)]
