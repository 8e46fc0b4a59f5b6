"""A copy of a DeepSpeed checkpoint in which frozen weights are numbers: stock DeepSpeed and zero_to_fp32 read it.

    python -m zeropp_fp8 export CHECKPOINT NEW_FOLDER [--tag TAG] [--trust]

The export decodes weights that were saved as codes to the dtype that the model computed with, and cuts them into the
slices that DeepSpeed gives to each rank. It copies all else as it is: optimizer states, adapters, other files, and the
`zero` folder of a universal checkpoint. It decodes one weight at a time, and keeps decoded slices in temporary files
until their rank's file is written: it needs the memory of a few parts of one weight.

A checkpoint need not be trusted: the export refuses a file that asks for more than DeepSpeed's model states are made
of, unless --trust is given. It fills NEW_FOLDER when the copy is complete; if it fails, it leaves nothing behind.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from zeropp_fp8.outputs import Parser
from zeropp_fp8.zero.checkpoint.manifest import MANIFEST, damage, describe_file, read_manifest, write_manifest
from zeropp_fp8.zero.fragment import QuantizedFragment
from zeropp_fp8.zero.frozen.saved_ranks import FRAGMENTS, SavedParameter, SavedRanks, read_states, slice_of

LATEST = ("latest", "latest_universal")
_MODEL_STATES = "zero_pp_rank_{}_mp_rank_{:02d}_model_states.pt"


def export_checkpoint(checkpoint: str | Path, out: str | Path, tag: str | None = None, *, trust: bool = False) -> int:
    """Copy a checkpoint, with numbers in place of codes.

    Args:
        checkpoint: the folder that was given to `save_checkpoint`.
        out: a new or empty folder.
        tag: the checkpoint in it; None: the one that its file `latest` names.
        trust: read what its files hold even if that may run code.

    Returns:
        the number of decoded weights.

    Raises:
        FileNotFoundError: there is no such checkpoint, or a rank's file of model or optimizer states is missing.
        FileExistsError: `out` is not empty.
        ValueError: no weight of the checkpoint was saved as codes, `out` lies inside the checkpoint, a file differs
            from the saved one, or asks for objects that may run code.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    folder = checkpoint / (tag or _latest_tag(checkpoint))
    manifest = _checked_manifest(folder)
    files = _model_states(folder, trust)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is there and not empty; name a new folder")
    if checkpoint.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"{out} lies inside {checkpoint}; name a folder outside of it")
    saved = {mp: SavedRanks(lambda rank, of=of: str(of[rank]), len(of), {}, trust) for mp, of in files.items()}
    decoded = sum(isinstance(part, QuantizedFragment) for ranks in saved.values() for part in ranks.of_rank(0).values())
    if not decoded:
        why = "a Trainer with PEFT leaves frozen weights out: its checkpoints have adapters only"
        raise ValueError(f"{folder} holds no weights as codes: DeepSpeed reads it as it is ({why})")
    states = {path.name for of in files.values() for path in of.values()}
    # Use an existing folder, if possible `out` itself, which may be a file system of its own.
    beside = next(place for place in (out.resolve(), *out.resolve().parents) if place.is_dir())
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=beside) as spare:
        new_folder = Path(spare, folder.name)
        shutil.copytree(folder, new_folder, ignore=lambda where, _: states if Path(where) == folder else ())
        for mp, of in files.items():
            for rank, path in of.items():
                _write_decoded(saved[mp], rank, path, new_folder / path.name, trust)
        if manifest is not None:
            ranks = {name: written["rank"] for name, written in manifest["files"].items()}
            written = {name: describe_file(new_folder / name, rank) for name, rank in ranks.items()}
            write_manifest(new_folder, written, manifest["global_steps"])
        for path in checkpoint.iterdir():
            if path.is_file() and path.name not in LATEST:
                shutil.copy2(path, spare)
        latest = Path(spare, LATEST[(new_folder / "zero").is_dir()])
        latest.write_text(folder.name)
        out.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(spare).iterdir(), key=lambda path: path == latest):  # `latest` comes last
            path.rename(out / path.name)
    return decoded


