"""Other versions of DeepSpeed and torch: how the parity suite ended with them."""

from __future__ import annotations

from packaging.version import Version

from benchmarks.compat import lowest_bounds
from benchmarks.report.blocks import Block, table

PACKAGES = ("deepspeed", "torch", "transformers", "peft", "accelerate", "pydantic", "python")


def compat(result: dict, other: dict) -> str:
    """Counts by version of both; of the first what tests say that did not pass. The files of the other have moved."""
    counts, others, lowest = [], [], lowest_bounds()
    for each in (result, other):
        for row in each["rows"]:
            versions = [(row["versions"].get(name) or "").partition("+")[0] for name in PACKAGES]
            if all(Version(row["versions"].get(name, "0")) == Version(lowest[name]) for name in lowest):
                versions[0] += ", lowest bounds"
            ended = map(str, (row["passed"], len(row["failed"]), len(row["skipped"])))
            counts.append([*versions, *ended, f"`{each['commit']}`"])
    for row in result["rows"]:
        for ended in ("failed", "skipped"):
            tests = row[ended]
            for says in dict.fromkeys(tests.values()):
                names = ", ".join(f"`{name}`" for name in tests if tests[name] == says)
                others.append([ended, row["versions"]["deepspeed"], says, names])
    head = ["DeepSpeed", *PACKAGES[1:-1], "Python", "passed", "failed", "skipped", "commit"]
    return f"{table(head, counts)}\n\n{table(['', 'DeepSpeed', 'because', 'tests'], others)}"


BLOCKS = {"compat": Block(compat, ("compat/cpu-4-gloo", "compat/cpu-4-gloo-torch-2.11-2.15"))}
