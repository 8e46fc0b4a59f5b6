"""Exporting a checkpoint to numbers: slices, the rest, refusals. Of real checkpoints: test_frozen_checkpoints.py."""

import math
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeropp_fp8.__main__ import main as package
from zeropp_fp8.export import export_checkpoint, main
from zeropp_fp8.formats import make_format
from zeropp_fp8.zero.checkpoint.manifest import MANIFEST, describe_file, write_manifest
from zeropp_fp8.zero.fragment import QuantizedFragment
from zeropp_fp8.zero.frozen.saved_ranks import FRAGMENTS

FORMAT = make_format("nf4", block_size=4, double_quantize=True)


def states_of(tensors, rank, ranks, dtype):
    """A rank's model states: those named "numbers..." in slices, others in codes."""
    fragments = {}
    for name, tensor in tensors.items():
        size = -(-tensor.numel() // ranks)
        padded = nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))
        fragments[name] = padded[rank * size : (rank + 1) * size].clone()
        if not name.startswith("numbers"):
            part_numel = -(-tensor.numel() // (ranks * FORMAT.granule)) * FORMAT.granule
            payload = torch.empty(FORMAT.payload_bytes(part_numel), dtype=torch.uint8)
            FORMAT.encode_part(tensor, rank * part_numel, part_numel, payload)
            shape = tuple(tensor.shape)
            fragments[name] = QuantizedFragment(name, payload, FORMAT.options(), part_numel, shape, dtype, rank, ranks)
    return {
        "module": {"buffer": torch.arange(3)},
        FRAGMENTS: fragments,
        "global_steps": 7,
        "dp_world_size": ranks,
        "mp_world_size": 1,
    }


def write_checkpoint(folder, tensors, ranks, tag="step7", dtype=torch.bfloat16, in_zip=True):
    (folder / tag).mkdir(parents=True)
    for rank in range(ranks):
        path = folder / tag / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        states = states_of(tensors, rank, ranks, dtype)
        torch.save(states, path, _use_new_zipfile_serialization=in_zip)
        (folder / tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"optimizer")
    (folder / "latest").write_text(tag)
    (folder / "zero_to_fp32.py").write_text("script")
    return folder


def read_back(out, name, tag="step7"):
    files = sorted((out / tag).glob("*_model_states.pt"))
    return [torch.load(file, weights_only=False)[FRAGMENTS][name] for file in files]


SHAPES = {"a": (53, 37), "b": (64, 64), "c": (1, 5), "numbers": (7, 9)}


def tensors_of(shapes=None):
    generator = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=generator).to(torch.bfloat16) for n, s in (shapes or SHAPES).items()}


@pytest.mark.parametrize("ranks, in_zip", [(1, True), (2, True), (3, False), (5, True)])
def test_slices_are_those_of_the_decoded_weight(ranks, in_zip, tmp_path):
    tensors = tensors_of()
    folder = write_checkpoint(tmp_path / "from", tensors, ranks, in_zip=in_zip)
    assert export_checkpoint(folder, tmp_path / "to") == 3
    for name, tensor in tensors.items():
        slices = read_back(tmp_path / "to", name)
        assert {s.numel() for s in slices} == {-(-tensor.numel() // ranks)} and len(slices) == ranks
        whole = torch.cat(slices)
        expected = tensor
        if name != "numbers":
            expected = FORMAT.decode(FORMAT.encode(tensor), tensor.shape, torch.bfloat16)
        assert whole.dtype == torch.bfloat16 and torch.equal(whole[: tensor.numel()], expected.flatten())
        assert not whole[tensor.numel() :].any()


@settings(derandomize=True, max_examples=25)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=3), st.integers(1, 4))
def test_any_shape(tmp_path_factory, shape, ranks):
    folder = tmp_path_factory.mktemp("export")
    tensors = tensors_of({"w": tuple(shape[:2])})
    export_checkpoint(write_checkpoint(folder / "from", tensors, ranks), folder / "to")
    expected = FORMAT.decode(FORMAT.encode(tensors["w"]), tuple(shape[:2]), torch.bfloat16)
    whole = torch.cat(read_back(folder / "to", "w"))
    assert torch.equal(whole[: math.prod(shape[:2])], expected.flatten())


