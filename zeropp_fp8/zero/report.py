"""What rank 0 prints: the table at start, and a line with bytes every `report.every` steps."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from torch import nn

from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.compute.gemm import execution
from zeropp_fp8.config import PluginConfig, patterns_of_gemms
from zeropp_fp8.config.compute import matches
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.formats.amax_history import STEPS
from zeropp_fp8.zero.session import Session

if TYPE_CHECKING:
    from zeropp_fp8.zero.gather.gatherer import Gatherer
    from zeropp_fp8.zero.reduce.gradient_scales import GradientScales

MEGA, GIGA = 1e6, 1e9


def _without_kernel(session: Session, wire_format: WireFormat | None) -> str:
    """A remark where a GPU has no kernel for a format."""
    if session.device.type != "cuda" or wire_format is None:
        return ""
    from zeropp_fp8 import kernels

    return "" if kernels.supports(wire_format) else "no kernel for this format or blocks this long: torch code, slower"


def _rows(session: Session, gatherer: Gatherer, model: nn.Module, blocks: list[nn.Module]) -> list[tuple]:
    """(what, format, parameters, remark) for each line of the table."""
    config, topology = session.config, session.topology
    params = list(gatherer.adopted.values())
    by_format: dict[str, list] = defaultdict(list)
    for param in params:
        unit, wire_format = gatherer.unit_of(param), gatherer.format_of(param)
        if unit.kind.sends_what_rests:
            continue
        if unit.travels_as_operand(param):
            sorted_first = "" if gatherer.route.in_rank_order else " after one copy that sorts slices"
            what = f"{wire_format.name}, a scale a {gatherer.gemm_weights.granularity}"
            by_format[(what, f"GEMM operands as they come{sorted_first}")].append(param)
            continue
        exact = isinstance(wire_format, UnquantizedFormat)
        if topology.world_size == 1:
            reason = "one rank: nothing is sent"
        elif unit.first_bytes_of(param) != unit.bytes_of(param):
            reason = "in each node, where differences are added to them"
        elif not exact:
            reason = "frozen; 16 or 32 bits at rest" if not param.requires_grad else ""
        elif len(param.ds_shape) < 2 and (config.weights.format != "none" or session.difference_format):
            reason = "fewer than 2 dimensions: norms and biases stay in high precision"
        elif id(param) in session.exact["weights"]:
            reason = "named in weights.skip_modules"
        else:
            reason = "weights.format is none"
        reason = "; ".join(part for part in (reason, _without_kernel(session, wire_format)) if part)
        by_format[(repr(wire_format), reason)].append(param)
    rows = [
        ("weights", name, sum(p.ds_numel for p in members), f"{len(members)} tensors; {reason}".rstrip("; "))
        for (name, reason), members in by_format.items()
    ]
    rows += _difference_rows(session, gatherer)
    for kind in gatherer.kinds:
        rows += kind.report_rows([unit for unit in gatherer.units if unit.kind is kind])
    if session.conversion is not None:
        rows += _compute_rows(session)
    trainable = sum(p.ds_numel for p in params if p.requires_grad)

    def gradient_row(hop: str, chosen: WireFormat | None, ranks: int) -> tuple:
        if ranks == 1:
            return (f"gradients {hop}", "-", 0, "one rank on this level: no such hop")
        if not config.quantizes_gradients:
            return (f"gradients {hop}", "none", trainable, "DeepSpeed's own flat reduce-scatter")
        named = len(session.exact["gradients"])
        skipped = f"{named} named in gradients.skip_modules exact" if config.gradients.skip_modules else ""
        remarks = filter(None, ("tensors of fewer than 2 dimensions exact", skipped, _without_kernel(session, chosen)))
        return (f"gradients {hop}", repr(chosen) if chosen else "none", trainable, "; ".join(remarks))

    if config.gradients.scales == "tensor":
        rows.append(("gradient scales", "one a tensor, shared", 0, f"from {STEPS} steps; mu adapts; added in fp32"))
    rows.append(gradient_row("within nodes", session.intra_format, topology.ranks_per_node))
    rows.append(gradient_row("between nodes", session.inter_format, topology.nodes))
    if session.residual_bytes:
        remark = f"what the hop between nodes drops: {session.residual_bytes / GIGA:.3g} GB a rank, from step 1 on"
        rows.append(("error feedback", f"int8 (block {config.gradients.block_size})", trainable, remark))
    if session.sums_numel:
        remark = "of several micro-batches, on a rank of the node; they cross between nodes once a step"
        rows.append(("gradient sums", "16 or 32 bits", session.sums_numel, remark))
    rows += _state_rows(session)
    if session.secondary_ranks is None and topology.nodes == 1:
        rows.append(("secondary shard", "none", 0, "one node: every shard is in it already"))
    elif session.secondary_ranks is None:
        rows.append(("secondary shard", "none", 0, "backward gathers cross the network again"))
    else:
        kept = sum(unit.numel for unit in gatherer.units if unit.keeps_secondary)
        remark = f"one copy in {session.secondary_ranks} rank(s); backward stays there"
        how = "added to" if session.difference_format else "as received"
        rows.append(("secondary shard", how, kept, remark if kept else "no unit fits"))
        if config.secondary.memory_gb != "all":
            others = sum(unit.numel for unit in gatherer.units) - kept
            limit = f"{session.secondary_bytes / GIGA:.3g} GB a rank, from memory_gb {config.secondary.memory_gb}"
            rows.append(("", "gathered each time", others, f"beyond {limit}"))
    remark = ""
    if config.gather_granularity == "block":
        found = f"{len(blocks)} blocks ({type(blocks[0]).__name__})" if blocks else ""
        remark = found or "no repeated block found in the model: gathered module by module"
    rows.append(("gather unit", config.gather_granularity, 0, remark))
    if config.compile == "blocks":
        rows.append(("compiled", "blocks", 0, "by torch.compile, at their first call"))
    return rows + _idle_pattern_rows(config, model)


def _idle_pattern_rows(config: PluginConfig, model: nn.Module) -> list[tuple]:
    """Name patterns of the user's that name nothing of this model: misspelt, or meant for another engine's model."""
    modules = [name for name, _ in model.named_modules()]
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    rows = []
    for section, names in {"weights": params, "gradients": params, "compute": modules, "frozen": modules}.items():
        part = getattr(config, section)
        default = type(part).model_fields["skip_modules"].default
        given = [pattern for pattern in part.skip_modules if pattern not in default]
        idle = [pattern for pattern in given if not any(matches(name, [pattern]) for name in names)]
        if idle:
            rows.append((section, "as without", 0, f"skip_modules names nothing of this model by {_shown(idle)}"))
    return rows


def _difference_rows(session: Session, gatherer: Gatherer) -> list[tuple]:
    """How weights have changed, where that is what crosses between nodes, and what it is added to."""
    if session.config.weights.difference.format == "none":
        return []
    chosen = session.difference_format
    if chosen is None:
        one_node = "one rank or one node: no copy that differences could be added to; weights travel as they are"
        return [("weight differences", "none", 0, one_node)]
    units = [unit for unit in gatherer.units if unit.keeps_secondary]
    params = [p for unit in units for p in unit.params if unit.first_bytes_of(p) != unit.bytes_of(p)]
    held = gatherer.route.reached * sum(unit.bytes_of(p) for unit in units for p in unit.params) / GIGA
    remarks = (
        f"{len(params)} tensors; all of them cross at start",
        f"added to copies of {held:.3g} GB a rank",
        _without_kernel(session, chosen),
    )
    return [("weight differences", repr(chosen), sum(p.ds_numel for p in params), "; ".join(filter(None, remarks)))]


def _state_rows(session: Session) -> list[tuple]:
    """What rests on the ranks: reduced gradients, master weights and moments."""
    config = session.config
    rows = []
    stored = config.gradients.store_format
    if stored != "none":
        others = "vectors" if session.sums_numel else "vectors, and sums over micro-batches,"
        rows.append(("gradients at rest", stored, 0, f"{others} in 16 or 32 bits"))
    formats = session.state_formats
    if formats is not None:
        names = f"{formats.master}, {formats.exp_avg}, {formats.exp_avg_sq}"
        remark = f"master weights, first and second moments; a scale a {formats.scales}, {formats.rounding} rounding"
        rows.append(("optimizer states", names, 0, remark))
    return rows


def _compute_rows(session: Session) -> list[tuple]:
    """What linear layers compute in, and which stay in high precision."""
    conversion = session.conversion
    compute = conversion.scaling.compute
    formats = ", ".join(f"{role} {name}" for role, name in conversion.scaling.formats.items())
    # Old-style weight_norm keeps a plain tensor there.
    weights = [module.weight for module in conversion.converted.values()]
    numel = sum(math.prod(getattr(weight, "ds_shape", weight.shape)) for weight in weights)
    rows = [
        ("linear layers", f"{compute.scaling} scaling", numel, f"{len(conversion.converted)} layers; {formats}"),
        ("", "", 0, execution(session.device, compute.scaling)),
    ]
    if compute.scaling == "delayed":
        where = "" if session.device.type == "cuda" else "; done on a GPU only, not here"
        remark = f"{len(conversion.fused)} norms and gated products hand codes to the layer after them{where}"
        rows.append(("fused with the cast", "", 0, remark))
    for gemm in patterns_of_gemms(compute):
        names = [name for name, module in conversion.converted.items() if getattr(module.precision.high, gemm)]
        rows.append((f"GEMM {gemm}", "high precision", 0, f"{len(names)} layers: {_shown(names)}"))
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, reason in conversion.skipped.items():
        names_of[reason].append(name)
    for reason, names in names_of.items():
        rows.append(("linear layers", "high precision", 0, f"{_shown(names)}: {reason}"))
    return rows


def _shown(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "none"


def predicted_bytes(session: Session, gatherer: Gatherer) -> dict[str, dict[str, float]]:
    """Bytes one rank sends in a step, not the first, that gathers each parameter once forward and once backward.

    Those that stay gathered between steps are gathered once."""
    topology, world = session.topology, session.topology.world_size
    before, after = session.gather_levels
    weights = {"forward": {"inter": 0, "intra": 0}, "backward": {"inter": 0, "intra": 0}}
    gradients = {"inter": 0, "intra": 0}
    for param in gatherer.adopted.values():
        unit = gatherer.unit_of(param)
        held, differs = unit.bytes_of(param), unit.first_bytes_of(param) / max(1, unit.bytes_of(param))
        # Copies of frozen weights stay valid from step to step: after the first one they are there.
        is_kept = unit.keeps_secondary and unit.is_frozen
        for level, kept in [(level, unit.keeps_secondary) for level in before] + [(a, False) for a in after]:
            sent = held * (level.size - 1)
            held *= level.size
            weights["forward"][level.link] += 0 if kept and is_kept else sent * (differs if kept else 1)
            weights["backward"][level.link] += 0 if kept or unit.persistent else sent
        if param.requires_grad and session.config.quantizes_gradients:
            size = slice_numel(param.ds_numel, world)
            exact = UnquantizedFormat(param.dtype)
            in_full = session.sends_exactly("gradients", param)
            intra = exact if in_full else session.intra_format or exact
            inter = exact if in_full else session.inter_format or exact
            gradients["intra"] += intra.payload_bytes(size) * topology.nodes * (topology.ranks_per_node - 1)
            gradients["inter"] += inter.payload_bytes(size) * (topology.nodes - 1)
        elif param.requires_grad:
            for link, share in session.ledger.ring_bytes(param.ds_numel * param.element_size()).items():
                gradients[link] += share
    return {"weights forward": weights["forward"], "weights backward": weights["backward"], "gradients": gradients}


def start_table(session: Session, gatherer: Gatherer, model: nn.Module, blocks: list[nn.Module]) -> str:
    """The table as text."""
    config, topology = session.config, session.topology
    recipe = config.recipe or "none (lossless plus the ZeRO++ keys)"
    if config.recipe_variable:
        recipe += f" (from {config.recipe_variable})"
    lines = [
        f"zeropp_fp8: recipe {recipe}; {topology.nodes} node(s) x "
        f"{topology.ranks_per_node} rank(s), from {session.ranks_per_node_source}",
        f"  {'what':<24}{'format':<34}{'parameters':>14}  remark",
    ]
    for what, name, numel, remark in _rows(session, gatherer, model, blocks):
        lines.append(f"  {what:<24}{name:<34}{numel if numel else '':>14}  {remark}".rstrip())
    of = "one micro-batch; nothing stays until its backward"
    lines.append(f"  {'MB a rank sends a step':<24}{'between nodes':>16}{'within node':>18}  ({of})")
    for what, links in predicted_bytes(session, gatherer).items():
        lines.append(f"  {what:<24}{links['inter'] / MEGA:>16.3f}{links['intra'] / MEGA:>18.3f}")
    return "\n".join(lines)


def print_start_table(session: Session, gatherer: Gatherer, model: nn.Module, blocks: list[nn.Module]) -> None:
    """Print the table on rank 0."""
    if session.topology.rank == 0:
        print(start_table(session, gatherer, model, blocks), flush=True)


def print_progress_line(session: Session, scales: GradientScales | None = None) -> None:
    """Print the bytes of a step since the last line, and what became of FP8 gradients, on rank 0, every `report.every`
    steps."""
    every, progress = session.config.report.every, session.progress
    if not every or session.ledger.steps % every or session.topology.rank != 0:
        return
    scaling = ""
    if scales is not None:
        now = scales.report()
        scaling = (
            f"; gradients: mu {now['mu']:.3g}, {100 * now['saturated']:.2g} % at the largest code, "
            f"{100 * now['vanished']:.2g} % became zero"
        )
    (between, stock), (within, _) = progress.of_link("inter"), progress.of_link("intra")
    ratio = f"{between / stock:.3f} x stock" if stock else "one node"
    print(
        f"zeropp_fp8: step {session.ledger.steps}: a rank sends {between / MEGA:.3f} MB between nodes ({ratio}) and "
        f"{within / MEGA:.3f} MB within its node per step{scaling}",
        flush=True,
    )
    progress.set_to_zero()
