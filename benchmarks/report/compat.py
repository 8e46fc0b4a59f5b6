"""Other versions of DeepSpeed and torch: how the parity suite ended with them."""

from __future__ import annotations

from benchmarks.report.blocks import Block, table


def compat(result: dict) -> str:
    """Counts by version, and what the tests say that did not pass."""
    counts, others = [], []
    for row in result["rows"]:
        of, failed, skipped = row["versions"], row["failed"], row["skipped"]
        versions = [of["deepspeed"], of["torch"].partition("+")[0], of["transformers"], of["python"]]
        counts.append([*versions, *map(str, (row["passed"], len(failed), len(skipped)))])
        for ended, tests in (("failed", failed), ("skipped", skipped)):
            for says in dict.fromkeys(tests.values()):
                names = ", ".join(f"`{name}`" for name in tests if tests[name] == says)
                others.append([ended, versions[0], says, names])
    head = ["DeepSpeed", "torch", "transformers", "Python", "passed", "failed", "skipped"]
    return f"{table(head, counts)}\n\n{table(['', 'DeepSpeed', 'because', 'tests'], others)}"


BLOCKS = {"compat": Block(compat, ("compat/cpu-4-gloo",))}