def test_the_rest_is_copied(tmp_path):
    folder, out = write_checkpoint(tmp_path / "from", tensors_of(), 2), tmp_path / "to"
    (folder / "trainer_state.json").write_text("{}")
    (folder / "other_tag").mkdir()
    (folder / "step7" / "zero").mkdir()
    (folder / "step7" / "zero" / "fp32.pt").write_bytes(b"states")
    out.mkdir()
    export_checkpoint(folder, out)
    assert sorted(p.name for p in out.iterdir()) == [
        "latest_universal",
        "step7",
        "trainer_state.json",
        "zero_to_fp32.py",
    ]
    assert (out / "step7" / "zero" / "fp32.pt").read_bytes() == b"states"
    assert (out / "step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").read_bytes() == b"optimizer"
    assert len(list((out / "step7").iterdir())) == 5, "nothing temporary is left"
    states = torch.load(out / "step7" / "zero_pp_rank_1_mp_rank_00_model_states.pt", weights_only=False)
    assert states["global_steps"] == 7 and torch.equal(states["module"]["buffer"], torch.arange(3))
    assert list(states[FRAGMENTS]) == list(SHAPES)


def test_a_tag_by_name(tmp_path):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 2)
    write_checkpoint(folder, tensors_of({"w": (8, 8)}), 1, tag="step9")
    assert export_checkpoint(folder, tmp_path / "to", tag="step7") == 3
    assert (tmp_path / "to" / "latest").read_text() == "step7"
    assert not (tmp_path / "to" / "step9").exists()


def test_refusals(tmp_path):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 3)
    numbers = write_checkpoint(tmp_path / "numbers", tensors_of({"numbers": (5, 5)}), 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    (tmp_path / "empty").mkdir()
    (folder / "nothing").mkdir()
    for error, message, arguments in (
        (FileExistsError, "full is there and not empty; name a new folder", (folder, tmp_path / "full")),
        (FileExistsError, "latest is there and not empty", (folder, folder / "latest")),
        (ValueError, "lies inside", (folder, folder / "new")),
        (FileNotFoundError, "has no file `latest`", (tmp_path / "empty", tmp_path / "to")),
        (FileNotFoundError, "step8 is no folder", (folder, tmp_path / "to", "step8")),
        (FileNotFoundError, "holds no model states of ZeRO-3", (folder, tmp_path / "to", "nothing")),
        (ValueError, "holds no weights as codes: .* as it is .a Trainer with PEFT leaves", (numbers, tmp_path / "to")),
    ):
        with pytest.raises(error, match=message):
            export_checkpoint(*arguments)
    assert not (tmp_path / "to").exists(), "nothing is written before everything is checked"


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind, prefix", [("model", ""), ("optim", ""), ("optim", "bf16_")])
def test_a_file_that_is_missing_is_named(rank, kind, prefix, tmp_path):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 3)
    for file in (folder / "step7").glob("*_optim_states.pt"):
        file.rename(file.with_name(prefix + file.name))
    missing = folder / "step7" / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(str(missing))} is missing; 3 ranks saved the checkpoint"):
        export_checkpoint(folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_damaged_checkpoint_is_refused(tmp_path):
    """Without its manifest it is exported as it is."""
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 2)
    files = {path.name: describe_file(path, 0) for path in (folder / "step7").iterdir()}
    write_manifest(folder / "step7", files, 7)
    path = folder / "step7" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(b"optimiser")
    remedy = f"to export the checkpoint as it is, remove {folder / 'step7' / MANIFEST}"
    with pytest.raises(ValueError, match=re.escape(f"{path} is not what was saved") + ".*" + re.escape(remedy)):
        export_checkpoint(folder, tmp_path / "to")
    write_manifest(folder / "step7", None, 7)
    with pytest.raises(ValueError, match="ended before all ranks had written their files"):
        export_checkpoint(folder, tmp_path / "to")
    (folder / "step7" / MANIFEST).unlink()
    assert export_checkpoint(folder, tmp_path / "to") == 3


