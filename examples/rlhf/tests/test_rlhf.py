"""The RLHF examples on gloo ranks, part by part: the first step, shared backbones, averages, checkpoints, rewards."""

import json
import math
import shutil
from datetime import datetime

import pytest
import rlhf_jobs as jobs
import torch
from ranks import run_ranks
from rlhf_starts import folder_of, make_starts
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    make_starts(root)
    return root


# -- before the first step --------------------------------------------------------------------------------------------

BF16 = {"bf16": {"enabled": True}}
BEFORE = {
    "qlora, the SFT adapter as reference": ("qlora", "adapter", 1, 14, {}),
    "qlora, no adapter": ("qlora", "base", 1, 14, {}),
    "lora over weights that are only sent quantized": ("zeropp", "adapter", 1, 0, {"lora_rank": 4}),
    "zeropp, all weights": ("zeropp", "base", 2, 14, {}),
    "zeropp, all weights of a merged adapter": ("zeropp", "adapter", 2, 14, {}),
    "lossless, all weights": ("lossless", "base", 2, 0, {}),
    "stock DeepSpeed": (None, "base", 2, 0, {}),
    # Master weights in fp16 round an fp32 model too, but not before its first step.
    "fp8-lm, all weights in fp32": ("fp8-lm", "base", 2, 14, {}),
    "fp8-lm, all weights": ("fp8-lm", "base", 2, 14, {"overrides": BF16}),
    "fp8-lm, all weights of a merged adapter": ("fp8-lm", "adapter", 2, 14, {"overrides": BF16}),
    "FP8 compute, weights sent in 16 bits": ("fp8-lm-o2", "base", 2, 14, {"overrides": BF16}),
}


@pytest.mark.parametrize("case", BEFORE)
def test_before_the_first_step_kl_is_0_and_every_ratio_is_1(case, made, tmp_path):
    recipe, start, engines, stored, given = BEFORE[case]
    for log in run_ranks(
        jobs.first_iterations,
        world=2,
        folder=folder_of(tmp_path),
        recipe=recipe,
        model=str(made / start),
        reward_functions=["exact_match"],
        **given,
    ):
        assert log["kl"] == [0.0] * 8
        assert log["ratios off 1"]["as they come"] == 0
        # In FP8 the activations of a micro-batch share a scale: in other company they are other numbers.
        in_fp8 = "fp8" in (recipe or "")
        assert 0 < log["ratios off 1"]["mixed"] < 0.3 if in_fp8 else log["ratios off 1"]["mixed"] == 0
        assert log["clip fraction of the first step"] == log["approximate kl"] == [0.0, 0.0]
        assert log["engines"] == 1 + engines and log["stored"] == stored
        assert max(log["clip fractions"]) > 0 and min(map(abs, log["kl afterwards"])) > 1e-4


def test_references_in_another_format_are_close(made, tmp_path):
    """A copy in INT8, beside a policy whose weights are FP8."""
    log = run_ranks(
        jobs.first_iterations,
        world=2,
        folder=folder_of(tmp_path),
        recipe="fp8-lm",
        model=str(made / "base"),
        reward_functions=["exact_match"],
        frozen_format="int8",
    )[0]
    assert log["stored"] == 14 and log["ratios off 1"]["as they come"] == 0
    assert log["clip fraction of the first step"] == log["approximate kl"] == [0.0, 0.0]
    at_first, afterwards = (sum(map(abs, log[name])) / 8 for name in ("kl", "kl afterwards"))
    assert 0 < at_first < 0.1 < afterwards


@pytest.mark.parametrize("recipe, start", [("zeropp", "base"), ("qlora", "adapter")])
def test_four_ranks_and_activation_checkpointing(recipe, start, made, tmp_path):
    for log in run_ranks(
        jobs.first_iterations,
        world=4,
        folder=folder_of(tmp_path),
        recipe=recipe,
        model=str(made / start),
        reward_functions=["exact_match"],
        gradient_checkpointing=True,
    ):
        assert log["kl"] == [0.0] * 8 and log["ratios off 1"] == {"as they come": 0.0, "mixed": 0.0}


# -- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", ["scorer_adapter", "scorer"])
def test_critic_and_reward_share_a_quantized_backbone(reward, made, tmp_path):
    """With an adapter each, or the reward model as the backbone itself."""
    for log in run_ranks(
        jobs.shared_backbone,
        world=2,
        folder=folder_of(tmp_path),
        recipe="qlora",
        model=str(made / "adapter"),
        reward_model=str(made / reward),
    ):
        assert log["one engine"] and log["backbones"] == 1 and log["codes"] == 14 and log["codes stay"]
        assert log["scores before"] == log["scores after"] and len(set(log["scores before"])) > 4
        assert log["critic began as reward"] and log["critic moved"] > 1e-3
        assert log["changed"] == log["trained"] and all(".critic." in name for name in log["changed"])
        assert sum("score" in name for name in log["changed"]) == 1
        assert sum("lora_" in name for name in log["changed"]) == 28


