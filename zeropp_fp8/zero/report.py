"""The table that rank 0 prints at start."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from deepspeed.utils import logger
from torch import nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.compute.convert import ROUTER, WRAPPED_BASES, linear_classes, routers
from zeropp_fp8.compute.experts import packed_experts
from zeropp_fp8.config import difference_bits
from zeropp_fp8.formats import UnquantizedFormat, WireFormat
from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.zero.gather.attached import unit_of
from zeropp_fp8.zero.gather.blocks import find_blocks
from zeropp_fp8.zero.gather.secondary import is_frozen
from zeropp_fp8.zero.gather.used_experts import InParts
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.stage_part import Row, idle_pattern_rows, shown, table_of, without_kernel
from zeropp_fp8.zero.telemetry import MEGA

if TYPE_CHECKING:
    from zeropp_fp8.zero.gather.gatherer import Gatherer
    from zeropp_fp8.zero.gather.units import Unit

GIGA = 1e9
EXPECTED_RATE = 1e-5  # the learning rate for which bytes of differences are predicted


def _rows(session: Session, gatherer: Gatherer, model: nn.Module, blocks: list[nn.Module]) -> list[Row]:
    rows = [*_weight_rows(session, gatherer), *_difference_rows(session, gatherer)]
    for storage in gatherer.ownership.storages:
        rows += storage.report_rows([p for unit in gatherer.units if unit.storage is storage for p in unit.params])
    for part in session.parts:
        rows += part.rows()
    modules = [name for name, _ in model.named_modules()]
    params = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names = {"weights": params, "gradients": params, "compute": modules, "frozen": modules}
    rows += [*_gather_rows(session, gatherer, blocks), *idle_pattern_rows(session.config, names)]
    routing = routers(model) if session.config.frozen.format != "none" else ()
    named = [n for n, m in model.named_modules() if id(m) in routing and not sharded.stored_as_codes(m.weight)]
    rows += [("frozen store", "16 or 32 bits", 0, f"{shown(named)}: {ROUTER}")] if named else []
    return [*rows, *_not_loaded_rows(model)]


def _weight_rows(session: Session, gatherer: Gatherer) -> list[Row]:
    """The wire formats of weights, with reasons."""
    by_format: dict[tuple[str, str], list[Parameter]] = defaultdict(list)
    for param in gatherer.ownership.params.values():
        unit = unit_of(param)
        wire_format = unit.format_of(param)
        if unit.storage.sends_as_stored:
            continue
        if unit.sent_as_operand(param):
            sorted_first = "" if gatherer.route.in_rank_order else " after one copy that sorts slices"
            what = f"{wire_format.name}, a scale per {gatherer.route.gemm_weights.granularity}"
            by_format[what, f"GEMM operands as received{sorted_first}"].append(param)
            continue
        reasons = (_why(session, unit, param, wire_format), without_kernel(session.device, wire_format))
        by_format[repr(wire_format), "; ".join(filter(None, reasons))].append(param)
    return [
        ("weights", name, sum(sharded.numel(p) for p in members), f"{len(members)} tensors; {reason}".rstrip("; "))
        for (name, reason), members in by_format.items()
    ]


def _why(session: Session, unit: Unit, param: Parameter, wire_format: WireFormat) -> str:
    """The reason for a weight's wire format, if the section does not give it."""
    weights = session.config.weights
    if session.topology.world_size == 1:
        return "one rank: nothing is sent"
    if weights.format == "none" and unit.difference.is_on:
        return "in each node, where differences are added to them"
    if not wire_format.is_exact:
        return "" if param.requires_grad else "frozen; stored in 16 or 32 bits"
    if is_vector(sharded.shape(param)) and weights.format != "none":
        return "fewer than 2 dimensions: norms and biases stay in high precision"
    named = "named in weights.skip_modules, or another library's codes"
    return named if id(param) in session.exact["weights"] else "weights.format is none"


def _gather_rows(session: Session, gatherer: Gatherer, blocks: list[nn.Module]) -> list[Row]:
    """Rows on secondary shards, on units that are gathered together, and on compiled blocks."""
    config, rows = session.config, []
    if session.secondary_ranks is None:
        one_node = session.topology.nodes == 1
        remark = "one node: every shard is in it already" if one_node else "backward gathers between nodes again"
        rows.append(("secondary shard", "none", 0, remark))
    else:
        kept = sum(unit.numel for unit in gatherer.units if unit.keeps_secondary)
        remark = f"one copy in {session.secondary_ranks} rank(s); backward stays there"
        how = "added to" if session.formats.differs else "as received"
        rows.append(("secondary shard", how, kept, remark if kept else "no unit fits"))
        if config.secondary.memory_gb != "all":
            others = sum(unit.numel for unit in gatherer.units) - kept
            limit = f"{gatherer.secondary.limit / GIGA:.3g} GB per rank, from memory_gb {config.secondary.memory_gb}"
            rows.append(("", "gathered each time", others, f"beyond {limit}"))
    remark = ""
    if config.gather_granularity == "block":
        found = f"{len(blocks)} blocks ({type(blocks[0]).__name__})" if blocks else ""
        remark = found or "no repeated block found in the model: gathered module by module"
    rows.append(("gather unit", config.gather_granularity, 0, remark))
    if config.experts.gather == "used":
        in_parts = sum(unit.numel for unit in gatherer.units if isinstance(unit, InParts))
        remark = "those that some rank has tokens for, once the router has chosen them"
        rows.append(("experts", "used", in_parts, remark if in_parts else "one rank: nothing is sent"))
    if config.compile == "blocks":
        rows.append(("compiled", "blocks", 0, "by torch.compile, at their first call"))
    return rows


