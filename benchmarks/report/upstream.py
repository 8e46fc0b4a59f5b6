"""DeepSpeed's own tests with recipes: how they ended, and why some are not meant to hold."""

from __future__ import annotations

import re
import textwrap
from collections import Counter

from benchmarks.report.blocks import WIDTH, Block, paragraph, table

LOSSLESS, AGAIN = "h200-2-nvlink-lossless", "h200-2-nvlink-lossless_again"
ZEROPP, QLORA, FP8_LM = (f"h200-2-nvlink-{recipe}" for recipe in ("zeropp", "qlora", "fp8-lm"))
QLORA_REST, FP8_LM_REST, STOCK = (f"cpu-2-gloo-{recipe}" for recipe in ("qlora", "fp8-lm", "stock"))
WANTS_8_GPUS = "invalid device ordinal"


def ended(test: dict, reason: str | None) -> str:
    """The column that a test counts in."""
    if test["outcome"] != "failed":
        return test["outcome"]
    if reason:
        return "not meant to hold"
    if WANTS_8_GPUS in test["says"]:
        return "wants 8 GPUs"
    return "skipped" if test.get("stock") == "skipped" else "other version"


def endings(result: dict, again: dict | None = None) -> Counter:
    """Tests by ending; of an older file, which holds no reasons, those of the file measured again."""
    reasons = (again or result)["tests"]
    return Counter(ended(test, reasons.get(name, {}).get("reason")) for name, test in result["tests"].items())


def commit_of(result: dict) -> str:
    """The cell of a result's commit, or of its commits."""
    text = re.sub(r"\b[0-9a-f]{7}\b", lambda found: f"`{found[0]}`", result["commit"])
    return text.partition(", what")[0].replace("; the last", ",")


def results(
    lossless: dict, again: dict, zeropp: dict, qlora: dict, fp8_lm: dict, qlora_rest: dict, fp8_lm_rest: dict
) -> str:
    """Counts by file."""
    engines = len(zeropp["tests"])
    left_out = zeropp["tests"].keys() - fp8_lm["tests"].keys() - fp8_lm_rest["tests"].keys()
    (first,) = re.findall(r"failed on (\w+)", again["commit"])
    described = [
        (LOSSLESS, "", lossless, endings(lossless, again), f"`{first}`"),
        (AGAIN, ": what failed there, and what later changes concern", again, endings(again), commit_of(again)),
        (ZEROPP, f": the {engines} that make an engine", zeropp, endings(zeropp), commit_of(zeropp)),
        (QLORA, ": of the same", qlora, endings(qlora), commit_of(qlora)),
        (FP8_LM, ": of the same", fp8_lm, endings(fp8_lm), commit_of(fp8_lm)),
        (QLORA_REST, f": the rest of the {engines}", qlora_rest, endings(qlora_rest), commit_of(qlora_rest)),
        (
            FP8_LM_REST,
            f": the rest, but for {len(left_out)} that stock fails on a CPU",
            fp8_lm_rest,
            endings(fp8_lm_rest),
            commit_of(fp8_lm_rest),
        ),
    ]
    columns = ("passed", "not meant to hold", "other version", "skipped")
    rows = [
        [f"`{name}.json`{what}", commit, str(len(result["tests"])), *(str(count[column]) for column in columns)]
        for name, what, result, count, commit in described
    ]
    return table(["file", "commit", "tests", *columns[:-1], "skipped by themselves"], rows)


def because(results: tuple[dict, ...], *words: str) -> int:
    """Failures whose reason has some of these words."""
    reasons = [test.get("reason", "") for result in results for test in result["tests"].values()]
    return sum(any(word in reason for word in words) for reason in reasons)


def item(text: str) -> str:
    """Of a list, wrapped as the documents are."""
    return textwrap.fill(" ".join(text.split()), WIDTH, subsequent_indent="  ", break_on_hyphens=False)


IDENTITIES = ("identity of ", "who is gathered when")
TIGHT, NEED_NOT = "a bound tighter than the quantization", "an error that the plugin need not raise"


