"""The facts that a rank finds about itself, without waiting for another rank."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import Any

from zeropp_fp8.config import PluginConfig, place_of
from zeropp_fp8.doctor.accelerator import cpu_where_there_is_no_gpu, describe, device_of, rates
from zeropp_fp8.doctor.kernels import kernel_differences
from zeropp_fp8.doctor.problems import Problem
from zeropp_fp8.doctor.variables import variable_problems, variables
from zeropp_fp8.doctor.versions import deepspeed_problem, needed, switched_on, version_problems, versions


def facts_of(rank: int, local_rank: int, config: PluginConfig) -> dict[str, Any]:
    """JSON: {"rank", "host", "place", "versions", "variables", "switched_on", "device", "rates", "kernels_tested",
    "problems"}.

    What goes wrong is among the problems: a rank that cannot look at its device still says its versions.
    """
    problems = version_problems(needed())
    found: dict[str, Any] = {
        "rank": rank,
        "host": socket.gethostname(),
        "place": asdict(place_of(rank, config)),
        "versions": versions(),
        "variables": variables(os.environ),
        "switched_on": switched_on(),
        "device": {},
        "rates": None,
        "kernels_tested": False,
    }
    cpu_where_there_is_no_gpu()  # it sets a variable, which the user has not
    problems += variable_problems(found["variables"])
    refused = deepspeed_problem()
    problems += [refused] if refused else []
    try:
        device = device_of(local_rank)
        found["device"] = describe(device)
        if device.type == "cuda":
            found["rates"] = rates(device)
            problems += [Problem(text, _KERNELS) for text in kernel_differences(device)]
            found["kernels_tested"] = True
    except Exception as error:  # drivers, compilers, memory: anything, and the report must say it
        problems.append(Problem(f"the device cannot be used: {type(error).__name__}: {error}", _DEVICE))
    return {**found, "problems": [asdict(each) for each in problems]}


_KERNELS = "training would be wrong: install the supported torch and triton, remove ~/.triton/cache, and report it"
_DEVICE = "mend that first"
