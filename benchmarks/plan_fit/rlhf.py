"""An iteration of PPO: four models of one size, of which two are trained (InstructGPT, arXiv 2203.02155, section 3.5).

    generation   the actor's weights are gathered once and stay; then one forward pass a token, which reads them all:
                 token = max(weights / memory rate, host)
    experience   a forward pass without gradients of actor, reference, critic and reward model
    training     a step of the actor and one of the critic

Critic and reward model have a head of one output. Where a method keeps copies, those of frozen models stay from one
iteration to the next, and those of trained ones from the first pass after a step to the next step. With LoRA actor and
reference are one model with two adapters, critic and reward model another. Models take turns, nothing of one is
hidden behind another; the losses, sampling and the cache of keys and values are not counted.

python -m benchmarks.plan_fit.rlhf --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 4096 --sequence 512 \
    --response 256
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from zeropp_fp8.outputs import run_command, whole
from zeropp_fp8.plan import Hardware, Job, MemoryEstimate, Method, Model, PlanError, estimate, memory_per_gpu
from zeropp_fp8.plan import __main__ as plan
from zeropp_fp8.plan.job import BYTES_16BIT, require_at_least_zero
from zeropp_fp8.plan.recommend import FULL, LORA
from zeropp_fp8.plan.step_time import Estimate, forward_pass

RLHF_METHODS = (
    "stock", "stock-leaf", "lossless", "zeropp", "zeropp-4bit", "zeropp-exact",
    "mxfp8", "fp8-lm-o1", "fp8-lm-o2", "fp8-lm", "fp8-lm-zeropp", "int8", "int4", "nf4", "qlora", "qlora-rank",
)  # fmt: skip
# Of a block's host time: a token of 24 blocks took 16 to 30 ms, the median of seven runs 19 (`values` and
# `qlora-values` in benchmarks/results/generation).
TOKEN_HOST = 0.20
HELD = ("weights", "states", "gradients", "residuals", "secondary")


@dataclass(frozen=True)
class IterationEstimate(Estimate):
    """Seconds of the phases of an iteration, bytes that a node sends to others in them (generation's are counted to
    experience), and the memory of all models on a GPU, at the peak of training."""

    unit = "an iteration"

    method: str
    generation_s: float
    experience_s: float
    training_s: float
    experience_inter_bytes: float
    training_inter_bytes: float
    memory: MemoryEstimate

    @property
    def step_s(self) -> float:
        return self.generation_s + self.experience_s + self.training_s

    @property
    def inter_bytes(self) -> float:
        return self.experience_inter_bytes + self.training_inter_bytes

    @property
    def bound(self) -> str:
        """The phase that takes longest."""
        phases = {"generation": self.generation_s, "experience": self.experience_s, "training": self.training_s}
        return max(phases, key=phases.__getitem__)


def with_a_value_head(model: Model) -> Model:
    """The same with one output in the place of the vocabulary's."""
    if model.embeddings == 1:
        return model
    return replace(model, parameters=model.parameters - model.vocabulary * model.hidden, embeddings=1)


