"""DPO on two gloo ranks: whole runs with each recipe, stopped and resumed; the file of the reference; refusals."""

import dataclasses
import json
import shutil

import pytest
import rlhf_dpo_jobs as jobs
import torch
from common import reference
from common.arguments import DPOArguments, check_preferences
from common.models import Start, find_start
from common.order import Order
from common.reference import key_of
from common.tokens import encode_preference
from peft import AutoPeftModelForCausalLM
from rlhf_in_turn import Run, jobs_in_turn, logprobs_of, run_in_turn, same_models
from rlhf_jobs import config_of
from rlhf_starts import TOKENIZER, folder_of, make_starts, write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

LOG_2 = torch.tensor(2.0).log().item()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    make_starts(root)
    write(root / "pairs.jsonl", [pair_of(a, b) for a in range(7) for b in range(3)])
    write(root / "four.jsonl", [pair_of(a, 1) for a in range(4)])
    write(root / "other.jsonl", [pair_of(a, 2) for a in range(4)])
    config = json.loads((root / "adapter" / "adapter_config.json").read_text())
    (root / "adapter" / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.3}))
    return root


def pair_of(a, b):
    """Completions of different lengths."""
    return {"prompt": f"{a}+{b}=", "chosen": str(a + b) * (1 + a), "rejected": f"{a - b}, no", "margin": 0.5}


# -- whole runs -------------------------------------------------------------------------------------------------------

