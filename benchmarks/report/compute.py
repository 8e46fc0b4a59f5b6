"""Compute in FP8 and MX, and formats without further training."""

from __future__ import annotations

from benchmarks.report.blocks import Block, bold, code_of, paragraph, table

SHAPE = "4096x14336"
SCALINGS = ("delayed", "current", "per_channel", "block")


def of_shape(result: dict) -> dict[str, dict]:
    """Rows of one linear layer by run."""
    return {row["run"]: row for row in result["linear"] if row["shape"] == SHAPE}


def parts(row: dict, kind: str) -> float:
    """Milliseconds of a layer's GEMMs, or of its casts."""
    return sum(ms for part, ms in row["parts_ms"].items() if part.startswith(kind))


def fp8_linear(result: dict) -> str:
    """One layer, forward and backward, against bf16, and what its casts take."""
    found = of_shape(result)
    gemms = parts(found["bf16"], "GEMM")
    rows = []
    for run, label in {"bf16": "bf16", **{each: f"`{each}`" for each in SCALINGS}, "mxfp8": "MXFP8, emulated"}.items():
        row = found[run]
        times, casts = f"{row['times_bf16']:.2f}", parts(row, "cast")
        cells = [label, f"{row['ms']:.2f}", bold(times) if run in SCALINGS else times]
        rows.append([*cells, f"{gemms / parts(row, 'GEMM'):.2f}", f"{casts:.2f}" if casts else ""])
    for label, suffix in (("compiled", " compiled"), ("eager", "")):
        pair = [found[f"torchao-{scaling}{suffix}"] for scaling in ("tensorwise", "rowwise")]
        cells = [" / ".join(f"{row[key]:.2f}" for row in pair) for key in ("ms", "times_bf16")]
        rows.append([f"torchao, tensorwise / rowwise, {label}", *cells, "", ""])
    return table(["", "ms", "x bf16", "x bf16 of the GEMMs alone", "casts, ms"], rows)


def fp8_linear_says(result: dict, casts: dict) -> str:
    """Return what the GEMMs alone reach, and what casts move."""
    found = of_shape(result)
    gemms = {run: parts(found["bf16"], "GEMM") / parts(found[run], "GEMM") for run in SCALINGS}
    (block, *others) = sorted(gemms.values())
    assert block == gemms["block"]
    ours = [row["share_of_copy"] for row in casts["rows"] if is_a_cast(row["cast"])]
    return paragraph(
        f"""The GEMMs alone reach {others[0]:.2f} to {others[-1]:.2f} times bf16, with `block` {block:.2f} times (cuBLAS
        multiplies two operands with 1 x 128 blocks at the speed of bf16). Casts take the rest; they move
        {100 * min(ours):.0f} to {100 * max(ours):.0f} % of a copy's bytes per second (`benchmarks.casts`)."""
    )


def is_a_cast(name: str) -> bool:
    """Not the copy, and not what the kernels are compared with: plain torch, or two kernels in the place of one."""
    return name != "copy" and not name.endswith((", torch", ", two steps"))


def fp8_stack(*results: dict) -> str:
    """Tokens/s of three ways to run 8 layers."""
    found = [{row["run"]: row for row in result["stack"]} for result in results]
    rows = [["bf16, tokens/s", *(f"{runs['bf16']['tokens_per_s']:,.0f}" for runs in found)]]
    for run in SCALINGS:
        cells = [f"{runs[run]['times_bf16']:.2f} x" if run in runs else "" for runs in found]
        rows.append([f"`{run}`", *(bold(cell) if run == "delayed" else cell for cell in cells)])
    names = ("torchao-tensorwise", "torchao-rowwise")
    cells = [" / ".join(f"{runs[name]['times_bf16']:.2f} x" for name in names if name in runs) for runs in found]
    rows.append(["torchao, tensorwise / rowwise", *cells])
    return table(["", "plain torch, eager", "the layers compiled", "transformers' Llama, eager"], rows)


def compared(result: dict) -> dict[str, dict]:
    """Runs against bf16 by name."""
    return {row["run"]: row for row in result["comparison"]}


def convergence_says(result: dict) -> str:
    """Return what was trained, on how much, and how far seeds differ by themselves."""
    row, spread = result["rows"][0], compared(result)["bf16"]["seed_spread_percent"]
    return paragraph(
        f"""{row["parameters"] / 1e6:.0f} M parameters, {row["tokens"] / 1e6:.0f} million bytes of Python source, one
        H200 (`python -m benchmarks.convergence`). The seeds of bf16 differ by {spread:.1f} %:"""
    )


