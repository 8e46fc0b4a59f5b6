"""python -m benchmarks.report: the documentation holds what the results say, and nothing else is taken."""

import json
import re
import statistics

import pytest

from benchmarks.harness import results
from benchmarks.harness.environment import ROOT
from benchmarks.report import __main__ as report
from benchmarks.report import blocks as parts
from benchmarks.report import pictures, rows
from benchmarks.report.blocks import Block
from benchmarks.report.handover import handover_nccl

BLOCKS = report.all_blocks()


@pytest.fixture
def documents(tmp_path):
    """A copy of the documents that holds them where the report looks for them."""
    for name in report.DOCUMENTS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


def test_the_documentation_is_what_the_results_say(capsys):
    assert report.main(["--check"]) == 0, capsys.readouterr().out


def test_a_figure_that_somebody_changed_is_found_and_made_good(documents, capsys):
    page = documents / "docs/results.md"
    right = page.read_text()
    page.write_text(right.replace("| 4563 |", "| 4564 |"))
    assert report.main(["--check"], documents) == 1
    assert capsys.readouterr().out == "docs/results.md: step_time is not what python -m benchmarks.report makes\n"
    assert page.read_text() != right, "--check writes nothing"
    assert report.main([], documents) == 0
    assert page.read_text() == right


def test_every_block_stands_somewhere():
    named = [name for document in report.DOCUMENTS for name in parts.named((ROOT / document).read_text())]
    assert sorted(named) == sorted(BLOCKS)
    assert len(BLOCKS) == sum(len(topic.BLOCKS) for topic in report.TOPICS), "two topics have one name"


def test_a_block_that_nobody_makes():
    with pytest.raises(KeyError, match="no function makes the block unknown"):
        parts.filled("<!-- block: unknown -->\n<!-- end -->", BLOCKS)


def test_a_block_that_stands_nowhere(documents):
    page = documents / "docs/results-features.md"
    page.write_text(re.sub("<!-- block: optimizer -->.*?<!-- end -->", "", page.read_text(), flags=re.S))
    with pytest.raises(KeyError, match="no document has the block optimizer"):
        report.main([], documents)
    assert "optimizer -->" not in page.read_text(), "nothing is written"


@pytest.mark.parametrize(
    "text", ["<!-- block: demo -->\n", "<!-- end -->", "<!-- block: demo -->\n" * 2 + "<!-- end -->"]
)
def test_a_block_without_an_end(text):
    with pytest.raises(ValueError, match="no end"):
        parts.filled(text, BLOCKS)


@pytest.mark.parametrize("name", [name for name, block in BLOCKS.items() if block.cut_short])
def test_what_was_cut_short_says_so(name):
    block = BLOCKS[name]
    assert set(block.cut_short) <= set(block.files)
    for file in block.cut_short:
        assert results.read_result(results.RESULTS / f"{file}.json")["finished"] is False, "it need not be named"
        if block.sourced:
            assert re.search(rf"`benchmarks/results/{file}\.json` \([^)]*; cut short\)", block.text())
    with pytest.raises(results.UnfinishedError, match=block.cut_short[0]):
        Block(block.make, block.files).text()


def test_sources():
    files = ("bit_parity/h200-2-nvlink", "two_nodes/h200-4-25gbit")
    made = Block(lambda *given: f"{len(given)} results", files).text()
    assert made == (
        "2 results\n\nSource: `benchmarks/results/bit_parity/h200-2-nvlink.json` (commit `adbabb8`),\n"
        "`benchmarks/results/two_nodes/h200-4-25gbit.json` (added in `a5a0d20`).\n"
    )


def test_tables():
    assert parts.table(["", "a"], [["b", ""], ["", ""]]) == "| | a |\n|---|---|\n| b | |\n| | |"
    with pytest.raises(AssertionError):
        parts.table(["a"], [["b", "c"]])
    assert parts.paragraph("a  b\n  c") == "a b c" and parts.paragraph("word " * 40).count("\n") == 1
    assert parts.paragraph("x" * 117 + " 1.5 %").splitlines() == ["x" * 117, "1.5 %"]
    with pytest.raises(AssertionError, match="more than once"):
        rows.by_run({"rows": [{"run": "a"}]}, {"rows": [{"run": "a"}]})
    twice = {"rows": [{"run": "a", "ms": 2.0}, {"run": "a", "ms": 1.0}, {"run": "a", "ms": 3.0}]}
    assert rows.fastest(twice, "ms")["a"]["ms"] == 1.0


