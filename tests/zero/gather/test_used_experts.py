"""The bytes of a rank's row that some experts need: with these alone, their values are those of whole rows."""

import itertools
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from zeropp_fp8.comm.payload import PayloadLayout
from zeropp_fp8.comm.reduce_scatter import slice_numel
from zeropp_fp8.formats import UnquantizedFormat, make_format
from zeropp_fp8.zero.gather.used_experts import InParts, _joined

CPU = torch.device("cpu")
FORMATS = {
    "bf16": UnquantizedFormat(torch.bfloat16),
    "fp32": UnquantizedFormat(torch.float32),
    "int8": make_format("int8", block_size=32),
    "rotated": make_format("int4", block_size=64, hadamard=True),
    "nf4": make_format("nf4", block_size=64),
    "double-quantized": make_format("int4", block_size=2, double_quantize=True),
    "fp8": make_format("fp8_e4m3", block_size=128),
    "fp8, a scale per tensor": make_format("fp8_e4m3", scales="tensor"),
    "mxfp4": make_format("mxfp4"),
    "mxfp6": make_format("mxfp6_e2m3"),
}
SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda s: (s[0], sum(s))), max_size=12)


@given(SPANS)
def test_joined(spans):
    joined = _joined(spans)
    assert {byte for span in joined for byte in range(*span)} == {byte for span in spans for byte in range(*span)}
    assert all(start < end for start, end in joined)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(joined)), "none touch"


def unit_of(numels, formats, experts, world):
    """A unit of stacks, as far as it knows its rows."""
    slices = [slice_numel(numel, world) for numel in numels]
    layout = PayloadLayout(slices, formats, [torch.float32] * len(numels), CPU, left_out=range(len(numels)))
    params = [SimpleNamespace(ds_shape=torch.Size([experts, n // experts]), ds_numel=n) for n in numels]
    unit = SimpleNamespace(layout=layout, params=params, packed=params, route=SimpleNamespace(world_size=world))
    unit._parts, unit._known = [list(InParts._parts_of(unit, rank)) for rank in range(world)], None
    return unit


@given(
    st.sampled_from(sorted(FORMATS)),
    st.lists(st.one_of(st.integers(1, 40), st.sampled_from([512, 1024])), min_size=1, max_size=2),
    st.integers(1, 7),
    st.integers(1, 5),
    st.data(),
)
def test_used_experts_need_no_other_bytes(name, sizes, experts, world, data):
    wire_format, numels = FORMATS[name], [experts * size for size in sizes]
    unit = unit_of(numels, [wire_format] * len(sizes), experts, world)
    used = frozenset(data.draw(st.sets(st.integers(0, experts - 1))))
    spans, counts = InParts._spans_of(unit, used)
    rows = torch.zeros(world, unit.layout.row_bytes, dtype=torch.uint8)
    values = []
    for numel, offset, size, each in zip(numels, unit.layout.offsets, unit.layout.sizes, unit.layout.slice_numels):
        matrix = torch.zeros(world * each)
        matrix[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        rows[:, offset : offset + size] = wire_format.encode_rows(matrix.view(world, each))
        values.append(slice(offset, offset + size))
    came = torch.full_like(rows, 0xFF)
    for rank, of_rank in enumerate(spans):
        assert counts[rank] == sum(end - start for start, end in of_rank)
        for start, end in of_rank:
            came[rank, start:end] = rows[rank, start:end]
    for part, numel, each in zip(values, numels, unit.layout.slice_numels):
        every, some = (
            wire_format.decode_rows(each_rows[:, part].contiguous(), each, torch.float32).view(-1)[:numel]
            for each_rows in (rows, came)
        )
        for expert in used:
            assert torch.equal(every.view(experts, -1)[expert], some.view(experts, -1)[expert])
    if len(used) == experts:
        assert sum(counts) >= 0.9 * world * unit.layout.row_bytes - 16 * world * len(numels) * 3
    elif not used and all(numel % wire_format.granule == 0 for numel in unit.layout.slice_numels):
        assert sum(counts) <= 16 * world * len(numels), "nothing but what parts of a tensor share"


def test_what_did_not_come_is_not_a_number():
    for name, wire_format in FORMATS.items():
        payload = torch.full((1, wire_format.payload_bytes(512)), 0xFF, dtype=torch.uint8)
        assert wire_format.decode_rows(payload, 512, torch.float32).isnan().all(), name
