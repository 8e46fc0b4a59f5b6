"""The package's commands: `zeropp-fp8 doctor | check | ...` (`python -m zeropp_fp8 ...`), each with --help."""

from __future__ import annotations

import difflib
import importlib
import sys

import zeropp_fp8

COMMANDS = {
    "doctor": ("zeropp_fp8.doctor.diagnosis", "look at this machine and its links, alone or under a launcher"),
    "check": ("zeropp_fp8.doctor.check", "look at a ds_config without starting a job"),
    "plan": ("zeropp_fp8.plan.__main__", "estimate steps by formula, and recommend a recipe"),
    "numerics": ("zeropp_fp8.numerics.show", "show what a run has sampled of its rounding"),
    "reference": ("zeropp_fp8.numerics.reference", "run a job for some steps, and in high precision, and compare"),
    "bisect": ("zeropp_fp8.numerics.bisect", "find the part of low precision that causes a difference"),
    "export": ("zeropp_fp8.export", "copy a checkpoint with decoded weights, for stock DeepSpeed and zero_to_fp32"),
}
USAGE = "usage: python -m zeropp_fp8 COMMAND ... | --version\n" + "\n".join(
    f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items()
)


def main(argv: list[str] | None = None) -> None:
    """Run a command; exit with status 2 if there is none of that name."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # The deepspeed launcher puts --local_rank=N in front; the environment has it too.
    while arguments and arguments[0].startswith(("--local_rank=", "--local-rank=")):
        arguments.pop(0)
    asked = arguments[0] if arguments else ""
    if asked in COMMANDS:
        return importlib.import_module(COMMANDS[asked][0]).main(arguments[1:])
    if asked == "--version":
        from zeropp_fp8.doctor.versions import looks_at_ds_configs

        how = "are looked at" if looks_at_ds_configs() else "are not looked at: enable() or zeropp_fp8.run is needed"
        print(f"zeropp_fp8 {zeropp_fp8.__version__} (ds_configs {how})")
        return
    helped = asked in ("-h", "--help")
    if asked and not helped:
        near = difflib.get_close_matches(asked, COMMANDS, n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        print(f'zeropp_fp8: there is no command "{asked}"{hint}; there are {", ".join(COMMANDS)}', file=sys.stderr)
        raise SystemExit(2)
    print(USAGE, file=sys.stdout if helped else sys.stderr)
    raise SystemExit(0 if helped else 2)


if __name__ == "__main__":
    main()
