"""Steps on two GPUs: as two nodes on a slow link, as one node, and as one node with a slow link for each."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.plan_fit.points import MODELS, UNSTEADY
from benchmarks.report.blocks import Block, paragraph, table
from benchmarks.report.rows import outcome
from benchmarks.report.zero import LABELS, OVER_HOSTS, QUANTIZED, by_rate


def accumulation(result: dict) -> str:
    """Step times and bytes of several micro-batches a step, reduced between nodes once or each time."""
    found, rates = by_rate(result), (25.0, 10.0)
    labels = {"hsdp": LABELS["hsdp"]}
    for run in QUANTIZED:
        labels[run] = LABELS[run]
        labels[f"{run}-world"] = f'`{run}`, `"accumulate_in": "world"`'
    rows = []
    for run, label in labels.items():
        times = [f"{found[run, rate]['step_ms']:.0f}" for rate in rates]
        rows.append([label, *times, f"{found[run, rates[0]]['tx_bytes_per_node_step'] / 1e6:.0f}"])
    return table(
        [f"{result['accumulation']} micro-batches, ms per step", "25 Gbit/s", "10 Gbit/s", "MB a node sends"], rows
    )


# run -> label; "-compiled" is added for the second column of each.
ON_NVLINK = {
    "zeropp": "**`zeropp`**",
    "fsdp2": "FSDP2",
    "fp8-lm": "**`fp8-lm`**",
    "fp8-lm-o1": "**`fp8-lm-o1`**",
    "fsdp2-torchao": "FSDP2 with torchao's float8",
    "lossless": "**`lossless`**",
    "zeropp-4bit": "**`zeropp-4bit`**",
    "stock": "stock ZeRO-3",
}


def many_micro_batches(eight: dict, sixteen: dict) -> str:
    """Micro-batches of two H100, beside HSDP: times at two rates, and by how much `zeropp` is faster."""
    columns = [{row["run"]: row for row in result["rows"]} for result in (eight, sixteen)]
    head, rows = [""], []
    for result, found in zip((eight, sixteen), columns):
        head += [f"{result['accumulation']}, {found['zeropp']['gbit']:.0f} Gbit/s, ms per step", "MB a node sends"]
    for run, label in {
        "hsdp": LABELS["hsdp"],
        "zeropp": LABELS["zeropp"],
        "zeropp-world": '`zeropp`, `"accumulate_in": "world"`',
    }.items():
        rows.append([label])
        for found in columns:
            sent = f"{found[run]['tx_bytes_per_node_step'] / 1e6:.0f}" if run in found else ""
            rows[-1] += [f"{found[run]['step_ms']:,.0f}" if run in found else "", sent]
    ms = [{run: row["step_ms"] for run, row in found.items()} for found in columns]
    factors = [f"{each['hsdp'] / each['zeropp']:.2f}" for each in ms]
    said = paragraph(
        f"""`zeropp` is {" and ".join(factors)} times as fast as HSDP (medians of {eight["steps"]} and
        {sixteen["steps"]} steps). Its step takes
        {" and ".join(f"{found['zeropp']['times_floor']:.1f}" for found in columns)} times as long as the bytes alone;
        computing and Python take the rest."""
    )
    return f"{table(head, rows)}\n\n{said}"


# run -> label; "-compiled" is added for the second column.
BETWEEN_H100 = {
    "hsdp": LABELS["hsdp"],
    **{run: f"**`{run}`**" for run in ("zeropp", "zeropp-4bit", "zeropp-diff", "zeropp-2bit", "fp8-lm-zeropp")},
    "fp8-lm": "**`fp8-lm`**",
}


def told_nccl(result: dict, name: str) -> int:
    """Return what a variable was set to before the command."""
    return int(re.search(rf"\b{name}=(\d+)", result["command"])[1])


def sockets(result: dict) -> int:
    """Return the sockets of a channel."""
    return told_nccl(result, "NCCL_SOCKET_NTHREADS") * told_nccl(result, "NCCL_NSOCKS_PERTHREAD")


def range_of(row: dict) -> str:
    """Of a run's steps."""
    return f"{row['min_ms']:,.0f} to {row['max_ms']:,.0f}"


