"""Name patterns, as `skip_modules` and `frozen.modules` hold them."""

from __future__ import annotations

from fnmatch import fnmatch


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a dotted name or a run of its parts ("layers.0") is one of the patterns (with * and ?).

    What matches a name matches it with more in front, too: of modules around it, or of PEFT's "base_model.model".
    """
    parts = name.split(".")
    runs = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return any(fnmatch(run, pattern) for pattern in patterns for run in runs)