# -- figures: read from the files without the functions that make the blocks


def in_file(file, number, path="rows"):
    """Return what a function makes of a result's rows, or of another part."""
    return number(json.loads((results.RESULTS / f"{file}.json").read_text())[path])


def value(key, **where):
    """Of the one row that has all these."""

    def found(rows_):
        (row,) = (row for row in rows_ if all(row.get(name) == wanted for name, wanted in where.items()))
        return row[key]

    return found


FIGURES = {
    ("demo", "`zeropp`", "held-out loss"): ("demo/cpu-4-gloo", lambda runs: runs["zeropp"]["held_out_loss"], "runs"),
    ("two_h100", "**`zeropp-2bit`**", "16 sockets per channel"): (
        "two_nodes/h100-2-25gbit-sockets",
        value("step_ms", run="zeropp-2bit"),
    ),
    ("two_h100", "**`zeropp`**", "16 sockets, compiled"): (
        "two_nodes/h100-2-25gbit-sockets-compiled",
        value("step_ms", run="zeropp-compiled"),
    ),
    ("link_each", "**`zeropp-pcie`**", "x the best peer"): (
        "one_node/h100-2-64gbit",
        lambda rows_: value("step_ms", run="fsdp2-compiled")(rows_) / value("step_ms", run="zeropp-pcie")(rows_),
    ),
    ("many_micro_batches", "**`zeropp`**", "16, 10 Gbit/s, ms per step"): (
        "two_nodes/h100-2-10gbit-k16",
        value("step_ms", run="zeropp"),
    ),
    ("handover_nccl", '`zeropp` with FP8 compute, `format="fp8"`', "ms"): (
        "handover/h100-2-25gbit",
        value("ms", run="fp8"),
    ),
    ("kernels", "dequantize", "FP8 E4M3"): (
        "kernels/h200-1-local",
        lambda rows_: 100 * value("share_of_copy", operation="dequantize", format="fp8_e4m3 block 128")(rows_),
    ),
    ("fp8_linear", "bf16", "ms"): ("fp8_linear/h200-1-local", value("ms", shape="4096x14336", run="bf16"), "linear"),
    ("fp8_stack", "`delayed`", "the layers compiled"): (
        "fp8_stack/h200-1-local-compile",
        lambda rows_: value("tokens_per_s", run="delayed")(rows_) / value("tokens_per_s", run="bf16")(rows_),
        "stack",
    ),
    ("direct_cast", "mxfp4, `floor`", "weights and activations"): (
        "direct_cast/cpu-1-local",
        lambda rows_: value("weights_activations", format="mxfp4 floor")(rows_)["difference"],
    ),
    ("fp8_lm_step", "`fp8-lm`", "ms per step"): (
        "fp8_lm_step/h200-4-25gbit-o3",
        lambda rows_: statistics.fmean(row["step_ms"] for row in rows_ if row["run"] == "fp8-lm"),
    ),
    ("fp8_lm_memory", "`fp8-lm-o1`", "peak of a step"): (
        "fp8_lm_memory/h200-1-local",
        lambda rows_: value("peak_bytes", run="fp8-lm-o1")(rows_) / 2**30,
    ),
    ("optimizer", "FP8 AdamW, scales per tensor", "ms"): (
        "optimizer/h200-1-local",
        value("ms", parameters=2**30, step="tensor scales, fp8 gradients"),
    ),
    ("lora_step", "`qlora`", "peak of a rank, GiB"): (
        "lora_step/h200-2-25gbit",
        lambda rows_: value("peak_bytes", run="nf4-dq")(rows_) / 2**30,
    ),
    ("generation", '`zeropp`, `"values"`', "2 nodes"): ("generation/h200-2-25gbit", value("token_ms", run="values")),
    ("rlhf_step", "LoRA, `qlora`", "NVLink"): ("rlhf_step/h200-2-nvlink", value("training_ms", run="qlora")),
    ("faults_seconds_gloo", "exit", "load"): (
        "faults/cpu-2-gloo",
        lambda rows_: max(row["seconds"] for row in rows_ if (row["fault"], row["place"]) == ("exit", "load")),
    ),
    ("compat", "0.18.0, lowest bounds", "passed"): (
        "compat/cpu-4-gloo",
        lambda rows_: next(row["passed"] for row in rows_ if row["versions"]["deepspeed"] == "0.18.0"),
    ),
    ("upstream_results", "`cpu-2-gloo-qlora.json`: the rest of the 353", "passed"): (
        "upstream/cpu-2-gloo-qlora",
        lambda tests: sum(test["outcome"] == "passed" for test in tests.values()),
        "tests",
    ),
    ("integrations_results", "Accelerate 1.15.0", "`zeropp` passes of them"): (
        "upstream/cpu-2-gloo-accelerate",
        lambda tests: sum(test.get("zeropp", {}).get("outcome") == "passed" for test in tests.values()),
        "tests",
    ),
}


