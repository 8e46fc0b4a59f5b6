"""Which recipe to take for a job: the most careful one that is about as fast as the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from zeropp_fp8.plan.hardware import Hardware
from zeropp_fp8.plan.job import Job, PlanError
from zeropp_fp8.plan.memory import memory_for_copies
from zeropp_fp8.plan.methods import METHODS, Method
from zeropp_fp8.plan.rlhf import IterationEstimate
from zeropp_fp8.plan.step_time import WIRE_INTER, WIRE_INTRA, StepEstimate, estimate

# The most careful first. `mxfp8` is no faster before Blackwell and is there to be studied; `fp8-lm-o2` is for memory.
_BF16 = ("stock", "lossless", "zeropp", "zeropp-diff", "zeropp-2bit", "zeropp-4bit")
FULL = (*_BF16, "fp8-lm-o1", "fp8-lm-zeropp", "fp8-lm")
LORA = (*_BF16, "qlora")
PCIE = "zeropp-pcie"  # every rank a node of its own
SAME = 0.15  # faster by less says nothing: most of the measured steps of docs/planning.md are modelled within it
GIB = 2**30


@dataclass(frozen=True)
class Advice:
    """A recipe, or "stock"; why, in words; the estimates that it is taken from, the most careful first; whether it fits
    into the memory of a GPU."""

    recipe: str
    text: str
    estimates: tuple[StepEstimate | IterationEstimate, ...]
    fits: bool = True


Estimator = Callable[[Method, Job, Hardware], StepEstimate | IterationEstimate]


def estimates_of_recipes(
    job: Job, hardware: Hardware, gpu_bytes: float | None = None, estimator: Estimator = estimate
) -> list[StepEstimate | IterationEstimate]:
    """Of stock and of each recipe that can train the job, the most careful first.

    FP8 compute is left out where the hardware multiplies it no faster. `zeropp-pcie` is planned on one node as it runs
    there, as nodes of one GPU that send at the rate within the node, which what it sends counts as; copies of its codes
    take what `gpu_bytes` leave.
    """
    names = [name for name in (LORA if job.lora else FULL) if _computes(name, hardware)]
    found = [estimator(METHODS[name], job, hardware) for name in names]
    ranks = job.cluster.ranks_per_node
    if job.cluster.nodes == 1 and ranks > 1 and estimator is estimate:
        alone = replace(job.cluster, nodes=ranks, ranks_per_node=1, inter_gbit=8 * hardware.intra_gbs)
        alone_job = replace(job, cluster=alone)
        if gpu_bytes is not None:
            alone_job = replace(alone_job, copies=memory_for_copies(METHODS[PCIE], alone_job, gpu_bytes))
        one = estimate(METHODS[PCIE], alone_job, replace(hardware, link_efficiency=1.0))
        bound = WIRE_INTRA if one.bound == WIRE_INTER else one.bound
        found.append(replace(one, inter_bytes=0.0, intra_bytes=one.inter_bytes, bound=bound))
    return found


def _computes(name: str, hardware: Hardware) -> bool:
    return not METHODS[name].fp8_products or hardware.fp8_tflops > hardware.matrix_tflops


def recommend(job: Job, hardware: Hardware, gpu_bytes: float | None = None, estimator: Estimator = estimate) -> Advice:
    """Of what fits into `gpu_bytes` the most careful recipe whose step is at most `SAME` longer than the shortest.

    Where nothing fits it is the one with the smallest peak of memory.
    """
    found = estimates_of_recipes(job, hardware, gpu_bytes, estimator)
    stock = found[0]
    fits = [one for one in found if gpu_bytes is None or one.memory.peak <= gpu_bytes]
    if not fits:
        chosen = min(found, key=lambda one: one.memory.peak)
        text = (
            f"nothing fits into {gpu_bytes / GIB:.3g} GiB a GPU: {chosen.method} needs {chosen.memory.peak / GIB:.3g}, "
            "the least of all; take more ranks, fewer tokens or --checkpointing"
        )
        return Advice(chosen.method, text, tuple(found), fits=False)
    fastest = min(one.step_s for one in fits)
    chosen = next(one for one in fits if one.step_s <= (1 + SAME) * fastest)
    if chosen is stock:
        text = f"recommended: stock DeepSpeed; no recipe is faster by more than {SAME:.0%}, {stock.bound} bounds a step"
    else:
        a_unit = "an iteration" if isinstance(chosen, IterationEstimate) else "a step"
        gain = f"{stock.step_s / chosen.step_s:.2f} x stock" + ("" if stock in fits else ", which does not fit")
        text = f"recommended: {chosen.method}, {1e3 * chosen.step_s:.1f} ms {a_unit} ({gain}; bound by {chosen.bound})"
        if chosen.memory.secondary:
            bits = "" if job.lora else f" in {8 * METHODS[chosen.method].secondary_bytes:.3g} bits a parameter"
            text += f"; copies of the weights{bits} take {chosen.memory.secondary / GIB:.2f} GiB a GPU"
    return Advice(chosen.method, text, tuple(found))


def ds_config_of(recipe: str, job: Job) -> dict[str, Any]:
    """A ds_config of stage 3 with the recipe, for a job whose sequences and accumulation are known.

    Raises:
        PlanError: there is no such recipe (a method of the plan alone).
    """
    if recipe not in {*FULL, *LORA, PCIE}:
        raise PlanError(f"{recipe} is no recipe; recipes are {', '.join(dict.fromkeys((*FULL[1:], *LORA[1:], PCIE)))}")
    section = {} if recipe == "stock" else {"zeropp_fp8": {"recipe": recipe}}
    return {
        "train_micro_batch_size_per_gpu": job.tokens // job.sequence_length,
        "gradient_accumulation_steps": job.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 10**8,
            "stage3_prefetch_bucket_size": 10**8,
            "stage3_max_live_parameters": int(job.kept_parameters),
            "stage3_max_reuse_distance": int(job.kept_parameters),
            "stage3_param_persistence_threshold": 10**5,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **section,
    }
