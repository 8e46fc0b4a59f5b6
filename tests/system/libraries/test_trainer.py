"""The Hugging Face Trainer, unmodified, with the plugin switched on by its ds_config."""

import importlib.util
import shutil

import pytest
import trainer_jobs as jobs
from ranks import run_two


def test_trainer(tmp_path):
    runs = run_two(jobs.train_with_trainer, recipes=(None, "zeropp", "fp8-lm"), folder=str(tmp_path))[0]
    stock, _ = runs.pop(None)
    for recipe, (losses, report) in runs.items():
        assert len(losses) == 4 and losses == pytest.approx(stock, rel=3e-3) and losses != stock
        assert report["steps"] == 4
        assert report["per_step"]["weights_forward"]["inter"] > 0
        assert (report["per_step"]["weights_backward"]["inter"] == 0) == (recipe == "zeropp")


def test_torch_compile(tmp_path):
    """By the default backend, which fuses operations: 5 digits of eager's losses, and nothing traced after a step."""
    backend = "inductor" if shutil.which("g++") else "aot_eager"  # for a CPU it compiles C++
    eager, compiled, graphs = run_two(jobs.train_compiled, recipe="zeropp", folder=str(tmp_path), backend=backend)[0]
    assert compiled == pytest.approx(eager, rel=1e-5)
    assert graphs[0] > 1 and graphs == graphs[:1] * 4


def test_reference_of_dpo_follows_the_policy(tmp_path):
    """TRL gathers policy and reference in one context to mix them: two engines' parameters."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    within = {"zeropp": 0.01, "FP8 operands, node's copy": 0.05, "fp8-lm": 0.05}
    runs = run_two(jobs.train_with_dpo, ways=(None, *within), folder=str(tmp_path))[0]
    stock, *_ = runs.pop(None)
    for way, (losses, difference, margin) in runs.items():
        assert margin == 0, way
        assert losses == pytest.approx(stock, rel=within[way]), way
        assert difference < 0.01, way


def test_grpo_generates_with_the_plugin(tmp_path):
    """The same tokens and losses as with TRL's own gathers, without them; a field and TRL's option switch it off."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    ways = {
        "auto": {},
        "codes": {"fields": {"trl_generation": "codes"}},
        "stock": {"fields": {"trl_generation": "stock"}},
        "inside": {"inside": True},
    }
    ways |= {f"{name}, batches": {**way, **jobs.BATCHES} for name, way in ways.items()}
    for runs in run_two(jobs.train_with_grpo, ways=ways, folder=str(tmp_path)):
        numbers = runs["stock"][0]
        assert len(numbers[0]) == len(numbers[1]) == 2 and len(set(numbers[1])) == 2
        assert numbers[1] != runs["stock, batches"][0][1]
        stayed = {"auto": {"values"}, "codes": {"codes"}, "stock": {None}, "inside": {"codes"}}
        for name, (of_run, chosen, _) in runs.items():
            way, _, batches = name.partition(", ")
            assert of_run == (runs["stock, batches"][0] if batches else numbers) and set(chosen) == stayed[way], name
        assert {run[2] for run in runs.values()} == {"trl.models.utils"}, "disable() puts it back"


def test_continuous_batching_needs_weights_that_stay(tmp_path):
    """Ranks whose requests end at other tokens would wait for each other for good."""
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    for said in run_two(jobs.batches_of_gathered_weights, folder=str(tmp_path)):
        for refused in said:
            assert refused.startswith("RuntimeError: generate_batch ends on each rank with its own last token")
            assert '"trl_generation", and ds3_gather_for_generation as it was' in refused


