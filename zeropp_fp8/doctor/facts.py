"""The facts that a rank finds about itself, without waiting for another rank."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import Any

from zeropp_fp8.config import PluginConfig, place_of
from zeropp_fp8.doctor import versions
from zeropp_fp8.doctor.accelerator import cpu_where_there_is_no_gpu, describe, device_of, rates
from zeropp_fp8.doctor.kernels import kernel_differences
from zeropp_fp8.doctor.problems import Problem
from zeropp_fp8.doctor.variables import variable_problems, variables


def facts_of(rank: int, local_rank: int, config: PluginConfig) -> dict[str, Any]:
    """The facts, as JSON. What goes wrong is among its "problems": a rank that cannot look at its device still says its
    versions."""
    problems = versions.version_problems(versions.needed())
    found: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "place": asdict(place_of(rank, config)),
        "versions": versions.versions(),
        "variables": variables(os.environ),
        "switched_on": versions.switched_on(),
        "device": {},
        "rates": None,
        "kernels_tested": False,
    }
    cpu_where_there_is_no_gpu()  # it sets a variable, which the user has not
    problems += [*variable_problems(found["variables"]), *versions.compilation_problems()]
    problems += [each for each in (versions.deepspeed_problem(),) if each is not None]
    try:
        device = device_of(local_rank)
        found["device"] = describe(device)
        if device.type == "cuda":
            found["rates"] = rates(device)
            problems += [Problem(text, _KERNELS) for text in kernel_differences(device)]
            found["kernels_tested"] = True
    except Exception as error:  # drivers, compilers, memory: anything, and the report must say it
        problems.append(Problem(f"the device cannot be used: {type(error).__name__}: {error}", "mend that first"))
    return {**found, "problems": [asdict(each) for each in problems]}


_KERNELS = "training would be wrong: install the supported torch and triton, remove ~/.triton/cache, and report it"
