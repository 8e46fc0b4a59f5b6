"""Models of Hugging Face in the plan, which recipe is recommended, and the ds_config that is written."""

import json
import re
from dataclasses import replace

import pytest
import transformers

from zeropp_fp8.config import RECIPES, resolve
from zeropp_fp8.plan import H200, METHODS, V100, Cluster, Job, Lora, Model, PlanError, estimate
from zeropp_fp8.plan.__main__ import main
from zeropp_fp8.plan.hugging_face import model_of
from zeropp_fp8.plan.recommend import FULL, LORA, PCIE, ds_config_of, recommend

SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
LLAMA = transformers.LlamaConfig(**SMALL, intermediate_size=128, num_attention_heads=4)
TIED = transformers.Qwen2Config(**SMALL, intermediate_size=128, num_attention_heads=4, tie_word_embeddings=True)
T5 = transformers.T5Config(
    d_model=64, num_layers=3, num_decoder_layers=2, vocab_size=97, d_ff=128, num_heads=4, architectures=["T5Model"]
)


@pytest.mark.parametrize(
    ("config", "layers", "matrices", "embeddings", "own"),
    [
        (LLAMA, 3, 7, 2, transformers.LlamaForCausalLM),
        (TIED, 3, 7, 1, transformers.Qwen2ForCausalLM),
        (T5, 5, 8, 1, transformers.T5Model),  # decoder layers have four matrices more
    ],
)
def test_a_model_is_counted_as_it_is(config, layers, matrices, embeddings, own, tmp_path):
    config.save_pretrained(tmp_path)
    model = model_of(tmp_path)
    assert model == model_of(str(tmp_path / "config.json"))
    assert model.parameters == sum(p.numel() for p in own(config).parameters())
    assert (model.hidden, model.vocabulary) == (64, 97)
    assert (model.layers, model.tensors_per_layer, model.embeddings) == (layers, matrices, embeddings)


def test_one_embedding_is_multiplied_with_as_often_as_two():
    """A tied embedding is read once and multiplied with once; the blocks are the same."""
    blocks, table = 12 * 64**2 * 3, 97 * 64
    one, two = Model(blocks + table, 64, 3, 97, embeddings=1), Model(blocks + 2 * table, 64, 3, 97)
    assert one.matrix_flop(10) == two.matrix_flop(10) == 2 * 10 * (blocks + table)
    assert one.block_parameters == two.block_parameters == blocks / 3
    assert (one.units, one.tensors) == (4, 22) and (two.units, two.tensors) == (5, 23)


