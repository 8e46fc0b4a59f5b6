"""What a launch looks a compiled kernel up by says all that Triton compiles for."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton_process import run

from zeropp_fp8.kernels.launching import addresses, specializations

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
    return tuple(specializations([argument], addresses([argument])))


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


def test_in_the_interpreter_triton_launches():
    script = """
import torch, triton
import triton.language as tl
from zeropp_fp8.kernels.launching import Kernel

@Kernel
@triton.jit
def add_kernel(x_ptr, y_ptr, numel, number, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < numel) + number, mask=at < numel)

x, y = torch.arange(100.0), torch.zeros(100)
for number in (1, 2.5, 16):
    add_kernel[(7,)](x, y, 100, number, SIZE=16, num_warps=1)
    assert torch.equal(y, x + number)
print("done")
"""
    assert "done" in run(script, interpret=True)
