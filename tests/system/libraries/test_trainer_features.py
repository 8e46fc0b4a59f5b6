"""Features of the Hugging Face Trainer, beside stock DeepSpeed: `lossless` has its bits."""

import pytest
import torch
import trainer_feature_jobs as jobs
from ranks import run_two

WAYS = (None, "lossless", "zeropp")


def test_features(tmp_path):
    """Save, resume, evaluate, the best model at the end, accumulation, tied embeddings, a ds_config full of "auto"."""
    runs = run_two(jobs.run_with_features, ways=WAYS, folder=str(tmp_path))[0]
    stock = runs[None]
    for way, run in runs.items():
        assert run["filled in"] == FILLED_IN
        assert len(run["losses"]) == 6 and len(run["evaluated"]) == 3
        assert run["resumed"] == run["losses"] and run["resumed, evaluated"] == run["evaluated"], way
        assert run["best"] == ("checkpoint-2", max(run["evaluated"])) and run["evaluated"][0] == max(run["evaluated"])
        assert run["of the best"] == run["evaluated"][0], way
        # zeropp evaluates with weights that were rounded on the way, and saves the exact ones
        assert run["saved"] == pytest.approx(run["of the best"], rel=2e-3 if way == "zeropp" else 1e-6)
        for what in ("losses", "evaluated"):
            assert run[what] == pytest.approx(stock[what], rel=5e-3) if way == "zeropp" else run[what] == stock[what]
        assert (run["losses"] == stock["losses"]) == (way != "zeropp")
    for what in ("weights", "weights of the best"):
        ours, theirs = runs["lossless"][what], stock[what]
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(stock["weights"][NAME], stock["weights of the best"][NAME])
    assert runs["lossless"]["predicted"] == stock["predicted"]


NAME = "model.layers.0.mlp.up_proj.weight"
FILLED_IN = {
    "accumulation": 2,
    "micro": 2,
    "clipping": 1.0,
    "weight_decay": 0.01,
    "scheduler": "WarmupDecayLR",
    "prefetch": 3686,
}  # 0.9 x 64 x 64


def test_adapters(tmp_path):
    """LoRA in bf16 that accumulates: save, resume, evaluate, the best at the end; on stored weights too."""
    runs = run_two(jobs.train_adapters, ways=(*WAYS, "qlora"), folder=str(tmp_path))[0]
    stock = runs[None]
    assert runs["lossless"] == {**stock, "files": runs["lossless"]["files"]}
    for way, run in runs.items():
        assert len(set(run["losses"])) == 4 and run["resumed"] == (run["losses"], run["evaluated"]), way
        assert run["best"] == ("checkpoint-2", run["evaluated"][0]) and run["evaluated"][0] > run["evaluated"][1], way
        assert run["losses"] == pytest.approx(stock["losses"], rel=0.01) and run["dtype"] == {torch.bfloat16}
        assert {"adapter_model.safetensors", "global_step2"} < run["files"] and "model.safetensors" not in run["files"]
        assert (run["losses"] == stock["losses"]) == (way in (None, "lossless"))


def test_evaluating_alone(tmp_path):
    runs = run_two(jobs.evaluate_alone, ways=WAYS, folder=str(tmp_path))[0]
    assert runs["lossless"] == runs[None] and runs["zeropp"] == pytest.approx(runs[None], rel=1e-3)
    assert runs["zeropp"] != runs[None]


def test_activation_checkpointing(tmp_path):
    """Both kinds give the losses of a run without, to the bit; with LoRA too."""
    runs = run_two(jobs.checkpoint_activations, ways=WAYS, folder=str(tmp_path))[0]
    for (way, lora), by_kind in runs.items():
        stock = runs[None, lora][None]
        assert len(stock) == 3 and len(set(stock)) == 3
        for losses in by_kind.values():
            assert losses == by_kind[None], (way, lora)
            assert losses == pytest.approx(stock, rel=5e-3) if way == "zeropp" else losses == stock, (way, lora)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    return run_two(jobs.train_kinds, ways=WAYS, folder=str(tmp_path_factory.mktemp("kinds")))[0]


@pytest.mark.parametrize("kind", jobs.KINDS_OF_MODELS)
def test_kinds_of_models(kinds, kind):
    """Encoder, vision, vision and language, tied embeddings with dropout, experts; Seq2SeqTrainer generates too."""
    runs = kinds[kind]
    losses, evaluated, _ = runs[None]
    assert len(set(losses)) == 4 and evaluated < 10
    assert runs["lossless"] == runs[None]
    assert runs["zeropp"][0] == pytest.approx(losses, rel=0.02) and runs["zeropp"][0] != losses
    assert runs["zeropp"][1] == pytest.approx(evaluated, rel=0.02)
    for _, _, said in runs.values():
        assert (said is None) == (kind != "encoder and decoder")
        assert said is None or [len(row) for row in said] == [21] * 16, (
            "20 new ones, as transformers generates if nobody says how many"
        )
