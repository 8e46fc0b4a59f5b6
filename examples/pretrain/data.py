"""Text for a causal language model: finding it, turning it into tokens, and the order in which a run sees it.

The order is a pure function of (seed, step), so a resumed run continues with exactly the batches that would have come.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

TEXT_SUFFIXES = {
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".java",
    ".js",
    ".json",
    ".jsonl",
    ".html",
    ".tex",
    ".csv",
}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 20  # one document in 20 (5 %) is never trained on


def standard_library_files() -> list[Path]:
    """The Python source files of the running interpreter's standard library, sorted, tests left out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [path for path in _files_below(root) if path.suffix == ".py"]


def _files_below(root: Path) -> list[Path]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]  # not even looked into
        found += [Path(folder, name) for name in names if Path(name).suffix in TEXT_SUFFIXES]
    return sorted(found)


def find_files(data: str) -> list[Path] | None:
    """Files named by --data: "stdlib", a folder, or a file; None if it is none of these (a Hugging Face data set).

    Raises:
        FileNotFoundError: a folder without text files.
    """
    if data == "stdlib":
        files = standard_library_files()
    elif Path(data).is_dir():
        files = _files_below(Path(data))
    elif Path(data).is_file():
        return [Path(data)]
    else:
        return None
    if not files:
        raise FileNotFoundError(f"--data {data}: no file there ends in {', '.join(sorted(TEXT_SUFFIXES))}")
    return files


def documents_of_dataset(dataset) -> list[str]:
    """The texts of a `datasets.Dataset`: its column "text", else its first column of strings.

    Raises:
        ValueError: it has no column of strings.
    """
    strings = [name for name, feature in dataset.features.items() if getattr(feature, "dtype", None) == "string"]
    if not strings:
        raise ValueError(f"the data set has no column of strings; its columns are {', '.join(dataset.features)}")
    return list(dataset["text" if "text" in strings else strings[0]])


def check_places(sources: Sequence[str]) -> None:
    """Refuse paths in --data with nothing there; a name of Hugging Face may stand for a data set.

    Raises:
        FileNotFoundError: names the path.
    """
    for source in sources:
        if find_files(source) is None and source.startswith((".", "/", "~")):
            raise FileNotFoundError(f"--data {source}: no such file or folder")


def read_documents(sources: Sequence[str]) -> list[bytes]:
    """The texts of all --data arguments, UTF-8 encoded, one entry a file or a row.

    A Hugging Face data set is NAME or NAME:CONFIGURATION; its split "train" is read.
    """
    check_places(sources)
    documents: list[bytes] = []
    for source in sources:
        files = find_files(source)
        if files is not None:
            documents += [path.read_bytes() for path in files]
            continue
        from datasets import load_dataset

        name, _, configuration = source.partition(":")
        texts = documents_of_dataset(load_dataset(name, configuration or None, split="train"))
        documents += [text.encode() for text in texts]
    return [document for document in documents if document]


def byte_tokens(document: bytes) -> np.ndarray:
    """Bytes as tokens, ended by a zero byte, which text does not contain."""
    return np.frombuffer(document + b"\0", dtype=np.uint8)


def tokenizer_tokens(tokenizer) -> Callable[[bytes], np.ndarray]:
    """A function from text to the tokens of a Hugging Face tokenizer, ended by its end-of-text token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(document: bytes) -> np.ndarray:
        text = document.decode("utf-8", errors="replace")
        return np.asarray(tokenizer.encode(text, add_special_tokens=False) + end, dtype=np.int32)

    return encode


def split_tokens(documents: list[bytes], encode: Callable[[bytes], np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """(training tokens, held-out tokens), each one flat stream.

    Every 20th document is held out; with fewer than 20 documents, the last 5 % of all tokens.
    """
    encoded = [encode(document) for document in documents]
    if len(encoded) >= HELD_OUT_EVERY:
        held_out = np.concatenate(encoded[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
        del encoded[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        training = np.concatenate(encoded)
    else:
        stream = np.concatenate(encoded)
        training, held_out = np.split(stream, [len(stream) - len(stream) // HELD_OUT_EVERY])
    return torch.from_numpy(training), torch.from_numpy(held_out)


@dataclass
class Sequences:
    """A stream of tokens cut into sequences of `length` tokens, seen in a shuffled order that `seed` fixes."""

    tokens: torch.Tensor
    length: int
    seed: int = 0

    def __post_init__(self) -> None:
        self.count = len(self.tokens) // self.length
        if self.count == 0:
            raise ValueError(
                f"{len(self.tokens)} tokens are not enough for one sequence of {self.length}; give more text"
            )
        self._epoch: int | None = None
        self._order = torch.empty(0, dtype=torch.long)

    def _sequence(self, number: int) -> torch.Tensor:
        return self.tokens[number * self.length : (number + 1) * self.length]

    def training_batch(self, first: int, size: int) -> torch.Tensor:
        """int64 [size, length]: the sequences at positions first ... first + size - 1 of the endless shuffled order."""
        picked = []
        for position in range(first, first + size):
            epoch, index = divmod(position, self.count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                self._epoch, self._order = epoch, torch.randperm(self.count, generator=generator)
            picked.append(self._sequence(int(self._order[index])))
        return torch.stack(picked).long()

    def evaluation_batch(self, number: int, of: int, size: int) -> torch.Tensor:
        """int64 [size, length]: batch `number` of `of` batches that are spread evenly over the stream."""
        starts = [(number * size + row) * self.count // (of * size) for row in range(size)]
        return torch.stack([self._sequence(start) for start in starts]).long()
