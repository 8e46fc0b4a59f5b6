"""Errors of ranks that wait for parameters in vain."""

from __future__ import annotations

from collections.abc import Sequence


def named(error: RuntimeError, names: Sequence[str]) -> RuntimeError:
    """An error of the backend that names the parameters which were waited for besides."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return type(error)(
        f"{error}\nzeropp_fp8: this rank was waiting for parameters, {names[0]}{more}. If no other rank has "
        "failed, some do not run the module that uses these: run it on all ranks, or, to run it on some only, "
        "gather all of its parameters on all ranks before, with deepspeed.zero.GatheredParameters"
    )
