"""torchtitan's own trainer with this project's collectives, on 4 CPU ranks as two nodes.

    make test-upstream SUITE=torchtitan UPSTREAM=/path

where `pip install --target /path --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser typeguard
torchdata` was run. titan_script.py says what stands in for CUDA. Text and tokenizer are made of the standard library.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hang_guard import HANG
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.places import ROOT

INSTALLED = os.environ.get("UPSTREAM_TORCHTITAN")
pytestmark = pytest.mark.skipif(not INSTALLED, reason="UPSTREAM_TORCHTITAN names no folder with torchtitan")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working folder, with the text and the tokenizer where the debug model's config looks for them."""
    folder = tmp_path_factory.mktemp("titan")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text(errors="ignore") for path in files]
    assets = folder / "tests" / "assets"
    (assets / "c4_test").mkdir(parents=True)
    (assets / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts[:20], trainer)
    (assets / "tokenizer").mkdir()
    tokenizer.save(str(assets / "tokenizer" / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token"), special))
    (assets / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def trained(place, config, steps=6, *more):
    """(losses, norms of gradients, all that was printed) by step."""
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    job = [str(HERE / "titan_script.py"), "--module", "titan_runs", "--config", config]
    short = ["--training.seq_len", "128", "--training.local_batch_size", "2", "--training.steps", str(steps)]
    job += [*short, "--parallelism.spmd_backend", "partial_dtensor", "--debug.seed", "1", *more]
    paths = os.pathsep.join(map(str, (ROOT, HERE, INSTALLED)))
    environment = {"PYTHONPATH": paths, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*ranks, *job], cwd=place, env=os.environ | environment, capture_output=True, text=True, timeout=HANG
    )
    printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
    assert done.returncode == 0, printed[-4000:]
    found = {int(step): (float(loss), float(norm)) for step, loss, norm in re.findall(STEP, printed)}
    return [found[step][0] for step in sorted(found)], [found[step][1] for step in sorted(found)], printed


STEP = r"step:\s+(\d+)\s+loss:\s+([\d.]+)\s+grad_norm:\s+([\d.]+)"


def test_the_debug_model_trains(place):
    """With nothing rounded torchtitan prints the same as without the project."""
    losses, norms, _ = trained(place, "stock")
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.3
    exact, same, table = trained(place, "lossless")
    assert exact == losses and same == norms
    assert "zeropp_fp8: recipe lossless; 2 node(s) x 2 rank(s)" in table
    close, near, table = trained(place, "zeropp")
    assert close == pytest.approx(losses, rel=1e-2) and near == pytest.approx(norms, rel=5e-2) and close != losses
    assert "zeropp_fp8: recipe zeropp; 2 node(s) x 2 rank(s)" in table


def test_checkpoints_have_the_residuals(place):
    """With torchtitan's own checkpointer a job that resumes prints what it would have printed."""
    saving = ["--checkpoint.enable", "--checkpoint.interval", "3", "--checkpoint.folder", "with_residuals"]
    losses, norms, _ = trained(place, "with_error_feedback", 6, *saving)
    again, same, printed = trained(place, "with_error_feedback", 6, *saving, "--checkpoint.load_step", "3")
    assert "step-3" in printed and len(losses) == 6
    assert again == losses[3:] and same == norms[3:]
    left_out = ["--checkpoint.exclude_from_loading", "zeropp_fp8.0"]
    anew, other, _ = trained(place, "with_error_feedback", 6, *saving, "--checkpoint.load_step", "3", *left_out)
    assert anew == pytest.approx(losses[3:], rel=1e-2) and other != norms[3:]