def with_range(row: dict) -> str:
    """The median step, with the fastest and the slowest where they are far apart."""
    unsteady = row["max_ms"] >= UNSTEADY * row["min_ms"]
    return f"{row['step_ms']:,.0f}{f' ({range_of(row)})' if unsteady else ''}"


def two_h100(default: dict, compiled: dict, more: dict, more_compiled: dict) -> str:
    """Steps of two H100 as two nodes: by NCCL's default and with more sockets, each with compiled blocks too."""
    files = (default, compiled, more, more_compiled)
    columns = [{row["run"]: row for row in result["rows"]} for result in files]
    rows = []
    for run, label in BETWEEN_H100.items():
        found = [of_file.get(run + suffix) for of_file, suffix in zip(columns, ("", "-compiled") * 2)]
        floor = found[0].get("floor_ms")
        rows.append([label, "" if floor is None else f"{floor:.0f}"])
        rows[-1] += ["" if row is None else with_range(row) for row in found]
    assert sockets(more) == sockets(more_compiled)
    head = ["ms per step", "floor", "NCCL's default", "the same, compiled"]
    return table([*head, f"{sockets(more)} sockets per channel", f"{sockets(more)} sockets, compiled"], rows)


def two_h100_say(default: dict, more: dict, more_compiled: dict, profile: dict) -> str:
    """Return what bounds an exchange over sockets, and how recipes compare where it is bounded less."""
    one, many, again = ({row["run"]: row for row in result["rows"]} for result in (default, more, more_compiled))
    (step,) = profile["rows"]
    exchange, sent = step["device"]["by_kind_ms"]["all-to-all"], one[step["run"]]["tx_bytes_per_node_step"]
    run = "fp8-lm-zeropp"
    ratios = " and ".join(f"{found[run]['step_ms'] / found['zeropp']['step_ms']:.2f}" for found in (many, again))
    return paragraph(
        f"""Over TCP NCCL opens one socket per channel by default, and all-to-alls then reach about
        {8e-6 * sent / exchange:.0f} of 25 Gbit/s. With {sockets(more)} sockets
        (`NCCL_SOCKET_NTHREADS={told_nccl(more, "NCCL_SOCKET_NTHREADS")}
        NCCL_NSOCKS_PERTHREAD={told_nccl(more, "NCCL_NSOCKS_PERTHREAD")}`) `{run}` takes {many[run]["step_ms"]:.0f}
        instead of {one[run]["step_ms"]:.0f} ms. On two hosts it takes {ratios} times `zeropp`'s step; the target is
        1.15. Each column is of another host and commit."""
    )


def timeouts_say(result: dict) -> str:
    """Why steps of one run differ so much."""
    steps = [count for row in result["rows"] for count in row["tcp_timeouts"]]
    return paragraph(
        f"""In another run {sum(count > 0 for count in steps)} of {len(steps)} steps had a TCP timeout: lost data is
        sent again after 200 ms or more. This explains a part of the unsteady steps."""
    )


