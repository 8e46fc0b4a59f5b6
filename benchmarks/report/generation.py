"""Generation while training."""

from __future__ import annotations

from benchmarks.report.blocks import Block, bold, paragraph, table
from benchmarks.report.rows import GIB, by_run, fastest

LABELS = {
    "stock": "stock ZeRO-3",
    "stock-hpz": "stock with in-tree hpZ",
    "plain": "transformers without DeepSpeed",
    "plain-lora": "the same, LoRA beside its layers",
    "plain-compiled": "the same with a static cache, which it compiles",
    "sharded": '`zeropp`, `"sharded"` (from the node\'s copy)',
    "values": '`zeropp`, `"values"`',
    "codes": '`zeropp`, `"codes"`',
    "qlora-values": '`qlora`, `"values"`, adapters merged',
    "qlora-codes": '`qlora`, `"codes"`',
}
OF_THE_PLUGIN = ("sharded", "values", "codes", "qlora-values", "qlora-codes")
LABELS |= {f"{run}-graph": f"{LABELS[run]}, `graph=True`" for run in OF_THE_PLUGIN[1:]}
OF_THE_PLUGIN += tuple(f"{run}-graph" for run in OF_THE_PLUGIN[1:])


def times(run: str, base: dict, row: dict, digits: int, faster: bool) -> str:
    """How much faster, or how many times as slow, a row is than `base`; what the tables are about stands out."""
    factor = base["token_ms"] / row["token_ms"] if faster else row["token_ms"] / base["token_ms"]
    return bold(f"{factor:.{digits}f}") if run == "values" else f"{factor:.{digits}f}"


def generation(nodes: dict, alone: dict) -> str:
    """Milliseconds a token on two nodes, and on one GPU, there of the faster of two rounds."""
    two, one, rows = by_run(nodes), fastest(alone, "token_ms"), []
    for run in (run for run in LABELS if run in two or run in one):
        ours, row = run in OF_THE_PLUGIN, [LABELS[run], "", ""]
        if run in two:
            row[1] = f"{two[run]['token_ms']:.{0 if run == 'stock' else 1}f}"
            row[2] = times(run, two["stock"], two[run], 1, True) if ours or run == "stock" else ""
        rows.append(row)
        rows[-1].append(f"{one[run]['token_ms']:.1f}" if run in one else "")
        rows[-1].append(times(run, one["plain"], one[run], 2, False) if run in one else "")
        kept = (two if run in two else one)[run]["kept_bytes"]
        rows[-1].append((f"{kept / GIB:.1f}" if kept else "0") if ours else "")
    return table(["", "2 nodes", "x faster than stock", "one GPU", "x plain", "GiB kept"], rows)


def _kernels(result: dict, run: str) -> str:
    """How long the GPU computes for a token."""
    return f"{fastest(result, 'token_ms')[run]['kernels_ms']:.1f}"


def generation_says(nodes: dict, alone: dict) -> str:
    """Return what else there is to the times; of entering and leaving, every round."""
    ours = [row for result in (nodes, alone) for row in result["rows"] if row["run"] in OF_THE_PLUGIN]

    def span(key: str) -> str:
        return f"{min(row[key] for row in ours):.0f} to {max(row[key] for row in ours):.0f}"

    return paragraph(
        f"""Entering takes {span("enter_ms")} ms, leaving {span("leave_ms")} ms. Python, not the GPU, bounds a token
        ({_kernels(alone, "plain")} ms of kernels, {_kernels(alone, "qlora-codes")} with `qlora`, `"codes"`). The plain
        model ran first in its processes on two nodes, which explains a part of its time there."""
    )


def generation_4_gpus(result: dict) -> str:
    """Milliseconds a token on two nodes of two GPUs, beside the secondary shard of DeepSpeed itself."""
    found, rows = by_run(result), []
    for run in (run for run in LABELS if run in found and run != "plain-lora"):
        ms = f"{found[run]['token_ms']:.{0 if run.startswith('stock') else 1}f}"
        rows.append([LABELS[run], ms])
        rows[-1] += [times(run, found[base], found[run], 1, True) for base in ("stock", "stock-hpz")]
    return table(["", "ms per token", "x faster than stock", "x faster than in-tree hpZ"], rows)


