"""The samples of a run: which layers lose most, as a table, and all of them over time, as a picture.

python -m zeropp_fp8 numerics numerics.jsonl
python -m zeropp_fp8 numerics numerics.jsonl --picture numerics.png
python -m zeropp_fp8 numerics numerics.jsonl --picture underflow.png --of underflow
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zeropp_fp8.numerics.picture import height_of, layer_map
from zeropp_fp8.outputs import Parser, drawn, json_at, said, table, whole

DRAWN = {
    "snr_db": ("signal-to-noise ratio", "dB"),
    "amax": ("largest number", "magnitude"),
    "underflow": ("what became zero", "share of numbers, 0 to 1"),
    "overflow": ("what was cut off", "share of numbers, 0 to 1"),
    "non_finite": ("what is not finite", "share of numbers, 0 to 1"),
}


def read(path: str, engine: int = 0) -> list[dict]:
    """The samples of one engine, in the order in which they were taken, without lines that are blank or cut: a run that
    is killed may leave one.
    """
    samples, cut = [], []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        try:
            sample = json.loads(line)
        except ValueError:  # neither JSON nor text
            cut += [number] if line.strip() else []
            continue
        if not _is_sample(sample):
            raise ValueError(f"{path}, line {number}, is no sample of numerics")
        samples.append(sample)
    if cut and not samples:
        raise ValueError(f"{path}, line {cut[0]}, is no sample of numerics")
    if cut:
        print(f"numerics: {path}: left out, because they are cut: line {', '.join(map(str, cut))}", file=sys.stderr)
    own, engines = [one for one in samples if one["engine"] == engine], {one["engine"] for one in samples}
    if not own:
        others = f"; --engine may be {' or '.join(map(str, sorted(engines)))}" if engines else ""
        every = 'set "numerics": {"every": 100} in the section'
        raise ValueError(f"{path} has no sample of engine {engine}; {every}{others}")
    return own


def _is_sample(value: Any) -> bool:
    """Whether it has all that is shown."""
    try:
        known = {"engine", "step"} <= value.keys() and (value["cost"] is None or "share" in value["cost"])
        return known and all({"kind", "layer", *DRAWN} <= row.keys() for row in value["rows"])
    except (AttributeError, KeyError, TypeError):
        return False


def latest(samples: Sequence[dict]) -> list[dict]:
    """The newest row of each kind and layer, with its step; of a kind those that are not finite come first, then those
    with the least signal-to-noise."""
    rows = {(row["kind"], row["layer"]): {**row, "step": one["step"]} for one in samples for row in one["rows"]}
    snr_db = {key: math.inf if row["snr_db"] is None else row["snr_db"] for key, row in rows.items()}
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0], -rows[key]["non_finite"], snr_db[key]))]


def worst_layers(samples: Sequence[dict], worst: int) -> str:
    """The layers of each kind that lose most, and what sampling cost."""
    rows = [("kind", "dB", "amax", "to zero", "cut off", "not finite", "step", "layer")]
    shown: Counter[str] = Counter()
    for row in latest(samples):
        shown[row["kind"]] += 1
        if shown[row["kind"]] <= worst:
            unknown = "-" if row["non_finite"] else "exact"
            snr_db = unknown if row["snr_db"] is None else f"{row['snr_db']:.1f}"
            shares = (f"{100 * row[name]:.3g}%" for name in ("underflow", "overflow", "non_finite"))
            rows.append((row["kind"], snr_db, f"{row['amax']:.3g}", *shares, str(row["step"]), row["layer"]))
    lines = table(rows, words=("kind", "layer"))
    lines += [f"{kind}: {count - worst} more" for kind, count in shown.items() if count > worst]
    costs = [sample["cost"]["share"] for sample in samples if sample["cost"]]
    if costs:
        lines.append(f"samples took {100 * sum(costs) / len(costs):.2g} % of the time of {len(costs)} intervals")
    return "\n".join(lines)


def draw(samples: Sequence[dict], path: str, what: str = "snr_db") -> None:
    """A map for each kind, layers by samples, coloured by one of DRAWN; what was not sampled is white."""
    kinds: dict[str, dict[str, list[float]]] = {}
    for place, sample in enumerate(samples):
        for row in sample["rows"]:
            values = kinds.setdefault(row["kind"], {}).setdefault(row["layer"], [math.nan] * len(samples))
            values[place] = math.nan if row[what] is None else row[what]
    if not kinds:
        raise ValueError("there is nothing to draw: nothing was rounded")
    steps, (title, unit) = [sample["step"] for sample in samples], DRAWN[what]
    with drawn(path, [height_of(layers) for layers in kinds.values()]) as axes:
        for axis, (kind, layers) in zip(axes, kinds.items()):
            layer_map(axis, layers, steps, f"{kind}: {title}", unit)


def main(argv: Sequence[str] | None = None) -> None:
    """Exit status 1 where there is nothing to show."""
    parser = Parser("numerics", __doc__)
    parser.add_argument("file", help="numerics.file of the section")
    parser.add_engine()
    parser.add_argument("--worst", type=whole(0), default=5, help="layers of each kind in the table")
    parser.add_picture("draw all samples into this file (matplotlib)")
    parser.add_argument("--of", choices=DRAWN, default="snr_db", help="what the picture shows (%(default)s)")
    parser.add_json()
    arguments = parser.parse_args(argv)
    try:
        with json_at(arguments.json) as found:
            samples = read(arguments.file, arguments.engine)
            found["rows"] = latest(samples)
            print(worst_layers(samples, arguments.worst))
            if arguments.picture:
                draw(samples, arguments.picture, arguments.of)
    except (OSError, ValueError) as error:
        raise SystemExit(f"numerics: {said(error)}") from None


if __name__ == "__main__":
    main()