def test_another_trl_is_left_as_it_is(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed (extra `rlhf`)")
    for (_, chosen, _), is_left, said in run_two(jobs.generate_with_another_trl, folder=str(tmp_path)):
        assert is_left and set(chosen) == {None}
        assert said.count("generates in another way than TRL 1.16") == 1


def test_what_a_trainer_reports(tmp_path):
    """A callback's module, the Trainer and the engine say the same; the logs and DeepSpeed's monitor add up to it."""
    of_rank_0, of_rank_1 = run_two(jobs.report_on_trainer, folder=str(tmp_path))
    for found in (of_rank_0, of_rank_1):
        assert found["same"] == [True] * 4 and found["tokens"] == [1, 8]
        assert found["after"]["per_step"] == found["report"]["per_step"] == found["reported"][-1]["per_step"]
        # A reporter gets what stands in the history: two entries with a loss, and the run's summary.
        formats, *entries = found["history"]
        assert formats["zeropp_fp8/weights"] == "fp8_e4m3 (block 256)"
        assert formats["zeropp_fp8/optimizer"] == "fp16, fp8_e4m3, fp16" and formats["zeropp_fp8/recipe"] == "fp8-lm"
        assert [{**entry, "step": step} for entry, step in zip(found["logs"], (2, 4, 4))] == entries
        means = [{key.partition("/")[2]: v for key, v in entry.items() if "zeropp" in key} for entry in entries]
        assert len(means[0]) > 8 and set(means[0]) == set(means[1]) and means[2] == {}
        for links, where in (({"inter"}, "mb_between_nodes"), ({"intra"}, "mb_within_nodes")):
            for n, steps in enumerate(([0, 1], [2, 3])):
                sent = [sent_until(found["reported"][step], links) for step in (steps[0] - 1, steps[-1]) if step >= 0]
                assert means[n][where] == pytest.approx((sent[-1] - sent[0] * (n > 0)) / 2 / 1e6)
        sent, stock = (sent_until(found["report"], {"inter"}, table) for table in ("per_step", "stock_per_step"))
        assert (means[0]["of_stock_between_nodes"] + means[1]["of_stock_between_nodes"]) / 2 == pytest.approx(
            sent / stock
        )
        assert means[1]["gradient_mu"] == found["report"]["gradient_scaling"]["mu"]
        said = found["said"]
        assert "ValueError: wire_report: this LlamaForCausalLM does not run with the plugin" in said["early"]
        assert said["number"] == "ValueError: wire_report takes a DeepSpeed engine, its module or a Trainer, not a int"
        assert said["saved"].startswith("ValueError: save_merged_16bit takes a DeepSpeed engine")
        assert said["two"] == "ValueError: generation: this ModuleList belongs to 2 engines; pass one of them"
        assert "does not run with the plugin (yet, or any more)" in said["ended"]
    events = of_rank_0["events"]
    assert {name.replace("nodes_", "nodes/") for name in events} == set(means[0])
    header, *lines = events["mb_between_nodes"]
    assert header == "step,mb_between_nodes" and len(lines) == 4
    by_step = [sent_until(report, {"inter"}) for report in of_rank_0["reported"]]
    written = [float(line.partition(",")[2]) for line in lines]
    assert written == pytest.approx([(b - a) / 1e6 for a, b in zip([0, *by_step], by_step)])


def sent_until(report, links, table="per_step"):
    """Bytes over `links` of all steps so far."""
    return report["steps"] * sum(kind[link] for kind in report[table].values() for link in links)


def test_what_tensorboard_and_wandb_get(tmp_path):
    """By their own readers; shares of a step once, after step 7; W&B where it is installed, without a server."""
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (extra `test`)")
    libraries = [name for name in ("tensorboard", "wandb") if importlib.util.find_spec(name)]
    found, _ = run_two(jobs.report_to_libraries, folder=str(tmp_path), libraries=libraries)
    logs = [{key: v for key, v in entry.items() if key.startswith("zeropp_fp8/")} for entry in found["logs"]]
    shares = {f"zeropp_fp8/step_share_{where}_nodes" for where in ("between", "within")}
    assert set(logs[1]) == set(logs[0]) | shares and not shares & set(logs[0])
    assert {"zeropp_fp8/mb_between_nodes", "zeropp_fp8/numerics/gradients/lowest_snr_db"} < set(logs[0])
    told = {key: value for key, value in found["formats"]["logs"].items() if key != "step"}
    assert told["zeropp_fp8/recipe"] == "zeropp" and told["zeropp_fp8/gradients_between_nodes"].startswith("int4")
    assert found["formats"]["tensorboard"].split("\n") == [f"    {key}: {value}" for key, value in told.items()]
    assert "wandb" not in libraries or told.items() <= found["formats"]["wandb"].items()
    for key, value in logs[1].items():
        written = {8: value} if key in shares else {4: logs[0][key], 8: value}
        assert found["tensorboard"][f"train/{key}"] == pytest.approx(written), key
        assert "wandb" not in libraries or found["wandb"][f"train/{key}"] == pytest.approx(value), key
        by_samples = found["monitor"][f"Train/Samples/{key}"]  # 4 a step
        if "mb_" in key:
            assert sum(by_samples.values()) / 8 == pytest.approx((logs[0][key] + value) / 2), key
        elif key in shares:
            assert list(by_samples.values()) == [pytest.approx(value)], key
