"""The interface between a stage and a feature of training.

The stage names no feature. At each point of a step and of a checkpoint it calls all `session.parts`, in the same
order on every rank, so a part may do collectives. A new feature is a new part; the code that makes it adds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zeropp_fp8.config import PluginConfig
from zeropp_fp8.config.compute import matches, patterns_of_gemms
from zeropp_fp8.formats import WireFormat

Row = tuple[str, str, int, str]  # a line of the start table: subject, format, parameters (0: not shown), remark


class StagePart:
    """A part that does nothing; a feature overrides the methods that it needs.

    Attributes:
        of_topology: the extra state is valid for the same nodes and ranks only.
        gives_up: describes what `formats_changed` switches to 16 or 32 bits.
        if_lost: the message if a checkpoint's extra state does not fit and the part starts afresh.
    """

    of_topology = False
    gives_up = ""
    if_lost = ""

    # -- a step, in this order ---------------------------------------------------------------------------------------

    def loss_is(self, loss: Tensor) -> None:
        """The script calls `engine.backward` with the loss of a micro-batch."""

    def backward_issued(self) -> None:
        """The host has issued all work of a backward pass."""

    def gradients_ready(self) -> None:
        """All gradients of a step are reduced; the optimizer has not used them yet."""

    def step_ended(self, overflow: bool, scale_change: float) -> None:
        """A step has ended, or (`overflow`) was skipped because gradients were not finite.

        `scale_change`: the new loss scale over that of the step.
        """

    def step_counted(self) -> None:
        """The ledger has counted the step too. Bytes sent now belong to no step."""

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def extra_state(self) -> dict[str, Any]:
        """State that training needs beside weights and optimizer states, under keys of the part's own."""
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Load a checkpoint's extra state of all parts; {} if it has none.

        Raises:
            ValueError: the state does not fit; this is then called again with {}.
        """

    def weights_loaded(self) -> None:
        """The weights of a checkpoint are there too. Collective."""

    # -- at other times ----------------------------------------------------------------------------------------------

    def formats_changed(self) -> None:
        """Communication is in 16 or 32 bits from now on (between steps). A part that this ends leaves the list."""

    def bytes_to_come(self) -> int:
        """Bytes that the part will allocate after the start."""
        return 0

    def metrics(self) -> dict[str, float]:
        """The part's current numbers by their names in telemetry.py, even after the engine's end. Not collective."""
        return {}

    def rows(self) -> list[Row]:
        """Lines of the start table."""
        return []


def table_of(session, rows: Iterable[Row]) -> list[str]:
    config, topology = session.config, session.topology
    recipe = config.recipe or "none (lossless plus the ZeRO++ keys)"
    if config.recipe_variable:
        recipe += f" (from {config.recipe_variable})"
    lines = [
        f"zeropp_fp8: recipe {recipe}; {topology.nodes} node(s) x "
        f"{topology.ranks_per_node} rank(s), from {session.ranks_per_node_source}",
        f"  {'what':<24}{'format':<34}{'parameters':>14}  remark",
    ]
    for what, name, numel, remark in rows:
        lines.append(f"  {what:<24}{name:<34}{numel if numel else '':>14}  {remark}".rstrip())
    return lines


def row_of_hop(session, hop: str, chosen: WireFormat | None, ranks: int, numel: int) -> Row:
    """Return the row of a hop of `numel` gradients, "within nodes" or "between nodes", over so many ranks."""
    if ranks == 1:
        return (f"gradients {hop}", "-", 0, "one rank on this level: no such hop")
    if not session.config.reduces_gradients:
        return (f"gradients {hop}", "none", numel, "one reduce-scatter per bucket, as in stock")
    named = len(session.exact["gradients"])
    skipped = f"{named} named in gradients.skip_modules exact" if session.config.gradients.skip_modules else ""
    remarks = ("tensors of fewer than 2 dimensions exact", skipped, without_kernel(session.device, chosen))
    return (f"gradients {hop}", repr(chosen) if chosen else "none", numel, "; ".join(filter(None, remarks)))


def without_kernel(device: torch.device, wire_format: WireFormat | None) -> str:
    """A remark if a GPU has no kernel for a format, else an empty text."""
    if device.type != "cuda" or wire_format is None:
        return ""
    from zeropp_fp8 import kernels

    return "" if kernels.supports(wire_format) else "no kernel for this format or blocks this long: torch code, slower"


def shown(names: list[str]) -> str:
    """The first four names, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "none"


def idle_pattern_rows(config: PluginConfig, names_of: dict[str, list[str]]) -> list[Row]:
    """The user's name patterns that match none of the names that their part of the section is about."""
    rows = []
    for section, names in names_of.items():
        part = getattr(config, section)
        given = {key: getattr(part, key) for key in ("skip_modules", "modules") if hasattr(part, key)}
        if section == "compute":
            given["high_precision_gemms"] = [*chain.from_iterable(patterns_of_gemms(part).values())]
        for key, patterns in given.items():
            default, known = type(part).model_fields[key].default or (), patterns if isinstance(patterns, list) else ()
            idle = [each for each in known if each not in default and not any(matches(n, [each]) for n in names)]
            if idle:
                rows.append((section, "as without", 0, f"{key} names nothing of this model by {shown(idle)}"))
    return rows