def _latest_tag(checkpoint: Path) -> str:
    for name in LATEST:
        if (checkpoint / name).is_file():
            return (checkpoint / name).read_text().strip()
    raise FileNotFoundError(
        f"{checkpoint} has no file `latest`: give the folder that save_checkpoint was given, or add --tag"
    )


def _checked_manifest(folder: Path) -> dict | None:
    """Return the manifest of a checkpoint whose files agree with it; None if there is none."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    manifest = read_manifest(folder)
    for name, saved in manifest["files"].items() if manifest else ():
        if found := damage(folder / name, saved):
            raise ValueError(f"{found}; to export the checkpoint as it is, remove {folder / MANIFEST}")
    return manifest


def _model_states(folder: Path, trust: bool) -> dict[int, dict[int, Path]]:
    """Return the files of model states by tensor-parallel rank and rank; refuse missing ones, of the optimizer too."""
    found = sorted(folder.glob("zero_pp_rank_*_mp_rank_*_model_states.pt"))
    if not found:
        raise FileNotFoundError(f"{folder} holds no model states of ZeRO-3 (zero_pp_rank_*_model_states.pt)")
    states = read_states(found[0], trust)
    ranks, mp_ranks = range(states["dp_world_size"]), range(states["mp_world_size"])
    files = {mp: {rank: folder / _MODEL_STATES.format(rank, mp) for rank in ranks} for mp in mp_ranks}
    expected = [path for of in files.values() for path in of.values()]
    left_over = set(found) - set(expected)
    if left_over:
        raise ValueError(f"{min(left_over)} is of another checkpoint; {len(ranks)} ranks saved this one")
    if not (folder / "zero").is_dir():  # a universal checkpoint has its optimizer states there
        prefix = "bf16_" if any(folder.glob("bf16_*_optim_states.pt")) else ""
        expected += [folder / (prefix + path.name.replace("model_states", "optim_states")) for path in expected]
    missing = next((path for path in expected if not path.is_file()), None)
    if missing is not None:
        raise FileNotFoundError(f"{missing} is missing; {len(ranks)} ranks saved the checkpoint")
    return files


def _write_decoded(saved: SavedRanks, rank: int, path: Path, new_path: Path, trust: bool) -> None:
    """Write a rank's model states, with slices in place of codes."""
    states = read_states(path, trust)
    with tempfile.TemporaryDirectory(dir=new_path.parent) as spare:
        fragments = OrderedDict(states[FRAGMENTS])
        for number, (name, fragment) in enumerate(fragments.items()):
            if isinstance(fragment, QuantizedFragment):
                fragments[name] = _mapped(_decoded_slice(saved.of(name), fragment, rank), Path(spare, str(number)))
        in_zip = zipfile.is_zipfile(path)
        torch.save({**states, FRAGMENTS: fragments}, new_path, _use_new_zipfile_serialization=in_zip)


def _decoded_slice(saved: SavedParameter, own: QuantizedFragment, rank: int) -> Tensor:
    numel = math.prod(own.full_shape)
    return slice_of(lambda index: saved.fragment(index).decoded(), own.part_numel, numel, rank, own.ranks)


def _mapped(values: Tensor, path: Path) -> Tensor:
    """Return the same values in a file, so that they take no memory while others are decoded."""
    return torch.from_file(str(path), shared=True, size=values.numel(), dtype=values.dtype).copy_(values)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("export", __doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the folder that save_checkpoint was given")
    parser.add_argument("out", metavar="NEW_FOLDER", help="a folder that is not there yet, or empty")
    parser.add_argument("--tag", help="which checkpoint in it; without, the one that its file `latest` names")
    parser.add_argument("--trust", action="store_true", help="read its files even if what they hold may run code")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Export; end with status 1 and a message on stderr where `export_checkpoint` raises."""
    given = parse(arguments)
    try:
        decoded = export_checkpoint(given.checkpoint, given.out, given.tag, trust=given.trust)
    except (OSError, ValueError) as error:
        sys.exit(f"zeropp_fp8.export: {error}")
    print(f"zeropp_fp8.export: {given.out} has {decoded} weights as numbers that {given.checkpoint} has as codes")


if __name__ == "__main__":
    main()
