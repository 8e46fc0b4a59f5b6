"""Which part of low precision takes a job away from high precision: pieces are given up one by one, then layers.

python -m zeropp_fp8 bisect --steps 20 -- deepspeed --module zeropp_fp8.run train.py --deepspeed ds_config.json

The launch line runs in `lossless`, as it is, and once more for each piece (weights, gradients within and between nodes
and at rest, compute, optimizer, frozen, activations) with that piece alone in high precision. The one without which the
distance to `lossless` falls most is at fault. Is that compute, its layers are halved: the half whose high precision
takes most of the distance away has the fault, until one layer is left or neither half has it alone.

Distances are root mean squares over steps. Losses of few steps differ little; `--by grad_norm` sees more of gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from zeropp_fp8.numerics.reference import Experiment, Run, check_the_same, distance, experiment_of, parser_of

MOST = 0.6  # of a distance: with a fault in each half, either takes half of it away


def halved(layers: Sequence[str], remaining: Callable[[Sequence[str]], float], before: float) -> list[str]:
    """The layers at fault: the fewest found that take most of a distance away.

    Args:
        remaining: the distance with some layers in high precision; `before`: with none of them.
    """
    while len(layers) > 1:
        halves = layers[: len(layers) // 2], layers[len(layers) // 2 :]
        left = [remaining(half) for half in halves]
        if before - min(left) < MOST * before:
            break
        layers = halves[left.index(min(left))]
    return list(layers)


class Bisection:
    """The runs of a bisection; `what` their distances are of: "loss" or "grad_norm".

    Raises:
        SystemExit: a run fails, or cannot be compared.
    """

    def __init__(self, experiment: Experiment, what: str) -> None:
        self.experiment, self.what = experiment, what
        self.reference = experiment.run("in high precision", high=["all"])

    def distance(self, name: str, high: Sequence[str] = (), skip_modules: Sequence[str] = ()) -> tuple[float, Run]:
        """(the distance to `lossless` of a run, the run)."""
        run = self.experiment.run(name, high, skip_modules)
        check_the_same(run, self.reference, name)
        found = distance(run, self.reference, self.what)
        print(f"zeropp_fp8: distance {found:.4g} {name}", flush=True)
        return found, run

    def pieces(self) -> tuple[float, Run, dict[str, float]]:
        """(the distance as it is, that run, the distance with each piece alone in high precision)."""
        whole, run = self.distance("as it is")
        if not run.pieces:
            raise SystemExit("nothing of this job is in low precision")
        return whole, run, {p: self.distance(f"with {p} in high precision", [p])[0] for p in run.pieces}

    def layers(self, layers: Sequence[str], whole: float) -> list[str]:
        """Those of compute that are at fault."""

        def remaining(some: Sequence[str]) -> float:
            name = f"with {len(some)} of {len(layers)} layers in high precision, {some[0]} and after"
            return self.distance(name, skip_modules=some)[0]

        return halved(layers, remaining, whole)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("bisect", __doc__, 20)
    parser.add_argument("--by", choices=("loss", "grad_norm"), default="loss", help="what distances are of")
    arguments = parser.parse_args(argv)
    say(Bisection(experiment_of(parser, arguments), arguments.by))


def say(bisection: Bisection) -> None:
    """Make the runs, and print what they tell."""
    whole, run, without = bisection.pieces()
    print(f"{'in high precision':<24}{'distance':>12}\n{'nothing':<24}{whole:>12.4g}")
    for piece, left in sorted(without.items(), key=lambda each: each[1]):
        print(f"{piece:<24}{left:>12.4g}")
    fault = min(without, key=without.__getitem__)
    if without[fault] >= whole:
        print("no piece by itself carries the difference: several do, or it is not precision (reference --repeat)")
        return
    print(f"{fault} carries most of the difference")
    if fault == "compute":
        layers = bisection.layers(run.layers, whole)
        print(f"it is in {len(layers)} of {len(run.layers)} layers; these compute in high precision with")
        print(f'"compute": {{"skip_modules": {json.dumps(layers)}}}, besides those that are there')


if __name__ == "__main__":
    main()
