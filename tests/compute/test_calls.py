"""How much a layer costs in Python: the host of a fast GPU has little time for it."""

import sys
from collections import Counter

import pytest
import torch
from linear_cases import draw, make_layer
from torch.utils._python_dispatch import TorchDispatchMode

import zeropp_fp8
from zeropp_fp8 import sharded
from zeropp_fp8.compute import casts, gemm, operand
from zeropp_fp8.kernels.casts import cast_tensor, matrices, transpose
from zeropp_fp8.kernels.launching import Compiled, Kernel

FOLDER = zeropp_fp8.__path__[0]
# Functions of this package, and operations of torch, in (forward, backward): what was counted. An empty tensor stands
# for what a GEMM returns.
MOST = {
    # scaling, whether codes of the weight are gathered: (functions, operations)
    ("delayed", True): ((23, 23), (5, 9)),
    ("delayed", False): ((31, 27), (6, 9)),
    ("current", True): ((25, 25), (7, 11)),
    ("current", False): ((35, 28), (10, 11)),
    ("block", True): ((32, 35), (12, 17)),
    ("block", False): ((45, 44), (17, 19)),
}


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Kernels are launched and GEMMs called as on a GPU, and compute nothing."""
    compiled = Compiled(0, lambda *arguments: None, ("function",), ())
    monkeypatch.setattr(Kernel, "launch", lambda *arguments: compiled)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", int, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", abs, raising=False)
    for module in (operand, casts):
        monkeypatch.setattr(module, "uses_kernels", lambda matrix: True)
    monkeypatch.setattr(gemm, "has_fp8_gemm", lambda device, granularity: True)

    def multiply(a, b, *scales, out_dtype=None, output_dtype=None, **others):
        return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or output_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", multiply)
    plans = matrices.cast_plan, cast_tensor._amax_plan, transpose._plan
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.found[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def functions_in(call):
    """(names of this package's functions that a call of no arguments runs, its result)."""
    found = Counter()

    def see(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(FOLDER) and frame.f_code.co_name != "<listcomp>":
            found[frame.f_code.co_name] += 1

    sys.setprofile(see)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return found, result


def operations_in(call):
    with _Operations() as seen:
        result = call()
    return seen.found, result


@pytest.mark.parametrize(("scaling", "codes"), MOST)
def test_calls_of_a_layer(scaling, codes, pretended_gpu):
    layer, scales, _ = make_layer("fp8", scaling, 128, 256, torch.bfloat16, bias=False)
    if codes:
        cast = casts.cast_tiles if scaling == "block" else casts.cast_per_tensor
        sharded.remember(layer.weight, operand=cast(layer.weight.detach(), torch.float8_e4m3fn)[0])
    x, grad = draw("normal", 2, 16, 128).bfloat16().requires_grad_(), draw("normal", 2, 16, 256, seed=1).bfloat16()
    for count, most in zip((functions_in, operations_in), MOST[scaling, codes]):
        for _ in range(3):
            scales.end_step()
            if scaling == "delayed":
                scales._known = {0, 1, 2}
            scales.forget_input()
            layer.weight.grad = x.grad = None
            forward, y = count(lambda: layer(x))
            backward, _ = count(lambda y=y: torch.autograd.backward(y, grad))
        for found, own in zip((forward, backward), most):
            assert found.total() <= own, (found.total(), found)
