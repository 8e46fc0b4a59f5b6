"""Faults and soaks: cases that ended well, and the seconds that the others took to end."""

from __future__ import annotations

import re
import statistics

from benchmarks.report.blocks import Block, paragraph, since, table

PLACES = ("build", "load", "forward", "backward", "step", "evaluate", "generate", "save")
FAULTS = {"kill": "kill", "exception": "exception", "exit": "exit", "return": "return", "stop": "stop", "nan": "NaN"}


def well(result: dict) -> str:
    """So many of so many cases."""
    return f"{sum(row['well'] for row in result['rows'])} of {len(result['rows'])}"


def recipes(result: dict) -> list[str]:
    """In the order in which they were tried."""
    return list(dict.fromkeys(row["recipe"] for row in result["rows"]))


def pairs(result: dict) -> int:
    """How many pairs of fault and place each recipe had; all the same."""
    found = {(row["fault"], row["place"]) for row in result["rows"]}
    assert len(result["rows"]) == len(found) * len(recipes(result))
    return len(found)


def quoted(names) -> str:
    """`a`, `b` and `c`."""
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}" if first else last


def counts(gloo: dict, nccl: dict) -> str:
    """The cases of both networks."""
    return paragraph(
        f"""{well(gloo)} cases ended well over gloo ({pairs(gloo)} pairs of fault and place, {len(recipes(gloo))}
        recipes), {well(nccl)} over NCCL on {nccl["ranks"]} H200 ({len(recipes(nccl))} recipes).
        `benchmarks/results/faults/README.md` has the tables and commits; see [Checkpoints and
        faults](checkpoints.md)."""
    )


def cell(result: dict, fault: str, place: str) -> str:
    """The largest number of seconds over recipes; NaN does not end a rank, its step is skipped."""
    rows = [row for row in result["rows"] if (row["fault"], row["place"]) == (fault, place)]
    if not rows:
        return "-"
    if fault == "nan":
        assert all(rank["skipped"] == 1 for row in rows for rank in row["ranks"])
        return "skipped"
    return f"{max(row['seconds'] for row in rows):.1f}"


def seconds(result: dict) -> str:
    """By fault and place."""
    rows = [[label, *(cell(result, fault, place) for place in PLACES)] for fault, label in FAULTS.items()]
    return table(["", *PLACES], rows)


def others_did(gloo: dict, nccl: dict) -> str:
    """Return what the other rank did, on a CPU and on GPUs."""
    ended = [row for row in gloo["rows"] if row["fault"] != "nan"]
    stopped = [row["seconds"] for row in ended if row["fault"] == "stop"]
    gone = [row["seconds"] for row in ended if row["fault"] != "stop"]
    return paragraph(
        f"""On a CPU with two gloo ranks {well(gloo)} cases ended well (`benchmarks/results/faults`, also with four
        ranks and with rank 0). The other rank raised an error that names a closed connection, a time limit or the
        rank that failed, {statistics.median(gone):.1f} s after the fault (median; at most {max(gone):.1f}), or at most
        {max(stopped):.1f} s after a stop. NaN was a skipped step on both ranks. The next start loaded `latest` and
        continued bit for bit. Over NCCL on two H200 {well(nccl)} cases of {len(recipes(nccl))} recipes ended well:
        torch's watchdog names the collective after the same {nccl["timeout"]} s, and ends the process 4 s later (60 s
        unless `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC` is set; launchers end it at once). All process groups of the plugin
        and the data-parallel one have the time limit of `init_process_group`."""
    )


def soak_says(soak: dict) -> str:
    """Return what thousands of steps leave behind."""
    ranks = [rank for each in soak["recipes"].values() for rank in each]
    assert not any(rank["grown"][what] for rank in ranks for what in ("descriptors", "threads", "tensor_bytes"))
    (looks,), most = {len(rank["notes"]) for rank in ranks}, max(rank["grown"]["rss"] for rank in ranks) / (1 << 20)
    return paragraph(
        f"""`make soak` trains, saves, loads, evaluates and generates for thousands of steps. After {steps_of(soak)[0]}
        steps with {looks} of each ({", ".join(f"`{name}`" for name in soak["recipes"])}) there were no more
        descriptors, threads or bytes of tensors than at the beginning, and at most {most:.1f} MiB more memory."""
    )


def steps_of(soak: dict) -> tuple[str, str]:
    """Steps, and how many of them lie between two looks; the same for all recipes."""
    ((every, last),) = {
        (ranks[0]["notes"][0]["step"], ranks[0]["notes"][-1]["step"]) for ranks in soak["recipes"].values()
    }
    return f"{last:,}", str(every)


def grew(soak: dict) -> str:
    """Return what grew by more than is allowed, of any recipe on any rank."""
    too_much = {what for ranks in soak["recipes"].values() for rank in ranks for what in rank["too_much"]}
    return ", ".join(sorted(too_much)) + " grew" if too_much else "nothing grew"


