"""A checkpoint counts when it is whole: killed ranks, full disks, damaged files."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
import saving_jobs as jobs
from ranks import run_ranks

from zeropp_fp8.zero.checkpoint.manifest import MANIFEST

# (what the rank is about to do, the rank, which checkpoint is the latest then)
KILLS = [
    ("write model states", 1, "first"),
    ("write half of model states", 0, "first"),
    ("write optimizer states", 1, "first"),
    ("tell that all is written", 1, "first"),
    ("say that names are given", 0, "first"),
    ("give the first name", 1, "first"),
    ("give the second name", 1, "first"),
    ("tell that names are given", 1, "first"),
    ("write the manifest", 0, "first"),
    ("name the latest", 0, "first"),
    ("give latest its name", 0, "first"),
    ("tell that it is saved", 0, "second"),
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """By stage: the folder, and what the survivor was told."""
    found = {}
    for stage, rank, _ in KILLS:
        folder = str(tmp_path_factory.mktemp("killed"))
        results = run_ranks(
            jobs.killed_while_saving, world=2, dying={rank}, folder=folder, stage=stage, dying_rank=rank
        )
        assert results[rank] == signal.SIGKILL
        found[stage] = folder, results[1 - rank]
    return found


@pytest.fixture(scope="module")
def loaded(killed):
    return run_ranks(jobs.loads, world=2, folders=[folder for folder, _ in killed.values()])


@pytest.mark.parametrize("stage, rank, latest", KILLS)
def test_a_rank_dies(killed, loaded, stage, rank, latest):
    folder, message = killed[stage]
    assert message is not None  # the survivor did not go on as if it were saved
    assert Path(folder, "latest").read_text() == latest
    first = Path(folder, "first")
    for steps_of_latest, of_second in (found[folder] for found in loaded):
        assert steps_of_latest == {"first": 1, "second": 2}[latest]
        if stage in ("name the latest", "give latest its name", "tell that it is saved"):
            assert of_second == 2  # whole, though not named
        else:
            assert f"{folder}/second cannot be loaded: the job that saved it ended before all ranks had" in of_second
            assert f'The last complete one is {first}: load_checkpoint("{folder}", tag="first")' in of_second
            assert f"`echo first > {folder}/latest`" in of_second


@pytest.mark.parametrize("recipe", ["lossless", "zeropp-4bit", "fp8-lm"])
def test_a_rank_cannot_write(tmp_path, recipe):
    """All ranks say so, what was there stays, also under the same name, and the job can go on and save again."""
    results = run_ranks(jobs.one_rank_cannot_write, world=2, folder=str(tmp_path), recipe=recipe)
    for rank, (messages, kept, latest, loaded, latest_then) in enumerate(results):
        for tag, message in zip(("second", "first"), messages):
            assert re.search(rf"{tmp_path / tag}/\w+\.pt cannot be written \(\d+ bytes are free\): ", message)
            if rank == 0:
                assert f"the checkpoint {tmp_path / tag} was not saved: rank 1: " in message
        files = [path for path in kept if path.endswith(".pt") or ".partial" in path]
        assert len(files) == 4 and all(path.startswith("first/") for path in files)
        assert (latest, loaded, latest_then) == ("first", 1, "third")


def test_full_disk(tmp_path):
    """On a file system that is full, and then no longer."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        for message, number, latest, whole, more in run_ranks(jobs.full_disk, world=2, folder=str(disk)):
            assert number > 0 and latest == whole == f"number{number - 1}"
            assert re.search(r"/disk/number\d+/\w+\.pt cannot be written \(\d{1,6} bytes are free\)", message)
            assert more is None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_other_errors(tmp_path):
    """An error that has nothing to do with files: the rank that met it raises it, and the others say which rank did."""
    for rank, found in enumerate(run_ranks(jobs.other_errors, world=2, folder=str(tmp_path))):
        assert ("rank 1: " in found["states"]) == (rank == 0) and "local object" in found["states"]
        assert "FileExistsError" in found["folder"] or "NotADirectoryError" in found["folder"]
        assert found["nowhere"] == "ValueError: save_dir must be a non-empty string, got ''"
        assert found["gone"].startswith(f"RuntimeError: {tmp_path / 'gone'} holds no checkpoint of ZeRO-3: ")
        assert not [name for name in found["left"] if name.endswith((".pt", ".partial"))]


MODEL_DAMAGES = ("empty", "removed", "0xff in weights")


@pytest.fixture(scope="module")
def damages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    return folder, run_ranks(jobs.damaged, world=2, folder=str(folder))


@pytest.mark.parametrize("damage", jobs.DAMAGES)
def test_damaged(damages, damage):
    """Every rank names the file, what is wrong with it, and what can be loaded instead."""
    folder, found = damages
    name = MANIFEST if "manifest" in damage else jobs.MODEL if damage in MODEL_DAMAGES else jobs.OPTIMIZER
    says = {"removed": "is missing", "cut": "has ", "longer": "has ", "empty": "has 0 bytes, and had "}
    says |= {f"manifest {of}": "cannot be read: " for of in ("cut", "of something else")}
    for of_rank in found:
        message = of_rank[damage]
        assert f"{folder / 'second' / name} {says.get(damage, 'is not what was saved: its CRC-32')}" in message
        assert f"The last complete one is {folder / 'first'}" in message
        assert '"zeropp_fp8.checkpoint.verify" to false' in message


def test_what_needs_no_manifest(damages, tmp_path):
    """A checkpoint of DeepSpeed alone loads, and so does one that is not to be checked."""
    assert [of_rank["without a manifest"] for of_rank in damages[1]] == [None, None]
    assert run_ranks(jobs.unverified, world=2, folder=str(tmp_path)) == [None, None]
