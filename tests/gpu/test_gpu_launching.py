"""Kernels launched again without Triton: every kind of argument, what is compiled anew, graphs, hooks."""

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from zeropp_fp8.kernels.launching import Kernel, Plan

pytestmark = pytest.mark.gpu


@triton.jit
def jitted(x_ptr, y_ptr, numel, number, other_ptr, SIZE: tl.constexpr, TWICE: tl.constexpr = False):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at, mask=at < numel)
    if other_ptr is not None:
        x += tl.load(other_ptr + at, mask=at < numel)
    if TWICE:
        x *= 2
    tl.store(y_ptr + at, x + number, mask=at < numel)


@pytest.fixture
def launches(monkeypatch):
    """(a new Kernel, the launches that Triton has made of it)."""
    seen = []
    launch = jitted.run
    monkeypatch.setattr(jitted, "run", lambda *args, **more: seen.append(args) or launch(*args, **more))
    return Kernel(jitted), seen


def memory(offset, numel=1000, dtype=torch.float32):
    return torch.randn(numel + offset, device="cuda").to(dtype)[offset:]


def test_every_kind_of_argument(launches):
    kernel, seen = launches
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            for offsets in ((0, 0), (1, 0), (0, 3), (2, 2)):
                for numel in (1, 16, 999):
                    for number in (1, 2.5, 16, 7, True):
                        for other in (None, memory(0, dtype=dtype)):
                            x, y = (memory(offset, dtype=dtype) for offset in offsets)
                            kernel[(16,)](x, y, numel, number, other, SIZE=64, num_warps=2)
                            expected = x if other is None else x + other
                            torch.testing.assert_close(y[:numel], (expected + float(number))[:numel])
    assert len(seen) == 2 * 4 * 3 * 5 * 2  # only the first time


def test_constants_and_options(launches):
    kernel, seen = launches
    x, y = memory(0), memory(0)
    for _ in range(3):
        for twice in (False, True):
            kernel[(16,)](x, y, 1000, 1.0, None, SIZE=64, TWICE=twice)
            torch.testing.assert_close(y, x * (1 + twice) + 1)
        kernel[(8, 1)](x, y, 1000, 1.0, None, SIZE=128, num_warps=1)
        torch.testing.assert_close(y, x + 1)
    assert len(seen) == 3


def test_a_graph_holds_the_launch(launches):
    """It is on the current stream: that of the capture."""
    kernel, _ = launches
    x, y = memory(0), memory(0)
    kernel[(16,)](x, y, 1000, 0.5, None, SIZE=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[(16,)](x, y, 1000, 0.5, None, SIZE=64)
    x.copy_(torch.arange(1000.0))
    graph.replay()
    torch.testing.assert_close(y, x + 0.5)


def test_hooks_see_every_launch(launches):
    kernel, _ = launches
    x, y = memory(0), memory(0)
    kernel[(16,)](x, y, 1000, 0.5, None, SIZE=64)
    seen = []
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        kernel[(16,)](x, y, 1000, 0.5, None, SIZE=64)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 1


def test_a_plan(launches):
    """Tensors anywhere, on the current stream and in graphs, and with hooks; Triton launches the first ones only."""
    kernel, seen = launches
    plan = Plan(kernel, (16,), (1000, 0.5, None), {"SIZE": 64})
    for _ in range(3):
        for offsets in ((0, 0), (1, 0), (0, 3), (4, 8)):
            x, y = (memory(offset) for offset in offsets)
            plan(x, y)
            torch.testing.assert_close(y, x + 0.5)
    assert len(seen) == 3  # float 4 and 8 lie at multiples of 16 bytes again
    x, y, stream, graph = memory(0), memory(0), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan(x, y)
    stream.synchronize()
    torch.testing.assert_close(y, x + 0.5)
    with torch.cuda.graph(graph):
        plan(x, y)
    x.copy_(torch.arange(1000.0))
    graph.replay()
    torch.testing.assert_close(y, x + 0.5)
    hooked = []
    knobs.runtime.launch_enter_hook.add(hooked.append)
    try:
        plan(x, y)
    finally:
        knobs.runtime.launch_enter_hook.remove(hooked.append)
    assert len(hooked) == 1
