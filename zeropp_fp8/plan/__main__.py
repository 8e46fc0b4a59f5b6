"""A table of all methods for one job, or the model beside measured points.

python -m zeropp_fp8 plan --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 2048
python -m zeropp_fp8 plan --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 2048 --lora-rank 16
python -m zeropp_fp8 plan --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 4096 --sequence 512 \
    --rlhf --response 256
python -m zeropp_fp8 plan --check benchmarks/results/lora_step --fit machine
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from zeropp_fp8.outputs import Parser, file_to_write, json_at, number, picture_to_draw, said, whole
from zeropp_fp8.plan.calibrate import Residual, calibrate, check, fitted, held_out, machine_of
from zeropp_fp8.plan.hardware import PRESETS, Hardware, measured_on, preset_of
from zeropp_fp8.plan.job import Cluster, Job, Lora, Model, PlanError
from zeropp_fp8.plan.measured import PEERS, load_points
from zeropp_fp8.plan.memory import memory_for_copies
from zeropp_fp8.plan.methods import (
    LORA_METHODS,
    LORA_TABLE_METHODS,
    METHODS,
    TABLE_METHODS,
    Method,
    method_named,
)
from zeropp_fp8.plan.recommend import FULL, LORA, Estimator, ds_config_of, recommend
from zeropp_fp8.plan.rlhf import IterationEstimate, iteration
from zeropp_fp8.plan.step_time import StepEstimate, estimate

MEGA, GIGA, GIB = 1e6, 1e9, 2**30
PARAMETERS, VOCABULARY, KEPT = 7e9, 32000, 2e8
NODES, RANKS_PER_NODE = 8, 8
# Fields of Hardware that an option overrides.
OVERRIDES = ("achieved_tflops", "intra_gbs", "memory_gbs", "link_efficiency", "codec_efficiency", "overlap")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = Parser("plan", __doc__)
    add_job(parser)
    rlhf = parser.add_argument_group("RLHF (PPO: actor, reference, critic and reward model of one size)")
    rlhf.add_argument("--rlhf", action="store_true", help="an iteration instead of a training step")
    rlhf.add_argument(
        "--response", type=whole(), help="tokens of a response that the actor generates first; default: none"
    )
    add_cluster(parser)
    add_machine(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--methods", help=f"out of {', '.join(METHODS)}; with --lora-rank out of {', '.join(LORA_METHODS)}"
    )
    output.add_argument(
        "--picture",
        type=picture_to_draw,
        metavar="FILE",
        help="draw step time against what a node sends (by its ending: .png, .svg, .pdf)",
    )
    output.add_argument(
        "--write", type=file_to_write, metavar="FILE", help="write a ds_config with the recipe that is recommended"
    )
    output.add_argument(
        "--check", nargs="*", metavar="PATH", help="results at PATH against the model; without PATH the peers known"
    )
    output.add_argument(
        "--fit", default="", help='with --check: "machine", or up to three fields of Hardware to fit first, with commas'
    )
    output.add_argument("--held-out", action="store_true", help="with --fit machine: predict each run from the others")
    parser.add_json()
    arguments = parser.parse_args(argv)
    if arguments.held_out and arguments.fit != "machine":
        parser.error("--held-out needs --fit machine: it fits to all runs but one")
    if arguments.fit and arguments.check is None:
        parser.error("--fit needs --check: it fits to measured points")
    if arguments.secondary_gb == "auto" and arguments.gpu_gb is None:
        parser.error("--secondary-gb auto needs --gpu-gb: what is left of a GPU is for copies")
    check_job(parser, arguments)
    if arguments.write and arguments.check is not None:
        parser.error("--write needs a job, and --check has none")
    if arguments.response is not None and not arguments.rlhf:
        parser.error("--response needs --rlhf: it is what the actor generates")
    if arguments.rlhf and arguments.secondary_gb == "auto":
        parser.error("--secondary-gb auto does not go with --rlhf, where four models share a GPU; give a number of GB")
    if arguments.check is not None and (arguments.picture or arguments.rlhf):
        parser.error("--picture and --rlhf need a job, and --check has none")
    if arguments.methods is None and arguments.rlhf:
        arguments.methods = ",".join(FULL if arguments.lora_rank is None else LORA)
    if arguments.methods is None:
        arguments.methods = ",".join(TABLE_METHODS if arguments.lora_rank is None else LORA_TABLE_METHODS)
    return arguments


def add_job(parser: argparse.ArgumentParser) -> None:
    """Options of the model and of what a GPU does with it in a step."""
    job = parser.add_argument_group("the job")
    job.add_argument("--model", help="a Hugging Face model: its name, its config.json or the folder of that")
    job.add_argument(
        "--params",
        type=number(above=0, example=", such as 7e9 or 7B"),
        help="parameters of the model, without --model; default 7B",
    )
    job.add_argument("--hidden", type=whole(), help="hidden size; without it a usual shape for the size")
    job.add_argument("--layers", type=whole())
    job.add_argument("--vocabulary", type=whole(), help="default 32000")
    job.add_argument("--tokens", type=whole(), default=2048, help="tokens of one GPU in a micro-batch")
    job.add_argument("--sequence", type=whole(), help="tokens of a sequence; default: all of --tokens")
    job.add_argument("--micro-batches", type=whole(), help="gradient accumulation steps")
    job.add_argument(
        "--kept", type=number(least=0), help="parameters ZeRO-3 keeps gathered (max_live_parameters); default 2e8"
    )
    job.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    job.add_argument("--lora-rank", type=whole(), help="fine-tune adapters of this rank; everything else is frozen")
    job.add_argument("--lora-layers", type=whole(), help="linear layers of a block that have an adapter; default: all")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Options of the nodes and the links between them."""
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--nodes", type=whole(most=10**6), default=NODES)
    cluster.add_argument("--ranks-per-node", type=whole(most=10**4), default=RANKS_PER_NODE)
    cluster.add_argument("--gbit", type=number(above=0), default=100.0, help="what one node can send, Gbit/s")


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Options of a GPU."""
    machine = parser.add_argument_group("the machine (a preset, and what differs from it)")
    machine.add_argument("--gpu", choices=PRESETS, default="h200")
    machine.add_argument("--gpu-gb", type=number(above=0), help="memory of a GPU; what does not fit is not recommended")
    machine.add_argument(
        "--secondary-gb",
        type=lambda text: text if text == "auto" else number(least=0)(text),
        help='GB of a GPU for copies of codes (secondary.memory_gb); or "auto", with --gpu-gb',
    )
    machine.add_argument(
        "--tflops", dest="achieved_tflops", type=number(above=0), help="TFLOP/s a GPU achieves in training"
    )
    machine.add_argument("--intra-gbs", type=number(above=0), help="GB/s a GPU sends within its node")
    machine.add_argument("--memory-gbs", type=number(above=0), help="copy bandwidth of a GPU, GB/s")
    machine.add_argument("--link-efficiency", type=number(above=0), help="share of --gbit that the payload gets")
    machine.add_argument(
        "--codec-efficiency", type=number(above=0), help="share of --memory-gbs that quantizing reaches"
    )
    machine.add_argument(
        "--overlap", type=number(least=0, most=1), help="1: wire and GPU work side by side; 0: one after the other"
    )


def check_job(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Options of `add_job` that need each other, or leave no room for each other."""
    if arguments.lora_layers is not None and arguments.lora_rank is None:
        parser.error("--lora-layers needs --lora-rank: it says which layers have adapters")
    shape = ("params", "hidden", "layers", "vocabulary")
    both = next((name for name in shape if getattr(arguments, name) is not None), None)
    if arguments.model is not None and both is not None:
        parser.error(f"--{both} does not go with --model, whose config.json says it; leave one of them out")