def not_model_states(tmp_path):
    """Contents of files by what is wrong with them."""
    torch.save(states_of(tensors_of(), 0, 1, torch.bfloat16), tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    found = {"empty": b"", "cut": whole[: len(whole) // 2], "its end is missing": whole[:-10], "text": b"hello there\n"}
    for name, value in {"a list": [1, 2], "no states": {"module": {}}}.items():
        torch.save(value, tmp_path / "other")
        found[name] = (tmp_path / "other").read_bytes()
    return found


@pytest.mark.parametrize("trust", [False, True])
def test_a_file_that_holds_no_model_states(tmp_path, trust):
    """One sentence names it, whatever torch says of it; trusting it would not help."""
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 1)
    file = folder / "step7" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    remedy = r"\): save the checkpoint again, or take another tag$"
    for content in not_model_states(tmp_path).values():
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is cut, damaged or no file .*{remedy}"):
            export_checkpoint(folder, tmp_path / "to", trust=trust)
    file.write_bytes(b"[\x80 no pickle")
    with pytest.raises(ValueError, match="is cut, damaged" if trust else "if you trust the file, add --trust$"):
        export_checkpoint(folder, tmp_path / "to", trust=trust)
    assert not (tmp_path / "to").exists()


def test_files_of_another_checkpoint_are_named(tmp_path):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 2)
    other = folder / "step7" / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    other.write_bytes(b"states")
    with pytest.raises(ValueError, match=f"^{re.escape(str(other))} is of another checkpoint; 2 ranks saved this one"):
        export_checkpoint(folder, tmp_path / "to")


class Command:
    """Pickled, a call: unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.makedirs, (str(self.path), 0o777, True)


class Bare:
    """Something that a `client_state` may hold."""


def add_to_states(folder, rank, value, in_zip=True):
    """Add something to the states of a rank; returns their file."""
    file = folder / "step7" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    states = torch.load(file, weights_only=False)
    torch.save({**states, "client": value}, file, _use_new_zipfile_serialization=in_zip)
    return file


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("in_zip", [True, False])
def test_code_in_a_checkpoint_does_not_run(rank, in_zip, tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 2)
    file = add_to_states(folder, rank, Command(tmp_path / "made"), in_zip)
    with pytest.raises(SystemExit) as stop:
        main([str(folder), str(tmp_path / "to")])
    assert stop.value.code == (
        f"zeropp_fp8.export: {file} asks for os.makedirs, which may run code; if you trust the file, add --trust"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["from"], "nothing ran, nothing is left behind"
    main([str(folder), str(tmp_path / "to"), "--trust"])
    assert (tmp_path / "made").is_dir() and (tmp_path / "to" / "latest").is_file()


def test_what_torch_does_not_write_does_not_run(tmp_path):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 1)
    file = folder / "step7" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    file.write_bytes(f"(S'{tmp_path / 'made'}'\nios\nmkdir\n.".encode())
    with pytest.raises(ValueError, match=r"asks for what torch\.save does not write, which may run code"):
        export_checkpoint(folder, tmp_path / "to")
    assert not (tmp_path / "made").exists()


def test_objects_of_a_user_need_trust(tmp_path):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 2)
    add_to_states(folder, 1, Bare())
    with pytest.raises(ValueError, match=rf"asks for {Bare.__module__}\.Bare, .* add --trust"):
        export_checkpoint(folder, tmp_path / "to")
    assert export_checkpoint(folder, tmp_path / "to", trust=True) == 3


@pytest.mark.parametrize("there", [False, True])
def test_an_export_that_fails_leaves_nothing(there, tmp_path, monkeypatch):
    folder, out = write_checkpoint(tmp_path / "from", tensors_of(), 2), tmp_path / "new" / "to"
    if there:
        out.mkdir(parents=True)

    def full(*_args, **_kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="no space left"):
        export_checkpoint(folder, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["from", "new"] if there else ["from"])
    assert not there or not any(out.iterdir())


def test_the_command(tmp_path, capsys):
    folder = write_checkpoint(tmp_path / "from", tensors_of(), 2)
    main([str(folder), str(tmp_path / "to")])
    assert "has 3 weights as numbers" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"zeropp_fp8\.export: .*to is there and not empty"):
        main([str(folder), str(tmp_path / "to")])
    command = [sys.executable, "-m", "zeropp_fp8.export", str(folder), str(tmp_path / "again"), "--tag", "none"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == f"zeropp_fp8.export: {folder / 'none'} is no folder\n"
    package(["export", str(folder), str(tmp_path / "again"), "--tag", "step7"])
    assert "has 3 weights as numbers" in capsys.readouterr().out and (tmp_path / "again" / "step7").is_dir()
