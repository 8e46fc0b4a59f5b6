"""The trainings whose losses wire_convergence.py compares, and which of their results can be compared."""

from __future__ import annotations

import json
from collections import defaultdict

from benchmarks.harness import seeds

STOCK, LOSSLESS, IN_TREE = "stock", "lossless", "in-tree"
SECTIONS = {
    STOCK: None,
    LOSSLESS: {"recipe": "lossless"},
    "zeropp": {"recipe": "zeropp"},
    "zeropp-4bit": {"recipe": "zeropp-4bit"},
    "zeropp-exact": {"recipe": "zeropp-exact"},
    "lossless-muon": {"recipe": "lossless", "partition": "whole_tensor"},
    "zeropp-muon": {"recipe": "zeropp", "partition": "whole_tensor"},
    "zeropp-int8-muon": {"recipe": "zeropp", "partition": "whole_tensor", "gradients": {"inter_format": "int8"}},
    IN_TREE: None,
}
# Results are kept of recipes and formats of earlier versions too.
ORDER = (*SECTIONS, "zeropp-3bit-gradients", "zeropp-2bit-gradients", "zeropp-diff", "zeropp-2bit")
REFERENCES = (STOCK, LOSSLESS)


def groups_of(results: list[dict]) -> list[dict]:
    """Results of one run each, grouped by what must be the same: settings, text, hardware.

    Returns:
        of each group {"settings", "data", "hardware", "rows", "comparison"}; rows are its results in the runs' order.
    """
    found = defaultdict(list)
    for result in results:
        hardware = {key: result["hardware"].get(key) for key in ("gpu", "cpu")}
        same = {"settings": result["settings"], "data": result["data"], "hardware": hardware}
        found[json.dumps(same, sort_keys=True)].append(result)
    groups = []
    for same, rows in found.items():
        rows.sort(key=lambda row: (ORDER.index(row["run"]), row["seed"]))
        groups.append({**json.loads(same), "rows": rows, "comparison": seeds.compare(rows, REFERENCES)})
    return groups