def hardware_of(arguments: argparse.Namespace, preset: Hardware) -> Hardware:
    """The preset with what the command line changes."""
    given = {field: getattr(arguments, field) for field in OVERRIDES}
    return replace(preset, **{field: value for field, value in given.items() if value is not None})


def job_of(arguments: argparse.Namespace, cluster: Cluster) -> Job:
    """The job of the options of `add_job`."""
    if arguments.model is not None:
        from zeropp_fp8.plan.hugging_face import model_of

        model = model_of(arguments.model)
    else:
        shape = (arguments.hidden, arguments.layers, arguments.vocabulary or VOCABULARY)
        model = Model.from_parameters(PARAMETERS if arguments.params is None else arguments.params, *shape)
    return Job(
        model,
        cluster,
        arguments.tokens,
        arguments.sequence,
        1 if arguments.micro_batches is None else arguments.micro_batches,
        KEPT if arguments.kept is None else arguments.kept,
        arguments.checkpointing,
        None if arguments.lora_rank is None else Lora(arguments.lora_rank, arguments.lora_layers),
    )


def with_copies(job: Job, method: Method, arguments: argparse.Namespace) -> Job:
    """The job with what copies of the codes may take on a GPU."""
    limit = arguments.secondary_gb
    if limit is None:
        return job
    limit = memory_for_copies(method, job, arguments.gpu_gb * GIGA) if limit == "auto" else limit * GIGA
    return replace(job, copies=limit)


