"""A table of all methods for one job, and the recipe to take.

python -m zeropp_fp8 plan --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 2048
python -m zeropp_fp8 plan --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 2048 --lora-rank 16
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zeropp_fp8.outputs import Parser, file_to_write, number, picture_to_draw, run_command, table, whole
from zeropp_fp8.plan.hardware import PRESETS, Hardware
from zeropp_fp8.plan.job import GIGA, Cluster, Job, Lora, Model, PlanError
from zeropp_fp8.plan.memory import with_copies
from zeropp_fp8.plan.methods import LORA_METHODS, LORA_TABLE_METHODS, METHODS, TABLE_METHODS, Method, method_named
from zeropp_fp8.plan.recommend import Estimator, ds_config_of, recommend
from zeropp_fp8.plan.step_time import estimate

MEGA, GIB = 1e6, 2**30
PARAMETERS, VOCABULARY, KEPT = 7e9, 32000, 2e8
NODES, RANKS_PER_NODE = 8, 8
# Option -> the field of Hardware that it overrides, and what it is.
OVERRIDES = {
    "--tflops": ("achieved_tflops", "TFLOP/s a GPU achieves in training"),
    "--intra-gbs": ("intra_gbs", "GB/s a GPU sends within its node"),
    "--memory-gbs": ("memory_gbs", "copy bandwidth of a GPU, GB/s"),
    "--link-efficiency": ("link_efficiency", "share of --gbit that the payload gets"),
    "--codec-efficiency": ("codec_efficiency", "share of --memory-gbs that quantizing reaches"),
    "--overlap": ("overlap", "1: wire and GPU work side by side; 0: one after the other"),
}


def parser_of(command: str, text: str | None) -> Parser:
    """The options of a job, its cluster and machine, and of what is written."""
    parser = Parser(command, text)
    add_job(parser)
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--nodes", type=whole(most=10**6), default=NODES, help="default %(default)s")
    cluster.add_argument("--ranks-per-node", type=whole(most=10**4), default=RANKS_PER_NODE, help="default %(default)s")
    sends = "what one node can send, Gbit/s; default %(default)g"
    cluster.add_argument("--gbit", type=number(above=0), default=100.0, help=sends)
    add_machine(parser)
    output = parser.add_argument_group("output")
    of_lora = f"with --lora-rank out of {', '.join(LORA_METHODS)}"
    output.add_argument("--methods", help=f"out of {', '.join(METHODS)}; {of_lora}")
    drawn = "draw step time against what a node sends (by its ending: .png, .svg, .pdf)"
    output.add_argument("--picture", type=picture_to_draw, metavar="FILE", help=drawn)
    written = "write a ds_config with the recipe that is recommended"
    output.add_argument("--write", type=file_to_write, metavar="FILE", help=written)
    parser.add_json()
    return parser


def read(parser: Parser, argv: Sequence[str] | None, methods: Sequence[str], of_lora: Sequence[str]) -> Any:
    """The command line; without --methods they are `methods`, or `of_lora` where adapters are trained."""
    arguments = parser.parse_args(argv)
    check_job(parser, arguments)
    if arguments.methods is None:
        arguments.methods = ",".join(methods if arguments.lora_rank is None else of_lora)
    return arguments


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    return read(parser_of("plan", __doc__), argv, TABLE_METHODS, LORA_TABLE_METHODS)


def add_job(parser: argparse.ArgumentParser) -> None:
    """Options of the model and of what a GPU does with it in a step."""
    job = parser.add_argument_group("the job")
    job.add_argument("--model", help="a Hugging Face model: its name, its config.json or the folder of that")
    size = number(above=0, example=", such as 7e9 or 7B")
    job.add_argument("--params", type=size, help="parameters of the model, without --model; default 7B")
    job.add_argument("--hidden", type=whole(), help="hidden size; without it a usual shape for the size")
    job.add_argument("--layers", type=whole())
    job.add_argument("--vocabulary", type=whole(), help="default 32000")
    job.add_argument("--tokens", type=whole(), default=2048, help="of one GPU in a micro-batch; default %(default)s")
    job.add_argument("--sequence", type=whole(), help="tokens of a sequence; default: all of --tokens")
    job.add_argument("--micro-batches", type=whole(), help="gradient accumulation steps")
    kept = "parameters ZeRO-3 keeps gathered (max_live_parameters); default 2e8"
    job.add_argument("--kept", type=number(least=0), help=kept)
    job.add_argument("--lr", type=number(above=0), help="of AdamW, for exact differences; default 1e-5")
    job.add_argument(
        "--steps", type=whole(least=0), help="of AdamW so far, of which the first change more; default: many"
    )
    job.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    job.add_argument("--lora-rank", type=whole(), help="fine-tune adapters of this rank; everything else is frozen")
    job.add_argument("--lora-layers", type=whole(), help="linear layers of a block that have an adapter; default: all")


def add_machine(parser: argparse.ArgumentParser) -> None:
    machine = parser.add_argument_group("the machine (a preset, and what differs from it)")
    machine.add_argument("--gpu", choices=PRESETS, default="h200", help="default %(default)s")

    def size(text: str) -> float | str:
        return text if text == "auto" else GIGA * number(least=0)(text)

    memory = "memory of a GPU; what does not fit is not recommended"
    machine.add_argument("--gpu-gb", dest="gpu_bytes", type=lambda text: GIGA * number(above=0)(text), help=memory)
    copies = 'GB of a GPU for copies of codes (secondary.memory_gb); or "auto", with --gpu-gb'
    machine.add_argument("--secondary-gb", dest="copies", type=size, help=copies)
    for option, (field, text) in OVERRIDES.items():
        limits = number(least=0, most=1) if field == "overlap" else number(above=0)
        machine.add_argument(option, dest=field, type=limits, help=text)


def check_job(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Options of `add_job` that need each other, or leave no room for each other."""
    if getattr(arguments, "copies", None) == "auto" and arguments.gpu_bytes is None:
        parser.error("--secondary-gb auto needs --gpu-gb: what is left of a GPU is for copies")
    if arguments.lora_layers is not None and arguments.lora_rank is None:
        parser.error("--lora-layers needs --lora-rank: it says which layers have adapters")
    shape = ("params", "hidden", "layers", "vocabulary")
    both = next((name for name in shape if getattr(arguments, name) is not None), None)
    if arguments.model is not None and both is not None:
        parser.error(f"--{both} does not go with --model, whose config.json says it; leave one of them out")


