"""Codes in a checkpoint: cut anew for another number of ranks, and never taken for numbers."""

import copy
import math
import operator
import pickle
import subprocess
import sys

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeropp_fp8.formats import DOUBLE_QUANTIZED_NAMES, MX_NAMES, SharedScaleFormat, make_format
from zeropp_fp8.formats.recut import cut_again
from zeropp_fp8.zero.fragment import QuantizedFragment, RawCodesError, fragments_stand_in
from zeropp_fp8.zero.frozen.saved_ranks import slice_of

FORMATS = [
    *(make_format(name, block_size=16) for name in DOUBLE_QUANTIZED_NAMES),
    *(make_format(name, block_size=8, double_quantize=True) for name in DOUBLE_QUANTIZED_NAMES),
    *(make_format(name) for name in MX_NAMES),
    make_format("fp8_e4m3", scales="tensor"),
]


def parts_of(wire_format, tensor, ranks):
    """(payloads of the parts, elements of each), encoded from the tensor."""
    part_numel = -(-tensor.numel() // (ranks * wire_format.granule)) * wire_format.granule
    parts = []
    for rank in range(ranks):
        parts.append(torch.full((wire_format.payload_bytes(part_numel),), 0xA5, dtype=torch.uint8))
        wire_format.encode_part(tensor, rank * part_numel, part_numel, parts[-1])
    return parts, part_numel


@settings(derandomize=True, max_examples=120)
@given(
    st.sampled_from(FORMATS), st.integers(1, 9000), st.integers(1, 9), st.integers(1, 9), st.sampled_from(["", "nan"])
)
def test_cut_again_gives_the_codes_of_that_many_ranks(wire_format, numel, before, after, special):
    """Every byte as `encode_part` writes it from the tensor itself."""
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * 3
    if special:
        tensor[numel // 2] = math.nan
    saved, saved_numel = parts_of(wire_format, tensor, before)
    wanted, part_numel = parts_of(wire_format, tensor, after)
    for rank, payload in enumerate(wanted):
        assert torch.equal(cut_again(wire_format, saved, saved_numel, rank * part_numel, part_numel), payload)


def test_cut_again_reads_only_what_it_needs():
    class Parts(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    wire_format = make_format("nf4", block_size=4, double_quantize=True)
    tensor = torch.randn(8 * 1024)
    read = []
    saved, part_numel = parts_of(wire_format, tensor, 8)
    cut_again(wire_format, Parts(saved), part_numel, 4096, 2048)
    assert set(read) == {0, 4, 5}, "the first for the mean of all scales"


def test_sizes_that_cut_granules_are_refused():
    wire_format = make_format("int8", block_size=16)
    payload = [wire_format.encode(torch.zeros(32))]
    with pytest.raises(ValueError, match="parts of 24 elements are not cut at multiples of 16"):
        cut_again(wire_format, payload, 24, 0, 16)
    with pytest.raises(ValueError, match="multiples of 16 elements"):
        cut_again(wire_format, payload, 32, 8, 16)
    assert cut_again(wire_format, payload, 32, 0, 0).numel() == 0
    with pytest.raises(TypeError, match="fp8_e4m3: payloads in this format cannot be cut"):
        SharedScaleFormat("fp8_e4m3").granule_runs(16)


def test_numbers_are_cut_anywhere():
    wire_format, numbers = make_format("none", dtype=torch.bfloat16), torch.arange(30.0).bfloat16()
    parts = [wire_format.encode(part) for part in numbers.split(10)]
    assert torch.equal(
        wire_format.decode(cut_again(wire_format, parts, 10, 7, 16), [16], torch.bfloat16), numbers[7:23]
    )


@settings(derandomize=True, max_examples=100)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9), st.integers(0, 20))
def test_slices_of_parts(numel, parts, ranks, beyond):
    """Slices as DeepSpeed cuts them, put together again, are the tensor; then come zeros."""
    tensor = torch.arange(1.0, numel + 1)
    part_numel = -(-numel // parts) + beyond
    padded = nn.functional.pad(tensor, (0, parts * part_numel - numel), value=-1.0)
    pieces = [slice_of(padded.split(part_numel).__getitem__, part_numel, numel, rank, ranks) for rank in range(ranks)]
    assert {len(piece) for piece in pieces} == {-(-numel // ranks)}
    whole = torch.cat(pieces)
    assert torch.equal(whole[:numel], tensor) and not whole[numel:].any()


# -- fragments ---------------------------------------------------------------------------------------------------------


def fragment_of(wire_format, tensor):
    return QuantizedFragment(
        name="model.layers.0.mlp.up_proj.weight",
        payload=wire_format.encode(tensor),
        format_fields=wire_format.options(),
        part_numel=tensor.numel(),
        full_shape=tuple(tensor.shape),
        value_dtype=tensor.dtype,
        rank=0,
        ranks=1,
    )


@pytest.mark.parametrize("wire_format", [*FORMATS, make_format("mxfp4", scale_mode="floor")], ids=repr)
def test_a_fragment_knows_its_format(wire_format, tmp_path):
    tensor = torch.randn(96, 64).to(torch.bfloat16)
    torch.save({"w": fragment_of(wire_format, tensor)}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", map_location="cpu", mmap=True, weights_only=False)["w"]
    assert repr(loaded.wire_format) == repr(wire_format)
    expected = wire_format.decode(wire_format.encode(tensor), tensor.shape, tensor.dtype)
    assert loaded.decoded().dtype == torch.bfloat16 and torch.equal(loaded.decoded(), expected.view(-1))


ATTRIBUTES = ("numel", "narrow", "data", "shape", "to", "size", "dtype", "view", "float", "detach", "cpu", "is_cuda")
FUNCTIONS = {
    "cat": lambda f: torch.cat((f, f), 0),
    "cat after a tensor": lambda f: torch.cat([torch.ones(1), f]),
    "stack": lambda f: torch.stack([f]),
    "add": lambda f: torch.add(torch.ones(1), other=f),
    "copy_": lambda f: torch.empty(3).copy_(f),
    "as_tensor": torch.as_tensor,
    "tensor": torch.tensor,
    "Parameter": nn.Parameter,
    "numpy": numpy.asarray,
    "float()": float,
    "int()": int,
    "bool()": bool,
    "len": len,
    "list": list,
    "item": lambda f: f[0],
    "+": lambda f: f + 1,
    "+ from the left": lambda f: torch.ones(3) + f,
    "*": lambda f: 2 * f,
    "@": lambda f: f @ f,
    "<": lambda f: f < 1,
    "-": operator.neg,
    "load_state_dict": lambda f: nn.Linear(2, 2, bias=False).load_state_dict({"weight": f}),
}


@pytest.mark.parametrize("use", [*ATTRIBUTES, *FUNCTIONS])
def test_what_takes_a_fragment_for_a_tensor_is_told(use):
    fragment = fragment_of(make_format("nf4", block_size=16, double_quantize=True), torch.randn(64, 64))
    action = FUNCTIONS.get(use) or operator.attrgetter(use)
    with pytest.raises(RawCodesError) as raised:
        action(fragment)
    assert str(raised.value) == (
        "model.layers.0.mlp.up_proj.weight was saved by zeropp_fp8 as nf4 (block 16, double-quantized scales) codes, "
        "which are no numbers. To read the checkpoint without the plugin, run "
        "`python -m zeropp_fp8 export CHECKPOINT NEW_FOLDER` and read NEW_FOLDER; to resume from it, call "
        'zeropp_fp8.enable() and set "zeropp_fp8.frozen.format" to "nf4"'
    )


def test_fragments_can_be_copied_and_pickled():
    fragment = fragment_of(make_format("int8", block_size=16), torch.randn(64, 64))
    for again in (copy.copy(fragment), copy.deepcopy(fragment), pickle.loads(pickle.dumps(fragment))):
        assert torch.equal(again.decoded(), fragment.decoded())
    assert not torch.is_tensor(fragment) and "up_proj" in repr(fragment)


def test_fragments_stand_in_while_they_are_told_to():
    fragment = fragment_of(make_format("int8", block_size=16), torch.randn(64, 64))
    with fragments_stand_in():
        joined = torch.cat((fragment, fragment), 0).narrow(0, 0, 6000).view(60, 100).contiguous()
        assert joined.is_meta and joined.shape == (60, 100)
        with pytest.raises(RawCodesError):
            torch.cat((fragment, torch.ones(1)))
    with pytest.raises(RawCodesError):
        torch.cat((fragment, fragment))


def test_a_fragment_is_unpickled_without_deepspeed(tmp_path):
    torch.save({"w": fragment_of(make_format("int8", block_size=16), torch.randn(64, 64))}, tmp_path / "file")
    code = (
        "import sys, torch; sys.modules['deepspeed'] = None; "
        f"print(torch.load({str(tmp_path / 'file')!r}, weights_only=False)['w'].decoded().shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "torch.Size([4096])\n", done.stderr