def table(estimates: Sequence[StepEstimate], job: Job) -> str:
    """One line a method; the speed-up is over the first."""
    model, cluster = job.model, job.cluster
    link = f"{round(cluster.inter_gbit, 2):g} Gbit/s between nodes" if cluster.nodes > 1 else "one node"
    trains = f"LoRA of rank {job.lora.rank}, {job.trained_parameters / MEGA:.3g} M trained, " if job.lora else ""
    lines = [
        f"{model.parameters / GIGA:.3g} B parameters ({model.layers} layers, hidden {model.hidden}), {cluster.nodes} x "
        f"{cluster.ranks_per_node} GPUs, {link}, {trains}{job.micro_batches} x {job.tokens} tokens a GPU (modelled)",
        f"{'method':<14}{'step':>10}{'speed-up':>10}{'tokens/s':>10}{'between nodes':>15}{'in the node':>13}"
        f"{'memory':>9}  bound by",
        f"{'':<14}{'ms':>10}{'':>10}{'a GPU':>10}{'GB a node':>15}{'GB a GPU':>13}{'GiB':>9}",
    ]
    for one in estimates:
        lines.append(
            f"{one.method:<14}{1e3 * one.step_s:>10.1f}{estimates[0].step_s / one.step_s:>8.2f} x"
            f"{one.tokens_per_s:>10.0f}{one.inter_bytes / GIGA:>15.3f}{one.intra_bytes / GIGA:>13.3f}"
            f"{one.memory.peak / GIB:>9.2f}  {one.bound}"
        )
    return "\n".join(lines)


def iteration_table(estimates: Sequence[IterationEstimate], job: Job) -> str:
    """The same of an iteration of RLHF, by its phases."""
    heading = table([], job).splitlines()[0].replace("parameters (", "parameters in each of four models (")
    lines = [
        heading,
        f"{'method':<14}{'iteration':>10}{'speed-up':>10}{'generation':>12}{'experience':>12}{'training':>10}"
        f"{'between nodes':>15}{'memory':>9}  longest",
        f"{'':<14}{'ms':>10}{'':>10}{'ms':>12}{'ms':>12}{'ms':>10}{'GB a node':>15}{'GiB':>9}",
    ]
    for one in estimates:
        lines.append(
            f"{one.method:<14}{1e3 * one.step_s:>10.0f}{estimates[0].step_s / one.step_s:>8.2f} x"
            f"{1e3 * one.generation_s:>12.0f}{1e3 * one.experience_s:>12.0f}{1e3 * one.training_s:>10.0f}"
            f"{one.inter_bytes / GIGA:>15.3f}{one.memory.peak / GIB:>9.2f}  {one.bound}"
        )
    return "\n".join(lines)


def check_table(residuals: Sequence[Residual]) -> str:
    """Measured and modelled step times."""
    lines = [f"{'run':<50}{'source':<24}{'measured':>10}{'modelled':>10}{'error':>9}   (ms)"]
    for residual in residuals:
        point = residual.point
        lines.append(
            f"{point.label:<50}{point.source:<24}{1e3 * point.step_s:>10.0f}{1e3 * residual.modelled_s:>10.0f}"
            f"{100 * residual.error:>+8.1f}%{'' if point.steady else '   unsteady: not fitted to'}"
        )
    worst = max(abs(residual.error) for residual in residuals)
    return "\n".join([*lines, f"largest error {100 * worst:.1f}% of {len(residuals)} points"])


