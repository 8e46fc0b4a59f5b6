"""Kernels of FP8 codes with scales that all ranks share, natively on a GPU, against the torch code on the CPU."""

import pytest
import torch
from kernel_cases import CPU, DTYPES
from shared_scale_cases import TILE, check_encode, check_mixed_layout, check_squares, check_sums

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import SharedScaleFormat
from zeropp_fp8.formats.scale_table import SharedScales

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_encode(name, dtype):
    check_encode(name, dtype, [33, 1001, 50_001], 3, [2, 0, 1], CUDA)
    check_encode(name, dtype, [1 << 16, 3 * 4096 + 64], 4, [3, 1, 0, 2], CUDA)
    check_encode(name, dtype, [9, 1, 2, 5], 8, [7, 1], CUDA)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("nodes, ranks", [(1, 1), (2, 2), (2, 8), (3, 17)])
def test_sums(name, nodes, ranks):
    check_sums(name, [33, 500, 30_001], nodes, ranks, CUDA, DTYPES.values())
    check_sums(name, [1 << 16, 4096], nodes, ranks, CUDA, [torch.float32])


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("tiles", [0, 1, 7, 1000])
def test_squares(name, tiles):
    check_squares(name, tiles, CUDA)


def test_layout_with_other_tensors():
    check_mixed_layout(CUDA)


def test_counts_do_not_lose_what_many_programs_add():
    """64M numbers, all cut off or all vanished: integer atomics, so the counts are exact and the same in every run."""
    numel = 1 << 26
    layout = PayloadLayout([numel], [SharedScaleFormat("fp8_e4m3")], [torch.bfloat16], CUDA)
    payload = torch.empty(1, layout.row_bytes, dtype=torch.uint8, device=CUDA)
    x = torch.full((numel,), 3.0, dtype=torch.bfloat16, device=CUDA)
    for multiplier, place in ((1e4, 0), (1e-6, 1)):
        encode = torch.full((1,), multiplier, device=CUDA)
        counts = torch.zeros(3, 2, dtype=torch.int64, device=CUDA)
        layout.encode([x], SliceOrder([0], CUDA), payload, shared=SharedScales(encode, 1 / encode, encode * 0, counts))
        expected = torch.zeros(3, 2, dtype=torch.int64)
        expected[0, place] = numel
        assert torch.equal(counts.cpu(), expected)


def test_gradient_store_of_sums():
    """What has added up over micro-batches becomes the same codes and multipliers as on the CPU; so does its norm."""
    from gradient_store_cases import filled_store

    stores = [filled_store(device) for device in (CPU, CUDA)]
    for store in stores:
        store.close()
    for on_cpu, on_gpu in zip(stores[0].groups, stores[1].groups):
        expected, actual = stores[0].of(on_cpu), stores[1].of(on_gpu)
        if on_cpu.matrices:
            assert torch.equal(actual.multipliers.cpu(), expected.multipliers)
            for k in range(len(on_cpu.params)):
                view = on_cpu.segments.view
                assert torch.equal(view(actual.codes.cpu(), k), view(expected.codes, k))
            assert on_cpu.segments.padded_numel % TILE == 0
    sums = [store.square_sum(0).item() for store in stores]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6) and sums[0] > 0