def exact(near: dict, far: dict, before: dict, parity: dict) -> str:
    """Exact differences between two nodes, at two learning rates, beside their targets and what sent 4 and 2 bits."""
    rows, rates = [], (25.0, 10.0)
    for result, runs in ((near, EXACT), (far, EXACT[:1]), (before, ("zeropp-4bit", "zeropp-2bit"))):
        found = by_rate(result)
        for run in runs:
            steps = [found[run, rate] for rate in rates]
            label = f"`{run.removesuffix('-compiled')}`{', compiled' * run.endswith('-compiled')}"
            label += f", {result['lr']:g}" if "lr" in result else f", {result['ranks']} GPUs"
            times = [f"{with_range(step)} (floor {step['floor_ms']:.0f})" for step in steps]
            sent = " / ".join(f"{steps[0][f'{count}_bytes_per_node_step'] / 1e6:.0f}" for count in ("ledger", "tx"))
            rows.append([label, *times, sent, f"{max(bits_of(step, result) for step in steps):.2f}"])
    steps, fewest = [by_rate(near)[EXACT[0], rate] for rate in rates], by_rate(far)[EXACT[0], 25.0]
    bits = bits_of(steps[0], near), bits_of(fewest, far)
    (same,) = [row for row in parity["rows"] if row["case"] == "lossless block, exact"]
    said = paragraph(
        f"""Targets of `zeropp-exact`, compiled: 185 ms at 25 Gbit/s ({outcome(steps[0]["step_ms"], 185)}), 390 ms at 10
        Gbit/s ({outcome(steps[1]["step_ms"], 390)}); 5.7 bits at {near["lr"]:g} ({outcome(bits[0], 5.7)}), 4.7 bits at
        {far["lr"]:g} ({outcome(bits[1], 4.7)}). Gradients take 4.125 of the bits; at 25 Gbit/s sending them takes
        longer than the backward pass. With the gradients of `lossless`, {len(same["losses"])} steps on two H200 equal
        stock ZeRO-3 bit for bit (`benchmarks.bit_parity`)."""
    )
    assert same["result"].endswith("equal to stock-leaf")
    head = [f"ms per step at {rate:.0f} Gbit/s" for rate in rates]
    head += ["MB a node sends, by the ledger / by the interface", "bits per parameter and step"]
    return f"{table(['', *head], rows)}\n\n{said}"


EXACT = ("zeropp-exact-compiled", "zeropp-exact", "lossless-exact")


def bits_of(row: dict, result: dict) -> float:
    """Bits per parameter and step by the interface: each of both nodes sends half of the weights and gradients."""
    return 2 * 8 * row["tx_bytes_per_node_step"] / MODELS[result["model"]].parameters


UNDER_FSDP2 = {
    "fsdp2": "FSDP2",
    "fsdp2-lossless": "FSDP2 with `lossless`",
    "fsdp2-zeropp": "**FSDP2 with `zeropp`**",
    "zeropp": "ZeRO-3 with `zeropp`",
    "hsdp": LABELS["hsdp"],
    "hsdp-zeropp": "a copy in each node, with `zeropp`",
}


def under_fsdp2(first: dict, compiled: dict, copies: dict, last: dict) -> str:
    """Steps of two GPUs under FSDP2 with and without the collectives, of the last run; ratios of all beside targets."""
    found, graphs, rows = by_rate(first) | by_rate(last), by_rate(compiled), []
    for run, label in UNDER_FSDP2.items():
        far, cells = found[run, 25.0], []
        for rate in ("nvlink", 25.0):
            row, graph = found.get((run, rate)), graphs.get((f"{run}-compiled", rate))
            cells.append("" if row is None else with_range(row) + (f" ({graph['step_ms']:,.0f})" if graph else ""))
        rows.append([label, *cells, f"{far['tx_bytes_per_node_step'] / 1e6:,.0f}", f"{far['peak_gib']:.1f}"])

    def ratios(run: str, other: str, rate: str | float) -> list[float]:
        pairs = [
            (by_rate(result), mode) for result, mode in zip((first, compiled, copies, last), ("", "-compiled", "", ""))
        ]
        return [
            of[run + mode, rate]["step_ms"] / of[other + mode, rate]["step_ms"]
            for of, mode in pairs
            if (run + mode, rate) in of and (other + mode, rate) in of
        ]

    def said(values: list[float]) -> str:
        return ", ".join(f"{value:.2f}" for value in values)

    beside, near = ratios("fsdp2-zeropp", "zeropp", 25.0), ratios("fsdp2-zeropp", "fsdp2", "nvlink")
    same, without = ratios("hsdp", "hsdp-zeropp", 25.0), ratios("hsdp", "fsdp2-zeropp", 25.0)
    text = paragraph(
        f"""In brackets: compiled blocks, on another host, as is `lossless`. Targets, with the ratios of each result
        below that has both runs: at 25 Gbit/s at most 1.1 times the step of `zeropp` under ZeRO-3
        ({said(beside)}: {outcome(max(beside), 1.1)}), and HSDP's step at least 2.5 times that with the same copies
        ({said(same)}: {outcome(-min(same), -2.5)}; without copies {said(without)}); over NVLink at most 1.05 times
        FSDP2's step ({said(near)}: {outcome(max(near), 1.05)})."""
    )
    return f"{table(['ms per step', 'NVLink', '25 Gbit/s', 'MB a node sends', 'GiB at the peak'], rows)}\n\n{text}"


