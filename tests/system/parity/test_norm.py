"""Norms of gradients over the whole range of fp32, whose squares fp32 does not hold."""

import norm_jobs as jobs
import pytest
from ranks import run_two

CASES = {
    "stock": (None, {}),
    "lossless": ("lossless", {"gather_granularity": "module"}),
    "zeropp": ("zeropp", {}),
    "owners": ("zeropp", {"partition": "whole_tensor"}),
    "error feedback": ("zeropp", {"gradients": {"error_feedback": True}}),
    "mxfp8": ("mxfp8", {}),
    "fp8-lm-o1": ("fp8-lm-o1", {}),
    "fp8-lm-o2": ("fp8-lm-o2", {}),
    "fp8-lm": ("fp8-lm", {}),
    "fp8-lm-zeropp": ("fp8-lm-zeropp", {}),
    "FP8 store of blocks": ("zeropp", {"gradients": {"store_format": "fp8_e4m3"}}),
}
FACTORS = (1.0, 1e24, 1e-30)  # each gives a norm of about the same


@pytest.fixture(scope="module")
def found():
    return run_two(jobs.norms, cases=CASES, factors=FACTORS)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("case", [case for case in CASES if case != "stock"])
def test_norms_are_stocks(case, factor, found):
    for results in found:
        stock, mine = results["stock", factor], results[case, factor]
        assert mine == stock or case != "lossless", "bit for bit"
        assert mine[0] == pytest.approx(stock[0], rel=0.05)
        assert mine[1] == stock[1] == 0, "a step was skipped"
        if factor >= 1:  # else AdamW's eps leaves weight decay only, which FP16 master weights round away
            assert mine[2] == pytest.approx(stock[2], rel=0.1)
