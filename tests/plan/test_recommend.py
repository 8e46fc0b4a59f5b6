"""Models of Hugging Face in the plan, which recipe is recommended, and the ds_config that is written."""

import json
import random
import re
import shlex
from collections import defaultdict
from dataclasses import replace

import pytest
import transformers

from benchmarks.harness import seeds
from benchmarks.harness.results import finished_result
from benchmarks.harness.wire_runs import IN_TREE, REFERENCES, groups_of
from benchmarks.plan_fit import rlhf
from benchmarks.report.recommended import SITUATIONS
from tests.places import ROOT
from zeropp_fp8.config import RECIPES, resolve
from zeropp_fp8.plan import H100, H200, METHODS, V100, Cluster, Job, Lora, Model, PlanError, estimate
from zeropp_fp8.plan.__main__ import main
from zeropp_fp8.plan.hugging_face import model_of
from zeropp_fp8.plan.recommend import EXACT, FULL, LORA, LOSS, PCIE, SAME, TARGET, ds_config_of, recommend

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
    with pytest.raises(SystemExit):
        main(["--model", "x", "--params", "7e9"])
    assert "--params does not go with --model" in capsys.readouterr().err


MODEL = Model.from_parameters(7e9)
FAST = Cluster(8, 8, 3200)
FULL_JOB = Job(MODEL, Cluster(8, 8, 25), 2048)


STUDIED = {"mxfp8"}  # recipes that are never recommended, whose loss nobody has measured; the README says "study"


def test_every_recipe_has_a_loss_or_is_never_recommended():
    unknown = {*RECIPES} - {*EXACT, *LOSS} - STUDIED
    assert not unknown, f"{unknown}: measure what they cost, for LOSS of plan/recommend.py, or add them to STUDIED"
    assert {*FULL, *LORA, PCIE} == {*EXACT, *LOSS} == {*RECIPES, "stock"} - STUDIED
    assert [*LOSS.values()] == sorted(LOSS.values()), "the most exact first"


def random_jobs(seed, count):
    chosen = random.Random(seed)
    for _ in range(count):
        cluster = Cluster(chosen.choice((1, 1, 2, 8, 32)), chosen.choice((1, 2, 8)), 10 ** chosen.uniform(0.5, 3.8))
        lora = Lora(16) if chosen.random() < 0.3 else None
        tokens = 512 << chosen.randrange(7)
        job = Job(Model.from_parameters(10 ** chosen.uniform(9, 10.8)), cluster, tokens, min(tokens, 2048), lora=lora)
        job = replace(job, learning_rate=10 ** chosen.uniform(-7, -3))
        hardware = replace(chosen.choice((H200, H100, V100)), intra_gbs=10 ** chosen.uniform(0.7, 2.4))
        yield job, hardware, chosen.choice((None, 24e9, 80e9, 140e9))


def test_a_recipe_that_rounds_is_worth_it():
    """Of any job: each is faster by the margin than all that are more exact and fit; where it has cost some loss it is
    named, and recommended only where none that learns as stock does fits."""
    seen = set()
    for job, hardware, gpu_bytes in random_jobs(0, 300):
        advice = recommend(job, hardware, gpu_bytes)
        names = [one.method for one in advice.estimates]
        assert names == [name for name in (*EXACT, *LOSS) if name in names] and advice.recipe in names
        fits = [one for one in advice.estimates if gpu_bytes is None or one.memory.peak <= gpu_bytes]
        assert advice.fits == bool(fits)
        if not fits:
            continue
        of_name = {one.method: one for one in fits}
        known = [name for name in of_name if LOSS.get(name, 0) <= TARGET]
        candidates = known or list(of_name)
        assert advice.recipe in candidates
        chosen = of_name[advice.recipe].step_s
        for name in candidates[: candidates.index(advice.recipe)]:
            assert chosen * (1 + SAME) <= of_name[name].step_s
        for name, step in ((name, of_name[name].step_s) for name in candidates):
            more_exact = [of_name[other].step_s for other in candidates[: candidates.index(name)]]
            if more_exact and step * (1 + SAME) <= min(more_exact):
                assert chosen <= step, f"{name} is worth it too"
        for one in advice.offered:
            assert one.step_s * (1 + SAME) <= chosen and one.method in advice.text
        steps = [one.step_s for one in fits]
        passed_over = [one for one in advice.estimates if one.step_s < chosen and one not in advice.offered]
        assert ("no other that fits and rounds more is 15% faster" in advice.text) == bool(passed_over)
        for one in (one for one in passed_over if one in fits):
            assert one.step_s * (1 + SAME) > min(steps[: fits.index(one)])
        sends_less = advice.recipe in EXACT and "wire" not in of_name[advice.recipe].bound
        assert ("nothing to gain" in advice.text) >= sends_less
        seen |= {advice.recipe, *(one.method for one in advice.offered)}
    assert seen >= {"stock", "lossless", "zeropp", "zeropp-exact", "zeropp-4bit", PCIE, "qlora"}, seen


