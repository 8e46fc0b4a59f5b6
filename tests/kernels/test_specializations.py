"""A kernel is compiled once for all units of a format: a job's first step waits for each kernel that is compiled.

On a pretended GPU: launches are not made, but asked what Triton would compile for them.
"""

import itertools

import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat, make_format
from zeropp_fp8.formats.base import align_up
from zeropp_fp8.formats.exact import CHUNK
from zeropp_fp8.formats.scale_table import SharedScales
from zeropp_fp8.kernels.launching import Kernel
from zeropp_fp8.zero.gather.difference import Measured, Rows

CPU, NUMEL, RANKS = torch.device("cpu"), 4096, 2
UNITS = (1, 2, 3, 7, 9, 16)  # tensors of a format in one: an embedding, norms, blocks


@pytest.fixture
def compiled(monkeypatch):
    """{name of a kernel: what it would be compiled for}."""
    found = {}

    def launch(self, grid, arguments, constants):
        kinds = [
            native_specialize_impl(
                CUDABackend, argument, False, not param.do_not_specialize, not param.do_not_specialize_on_alignment
            )
            for param, argument in zip(self.jitted.params, arguments)
        ]
        found.setdefault(self.jitted.fn.__name__, set()).add((*kinds, *constants.items()))

    monkeypatch.setattr(Kernel, "launch", launch)
    return found


def number_of(compiled):
    return {name: len(kinds) for name, kinds in compiled.items()}


def layout_of(wire_format, count, **options):
    args = [NUMEL] * count, [wire_format] * count, [torch.bfloat16] * count, CPU
    return PayloadLayout(*args, use_kernels=True, **options)


def tensors_of(count):
    return [torch.zeros(RANKS * NUMEL, dtype=torch.bfloat16) for _ in range(count)]


@pytest.mark.parametrize("name", ["int8", "int4", "none", "fp8_e4m3"])
def test_units_of_any_number_of_tensors(compiled, name):
    for count in UNITS:
        layout, tensors = layout_of(make_format(name), count), tensors_of(count)
        order, rows = SliceOrder(range(RANKS), CPU), torch.zeros(RANKS, layout.row_bytes, dtype=torch.uint8)
        layout.encode(tensors, order, rows)
        layout.decode(rows, order, tensors)
        layout.reduce_to_tensors(rows, tensors)
    assert number_of(compiled) == {"quantize_kernel": 1, "dequantize_kernel": 1, "reduce_to_tensors_kernel": 1}


def test_scales_that_lie_anywhere_in_a_table(compiled):
    wire_format = SharedScaleFormat("fp8_e4m3")
    for count, place in itertools.product(UNITS, range(4)):
        layout, tensors = layout_of(wire_format, count), tensors_of(count)
        fp32 = [torch.ones(count + place)[place:] for _ in range(3)]
        scales = SharedScales(*fp32, torch.zeros(3, 2, dtype=torch.int64))
        rows = torch.zeros(RANKS, layout.row_bytes, dtype=torch.uint8)
        layout.encode(tensors, SliceOrder(range(RANKS), CPU), rows, scales)
        layout.reduce_to_tensors(rows, tensors, shared=scales)
        layout.reduce_to_payload(rows.view(RANKS, 1, -1), layout, rows[:1], scales)
    assert number_of(compiled) == {"quantize_kernel": 1, "reduce_to_tensors_kernel": 1, "reduce_to_payload_kernel": 1}


def test_exact_differences_of_any_size(compiled):
    """Of units of any number of chunks, in rows of any size: how long they are changes from step to step."""
    for count, numel, words in itertools.product(UNITS, (1000, NUMEL), (0, 4, 100)):
        wire_format = UnquantizedFormat(torch.bfloat16)
        rows = Rows([wire_format] * count, [numel] * count, CPU, use_kernels=True)
        held = torch.zeros(RANKS, count * wire_format.payload_bytes(numel), dtype=torch.uint8)
        rows.measure(held[1:], held[:1])
        headers = torch.zeros(1, count * -(-numel // CHUNK), dtype=torch.int32)
        brought = torch.zeros(RANKS, align_up(4 * headers.numel()) + 4 * words, dtype=torch.uint8)
        measured = Measured(headers, headers, torch.tensor([brought.shape[1]]))
        rows.encode(held[1:], held[:1], measured, brought[:1])
        for own in (None, 0, 1):
            rows.add(brought, held, own)
    assert number_of(compiled) == dict.fromkeys(("make_headers_kernel", "encode_exact_kernel", "add_exact_kernel"), 1)