MIXTURE = {
    "stock-leaf": "stock ZeRO-3, decoder layers as z3 leaf modules",
    "fsdp2": "FSDP2",
    "lossless-used": '`lossless`, `"experts": {"gather": "used"}`',
    "zeropp-exact": "`zeropp-exact`",
    "zeropp": "**`zeropp`**",
}


def mixture(*results: dict) -> str:
    """Steps of a mixture on two nodes of one GPU, on several days."""
    rows = []
    for run, label in MIXTURE.items():
        each = [(found[run, 25.0], found["stock-leaf", 25.0]) for found in map(by_rate, results)]
        last = each[-1][0]
        cells = [
            " and ".join(with_range(row) for row, _ in each),
            " and ".join(dict.fromkeys(f"{stock['step_ms'] / row['step_ms']:.2f}" for row, stock in each)),
        ]
        rows.append([label, *cells, f"{last['tx_bytes_per_node_step'] / 1e6:,.0f}", f"{last['peak_gib']:.1f}"])
    head = ["25 Gbit/s", "ms per step", "x faster than stock", "MB a node sends", "GiB at the peak"]
    return table(head, rows)


def two_gpus(small: dict, large: dict) -> str:
    """Steps of two GPUs of one node, with and without compiled decoder layers."""
    columns = [
        {row["run"]: f"{row['step_ms']:.0f}" for row in result["rows"]} for result in (small, large) for _ in range(2)
    ]
    rows = [
        [label, *(found.get(run + suffix, "") for found, suffix in zip(columns, ("", "-compiled") * 2))]
        for run, label in ON_NVLINK.items()
    ]
    head = [f"{result['micro_batch']} x {result['tokens']:,}" for result in (small, large)]
    return table(["ms per step", head[0], "compiled", head[1], "compiled"], rows)


OVER_NVLINK = {
    "fsdp2": "FSDP2",
    "fsdp2-torchao": "FSDP2 with torchao's float8",
    "lossless": "**`lossless`**",
    "zeropp": "**`zeropp`**",
    "fp8-lm-o1": "**`fp8-lm-o1`**",
    "fp8-lm": "**`fp8-lm`**",
}


def by_host(results: Sequence[dict]) -> list[list[dict[str, dict]]]:
    """Return the comparison of each host, by run: with few tokens per GPU and with many."""
    found = [{line["run"]: line for line in result["comparison"]} for result in results]
    return [found[n : n + 2] for n in range(0, len(found), 2)]