CONVERGENCE = {
    "`delayed`": (("delayed",), ""),
    "`current`": (("current",), ""),
    "`block`": (("block",), ""),
    "`per_channel`": (("per_channel",), ""),
    "MXFP8 E4M3": (("mxfp8",), ""),
    "MXFP6 E3M2; scales rounded down and halves away from zero, as in the MX paper": (("mxfp6", "mxfp6_paper"), "; "),
    "MXFP4 weights, MXFP6 activations and gradients; as in the paper": (("mxfp4w_mxfp6a", "mxfp4w_mxfp6a_paper"), "; "),
    "half in bf16, then bf16 / `current` / MXFP8 from its checkpoint": (
        ("bf16_then_bf16", "bf16_then_current", "bf16_then_mxfp8"),
        " / ",
    ),
}


def fp8_convergence(result: dict) -> str:
    """Held-out losses above bf16's."""
    found, rows = compared(result), []
    for label, (runs, between) in CONVERGENCE.items():
        above = between.join(f"{found[run]['percent_above_bf16']:+.2f} %" for run in runs)
        seeds = [str(len(found[run]["seeds"])) for run in runs]
        rows.append([label, above, seeds[0] if between == " / " and len(set(seeds)) == 1 else between.join(seeds)])
    return table(["", "held-out loss above bf16", "seeds"], rows)


PARTS = ("weights", "weights_activations", "error_diffusion")


def fp8_experts(result: dict) -> str:
    """Forward and backward of a layer's packed experts, against bf16."""
    by_tokens: dict[int, dict[str, dict]] = {}
    for row in result["rows"]:
        by_tokens.setdefault(row["tokens"], {})[row["run"]] = row
    scalings = [run for run in next(iter(by_tokens.values())) if run != "bf16"]
    rows = [
        [f"{tokens:,}", f"{runs['bf16']['ms']:.1f}"]
        + [f"{runs[run]['ms']:.1f} ({runs[run]['times_bf16']:.2f} x)" for run in scalings]
        for tokens, runs in by_tokens.items()
    ]
    model, versions = result["model"], result["versions"]
    head = f"""{model["experts"]} experts of {model["hidden"]} x {model["intermediate"]}, {model["chosen"]} per token,
        forward and backward on one {result["hardware"]["gpu"]}, beside bf16 by `grouped_mm` of transformers
        {versions["transformers"]} (torch {versions["torch"].partition("+")[0]}); the target with most tokens is
        {result["target"]}:"""
    return f"{paragraph(head)}\n\n{table(['tokens', 'bf16, ms', *(f'`{run}`' for run in scalings)], rows)}"


def direct_cast_says(result: dict) -> str:
    """Return what was cast, and how sure the differences are."""

    def error(in_4_bits: bool) -> float:
        rows = [row for row in result["rows"] if (row["bits"] < 5) == in_4_bits]
        return max(row[part]["standard_error"] for row in rows for part in PARTS if row[part])

    return paragraph(
        f"""Loss of a small trained Llama ({result["parameters"] / 1e6:.2f} M parameters, held-out loss
        {result["held_out_loss"]:.4f}) after a cast ({code_of("direct_cast")}). Standard errors are up to
        {error(True):.4f} in 4 bits and {error(False):.4f} in 6 and 8 bits:"""
    )


def direct_cast(result: dict) -> str:
    """Differences of the loss by format."""
    rows = []
    for row in result["rows"]:
        if row["format"] != "bf16":
            label = row["format"].removesuffix(" rceil").replace(" floor", ", `floor`")
            rows.append([label, f"{row['bits']:.3g}", *(f"{row[part]['difference']:+.4f}" for part in PARTS)])
    return table(["format", "bits", "weights", "weights and activations", "error diffusion, both"], rows)


BLOCKS = {
    "fp8_linear": Block(fp8_linear, ("fp8_linear/h200-1-local",)),
    "fp8_linear_says": Block(fp8_linear_says, ("fp8_linear/h200-1-local", "casts/h200-1-local")),
    "fp8_stack": Block(
        fp8_stack,
        ("fp8_stack/h200-1-local", "fp8_stack/h200-1-local-compile", "fp8_stack/h200-1-local-transformers"),
    ),
    "fp8_experts": Block(fp8_experts, ("fp8_experts/h200-1-local",)),
    "convergence_says": Block(convergence_says, ("convergence/h200-1-local",), sourced=False),
    "fp8_convergence": Block(fp8_convergence, ("convergence/h200-1-local",)),
    "direct_cast_says": Block(direct_cast_says, ("direct_cast/cpu-1-local",), sourced=False),
    "direct_cast": Block(direct_cast, ("direct_cast/cpu-1-local",)),
}
