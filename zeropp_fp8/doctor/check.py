"""A ds_config without a job: what would be refused at start, what it resolves to, what nobody reads, what it costs.

python -m zeropp_fp8 check ds_config.json
python -m zeropp_fp8 check ds_config.json --model meta-llama/Llama-3.1-8B --ranks 32 --ranks-per-node 8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeropp_fp8.config import (
    IN_TREE_KEYS,
    RECIPE_VARIABLE,
    SECTION,
    ConfigError,
    Place,
    PluginConfig,
    check_topology,
    difference_bits,
    find_ranks_per_node,
    in_tree_keys,
    load_ds_config,
    with_differences,
)
from zeropp_fp8.config.resolve import is_asked
from zeropp_fp8.config.sections import bits_of
from zeropp_fp8.config.words import at
from zeropp_fp8.doctor.problems import Problem, exit_status, problem_lines
from zeropp_fp8.doctor.unused import unused_fields
from zeropp_fp8.outputs import Parser, json_at, labelled, number, whole
from zeropp_fp8.plan import METHODS, PRESETS, Cluster, Job, PlanError, StepEstimate, estimate, method_of
from zeropp_fp8.plan import __main__ as plan
from zeropp_fp8.plan.memory import with_copies


@dataclass
class Checked:
    """The facts about a ds_config.

    Attributes:
        config: what its section resolves to; None where DeepSpeed is stock, or the section is refused.
        fields: of the section, those that differ from what an empty one means, by their dotted names.
        auto: keys that Hugging Face's libraries fill in.
        stock: in words, whether DeepSpeed without the plugin would run it.
        ds_config: as it counts, with something in the place of each "auto".
        job, cost: what is planned, and estimates of a step of stock and of this configuration.
    """

    problems: list[Problem] = field(default_factory=list)
    config: PluginConfig | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    auto: list[str] = field(default_factory=list)
    stock: str = ""
    ds_config: dict[str, Any] = field(default_factory=dict)
    job: Job | None = None
    cost: list[StepEstimate] = field(default_factory=list)


def check(ds_config: Any, ranks: int | None = None, ranks_per_node: int | None = None) -> Checked:
    """All that can be said of a ds_config without starting a job of `ranks` ranks."""
    # They import DeepSpeed, which takes seconds: not for a command line that is refused.
    from zeropp_fp8.plugin.auto import FILLED, as_if_filled, auto_keys
    from zeropp_fp8.plugin.stock import look

    found = Checked()
    try:
        given = load_ds_config(ds_config)
    except ConfigError as error:
        found.problems.append(Problem(str(error)))
        return found
    given = _with_the_section_on_top(given, found.problems)
    asked = set(auto_keys(given))
    found.auto = sorted(asked & FILLED)
    for key in sorted(asked - FILLED):
        remedy = "give a value; neither transformers' Trainer nor Accelerate fills it in"
        found.problems.append(Problem(f'"{key}" is "auto"', remedy))
    filled = found.ds_config = as_if_filled(given)
    bf16 = filled.setdefault("bf16", {}) if asked & {"bf16.enabled", "fp16.enabled"} else None
    if isinstance(bf16, dict) and not at(filled, ("fp16", "enabled")):
        bf16["enabled"] = True  # a precision that will be filled in counts as 16 bits
    looked = look(filled, _data_parallel(filled, ranks))
    found.config, lines, remarks = looked.config, looked.lines, looked.remarks
    lines += _of_engine(found.config, ranks, ranks_per_node) if found.config is not None else []
    found.problems += [Problem(line) for line in lines]
    if found.config is not None:
        found.fields = dict(differing(found.config))
        unused = unused_fields(given.get(SECTION) or {}, found.config)
        remarks = [*unused, *_large_differences(found.config, given), *_coarse_gradients(found.config, given), *remarks]
    elif not is_asked(filled):
        stage = at(filled, ("zero_optimization", "stage"))
        first = "" if stage == 3 else f'stage {stage or 0} runs as stock: set "zero_optimization.stage" to 3, and '
        remarks = [
            f'nothing in it asks for the plugin: {first}add "{SECTION}": {{"recipe": "zeropp"}}, or set '
            f"{RECIPE_VARIABLE}, if it is to do something",
            *remarks,
        ]
    found.problems += [Problem(line, serious=False) for line in remarks]
    found.stock = "refuses it" if looked.stock_refuses else _stock(given)
    return found


def _data_parallel(ds_config: Mapping[str, Any], ranks: int | None) -> float | None:
    """Ranks with batches of their own: those that share sequences count as one."""
    shared = ds_config.get("sequence_parallel_size")
    return ranks / shared if ranks and type(shared) is int and shared > 0 else ranks


def _with_the_section_on_top(given: dict[str, Any], problems: list[Problem]) -> dict[str, Any]:
    """Where the section is among ZeRO's keys, which DeepSpeed refuses, that is said, and the rest is looked at."""
    zero = given.get("zero_optimization")
    if not isinstance(zero, Mapping) or SECTION not in zero:
        return given
    remedy = "move it to the top level of the ds_config"
    problems.append(Problem(f'"{SECTION}" is inside of "zero_optimization"', remedy))
    others = {key: value for key, value in zero.items() if key != SECTION}
    return {SECTION: zero[SECTION], **given, "zero_optimization": others}