def over_nvlink(*results: dict) -> str:
    """Steps and memory over NVLink beside FSDP2's: medians of the rounds, and the fastest and slowest of all steps."""
    shapes = [f"{r['settings']['micro_batch']} x {r['settings']['sequence']:,}" for r in results[:2]]

    def time(line: dict | None) -> str:
        return "" if line is None else "{:.0f} ({:.0f} to {:.0f})".format(line["step_ms"], *line["step_ms_range"])

    rows = []
    for number, lines in enumerate(by_host(results), 1):
        for run, label in OVER_NVLINK.items():
            cells = [time(found.get(run + suffix)) for found in lines for suffix in ("", "-compiled")]
            peaks = [f"{found[run]['peak_gib']:.1f}" if run in found else "" for found in lines]
            rows += [[str(number), label, *cells, *peaks]] if any(cells) else []
    headers = [header for shape in shapes for header in (shape, f"{shape}, compiled")]
    headers += [f"GiB at {shape}" for shape in shapes]
    return table(["host", "ms per step (fastest to slowest)", *headers], rows)


def over_nvlink_says(*results: dict) -> str:
    """How `zeropp` and `lossless` compare with FSDP2 on all hosts, and the FP8 recipes with their target."""
    hosts = by_host(results)

    def beside(run: str, shape: int) -> str:
        found = [host[shape][run]["step_ms"] / host[shape]["fsdp2"]["step_ms"] for host in hosts]
        return f"{min(found):.2f} to {max(found):.2f}"

    first = hosts[0][1]
    factors = {
        mode: [first[f"{run}{mode}"]["step_ms"] / first[f"zeropp{mode}"]["step_ms"] for run in ("fp8-lm-o1", "fp8-lm")]
        for mode in ("", "-compiled")
    }
    assert min(min(found) for found in factors.values()) > 0.8, "the target is met"
    return paragraph(
        f"""Not compiled, on these {len(hosts)} hosts `zeropp` takes {beside("zeropp", 0)} of FSDP2's time with few
        tokens and {beside("zeropp", 1)} with many, `lossless` {beside("lossless", 0)} and {beside("lossless", 1)}. The
        FP8 recipes miss their target, 0.8 of the time of `zeropp`: they take {min(factors[""]):.3f} and
        {max(factors[""]):.3f}, compiled {min(factors["-compiled"]):.3f} and {max(factors["-compiled"]):.3f}, because
        the host bounds the step."""
    )


WITHOUT_NVLINK = {
    "stock-zero2": "ZeRO-2",
    "stock": "stock ZeRO-3",
    "fsdp2": "FSDP2",
    "zeropp-pcie": "**`zeropp-pcie`**",
}


def without_nvlink(result: dict) -> str:
    """Steps of one node whose GPUs exchange through the host's memory."""
    ms = {row["run"]: row["step_ms"] for row in result["rows"]}
    sent = {row["run"]: row.get("ledger_bytes_per_rank_step") for row in result["rows"]}
    best = min(time for run, time in ms.items() if not run.startswith("zeropp"))
    rows = []
    for run, label in WITHOUT_NVLINK.items():
        times = [ms.get(run + suffix) for suffix in ("", "-compiled")]
        fastest = min(time for time in times if time)
        cells = ["" if time is None else f"{time:.0f}" for time in times]
        rows.append([label, *cells, f"{best / fastest:.2f}", "" if not sent[run] else f"{sent[run] / 1e6:,.0f}"])
    return table(["ms per step", "eager", "compiled", "x the best peer", "MB a rank sends"], rows)


def without_nvlink_says(result: dict) -> str:
    """Return what bounds it there."""
    rows = {row["run"]: row for row in result["rows"]}
    links, sent = [row["reached_gbit"] for row in rows.values()], rows["zeropp-pcie"]["ledger_bytes_per_rank_step"]
    return paragraph(
        f"""The target, twice the best peer, is missed: at {min(links):.0f} to {max(links):.0f} Gbit/s per rank the
        {sent / 1e9:.2f} GB take {8e-6 * sent / max(links):.0f} ms, Python and computing the rest."""
    )


LINK_EACH = {
    "stock-zero2": "ZeRO-2",
    "fsdp2-compiled": "FSDP2, compiled",
    "zeropp-pcie": "**`zeropp-pcie`**",
    "zeropp-pcie-compiled": "**`zeropp-pcie`**, compiled",
}


