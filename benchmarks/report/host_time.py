"""The bound of a step on GPUs with a fast link: the host's calls, what planning saved, what CUDA graphs would."""

from __future__ import annotations

from benchmarks.harness.starting import FIRST_STEP
from benchmarks.report.blocks import Block, code_of, paragraph, table


def two_gpus_say(large: dict, profile: dict) -> str:
    """Whether the GPU or the host bounds FP8-LM over NVLink."""
    ms = {row["run"]: row["step_ms"] for row in large["rows"]}
    of_run = {row["run"]: row for row in profile["rows"]}
    gpu = {run: row["device"]["computing_ms"] + row["device"]["exposed_ms"] for run, row in of_run.items()}
    calls = {run: row["host"]["calls"] for run, row in of_run.items()}
    products = {
        run: next((n, 1e3 * ms / n) for name, n, ms in of_run[run]["host"]["functions"] if kind in name)
        for run, kind in (("fp8-lm", "_scaled_mm"), ("zeropp", "'matmul'"))
    }
    (count, us), (_, us_in_16_bits) = products["fp8-lm"], products["zeropp"]
    return paragraph(
        f"""At commit `{large["commit"]}`, with 4 x 2,048 tokens, `fp8-lm` keeps the GPU busy for {gpu["fp8-lm"]:.0f} ms
        of a step, `zeropp` for {gpu["zeropp"]:.0f}, {gpu["fp8-lm"] / gpu["zeropp"]:.2f} times as long, but its step
        takes {ms["fp8-lm"] / ms["zeropp"]:.2f} times as long: the host bounds it. It makes {calls["fp8-lm"]:,} calls
        in Python ({calls["zeropp"]:,} in `zeropp`), and each of its
        {count} products takes the host {us:.0f} us under the profiler, of which nothing is this project's
        ({us_in_16_bits:.0f} us in 16 bits). With more tokens per GPU, or a faster host, the smaller time on the GPU is
        what counts."""
    )


def calls_say(before: dict, after: dict) -> str:
    """Calls in Python before and after launches were planned and streams marked with less, beside FSDP2's."""
    of_run = {row["run"]: row for row in after["rows"]}
    own, peer = of_run["zeropp"], of_run["fsdp2"]
    (earlier,) = (row["host"]["calls"] for row in before["rows"] if row["run"] == "zeropp")
    return paragraph(
        f"""Since then launches are planned once, and streams are marked with fewer calls: at commit
        `{after["commit"]}` `zeropp` makes {own["host"]["calls"]:,} calls in a step instead of {earlier:,}, FSDP2
        {peer["host"]["calls"]:,} (with two ranks; the number of tokens hardly matters). With 1 x 1,024 tokens,
        not compiled, the two take {own["step_ms"]:.0f} and {peer["step_ms"]:.0f} ms there: the target, not above FSDP2,
        is {"met" if own["step_ms"] <= peer["step_ms"] else "missed"}. The host bounds both: their work on the GPU takes
        {own["device"]["computing_ms"]:.0f} and {peer["device"]["computing_ms"]:.0f} ms."""
    )


def graphs_say(small: dict, large: dict, profile: dict) -> str:
    """Return what CUDA graphs of fetches and of the update save: the host's time, and for which memory."""
    lines = [{line["run"]: line for line in result["comparison"]} for result in (small, large)]
    of_small, of_large = lines
    fetches = [2 * result["settings"]["model"]["layers"] for result in (small, large)]
    us = {run: 1e3 * of_small[run]["host_ms"] / fetches[0] for run in ("fetch", "fetch-graph")}
    saved = (us["fetch"] - us["fetch-graph"]) * fetches[1] / 1e3
    (step,) = (row["step_ms"] for row in profile["rows"] if row["run"] == "zeropp")
    graph = of_large["optimizer-graph"]
    return paragraph(
        f"""CUDA graphs ({code_of("cuda_graphs")}, 2 H100 of one node): a fetch of a layer, which encodes,
        gathers and decodes, takes the host {us["fetch"]:.0f} us, and as a graph {us["fetch-graph"]:.0f} (model of
        85 million parameters, where the host bounds it). In the step above, of {step:.0f} ms and {fetches[1]} fetches,
        that would be {saved:.1f} ms, {100 * saved / step:.0f} %; a graph of AdamW would save
        {graph["saves_host_ms"]:.1f} ms. A graph has fixed memory: with buffers of its own for each layer
        {of_large["fetch-graph"]["mb"] / 1e3:.1f} GB instead of {of_large["fetch"]["mb"] / 1e3:.2f} that the layers
        share, and {graph["mb"] / 1e3:.1f} GB for gradients that stay (1.33 billion). Where the device bounds fetches,
        there, graphs take as long ({of_large["fetch-graph"]["ms"]:.1f} ms for all, {of_large["fetch"]["ms"]:.1f}
        without). They are not built: compiled blocks, which take no more memory, save more, and the process group's
        watchdog, which ends a job where a rank has failed, does not see collectives that are replayed."""
    )