def differing(config: PluginConfig) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every field that is not what an empty section means."""
    usual = with_differences(PluginConfig(), {}).model_dump()
    for name, value in config.model_dump(exclude={"recipe"}).items():
        if isinstance(usual[name], dict):
            yield from ((f"{name}.{key}", each) for key, each in value.items() if each != usual[name][key])
        elif value != usual[name]:
            yield name, value


def _of_engine(config: PluginConfig, ranks: int | None, ranks_per_node: int | None) -> list[str]:
    """The refusals of an engine that is made on so many ranks."""
    from zeropp_fp8.plugin.zeropp_engine import check_owners

    places = []
    if ranks is not None:
        each = ranks_per_node or ranks
        places = [Place(rank, f"node{rank // each}", config.topology.ranks_per_node, {}) for rank in range(ranks)]
    lines: list[str] = []
    for rule in (
        lambda: check_owners(config),
        lambda: places and check_topology(config, find_ranks_per_node(places, ranks)[0]),
    ):
        try:
            rule()
        except ConfigError as error:
            lines += error.faults
    return lines


def _stock(given: Mapping[str, Any]) -> str:
    """The numbers of DeepSpeed without the plugin."""
    keys = {key: value for key, value in in_tree_keys(given).items() if value != IN_TREE_KEYS[key]}
    passes = f', and ignore "{SECTION}"' if SECTION in given else ""
    by_itself = f"; {', '.join(keys)} would be its own, for which it needs CUDA and nvcc" if keys else ""
    return f"would run it{passes}{by_itself}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser("check", __doc__)
    parser.add_argument("ds_config", help="a file of JSON, as for DeepSpeed, the Trainer or Accelerate")
    parser.add_argument(
        "--ranks", type=whole(most=10**5), help="of the job; without it a step's cost is that of 8 nodes of 8"
    )
    parser.add_argument("--ranks-per-node", type=whole(most=10**5), help="default: all ranks are in one node")
    parser.add_argument("--gbit", type=number(above=0), default=100.0, help="what one node can send, Gbit/s")
    parser.add_json()
    plan.add_job(parser)
    plan.add_machine(parser)
    arguments = parser.parse_args(argv)
    plan.check_job(parser, arguments)
    arguments.costs = arguments.model is not None or arguments.params is not None
    others = ("help", "ds_config", "ranks", "ranks_per_node", "json")
    for each in () if arguments.costs else parser._actions:
        if each.dest not in others and getattr(arguments, each.dest) != each.default:
            parser.error(f"{each.option_strings[0]} is of a step's cost, and needs --params or --model")
    if arguments.ranks_per_node is not None:
        if arguments.ranks is None:
            parser.error("--ranks-per-node needs --ranks")
        if arguments.ranks % arguments.ranks_per_node:
            odd = f"--ranks {arguments.ranks} is no multiple of --ranks-per-node {arguments.ranks_per_node}"
            parser.error(f"{odd}: change one of them")
    return arguments


def learning_rate(ds_config: Mapping[str, Any]) -> float | None:
    """That of the ds_config's Adam or AdamW; None if it has neither, or a script or the Trainer gives it."""
    kind, rate = at(ds_config, ("optimizer", "type")), at(ds_config, ("optimizer", "params", "lr"))
    is_adam = isinstance(kind, str) and "adam" in kind.lower()
    return rate if is_adam and type(rate) in (int, float) and rate > 0 else None