def best_peer(rows: dict[str, dict]) -> dict:
    """The row of the fastest run that is not this project's."""
    return min((row for run, row in rows.items() if not run.startswith("zeropp")), key=lambda row: row["step_ms"])


def link_each(result: dict) -> str:
    """Steps of one node whose ranks have a slow link each."""
    found = {row["run"]: row for row in result["rows"]}
    assert set(found) == set(LINK_EACH) and {row["link"] for row in result["rows"]} == {64.0}
    best, rows = best_peer(found)["step_ms"], []
    for run, label in LINK_EACH.items():
        row = found[run]
        cells = [f"{row['step_ms']:,.0f}", range_of(row), f"{row['reached_gbit']:.0f}"]
        rows.append([label, *cells, f"{best / row['step_ms']:.2f}", f"{row['tx_bytes_per_rank_step'] / 1e6:,.0f}"])
    head = ["ms per step", "fastest to slowest", "Gbit/s reached before it", "x the best peer"]
    return table(["", *head, "MB a rank sends, by the interface"], rows)


def link_each_says(result: dict) -> str:
    """Which links these were, and what is not known."""
    found = {row["run"]: row for row in result["rows"]}
    own, compiled, peer = found["zeropp-pcie"], found["zeropp-pcie-compiled"], best_peer(found)
    reached = [row["reached_gbit"] for row in result["rows"]]
    assert peer["run"] == "fsdp2-compiled" and round(own["reached_gbit"]) == round(peer["reached_gbit"])
    return paragraph(
        f"""This emulation reached {min(reached):.0f} to {max(reached):.0f} of the {result["settings"]["links"][0]:.0f}
        Gbit/s. The target, twice the best peer, is met where both had {own["reached_gbit"]:.0f} Gbit/s
        ({peer["step_ms"] / own["step_ms"]:.1f} times). Compiled, `zeropp-pcie` is unsteady ({range_of(compiled)} ms)
        for an unknown reason. No consumer GPU was measured."""
    )


# Of Muon and of AdamW on the same owners.
WITH_MUON = {"stock-muon": None, "zeropp-muon": "zeropp-owners", "zeropp-exact-muon": "zeropp-exact-owners"}


def muon(beside_stock: dict, later: dict, on_one_gpu: dict) -> str:
    """Steps with Muon of two H200 as two nodes, beside AdamW's of the same run and DeepSpeed's Muon."""
    before, after = ({(row["run"], row["gbit"]): row for row in result["rows"]} for result in (beside_stock, later))
    columns = ((before, 25.0), (after, 25.0), (after, 10.0))
    labels, rows = {"stock-muon": "DeepSpeed's Muon, ZeRO-3"}, []
    for run, adamw in WITH_MUON.items():
        cells = []
        for found, gbit in columns:
            row, other = found.get((run, gbit)), found.get((adamw, gbit))
            beside = f" (AdamW {with_range(other)})" if other else ""
            cells.append(f"{with_range(row)}{beside}" if row else "")
        sent = after.get((run, 25.0), before[run, 25.0])["tx_bytes_per_node_step"]
        rows.append([labels.get(run, f"**`{run.removesuffix('-muon')}`**"), f"{sent / 1e6:,.0f}", *cells])
    head = [
        "Muon, ms per step",
        "MB a node sends",
        "25 Gbit/s, all codes, blocks are sent late",
        "25 Gbit/s",
        "10 Gbit/s",
    ]
    times = before["stock-muon", 25.0]["step_ms"] / before["zeropp-muon", 25.0]["step_ms"]
    model = MODELS["1.3b"]
    matrices = (model.parameters - 2 * model.vocabulary * model.hidden) / 2  # of each GPU
    one = next(row for row in on_one_gpu["rows"] if row["step"] == "Newton-Schulz, gram")
    iteration = one["ms"] * matrices / one["parameters"]

    def beside_adamw(run: str) -> str:
        return " and ".join(
            f"{(after[run, gbit]['step_ms'] - iteration) / after[WITH_MUON[run], gbit]['step_ms']:.2f}"
            for gbit in (25.0, 10.0)
        )

    said = paragraph(
        f"""`zeropp` is {times:.1f} times as fast as DeepSpeed's Muon in the same run, of an earlier commit. The
        iteration alone takes {iteration:.0f} ms of a step (below, of as many parameters as a GPU has). Without it,
        steps with Muon take {beside_adamw("zeropp-muon")} of those with AdamW at 25 and 10 Gbit/s with `zeropp`, and
        {beside_adamw("zeropp-exact-muon")} with `zeropp-exact`. The target of 1.05 is missed at 25 Gbit/s, where the
        wire does not hide an update, and reached to within 1 % at 10."""
    )
    return f"{table(head, rows)}\n\n{said}"


