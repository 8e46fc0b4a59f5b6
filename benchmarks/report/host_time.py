"""The bound of a step on GPUs with a fast link: the host's calls, what planning saved, what CUDA graphs would."""

from __future__ import annotations

from benchmarks.harness.starting import FIRST_STEP
from benchmarks.report.blocks import Block, code_of, paragraph, table


def two_gpus_say(profile: dict) -> str:
    """Whether the GPU or the host bounds FP8-LM over NVLink."""
    of_run = {row["run"]: row for row in profile["rows"]}
    gpu = {run: row["device"]["computing_ms"] + row["device"]["exposed_ms"] for run, row in of_run.items()}
    return paragraph(
        f"""With 4 x 2,048 tokens `fp8-lm` needs {gpu["fp8-lm"]:.0f} ms of the GPU per step and `zeropp`
        {gpu["zeropp"]:.0f}; the host's Python bounds the step of `fp8-lm`."""
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
        f"""CUDA graphs are not used. A graph of all fetches of weights ({code_of("cuda_graphs")}, 2 H100) would save
        {saved:.1f} of {step:.0f} ms per step ({100 * saved / step:.0f} %), but needs fixed buffers:
        {of_large["fetch-graph"]["mb"] / 1e3:.1f} GB instead of {of_large["fetch"]["mb"] / 1e3:.2f} GB. A graph of AdamW
        would save {graph["saves_host_ms"]:.1f} ms and needs {graph["mb"] / 1e3:.1f} GB. The process group's watchdog
        does not see collectives in a graph."""
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
        "kernel launches without Triton's lookup (`kernels/launching.py`), eager step": (
            "fp8_stack",
            "triton-launches",
            "eager",
        ),
        "the same, layers compiled": ("fp8_stack", "triton-launches", "compile"),
        "RMSNorm and SwiGLU that output FP8 codes (`compute/source.py`), eager step": (
            "fp8_stack",
            "no-fused-modules",
            "eager",
        ),
        "RMSNorm and SwiGLU that output FP8 codes, layers compiled": ("fp8_stack", "no-fused-modules", "compile"),
        "product of few rows with codes (`kernels/linear/quantized_linear.py`), per token": (
            "generation",
            "no-few-rows",
            "qlora-codes",
        ),
        "the same, per token, as a CUDA graph": ("generation", "no-few-rows", "qlora-codes-graph"),
    }
    rows = [[what, ms(of, "as-it-is", run), ms(of, without, run)] for what, (of, without, run) in lines.items()]
    return table(["ms", "with it", "without"], rows)


def starts(result: dict) -> str:
    """Seconds to the end of a job's first step, part by part, of the fastest of a run's rounds."""
    lines, parts = result["comparison"], [part for part in FIRST_STEP if part != "python"]
    names = [line["run"] + {"cold": ", kernels not compiled yet", "warm": ""}.get(line["cache"], "") for line in lines]
    more = [f"{round(line['more_s'], 1) + 0.0:.1f}" if "more_s" in line else "" for line in lines]  # no -0.0
    rows = [
        [name, *(f"{line['seconds'][part]:.1f}" if part in line["seconds"] else "" for part in parts)]
        + [f"{line['total_s']:.1f}", beside, str(line["kernels"][-1])]
        for name, line, beside in zip(names, lines, more)
    ]
    head = [*(part.replace("_", " ") for part in parts), "in all", "more", "kernels"]
    return table(["s", *head], rows)


def under_fsdp2_say(result: dict) -> str:
    """Calls of Python in a step under FSDP2, which they bound, beside what the GPU computes."""
    rows = {row["run"]: row for row in result["rows"]}
    calls = {run: f"{row['host']['calls']:,}" for run, row in rows.items()}
    busy = [row["device"]["computing_ms"] for row in rows.values()]
    return paragraph(
        f"""With so few tokens Python bounds every step. One step at 25 Gbit/s calls {calls["fsdp2"]} Python functions
        under FSDP2, {calls["fsdp2-zeropp"]} with `zeropp`, and {calls["zeropp"]} under ZeRO-3 with `zeropp`. The GPU
        computes for {min(busy):.0f} to {max(busy):.0f} ms of it (`python -m benchmarks.step_profile`). Also, torch
        copies parts into a buffer before each gather and whole parameters out of it after, which ZeRO-3 with this
        project does not. More tokens per GPU hide more of it."""
    )


BLOCKS = {
    "under_fsdp2_say": Block(under_fsdp2_say, ("step_profile/h200-2-25gbit-fsdp2",)),
    "starts": Block(starts, ("start/h200-2-nvlink",)),
    "starts_on_cpu": Block(starts, ("start/cpu-2-gloo",)),
    "kept": Block(kept, KEPT),
    "two_gpus_say": Block(two_gpus_say, ("step_profile/h100-2-nvlink-4x2048",)),
    "graphs_say": Block(
        graphs_say, ("cuda_graphs/h100-2-nvlink-100m", "cuda_graphs/h100-2-nvlink", "step_profile/h100-2-nvlink")
    ),
}
