"""The demo of RLHF: twice the same, with other instructions of the CPU, and by the reward model alone.

    python -m benchmarks.rlhf_demo --out cpu-2-gloo.json

Each run is `make rlhf-demo` of a seed, on two ranks of this machine. The second of "again" says whether the first can
be repeated here; "AVX2" has torch and its libraries choose products for CPUs without AVX-512, which add in another
order: so much two machines may differ by.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.results import append_to, begin_result, end_result
from examples.options import new_file, whole

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# run: (environment, options)
RUNS = {
    "demo": ({}, []),
    "again": ({}, []),
    "AVX2": (AVX2, []),
    "reward model alone": ({}, ["--set", "ppo.reward_weights=0", "ppo.reward_model_weight=1"]),
}
METRIC = "exact_match"


def run(name: str, seed: int, folder: Path) -> dict:
    """The row of a run.

    Raises:
        CalledProcessError: the pipeline failed; its output is above.
    """
    environment, options = RUNS[name]
    command = ["examples/rlhf/pipeline.py", "--settings", "examples/rlhf/demo.json", "--ranks", "2", "--nodes", "2"]
    command += ["--seed", str(seed), "--out", str(folder), *options]
    subprocess.run([sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, check=True)
    summary = json.loads((folder / "summary.json").read_text())
    rates = {policy: {key: summary[policy][key] for key in (METRIC, "interval", "n_eval")} for policy in ("sft", "ppo")}
    gain = {"gain": summary["difference"][METRIC], "gain_interval": summary["difference"]["interval"]}
    more = {"seconds": summary["this_call_seconds"], "curves": summary["curves"]["ppo"]}
    return {"run": name, "seed": seed, "environment": environment, "options": options, **rates, **gain, **more}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--runs", default=",".join(RUNS), help="default: %(default)s")
    parser.add_argument("--out", type=new_file, default="runs/rlhf_demo.json", help="JSON file (default %(default)s)")
    args = parser.parse_args()
    begin_result(args.out, describe("rlhf_demo"))
    for name in args.runs.split(","):
        with tempfile.TemporaryDirectory() as folder:
            append_to(args.out, "rows", run(name, args.seed, Path(folder)))
    end_result(args.out)


if __name__ == "__main__":
    main()
