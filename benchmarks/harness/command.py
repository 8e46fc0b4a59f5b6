"""Options that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

import torch

from benchmarks.harness.zero3 import without_refused
from examples.options import finite, new_file, whole


def command(doc: str, name: str, runs: Collection[str], sizes: Collection[str], size: str) -> argparse.ArgumentParser:
    """A command line with --runs, --size, --ranks, --timeout and --out."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", help=f"some of {','.join(runs)} (default: all that there are)")
    parser.add_argument("--size", choices=sizes, default=size, help="default: %(default)s")
    parser.add_argument("--ranks", type=whole(1), default=1)
    parser.add_argument(
        "--timeout", type=finite(above=0), default=570, help="seconds for everything (default: %(default)g)"
    )
    parser.add_argument("--out", type=new_file, default=f"runs/{name}.json", help="JSON file (default %(default)s)")
    return parser


def add_link(parser: argparse.ArgumentParser) -> None:
    """--gbit between two emulated nodes."""
    parser.add_argument(
        "--gbit",
        type=finite(least=0),
        help="two emulated nodes with so much between them (0: not shaped; root); else one node",
    )


def add_batch(parser: argparse.ArgumentParser, sequence: int, micro_batch: int = 1) -> None:
    """--micro-batch and --sequence."""
    parser.add_argument(
        "--micro-batch", type=whole(1), default=micro_batch, help="sequences of a rank (default %(default)s)"
    )
    parser.add_argument("--sequence", type=whole(1), default=sequence, help="tokens (default %(default)s)")


def add_checkpointing(parser: argparse.ArgumentParser, default: bool) -> None:
    """--checkpointing."""
    what = "keep of every layer nothing but its input (default: %(default)s)"
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=default, help=what)


def add_steps(
    parser: argparse.ArgumentParser, steps: int, warmup: int, rounds: int | None = None, least_warmup: int = 0
) -> None:
    """--steps and --warmup, and --rounds where a run may be built several times."""
    parser.add_argument("--steps", type=whole(1), default=steps, help="timed ones (default %(default)s)")
    parser.add_argument(
        "--warmup", type=whole(least_warmup), default=warmup, help="steps before them (default %(default)s)"
    )
    if rounds is not None:
        parser.add_argument("--rounds", type=whole(1), default=rounds, help="odd ones backwards (default %(default)s)")


def add_memory(parser: argparse.ArgumentParser) -> None:
    """--gib."""
    parser.add_argument("--gib", type=finite(above=0), help="memory that a process may have")


def choose_runs(args: argparse.Namespace, parser: argparse.ArgumentParser, runs: Collection[str]) -> None:
    """Make args.runs the list of those asked for, else of all."""
    args.runs = args.runs.split(",") if args.runs else list(runs)
    unknown = [run for run in args.runs if run not in runs]
    if unknown:
        parser.error(f"unknown run {unknown[0]}; runs are {', '.join(runs)}")


def choose_sections(
    args: argparse.Namespace, parser: argparse.ArgumentParser, sections: Mapping[str, dict | None]
) -> None:
    """Make args.runs the list of those asked for, without those whose section this version refuses (printed)."""
    choose_runs(args, parser, sections)
    args.runs = without_refused({run: sections[run] for run in args.runs})


def cut_into_nodes(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Set args.nodes: two where --gbit says what is between them, else one; ends with an error where that cannot be."""
    args.nodes = 1 if args.gbit is None else 2
    if args.ranks % args.nodes:
        parser.error(f"{args.ranks} ranks cannot be cut into {args.nodes} nodes")
    if torch.cuda.is_available() and torch.cuda.device_count() < args.ranks:
        parser.error(f"{args.ranks} GPUs are needed, {torch.cuda.device_count()} found")
