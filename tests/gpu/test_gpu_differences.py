"""Weight differences natively on a GPU: the bytes of the torch code on a CPU."""

import difference_cases as cases
import pytest
import torch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("difference, rest", cases.KERNEL_CASES)
def test_kernels(difference, rest):
    """Small and odd, aligned with many tiles, and slices beyond a tensor's end."""
    for numels, slices in (([33, 500, 2100], [2, 0, 1]), ([1 << 18, 100003], [3, 1, 0, 2]), ([9, 1, 2, 5], [7, 1])):
        cases.check_kernels(difference, rest, numels, slices, CUDA)


@pytest.mark.parametrize("difference", ["int4", "int2", "int3", "int8"])
@pytest.mark.parametrize("rest, dtype", [("none", torch.bfloat16), ("none", torch.float32), ("int8", torch.bfloat16)])
@pytest.mark.parametrize("numels", [cases.NUMELS, [1000]], ids=["unit", "one tensor"])
def test_bytes(difference, rest, dtype, numels, monkeypatch):
    monkeypatch.setattr(cases, "NUMELS", numels)
    expected, due = cases.steps_on(cases.CPU, difference, rest, dtype)
    found, due_here = cases.steps_on(CUDA, difference, rest, dtype)
    assert due is due_here is True
    for some, others in zip(found, expected):
        assert all(torch.equal(one, other) for one, other in zip(some, others))