def test_nothing_is_said_of_what_has_nothing_to_do():
    def named(cluster, lora=None, hardware=H200):
        return [one.method for one in recommend(Job(MODEL, cluster, 2048, lora=lora), hardware).estimates]

    assert named(Cluster(1, 1)) == ["stock", "lossless", "fp8-lm-o1", "fp8-lm-o2"]
    assert named(Cluster(1, 1), Lora(16)) == ["stock", "lossless", "qlora"]
    assert "zeropp-exact" not in named(Cluster(1, 8)) and PCIE in named(Cluster(1, 8))
    assert {*named(Cluster(2, 8, 100))} == {*FULL} and {*named(Cluster(2, 1, 100), Lora(16))} == {*LORA}
    assert not any("fp8" in name for name in named(Cluster(2, 8, 100), hardware=V100))


# What README.md and docs/recipes.md say of when to take a recipe: recommended, or named as what gains more.
SAID = {
    "lossless": ("one node of 8 GPUs, NVLink", "recommended"),
    "zeropp-exact": ("8 nodes of 8, 800 Gbit/s", "recommended"),
    "zeropp": ("2 nodes of 8, 25 Gbit/s, 1,024 tokens, 14 GiB", "recommended"),
    "zeropp-pcie": ("one node of 4 GPUs, PCIe (8 GB/s per GPU)", "recommended"),
    "fp8-lm-o1": ("8 nodes of 8, 400 Gbit/s, 8,192 tokens", "named"),
    "fp8-lm-o2": ("one GPU of 80 GiB", "recommended"),
    "fp8-lm": ("2 nodes of 8, 25 Gbit/s, 1,024 tokens, 9.5 GiB", "recommended"),
    "fp8-lm-zeropp": ("2 nodes of 8, 25 Gbit/s, 1,024 tokens, 12 GiB", "recommended"),
    "qlora": ("LoRA of 13 B, one GPU of 24 GiB", "recommended"),
}


def test_the_readme_says_what_the_plan_says():
    """Each recipe of its table, in a situation like the one that it says; the page's table is made of the same."""
    table = dict(re.findall(r"^\| `([\w-]+)` \| .* \| (.+) \|$", (ROOT / "README.md").read_text(), flags=re.M))
    unsaid = {*RECIPES} - {*SAID, *STUDIED, "zeropp-4bit"}
    assert table.keys() == RECIPES.keys() and not unsaid, f"{unsaid}: add a situation to SAID, or them to STUDIED"
    assert all("study" in table[name] for name in STUDIED) and not STUDIED & {*SAID, *EXACT, *LOSS}
    situations = {situation.words: situation for situation in SITUATIONS}
    for recipe, (words, how) in SAID.items():
        advice = situations[words].advice
        named = [one.method for one in advice.offered]
        assert (advice.recipe == recipe) if how == "recommended" else (recipe in named), (recipe, advice.text)
        costs = LOSS.get(recipe, 0) > TARGET
        assert (how == "recommended") or costs
    assert [recipe for recipe, when in table.items() if "memory" in when and "limit" in when] == [
        *("fp8-lm-o2", "fp8-lm", "qlora")
    ]
    said = [situation.advice.recipe for situation in SITUATIONS]
    assert not {"zeropp-4bit", "fp8-lm-o1"} & set(said), "they are named, never recommended there"


