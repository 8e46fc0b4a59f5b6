"""Blocks of documents: found, made of results, filled in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks import ARCHIVED
from benchmarks.harness.results import RESULTS, finished_result, read_result

MARKED = re.compile(r"(<!-- block: (\w+) -->\n)(.*?)(<!-- end -->)", flags=re.S)
WIDTH = 120


@dataclass(frozen=True)
class Block:
    """The content of a block.

    Attributes:
        make: of the results, in order, Markdown.
        files: of the results, below benchmarks/results and without ".json".
        cut_short: those of them whose runs were cut short; the rows that they hold are whole.
        sourced: the source is written below.
    """

    make: Callable[..., str]
    files: tuple[str, ...] = ()
    cut_short: tuple[str, ...] = ()
    sourced: bool = True

    def text(self) -> str:
        """The block with its source.

        Raises:
            UnfinishedError: a result was cut short, and it is not in `cut_short`.
        """
        paths = [RESULTS / f"{name}.json" for name in self.files]
        results = [
            read_result(path) if name in self.cut_short else finished_result(path)
            for name, path in zip(self.files, paths)
        ]
        made = self.make(*results).rstrip() + "\n"
        return f"{made}\n{self._source(results)}\n" if self.files and self.sourced else made

    def _source(self, results: list[dict]) -> str:
        named = [
            f"`benchmarks/results/{name}.json` ({since(result)}{'; cut short' if name in self.cut_short else ''})"
            for name, result in zip(self.files, results)
        ]
        return "Source: " + ",\n".join(named) + "."


def since(result: dict) -> str:
    """The commit that was measured; of older files, which do not record it, the one that added them."""
    return f"commit `{result['commit']}`" if result["commit"] else f"added in `{result['kept_since']}`"


def filled(text: str, blocks: dict[str, Block]) -> str:
    """A document with its blocks made anew.

    Raises:
        KeyError: a block that nobody makes.
        ValueError: a block without an end, which would take with it what stands up to the end of the next.
    """
    if not len(MARKED.findall(text)) == text.count("<!-- block: ") == text.count("<!-- end -->"):
        raise ValueError("a block has no end, or an end no block")

    def fill(found: re.Match) -> str:
        if found[2] not in blocks:
            raise KeyError(f"no function makes the block {found[2]}")
        return f"{found[1]}{blocks[found[2]].text()}{found[4]}"

    return MARKED.sub(fill, text)


def named(text: str) -> Iterator[str]:
    """The names of a document's blocks."""
    return (found[2] for found in MARKED.finditer(text))


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    assert len({len(line) for line in lines}) == 1, head
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |").replace(" --- ", "---") for line in lines)


def paragraph(text: str) -> str:
    """Wrapped as the documents are; a number stays beside its %."""
    joined = " ".join(text.split()).replace(" %", "\0%")
    lines = textwrap.wrap(joined, WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def code_of(question: str) -> str:
    """The command that prints the code of an archived question."""
    return f"`git show {ARCHIVED[question]}:benchmarks/{question}.py`"


def bold(text: str) -> str:
    return f"**{text}**"
