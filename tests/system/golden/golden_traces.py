"""Golden traces: hashes of what stock ZeRO-3 and every recipe compute, kept in golden.json. Rebuilding moves no bit.

    python -m tests.system.golden.golden_traces --out /tmp/traces.json  all of them anew, two minutes on 2 cores
    python -m tests.system.golden.golden_traces --out tests/system/golden/golden.json  where a commit says why
    python -m tests.system.golden.golden_traces --out tests/system/golden/golden.json "NAME, 1 x 4" "NAME, 2 x 2"
                                        of a new recipe; those of others stay as they are in the file

A trace is 6 steps of a small Llama on 4 gloo ranks, as one node or as two of two: from the start ("fresh"), with a
checkpoint after 3 of them loaded by a new engine ("resumed"), and with two micro-batches per step ("accumulated"). It
holds hashes over all ranks of the weights, of the optimizer's states and of each part of the extra state, and the bytes
that each rank sent.

Bits are to be the same on every x86 machine, so torch and MKL are told to use no instructions that some lack, and
oneDNN is off. They read that once, when they load: `environment` goes to a new interpreter. `arithmetic` is the same
training in plain torch; where it differs from the kept one, this machine computes otherwise and cannot compare.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.models import batches, ds_config, llama, make_engine, section
from tests.ranks import run_ranks
from zeropp_fp8.config.recipes import RECIPES

KEPT = Path(__file__).with_name("golden.json")
ENTRY = "zeropp_fp8"  # of the plugin's extra state in DeepSpeed's checkpoint
STEPS, HALF, VOCAB, LENGTH = 6, 3, 128, 16
WORLD = 4
NODES = {"1 x 4": 4, "2 x 2": 2}  # ranks per node
_LORA_LR = 1e-2
_COMPUTE = {"min_features": 16, "skip_modules": ["lm_head"]}  # else no layer of so small a model computes in FP8


def environment() -> dict[str, str]:
    """Of the interpreter that records: arithmetic with SSE instructions, in an order that no machine changes."""
    return {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }


def names() -> list[str]:
    """All traces, "recipe, nodes x ranks"; stock's is the first."""
    traces = ["stock, 1 x 4"]  # stock does not know nodes
    for recipe, fields in RECIPES.items():
        traces += [f"{recipe}, {nodes}" for nodes in (["4 x 1"] if "topology" in fields else NODES)]
    return traces


def record(only: Sequence[str] = ()) -> dict:
    """All traces, or `only` some.

    {"arithmetic": hash, "torch": version, "traces": {"recipe, nodes": {"fresh": {...}, ...}}}
    """
    torch.set_num_threads(1)
    traces = {}
    for name in only or names():
        recipe, nodes = name.split(", ")
        ranks = run_ranks(_train_three_times, WORLD, int(nodes[-1]), recipe=recipe)
        traces[name] = {run: _joined([rank[run] for rank in ranks]) for run in ranks[0]}
    (arithmetic,) = run_ranks(_plain, 1, 1)
    return {"torch": torch.__version__.partition("+")[0], "arithmetic": arithmetic, "traces": traces}


def merged(kept: dict, recorded: dict) -> dict:
    """Put the traces that were recorded among those that were kept; without those of recipes that are gone.

    Raises:
        ValueError: they were made by different arithmetic.
    """
    for key in ("torch", "arithmetic"):
        if kept[key] != recorded[key]:
            raise ValueError(f"{key} is {recorded[key]} here, and {kept[key]} where the others were made: record all")
    traces = kept["traces"] | recorded["traces"]
    return {**kept, "traces": {name: traces[name] for name in names() if name in traces}}


def _train_three_times(recipe: str) -> dict[str, dict]:
    """On a rank: {run: what it leaves}."""
    torch.backends.mkldnn.enabled = False
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    found = {}
    engine = _engine(recipe)
    _train(engine, range(HALF))
    engine.save_checkpoint(folder[0], tag="half")
    _train(engine, range(HALF, STEPS))
    found["fresh"] = _left(engine)
    engine.destroy()
    engine = _engine(recipe, seed=5)  # with other weights than those to come
    engine.load_checkpoint(folder[0], tag="half")
    _train(engine, range(HALF, STEPS))
    found["resumed"] = _left(engine)
    engine.destroy()
    engine = _engine(recipe, accumulation=2)
    _train(engine, range(STEPS), accumulation=2)
    found["accumulated"] = _left(engine)
    torch.distributed.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)  # each rank ends what is there
    return found


def _model(recipe: str | None, seed: int):
    model = llama(layers=2, hidden=64, vocab=VOCAB, seed=seed)
    if recipe == "qlora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed + 1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return model


