"""The pipeline of the RLHF examples as a whole, on two gloo ranks as two nodes; and its stages under the launcher."""

import json
import shutil
import sys
from pathlib import Path

import launching
import pipeline
import pytest
import rlhf_pipeline_jobs as jobs
from ranks import run_ranks

DEMO = Path(__file__).parents[1] / "demo.json"
FEW = [
    *("make_data.train=200", "make_data.test=21", "ds_config.train_micro_batch_size_per_gpu=4"),
    *("sft.steps=2", "sft.log_every=1", "reward.steps=2", "reward.log_every=1", "dpo.steps=1", "dpo.max_tokens=64"),
    *("ppo.iterations=2", "ppo.rollout_batch=8", "ppo.eval_every=1", "ppo.eval_batch=4", "ppo.max_new_tokens=6"),
    *("grpo.iterations=1", "grpo.rollout_batch=8", "grpo.group_size=4", "grpo.max_new_tokens=6"),
    *("grpo.max_prompt_tokens=32", "evaluate.eval_batch=3", "evaluate.max_new_tokens=6"),
]  # fmt: skip


@pytest.fixture
def run(monkeypatch):
    """pipeline.main(*argv), with scripts on ranks that are forked; returns the names of the stages that ran."""
    ran = []

    def launch(name, script, words, accelerator, ranks):
        ran.append(name)
        run_ranks(jobs.main_of, world=ranks, ranks_per_node=ranks, script=script, words=words)

    def main(out, *argv):
        ran.clear()
        command = ["pipeline.py", "--out", str(out), "--ranks", "2", "--nodes", "2", *argv]
        monkeypatch.setattr(sys, "argv", command)
        pipeline.main()
        return list(ran)

    monkeypatch.setattr(pipeline, "launch", launch)
    monkeypatch.setattr(pipeline, "alone", lambda name, script, words: launch(name, script, words, "cpu", 1))
    monkeypatch.setattr(pipeline, "device", lambda multiple_of, ranks: ("cpu", ranks))
    return main


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def same_answers(trained, evaluated):
    """Frozen and stored, a policy computes what it computed while it trained."""
    trained, evaluated = rows_of(trained), rows_of(evaluated)
    assert [row["completion"] for row in trained] == [row["completion"] for row in evaluated]
    assert [row["exact_match"] for row in trained] == [row["exact_match"] for row in evaluated]
    assert len({row["completion"] for row in evaluated}) > 1


def test_from_nothing_to_a_summary(run, tmp_path):
    """SFT, reward model, PPO with the settings of the demo but few steps; then DPO and GRPO from that SFT model."""
    out = tmp_path / "run"
    argv = ["--settings", str(DEMO), "--set", *FEW]
    assert run(out, *argv) == ["data", "sft", "reward", "ppo", "evaluate"]
    summary = json.loads((out / "summary.json").read_text())
    for name in ("sft", "ppo"):
        assert summary[name]["n_eval"] == 21 and 0 <= summary[name]["exact_match"] <= 1
        low, high = summary[name]["interval"]
        assert low <= summary[name]["exact_match"] <= high
    assert summary["difference"]["of"] == ["ppo", "sft"]
    # As two nodes of one rank each everything goes between nodes.
    assert all(summary["logs"][name]["wire_inter_mb"] > 0 for name in ("sft", "reward", "ppo"))
    assert all(summary["logs"][name]["wire_intra_mb"] == 0 for name in ("sft", "reward", "ppo"))
    assert (out / "summary.png").read_bytes().startswith(b"\x89PNG")

    same_answers(out / "ppo" / "eval_step0.jsonl", out / "evaluate" / "sft.jsonl")
    same_answers(out / "ppo" / "eval_step2.jsonl", out / "evaluate" / "ppo.jsonl")
    assert {"answer", "kind"} <= rows_of(out / "evaluate" / "sft.jsonl")[0].keys()
    assert rows_of(out / "evaluate" / "sft.jsonl") != rows_of(out / "evaluate" / "ppo.jsonl")

    assert run(out, *argv, "--resume") == []
    again = json.loads((out / "summary.json").read_text())
    assert [again[name] for name in ("sft", "ppo", "seconds")] == [summary[name] for name in ("sft", "ppo", "seconds")]
    shutil.rmtree(out / "evaluate")
    assert run(out, *argv, "--resume") == ["evaluate"]
    assert json.loads((out / "summary.json").read_text())["ppo"] == summary["ppo"]

    given = ["--model", str(out / "sft"), "--data", str(out / "data"), "--stages", "dpo", "grpo", "--recipe", "qlora"]
    assert run(tmp_path / "others", *argv, *given) == ["dpo", "grpo", "evaluate"]
    others = json.loads((tmp_path / "others" / "summary.json").read_text())
    assert (
        all(others[name]["n_eval"] == 21 for name in ("sft", "dpo", "grpo")) and others["difference"]["of"][0] == "grpo"
    )
    others = tmp_path / "others"
    assert (others / "grpo" / "adapter_config.json").is_file()
    same_answers(others / "grpo" / "eval_step0.jsonl", others / "evaluate" / "dpo.jsonl")
    same_answers(others / "grpo" / "eval_step1.jsonl", others / "evaluate" / "grpo.jsonl")


def test_a_pipeline_with_fp8_lm(run, tmp_path):
    """Other numbers, whole tensors on their owners; the metric is the reward."""
    argv = ["--settings", str(DEMO), "--set", *FEW, "ppo.iterations=1", "--recipe", "fp8-lm", "--stages", "sft", "ppo"]
    assert run(tmp_path, *argv) == ["data", "sft", "ppo", "evaluate"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["sft"]["n_eval"] == summary["ppo"]["n_eval"] == 21
    assert summary["ds_configs"]["evaluate"]["zeropp_fp8"]["recipe"] == "fp8-lm"


STAND_IN = """
import os, sys
from pathlib import Path

folder, *more = (word for word in sys.argv[1:] if not word.startswith("--local_rank"))
said = [os.environ["WORLD_SIZE"], os.environ["DS_ACCELERATOR"], *more]
(Path(folder) / os.environ["RANK"]).write_text(" ".join(said))
sys.exit("fail" in more and os.environ["RANK"] == "1")
"""


def test_launched(tmp_path):
    """The launcher itself: as many processes as asked for, with their words; one that fails ends the run."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    launching.launch("sft", script, [tmp_path, "--data", "a b"], "cpu", 2)
    assert {name: (tmp_path / name).read_text() for name in "01"} == dict.fromkeys("01", "2 cpu --data a b")
    with pytest.raises(SystemExit, match="the run ppo failed with exit status 1; its error is above"):
        launching.launch("ppo", script, [tmp_path, "fail"], "cpu", 2)