def log_softmax_of(model, ids, attention, temperature):
    logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1].double() / temperature
    return logits - logits.logsumexp(-1, keepdim=True)


def test_gradients_of_policy_entropy_and_text_together(made, tmp_path):
    """Two passes and one backward, on two ranks, beside the formulas in plain torch."""
    logs = run_ranks(
        jobs.gradients,
        world=2,
        folder=folder_of(tmp_path),
        recipe="lossless",
        model=str(made / "base"),
        text=str(made / "text.jsonl"),
        reward_functions=["exact_match"],
    )
    model, losses = AutoModelForCausalLM.from_pretrained(made / "base"), []
    count = sum(batch["response_mask"].sum().item() for _, batch, *_ in logs) / len(logs)
    for _, batch, texts, figures, numbers in logs:
        assert numbers == [6, 7]  # of micro-batches: iteration 3, two epochs of one each
        ids, mask = batch["input_ids"], batch["response_mask"]
        logs_of_all = log_softmax_of(model, ids, batch["attention_mask"], 0.7)
        chosen = logs_of_all.gather(2, ids[:, 1:, None])[..., 0]
        ratio = (chosen - batch["old_logprobs"]).exp()
        advantages = batch["advantages"]
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)[mask].sum() / count
        entropy = -(logs_of_all.exp() * logs_of_all).sum(-1)[mask].sum() / count
        words = torch.tensor([item["input_ids"] for item in texts])
        of_words = log_softmax_of(model, words, torch.ones_like(words), 1.0)
        text = -of_words.gather(2, words[:, 1:, None]).mean()
        losses.append(policy - 0.3 * entropy + 0.7 * text)
        assert figures["entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)
        assert figures["pretraining_loss"].item() == pytest.approx(text.item(), rel=1e-4)
    (sum(losses) / len(losses)).backward()
    for name, param in model.named_parameters():
        for gradients, *_ in logs:
            torch.testing.assert_close(gradients[name], param.grad, rtol=1e-3, atol=1e-6)


AVERAGED = {
    "adapter": ("qlora", "adapter", "fp32", None),
    "all weights, small ones gathered all the time": ("zeropp", "base", "fp32", jobs.KEPT_GATHERED),
    "whole tensors on their owners": ("fp8-lm", "base", "fp32", None),
    "stock, bf16": (None, "base", "bf16", jobs.KEPT_GATHERED),
}


@pytest.mark.parametrize("case", AVERAGED)
def test_moving_average(case, made, tmp_path):
    recipe, start, dtype, overrides = AVERAGED[case]
    logs = run_ranks(
        jobs.averages,
        world=2,
        folder=folder_of(tmp_path),
        recipe=recipe,
        model=str(made / start),
        decay=0.6,
        dtype=dtype,
        overrides=overrides,
        reward_functions=["exact_match"],
    )
    for log in logs:
        assert log["updates"] == 2
        assert log["largest error"] < (1e-6 if dtype == "fp32" else 2e-2)
        assert log["distance to the weights"] > 1e-3
        assert log["frozen stay"] and log["weights come back"] and log["goes on"]
    saved = next((tmp_path / "average").glob("*model*.safetensors"))
    saved = {
        name.replace(".weight", ".policy.weight") if "lora_" in name else name: w
        for name, w in load_file(saved).items()
    }
    inside = logs[0]["inside"]
    assert saved.keys() == inside.keys()
    assert all(torch.equal(weight.float(), inside[name]) for name, weight in saved.items())


UNQUANTIZED = {"weights": {"format": "none"}, "compute": {"format": "none"}}


@pytest.mark.parametrize(
    "recipe, fields, start",
    [
        ("lossless", {"frozen": {"format": "nf4"}}, "adapter"),
        ("fp8-lm", UNQUANTIZED, "base"),
        (None, {}, "adapter"),
    ],
    ids=["stored as NF4", "whole tensors", "stock"],
)
def test_another_engine_generates_with_the_policys_weights(recipe, fields, start, made, tmp_path):
    """Nothing is sent quantized here: an engine of one's own gets exact weights, others compute with rounded ones."""
    for log in run_ranks(
        jobs.other_engine,
        world=2,
        folder=folder_of(tmp_path),
        recipe=recipe,
        fields=fields,
        model=str(made / start),
        reward_functions=["exact_match"],
        **({"lora_rank": 4} if recipe is None else {}),
    ):
        by_other, own = log["answers"]
        assert log["all there"] and by_other == own and log["codes stay"] and log["goes on"] == 4


# -- the parts --------------------------------------------------------------------------------------------------------


def test_checkpoints(tmp_path):
    for log in run_ranks(jobs.checkpoints, world=2, folder=folder_of(tmp_path)):
        assert log["nothing to resume"].startswith("FileNotFoundError: --resume: no checkpoint in")
        assert log["fresh"] == 0 and log["kept"] == ["latest", "step6", "step9"] and log["resumed"]
        assert "FileExistsError" in log["fresh again"] and "holds checkpoints of an earlier run" in log["fresh again"]
        assert log["engine fails"] == "OSError: no space left"
        assert log["after it"] == (True, ["latest", "step12", "step6", "step9"])
        assert "ZeroDivisionError" in log["one rank fails"] and log["after that"]
        assert log["at last"] == (True, ["latest", "step12", "step9"])
        said = "ValueError: --resume: {} now; give what the run began with"
        assert log["other settings"] == [
            said.format("--lr was 1e-05, is 2e-05"),
            said.format("--reward_functions was ['exact_match'], is ['gsm8k']"),
            said.format("--schedule was constant, is cosine"),
        ]
        assert log["free settings"] == "nothing raised"
        said, ran = log["code in a checkpoint"]
        assert said.startswith("UnpicklingError") and "os.makedirs" in said and not ran


def test_a_reward_function_that_fails_on_one_rank_fails_on_all(tmp_path):
    function = tmp_path / "mine.py"
    function.write_text(
        "import os\n"
        "def score(completions, fail, weight_of=None):\n"
        "    if fail[0] and os.environ['RANK'] == '1':\n"
        "        raise KeyError('no such answer')\n"
        "    return [len(completions[0]), None]\n"
    )
    logs = run_ranks(jobs.failing_rewards, world=3, folder=folder_of(tmp_path), reward=f"{function}:score")
    for rank, (raised, (scores, parts), columns) in enumerate(logs):
        own = "KeyError: 'no such answer'"
        assert raised == (own if rank == 1 else f"RuntimeError: a reward function failed on rank 1: {own}")
        # 2 x 1 + 0.5 x 1; and nothing from the first function, no match, less 3 because the response did not end.
        assert scores == [2.5, -3.0]
        assert parts["score"][0] == 1 and math.isnan(parts["score"][1]) and parts["exact_match"] == [1, 0]
        assert columns == ["answer", "fail"]


def test_what_is_held_out_counts_once():
    """Whatever the number of ranks and the size of a batch: pairs alike, texts by the tokens that are learned."""
    counts = [1, 2, 3, 5, 8, 9]
    for world in (1, 2):
        for found in run_ranks(jobs.held_out_means, world=world, counts=counts, size=2):
            for count, (passes, of_pairs, of_tokens) in zip(counts, found, strict=True):
                assert passes == math.ceil(count / (2 * world))
                assert of_pairs == pytest.approx((count - 1) / 2)
                tokens = sum(i + 1 for i in range(count))
                assert of_tokens == pytest.approx(sum(i * (i + 1) for i in range(count)) / tokens)


def test_a_reward_is_the_mean_of_the_responses_that_have_it():
    assert run_ranks(jobs.part_that_one_rank_has, world=2) == [4.0, 4.0]


@pytest.mark.parametrize("fails", [[], [0], [1, 2]])
def test_failing_together(fails):
    for rank, (said, world) in enumerate(run_ranks(jobs.together, world=3, fails=fails)):
        own = [f"KeyError: 'of rank {r}'" for r in range(world)]
        others = f"RuntimeError: counting failed on rank {fails[0]}: {own[fails[0]]}" if fails else "nothing raised"
        assert said == (own[rank] if rank in fails else others)


def test_held_out_prompts_are_answered_once_each(made, tmp_path):
    counts = [1, 4, 7]
    alone = run_ranks(
        jobs.evaluation, world=1, folder=folder_of(tmp_path, "1"), model=str(made / "base"), counts=counts
    )
    both = run_ranks(jobs.evaluation, world=2, folder=folder_of(tmp_path, "2"), model=str(made / "base"), counts=counts)
    assert both[0] == both[1] == alone[0]
    for count, (_, rows) in zip(counts, both[0]):
        assert [row["prompt"] for row in rows] == [f"{i}*{i}=" for i in range(count)]


@pytest.mark.parametrize("recipe", ["lossless", "qlora"])
def test_evaluate_has_one_model_at_a_time(recipe, tmp_path):
    make_starts(tmp_path)
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    (tmp_path / "out").mkdir()
    for raised, there in run_ranks(
        jobs.evaluated,
        world=2,
        folder=tmp_path / "out",
        config=jobs.config_of(recipe),
        models=[str(tmp_path / name) for name in ("base", "adapter", "copy")],
        rows=str(tmp_path / "prompts.jsonl"),
    ):
        assert raised == [None]
        assert there == [0, 0, 0]


def test_answers_beside_a_column_that_json_has_no_type_for(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    make_starts(tmp_path)
    (tmp_path / "out").mkdir()
    rows = [{"prompt": "1+1=", "answer": "2", "asked": datetime(2026, 1, 2)}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    where = {"folder": tmp_path / "out", "models": [str(tmp_path / "base")], "rows": str(tmp_path / "prompts.parquet")}
    ((raised, _),) = run_ranks(jobs.evaluated, world=1, config=jobs.config_of("lossless"), **where)
    assert raised == [None]
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "base.jsonl").read_text().splitlines()]
    assert row["answer"] == "2" and row["asked"] == "2026-01-02 00:00:00" and row["exact_match"] in (0, 1)
