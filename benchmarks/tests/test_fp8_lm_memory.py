"""benchmarks/fp8_lm_memory.py on the CPU: bytes per parameter against the FP8-LM paper's table, written out."""

import argparse

import pytest
import torch
from ranks import run_ranks

from benchmarks.fp8_lm_memory import compare, measure

# FP8-LM (arXiv 2310.18313), table 5: gradients 1, master weights 2, moments 1 + 2; O1 keeps all but gradients in fp32.
STORED = {"fp8-lm-o1": 1, "fp8-lm-o2": 6}


@pytest.mark.parametrize("run", ["stock-leaf", "lossless", *STORED])
def test_bytes_per_parameter(run):
    args = argparse.Namespace(size="tiny", micro_batch=1, sequence=16, checkpointing=False, ranks=2, gbit=None)
    rows = run_ranks(measure, 2, run=run, args=args, device=torch.device("cpu"))
    for row in rows:
        assert row["weights_per_parameter"] == pytest.approx(2, rel=0.01)
        if run in STORED:
            assert STORED[run] <= row["codes_per_parameter"] < 1.05 * STORED[run], "scales and padding included"
        else:
            assert row["codes_per_parameter"] is None
    (line,) = compare(rows[:1])
    assert line.get("states_met", True), line
