"""Kernels of exact differences, in Triton's interpreter."""

import pytest
from triton_process import run

pytest.importorskip("triton")

SCRIPT = """
import exact_checks, torch
exact_checks.check_all(torch.device("cpu"))
print("the same")
"""


def test_the_bytes_of_the_torch_code():
    assert run(SCRIPT, interpret=True) == "the same\n"