DPO = [
    *("--steps", "4", "--save_every", "2", "--eval_every", "2", "--lora_dropout", "0.2"),
    *("--lr", "3e-3", "--schedule", "cosine", "--warmup", "1"),
]  # fmt: skip
BF16 = {"bf16": {"enabled": True}}
CASES = {
    "qlora": (config_of("qlora"), "adapter"),
    "qlora, a new adapter": (config_of("qlora"), "base"),
    "zeropp, bf16": (config_of("zeropp", BF16), "base"),
    "fp8-lm": (config_of("fp8-lm"), "base"),
    "stock": (config_of(None), "base"),
}
RESUMED = ["qlora", "zeropp, bf16", "fp8-lm", "stock"]
LOSSES = {
    "sigmoid": ["--label_smoothing", "0.1"],
    "ipo": ["--loss", "ipo"],
    "reference free": ["--reference_free"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(made, folder):
    """Return what each run came to, all of them in one launch; --out is `folder` / its name."""
    wanted = {}

    def add(name, config, model, data, held_out, *more, **how):
        argv = ["--model", str(made / model), "--data", str(data), "--max_tokens", "16"]
        argv += ["--eval_data", str(made / held_out)] if held_out else []
        wanted[name] = Run("dpo", [*argv, *more], config, folder / name, **how)

    for case, (config, model) in CASES.items():
        given = (config, model, made / "pairs.jsonl", "four.jsonl", *DPO)
        add(case, *given)
        if case in RESUMED:
            add(f"{case}, resumed", *given, "--resume", stopped=(folder / case, 2))
        if case == "qlora":
            add("lost", *given, "--resume", stopped=(folder / case, 2), without="reference*")
        if case == "stock":
            add("second", *given, "--reference_cache", str(folder / case))
    learning = ["--steps", "8", "--lr", "1e-2", "--beta", "0.5", "--sample_every", "4", "--sample_tokens", "3"]
    add("learns", config_of("qlora"), "adapter", made / "four.jsonl", "four.jsonl", *learning)
    for loss, given in LOSSES.items():
        given = ["--steps", "5", "--lr", "1e-3", "--beta", "0.3", *given]
        add(loss, config_of("lossless"), "base", made / "four.jsonl", None, *given)
    given = (config_of(None), "base", folder / "rows.jsonl", None, "--steps", "1", "--save_every", "1")
    add("once", *given, rows=(made / "four.jsonl", folder / "rows.jsonl"))
    changed = (made / "other.jsonl", folder / "rows.jsonl")
    add("other rows", *given, "--resume", rows=changed, stopped=(folder / "once", 1))
    add("refused at once", config_of(None), "nowhere", "nothing", None, "--beta", "-1")
    return run_in_turn(wanted)


@pytest.mark.parametrize("case", CASES)
def test_the_first_step_is_that_of_a_policy_which_is_its_reference(case, runs):
    """Each log-ratio is exactly 0, whatever the weights are sent, computed and stored in; later steps go down."""
    raised, log, said = runs[case]
    assert raised is None and sorted(log) == [1, 2, 3, 4]
    first = log[1]
    assert first["dpo_loss"] == LOG_2
    assert first["margin"] == first["chosen_reward"] == first["rejected_reward"] == first["accuracy"] == 0
    assert first["chosen_logprob"] < 0 > first["rejected_logprob"]
    assert log[2]["dpo_loss"] != LOG_2 and log[4]["eval_dpo_loss"] < log[2]["eval_dpo_loss"] < LOG_2
    assert log[4]["eval_margin"] > 0 and log[4]["eval_accuracy"] > 0.5
    assert said.count("log-probabilities of the reference: ") == 2 and "reference read" not in said
    assert "nvalidat" not in said


@pytest.mark.parametrize("case", RESUMED)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(case, runs, folder):
    (_, log, _), (raised, again, said) = runs[case], runs[f"{case}, resumed"]
    resumed = folder / f"{case}, resumed"
    assert raised is None and again == log and same_models(folder / case, resumed)
    assert said.count("log-probabilities of the reference read") == 2 and "pairs in" not in said
    assert find_start(str(resumed)).adapter == (str(resumed) if case == "qlora" else None)


def test_another_run_reads_the_file_of_the_reference(runs, folder):
    (_, log, _), (raised, again, said) = runs["stock"], runs["second"]
    assert raised is None and again == log and same_models(folder / "stock", folder / "second")
    assert said.count("log-probabilities of the reference read") == 2 and "pairs in" not in said
    assert not list((folder / "second").glob("reference*"))


def test_a_resumed_run_that_has_lost_the_file_asks_the_model_that_it_began_with(runs, folder):
    (_, log, _), (raised, again, said) = runs["qlora"], runs["lost"]
    assert raised is None and again == log and said.count("pairs in") == 2
    files = [folder / name / "reference_train.safetensors" for name in ("qlora", "lost")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_learning_a_few_pairs(made, runs, folder):
    raised, log, _ = runs["learns"]
    assert raised is None and log[1]["dpo_loss"] == LOG_2 and log[1]["accuracy"] == 0
    assert log[8]["dpo_loss"] < 0.2 and log[8]["accuracy"] == 1 and log[8]["margin"] > 2
    assert log[8]["eval_accuracy"] == 1 and log[8]["eval_dpo_loss"] < 0.2
    assert log[8]["chosen_reward"] > log[8]["rejected_reward"]
    prompts, samples = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (made / "four.jsonl", folder / "learns" / "samples.jsonl")
    )
    asked = [(step, row["prompt"]) for step in (4, 8) for row in prompts]
    assert [(row["step"], row["prompt"]) for row in samples] == asked


@pytest.mark.parametrize("loss", LOSSES)
def test_runs_beside_plain_torch(loss, made, runs, folder):
    """Five steps over four pairs: the losses of a loop written out with the formulas of the papers."""
    raised, log, said = runs[loss]
    assert raised is None
    assert ("pairs in" in said) == (loss != "reference free")
    assert len(list((folder / loss).glob("reference*"))) == (loss != "reference free")

    model, frozen = (AutoModelForCausalLM.from_pretrained(made / "base") for _ in range(2))
    frozen.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rows = [json.loads(line) for line in (made / "four.jsonl").read_text().splitlines()]
    order = Order(4, 0)
    for step in range(1, 6):
        losses, leads = [], []
        for index in [*order.batch(step - 1, 0, 2, 4), *order.batch(step - 1, 1, 2, 4)]:
            pair, ratios = encode_preference(rows[index], TOKENIZER, 16), []
            for name in ("chosen", "rejected"):
                ids, mask = torch.tensor([pair[name]["input_ids"]]), torch.tensor(pair[name]["response_mask"])
                ratio = logprobs_of(model, ids)[0][mask].sum()
                if loss != "reference free":
                    ratio = ratio - logprobs_of(frozen, ids)[0][mask].sum()
                ratios.append(ratio / mask.sum() if loss == "ipo" else ratio)
            lead = ratios[0] - ratios[1]
            leads.append(lead.item())
            right, wrong = 1 / (1 + (-0.3 * lead).exp()), 1 / (1 + (0.3 * lead).exp())
            losses.append({
                "sigmoid": -0.9 * right.log() - 0.1 * wrong.log(),
                "reference free": -right.log(),
                "ipo": (lead - 1 / 0.6) ** 2,
            }[loss])  # fmt: skip
        mean = torch.stack(losses).mean()
        assert log[step]["dpo_loss"] == pytest.approx(mean.item(), rel=1e-4)
        if loss != "ipo":
            assert log[step]["margin"] == pytest.approx(0.3 * sum(leads) / 8, rel=1e-3, abs=1e-5)
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    if loss == "ipo":
        assert log[1]["dpo_loss"] == pytest.approx(1 / 0.36, rel=1e-6)


# -- the reference ----------------------------------------------------------------------------------------------------

REFERENCES = {
    "21 pairs": {"model": "base", "micro": 2, "rows": "pairs"},
    "of an adapter, other micro-batches": {"model": "adapter", "micro": 3, "rows": "pairs", "lora_rank": 4},
    "fewer pairs than in a step": {"model": "base", "micro": 2, "rows": "four"},
}


@pytest.fixture(scope="module")
def references(made, tmp_path_factory):
    calls = {}
    for case, given in REFERENCES.items():
        folder = folder_of(tmp_path_factory.mktemp("references"))
        paths = {"model": str(made / given["model"]), "rows": str(made / f"{given['rows']}.jsonl")}
        calls[case] = jobs.references, {**given, **paths, "folder": folder}
    return {case: (calls[case][1], logs) for case, logs in jobs_in_turn(calls).items()}


@pytest.mark.parametrize("case", REFERENCES)
def test_log_probabilities_of_the_reference(case, references, tmp_path):
    """Of each pair, in order, whatever the batches; read again; made again for other rows; errors on all ranks."""
    given, logs = references[case]
    of = AutoPeftModelForCausalLM if "lora_rank" in given else AutoModelForCausalLM
    plain, wanted, pairs = of.from_pretrained(given["model"]).eval(), [], logs[0]["pairs"]
    assert len(pairs) == (4 if case.startswith("fewer") else 21)
    with torch.no_grad():
        for pair in pairs:
            for item in (pair["chosen"], pair["rejected"]):
                every = logprobs_of(plain, torch.tensor([item["input_ids"]]))[0]
                wanted.append(every[torch.tensor(item["response_mask"])].sum().item())
    folder = given["folder"]
    path = f"{folder}/deep/reference.safetensors"
    for rank, log in enumerate(logs):
        is_main = rank == 0
        values, said = log["first"]
        assert torch.tensor(values).flatten().tolist() == pytest.approx(wanted, rel=1e-5)
        assert is_main == (f"log-probabilities of the reference: {len(pairs)} pairs in" in said)
        again, said = log["again"]
        assert again == values and "pairs in" not in said
        assert is_main == (f"{path}: log-probabilities of the reference read" in said)
        fewer, said = log["fewer"]
        assert torch.tensor(fewer).flatten().tolist() == pytest.approx(wanted[:6], rel=1e-5)
        assert is_main == (f"{path} is of other rows, of another model or of other number formats" in said)
        assert is_main == ("log-probabilities of the reference: 3 pairs in" in said)
        assert log["files"] == ["reference.safetensors"]
        other = "" if is_main else f"RuntimeError: reading {path} failed on rank 0: "
        assert log["broken"].startswith(f"{other}SafetensorError: ")
        other = "" if is_main else f"RuntimeError: writing {folder}/ds_config0.json/r failed on rank 0: "
        assert log["nowhere"].startswith(f"{other}FileExistsError: ")


def test_what_the_key_of_the_reference_depends_on(made, tmp_path, monkeypatch):
    """Tokens, masks, the model's and the adapter's weights, formats; not on where they lie, nor on other settings."""
    rows = [json.loads(line) for line in (made / "four.jsonl").read_text().splitlines()]
    pairs = [encode_preference(row, TOKENIZER, 16) for row in rows]
    base, adapter = find_start(str(made / "base")), find_start(str(made / "adapter"))
    stock = config_of(None)
    same = key_of(pairs, base, stock, lora=False)
    assert key_of([encode_preference(row, TOKENIZER, 99) for row in rows], base, stock, lora=False) == same
    assert key_of([{**pair, "margin": 2.0} for pair in pairs], base, stock, lora=False) == same
    assert key_of(pairs, base, {**stock, "gradient_clipping": 3.0}, lora=False) == same
    moved = shutil.copytree(made / "base", tmp_path / "moved")
    (moved / "reference_train.safetensors").write_text("of another run")
    assert key_of(pairs, find_start(str(moved)), stock, lora=False) == same

    others = [
        key_of(pairs[:3], base, stock, lora=False),
        key_of(pairs[::-1], base, stock, lora=False),
        key_of(pairs, base, stock, lora=True),
        key_of(pairs, adapter, stock, lora=False),
        key_of(pairs, base, {**stock, **BF16}, lora=False),
    ]
    for part in ("input_ids", "response_mask"):
        changed = json.loads(json.dumps(pairs))
        changed[2]["rejected"][part][-1] ^= 1
        others.append(key_of(changed, base, stock, lora=False))
    split = json.loads(json.dumps(pairs))  # the same tokens one after the other, cut elsewhere
    split[0]["rejected"]["input_ids"].insert(0, split[0]["chosen"]["input_ids"].pop())
    split[0]["rejected"]["response_mask"].insert(0, split[0]["chosen"]["response_mask"].pop())
    others.append(key_of(split, base, stock, lora=False))
    weights = load_file(moved / "model.safetensors")
    weights["lm_head.weight"][5, 5] += 1
    save_file(weights, moved / "model.safetensors", metadata={"format": "pt"})
    others.append(key_of(pairs, find_start(str(moved)), stock, lora=False))
    moved_adapter = shutil.copytree(made / "adapter", tmp_path / "moved_adapter")
    weights = load_file(moved_adapter / "adapter_model.safetensors")
    next(iter(weights.values()))[0] += 1
    save_file(weights, moved_adapter / "adapter_model.safetensors")
    others.append(key_of(pairs, find_start(str(moved_adapter)), stock, lora=False))
    config = json.loads((moved_adapter / "adapter_config.json").read_text())
    (moved_adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4}))
    others.append(key_of(pairs, find_start(str(moved_adapter)), stock, lora=False))
    for commit in ("1a", "2b"):
        monkeypatch.setattr(reference, "cached_file", lambda name, file, at=commit: f"/cache/snapshots/{at}/{file}")
        others += [key_of(pairs, find_start(name), stock, lora=False) for name in ("someone/model", "someone/other")]
    assert len({same, *others}) == 1 + len(others)