PLANS = {
    " ".join(found.replace("\\\n", " ").split())
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))
    for found in re.findall(r"^python -m zeropp_fp8 plan ((?:.*\\\n)*.*)", page.read_text(), flags=re.M)
}


@pytest.mark.parametrize("command", sorted(PLANS))
def test_the_commands_of_the_pages_recommend_what_the_pages_do(command, capsys):
    """None of them recommends what has cost some loss."""
    main(shlex.split(command))
    said = re.search(r"^recommended: (stock|[\w-]+)", capsys.readouterr().out, flags=re.M)[1]
    assert LOSS.get(said, 0) <= TARGET and len(PLANS) > 2
    if "--gbit 100 --tokens 2048" in command and "lora" not in command:
        assert said == "zeropp-exact"


# Rounded by at least as much, or by the same formats.
SAME_ROUNDING = {"fp8-lm-o2": "fp8-lm-o1", "fp8-lm-zeropp": "fp8-lm", "qlora": "nf4-dq"}
SAME_ROUNDING |= dict.fromkeys(("zeropp-pcie", "zeropp-exact"), "zeropp")


def measured_losses():
    """{recipe: [(percent above the reference, runs)]} of every group of runs that can be compared."""
    found = defaultdict(list)
    wire = [finished_result(path) for path in sorted((ROOT / "benchmarks/results/wire_convergence").glob("*.json"))]
    large = [row for row in wire if (row["settings"]["size"], row["settings"]["case"]) == ("100m", "pretrain")]
    groups = [group["comparison"] for group in groups_of(wire)]
    groups.append(seeds.compare([row for row in large if row["run"] != IN_TREE], REFERENCES))
    for line in (line for group in groups for line in group if "percent" in line):
        found[line["run"]].append((line["percent"], line["runs"]))
    for name in ("fp8_lm_convergence/h200-1-local", "fp8_lm_convergence/h200-4-nvlink", "lora_quality/h200-1-local"):
        for line in finished_result(ROOT / f"benchmarks/results/{name}.json")["comparison"]:
            found[line["run"]].append((line["percent_above_bf16"], len(line["seeds"])))
    return found


def test_losses_are_those_that_were_measured():
    """The largest mean of a group of three runs or more above its reference; where there is none, the largest."""
    found = measured_losses()
    for recipe, percent in LOSS.items():
        of_it = found.get(SAME_ROUNDING.get(recipe, recipe))
        largest = max(each for each, runs in of_it if runs >= 3 or all(runs < 3 for _, runs in of_it))
        assert percent == pytest.approx(max(0.0, largest), abs=0.051), (recipe, of_it)


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


@pytest.mark.parametrize(
    ("main", "words"),
    [(main, ["--nodes", "8"]), (main, ["--nodes", "1"]), (main, ["--methods", "stock"]), (rlhf.main, [])],
)
def test_the_recommended_method_is_in_the_table(main, words, capsys):
    main(["--params", "7e9", "--ranks-per-node", "8", "--gbit", "100", "--tokens", "2048", *words])
    text = capsys.readouterr().out
    recipe, milliseconds, unit = re.search(r"recommended: (\S+), (\S+) ms per (iteration|step)", text).groups()
    assert (unit == "iteration") == (main is rlhf.main)
    (row,) = re.findall(rf"^{recipe} +(\S+) ", text, flags=re.M)
    assert float(row) == pytest.approx(float(milliseconds), abs=0.5)


def test_some_methods(capsys):
    """Their speed-up is over stock, also where it is not among them."""
    speeds = []
    for methods in ("stock,zeropp,zeropp-4bit", " zeropp, zeropp-4bit"):
        main(["--params", "7e9", "--methods", methods])
        speeds.append(dict(re.findall(r"^(zeropp\S*) .* ([\d.]+) x", capsys.readouterr().out, flags=re.M)))
    assert speeds[0] == speeds[1] and float(speeds[0]["zeropp-4bit"]) > 1.5


def test_fp8_is_for_gpus_that_have_it():
    old = Job(MODEL, Cluster(1, 8), 8192)
    assert not any("fp8" in one.method for one in recommend(old, V100).estimates)
    assert any("fp8" in one.method for one in recommend(old, H200).estimates)


