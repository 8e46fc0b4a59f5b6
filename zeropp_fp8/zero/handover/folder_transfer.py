"""Writing updates to a folder (folder.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from zeropp_fp8.comm import gather_objects
from zeropp_fp8.zero.export.lockstep import Lockstep
from zeropp_fp8.zero.handover.folder import WANTED, delete, headers_of, is_whole, listed, write_version
from zeropp_fp8.zero.handover.source import WeightSource
from zeropp_fp8.zero.handover.update import Update
from zeropp_fp8.zero.handover.updates import Updates


class FolderTransfer:
    """Writes what engines need to have the weights of now to a folder. Made on every rank; rank 0 writes.

    Args:
        folder: a path, as text too, or what has a `pathlib.Path`'s methods, such as cloudpathlib's `S3Path`.
        whole_every: versions between two whole copies. Versions before the last but one of these are deleted.

    Attributes:
        updates: what is sent, with its version.

    Raises:
        RuntimeError: rank 0 cannot read the folder; on every rank.
    """

    def __init__(self, source: WeightSource, folder: Path | str, whole_every: int = 100) -> None:
        self._folder = Path(folder) if isinstance(folder, str) else folder
        self._whole_every, self._wholes = whole_every, []
        self._writes = source.session.topology.rank == 0
        lockstep = Lockstep("reading the folder of weights", here=self._writes)
        version = lockstep.call(self._found)
        lockstep.raise_everywhere()
        self.updates = Updates(source, gather_objects(version)[0])

    def _found(self) -> int:
        """The last version that is there, 0 for none. A restart continues from it, and sends all weights next."""
        self._folder.mkdir(parents=True, exist_ok=True)
        versions = listed(self._folder)
        self._wholes = [version for version in versions if is_whole(headers_of(self._folder, version))]
        return versions[-1] if versions else 0

    def send_weights(self) -> None:
        """Write the next version. Collective.

        Raises:
            RuntimeError: a rank has failed; on every rank. Then the version is not listed, and all is sent next time.
        """
        self.updates.hand_over(self._write, self._writes)

    def _write(self, updates: Iterator[Update | None]) -> None:
        wanted = self._folder / WANTED
        if wanted.exists() or self.updates.version + 1 >= self._whole_every + max(self._wholes, default=0):
            self.updates.forget()
            wanted.unlink(missing_ok=True)
        if is_whole(write_version(self._folder, filter(None, updates))):
            self._wholes = [*self._wholes, self.updates.version][-2:]
            for version in listed(self._folder):
                if version < self._wholes[0]:
                    delete(self._folder, version)
