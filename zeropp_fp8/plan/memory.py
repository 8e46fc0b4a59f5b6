"""Bytes a GPU holds, at the two moments that can be the peak: the end of the backward pass, and the optimizer step.

Weights, optimizer states, gradients and the secondary shard are exact up to padding. Gathered blocks are a bound from
the settings. Activations are rough (within a factor of about 1.5): 34 bytes a token, layer and hidden unit in 16 bits
with fused attention (Korthikanti et al., arXiv 2205.05198, eq. 1 without the scores), and 10 bytes a token and word for
the logits, their fp32 copy and its gradient. With LoRA they are the same: an adapter saves the input, which its frozen
layer need not, and little more. Frozen weights have no gradients and no optimizer states. Memory that the CUDA context
(about 0.5 GB), NCCL's buffers and the allocator's fragmentation take is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zeropp_fp8.plan.job import BYTES_16BIT, Job
from zeropp_fp8.plan.methods import Method

FP32_BYTES = 4
ACTIVATION_BYTES = 34
CHECKPOINT_BYTES = 2
LOGIT_BYTES = 10
SUB_GROUP = 1e9  # DeepSpeed's sub_group_size: parameters updated at once
PREFETCHED_BLOCKS = 2
MARGIN = 0.25  # of a GPU, that `secondary.memory_gb` "auto" leaves
TEMPORARIES = 1  # fp32 tensors of a sub-group's size that a torch optimizer needs beside the gradient


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU."""

    weights: float
    states: float
    gradients: float
    residuals: float
    secondary: float
    gathered: float
    activations: float
    update: float

    @property
    def held(self) -> float:
        """What stays through the whole step."""
        return self.weights + self.states + self.gradients + self.residuals + self.secondary

    @property
    def peak(self) -> float:
        """The larger of: end of the forward pass, with gathered blocks and activations; the optimizer step."""
        return self.held + max(self.gathered + self.activations, self.update)


def activation_bytes(job: Job) -> float:
    """Saved for the backward pass of one micro-batch, logits included."""
    model = job.model
    one_layer = ACTIVATION_BYTES * job.tokens * model.hidden
    if job.checkpointing:
        layers = CHECKPOINT_BYTES * job.tokens * model.hidden * model.layers + one_layer
    else:
        layers = one_layer * model.layers
    return layers + LOGIT_BYTES * job.tokens * model.vocabulary


def memory_for_copies(method: Method, job: Job, gpu_bytes: float) -> float:
    """Bytes that `secondary.memory_gb` "auto" gives to copies on a GPU that has so many."""
    without = memory_per_gpu(method, replace(job, copies=0))
    return max(0.0, (1 - MARGIN) * gpu_bytes - without.held)


def memory_per_gpu(method: Method, job: Job) -> MemoryEstimate:
    """What each part takes on one GPU; FSDP2 keeps fp32 parameters and gradients and no 16-bit copy of the shard."""
    model, cluster = job.model, job.cluster
    method.check(job)
    ranks, weights = method.state_ranks(job), method.weights(job)
    shard = job.trained_parameters / ranks
    at_rest = sum(part.numel * (part.code_bytes or BYTES_16BIT) for part in weights) / ranks
    copied, sharing = 0.0, method.copy_ranks(cluster)
    if sharing is not None:
        sizes = (share * part.numel * (part.code_bytes or method.secondary_bytes) for part, share in method.copied(job))
        copied = sum(sizes) / sharing
    gathered = method.kept_parameters(job) + PREFETCHED_BLOCKS * model.block_parameters
    updated = min(shard, SUB_GROUP) if method.deepspeed else shard
    # DeepSpeed makes an fp32 copy of the gradients of the sub-group it updates.
    copies = TEMPORARIES if method.fp32_gradients else TEMPORARIES + 1
    gradient_bytes = method.stored_gradient_bytes
    if gradient_bytes is None:
        gradient_bytes = FP32_BYTES if method.fp32_gradients else BYTES_16BIT
    sums, adding = 0.0, method.sum_ranks(cluster)
    if adding is not None and method.states_sharded_over == "world" and job.micro_batches > 1:
        sums = BYTES_16BIT * job.trained_parameters / adding
    return MemoryEstimate(
        weights=at_rest if method.deepspeed else 0.0,
        states=method.state_bytes * shard,
        gradients=gradient_bytes * shard + sums,
        residuals=method.residual_bytes * job.trained_parameters if cluster.world_size > 1 else 0.0,
        secondary=copied,
        gathered=BYTES_16BIT * min(gathered, model.parameters),
        activations=activation_bytes(job),
        update=0.0 if method.fused_update else copies * FP32_BYTES * updated,
    )