KEPT = tuple(
    f"{of}/h100-1-local-{version}-{n}"
    for of, versions in {
        "fp8_stack": ("as-it-is", "triton-launches", "no-fused-modules"),
        "generation": ("as-it-is", "no-few-rows"),
    }.items()
    for version in versions
    for n in (1, 2)
)


def kept(*results: dict) -> str:
    """Return what a step, or a token, takes with a part of the package and without it; two rounds each."""
    found = dict(zip(KEPT, results))

    def ms(of: str, version: str, run: str) -> str:
        rounds = []
        for n in (1, 2):
            result = found[f"{of}/h100-1-local-{version}-{n}"]
            if of == "fp8_stack":
                rounds += [row["step_ms"] for row in result["stack"] if row["mode"] == run]
            else:
                rounds += [row["token_ms"] for row in result["rows"] if row["run"] == run]
        return ", ".join(f"{one:.1f}" for one in rounds)

    lines = {
        "launches without Triton's lookup (`kernels/launching.py`), eager step": (
            "fp8_stack",
            "triton-launches",
            "eager",
        ),
        "the same, layers compiled": ("fp8_stack", "triton-launches", "compile"),
        "RMSNorm and SwiGLU that hand FP8 codes on (`compute/source.py`), eager step": (
            "fp8_stack",
            "no-fused-modules",
            "eager",
        ),
        "RMSNorm and SwiGLU that hand codes on, layers compiled": ("fp8_stack", "no-fused-modules", "compile"),
        "few rows times codes (`kernels/linear/quantized_linear.py`), a token": (
            "generation",
            "no-few-rows",
            "qlora-codes",
        ),
        "the same, a token as a CUDA graph": ("generation", "no-few-rows", "qlora-codes-graph"),
    }
    rows = [[what, ms(of, "as-it-is", run), ms(of, without, run)] for what, (of, without, run) in lines.items()]
    return table(["ms", "with it", "without"], rows)


def starts(result: dict) -> str:
    """Seconds to the end of a job's first step, part by part, of the fastest of a run's rounds."""
    lines, parts = result["comparison"], [part for part in FIRST_STEP if part != "python"]
    names = [line["run"] + {"cold": ", kernels not compiled yet", "warm": ""}.get(line["cache"], "") for line in lines]
    rows = [
        [name, *(f"{line['seconds'][part]:.1f}" if part in line["seconds"] else "" for part in parts)]
        + [f"{line['total_s']:.1f}", f"{line['more_s']:.1f}" if "more_s" in line else "", str(line["kernels"][-1])]
        for name, line in zip(names, lines)
    ]
    head = [*(part.replace("_", " ") for part in parts), "in all", "more", "kernels"]
    return table(["s", *head], rows)


BLOCKS = {
    "starts": Block(starts, ("start/h200-2-nvlink",)),
    "starts_on_cpu": Block(starts, ("start/cpu-2-gloo",)),
    "kept": Block(kept, KEPT),
    "two_gpus_say": Block(two_gpus_say, ("two_nodes/h100-2-nvlink-4x2048", "step_profile/h100-2-nvlink-4x2048")),
    "calls_say": Block(calls_say, ("step_profile/h100-2-nvlink-4x2048", "step_profile/h100-2-nvlink")),
    "graphs_say": Block(
        graphs_say, ("cuda_graphs/h100-2-nvlink-100m", "cuda_graphs/h100-2-nvlink", "step_profile/h100-2-nvlink")
    ),
}
