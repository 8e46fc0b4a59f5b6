"""The blocks of the documentation made anew, or (--check) compared with what stands there.

    python -m benchmarks.report
    python -m benchmarks.report --check
    python -m benchmarks.report --pictures                           (those that are kept beside the results)
    python -m benchmarks.report --draw mine.png runs/two_nodes.json  (one of your own)

With --check nothing is written, and the exit status is 1 where a block is not as it would be.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.harness.environment import ROOT
from benchmarks.report import (
    compat,
    compute,
    doctor,
    faults,
    fp8_lm,
    generation,
    handover,
    host_time,
    integrations,
    lora,
    numerics,
    pictures,
    recommended,
    rlhf,
    two_gpus,
    upstream,
    wire,
    zero,
)
from benchmarks.report.blocks import MARKED, Block, filled, named

DOCUMENTS = (
    "README.md",
    "docs/method.md",
    "docs/compute.md",
    "docs/deepspeed.md",
    "docs/doctor.md",
    "docs/recipes.md",
    "docs/results.md",
    "docs/results-features.md",
    "docs/results-quality.md",
    "docs/fp8-lm.md",
    "docs/fsdp2.md",
    "docs/generation.md",
    "docs/handover.md",
    "docs/integrations.md",
    "docs/lora.md",
    "docs/muon.md",
    "docs/numerics.md",
    "docs/rlhf.md",
    "docs/checkpoints.md",
    "benchmarks/results/faults/README.md",
    "benchmarks/results/upstream/README.md",
)
TOPICS = (zero, two_gpus, host_time, compat, compute, doctor, fp8_lm, lora, generation, handover, numerics, rlhf)
TOPICS += (faults, integrations, recommended, upstream, wire)


def all_blocks() -> dict[str, Block]:
    """Of all topics, by name."""
    return {name: block for topic in TOPICS for name, block in topic.BLOCKS.items()}


def differing(before: str, after: str) -> list[str]:
    """The names of the blocks that two versions of a document do not have alike."""
    return [a[2] for a, b in zip(MARKED.finditer(before), MARKED.finditer(after)) if a[3] != b[3]]


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; status 1 where a block is not as it would be"
    )
    parser.add_argument("--pictures", action="store_true", help="draw those that are kept")
    parser.add_argument("--draw", nargs="+", metavar="FILE", help="a PNG file to be, and results of one question")
    args = parser.parse_args(argv)
    if args.pictures:
        pictures.draw_kept()
        return 0
    if args.draw:
        pictures.draw(args.draw[1:], args.draw[0])
        return 0
    blocks, wrong = all_blocks(), []
    before = {name: (root / name).read_text() for name in DOCUMENTS}
    after = {name: filled(text, blocks) for name, text in before.items()}
    if unplaced := sorted(set(blocks).difference(*map(named, before.values()))):
        raise KeyError(f"no document has the block {', '.join(unplaced)}")
    for name in DOCUMENTS:
        wrong += [f"{name}: {block}" for block in differing(before[name], after[name])]
        if not args.check:
            (root / name).write_text(after[name])
    for block in wrong:
        print(f"{block} {'is not what python -m benchmarks.report makes' if args.check else 'is new'}")
    return 1 if args.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