TWO_H100 = tuple(f"two_nodes/h100-2-25gbit{variant}" for variant in ("", "-compiled", "-sockets", "-sockets-compiled"))
BLOCKS = {
    "accumulation": Block(accumulation, ("two_nodes/h200-2-25_10gbit-k8",)),
    "many_micro_batches": Block(many_micro_batches, ("two_nodes/h100-2-25gbit-k8", "two_nodes/h100-2-10gbit-k16")),
    "two_h100": Block(two_h100, TWO_H100),
    "two_h100_say": Block(
        two_h100_say,
        (TWO_H100[0], *TWO_H100[2:], "step_profile/h100-2-25gbit"),
        cut_short=("step_profile/h100-2-25gbit",),
    ),
    "timeouts_say": Block(
        timeouts_say, ("two_nodes/h100-2-25gbit-timeouts",), cut_short=("two_nodes/h100-2-25gbit-timeouts",)
    ),
    "exact": Block(
        exact,
        (
            "two_nodes/h200-2-25_10gbit-exact",
            "two_nodes/h200-2-25_10gbit-exact-1e-6",
            "two_nodes/h200-4-25_10gbit-differences",
            "bit_parity/h200-2-nvlink-exact",
        ),
    ),
    "under_fsdp2": Block(
        under_fsdp2,
        tuple(
            f"two_nodes/h200-2-{name}"
            for name in (
                "nvlink_25gbit-fsdp2",
                "nvlink_25gbit-fsdp2-compiled",
                "25gbit-fsdp2-copies",
                "nvlink_25gbit-fsdp2-again",
            )
        ),
    ),
    "mixture": Block(mixture, ("two_nodes/h200-2-25gbit-mixture", "two_nodes/h200-2-25gbit-mixture-again")),
    "two_gpus": Block(two_gpus, ("two_nodes/h100-2-nvlink", "two_nodes/h100-2-nvlink-4x2048")),
    "over_nvlink": Block(over_nvlink, OVER_HOSTS),
    "over_nvlink_says": Block(over_nvlink_says, OVER_HOSTS, sourced=False),
    "muon": Block(
        muon, ("two_nodes/h200-2-25gbit-muon", "two_nodes/h200-2-25_10gbit-muon", "optimizer/h200-1-local-muon")
    ),
    "without_nvlink": Block(without_nvlink, ("one_node/h100-2-pcie",), cut_short=("one_node/h100-2-pcie",)),
    "without_nvlink_says": Block(
        without_nvlink_says, ("one_node/h100-2-pcie",), cut_short=("one_node/h100-2-pcie",), sourced=False
    ),
    "link_each": Block(link_each, ("one_node/h100-2-64gbit",), cut_short=("one_node/h100-2-64gbit",)),
    "link_each_says": Block(
        link_each_says, ("one_node/h100-2-64gbit",), cut_short=("one_node/h100-2-64gbit",), sourced=False
    ),
}
