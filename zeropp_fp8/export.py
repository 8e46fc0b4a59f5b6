"""A copy of a DeepSpeed checkpoint in which frozen weights are numbers: stock DeepSpeed and zero_to_fp32 read it.

    python -m zeropp_fp8.export CHECKPOINT NEW_FOLDER [--tag TAG]

Weights that were saved as codes are decoded to the dtype that the model computed with, and cut into the slices that
DeepSpeed gives to each rank. All else is copied as it is: optimizer states, adapters, what lies beside, and the `zero`
folder of a universal checkpoint. One weight is decoded at a time, and decoded slices lie in temporary files until their
rank's file is written: the memory needed is that of a few parts of one weight.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from zeropp_fp8.zero.fragment import QuantizedFragment
from zeropp_fp8.zero.saved_ranks import FRAGMENTS, SavedParameter, SavedRanks, read_states, slice_of

LATEST = ("latest", "latest_universal")
_MODEL_STATES = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")


def export_checkpoint(checkpoint: str | Path, out: str | Path, tag: str | None = None) -> int:
    """Copy a checkpoint, with numbers in place of codes.

    Args:
        checkpoint: the folder that was given to `save_checkpoint`.
        out: a new or empty folder.
        tag: which checkpoint in it; None: the one that its file `latest` names.

    Returns:
        how many weights were decoded.

    Raises:
        FileNotFoundError: there is no such checkpoint, or files of some ranks are missing.
        FileExistsError: `out` is not empty.
        ValueError: no weight of the checkpoint was saved as codes, or `out` lies inside the checkpoint.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    folder = checkpoint / (tag or _latest_tag(checkpoint))
    files = _model_states(folder)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is there and not empty; name a new folder")
    if checkpoint.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out} lies inside {checkpoint}; name a folder outside of it")
    saved = {mp: SavedRanks(lambda rank, of=of: str(of[rank]), len(of), {}) for mp, of in files.items()}
    decoded = sum(_count_codes(folder, ranks) for ranks in saved.values())
    if not decoded:
        raise ValueError(f"{folder} holds no weights as codes: DeepSpeed reads it as it is")
    new_folder = out / folder.name
    states = {path.name for of in files.values() for path in of.values()}
    shutil.copytree(folder, new_folder, ignore=lambda where, _: states if Path(where) == folder else ())
    for mp, of in files.items():
        for rank, path in of.items():
            _write_decoded(saved[mp], rank, path, new_folder / path.name)
    for path in checkpoint.iterdir():
        if path.is_file() and path.name not in LATEST:
            shutil.copy2(path, out)
    # Last, so that a copy that was cut short is not taken for a checkpoint.
    (out / LATEST[(new_folder / "zero").is_dir()]).write_text(folder.name)
    return decoded


def _latest_tag(checkpoint: Path) -> str:
    for name in LATEST:
        if (checkpoint / name).is_file():
            return (checkpoint / name).read_text().strip()
    raise FileNotFoundError(
        f"{checkpoint} has no file `latest`: give the folder that save_checkpoint was given, or add --tag"
    )


def _model_states(folder: Path) -> dict[int, dict[int, Path]]:
    """Files of model states by tensor-parallel rank and rank."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    found: dict[int, dict[int, Path]] = {}
    for path in folder.iterdir():
        match = _MODEL_STATES.fullmatch(path.name)
        if match:
            found.setdefault(int(match[2]), {})[int(match[1])] = path
    if not found:
        raise FileNotFoundError(f"{folder} holds no model states of ZeRO-3 (zero_pp_rank_*_model_states.pt)")
    for mp, of in found.items():
        missing = [rank for rank in range(max(of) + 1) if rank not in of]
        if missing:
            raise FileNotFoundError(f"{folder}: the model states of rank {missing[0]} (mp_rank {mp:02d}) are missing")
        found[mp] = dict(sorted(of.items()))
    return found


def _count_codes(folder: Path, saved: SavedRanks) -> int:
    codes = [f for f in saved.of_rank(0).values() if isinstance(f, QuantizedFragment)]
    if codes and codes[0].ranks != saved.ranks:
        raise FileNotFoundError(f"{folder}: {codes[0].ranks} ranks saved it, and there are files of {saved.ranks}")
    return len(codes)


def _write_decoded(saved: SavedRanks, rank: int, path: Path, new_path: Path) -> None:
    """Write a rank's model states, with slices in place of codes."""
    states = read_states(path)
    with tempfile.TemporaryDirectory(dir=new_path.parent) as spare:
        fragments = OrderedDict(states[FRAGMENTS])
        for number, (name, fragment) in enumerate(fragments.items()):
            if isinstance(fragment, QuantizedFragment):
                fragments[name] = _mapped(_decoded_slice(saved.of(name), fragment, rank), Path(spare, str(number)))
        in_zip = zipfile.is_zipfile(path)
        torch.save({**states, FRAGMENTS: fragments}, new_path, _use_new_zipfile_serialization=in_zip)


def _decoded_slice(saved: SavedParameter, own: QuantizedFragment, rank: int) -> Tensor:
    def part(index: int) -> Tensor:
        return saved.fragment(index).decoded()

    return slice_of(part, own.part_numel, math.prod(own.full_shape), rank, own.ranks)


def _mapped(values: Tensor, path: Path) -> Tensor:
    """The same values in a file, so that they take no memory while others are decoded."""
    return torch.from_file(str(path), shared=True, size=values.numel(), dtype=values.dtype).copy_(values)


def main(arguments: list[str] | None = None) -> None:
    """The command line; ends with status 1 and a message on stderr where `export_checkpoint` raises."""
    parser = argparse.ArgumentParser(prog="python -m zeropp_fp8.export", description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that save_checkpoint was given")
    parser.add_argument("out", metavar="NEW_FOLDER", help="a folder that is not there yet, or empty")
    parser.add_argument("--tag", help="which checkpoint in it; without, the one that its file `latest` names")
    given = parser.parse_args(arguments)
    try:
        decoded = export_checkpoint(given.checkpoint, given.out, given.tag)
    except (OSError, ValueError) as error:
        sys.exit(f"zeropp_fp8.export: {error}")
    print(f"zeropp_fp8.export: {given.out} has {decoded} weights as numbers that {given.checkpoint} has as codes")


if __name__ == "__main__":
    main()
