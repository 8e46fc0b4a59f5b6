"""The key by which a launch looks up a compiled kernel says all that Triton compiles for."""

import itertools
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton_process import run

from zeropp_fp8.kernels.launching import Kernel, Plan, bind

INTEGERS = [
    0,
    1,
    -1,
    15,
    16,
    17,
    -16,
    2**31 - 16,
    2**31 - 1,
    2**31,
    -(2**31),
    -(2**31) - 1,
    2**63 - 1,
    2**63,
    2**64 - 16,
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.int64]


def of_triton(argument):
    return native_specialize_impl(CUDABackend, argument, False, True, True)


def ours(argument):
    return tuple(bind([argument])[1])


def tensors():
    for dtype, offset in itertools.product(DTYPES, range(17)):
        memory = torch.zeros(512, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 64 + offset * dtype.itemsize :]
        yield memory[: len(memory) // dtype.itemsize * dtype.itemsize].view(dtype)


def test_arguments_alike_here_are_alike_to_triton():
    arguments = [*INTEGERS, 0.0, 1.0, 16.0, True, False, None, *tensors()]
    kinds = {}
    for argument in arguments:
        assert kinds.setdefault(ours(argument), of_triton(argument)) == of_triton(argument), argument
    assert len(kinds) < len(arguments) / 4  # and no more than needed is told apart


@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1))
def test_integers_alike_here_are_alike_to_triton(one, other):
    if ours(one) == ours(other):
        assert of_triton(one) == of_triton(other)


class Jitted:
    """A kernel of four tensors, of which the last may lie anywhere, and what Triton would make of it."""

    def __init__(self):
        self.compiled, self.launched = [], []
        names = {"x": False, "y": False, "z": False, "amax": True, "number": False}
        self.params = [SimpleNamespace(name=n, do_not_specialize_on_alignment=a) for n, a in names.items()]
        self.params.append(SimpleNamespace(name="SIZE", default=None))

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.compile(arguments)

    def compile(self, arguments):
        self.compiled.append(arguments)
        which = len(self.compiled)
        run = lambda *given: self.launched.append((which, given))  # noqa: E731
        return SimpleNamespace(run=run, function="function", packed_metadata="metadata")


def test_a_plan_launches_what_was_compiled_for_tensors_that_lie_alike(monkeypatch):
    """On a pretended GPU: FP8 as bytes, addresses of the tensors given, and the general way where one is not at 16."""
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 3)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    jitted = Jitted()
    kernel = Kernel(None)
    kernel.jitted, kernel._by_triton = jitted, False
    plan = Plan(kernel, (5, 2), (9,), {"SIZE": 32, "num_warps": 4})

    def call(lead=0, amax=0):
        x, y, z = (torch.zeros(64, dtype=torch.bfloat16) for _ in range(3))
        codes, number = y.view(torch.float8_e4m3fn), torch.zeros(8)[amax : amax + 1]
        plan(x[lead:], codes, z, number)
        return x[lead:].data_ptr(), codes.data_ptr(), z.data_ptr(), number.data_ptr()

    call()
    assert [a.dtype for a in jitted.compiled[0][:4]] == [torch.bfloat16, torch.uint8, torch.bfloat16, torch.float32]
    assert not jitted.launched, "Triton has launched what it compiled"
    for amax in (0, 1):  # it lies anywhere
        places = call(amax=amax)
        expected = (5, 2, 1, 73, "function", "metadata", None, None, None, *places, 9, 32)
        assert jitted.launched[-1] == (1, expected)
    assert len(jitted.compiled) == 1
    call(lead=1)
    assert len(jitted.compiled) == 2 and len(jitted.launched) == 2
    places = call(lead=1)
    assert jitted.launched[-1][0] == 2 and jitted.launched[-1][1][9:13] == places
    call()
    assert jitted.launched[-1][0] == 1 and len(jitted.compiled) == 2
    knobs.runtime.launch_enter_hook.add(print)
    try:
        call()
    finally:
        knobs.runtime.launch_enter_hook.remove(print)
    assert len(jitted.compiled) == 3, "Triton calls hooks"


def test_in_the_interpreter_triton_launches():
    script = """
import torch, triton
import triton.language as tl
from zeropp_fp8.kernels.launching import Kernel, Plan

@Kernel
@triton.jit
def add_kernel(x_ptr, y_ptr, numel, number, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < numel) + number, mask=at < numel)

x, y = torch.arange(100.0), torch.zeros(100)
for number in (1, 2.5, 16):
    add_kernel[(7,)](x, y, 100, number, SIZE=16, num_warps=1)
    assert torch.equal(y, x + number)
plan = Plan(add_kernel, (7,), (100, 2.5), {"SIZE": 16, "num_warps": 1})
for x in (x, x[1:], x - 1):  # the second one lies elsewhere in its 16 bytes
    plan(x, y)
    assert torch.equal(y[: x.numel()], x + 2.5)
print("done")
"""
    assert "done" in run(script, interpret=True)