def run_check(arguments: argparse.Namespace, found: dict[str, Any]) -> int:
    """`--check`: files (or the peers known), after fitting what `--fit` names.

    Peers and files are not mixed: the host's share of a step is the machine's, and was twice as long on one day as on
    another.
    """
    points = [point for path in arguments.check for point in load_points(path)] if arguments.check else list(PEERS)
    unknown = sorted({point.run for point in points if point.run not in METHODS})
    points = [point for point in points if point.run in METHODS]
    if not points:
        where = ", ".join(arguments.check)
        raise PlanError(f"{where}: no step times measured on GPUs{f', only of {unknown}' if unknown else ''}")
    lines = [f"no model for: {', '.join(unknown)}"] if unknown else []
    residuals = []
    for gpu in sorted({point.gpu for point in points}):
        of_it = [point for point in points if point.gpu == gpu]
        if gpu and preset_of(gpu) is None:  # older results name none, and are of an H200
            lines.append(f"{gpu}: there is no preset of it; begun from an H200's")
        preset = hardware = hardware_of(arguments, measured_on(gpu))
        fields = arguments.fit.split(",") if arguments.fit else []
        if fields == ["machine"]:
            hardware = machine_of(of_it, preset)
            fields = fitted(preset, hardware)
        elif fields:
            hardware = calibrate(of_it, preset, fields)
        lines += [f"fitted {field} = {getattr(hardware, field):.4g} ({getattr(preset, field):.4g})" for field in fields]
        residuals += held_out(of_it, preset) if arguments.held_out else check(of_it, hardware)
    found["points"] = [{**asdict(each.point), "modelled_s": each.modelled_s} for each in residuals]
    print("\n".join([*lines, check_table(residuals)]))
    return 0


def seconds_at(estimator: Estimator, method: Method, job: Job, hardware: Hardware, gbit: float) -> float:
    """Of a step where a node sends `gbit` Gbit/s."""
    cluster = replace(job.cluster, inter_gbit=gbit)
    return estimator(method, replace(job, cluster=cluster), hardware).step_s


def run_plan(arguments: argparse.Namespace, found: dict[str, Any]) -> int:
    """Print the table and what is recommended, and put the same into `found`; 1 where nothing fits, else 0."""
    hardware = hardware_of(arguments, PRESETS[arguments.gpu])
    job = job_of(arguments, Cluster(arguments.nodes, arguments.ranks_per_node, arguments.gbit))
    methods = [method_named(name) for name in arguments.methods.split(",")]
    estimator = partial(iteration, response=arguments.response or 0) if arguments.rlhf else estimate
    jobs = [with_copies(job, method, arguments) for method in methods]
    advice = recommend(job, hardware, None if arguments.gpu_gb is None else arguments.gpu_gb * GIGA, estimator)
    known = {one.method: one for one in advice.estimates} if arguments.secondary_gb is None else {}
    estimates = [
        known[method.name] if method.name in known else estimator(method, each, hardware)
        for method, each in zip(methods, jobs)
    ]
    if arguments.write and not advice.fits:
        raise PlanError(f"{advice.text}; {arguments.write} is not written")
    if arguments.picture:
        from zeropp_fp8.plan.picture import draw

        seconds = {
            method.name: partial(seconds_at, estimator, method, each, hardware) for method, each in zip(methods, jobs)
        }
        draw(arguments.picture, seconds, job.cluster, "an iteration" if arguments.rlhf else "a step")
    if arguments.write:
        Path(arguments.write).write_text(json.dumps(ds_config_of(advice.recipe, job), indent=2) + "\n")
    found |= {"job": asdict(job), "hardware": asdict(hardware), "recommended": advice.recipe, "fits": advice.fits}
    found["methods"] = [
        {**asdict(one), "step_s": one.step_s, "peak_bytes": one.memory.peak, "held_bytes": one.memory.held}
        for one in estimates
    ]
    written = f"\nwritten to {arguments.write}" if arguments.write else ""
    written += f"\ndrawn in {arguments.picture}" if arguments.picture else ""
    asked = {one.method for one in estimates}
    estimates += [one for one in advice.estimates if one.method == advice.recipe and one.method not in asked]
    print(f"{(iteration_table if arguments.rlhf else table)(estimates, job)}\n{advice.text}{written}")
    return int(not advice.fits)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; exit status 1 where nothing fits, 2 for a job that cannot be, with its reason."""
    arguments = parse(argv)
    try:
        with json_at(arguments.json) as found:
            status = (run_plan if arguments.check is None else run_check)(arguments, found)
    except (PlanError, OSError) as error:
        print(f"plan: {said(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    if status:
        raise SystemExit(status)


if __name__ == "__main__":
    main()
