"""The manifest of a checkpoint, against files changed in every way."""

import json
import os
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropp_fp8.zero.checkpoint import manifest


def checkpoint(folder, steps=1, contents=None):
    """A folder with files and their manifest."""
    contents = contents or {"a.pt": b"weights", "b.pt": b""}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    files = {name: manifest.describe_file(folder / name, rank) for rank, name in enumerate(contents)}
    manifest.write_manifest(folder, files, steps)
    return files


def test_what_is_saved(tmp_path):
    contents = os.urandom(3 * manifest._CHUNK // 2)  # more than one piece
    files = checkpoint(tmp_path / "a", 7, {"a.pt": contents})
    expected = {"bytes": len(contents), "crc32": f"{zlib.crc32(contents):08x}", "rank": 0}
    assert files == {"a.pt": expected}
    assert json.loads((tmp_path / "a" / manifest.MANIFEST).read_text()) == {
        "complete": True,
        "global_steps": 7,
        "files": {"a.pt": expected},
    }
    assert manifest.read_manifest(tmp_path / "a")["files"] == files
    assert sorted(os.listdir(tmp_path / "a")) == ["a.pt", manifest.MANIFEST]  # nothing else is left


@settings(max_examples=200, deadline=None)
@given(
    data=st.binary(max_size=300),
    change=st.sampled_from(["flip", "cut", "longer", "fill"]),
    where=st.floats(0, 1, exclude_max=True),
)
def test_every_change_is_found(tmp_path_factory, data, change, where):
    path = tmp_path_factory.mktemp("changed") / "a.pt"
    path.write_bytes(data)
    saved = manifest.describe_file(path, 0)
    assert manifest.damage(path, saved) is None
    position = int(where * len(data))
    changed = {
        "flip": data[:position] + bytes(b ^ 1 for b in data[position : position + 1]) + data[position + 1 :],
        "cut": data[:position],
        "longer": data[:position] + b"\0" + data[position:],
        "fill": data[:position] + b"\xff" * (len(data) - position),
    }[change]
    path.write_bytes(changed)
    found = manifest.damage(path, saved)
    assert (found is None) == (changed == data)
    assert found is None or str(path) in found


def test_a_missing_file(tmp_path):
    files = checkpoint(tmp_path)
    (tmp_path / "a.pt").unlink()
    assert manifest.damage(tmp_path / "a.pt", files["a.pt"]) == f"{tmp_path / 'a.pt'} is missing"


def test_without_a_manifest(tmp_path):
    assert manifest.read_manifest(tmp_path) is None
    (tmp_path / "a.pt").write_text("DeepSpeed's")
    assert manifest.read_manifest(tmp_path) is None
    (tmp_path / ("b.pt" + manifest.PARTIAL)).write_text("")
    with pytest.raises(ValueError, match="ended before all ranks"):
        manifest.read_manifest(tmp_path)


def test_left_over_partial_files_do_not_matter_beside_a_manifest(tmp_path):
    files = checkpoint(tmp_path)
    (tmp_path / ("a.pt" + manifest.PARTIAL)).write_text("of a save over it that was killed")
    assert manifest.read_manifest(tmp_path)["files"] == files


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", "null", '{"complete": true}', '{"complete": true, "global_steps": 1, "files": {"a": {}}}'),
        '{"complete": true, "global_steps": "1", "files": {}}',
        '{"complete": true, "global_steps": 1, "files": {"a": {"bytes": 1, "crc32": "0", "rank": "0"}}}',
    ],
)
def test_a_damaged_manifest(tmp_path, text):
    (tmp_path / manifest.MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=f"{manifest.MANIFEST} cannot be read: "):
        manifest.read_manifest(tmp_path)


def test_the_last_complete_one(tmp_path):
    """The one with the most steps, of those that have all files; beside the folder only where it holds none."""
    run = tmp_path / "run"
    assert manifest.last_complete(run, "a") is None
    for steps, name in enumerate(("step1", "step9", "step10", "cut", "half"), 1):
        checkpoint(run / name, steps)
    (run / "cut" / "a.pt").write_bytes(b"")
    manifest.write_manifest(run / "half", None, 5)
    (run / "stock").mkdir()
    (run / "stock" / "a.pt").write_bytes(b"of DeepSpeed alone")
    assert manifest.last_complete(run, "half") == run / "step10"
    assert manifest.last_complete(run, "step10") == run / "step9"

    for steps in (100, 200, 300):  # as the Trainer of transformers keeps them
        checkpoint(tmp_path / "trainer" / f"checkpoint-{steps}" / f"global_step{steps}", steps)
    manifest.write_manifest(tmp_path / "trainer/checkpoint-300/global_step300", None, 300)
    found = manifest.last_complete(tmp_path / "trainer/checkpoint-300", "global_step300")
    assert found == tmp_path / "trainer/checkpoint-200/global_step200"


def test_a_text_is_replaced_at_once(tmp_path, monkeypatch):
    """Nobody ever reads a half: neither while it is written, nor when that fails."""
    path = tmp_path / "latest"
    manifest.replace_file(path, "first")

    def full(descriptor):
        assert path.read_text() == "first"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        manifest.replace_file(path, "second")
    assert path.read_text() == "first"


def test_folders_of_other_jobs_are_not_offered(tmp_path):
    """In the folder itself, else in those of the same Trainer; what lies beside it may be of another job."""
    for name, steps in (("mine/a", 5), ("mine/b", 7), ("other/a", 30), ("checkpoint-3/a", 3), ("checkpoint-6/a", 6)):
        checkpoint(tmp_path / name, steps)
    (tmp_path / "empty").mkdir()
    assert manifest.last_complete(tmp_path / "mine", "b") == tmp_path / "mine/a"
    assert manifest.last_complete(tmp_path / "other", "a") is None
    assert manifest.last_complete(tmp_path / "empty", "a") is None
    assert manifest.last_complete(tmp_path / "checkpoint-6", "a") == tmp_path / "checkpoint-3/a"