def hardware_of(arguments: argparse.Namespace, preset: Hardware) -> Hardware:
    given = {field: getattr(arguments, field) for field, _ in OVERRIDES.values()}
    return replace(preset, **{field: value for field, value in given.items() if value is not None})


def job_of(arguments: argparse.Namespace, cluster: Cluster) -> Job:
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
        learning_rate=1e-5 if arguments.lr is None else arguments.lr,
        steps=arguments.steps,
    )


# Of a column: its name, its unit, and a cell of an estimate and the first one, over which the speed-up is.
Column = tuple[str, str, Callable[[Any, Any], str]]
COLUMNS: tuple[Column, ...] = (
    ("method", "", lambda one, first: one.method),
    ("step", "ms", lambda one, first: f"{1e3 * one.step_s:.1f}"),
    ("speed-up", "", lambda one, first: f"{first.step_s / one.step_s:.2f} x"),
    ("tokens/s", "per GPU", lambda one, first: f"{one.tokens_per_s:.0f}"),
    ("between nodes", "GB per node", lambda one, first: f"{one.inter_bytes / GIGA:.3f}"),
    ("in the node", "GB per GPU", lambda one, first: f"{one.intra_bytes / GIGA:.3f}"),
    ("memory", "GiB", lambda one, first: f"{one.peak_bytes / GIB:.2f}"),
    ("bound by", "", lambda one, first: one.bound),
)


def steps_table(
    estimates: Sequence[Any], job: Job, columns: Sequence[Column] = COLUMNS, how: str = "modelled", base=None
) -> str:
    """The job, how its steps are known, and a line per method, with its speed-up over `base`, else over the first."""
    model, cluster = job.model, job.cluster
    link = f"{round(cluster.inter_gbit, 2):g} Gbit/s between nodes" if cluster.nodes > 1 else "one node"
    trains = f"LoRA of rank {job.lora.rank}, {job.trained_parameters / MEGA:.3g} M trained, " if job.lora else ""
    heading = (
        f"{model.parameters / GIGA:.3g} B parameters ({model.layers} layers, hidden {model.hidden}), {cluster.nodes} x "
        f"{cluster.ranks_per_node} GPUs, {link}, {trains}{job.micro_batches} x {job.tokens} tokens per GPU ({how})"
    )
    rows = [[cell(one, base or estimates[0]) for _, _, cell in columns] for one in estimates]
    names, units, _ = zip(*columns)
    return "\n".join([heading, *table([names, units, *rows], words=("method", "bound by"))])


def seconds_at(estimator: Estimator, method: Method, job: Job, hardware: Hardware, gbit: float) -> float:
    cluster = replace(job.cluster, inter_gbit=gbit)
    return estimator(method, replace(job, cluster=cluster), hardware).step_s


def run(
    arguments: argparse.Namespace,
    found: dict[str, Any],
    estimator: Estimator = estimate,
    columns: Sequence[Column] = COLUMNS,
) -> int:
    """Print the table and what is recommended, and put the same into `found`; 1 where nothing fits, else 0."""
    hardware = hardware_of(arguments, PRESETS[arguments.gpu])
    job = job_of(arguments, Cluster(arguments.nodes, arguments.ranks_per_node, arguments.gbit))
    asked = [method_named(name.strip()) for name in arguments.methods.split(",")]
    jobs = {method: with_copies(method, job, arguments.gpu_bytes, arguments.copies) for method in asked}
    advice = recommend(job, hardware, arguments.gpu_bytes, estimator, arguments.copies)
    estimates = [estimator(method, its_job, hardware) for method, its_job in jobs.items()]
    lines = [advice.text]
    if arguments.write and not advice.fits:
        raise PlanError(f"{advice.text}; {arguments.write} is not written")
    if arguments.picture:
        from zeropp_fp8.plan.picture import draw

        seconds = {m.name: partial(seconds_at, estimator, m, its_job, hardware) for m, its_job in jobs.items()}
        draw(arguments.picture, seconds, job, advice.estimates[0].unit)
        lines.append(f"drawn in {arguments.picture}")
    if arguments.write:
        written = ds_config_of(advice.recipe, job, arguments.copies)
        Path(arguments.write).write_text(json.dumps(written, indent=2) + "\n")
        lines.append(f"written to {arguments.write}")
    found |= {"job": job, "hardware": hardware, "recommended": advice.recipe, "fits": advice.fits}
    found["methods"] = [*estimates]
    listed = {one.method for one in estimates}
    estimates += [one for one in advice.estimates if one.method == advice.recipe and one.method not in listed]
    print("\n".join([steps_table(estimates, job, columns, base=advice.estimates[0]), *lines]))
    return int(not advice.fits)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan; exit status 1 where nothing fits, 2 for a job that cannot be, with its reason."""
    arguments = parse(argv)
    run_command("plan", arguments.json, partial(run, arguments), PlanError)


if __name__ == "__main__":
    main()
