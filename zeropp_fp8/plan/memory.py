"""Bytes a GPU holds, at the two moments that can be the peak: the end of the forward pass, and the optimizer step.

Weights, optimizer states, gradients and the secondary shard are exact up to padding. Gathered blocks are a bound from
the settings. Activations are rough, those of a Llama with fused attention, counted tensor by tensor as Korthikanti et
al. do (arXiv 2205.05198, section 4.1), for a token and layer and a hidden width h, intermediate width i:

    16 bits      26 h + 8 i   8 h a norm (in fp32, as transformers writes it, normalized and scaled), 6 h of q, k and v,
                              4 h of attention's result in two layouts, 2 i each of gate, up, SiLU and product
    compiled     18 h + 6 i   4 h a norm; SiLU is computed again
    FP8          15 h + 7 i   2 h a norm; what only linear layers read is a byte

and 10 bytes per token and word for the logits, their fp32 copy and its gradient. With LoRA the same; frozen weights
have no gradients and no states. The CUDA context (about 0.5 GB), NCCL's buffers and fragmentation are not counted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from zeropp_fp8.plan.job import BYTES_16BIT, Job
from zeropp_fp8.plan.methods import Method

FP32_BYTES = 4
CHECKPOINT_BYTES = 2
LOGIT_BYTES = 10
SUB_GROUP = 1e9  # DeepSpeed's sub_group_size: parameters updated at once
PREFETCHED_BLOCKS = 2
MARGIN = 0.25  # of a GPU, that `secondary.memory_gb` "auto" leaves
# fp32 tensors of a sub-group's size in DeepSpeed's step, one of them its copy of the gradients; 1.7 were measured of
# this project, too, when it left the step to DeepSpeed (benchmarks/results/two_nodes/h200-2-nvlink-compiled.json).
UPDATE_COPIES = 2
UPDATE_CHUNK = 2**26  # elements whose fp32 gradients this project makes at once


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU; `late_gradients` are those not yet there when activations are at their largest."""

    weights: float
    states: float
    gradients: float
    residuals: float
    secondary: float
    gathered: float
    activations: float
    update: float
    late_gradients: float

    @property
    def held(self) -> float:
        return self.weights + self.states + self.gradients + self.residuals + self.secondary

    @property
    def peak(self) -> float:
        """The larger of: end of the forward pass, with gathered blocks and activations; the optimizer step."""
        return self.held + max(self.gathered + self.activations - self.late_gradients, self.update)


def activation_bytes(method: Method, job: Job) -> float:
    """Saved for the backward pass of one micro-batch, logits included."""
    model = job.model
    of_hidden, of_intermediate = (15, 7) if method.fp8_products else (18, 6) if method.compiled else (26, 8)
    one_layer = job.tokens * (of_hidden * model.hidden + of_intermediate * model.intermediate)
    if job.checkpointing:
        layers = CHECKPOINT_BYTES * job.tokens * model.hidden * model.layers + one_layer
    else:
        layers = one_layer * model.layers
    return layers + LOGIT_BYTES * job.tokens * model.vocabulary


def memory_for_copies(method: Method, job: Job, gpu_bytes: float) -> float:
    """Bytes that `secondary.memory_gb` "auto" gives to copies on a GPU that has so many."""
    without = memory_per_gpu(method, replace(job, copies=0))
    return max(0.0, (1 - MARGIN) * gpu_bytes - without.held)


def with_copies(method: Method, job: Job, gpu_bytes: float | None = None, limit: float | str | None = None) -> Job:
    """The job with what copies of codes may take: `limit`, else the method's own; without `gpu_bytes` "auto" is all."""
    limit = method.copies if limit is None else limit
    if limit == "auto":
        limit = gpu_bytes and memory_for_copies(method, job, gpu_bytes)
    return job if limit is None else replace(job, copies=limit)


@functools.lru_cache
def memory_per_gpu(method: Method, job: Job) -> MemoryEstimate:
    """The bytes of each part on one GPU; FSDP2 keeps fp32 parameters and gradients and no 16-bit copy of the shard, and
    as with this project, gradients come into being in the backward pass of the first micro-batch."""
    model, cluster = job.model, job.cluster
    method.check(job)
    ranks, weights = method.state_ranks(job), method.weights(job)
    shard = job.trained_parameters / ranks
    stored = sum(part.numel * (part.code_bytes or BYTES_16BIT) for part in weights) / ranks
    copied, sharing = 0.0, method.copy_ranks(cluster)
    if sharing is not None:
        for part, share in method.copied(job):
            size = share * part.numel * (part.code_bytes or method.secondary_bytes)
            copied += size / sharing - (size / ranks if part.code_bytes else 0.0)  # the copy has stored codes
    gathered = method.kept_parameters(job) + PREFETCHED_BLOCKS * model.block_parameters
    stock, update = method.deepspeed and method.host_by_tensor, 0.0
    if stock:
        update = UPDATE_COPIES * FP32_BYTES * min(shard, SUB_GROUP)
    elif method.deepspeed and not method.fused_update:  # torch's fused AdamW, FSDP2's, updates in place
        update = FP32_BYTES * min(shard, UPDATE_CHUNK)
    gradient_bytes = method.stored_gradient_bytes
    if gradient_bytes is None:
        gradient_bytes = FP32_BYTES if method.fp32_gradients else BYTES_16BIT
    # What stores gradients in few bits keeps their memory, as stock does.
    come_in_backward = not stock and method.stored_gradient_bytes is None and job.micro_batches == 1
    sums, adding = 0.0, method.sum_ranks(cluster)
    if adding is not None and method.states_sharded_over == "world" and job.micro_batches > 1:
        sums = BYTES_16BIT * job.trained_parameters / adding
    return MemoryEstimate(
        weights=stored if method.deepspeed else 0.0,
        states=method.state_bytes * shard,
        gradients=gradient_bytes * shard + sums,
        residuals=method.residual_bytes * job.trained_parameters if cluster.world_size > 1 else 0.0,
        secondary=copied,
        gathered=BYTES_16BIT * min(gathered, model.parameters),
        activations=activation_bytes(method, job),
        update=update,
        late_gradients=gradient_bytes * shard if come_in_backward else 0.0,
    )