def generation_graph(result: dict) -> str:
    """Milliseconds a token on one GPU with and without a graph, in one run, and what of it is host and kernels."""
    found = by_run(result)
    rows = []
    for run in (run for run in LABELS if run in found and run in OF_THE_PLUGIN):
        rows.append([LABELS[run], *(f"{found[run][key]:.1f}" for key in ("token_ms", "host_ms", "kernels_ms"))])
    return table(["", "ms per token", "host, ms", "kernels, ms"], rows)


def generation_mixture(result: dict) -> str:
    """Milliseconds a token of a mixture on one GPU, and memory."""
    found, rows = by_run(result), []
    for run in (run for run in LABELS if run in found):
        row = found[run]
        cells = [f"{row[key]:.1f}" for key in ("token_ms", "host_ms", "kernels_ms")]
        rows.append([LABELS[run], *cells, f"{row['peak_bytes'] / GIB:.1f}"])
    return table(["", "ms per token", "host, ms", "kernels, ms", "GiB at the peak"], rows)


def used_experts(generated: dict, *trained: dict) -> str:
    """Bytes and times of a mixture with all experts and with those that are used, of two nodes of one rank."""
    found = by_run(generated)
    rows = [
        [
            "generation, a token per rank",
            *(f"{found[run]['tx_bytes_per_node_token'] / 1e6:.0f}" for run in ("lossless", "lossless-used")),
            *(f"{found[run]['token_ms']:,.0f}" for run in ("lossless", "lossless-used")),
        ]
    ]
    for result in trained:
        found, tokens = by_run(result), result["tokens"]
        pair = [found[run] for run in ("lossless", "lossless-used")]
        rows.append(
            [f"training, {tokens} tokens per rank", *(f"{row['ledger_bytes_per_node_step'] / 1e6:.0f}" for row in pair)]
        )
        rows[-1] += [f"{row['step_ms']:,.0f}" for row in pair]
    return table(["", "all, MB", "used, MB", "all, ms", "used, ms"], rows)


def expert_products(result: dict) -> str:
    """Products of a stack of experts as codes, by chosen experts, beside decoding it for torch's grouped product."""
    rows = []
    for shape in dict.fromkeys(row["shape"] for row in result["rows"]):
        for count in dict.fromkeys(row["rows"] for row in result["rows"]):
            found = {row["what"]: row for row in result["rows"] if (row["shape"], row["rows"]) == (shape, count)}
            cells = [f"{found[name]['us']:.0f} ({found[name]['decoded_us']:.0f})" for name in OF_PRODUCTS]
            rows.append([shape.replace("x", " x "), str(count), *cells])
    return table(["each of 128 experts", "choices", *OF_PRODUCTS.values()], rows)


OF_PRODUCTS = {"int8": "INT8, us", "int4": "INT4, us", "nf4": "NF4, us", "nf4 double": "NF4, double quantization, us"}
FILES = ("generation/h200-2-25gbit", "generation/h200-1-local")
USED_FILES = ("generation/cpu-2-1gbit-mixture", "two_nodes/cpu-2-1gbit-mixture-4", "two_nodes/cpu-2-1gbit-mixture-64")
BLOCKS = {
    "generation": Block(generation, FILES),
    "generation_says": Block(generation_says, FILES, sourced=False),  # the table above names them
    "generation_graph": Block(generation_graph, ("generation/h200-1-local-graph",)),
    "generation_mixture": Block(generation_mixture, ("generation/h200-1-local-30b-a3b",)),
    "expert_products": Block(expert_products, ("quantized_linear/h200-1-local-experts",)),
    "used_experts": Block(used_experts, USED_FILES),
    "generation_4_gpus": Block(generation_4_gpus, ("generation/h200-4-25gbit",)),
}
