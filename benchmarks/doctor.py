"""The doctor on this machine: the words that it prints, and the file that it writes for tools.

    python -m benchmarks.doctor --ranks 2 --out h100-2-nvlink.json
    python -m benchmarks.doctor --ranks 2 --params 1.3e9 --seconds 4     (all other options are the doctor's)

All ranks are on this host. It and its GPUs are numbered: their names say nothing of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.results import write_result
from examples.options import new_file, whole


def numbered(text: str, ranks: list[dict]) -> str:
    """A text with host0, gpu0, gpu1 and so on for the names in it."""
    names = {name: "host0" for one in ranks for name in (one["place"]["host"], one["host"])}
    names |= {one["device"]["uuid"]: f"gpu{rank}" for rank, one in enumerate(ranks) if "uuid" in one["device"]}
    for name, number in names.items():
        text = re.sub(rf"\b{re.escape(name)}\b", number, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=whole(1), default=1)
    parser.add_argument("--out", type=new_file, default="runs/doctor.json", help="JSON file (default %(default)s)")
    args, options = parser.parse_known_args()
    result = describe("doctor")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun sets it, with a warning
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "doctor.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        doctor = ["-m", "zeropp_fp8", "doctor", *options, f"--json={found}"]
        done = subprocess.run([*torchrun, *doctor], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        print(done.stdout)
        if not found.is_file():
            sys.exit(f"the doctor ended with status {done.returncode}, and has written nothing")
        said = json.loads(found.read_text())
    known = json.dumps({"ranks": args.ranks, "printed": done.stdout.splitlines(), "found": said})
    write_result(args.out, {**result, "finished": True, **json.loads(numbered(known, list(said["ranks"].values())))})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
