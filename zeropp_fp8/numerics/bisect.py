"""Which part of low precision takes a job away from high precision: pieces are given up one by one, then GEMMs, layers.

python -m zeropp_fp8 bisect --steps 20 -- deepspeed --module zeropp_fp8.run train.py --deepspeed ds_config.json

The launch line runs in `lossless`, as it is, and once more for each piece (weights, gradients within and between nodes,
stored gradients, compute, optimizer, frozen, activations) with that piece alone in high precision. The piece that
reduces the distance to `lossless` most is the cause. If that is compute, each GEMM is tried alone: output, grad_input,
grad_weight. Then layers are halved, of compute, weights, gradients between ranks and frozen weights, and the half that
reduces the distance more is halved again, until one layer is left or neither half is the cause alone. Printed last is
the part of the section with which the job is nearly as good as without the piece.

Distances are root mean squares over steps. Losses of few steps differ little; `--by grad_norm` sees more of gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from zeropp_fp8.config import SKIPPED_IN
from zeropp_fp8.numerics.reference import Experiment, Run, check_the_same, distance, experiment_of, parser_of
from zeropp_fp8.outputs import json_at, table

MOST = 0.6  # of what a piece carries: with a fault in each half, either takes half of it away


def halved(
    layers: Sequence[str], remaining: Callable[[Sequence[str]], float], before: float, carried: float
) -> list[str]:
    """The layers at fault: the fewest found that take most of what a piece carries away.

    Args:
        remaining: the distance with some layers in high precision; `before`: with none of them.
        carried: how much smaller the distance is with all of them.
    """
    while len(layers) > 1:
        halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        left = [remaining(half) for half in halves]
        if not before - min(left) >= MOST * carried:  # of infinite ones the difference is NaN
            break
        layers = halves[left.index(min(left))]
    return list(layers)


def changed_section(piece: str, layers: Sequence[str], gemm: str | None = None) -> dict[str, Any]:
    """The part of a ds_config's section that leaves layers of a piece, or one GEMM of them, in high precision."""
    if gemm is not None:
        return {"compute": {"high_precision_gemms": {gemm: list(layers)}}}
    return {SKIPPED_IN[piece]: {"skip_modules": list(layers)}}


class Bisection:
    """The runs of a bisection; `what` their distances are of: "loss" or "grad_norm"."""

    def __init__(self, experiment: Experiment, what: str) -> None:
        self.experiment, self.what = experiment, what
        self.reference = experiment.run("in high precision", high=["all"])

    def distance(self, name: str, **changes) -> tuple[float, Run]:
        """(the distance to `lossless` of a run, the run)."""
        run = self.experiment.run(name, **changes)
        check_the_same(run, self.reference, name)
        found = distance(run, self.reference, self.what)
        if math.isnan(found):
            raise SystemExit(
                f"no step of either run has a finite {self.what}; a loss has to come through "
                "engine.backward(loss): call that, or compare --by grad_norm"
            )
        print(f"zeropp_fp8: distance {found:.4g} {name}", flush=True)
        return found, run

    def pieces(self) -> tuple[float, Run, dict[str, float]]:
        """(the distance as it is, that run, the distance with each piece alone in high precision)."""
        whole, run = self.distance("as it is")
        if not run.pieces:
            raise SystemExit("nothing of this job is in low precision")
        return whole, run, {p: self.distance(f"with {p} in high precision", high=[p])[0] for p in run.pieces}

    def gemms(self, run: Run) -> dict[str, float]:
        """The distance with each GEMM alone in high precision; of a single one compute has told it."""
        if len(run.gemms) < 2:
            return {}
        return {g: self.distance(f"with {g} in high precision", gemms={g: ["*"]})[0] for g in run.gemms}

    def layers(self, piece: str, run: Run, whole: float, carried: float, gemm: str | None = None) -> list[str]:
        """The layers of a piece, or of a GEMM of it, that are at fault."""
        layers = run.layers[piece]

        def remaining(some: Sequence[str]) -> float:
            name = f"with {len(some)} of {len(layers)} layers in high precision, {some[0]} and after"
            left_out = {SKIPPED_IN[piece]: list(some)}
            return self.distance(name, **({"skip_modules": left_out} if gemm is None else {"gemms": {gemm: some}}))[0]

        return halved(layers, remaining, whole, carried)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("bisect", __doc__, 20)
    parser.add_argument("--by", choices=("loss", "grad_norm"), default="loss", help="what distances are of")
    arguments = parser.parse_args(argv)
    with json_at(arguments.json) as found:
        say(Bisection(experiment_of(parser, arguments), arguments.by), found)


def _show(title: str, whole: float, without: dict[str, float]) -> None:
    rows = [("nothing", whole), *sorted(without.items(), key=lambda each: each[1])]
    print("\n".join(table([(title, "distance"), *((piece, f"{left:.4g}") for piece, left in rows)], words=(title,))))


def say(bisection: Bisection, found: dict[str, Any]) -> None:
    """Make the runs, and print what they tell; `found` gets the same."""
    whole, run, without = bisection.pieces()
    found |= {"by": bisection.what, "distance": whole, "without": without}
    _show("in high precision", whole, without)
    fault = min(without, key=without.__getitem__)
    if without[fault] >= whole:
        print("no piece by itself carries the difference: several do, or it is not precision (reference --repeat)")
        return
    found["fault"] = fault
    print(f"{fault} carries most of the difference")
    carried, gemm = whole - without[fault], None
    of_gemms = bisection.gemms(run) if fault == "compute" else {}
    if of_gemms:
        _show("GEMM in high precision", whole, of_gemms)
        least = min(of_gemms, key=of_gemms.__getitem__)
        gemm = least if whole - of_gemms[least] >= MOST * carried else None
        print(f"{gemm} carries most of that" if gemm else "no GEMM by itself carries most of that")
    if not run.layers.get(fault):
        print(f"layers of {fault} cannot be left out one by one")
        return
    layers = bisection.layers(fault, run, whole, carried, gemm)
    found["section"] = changed_section(fault, layers, gemm)
    print(f"it is in {len(layers)} of {len(run.layers[fault])} layers; these are in high precision with")
    print(f"{json.dumps(found['section'])[1:-1]}, besides what is there")


if __name__ == "__main__":
    main()
