"""`python -m zeropp_fp8 --version`."""

from __future__ import annotations

import argparse
import os
import sys

import zeropp_fp8


def main(argv: list[str] | None = None) -> None:
    """Answer what was asked on the command line."""
    parser = argparse.ArgumentParser(prog="python -m zeropp_fp8", description=zeropp_fp8.__doc__.partition("\n")[0])
    watched = "zeropp_fp8_autoload" in sys.modules and os.environ.get("ZEROPP_FP8_AUTOLOAD") != "0"
    how = "are looked at" if watched else "are not looked at: enable() or zeropp_fp8.run is needed"
    parser.add_argument(
        "--version", action="version", version=f"zeropp_fp8 {zeropp_fp8.__version__} (ds_configs {how})"
    )
    parser.parse_args(argv)
    parser.print_help()


if __name__ == "__main__":
    main()
