"""Which recipe to take for a job: the one place that decides, for the plan, the doctor and the documentation.

Recipes are ordered by the held-out loss that they have cost where it was measured. One is recommended if it learns as
stock does and its step is shorter by `SAME` than those of all that are more exact; "nothing to gain" is an answer. What
rounds more is named beside it, with its gain and cost, and recommended only if nothing else fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from zeropp_fp8.config import RECIPES
from zeropp_fp8.plan.hardware import Hardware
from zeropp_fp8.plan.job import GIGA, Job, PlanError
from zeropp_fp8.plan.memory import with_copies
from zeropp_fp8.plan.methods import METHODS, Method
from zeropp_fp8.plan.step_time import WIRE_INTER, WIRE_INTRA, Estimate, estimate

EXACT = ("stock", "lossless")  # bit for bit the same
# Held-out loss above the reference, in percent: the largest mean of a group of three runs or more, and where there is
# none of any group (docs/results-quality.md; tests/plan/test_recommend.py reads the results), else that of what rounds
# alike or more. `mxfp8`, no faster before Blackwell, is there to be studied.
LOSS = {
    "zeropp-exact": 0.1,
    "zeropp": 0.1,
    "zeropp-pcie": 0.1,
    "qlora": 0.2,
    "fp8-lm-o1": 0.8,
    "fp8-lm-o2": 0.8,
    "fp8-lm": 1.1,
    "fp8-lm-zeropp": 1.1,
    "zeropp-4bit": 1.2,
}
TARGET = 0.3  # percent: what the project asks of a recipe that is to learn as stock does
PCIE = "zeropp-pcie"  # every rank a node of its own, in one node alone
FULL = (*EXACT, *(name for name in LOSS if METHODS[name].stored_bytes is None and name != PCIE))
LORA = (*EXACT, *(name for name in LOSS if not METHODS[name].cast_bytes and name != PCIE))
SAME = 0.15  # faster by less says nothing: nearly all measured steps are modelled within it (docs/planning.md)
GIB = 2**30
Estimator = Callable[[Method, Job, Hardware], Estimate]


@dataclass(frozen=True)
class Advice:
    """A recipe, or "stock"; why, in words; the estimates that it is taken from, the most exact first; those of recipes
    that round more and gain by it, each more than the one before; whether it fits into the memory of a GPU."""

    recipe: str
    text: str
    estimates: list[Estimate]
    offered: list[Estimate] = field(default_factory=list)
    fits: bool = True


def _has_something_to_do(method: Method, job: Job, hardware: Hardware) -> bool:
    """Whether a method is another than `lossless` there: FP8 where it is multiplied no faster, codes where nothing is
    sent, and differences where there are no nodes to exchange them do nothing."""
    nodes, world = job.cluster.nodes, job.cluster.world_size
    if method.name == PCIE:
        return nodes == 1 < world
    if method.fp8_products and hardware.fp8_tflops <= hardware.matrix_tflops:
        return False
    if world == 1 and method.stored_bytes is None:
        return not (method.quantizes_weights or method.secondary_bytes)
    return nodes > 1 or method.difference_of != "none"


def _worth_it(found: Iterable[Estimate], before: float = math.inf) -> list[Estimate]:
    """Methods, most exact first, whose step is shorter by `SAME` than `before` and that of all more exact ones."""
    worth = []
    for one in found:
        if one.step_s * (1 + SAME) <= before:
            worth.append(one)
        before = min(before, one.step_s)
    return worth


def recommend(
    job: Job,
    hardware: Hardware,
    gpu_bytes: float | None = None,
    estimator: Estimator = estimate,
    copies: float | str | None = None,
) -> Advice:
    """The fastest recipe that fits into `gpu_bytes`, learns as stock does and is worth its rounding, see above; out of
    those that can train the job and do something in it. Where nothing fits, that with the smallest peak of memory.

    `copies`: as `limit` of `with_copies`.
    """
    names = {*(LORA if job.lora else FULL), *([PCIE] if estimator is estimate else [])}
    methods = (METHODS[name] for name in (*EXACT, *LOSS) if name in names)
    able = [method for method in methods if _has_something_to_do(method, job, hardware)]
    found = [estimator(method, with_copies(method, job, gpu_bytes, copies), hardware) for method in able]
    fits = [one for one in found if gpu_bytes is None or one.peak_bytes <= gpu_bytes]
    if not fits:
        chosen = min(found, key=lambda one: one.peak_bytes)
        text = (
            f"nothing fits into {gpu_bytes / GIB:.3g} GiB per GPU: {chosen.method} needs {chosen.peak_bytes / GIB:.3g}"
            ", the least of all; take more ranks, fewer tokens or --checkpointing"
        )
        return Advice(chosen.method, text, found, fits=False)
    chosen = _worth_it([one for one in fits if LOSS.get(one.method, 0.0) <= TARGET] or fits)[-1]
    offered = _worth_it(fits[fits.index(chosen) + 1 :], chosen.step_s)
    stock = found[0]
    text = "recommended: stock DeepSpeed"
    if chosen is not stock:
        gain = f"{stock.step_s / chosen.step_s:.2f} x stock" + ("" if stock in fits else ", which does not fit")
        took = f"{1e3 * chosen.step_s:.1f} ms per {chosen.unit.split()[-1]}"
        text = f"recommended: {chosen.method}, {took} ({gain}; bound by {chosen.bound})"
    if chosen.method in EXACT:
        if job.cluster.world_size == 1:
            text += "; nothing to gain by sending less: one rank sends nothing"
        elif chosen.bound not in (WIRE_INTER, WIRE_INTRA):
            text += f"; nothing to gain by sending less: {chosen.bound} bounds {chosen.unit}"
    if any(one.step_s < chosen.step_s for one in found if one not in offered):
        text += f"; no other that fits and rounds more is {SAME:.0%} faster than all that round less"
    if chosen.memory.secondary:
        bits = "" if job.lora else f" in {8 * METHODS[chosen.method].secondary_bytes:.3g} bits per parameter"
        text += f"; copies of the weights{bits} take {chosen.memory.secondary / GIB:.2f} GiB per GPU"
    if job.cluster.nodes > 1 and METHODS[chosen.method].difference_of:
        text += f"; with AdamW at a learning rate of {job.learning_rate:g} (--lr)"
    for one in offered:
        text += f"\nrounds more: {one.method}, {1e3 * one.step_s:.1f} ms, loss up to {LOSS[one.method]} % higher"
    return Advice(chosen.method, text, found, offered)


def ds_config_of(recipe: str, job: Job, copies: float | str | None = None) -> dict[str, Any]:
    """A ds_config of stage 3 with the recipe, for a job whose sequences and accumulation are known; `copies`, where the
    recipe has some: their bytes, or "auto".
    """
    if recipe not in ("stock", *RECIPES):
        raise PlanError(f"{recipe} is no recipe; recipes are {', '.join(RECIPES)}")
    section: dict[str, Any] = {} if recipe == "stock" else {"zeropp_fp8": {"recipe": recipe}}
    if copies is not None and "secondary" in RECIPES.get(recipe, {}):
        section["zeropp_fp8"]["secondary"] = {"memory_gb": copies if copies == "auto" else copies / GIGA}
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
