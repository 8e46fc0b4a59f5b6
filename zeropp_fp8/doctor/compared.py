"""The facts of all ranks, side by side: where they contradict each other, and where nodes are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from zeropp_fp8.config import ConfigError, Place, find_ranks_per_node
from zeropp_fp8.doctor.problems import Problem
from zeropp_fp8.doctor.variables import OF_A_HOST

T = TypeVar("T")


def ranks_text(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"; "rank 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def ranks_by(values: Iterable[tuple[int, T]]) -> dict[T, list[int]]:
    """{value: the ranks that have it} of (rank, value)."""
    found: dict[T, list[int]] = {}
    for rank, value in values:
        found.setdefault(value, []).append(rank)
    return found


def missing_problems(said: Mapping[int, Any], world_size: int, what: str) -> list[Problem]:
    missing = sorted(set(range(world_size)) - set(said))
    if not missing:
        return []
    remedy = "look at what they printed; they may have died, or hang, or not have been started"
    return [Problem(f"{ranks_text(missing)} said nothing of {what} in time", remedy)]


def own_problems(facts: Mapping[int, dict]) -> list[Problem]:
    """The problems that ranks have found on their own; what several have is said once."""
    by_problem = ranks_by((rank, Problem(**each)) for rank, found in facts.items() for each in found["problems"])
    alone = len(facts) == 1
    return [
        problem if alone else Problem(f"{ranks_text(ranks)}: {problem.what}", problem.remedy, problem.serious)
        for problem, ranks in by_problem.items()
    ]


def differences(facts: Mapping[int, dict]) -> Iterator[Problem]:
    """Versions, devices and variables that are not the same on all ranks; ranks that share a GPU."""
    for name in sorted({name for found in facts.values() for name in found["versions"]}):
        values = {rank: found["versions"].get(name, "not there") for rank, found in facts.items()}
        if len(set(values.values())) > 1:
            yield Problem(f"{name} differs: {_values(values)}", "install the same version on all hosts")
    devices = {rank: found["device"]["name"] for rank, found in facts.items() if found["device"]}
    if len(set(devices.values())) > 1:
        yield Problem(
            f"devices differ: {_values(devices)}",
            "a step is as slow as the slowest; ranks with a GPU and ranks without one cannot train together",
            serious="CPU" in devices.values(),
        )
    yield from _shared_gpus(facts)
    names = sorted({name for found in facts.values() for name in found["variables"]} - set(OF_A_HOST))
    for name in names:
        values = {rank: found["variables"].get(name, "not set") for rank, found in facts.items()}
        if len(set(values.values())) > 1:
            yield Problem(f"{name} differs: {_values(values)}", "give all ranks the same", serious=False)


def _values(values: Mapping[int, str]) -> str:
    """ "2.11 on ranks 0-3, 2.12 on rank 4"."""
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by(values.items()).items())


def _shared_gpus(facts: Mapping[int, dict]) -> Iterator[Problem]:
    gpus = {rank: (found["host"], found["device"].get("uuid")) for rank, found in facts.items()}
    users = ranks_by((rank, gpu) for rank, gpu in gpus.items() if gpu[1] is not None)
    for (host, _), ranks in users.items():
        if len(ranks) > 1:
            remedy = "NCCL refuses that; give each its own by LOCAL_RANK, which torchrun and deepspeed set"
            yield Problem(f"{ranks_text(ranks)} share one GPU of {host}", remedy)


def nodes_of(facts: Mapping[int, dict]) -> tuple[int, str, list[Problem]]:
    """(ranks a node, in words where that comes from, problems), as an engine would find it."""
    places = [Place(**facts[rank]["place"]) for rank in sorted(facts)]
    try:
        found, source = find_ranks_per_node(places, len(places))
    except ConfigError as error:
        return 0, "", [Problem(str(error))]
    return found, source, []
