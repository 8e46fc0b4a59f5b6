"""LoRA on quantized weights: steps, memory, batches, quality, decoding."""

from __future__ import annotations

from benchmarks.loading import TARGET as LOADING_TARGET
from benchmarks.report.blocks import Block, bold, code_of, paragraph, table
from benchmarks.report.rows import GIB, by_run, link_says, outcome

BITSANDBYTES = "bitsandbytes, NF4 with double quantization"
FORMATS = {
    "bf16": "bf16",
    "int8": "INT8",
    "mxfp8": "MXFP8 E4M3",
    "nf4": "NF4",
    "nf4-dq": "NF4, double quantization",
    "mxfp4": "MXFP4",
    "int4": "INT4",
    "int4-dq": "INT4, double quantization",
}


def lora_step(result: dict) -> str:
    """Time, bytes and memory of a step on two nodes."""
    labels = {
        "stock-lora": "stock ZeRO-3, bf16",
        "zeropp-lora": "`zeropp`, weights not stored",
        "int4": '`zeropp` with `"frozen": {"format": "int4"}`',
        "nf4-dq": "`qlora`",
    }
    found, rows = by_run(result), []
    times = {run: found["stock-lora"]["step_ms"] / row["step_ms"] for run, row in found.items()}
    for run, label in labels.items():
        row, factor = found[run], f"{times[run]:.1f}"
        rows.append([label, f"{row['step_ms']:.0f}", bold(factor) if times[run] == max(times.values()) else factor])
        rows[-1] += [f"{row['tx_bytes_per_node_step'] / 1e6:,.0f}", f"{row['frozen_per_parameter']:.3f}"]
        rows[-1] += [f"{row['peak_bytes'] / GIB:.1f}"]
    head = ["", "ms per step", "x stock", "MB a node sends", "stored bytes per frozen weight", "peak of a rank, GiB"]
    return table(head, rows)


def lora_step_says(result: dict) -> str:
    """Return what the store is for, if not for bytes between nodes."""
    found = by_run(result)
    rest = {run: f"{row['rest_bytes'] / GIB:.1f} GiB" for run, row in found.items()}
    stock, least = found["stock-lora"], min(row["step_ms"] for row in found.values())
    assert not any(sum(row["tcp_timeouts"]) for row in found.values() if row is not stock)
    return paragraph(
        f"""Copies of frozen weights stay valid between steps, so only gradients and adapters are sent. `zeropp` stores
        {rest["zeropp-lora"]} on each rank, `qlora` {rest["nf4-dq"]}.
        In this run {link_says(result, stock["tx_bytes_per_node_step"], stock["step_ms"], least)}
        TCP waited {min(stock["tcp_timeouts"])} to {max(stock["tcp_timeouts"])} times in each of stock's steps to send
        lost data again, and never in the others'."""
    )


def lora_memory(result: dict) -> str:
    """Memory of one GPU."""
    labels = {"stock-lora": "stock ZeRO-3, bf16", "nf4-dq": "`qlora`", "bnb": BITSANDBYTES}
    found, rows = by_run(result), []
    for run, label in labels.items():
        row = found[run]
        rows.append([label, f"{row['frozen_per_parameter']:.3f}", f"{row['model_bytes'] / GIB:.1f}"])
        rows[-1] += [f"{row['peak_bytes'] / GIB:.1f}", f"{row['step_ms']:.0f}"]
    return table(["", "bytes per frozen weight", "model, GiB", "peak of a step, GiB", "ms per step"], rows)


def lora_memory_says(alone: dict, before: dict, after: dict) -> str:
    """The difference to bitsandbytes, and two GPUs; stock was only run before embeddings were read in place."""
    found, stock, qlora = by_run(alone), by_run(before)["stock-lora"], by_run(after)["nf4-dq"]

    def gib(row: dict, key: str) -> str:
        return f"{row[key] / GIB:.1f}"

    return paragraph(
        f"""bf16 copies of the adapters and a buffer for their gradients are the
        {(found["nf4-dq"]["peak_bytes"] - found["bnb"]["peak_bytes"]) / GIB:.2f} GiB above bitsandbytes. On two H200 of
        one node (`--ranks 2`) `qlora` stores {gib(qlora, "rest_bytes")} GiB per GPU, with a peak of
        {gib(qlora, "peak_bytes")}; stock {gib(stock, "rest_bytes")} and {gib(stock, "peak_bytes")}."""
    )


def largest(result: dict) -> dict[str, dict]:
    """The row of the largest batch that fitted, by run; `not_fitting` is the smallest that did not."""
    found: dict[str, dict] = {}
    for row in sorted(result["rows"], key=lambda row: row["micro_batch"]):
        if row["fits"]:
            found[row["run"]] = dict(row)
        else:
            found.setdefault(row["run"], {}).setdefault("not_fitting", row["micro_batch"])
    return found


