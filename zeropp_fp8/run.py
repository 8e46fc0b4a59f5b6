"""Run an unmodified training script with the plugin on: `python -m zeropp_fp8.run SCRIPT ARGS`.

With a launcher: `deepspeed --module zeropp_fp8.run train.py ...`, `torchrun -m zeropp_fp8.run train.py ...`,
`accelerate launch -m zeropp_fp8.run train.py ...`. `-m MODULE` in place of SCRIPT runs a module. Processes that the
script starts by `multiprocessing` have the plugin on too.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

USAGE = "usage: python -m zeropp_fp8.run [-m] SCRIPT [ARGS ...]"


def main(argv: list[str] | None = None) -> None:
    """Enable the plugin and run a script or module as __main__."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The deepspeed launcher puts --local_rank=N in front of the script's own arguments.
    leading = []
    while arguments and arguments[0].startswith(("--local_rank=", "--local-rank=")):
        leading.append(arguments.pop(0))
    is_module = arguments[:1] == ["-m"]
    if is_module:
        arguments.pop(0)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__ + "\n" + USAGE)
        raise SystemExit(0 if arguments else 2)
    target, rest = arguments[0], arguments[1:]
    if is_module:
        sys.path.insert(0, os.getcwd())
    # Look only for a module's outermost package: looking further would import it without the plugin.
    if not (importlib.util.find_spec(target.partition(".")[0]) if is_module else os.path.exists(target)):
        if os.environ.get("RANK", "0") == "0":  # a launcher ends the other ranks
            print(f"zeropp_fp8.run: there is no {'module' if is_module else 'script'} {target}", file=sys.stderr)
        raise SystemExit(2)

    from zeropp_fp8.children import enable_with_children

    enable_with_children()
    sys.argv = [target, *leading, *rest]
    if is_module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
