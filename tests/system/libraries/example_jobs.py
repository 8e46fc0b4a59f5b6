"""An example script on ranks."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def what_a_script_raises(argv):
    """Return what `python ARGV` ends with; "" if with nothing."""
    sys.argv = list(argv)
    sys.modules.pop("models")  # that of tests/: the script has its own
    sys.path.insert(0, str(Path(argv[0]).parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