def _large_differences(config: PluginConfig, ds_config: Mapping[str, Any]) -> Iterator[str]:
    """A remark if most bits of weights change in each step at the ds_config's learning rate."""
    rate, weights = learning_rate(ds_config), config.weights
    if weights.difference != "exact" or weights.format != "none" or rate is None:
        return
    bits, of_codes = difference_bits(rate), difference_bits(rate, "int8")
    if bits > 4:  # half of an INT8 code
        yield (
            f'"optimizer.params.lr": {rate:g} changes so much that "{SECTION}.weights.difference": "exact" takes '
            f'{bits:.2g} bits per weight; with "weights.format": "int8" it takes {of_codes:.2g}, and half of the copy'
        )


def _coarse_gradients(config: PluginConfig, ds_config: Mapping[str, Any]) -> Iterator[str]:
    """A remark if Muon, which amplifies small singular values, is given gradients of 4 bits."""
    if at(ds_config, ("optimizer", "type")) == "Muon" and bits_of(config.gradients.inter_format) <= 4:
        yield (
            f'"optimizer.type": "Muon" amplifies what 4 bits lose of gradients: set "{SECTION}.gradients.inter_format" '
            'to "int8" (docs/muon.md says what each costs)'
        )


def micro_batches(ds_config: Mapping[str, Any], ranks: int) -> int | None:
    """Accumulation as DeepSpeed completes it; None where the ds_config does not say it."""
    whole, one, times = (
        ds_config.get(name)
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    if times is None and whole and one:
        times = max(1, int(whole / one / _data_parallel(ds_config, ranks)))
    return times


def _of_the_estimate(found: Checked, arguments: argparse.Namespace) -> Iterator[str]:
    """Say what else the job has than the step that is estimated, and what was assumed of it."""
    ds_config, cluster, method = found.ds_config, found.job.cluster, method_of(found.config)
    devices = (at(ds_config, ("zero_optimization", f"offload_{what}", "device")) for what in ("param", "optimizer"))
    if any(device not in (None, "none") for device in devices):
        yield "the estimate is of weights and states on the GPU, without offload"
    if not any(at(ds_config, (name, "enabled")) for name in ("bf16", "fp16")):
        yield 'the estimate is of weights in 16 bits, and neither "bf16.enabled" nor "fp16.enabled" is true'
    if arguments.micro_batches is None and {"train_batch_size", "gradient_accumulation_steps"} & {*found.auto}:
        yield 'one micro-batch per step is assumed, which "auto" does not say: give --micro-batches'
    if (
        method.copies == "auto"
        and (arguments.copies, arguments.gpu_bytes) == (None, None)
        and method.copy_ranks(cluster)
    ):
        yield '"secondary.memory_gb" is "auto", and copies count as without a bound: give --gpu-gb'
    if arguments.ranks_per_node not in (None, cluster.ranks_per_node):
        each = f'"topology.ranks_per_node" is {cluster.ranks_per_node}'
        yield f"{each}, which counts instead of --ranks-per-node: --gbit is what so many ranks send together"
    if arguments.gpu_bytes is not None and found.cost[1].peak_bytes > arguments.gpu_bytes:
        yield f"a step does not fit into --gpu-gb {arguments.gpu_bytes / plan.GIGA:g}"
    if arguments.ranks is None:
        yield f"the step is that of {cluster.nodes} node(s) of {cluster.ranks_per_node} rank(s): give --ranks for yours"


def cost_of(
    config: PluginConfig | None, ds_config: Mapping[str, Any], arguments: argparse.Namespace
) -> tuple[Job, list]:
    """The job that is planned, and the plan's estimates of a step of stock and of this configuration."""
    if config is None:
        raise PlanError("nothing in it asks for the plugin")
    each = config.topology.ranks_per_node
    if each == "detect":
        each = arguments.ranks_per_node or arguments.ranks or plan.RANKS_PER_NODE
    cluster = Cluster(plan.NODES if arguments.ranks is None else arguments.ranks // each, each, arguments.gbit)
    if arguments.kept is None:
        zero, names = ds_config["zero_optimization"], ("max_live_parameters", "max_reuse_distance")
        arguments.kept = min(zero.get(f"stage3_{name}", zero.get(name, 1e9)) for name in names)
    if arguments.micro_batches is None:
        arguments.micro_batches = micro_batches(ds_config, cluster.world_size)
    if arguments.lr is None:
        arguments.lr = learning_rate(ds_config)
    job, method = plan.job_of(arguments, cluster), method_of(config)
    hardware = plan.hardware_of(arguments, PRESETS[arguments.gpu])
    own = with_copies(method, job, arguments.gpu_bytes, arguments.copies)
    return job, [estimate(METHODS["stock"], job, hardware), estimate(method, own, hardware)]


def report(path: str, found: Checked) -> str:
    lines = []
    if found.config is not None:
        source = f" (from {found.config.recipe_variable})" if found.config.recipe_variable else ""
        lines.append(("  recipe", f"{found.config.recipe or 'none (lossless plus the ZeRO++ keys)'}{source}"))
        parts: dict[str, list[str]] = {}
        for name, value in found.fields.items():
            part, _, key = name.rpartition(".")
            parts.setdefault(part or key, []).append(f"{key} {value}" if part else str(value))
        lines += [(f"  {part}", ", ".join(values)) for part, values in parts.items()]
    if found.auto:
        lines.append(('  "auto"', f"filled in by the Trainer or Accelerate: {', '.join(found.auto)}"))
    if found.stock:
        lines.append(("  stock", f"DeepSpeed {found.stock}"))
    cost = [plan.steps_table(found.cost, found.job)] if found.cost else []
    return "\n".join([path, *labelled(lines), *cost, *problem_lines(found.problems)])


def main(argv: Sequence[str] | None = None) -> None:
    """Print what is found; exit status 1 where the job would not start, 2 where an estimate was asked for in vain."""
    from zeropp_fp8.doctor.accelerator import cpu_where_there_is_no_gpu

    arguments = parse(argv)
    cpu_where_there_is_no_gpu()
    found = check(arguments.ds_config, arguments.ranks, arguments.ranks_per_node)
    unknown = False
    if arguments.costs and not exit_status(found.problems):
        try:
            found.job, found.cost = cost_of(found.config, found.ds_config, arguments)
            notes = [*_of_the_estimate(found, arguments)]
        except PlanError as error:
            unknown, notes = True, [f"no estimate: {error}"]
        found.problems += [Problem(note, serious=False) for note in notes]
    with json_at(arguments.json) as known:
        known |= vars(found) | {"config": found.config and found.config.model_dump()}
        print(report(arguments.ds_config, found))
    raise SystemExit(2 if unknown else exit_status(found.problems))
