"""A registry of torchtitan's, of its Llama debug model: as it is, and with this project's collectives."""

from __future__ import annotations

from torch.distributed.fsdp import FSDPModule
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from zeropp_fp8.fsdp2 import torchtitan


def stock():
    return summed(llama3_debugmodel())


def lossless():
    return summed(torchtitan.with_collectives(llama3_debugmodel(), recipe="lossless", ranks_per_node=2))


def zeropp():
    return torchtitan.with_collectives(llama3_debugmodel(), recipe="zeropp", ranks_per_node=2)


def with_error_feedback():
    gradients = {"error_feedback": True}
    config = llama3_debugmodel()
    return torchtitan.with_collectives(config, recipe="zeropp-4bit", ranks_per_node=2, gradients=gradients)


def summed(config):
    """gloo multiplies no gradients on the way, as NCCL does for torchtitan's divide factor of 1."""
    shard = config.model_spec.parallelize_fn

    def parallelize(model, **settings):
        model = shard(model, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    config.model_spec.parallelize_fn = parallelize
    return config
