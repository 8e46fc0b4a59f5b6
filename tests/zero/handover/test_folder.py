"""Updates through a folder: from any version to the newest, whatever is missing, damaged or half written."""

import json

import pytest
import torch
from safetensors.torch import load_file
from simulated import Trainer
from test_receiver import model, same, stepped

from zeropp_fp8.receiving import MissedUpdate, Receiver, catch_up
from zeropp_fp8.zero.handover.folder import delete, write_version


class Written:
    """A folder, a trainer that writes to it, and the weights of every version."""

    def __init__(self, folder):
        self.folder, self.trainer, self.generator = folder, Trainer(), torch.Generator().manual_seed(0)
        self.versions = [None, model(self.generator)]
        self.go_on(self.versions[1])

    def go_on(self, groups=None):
        if groups is None:
            self.versions.append(stepped(self.versions[-1], self.generator))
        write_version(self.folder, self.trainer.updates(self.versions[-1]))

    def whole(self):
        self.trainer.forget()
        self.go_on()

    def follows(self, receiver):
        return receiver.version == len(self.versions) - 1 and same(receiver, self.versions[-1])


@pytest.fixture
def written(tmp_path):
    return Written(tmp_path)


def test_from_any_version(written):
    """A receiver of each version comes to the newest; one that is there, stays."""
    receivers = []
    for do in (written.go_on, written.go_on, written.whole, written.go_on, written.go_on):
        receivers.append(Receiver())
        for receiver in receivers[-1:]:
            catch_up(written.folder, receiver)
            assert written.follows(receiver)
        do()
    for receiver in (*receivers, Receiver()):
        assert catch_up(written.folder, receiver) == 6 and written.follows(receiver)
        assert catch_up(written.folder, receiver) == 6


def test_a_folder_that_was_made_anew(written, tmp_path_factory):
    """Another trainer's weights come, though its versions have the same numbers."""
    receiver, another = Receiver(), Written(tmp_path_factory.mktemp("another"))
    another.versions[1] = stepped(another.versions[1], another.generator)
    another.whole()
    written.go_on()
    for each in (written, another):
        assert catch_up(str(each.folder), receiver) == 2 and each.follows(receiver)


def test_it_takes_no_more_than_it_needs(written, monkeypatch):
    """Differences where they lead on, all weights where they are newer than what is here."""
    receiver, applied = Receiver(), []
    catch_up(written.folder, receiver)
    known = Receiver.apply
    monkeypatch.setattr(
        Receiver, "apply", lambda self, update: applied.append(update.header.version) or known(self, update)
    )
    written.go_on()
    written.go_on()
    catch_up(written.folder, receiver)
    assert applied == [2, 2, 3, 3]
    written.whole()
    written.go_on()
    catch_up(written.folder, receiver)
    assert applied[4:] == [4, 4, 5, 5]


def test_nothing_is_there_yet(tmp_path):
    receiver = Receiver()
    assert catch_up(tmp_path, receiver) is None and not (tmp_path / "wanted").exists()


def test_a_version_that_is_not_listed(written):
    """It may be half written."""
    receiver = Receiver()
    write_version(written.folder, written.trainer.updates(stepped(written.versions[-1], written.generator)))
    (written.folder / "00000002.json").rename(written.folder / "00000002.json.partial")
    assert catch_up(written.folder, receiver) == 1 and written.follows(receiver)


def test_no_way_leads_on(written):
    """All weights are asked for; what is here stays what it is."""
    receiver = Receiver()
    catch_up(written.folder, receiver)
    for _ in range(3):
        written.go_on()
    delete(written.folder, 2)
    with pytest.raises(MissedUpdate, match="does not lead from version 1 to 4"):
        catch_up(written.folder, receiver)
    assert (written.folder / "wanted").exists() and receiver.version == 1 and same(receiver, written.versions[1])
    written.whole()
    assert catch_up(written.folder, receiver) == 5 and written.follows(receiver)


def test_bytes_that_are_not_those_that_were_written(written):
    """A flipped bit of weights is told by the checksum, and all are asked for."""
    file = written.folder / "00000001-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    receiver = Receiver()
    with pytest.raises(MissedUpdate, match="b of version 1 have another checksum"):
        catch_up(written.folder, receiver)
    assert receiver.version is None and (written.folder / "wanted").exists()


def test_files_of_all_weights_have_their_names(written):
    """Any reader of safetensors has them."""
    for number, group in enumerate(written.versions[1]):
        there = load_file(written.folder / f"00000001-{number:05d}.safetensors")
        assert there.keys() == group.keys() and all(torch.equal(there[n], group[n]) for n in group)
    (first, second) = json.loads((written.folder / "00000001.json").read_text())
    assert (first["names"], second["names"]) == (["a"], ["b"])
