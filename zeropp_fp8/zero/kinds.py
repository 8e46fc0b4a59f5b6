"""The kinds of units of an engine, by its configuration. They are imported only where they are asked for."""

from __future__ import annotations

from zeropp_fp8.zero.gather.kinds import Kind
from zeropp_fp8.zero.gather.route import Route
from zeropp_fp8.zero.gather.sliced import Sliced


def kinds_of(route: Route) -> list[Kind]:
    """A parameter is of the first that takes it."""
    config, kinds = route.session.config, []
    if config.frozen.format != "none":
        from zeropp_fp8.zero.frozen.unit import Stored

        kinds.append(Stored(route))
    if config.partition == "whole_tensor":
        from zeropp_fp8.zero.owners.unit import Owned

        kinds.append(Owned(route))
    else:
        kinds.append(Sliced(route))
    return kinds
