"""Kernels of shared scales against the torch code, for tests in Triton's interpreter (CPU) and natively (GPU)."""

from __future__ import annotations

import torch
from kernel_cases import CPU, awkward, same

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.formats import SharedScaleFormat, UnquantizedFormat
from zeropp_fp8.formats.scale_table import SharedScales

TILE = 1024


def scales_of(multipliers, device):
    """SharedScales of tensors with these multipliers; amax and counts begin at what has been seen before."""
    encode = torch.tensor(multipliers, dtype=torch.float32)
    amax = torch.tensor([0.5, 1e30, 0.0, 0.0, 0.0][: len(multipliers)])
    counts = torch.arange(6).view(3, 2)
    return SharedScales(*(t.to(device) for t in (encode, 1 / encode, amax, counts)))


def check_same_scales(actual, expected):
    assert torch.equal(actual.amax.cpu(), expected.amax), (actual.amax, expected.amax)
    assert torch.equal(actual.counts.cpu(), expected.counts), (actual.counts, expected.counts)


def both(name, slice_numels, dtype, device):
    formats, dtypes = [SharedScaleFormat(name)] * len(slice_numels), [dtype] * len(slice_numels)
    return (
        PayloadLayout(slice_numels, formats, dtypes, CPU, use_kernels=False),
        PayloadLayout(slice_numels, formats, dtypes, device, use_kernels=True),
    )