def _engine(recipe: str, seed: int = 0, accumulation: int = 1):
    import zeropp_fp8

    zeropp_fp8.disable() if recipe == "stock" else zeropp_fp8.enable()
    fields = {"compute": _COMPUTE} if "compute" in RECIPES.get(recipe, {}) else {}
    own = None if recipe == "stock" else section(recipe, **fields)
    config = ds_config(own, "bf16", gradient_accumulation_steps=accumulation, gradient_clipping=1.0)
    return make_engine(_model(recipe, seed), config, lr=_LORA_LR if recipe == "qlora" else 1e-3)


def _train(engine, steps: range, accumulation: int = 1) -> None:
    data = list(batches(STEPS * accumulation, torch.distributed.get_rank(), 1, LENGTH, VOCAB))
    for tokens in data[steps.start * accumulation : steps.stop * accumulation]:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()


def _left(engine) -> dict:
    """Of this rank: hashes of its shards, states and extra state, and the bytes it sent since it began."""
    import zeropp_fp8

    states = engine.optimizer.state_dict()
    extra = states.pop(ENTRY, {})
    shards = {name: param.ds_tensor for name, param in engine.module.named_parameters()}
    has_plugin = hasattr(engine, "zeropp_fp8_session")
    return {
        "weights": _hash(shards),
        "states": _hash(states),
        "extra": {str(key): _hash(value) for key, value in extra.items()},
        "bytes": zeropp_fp8.wire_report(engine)["per_step"] if has_plugin else {},
    }


def _joined(ranks: list[dict]) -> dict:
    """Of all ranks: hashes of their hashes, and the bytes of each."""
    keys = sorted({key for rank in ranks for key in rank["extra"]})
    return {
        "weights": _hash([rank["weights"] for rank in ranks]),
        "states": _hash([rank["states"] for rank in ranks]),
        "extra": {key: _hash([rank["extra"].get(key) for rank in ranks]) for key in keys},
        "bytes": {
            f"{kind}, {hop}": " ".join(str(rank["bytes"][kind][hop]) for rank in ranks)
            for kind in ranks[0]["bytes"]
            for hop in ("inter", "intra")
            if any(rank["bytes"][kind][hop] for rank in ranks)
        },
    }


def _plain() -> str:
    """The same training by plain torch alone, in 16 and in 32 bits: what it comes to is the machine's arithmetic."""
    torch.backends.mkldnn.enabled = False
    losses, weights = [], []
    for dtype in (torch.bfloat16, torch.float32):
        model = llama(layers=2, hidden=64, vocab=VOCAB).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for tokens in batches(STEPS, 0, 1, LENGTH, VOCAB):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
        weights.append(dict(model.named_parameters()))
    return _hash([losses, weights])


def _hash(value) -> str:
    """16 hexadecimal digits: of tensors their bytes, of the rest what it prints, of containers all that they hold."""
    digest = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous().flatten()
            digest.update(f"{tuple(value.shape)} {value.dtype} ".encode())
            digest.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                digest.update(f"{key}: ".encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            digest.update(f"[{len(value)}] ".encode())
            for each in value:
                add(each)
        else:
            digest.update(f"{value!r} ".encode())

    add(value)
    return digest.hexdigest()[:16]


def _lines(recorded: dict) -> str:
    """JSON with a line per run: what changed between two files can be read."""
    traces = [
        f"  {json.dumps(trace)}: {{\n"
        + ",\n".join(f"   {json.dumps(run)}: {json.dumps(runs[run])}" for run in runs)
        + "\n  }"
        for trace, runs in recorded["traces"].items()
    ]
    head = json.dumps({key: value for key, value in recorded.items() if key != "traces"}, indent=1)[:-2]
    return head + ',\n "traces": {\n' + ",\n".join(traces) + "\n }\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON to write")
    parser.add_argument("traces", nargs="*", help='"recipe, nodes x ranks", only these, into what is there; else all')
    args = parser.parse_args()
    if unknown := [name for name in args.traces if name not in names()]:
        parser.error(f"there are no traces {unknown}; traces are {names()}")
    if any(os.environ.get(key) != value for key, value in environment().items()):
        command = [sys.executable, "-m", "tests.system.golden.golden_traces", "--out", str(args.out), *args.traces]
        raise SystemExit(subprocess.run(command, env=environment()).returncode)
    recorded = record(args.traces)
    if args.traces and args.out.exists():
        recorded = merged(json.loads(args.out.read_text()), recorded)
    args.out.write_text(_lines(recorded))


if __name__ == "__main__":
    main()
