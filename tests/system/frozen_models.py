"""Models with a frozen store, for jobs on ranks: their codes, what these decode to, and what their engines need."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from frozen_jobs import TARGETS, wire_format_of
from models import batches, ds_config, section
from running import allow_fp16_on_cpu, loss_of

from zeropp_fp8.zero.frozen.store import stored_weight

# The weights of models.llama() that are stored where nothing is named.
LINEAR = [f"model.layers.{i}.self_attn.{n}_proj.weight" for i in (0, 1) for n in "qkvo"] + [
    f"model.layers.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in ("gate", "up", "down")
]
ON_CPU = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
KEPT_LIVE = {
    "zero_optimization": {
        "stage3_prefetch_bucket_size": 10**6,
        "stage3_max_live_parameters": 10**7,
        "stage3_max_reuse_distance": 10**7,
    }
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain(name):
    """The name that a parameter has in the model without PEFT."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "").replace(".original_module", "")


def with_adapters(model, **options):
    """LoRA adapters of the model's dtype, whose effect is not zero from the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    options = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=False)


def codes(model):
    """{plain name: this rank's payload} of stored parameters."""
    return {plain(n): p.ds_tensor.detach().clone() for n, p in model.named_parameters() if stored_weight(p)}


def same(these, those):
    return sorted(these) == sorted(those) and all(torch.equal(these[n], those[n]) for n in these)


def decoded(model):
    """{plain name: what all ranks' payloads decode to} of stored parameters, with nothing gathered by the plugin."""
    numbers = {}
    for name, param in model.named_parameters():
        stored = stored_weight(param)
        if stored is not None:
            rows = [torch.empty_like(param.ds_tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, param.ds_tensor.detach())
            flat = stored.wire_format.decode_rows(torch.stack(rows), stored.part_numel, stored.dtype).view(-1)
            numbers[plain(name)] = flat[: param.ds_numel].view(param.ds_shape)
    return numbers


def rounded(weight, fields):
    """Return what the codes of a whole weight decode to."""
    wire_format = wire_format_of(fields)
    return wire_format.decode(wire_format.encode(weight), weight.shape, weight.dtype)


@torch.no_grad()
def evaluate(engine):
    """The loss on one batch of this rank's own."""
    engine.eval()
    tokens = next(batches(1, dist.get_rank(), seed=9))
    loss = float(loss_of(engine, tokens))
    engine.train()
    return loss


def gathered(model, modifier_rank=None):
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=modifier_rank)


@contextlib.contextmanager
def hugging_face_knows(config):
    """Let from_pretrained and PEFT know the ds_config, as TrainingArguments(deepspeed=...) does."""
    from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

    kept = HfDeepSpeedConfig(config)
    yield kept
    unset_hf_deepspeed_config()


def config_of(fields, dtype="fp32", ranks_per_node=None, overrides=None, **more):
    if dtype == "fp16":
        allow_fp16_on_cpu()
    ranks_per_node = ranks_per_node or (2 if dist.get_world_size() % 2 == 0 else 1)
    return ds_config(section("lossless", ranks_per_node, frozen=fields, **more), dtype, **(overrides or {}))
