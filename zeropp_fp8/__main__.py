"""`python -m zeropp_fp8 --version`."""

from __future__ import annotations

import argparse

import zeropp_fp8


def main(argv: list[str] | None = None) -> None:
    """Answer what was asked on the command line."""
    parser = argparse.ArgumentParser(prog="python -m zeropp_fp8", description=zeropp_fp8.__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"zeropp_fp8 {zeropp_fp8.__version__}")
    parser.parse_args(argv)
    parser.print_help()


if __name__ == "__main__":
    main()
