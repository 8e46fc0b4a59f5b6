"""Log-probabilities of DPO's reference: computed once, before the first step, and kept in a file.

Until its first step the policy is the reference, whether an adapter or all weights are trained. So no second model is
ever in memory, and a training pass needs none of a reference. A resumed run reads the file, and so does another run
over the same rows from the same model.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from basics import failing_together, training_dtype
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers.utils import cached_file

from common.batch import Tokens
from common.losses import sequence_logprobs
from common.models import Start
from common.order import Order
from common.roles import Role, logprobs_of
from common.tokens import Item, collate_pairs
from zeropp_fp8.config import resolve

Pair = dict[str, Item]
MODEL_FILES = ("config.json", "adapter_config.json", "*model*.safetensors", "*model*.bin")
PLACES, BYTES = 64, 2**16  # of a file that are hashed: all of an 8B model would take 30 s
KEY, VALUES = "key", "logprobs"  # in the file


def pair_logprobs(policy: Role, pairs: Sequence[Pair], pad_id: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities of whole completions, fp32; their tokens, int64), both [2, B]: chosen, then rejected."""
    batch = collate_pairs(pairs, pad_id)
    batch.pop("margin", None)  # reward models learn it
    tokens = Tokens(**batch).to(policy.engine.device)
    logprobs = sequence_logprobs(logprobs_of(policy, tokens, temperature=1.0), tokens.response_mask)
    return logprobs.view(2, -1), tokens.response_mask.sum(1).view(2, -1)


def with_reference(path: Path, key: str, policy: Role, pairs: list[Pair], seed: int, pad_id: int) -> list[Pair]:
    """The pairs, each with "reference": its two log-probabilities, from the file or else computed and written to it.

    Args:
        path: of the file, in a folder that all ranks see; rank 0 reads and writes.
        key: of these pairs and this model, see `key_of`. A file of another key is made again.
        policy: not trained yet, and without dropout.
        seed: of the order in which the pairs are trained on.

    Raises:
        OSError, SafetensorError: the file cannot be read or written; a RuntimeError on the other ranks.
    """
    is_main, read = dist.get_rank() == 0, [None]
    with failing_together(f"reading {path}"):
        if is_main and path.is_file():
            read = [_read(path, key)]
    dist.broadcast_object_list(read, src=0)  # all ranks compute, or none
    values = read[0]
    if values is None:
        values = compute(policy, pairs, seed, pad_id)
        with failing_together(f"writing {path}"):
            if is_main:
                path.parent.mkdir(parents=True, exist_ok=True)
                new = path.with_suffix(f".{os.getpid()}")  # other runs may write to the same folder
                save_file({VALUES: values}, new, metadata={KEY: key})
                os.replace(new, path)
    return [{**pair, "reference": both} for pair, both in zip(pairs, values.tolist(), strict=True)]


def _read(path: Path, key: str) -> Tensor | None:
    with safe_open(path, framework="pt") as file:
        if file.metadata()[KEY] == key:
            print(f"{path}: log-probabilities of the reference read", flush=True)
            return file.get_tensor(VALUES)
    print(
        f"{path} is of other rows, of another model or of other number formats: the reference's log-probabilities are "
        "computed again",
        flush=True,
    )
    return None


@torch.no_grad()
def compute(policy: Role, pairs: Sequence[Pair], seed: int, pad_id: int) -> Tensor:
    """The policy's log-probabilities of chosen and rejected completions: fp32 [N, 2] on the CPU, the same on all ranks.

    The micro-batches are those of the first epoch, each on the rank that will train on it. There policy and reference
    then add up in the same order, and the first step's log-ratios are exactly 0.
    """
    rank, world, began = dist.get_rank(), dist.get_world_size(), time.perf_counter()
    micro = policy.engine.train_micro_batch_size_per_gpu()
    size, order, mine = micro * policy.engine.gradient_accumulation_steps(), Order(len(pairs), seed), []
    steps = math.ceil(len(pairs) / (size * world))
    for step in tqdm(range(steps), "reference", disable=rank != 0, mininterval=5.0, dynamic_ncols=True):
        taken = [pairs[index] for index in order.batch(step, rank, world, size)]
        mine += [pair_logprobs(policy, taken[i : i + micro], pad_id)[0].T for i in range(0, size, micro)]
    of_ranks = [torch.empty(steps * size, 2, device=policy.engine.device) for _ in range(world)]
    dist.all_gather(of_ranks, torch.cat(mine))
    # The order goes step by step, and in each from rank to rank. Its last step may reach into the next epoch.
    in_order = torch.stack([part.view(steps, size, 2) for part in of_ranks], dim=1).flatten(0, 2)[: len(pairs)].cpu()
    if rank == 0:
        seconds = time.perf_counter() - began
        print(f"log-probabilities of the reference: {len(pairs)} pairs in {seconds:.1f} s", flush=True)
    return in_order[order.epoch(0).argsort()]


# --- what they depend on -----------------------------------------------------------------------------------------


def key_of(pairs: Sequence[Pair], start: Start, ds_config: dict, lora: bool) -> str:
    """A hash of all that log-probabilities depend on: tokens and masks, the model, the formats that it computes in.

    Args:
        lora: an adapter is trained. Else the one that `start` may have is merged into weights, which are rounded then.
    """
    digest = hashlib.sha256(repr([_identity(start), lora, _formats(ds_config)]).encode())
    for pair in pairs:
        for item in (pair["chosen"], pair["rejected"]):
            ids = array("q", item["input_ids"])
            digest.update(array("q", [len(ids)]).tobytes() + ids.tobytes() + bytes(item["response_mask"]))
    return digest.hexdigest()


def _identity(start: Start) -> list:
    """Return what tells a model from others wherever its folder is: a commit on the hub, or its files."""
    if Path(start.base).is_dir():
        base = _files(Path(start.base))
    else:  # the cache of the hub has a folder a commit
        base = start.base, Path(cached_file(start.base, "config.json")).parent.name
    return [base, start.adapter and _files(Path(start.adapter))]


def _files(folder: Path) -> list:
    """(name, size, hash of places all over it) of each file that makes the model."""
    paths = sorted({path for pattern in MODEL_FILES for path in folder.glob(pattern)})
    return [(path.name, path.stat().st_size, _hash_of_places(path)) for path in paths]


def _hash_of_places(path: Path) -> str:
    """Of the whole file if it has at most PLACES * BYTES bytes. A layer of a large model holds several places."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        for place in (*range(0, size, max(BYTES, size // PLACES)), max(0, size - BYTES)):
            file.seek(place)
            digest.update(file.read(BYTES))
    return digest.hexdigest()


def _formats(ds_config: dict) -> list:
    """The numbers that weights compute in. Blocks of codes begin where the parts that ranks have begin."""
    plugin, dtype = resolve(ds_config), training_dtype(ds_config)
    if plugin is None or not plugin.quantizes:
        return [str(dtype)]
    parts = plugin.model_dump_json(include={"weights", "compute", "frozen", "partition", "partition_split", "topology"})
    return [str(dtype), parts, dist.get_world_size()]