def lora_limits_says(small: dict, whole: dict) -> str:
    """The largest batches with 24 GiB and with a whole GPU; the second run was cut short while it refined."""
    few, many = largest(small), largest(whole)
    qlora, bnb, stock = (many[run] for run in ("nf4-dq", "bnb", "stock-lora"))
    batch, tokens = few["nf4-dq"]["micro_batch"], f"{few['nf4-dq']['sequence']:,}"
    assert batch == few["bnb"]["micro_batch"] == few["stock-lora"]["not_fitting"] and len(few["stock-lora"]) == 1
    assert qlora["micro_batch"] == bnb["micro_batch"] == stock["micro_batch"]
    assert qlora["not_fitting"] < bnb["not_fitting"] == stock["not_fitting"]
    speeds = [f"{row['tokens_per_s']:,.0f}" for row in (few["nf4-dq"], few["bnb"], qlora, bnb, stock)]
    return paragraph(
        f"""With {small["settings"]["gib"]:.0f} GiB `qlora` fits a batch of {batch} x {tokens} tokens
        ({speeds[0]} tokens/s), bitsandbytes the same ({speeds[1]}), and stock does not fit. With
        {whole["hardware"]["gpu_gib"]} GiB all three fit {qlora["micro_batch"]} x {tokens} and not
        {bnb["not_fitting"]} x {tokens} ({speeds[2]}, {speeds[3]} and {speeds[4]} tokens/s;
        {code_of("lora_limits")})."""
    )


def lora_quality_of(result: dict) -> str:
    """Return what was trained for the table of losses."""
    runs = result["comparison"]
    spread = {f"{run['seed_spread_percent']:.1f} %" for run in runs}
    (parameters,), (seeds,) = {row["parameters"] for row in result["rows"]}, {len(run["seeds"]) for run in runs}
    return paragraph(
        f"""LoRA on an {parameters / 1e6:.0f} M Llama that was trained on one half of the Python standard library and is
        fine-tuned on the other half (`python -m benchmarks.lora_quality`, one H200, {seeds} seeds, which differ by
        {" to ".join(sorted(spread))}):"""
    )


def percent(value: float) -> str:
    """With two digits, and no sign before a zero."""
    return f"{round(value, 2) + 0.0:.2f} %"


def lora_quality(result: dict) -> str:
    """Losses with frozen weights in each format."""
    found = {run["run"]: run for run in result["comparison"]}
    rows = [[label, f"{found[run]['held_out_loss']:.4f}"] for run, label in FORMATS.items()]
    for row, run in zip(rows, FORMATS):
        above = ("percent_above_bf16", "start_percent_above_bf16")
        row += ["", ""] if run == "bf16" else [percent(found[run][key]) for key in above]
    return table(["frozen weights", "held-out loss", "above bf16", "before the first step"], rows)


def products(result: dict) -> dict[str, dict]:
    """Products of one row with the largest weight, by format."""
    rows = [row for row in result["rows"] if (row["shape"], row["rows"]) == ("4096x14336", 1)]
    return {row["what"].replace(" double", "-dq"): row for row in rows}


def decode_of(decoding: dict, product: dict) -> str:
    """Return what was measured for the table of decoding."""
    (parameters,) = {row["parameters"] for row in decoding["rows"]}
    return paragraph(
        f"""Decoding the {parameters / 1e6:.0f} M weights of a block to bf16 on one H200 ({code_of("dequantize")}), and
        a product of one row with a weight of 4,096 x 14,336 in codes, against torch's bf16 product of
        {products(product)["bf16"]["us"]:.1f} us (`python -m benchmarks.quantized_linear`; INT4 and INT8 there in blocks
        of 128):"""
    )


def decode(decoding: dict, product: dict) -> str:
    """Time to decode a block, and of a product with codes."""
    labels = {run: FORMATS[run] for run in ("int4", "int4-dq", "int8", "nf4", "nf4-dq")} | {"bnb nf4-dq": BITSANDBYTES}
    decoded, multiplied, rows = by_run(decoding), products(product), []
    share = {run["run"]: run["percent_of_copy"] for run in decoding["comparison"]}
    for run, label in labels.items():
        rows.append([label, f"{decoded[run]['us']:.0f}", f"{share[run]:.0f} %"])
        of = multiplied.get(run)
        rows[-1] += [f"{of['us']:.1f}", f"{of['speed_up']:.2f}"] if of else ["", ""]
    return table(["", "decode a block, us", "of a copy's bandwidth", "product, us", "x bf16"], rows)


