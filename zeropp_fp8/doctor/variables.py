"""Environment variables that change how ranks talk, and what is wrong with them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping

from zeropp_fp8.doctor.problems import Problem

# Value that costs something -> what it costs.
COSTLY = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node copy through the host instead of NVLink or PCIe",
    ("NCCL_SHM_DISABLE", "1"): "GPUs of a node without peer access talk over the network",
    ("NCCL_IB_DISABLE", "1"): "nodes talk over TCP, although they may have InfiniBand or RoCE",
    ("CUDA_LAUNCH_BLOCKING", "1"): "the host waits for every kernel: nothing overlaps",
    ("TORCH_DISTRIBUTED_DEBUG", "DETAIL"): "every collective is checked by another one",
    ("TRITON_INTERPRET", "1"): "kernels run in Python, thousands of times slower",
}
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_DISTRIBUTED", "FI_", "UCX_", "ZEROPP_FP8_")
OTHERS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET")
OTHERS += ("DS_ACCELERATOR", "OMP_NUM_THREADS")
OF_A_HOST = ("NCCL_HOSTID", "CUDA_VISIBLE_DEVICES")  # may differ from rank to rank


def variables(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in sorted(env.items()) if name.startswith(PREFIXES) or name in OTHERS}


def variable_problems(found: Mapping[str, str], interfaces: Iterable[str] | None = None) -> Iterator[Problem]:
    """The faults of a rank's variables. `interfaces`: of its host."""
    for (name, value), cost in COSTLY.items():
        if found.get(name, "").upper() == value:
            yield Problem(f"{name}={value}: {cost}", "unset it, if that is not meant", serious=False)
    names = [name for _, name in socket.if_nameindex()] if interfaces is None else list(interfaces)
    rules = {"NCCL_SOCKET_IFNAME": _matches_nccl, "GLOO_SOCKET_IFNAME": lambda value, name: name in value.split(",")}
    for variable, matches in rules.items():
        value = found.get(variable)
        if value and not any(matches(value, name) for name in names):
            remedy = f"interfaces are {', '.join(names)}; name one of them, or unset it"
            yield Problem(f"{variable}={value} names no interface of host {socket.gethostname()}", remedy)


def _matches_nccl(value: str, name: str) -> bool:
    """NCCL's rule: prefixes with commas between them; "=" in front: whole names; "^": all others."""
    inverted = value.startswith("^")
    value = value.removeprefix("^")
    whole = value.startswith("=")
    wanted = value.removeprefix("=").split(",")
    found = any(name == each if whole else name.startswith(each) for each in wanted if each)
    return found != inverted