def on_a_cpu(two: dict, four: dict, rank_0: dict, soak: dict, more: dict) -> str:
    """The files of the CPU."""
    steps, every = steps_of(soak)
    tried, shared = len(recipes(two)), sum(name.endswith("+hpZ") for name in recipes(two))
    struck = [label for fault, label in FAULTS.items() if any(row["fault"] == fault for row in four["rows"])]
    what = {
        "cpu-2-gloo.json": f"{tried} recipes ({tried - shared}, and hpZ for the {shared} without it) "
        f"x {pairs(two)} pairs of fault and place",
        "cpu-4-gloo.json": f"2 nodes x {four['ranks'] // 2} ranks, {quoted(recipes(four))}: {', '.join(struck)}",
        "cpu-2-gloo-rank_0.json": f"{quoted(recipes(rank_0))}, rank 0 struck instead of the last",
        "../soak/cpu-2-gloo.json": f"{quoted(soak['recipes'])}, {steps} steps; every {every} of them evaluate, "
        "generate, save, load",
        "../soak/cpu-2-gloo-more.json": f"the same of {len(more['recipes'])} more recipes, {steps_of(more)[0]} steps",
    }
    ended = [well(two), well(four), well(rank_0), grew(soak), grew(more)]
    rows = [
        [f"`{name}`", since(result).removeprefix("commit "), text, end]
        for (name, text), result, end in zip(what.items(), (two, four, rank_0, soak, more), ended)
    ]
    return table(["file", "commit", "what", "well"], rows)


def waits_of_gloo(four: dict) -> str:
    """Where gloo lets ranks wait."""
    longest = max(row["seconds"] for row in four["rows"] if (row["fault"], row["place"]) == ("kill", "build"))
    return paragraph(
        f"""Two waits are gloo's own: with four ranks a rank that is gone while groups are made is noticed after the
        time limit ({longest:.1f} s, `cpu-4-gloo.json`), not at once; and a rank that goes on after a stop there, when
        the others have ended, tries to connect for five time limits before it raises."""
    )


def on_two_gpus(result: dict) -> str:
    """The cases over NCCL, and what was measured on which commit."""
    (older,) = {row["commit"] for row in result["rows"]} - {result["commit"]}
    partly = list(dict.fromkeys(row["recipe"] for row in result["rows"] if row["commit"] == older))
    newer = {row["fault"] for row in result["rows"] if row["recipe"] in partly and row["commit"] == result["commit"]}
    but = ", ".join(f'"{fault}"' for fault in newer)
    versions = result["versions"]
    return paragraph(
        f"""`h200-2-nvlink.json`, torch {versions["torch"].rpartition(".")[0]}, NCCL {versions["nccl"]},
        `TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1000`: {len(recipes(result))} recipes x {pairs(result)} pairs of fault and
        place, {well(result)} cases well ({since(result)}; all but {but} of {quoted(partly)} on `{older}`; each row says
        which). Seconds until the other rank had ended, the largest of {len(recipes(result))} recipes:"""
    )


def dump_of_60_s(result: dict) -> str:
    """How long the other rank is there with torch's own values."""
    (row,) = result["rows"]
    return paragraph(
        f"""With torch's own values the other rank ends after {row["seconds"]:.1f} s (`h200-2-nvlink-dump_60s.json`:
        `{row["fault"]}` in `{row["place"]}`, {since(result)})."""
    )


def overloaded(result: dict, again: dict) -> str:
    """Return what more processes than the GPUs bear do to a time limit; all these cases were well with fewer."""
    at_once = sum(int(re.search(r"--side-by-side (\d+)", command)[1]) for command in result["commands"])
    failed = {(row["recipe"], row["fault"], row["place"]): row["wrong"] for row in result["rows"] if not row["well"]}
    starts = sum(wrong.startswith("next start") for wrong in failed.values())
    assert failed.keys() <= {(row["recipe"], row["fault"], row["place"]) for row in again["rows"] if row["well"]}
    ranks, hardware = at_once * result["ranks"], result["hardware"]
    return paragraph(
        f"""With {at_once} cases side by side, {ranks} ranks on {hardware["gpus"]} GPUs and {hardware["cpu_cores"]}
        cores, the {result["timeout"]} s were too short for ranks without any fault: {len(failed)} of
        {len(result["rows"])} cases failed, {starts} of them in the start after the fault, in the first collective of
        the first backward (`h200-2-nvlink-overloaded.json`, {since(result)}, cut short for that)."""
    )


GLOO, NCCL, OVERLOADED = "faults/cpu-2-gloo", "faults/h200-2-nvlink", "faults/h200-2-nvlink-overloaded"
FOUR = "faults/cpu-4-gloo"

BLOCKS = {
    "faults_counts": Block(counts, (GLOO, NCCL)),
    "faults_found": Block(others_did, (GLOO, NCCL)),
    "soak_says": Block(soak_says, ("soak/cpu-2-gloo",)),
    "faults_on_a_cpu": Block(
        on_a_cpu,
        (GLOO, FOUR, "faults/cpu-2-gloo-rank_0", "soak/cpu-2-gloo", "soak/cpu-2-gloo-more"),
        sourced=False,
    ),
    "faults_seconds_gloo": Block(seconds, (GLOO,)),
    "faults_waits_of_gloo": Block(waits_of_gloo, (FOUR,), sourced=False),
    "faults_on_two_gpus": Block(on_two_gpus, (NCCL,), sourced=False),
    "faults_seconds_nccl": Block(seconds, (NCCL,)),
    "faults_dump_of_60_s": Block(dump_of_60_s, ("faults/h200-2-nvlink-dump_60s",), sourced=False),
    "faults_overloaded": Block(overloaded, (OVERLOADED, NCCL), cut_short=(OVERLOADED,), sourced=False),
}