def test_one_node_without_a_fast_link():
    slow = type(H200)(intra_gbs=8, memory_gbs=4300, achieved_tflops=362)
    job = Job(MODEL, Cluster(1, 4), 2048)
    advice = recommend(job, slow)
    assert advice.recipe == PCIE
    (pcie,) = (one for one in advice.estimates if one.method == PCIE)
    assert (pcie.inter_bytes, pcie.bound) == (0, "wire in the node")
    # As nodes of one GPU each, which send at that rate: but for the latency of their hops.
    alone = Job(MODEL, Cluster(4, 1, 64), 2048)
    by_hand = estimate(METHODS[PCIE], alone, type(H200)(8, 4300, 362, link_efficiency=1.0))
    assert pcie.intra_bytes == by_hand.inter_bytes and pcie.step_s == pytest.approx(by_hand.step_s, rel=5e-3)
    (bounded,) = (one.memory for one in recommend(job, slow, 100e9).estimates if one.method == PCIE)
    assert 0 < bounded.secondary < pcie.memory.secondary or bounded.peak <= 100e9


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


SLOW_NODE = ["--params", "7e9", "--nodes", "1", "--ranks-per-node", "4", "--gpu-gb", "80", "--intra-gbs", "8"]


@pytest.mark.parametrize(("gb", "written"), [("0", 0.0), ("1.5", 1.5), ("auto", "auto")])
def test_memory_of_copies_bounds_what_is_recommended(tmp_path, capsys, gb, written):
    """Without room for copies the recipe is recommended as it then is, and so it is written."""
    path = tmp_path / "ds_config.json"
    main([*SLOW_NODE, "--methods", "stock", "--secondary-gb", gb, "--write", str(path)])
    text = capsys.readouterr().out
    assert "recommended: zeropp-pcie" in text and ("copies of the weights" in text) == (gb != "0")
    config = resolve(json.loads(path.read_text()))
    assert (config.recipe, config.secondary.memory_gb) == ("zeropp-pcie", written)
    job = Job(MODEL, Cluster(1, 4), 2048)
    assert "secondary" not in ds_config_of("lossless", job, 1e9)["zeropp_fp8"]
    for recipe in RECIPES:
        resolve(ds_config_of(recipe, job, 1e9))
    if gb != "auto":
        (own,) = (one for one in recommend(job, H200, 80e9, copies=float(gb) * 1e9).estimates if one.method == PCIE)
        assert own.memory.secondary == float(gb) * 1e9


def test_a_picture_that_cannot_be_drawn_leaves_no_ds_config(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "ds_config.json"
    with pytest.raises(SystemExit) as ended:
        main([*SLOW_NODE, "--write", str(path), "--picture", str(tmp_path / "p.png")])
    assert ended.value.code == 2 and "there is one node; give --nodes" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("main", "words"),
    [(main, ["--lora-rank", "8"]), (rlhf.main, ["--response", "512"]), (rlhf.main, ["--lora-rank", "8"])],
)
def test_what_is_written_for_lora_and_rlhf(tmp_path, capsys, main, words):
    path = tmp_path / "ds_config.json"
    main(["--gbit", "10", "--tokens", "2048", "--sequence", "1024", *words, "--write", str(path)])
    resolved = resolve(json.loads(path.read_text()))
    recipe = "stock" if resolved is None else resolved.recipe
    assert f"recommended: {recipe}," in capsys.readouterr().out


def test_what_copies_take_is_said():
    """Of differences 16 bits of each parameter, cut between the ranks of a node; and the learning rate they are of."""
    job = Job(Model.from_parameters(7e9), Cluster(4, 8, 25), 2048)
    text = recommend(job, H200).text.partition("\n")[0]
    gib = 2 * job.model.parameters / 8 / 2**30
    said = f"; copies of the weights in 16 bits per parameter take {gib:.2f} GiB per GPU"
    assert text.endswith(f"{said}; with AdamW at a learning rate of 1e-05 (--lr)"), text
    alone = recommend(replace(job, cluster=Cluster(1, 8)), H200).text
    assert "copies" not in alone and "--lr" not in alone
