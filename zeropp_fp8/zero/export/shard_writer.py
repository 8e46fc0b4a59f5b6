"""Writing tensors one after another into safetensors files of a limited size, with Hugging Face's names and index."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
_WRITTEN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(size: int | str) -> int:
    """Bytes of a number of them, or of "5GB", "500MB", "2GiB" and the like.

    Raises:
        ValueError: not a positive size of that form.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if unit is None or float(match[1]) * unit < 1:
        raise ValueError(
            f'a size is a positive number of bytes or like "5GB" (KB, MB, GB, TB, KiB, MiB, GiB): {size!r}'
        )
    return int(float(match[1]) * unit)


class ShardWriter:
    """Collects tensors, and writes a file whenever the next one would exceed its size.

    Files have temporary names until `close`, which knows how many there are; then those of an earlier save are removed.

    Args:
        folder: made if it is not there.
        max_bytes: of a file's tensors. A larger tensor has a file of its own.
    """

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[Path] = []
        self._total_bytes = 0
        self.file_of: dict[str, int] = {}  # which file a tensor is in, by its name

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a copy of a tensor, on any device.

        Raises:
            ValueError: there is one of this name.
        """
        if name in self.file_of:
            raise ValueError(f"two tensors are named {name}")
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._max_bytes:
            self._write()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size
        self.file_of[name] = len(self._files)

    def _write(self) -> None:
        path = self.folder / f"model-{len(self._files) + 1:05d}.part"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._files.append(path)
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        """Write what is left, and give the files their names."""
        if self._pending or not self._files:
            self._write()
        for path in self.folder.iterdir():
            if _WRITTEN.fullmatch(path.name):
                path.unlink()
        count = len(self._files)
        names = [
            f"model-{i + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors" for i in range(count)
        ]
        for path, name in zip(self._files, names):
            path.rename(self.folder / name)
        if count > 1:
            weight_map = {name: names[index] for name, index in self.file_of.items()}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