@pytest.mark.parametrize("place", FIGURES, ids=lambda place: place[0])
def test_figures_are_those_of_the_files(place):
    """To half of the last digit that is shown."""
    name, label, column = place
    file, *how = FIGURES[place]
    assert file in BLOCKS[name].files
    (body,) = (
        found[3]
        for page in report.DOCUMENTS
        for found in parts.MARKED.finditer((ROOT / page).read_text())
        if found[2] == name
    )
    lines = [line.strip("|").split("|") for line in body.splitlines() if line.startswith("|")]
    head, *cells = [[cell.strip() for cell in line] for line in lines]
    (line,) = (line for line in cells if line[0] == label)
    shown = re.search(r"[-+]?[\d,]+(?:\.(\d+))?", line[head.index(column)])
    half = 0.5 * 10 ** -len(shown[1] or "")
    assert float(shown[0].replace(",", "")) == pytest.approx(in_file(file, *how), abs=half * (1 + 1e-9))


def test_pictures(tmp_path, monkeypatch):
    """The kept pictures, of the kept results; one's own; and results that cannot be drawn."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    for name, (_, files) in pictures.KEPT.items():
        assert (results.RESULTS / f"{name}.png").stat().st_size > 10_000
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / f"{file}.json").symlink_to(results.RESULTS / f"{file}.json")
    assert report.main(["--pictures"]) == 0
    for name in pictures.KEPT:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    kept = results.RESULTS / "two_nodes"
    given = [str(tmp_path / "new/own.png"), str(kept / "h200-4-25gbit.json"), str(kept / "h200-4-10_6_4gbit.json")]
    assert report.main(["--draw", *given]) == 0
    assert (tmp_path / "new/own.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="results of kernels: give those of one of two_nodes, convergence"):
        pictures.draw([results.RESULTS / "kernels/h200-1-local.json"], "none.png")
    with pytest.raises(results.UnfinishedError):
        pictures.draw([results.RESULTS / "fp8_lm_policies/h200-1-local.json"], "none.png")


def test_a_hand_over_beside_trl():
    """The fastest round of each run counts, and bytes are those that the interface counts."""
    shared = {"payload_bytes": 4e6, "gathered_bytes_per_rank": 2e6, "tx_bytes_per_node": 3e6}
    runs = {"merged": (10.0, 1e6), "trl-lora": (70.0, 5e9), "merged-lora": (60.0, 1e7), "adapters-lora": (20.0, 1e6)}
    rows = [{"run": run, "ms": ms, "there_bytes": there, **shared} for run, (ms, there) in runs.items()]
    rows[1]["gathered_bytes_per_rank"] = None
    result = {"settings": {"gbit": 25.0}, "rows": [*rows, {**rows[0], "ms": 90.0}]}
    said = handover_nccl(result).replace("\n", " ")
    assert "| LoRA: TRL, stock | 4.00 | 3.00 | 5000.00 | 70 |" in said and "MB a node sends for it" in said
    assert "With LoRA TRL has 5.0 GB of weights there at once and takes 70 ms, merging block by block" in said
    assert "0.01 GB and 60 ms; the adapter alone, whose matrices stay gathered between steps, takes 20 ms." in said
    assert "A rank gathers 2 MB for all weights in 10 ms, which 25 Gbit/s need 1 ms for." in said