def check_encode(name, dtype, numels, world, slices, device, multiplier=0.3):
    """Same bytes, amax and counts; each tensor has a multiplier of its own."""
    tensors = awkward(numels, dtype)
    multipliers = [multiplier * 4**i for i in range(len(numels))]
    reference, kernels = both(name, [-(-n // world) for n in numels], dtype, device)
    assert all(group.segments is not None for group in kernels._groups)
    expected = torch.zeros(len(slices), reference.row_bytes, dtype=torch.uint8)
    of_reference, of_kernels = scales_of(multipliers, CPU), scales_of(multipliers, device)
    reference.encode(tensors, SliceOrder(slices, CPU), expected, shared=of_reference)
    actual = torch.full_like(expected, 255, device=device)
    kernels.encode([t.to(device) for t in tensors], SliceOrder(slices, device), actual, shared=of_kernels)
    differing = (actual.cpu() != expected).nonzero().tolist()
    assert not differing, (name, dtype, numels, slices, kernels.offsets, differing[:5])
    check_same_scales(of_kernels, of_reference)
    assert of_reference.counts[0, 1] > 1 or multiplier > 0.1, "nothing became zero"
    for i, tensor in enumerate(tensors):  # the oracle of amax, over the slices that were encoded
        size = -(-numels[i] // world)
        used = torch.cat([tensor[s * size : (s + 1) * size] for s in slices]).float()
        seen = [0.5, 1e30, 0.0, 0.0, 0.0][i]
        assert of_reference.amax[i] == max([seen, *used[used.isfinite()].abs().tolist()])


def check_sums(name, numels, nodes, ranks, device, outputs):
    """Sums over ranks as codes for the next hop, as numbers written and added to tensors, and as stored codes."""
    slice_numels = [-(-n // (nodes * ranks)) for n in numels]
    multipliers = [(0.2 if "e4m3" in name else 25.0) * 4**i for i in range(len(numels))]
    reference, kernels = both(name, slice_numels, torch.float32, device)
    received = torch.zeros(ranks, nodes, reference.row_bytes, dtype=torch.uint8)
    for rank in range(ranks):
        tensors = awkward(numels, torch.float32, seed=rank)
        order = SliceOrder(range(nodes * ranks - nodes, nodes * ranks), CPU)  # the last ones, of the largest numbers
        reference.encode(tensors, order, received[rank], shared=scales_of(multipliers, CPU))
    of_reference, of_kernels = scales_of(multipliers, CPU), scales_of(multipliers, device)
    expected = torch.zeros(nodes, reference.row_bytes, dtype=torch.uint8)
    reference.reduce_to_payload(received, reference, expected, shared=of_reference)
    actual = torch.full_like(expected, 255, device=device)
    kernels.reduce_to_payload(received.to(device), kernels, actual, shared=of_kernels)
    differing = (actual.cpu() != expected).nonzero().tolist()
    assert not differing, (name, numels, nodes, ranks, differing[:5])
    check_same_scales(of_kernels, of_reference)

    own = [max(0, n - 3) for n in slice_numels]  # a last slice without its padding, which is zeros
    for i, numel in enumerate(own):
        reference._part(expected, i)[:, numel:] = 0
    for output in (*outputs, torch.uint8):
        for accumulate in (False, True) if output != torch.uint8 else (False,):
            wanted = [torch.full((n,), 3, dtype=output) for n in own]
            got = [torch.full((n,), 3, dtype=output, device=device) for n in own]
            reference.reduce_to_tensors(expected, wanted, accumulate, shared=of_reference)
            kernels.reduce_to_tensors(expected.to(device), got, accumulate, shared=of_kernels)
            for a, b in zip(got, wanted):
                assert same(a.float(), b.float()), (output, accumulate)
    check_same_scales(of_kernels, of_reference)
    assert of_reference.counts[2, 0] > 4, "nothing was cut off"
    # The numbers written are the sum of the codes' numbers times the factor.
    wanted = [torch.empty(n) for n in own]
    reference.reduce_to_tensors(expected, wanted, shared=of_reference)
    for i, tensor in enumerate(wanted):
        dtype = torch.float8_e4m3fn if "e4m3" in name else torch.float8_e5m2
        rows = reference._part(expected, i)[:, : own[i]].view(dtype)
        total = rows.double().sum(dim=0) * of_reference.decode[i].double()
        torch.testing.assert_close(tensor.double(), total, rtol=1e-6, atol=0, equal_nan=True)


def check_squares(name, tiles, device):
    from zeropp_fp8.kernels.optimizer.squares import squares_of_tiles

    generator = torch.Generator().manual_seed(tiles)
    codes = torch.randint(0, 256, (tiles * TILE,), generator=generator, dtype=torch.uint8)
    codes[codes & 0x7F >= (0x7F if "e4m3" in name else 0x7C)] = 0x12
    if tiles > 4:
        codes[4 * TILE + 5] = 0x7F
    dtype = torch.float8_e4m3fn if "e4m3" in name else torch.float8_e5m2
    expected = codes.view(dtype).double().square().view(tiles, TILE).sum(dim=1)
    actual = squares_of_tiles(codes.to(device), name, TILE).cpu().double()
    assert actual.shape == (tiles,) and actual.isnan().sum() == (tiles > 4)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0, equal_nan=True)


def check_mixed_layout(device):
    """Matrix, vector, matrix: the middle one keeps its amax, and the others' come back to their places."""
    shared, exact = SharedScaleFormat("fp8_e4m3"), UnquantizedFormat(torch.float32)
    numels, dtypes, formats = [300, 40, 700], [torch.float32] * 3, [shared, exact, shared]
    tensors = [t.nan_to_num(0, 0, 0) for t in awkward(numels, torch.float32)]
    payloads, scales = [], []
    for place, kernels in ((CPU, False), (device, True)):
        layout = PayloadLayout([n // 2 for n in numels], formats, dtypes, place, use_kernels=kernels)
        mine = scales_of([0.2, 5.0, 0.7], place)
        payload = torch.full((2, layout.row_bytes), 99, dtype=torch.uint8, device=place)
        layout.encode([t.to(place) for t in tensors], SliceOrder([0, 1], place), payload, shared=mine)
        payloads.append(payload.cpu())
        scales.append(mine)
        results = [torch.empty(n // 2, device=place) for n in numels]
        layout.reduce_to_tensors(payload, results, shared=mine)
        rounded = tensors[0].mul(0.2).clamp(-448, 448).to(torch.float8_e4m3fn).float() / torch.tensor(0.2)
        torch.testing.assert_close(results[0].cpu(), rounded[:150] + rounded[150:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[1].cpu(), (tensors[1][:20] + tensors[1][20:]) / 2)
    assert torch.equal(*payloads)
    check_same_scales(scales[1], scales[0])
    assert scales[0].amax.tolist() == [tensors[0].abs().max(), torch.tensor(1e30), tensors[2].abs().max()]