def test_what_is_no_model(tmp_path, capsys):
    for config, message in (
        ({"model_type": "resnet"}, "is no transformer of equal blocks: its config has no"),
        ({"model_type": "llama", "hidden_size": "many"}, "has no config.json that transformers reads"),
        ({}, "has no config.json that transformers reads"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(PlanError, match=message):
            model_of(tmp_path)
    for wrong in (["--model", "x", "--params", "7e9"], ["--write", "x", "--check"]):
        with pytest.raises(SystemExit):
            main(wrong)
    error = capsys.readouterr().err
    assert "--params does not go with --model" in error and "--write needs a job" in error


MODEL = Model.from_parameters(7e9)
FAST = Cluster(8, 8, 3200)
FULL_JOB = Job(MODEL, Cluster(8, 8, 25), 2048)


def test_every_recipe_is_a_candidate_or_left_out_for_a_reason():
    assert {*FULL, *LORA, PCIE} - {"stock"} == set(RECIPES) - {"mxfp8", "fp8-lm-o2"}


def test_the_most_careful_of_what_is_as_fast():
    """By the estimates themselves: nothing before it is as fast, nothing at all is faster by more than the margin."""
    for job in (FULL_JOB, Job(MODEL, FAST, 2**17), Job(MODEL, FAST, 2048, lora=Lora(16)), Job(MODEL, Cluster(1, 8), 8)):
        advice = recommend(job, H200)
        steps = {one.method: one.step_s for one in advice.estimates}
        before = list(steps)[: list(steps).index(advice.recipe)]
        assert steps[advice.recipe] <= 1.15 * min(steps.values())
        assert all(steps[name] > 1.15 * min(steps.values()) for name in before)
        assert (PCIE in steps) == (job.cluster.nodes == 1)
    assert recommend(Job(MODEL, FAST, 2**17, checkpointing=True), H200).recipe == "stock"
    assert recommend(FULL_JOB, H200).recipe not in ("stock", "lossless")


def test_what_does_not_fit_is_not_recommended():
    advice = recommend(FULL_JOB, H200)
    peaks = {one.method: one.memory.peak for one in advice.estimates}
    tight = recommend(FULL_JOB, H200, (peaks[advice.recipe] + min(peaks.values())) / 2)
    assert peaks[tight.recipe] < peaks[advice.recipe]
    nothing = recommend(FULL_JOB, H200, 1e6)
    assert peaks[nothing.recipe] == min(peaks.values()) and "the least of all" in nothing.text


def test_nothing_is_written_that_does_not_fit(tmp_path, capsys):
    path = tmp_path / "ds_config.json"
    with pytest.raises(SystemExit) as ended:
        main(["--gpu-gb", "1", "--write", str(path)])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and not path.exists()
    assert error.startswith("plan: nothing fits into ") and f"{path} is not written" in error


@pytest.mark.parametrize("words", [["--nodes", "8"], ["--nodes", "1"], ["--methods", "stock"], ["--rlhf"]])
def test_the_recommended_method_is_in_the_table(words, capsys):
    main(["--params", "7e9", "--ranks-per-node", "8", "--gbit", "100", "--tokens", "2048", *words])
    text = capsys.readouterr().out
    recipe, milliseconds, unit = re.search(r"recommended: (\S+), (\S+) ms (an iteration|a step)", text).groups()
    assert (unit == "an iteration") == ("--rlhf" in words)
    (row,) = re.findall(rf"^{recipe} +(\S+) ", text, flags=re.M)
    assert float(row) == pytest.approx(float(milliseconds), abs=0.5)


def test_fp8_is_for_gpus_that_have_it():
    old = Job(MODEL, Cluster(1, 8), 8192)
    assert not any("fp8" in one.method for one in recommend(old, V100).estimates)
    assert any("fp8" in one.method for one in recommend(old, H200).estimates)


def test_one_node_without_a_fast_link():
    slow = type(H200)(intra_gbs=8, memory_gbs=4300, achieved_tflops=362)
    job = Job(MODEL, Cluster(1, 4), 2048)
    advice = recommend(job, slow)
    assert advice.recipe == PCIE
    alone = Job(MODEL, Cluster(4, 1, 64), 2048)
    by_hand = estimate(METHODS[PCIE], alone, type(H200)(8, 4300, 362, link_efficiency=1.0))
    pcie = advice.estimates[-1]
    assert pcie.step_s == by_hand.step_s and by_hand.bound == "wire between nodes"
    assert (pcie.inter_bytes, pcie.intra_bytes, pcie.bound) == (0, by_hand.inter_bytes, "wire in the node")
    bounded = recommend(job, slow, 100e9).estimates[-1].memory
    assert 0 < bounded.secondary < advice.estimates[-1].memory.secondary or bounded.peak <= 100e9


def test_what_is_written_trains(tmp_path, capsys):
    """The recipe in it is the one that is printed; DeepSpeed and the plugin take it."""
    path = tmp_path / "ds_config.json"
    main(["--gbit", "25", "--tokens", "4096", "--sequence", "1024", "--micro-batches", "3", "--write", str(path)])
    written = json.loads(path.read_text())
    recipe = resolve(written).recipe
    assert f"recommended: {recipe}," in capsys.readouterr().out
    assert (written["train_micro_batch_size_per_gpu"], written["gradient_accumulation_steps"]) == (4, 3)
    assert resolve(ds_config_of("stock", FULL_JOB)) is None
    with pytest.raises(PlanError, match="fsdp2 is no recipe; recipes are lossless, zeropp,"):
        ds_config_of("fsdp2", FULL_JOB)
    with pytest.raises(SystemExit):
        main(["--write", "/dev/full"])
    assert "plan: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--lora-rank", "8"], ["--rlhf", "--response", "512"], ["--lora-rank", "8", "--rlhf"]]
)
def test_what_is_written_for_lora_and_rlhf(tmp_path, capsys, words):
    path = tmp_path / "ds_config.json"
    main(["--gbit", "10", "--tokens", "2048", "--sequence", "1024", *words, "--write", str(path)])
    resolved = resolve(json.loads(path.read_text()))
    recipe = "stock" if resolved is None else resolved.recipe
    assert f"recommended: {recipe}," in capsys.readouterr().out


def test_what_copies_take_is_said():
    """Of differences 16 bits of each parameter, cut between the ranks of a node."""
    job = Job(Model.from_parameters(7e9), Cluster(4, 8, 25), 2048)
    text = recommend(job, H200).text
    gib = 2 * job.model.parameters / 8 / 2**30
    assert text.endswith(f"; copies of the weights in 16 bits a parameter take {gib:.2f} GiB a GPU"), text
    assert "copies" not in recommend(replace(job, cluster=Cluster(1, 8)), H200).text
