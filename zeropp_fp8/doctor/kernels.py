"""A few kernels on the device against the torch code on the CPU: what is sent and what is multiplied, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zeropp_fp8.comm.payload import PayloadLayout, SliceOrder
from zeropp_fp8.compute.casts import cast_blocks, cast_per_row, cast_per_tensor
from zeropp_fp8.formats import UnquantizedFormat, make_format
from zeropp_fp8.zero.gather.difference import Rows

# One of each kind of codes and scales, as the recipes use them.
FORMATS = {
    "int8": ("int8", {"block_size": 256}),
    "int4, rotated": ("int4", {"block_size": 128, "hadamard": True}),
    "fp8_e4m3": ("fp8_e4m3", {"block_size": 128}),
    "mxfp8_e4m3": ("mxfp8_e4m3", {}),
    "mxfp4": ("mxfp4", {}),
}
CASTS = {"a scale per tensor": cast_per_tensor, "a scale per row": cast_per_row, "a scale per block": cast_blocks}
NUMELS, RANKS = (4096, 1001), 4  # aligned slices, and odd ones with padding
GEMM_ERROR = 1e-2  # relative, in the norm; bf16 rounds by 2^-9, another order of sums by less
CPU = torch.device("cpu")


def kernel_differences(device: torch.device) -> list[str]:
    return [*_of_formats(device), *_of_differences(device), *_of_casts(device), *_of_gemms(device)]


def _values(numel: int, seed: int) -> Tensor:
    """bf16 over six orders of magnitude, with zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.logspace(-3, 3, numel)
    values[::7] = 0
    return values.bfloat16()


def _differing(name: str, actual: Tensor, expected: Tensor) -> Iterator[str]:
    actual, expected = actual.cpu().view(torch.uint8), expected.view(torch.uint8)
    if actual.shape != expected.shape:
        yield f"kernel: {name}: {actual.numel()} bytes, and {expected.numel()} by the torch code"
        return
    count = int((actual != expected).sum())
    if count:
        yield f"kernel: {name}: {count} of {expected.numel()} bytes differ from those of the torch code"


def _of_formats(device: torch.device) -> Iterator[str]:
    tensors = [_values(numel, seed) for seed, numel in enumerate(NUMELS)]
    slices = [-(-numel // RANKS) for numel in NUMELS]
    for name, (kind, options) in FORMATS.items():
        wire_format = make_format(kind, **options)
        found: list[tuple[Tensor, Tensor]] = []
        for where, with_kernels in ((CPU, False), (device, True)):
            dtypes = [torch.bfloat16] * len(tensors)
            layout = PayloadLayout(slices, [wire_format] * len(tensors), dtypes, where, use_kernels=with_kernels)
            order = SliceOrder(range(RANKS), where)
            payload = torch.zeros(RANKS, layout.row_bytes, dtype=torch.uint8, device=where)
            layout.encode([tensor.to(where) for tensor in tensors], order, payload)
            decoded = [torch.zeros(numel, dtype=torch.bfloat16, device=where) for numel in NUMELS]
            layout.decode((found[0][0] if found else payload).to(where), order, decoded)  # the same bytes
            found.append((payload, torch.cat(decoded)))
        (payload, decoded), (payload_there, decoded_there) = found
        yield from _differing(f"{name}, encoded", payload_there, payload)
        yield from _differing(f"{name}, decoded", decoded_there, decoded)


def _of_differences(device: torch.device) -> Iterator[str]:
    """The differences of payloads after a small update, and after a large one."""
    before, update = _values(sum(NUMELS), seed=5), _values(sum(NUMELS), seed=6)
    for name, wire_format in (
        ("bf16", UnquantizedFormat(torch.bfloat16)),
        ("int8", make_format("int8", block_size=256)),
    ):
        for change in (1e-4, 1.0):
            held, row = (wire_format.encode_rows(each.view(1, -1)) for each in (before, before + change * update))
            found: list[tuple[Tensor, Tensor]] = []
            for where, with_kernels in ((CPU, False), (device, True)):
                rows = Rows([wire_format], [before.numel()], where, use_kernels=with_kernels)
                there, new = held.to(where, copy=True), row.to(where)
                measured = rows.measure(new, there)
                sent = torch.zeros(1, int(measured.row_bytes), dtype=torch.uint8, device=where)
                rows.encode(new, there, measured, sent)
                rows.add((found[0][0] if found else sent).to(where), there)
                found.append((sent, there))
            (sent, _), (sent_there, there) = found
            yield from _differing(f"exact difference of {name}", sent_there, sent)
            yield from _differing(f"exact difference of {name}, added", there, row)


def _of_casts(device: torch.device) -> Iterator[str]:
    matrix = _values(130 * 260, seed=2).view(130, 260)
    for name, cast in CASTS.items():
        here = cast(matrix, torch.float8_e4m3fn, use_kernels=False)
        there = cast(matrix.to(device), torch.float8_e4m3fn, use_kernels=True)
        for operand, other, copy in zip(here, there, ("", ", transposed")):
            yield from _differing(f"FP8, {name}{copy}", other.codes, operand.codes)


def _of_gemms(device: torch.device) -> Iterator[str]:
    """FP8 products of the device, where it has them, against products of the same codes in fp32."""
    from zeropp_fp8.compute.gemm import has_fp8_gemm, matmul_nt

    if not has_fp8_gemm(device, "tensor"):
        return
    a, b = (cast_per_tensor(_values(256 * 512, seed).view(256, 512), torch.float8_e4m3fn)[0] for seed in (3, 4))
    expected = a.dequantize() @ b.dequantize().t()
    there = [
        cast_per_tensor(each.dequantize().to(device), torch.float8_e4m3fn, each.scale.to(device))[0] for each in (a, b)
    ]
    actual = matmul_nt(*there, torch.bfloat16).cpu().float()
    error = float((actual - expected).norm() / expected.norm())
    if not error <= GEMM_ERROR:
        yield f"kernel: FP8 GEMM: the product is off by {error:.2g} of its norm"
