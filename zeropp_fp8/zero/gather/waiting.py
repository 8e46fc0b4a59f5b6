"""Errors on ranks that wait in vain for parameters."""

from __future__ import annotations

from collections.abc import Sequence


def named(error: RuntimeError, names: Sequence[str]) -> RuntimeError:
    """The backend's error with the names of the awaited parameters added."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return type(error)(
        f"{error}\nzeropp_fp8: this rank was waiting for parameters, {names[0]}{more}. If no other rank has "
        "failed, some do not run the module that uses these: run it on all ranks, or, to run it on some only, "
        "gather all of its parameters on all ranks before, with deepspeed.zero.GatheredParameters"
    )