def iteration(method: Method, job: Job, hardware: Hardware, response: int = 0) -> IterationEstimate:
    """One iteration over a micro-batch of `job`'s tokens per GPU, prompts and responses.

    Args:
        job: of the actor: its model, tokens, and adapters if those are trained.
        response: tokens of a response that are generated; 0: generation is not part of it.

    Raises:
        PlanError: several micro-batches, a response as long as the sequence, or what `estimate` refuses.
    """
    require_at_least_zero(response=response)
    if method.name.removesuffix("-whole") not in RLHF_METHODS:
        raise PlanError(f"{method.name}: RLHF is not modelled with it; take --methods out of {', '.join(RLHF_METHODS)}")
    if job.micro_batches > 1:
        raise PlanError(f"an iteration of RLHF is planned over one micro-batch, got {job.micro_batches}")
    if response >= job.sequence_length:
        raise PlanError(
            f"responses of {response} tokens (--response) leave nothing of a sequence of {job.sequence_length} for the "
            "prompt; give fewer, or a longer --sequence"
        )
    critic = replace(job, model=with_a_value_head(job.model))
    trained, frozen = (job, critic), (job, critic)
    if job.lora is None:
        frozen = tuple(replace(each, frozen=True) for each in trained)
    passes = [(each, method.later_from_secondary and bool(response) and each is job) for each in trained]
    passes += [(each, False) for each in frozen]
    steps = [estimate(method, each, hardware, copied=method.later_from_secondary) for each in trained]
    generation, gathered = 0.0, 0.0
    if response:
        generation = _generation_seconds(method, job, hardware, response)
        gathered = method.forward_traffic(job).inter
    others = [memory_per_gpu(method, each) for each in frozen] if job.lora is None else []
    return IterationEstimate(
        method.name,
        generation,
        sum(forward_pass(method, each, hardware, not copied).seconds for each, copied in passes),
        sum(one.step_s for one in steps),
        gathered + sum(method.forward_traffic(each, not copied).inter for each, copied in passes),
        sum(one.inter_bytes for one in steps),
        _together([one.memory for one in steps], others),
    )


def _together(trained: Sequence[MemoryEstimate], others: Sequence[MemoryEstimate]) -> MemoryEstimate:
    """Add up what models hold, and take in turn what passes and updates take."""
    held = {name: sum(getattr(one, name) for one in (*trained, *others)) for name in HELD}
    in_turn = ("gathered", "activations", "update", "late_gradients")
    return MemoryEstimate(**held, **{name: max(getattr(one, name) for one in trained) for name in in_turn})


def _generation_seconds(method: Method, job: Job, hardware: Hardware, response: int) -> float:
    """All weights in 16 bits on each GPU, adapters merged, eager code; DeepSpeed's hooks rest."""
    gather = forward_pass(method, job, hardware, first=True).seconds
    read = BYTES_16BIT * job.model.parameters / (hardware.memory_gbs * 1e9)
    host = job.model.layers * hardware.host_per_block_ms * TOKEN_HOST / 1e3
    return gather + response * max(read, host)


COLUMNS = (
    ("method", "", lambda one, first: one.method),
    ("iteration", "ms", lambda one, first: f"{1e3 * one.step_s:.0f}"),
    ("speed-up", "", lambda one, first: f"{first.step_s / one.step_s:.2f} x"),
    ("generation", "ms", lambda one, first: f"{1e3 * one.generation_s:.0f}"),
    ("experience", "ms", lambda one, first: f"{1e3 * one.experience_s:.0f}"),
    ("training", "ms", lambda one, first: f"{1e3 * one.training_s:.0f}"),
    ("between nodes", "GB per node", lambda one, first: f"{one.inter_bytes / plan.GIGA:.3f}"),
    ("memory", "GiB", lambda one, first: f"{one.peak_bytes / plan.GIB:.2f}"),
    ("bound by", "", lambda one, first: one.bound),
)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line: the plan's, of the actor."""
    parser = plan.parser_of("plan_fit.rlhf", __doc__)
    parser.prog = "python -m benchmarks.plan_fit.rlhf"
    parser.add_argument(
        "--response", type=whole(), default=0, help="tokens of a response that the actor generates first; default: none"
    )
    arguments = plan.read(parser, argv, FULL, LORA)
    if arguments.copies == "auto":
        parser.error("--secondary-gb auto does not go with four models that share a GPU; give a number of GB")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan of an iteration; exit statuses are those of the plan."""
    arguments = parse(argv)
    estimator = partial(iteration, response=arguments.response)
    run = partial(plan.run, arguments, estimator=estimator, columns=COLUMNS)
    run_command("plan_fit.rlhf", arguments.json, run, PlanError)


if __name__ == "__main__":
    main()