def not_meant_to_hold(again: dict, zeropp: dict, qlora: dict, fp8_lm: dict, qlora_rest: dict, fp8_lm_rest: dict) -> str:
    """Failures that have a reason, by recipe and reason."""

    def of(result: dict, *words: str) -> int:
        return because((result,), *words)

    two = sum(
        TIGHT in test.get("reason", "") and "Tensors are not close" in test["says"] for test in zeropp["tests"].values()
    )
    both = (qlora, qlora_rest), (fp8_lm, fp8_lm_rest)
    texts = [
        f"""* Not meant to hold, `lossless`: who `F.linear` is ({of(again, "identity of F.linear")}),
        `optimizer.leaf_parameters` ({of(again, "identity of optimizer.leaf")}), a counter of DeepSpeed's hooks
        ({of(again, "identity of a counter")}, since `b0c513b`), who is gathered when
        ({of(again, "who is gathered when")}), an error that need not be raised ({of(again, NEED_NOT)}).""",
        f"""* Not meant to hold, `zeropp`: gradients, losses and outputs compared more tightly than INT8 rounds
        ({of(zeropp, TIGHT)}, of which {two} show two tensors, which may differ by 3 % of the largest value),
        `reduce_scatter: false` is refused ({of(zeropp, "reduce_scatter false")}), a bucket of gradients that is not
        there to be offloaded ({of(zeropp, "contiguous bucket of gradients")}), where Adam counts its steps
        ({of(zeropp, "where Adam counts")}), the same identities ({of(zeropp, *IDENTITIES)}), what counts calls of
        DeepSpeed's reductions ({of(zeropp, "counts calls")}), an error that need not be raised
        ({of(zeropp, NEED_NOT)}).""",
        f"""* `qlora` and `fp8-lm` have little to do there: `qlora` refuses to train weights that `zero.Init` has stored
        in 4 bits ({because(both[0], "zero.Init has stored in 4 bits")} in both files), `fp8-lm` models without a linear
        layer of 64 features ({because(both[1], "without a linear layer of 64 features")}) and offload of its states
        ({of(fp8_lm_rest, "remedy: offload")} on the CPU).""",
    ]
    return "\n".join(item(text) for text in texts)


def beside_stock(zeropp: dict, qlora: dict, stock: dict) -> str:
    """How stock ended where it ran beside a recipe, and on a CPU in the place of `lossless`."""
    with_zeropp, with_qlora = (
        Counter(test["stock"] for test in result["tests"].values() if "stock" in test) for result in (zeropp, qlora)
    )
    (last,), (last_qlora,) = (re.findall(r"the last (\d+)", result["commit"]) for result in (zeropp, qlora))
    alone = Counter(test["outcome"] for test in stock["tests"].values())
    assert with_qlora.keys() == {"passed"}
    return paragraph(
        f"""On the GPUs stock ran beside {with_zeropp.total() + with_qlora.total()} only: {with_zeropp.total()} of the
        last {last} with `zeropp`, of which {with_zeropp["passed"]} pass and {with_zeropp["failed"]} fails in the same
        words, and {with_qlora.total()} of the last {last_qlora} with `qlora`, which pass. `cpu-2-gloo-stock.json` holds
        what stock says on a CPU of the {len(stock["tests"])} tests that `lossless` does not pass on GPUs:
        {alone["failed"]} fail there too, in the same words but for two, {alone["skipped"]} skip themselves, and
        {alone["passed"]} pass, of which `lossless` passes 1 there, and 5 are identities from above."""
    )


def below(*names: str) -> tuple[str, ...]:
    """Files of this question."""
    return tuple(f"upstream/{name}" for name in names)


BLOCKS = {
    "upstream_results": Block(
        results, below(LOSSLESS, AGAIN, ZEROPP, QLORA, FP8_LM, QLORA_REST, FP8_LM_REST), sourced=False
    ),
    "upstream_not_meant_to_hold": Block(
        not_meant_to_hold, below(AGAIN, ZEROPP, QLORA, FP8_LM, QLORA_REST, FP8_LM_REST), sourced=False
    ),
    "upstream_beside_stock": Block(beside_stock, below(ZEROPP, QLORA, STOCK), sourced=False),
}