def _not_loaded_rows(model: nn.Module) -> list[Row]:
    """A row on weights that transformers found in no file of a checkpoint, and so has made up.

    Adapters come from other files. Of what is trained, experts and linear layers of blocks are meant, and no new head.
    """
    ignored = "_keys_to_ignore_on_load_missing"
    computed = {name for each in model.modules() for name in getattr(each, ignored, None) or ()}
    wrappers = {name for name, module in model.named_modules() if not module._modules.keys().isdisjoint(WRAPPED_BASES)}
    of_model = {}
    for name, param in model.named_parameters():
        inside = [name[dot.end() :] for dot in re.finditer(r"\.", name) if name[: dot.start()] in wrappers]
        if all(rest.startswith(WRAPPED_BASES) for rest in inside):
            of_model[name] = param
    found = {name for name, param in of_model.items() if getattr(param, "_is_hf_initialized", False)}
    layers = [m for block in find_blocks(model) for m in block.modules() if isinstance(m, linear_classes())]
    needed = {id(m.weight) for m in layers} | {id(p) for m in model.modules() for p in packed_experts(m)}
    needed |= {id(p) for n, p in of_model.items() if not p.requires_grad and ".original_module." not in n}
    missing = [n for n, p in of_model.items() if n not in found and id(p) in needed]
    missing = [n for n in missing if not any(re.search(pattern, n) for pattern in computed)]
    if not (found and missing):
        return []
    logger.warning(f"zeropp_fp8: in no file of the checkpoint, so random unless set since: {', '.join(missing)}")
    return [("NOT LOADED", "random numbers", sum(sharded.numel(of_model[n]) for n in missing), shown(missing))]


def _difference_rows(session: Session, gatherer: Gatherer) -> list[Row]:
    """Rows on weight differences, if these are sent between nodes, and on the copies that they are added to."""
    if session.config.weights.difference != "exact":
        return []
    if not session.formats.differs:
        one_node = "one rank or one node: no copy that differences could be added to; weights are sent as they are"
        return [("weight differences", "none", 0, one_node)]
    units = [unit for unit in gatherer.units if unit.difference.is_on]
    params = [p for unit in units for p in unit.params]
    if not params:
        return [("weight differences", "none", 0, "sent whole: below stage3_param_persistence_threshold, or no copy")]
    held = sum(unit_of(p).route.reached * unit_of(p).bytes_of(p) for p in params) / GIGA
    name = session.config.weights.format
    bits = ", ".join(f"{difference_bits(rate, name):.2g} at {rate:g}" for rate in (1e-6, EXPECTED_RATE, 1e-4))
    remark = f"{len(params)} tensors; sent whole at start, then bits per weight by AdamW's learning rate: {bits}"
    numel = sum(map(sharded.numel, params))
    return [("weight differences", "exact", numel, f"{remark}; added to copies of {held:.3g} GB per rank")]


def predicted_bytes(session: Session, gatherer: Gatherer) -> dict[str, dict[str, float]]:
    """Bytes that one rank sends in a step after the first, which gathers each parameter in forward and in backward.

    Parameters that stay gathered between steps are gathered once; differences are those of `EXPECTED_RATE`."""
    weights = {"forward": {"inter": 0, "intra": 0}, "backward": {"inter": 0, "intra": 0}}
    gradients = {"inter": 0, "intra": 0}
    for param in gatherer.ownership.params.values():
        unit = unit_of(param)
        before, after = unit.route.session.gather_levels
        held, differs = unit.bytes_of(param), 1.0
        if unit.difference.is_on:
            name = session.config.weights.format
            differs = difference_bits(EXPECTED_RATE, name) / (16 if name == "none" else 8)
        # Copies of frozen weights stay valid from step to step: after the first step none are sent.
        is_kept = unit.keeps_secondary and is_frozen(unit)
        for level, kept in [(level, unit.keeps_secondary) for level in before] + [(a, False) for a in after]:
            sent = held * (level.size - 1)
            held *= level.size
            weights["forward"][level.link] += 0 if kept and is_kept else sent * (differs if kept else 1)
            weights["backward"][level.link] += 0 if kept or unit.persistent else sent
        topology = unit.route.session.topology
        if param.requires_grad and session.config.reduces_gradients:
            size = slice_numel(sharded.numel(param), topology.world_size)
            exact = UnquantizedFormat(param.dtype)
            in_full = session.sends_exactly("gradients", param)
            intra = exact if in_full else session.formats.within or exact
            inter = exact if in_full else session.formats.between or exact
            gradients["intra"] += intra.payload_bytes(size) * topology.nodes * (topology.ranks_per_node - 1)
            gradients["inter"] += inter.payload_bytes(size) * (topology.nodes - 1)
        elif param.requires_grad:
            num_bytes = sharded.numel(param) * param.element_size()
            for link, share in session.ledger.ring_bytes(num_bytes, topology).items():
                gradients[link] += share
    return {"weights forward": weights["forward"], "weights backward": weights["backward"], "gradients": gradients}


def print_start_table(session: Session, gatherer: Gatherer, model: nn.Module, blocks: list[nn.Module]) -> None:
    if session.topology.rank != 0:
        return
    lines = table_of(session, _rows(session, gatherer, model, blocks))
    of = "one micro-batch; nothing stays until its backward"
    lines.append(f"  {'MB a rank sends per step':<24}{'between nodes':>16}{'within node':>18}  ({of})")
    for what, links in predicted_bytes(session, gatherer).items():
        lines.append(f"  {what:<24}{links['inter'] / MEGA:>16.3f}{links['intra'] / MEGA:>18.3f}")
    print("\n".join(lines), flush=True)