def test_formats_and_ranks_are_in_the_key_where_weights_are_rounded(made, monkeypatch):
    base, keys = find_start(str(made / "base")), {}
    for world in (2, 4):
        monkeypatch.setattr(reference.dist, "get_world_size", lambda world=world: world)
        for recipe in ("lossless", "zeropp", "fp8-lm", "qlora"):
            keys[recipe, world] = key_of([], base, config_of(recipe), lora=False)
    assert keys["lossless", 2] == keys["lossless", 4] == key_of([], base, config_of(None), lora=False)
    assert len(set(keys.values())) == 7


@pytest.mark.parametrize("place", [0, 1 / 3, 1 / 2, 0.9, 1])
def test_a_change_in_a_large_file_is_seen_anywhere(place, tmp_path):
    """Half of 8 MiB is looked at, in places; what changes is as long as the way from one place to the next."""
    path, content, length = tmp_path / "model.safetensors", bytearray(2**23), 2**23 // reference.PLACES
    assert len(content) / 2 == reference.PLACES * reference.BYTES

    def key():
        path.write_bytes(content)
        return key_of([], Start(str(tmp_path)), config_of(None), lora=False)

    before = key()
    start = min(int(place * len(content)), len(content) - length)
    content[start : start + length] = b"\1" * length
    assert key() != before


# -- what is refused --------------------------------------------------------------------------------------------------


def test_a_loss_that_does_not_exist():
    right = DPOArguments(model="m", out="o", deepspeed_config="c", data=["d"])
    check_preferences(right)
    with pytest.raises(ValueError) as raised:
        check_preferences(dataclasses.replace(right, label_smoothing=0.1, loss="ipo"))
    said = "--label_smoothing 0.1 has no meaning with --loss ipo: leave it out, or give --loss sigmoid"
    assert str(raised.value) == said


def test_runs_that_are_refused(runs):
    """Before anything is loaded; and rows that are not those which the run began with."""
    assert runs["once"][0] is None
    assert runs["refused at once"][0] == "ArgumentError: argument --beta: -1: give a finite number above 0"
    raised = runs["other rows"][0]
    assert raised.startswith("ValueError: --resume: the hash of rows and model was ")
    assert raised.endswith("; give what the run began with")