def lora_mixture(nodes: dict, node: dict) -> str:
    """QLoRA of a large mixture on two GPUs: as two nodes, and as one."""
    rows = []
    for result, label in ((nodes, "two nodes, 25 Gbit/s"), (node, "one node, NVLink")):
        (line,) = result["comparison"]
        sent = [f"{line['wire'][link] / 1e6:,.0f}" for link in ("inter", "intra")]
        peak = f"{line['peak_bytes'] / GIB:.1f}"
        rows.append([label, f"{line['step_ms']:,.0f}", f"{line['tokens_per_s']:,.0f}", *sent, peak])
    made = table(["", "ms per step", "tokens per s", "MB between nodes", "MB within nodes", "GiB per GPU"], rows)
    (far,), (near,) = nodes["comparison"], node["comparison"]
    peak, sent = far["peak_bytes"] / GIB, far["wire"]["inter"] / 1e6
    share = far["tokens_per_s"] / near["tokens_per_s"]
    said = paragraph(
        f"""Targets on two nodes: at most 24 GiB ({outcome(peak, 24)}), at most 40 MB between nodes
        ({outcome(sent, 40)}), at least 0.9 of the tokens per second over NVLink ({share:.2f}, {outcome(-share, -0.9)}).
        Frozen parameters take {far["frozen_per_parameter"]:.3f} bytes each."""
    )
    return f"{made}\n\n{said}"


def lora_loading(large: dict, small: dict) -> str:
    """Host memory while a mixture is loaded, from large and from small files, and what bounds it."""
    labels, rows, outcomes = {"stock-lora": "stock ZeRO-3, bf16", "int8": "`int8`", "nf4-dq": "`qlora`"}, [], []
    for result in (large, small):
        found, lines = by_run(result), result["comparison"]
        for line in lines:
            row = found[line["run"]]
            gb = (max(row["file_bytes"]), max(row["rest_bytes"]), line["beside_bytes"])
            rows.append([labels[line["run"]], *(f"{number / 1e9:.2f}" for number in gb)])
            rows[-1] += [f"{line[unit]:.2f}" for unit in ("of_file", "of_largest")]
        outcomes.append(outcome(max(line["of_file"] for line in lines if "met" in line), LOADING_TARGET))
    head = ["", "largest file, GB", "kept, GB", "more at the peak, GB", "x largest file", "x largest parameter"]
    of_largest = sorted(line["of_largest"] for result in (large, small) for line in result["comparison"])
    said = paragraph(
        f"""The rank that has most holds {of_largest[0]:.1f} to {of_largest[-1]:.1f} times the largest packed parameter
        ({large["rows"][0]["largest_bytes"] / 1e9:.2f} GB) besides, whatever the files: the target,
        {LOADING_TARGET:g} times the largest file, is {outcomes[0]} with files of {rows[0][1]} GB and {outcomes[1]} with
        files of {rows[-1][1]} GB. Two of these copies are transformers', which joins the matrices of experts, and
        DeepSpeed's, which gathers a parameter that is written."""
    )
    return f"{table(head, rows)}\n\n{said}"


MIXTURE = ("lora_step/h200-2-25gbit-30b-a3b", "lora_step/h200-2-nvlink-30b-a3b")
LOADING = ("loading/cpu-2-gloo", "loading/cpu-2-gloo-small_files")
STEP = ("lora_step/h200-2-25gbit",)
MEMORY = "lora_memory/h200-1-local"
LIMITS = ("lora_limits/h200-1-local-24gib", "lora_limits/h200-1-local")
QUALITY = ("lora_quality/h200-1-local",)
DECODE = ("dequantize/h200-1-local", "quantized_linear/h200-1-local")
# A paragraph has no source of its own where the table beside it names all of its files.
BLOCKS = {
    "lora_step": Block(lora_step, STEP),
    "lora_mixture": Block(lora_mixture, MIXTURE),
    "lora_loading": Block(lora_loading, LOADING),
    "lora_step_says": Block(lora_step_says, STEP, sourced=False),
    "lora_memory": Block(lora_memory, (MEMORY,)),
    "lora_memory_says": Block(
        lora_memory_says, (MEMORY, "lora_memory/h200-2-nvlink-before", "lora_memory/h200-2-nvlink")
    ),
    "lora_limits_says": Block(lora_limits_says, LIMITS, cut_short=(LIMITS[1],)),
    "lora_quality_of": Block(lora_quality_of, QUALITY, sourced=False),
    "lora_quality": Block(lora_quality, QUALITY),
    "decode_of": Block(decode_of, DECODE, sourced=False),
    "decode": Block(decode, DECODE),
}
