"""benchmarks/kernels.py on a CPU: exact differences of updates."""

import pytest
import torch

from benchmarks import kernels

CPU = torch.device("cpu")


def test_differences(capsys):
    """The larger the update, the more bits; added again and again, there and back."""
    copy, *rows = kernels.measure(5000, CPU, repeats=2, only=["difference"])
    assert copy["operation"] == "copy" and len(rows) == 3 * len(kernels.LEARNING_RATES)
    assert {row["operation"] for row in rows} == {f"{what} difference" for what in ("measure", "encode", "add")}
    bits = [row["bits"] for row in rows if row["operation"] == "add difference"]
    assert bits == sorted(bits) and 0.2 < bits[0] < 0.5 and 3.5 < bits[-1] < 4.5
    assert "bf16, lr 1e-05" in capsys.readouterr().out


def test_an_update():
    before, after = kernels.an_update(1 << 16, 1e-3, CPU).float()
    assert before.std().item() == pytest.approx(0.02, rel=0.02)
    assert (after - before).std().item() == pytest.approx(1e-3, rel=0.02)
