"""Casts with kernels against their torch code, for tests in Triton's interpreter (CPU) and natively (GPU)."""

from __future__ import annotations

import torch

from zeropp_fp8.compute import casts

MATRIX_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FLOAT8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
COPIES = ((True, True), (True, False), (False, True))
# each without a scale; `cast_per_tensor` with one is "delayed"
CASTS = {
    "tensor": casts.cast_per_tensor,
    "row": casts.cast_per_row,
    "block": casts.cast_blocks,
    "tile": casts.cast_tiles,
}
AMAX_BEFORE = 0.75  # what amax_out holds before a cast


def awkward_matrix(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    seed: int = 0,
    whole_groups: bool = True,
    interpreted: bool = False,
) -> torch.Tensor:
    """[rows, columns] over many orders of magnitude, with zeros, NaN of both signs, Inf, and numbers near the limits.

    Args:
        whole_groups: also rows and columns without a finite number, or of zeros, subnormals or huge numbers only.
        interpreted: no bf16 subnormals, which Triton's interpreter reads wrongly.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-4, 3, columns)
    values[torch.rand(rows, columns, generator=generator) < 0.05] = 0
    values[torch.rand(rows, columns, generator=generator) < 0.01] = -0.0
    if whole_groups and rows >= 16 and columns >= 16:
        limit = torch.finfo(dtype).max
        values[1] = 0
        values[2] = torch.finfo(dtype).tiny * torch.rand(columns, generator=generator)  # subnormals
        values[3] = limit * torch.rand(columns, generator=generator)
        values[4] = torch.nan
        values[5] = torch.inf
        values[6] = 0
        values[6, ::3] = torch.nan
        values[7:, 1] = 0
        values[7:, 2] = -torch.nan
        values[7:, 3] = limit
        values[7:, 4] = 1e-41
    matrix = values.to(dtype)
    if interpreted and dtype == torch.bfloat16:
        matrix[matrix.abs() < torch.finfo(dtype).tiny] = 0
    if rows > 8 and columns > 8:
        matrix[8, 5:8] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        # the sign of NaN must not matter; abs and neg keep NaN, so it is set by its bits
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        matrix.view(bits)[8, 5:6] |= torch.iinfo(bits).min
    return matrix


def raw(codes: torch.Tensor) -> torch.Tensor:
    """The bytes of FP8 codes, on the CPU."""
    return codes.view(torch.uint8).cpu()


def check_operand(actual, expected, where=""):
    """The same bytes, scales, strides and shapes, padding included."""
    assert (actual is None) == (expected is None), where
    if actual is None:
        return
    assert (actual.shape, actual.granularity, actual.dtype) == (expected.shape, expected.granularity, expected.dtype)
    assert actual.codes.shape == expected.codes.shape and actual.codes.is_contiguous(), where
    assert actual.scale.shape == expected.scale.shape, where
    assert actual.scale.stride() == expected.scale.stride(), (where, actual.scale.stride(), expected.scale.stride())
    if actual.granularity == "tile":  # what lies between the rows
        shape = (actual.scale.shape[0], actual.scale.stride(0))
        scales = [operand.scale.as_strided(shape, (shape[1], 1)).cpu() for operand in (actual, expected)]
    else:
        scales = [actual.scale.cpu(), expected.scale.cpu()]
    assert torch.equal(*scales), (where, (scales[0] != scales[1]).nonzero()[:5].tolist())
    differing = (raw(actual.codes) != raw(expected.codes)).nonzero()
    assert len(differing) == 0, (where, len(differing), differing[:5].tolist())


def check_cast(name, matrix, dtype, device, plain=True, transposed=True):
    """A cast of CASTS or "delayed": kernels on `device` against torch code on the CPU."""
    where = (name, tuple(matrix.shape), matrix.dtype, dtype, plain, transposed)
    on_device = matrix.to(device)
    flags = {"plain": plain, "transposed": transposed}
    if name != "delayed":
        expected = CASTS[name](matrix, dtype, **flags, use_kernels=False)
        actual = CASTS[name](on_device, dtype, **flags, use_kernels=True)
    else:
        # some values saturate
        amax = casts.amax_of(matrix, use_kernels=False)
        scale = casts.scale_of_amax(amax / 3, dtype)
        records = torch.full((1,), AMAX_BEFORE), torch.full((1,), AMAX_BEFORE, device=device)
        expected = casts.cast_per_tensor(matrix, dtype, scale, records[0], **flags, use_kernels=False)
        actual = casts.cast_per_tensor(on_device, dtype, scale.to(device), records[1], **flags, use_kernels=True)
        assert records[0].item() == max(AMAX_BEFORE, amax.item())
        assert torch.equal(records[1].cpu(), records[0]), where
        given = scale.to(device)
        copied = casts.per_tensor(on_device, dtype, given, None, **flags, use_kernels=True, own_scale=True)
        for one, other in zip(copied, expected):
            check_operand(one, other, where)
            assert one is None or one.scale.data_ptr() != given.data_ptr()
    for one, other in zip(actual, expected):
        check_operand(one, other, where)


def check_amax(matrix, device):
    """amax_of, and what a cast with its own scale records."""
    expected = casts.amax_of(matrix, use_kernels=False)
    assert torch.equal(casts.amax_of(matrix.to(device), use_kernels=True).cpu(), expected)
    for before in (0.0, 2 * expected.item()):
        record = torch.full((1,), before, device=device)
        casts.cast_per_tensor(matrix.to(device), torch.float8_e4m3fn, amax_out=record, use_kernels=True)
        assert record.item() == max(before, expected.item())
        record.fill_(before)
        casts.cast_per_tensor(
            matrix.to(device), torch.float8_e4m3fn, None, record, plain=False, transposed=False, use_kernels=True
        )
        assert record.item() == max(before, expected.item())


def check_fused(rows, columns, matrix_dtype, dtype, device, exact, plain=True, transposed=True):
    """swiglu and rms_norm with kernels: the values of the unfused way, and the cast of exactly these.

    Args:
        exact: SwiGLU's values must be torch's on the same device; otherwise they may differ by a rounding, as those of
            RMSNorm always may.
    """
    generator = torch.Generator().manual_seed(rows + columns)
    gate, up = (torch.randn(rows, columns, generator=generator) * 4 for _ in range(2))
    gate, up = gate.to(matrix_dtype).to(device), up.to(matrix_dtype).to(device)
    weight = torch.rand(columns, generator=generator).to(matrix_dtype).to(device)
    scale = torch.full((1,), 0.01, device=device)

    def swiglu(use_kernels, record):
        return casts.swiglu(gate, up, dtype, scale, record, plain, transposed, use_kernels)

    def rms_norm(use_kernels, record):
        inverse_rms = casts.inverse_rms(gate, 1e-5, use_kernels)
        return casts.rms_norm(gate, weight, inverse_rms, dtype, scale, record, plain, transposed, use_kernels)

    for fused in (swiglu, rms_norm):
        where = (fused.__name__, rows, columns, matrix_dtype, dtype)
        record = torch.full((1,), AMAX_BEFORE, device=device)
        *operands, values = fused(True, record)
        expected_values = fused(False, None)[2]
        if exact and fused is swiglu:
            assert torch.equal(values, expected_values), where
        else:
            ulp = torch.finfo(matrix_dtype).eps
            # two roundings: x * rstd, then times the weight
            torch.testing.assert_close(values, expected_values, rtol=8 * ulp if ulp < 1e-4 else 2 * ulp, atol=1e-6)
            assert (values != expected_values).float().mean() < (0.8 if ulp < 1e-4 else 0.01), where
        expected = casts.cast_per_tensor(values.cpu(), dtype, scale.cpu(), plain=plain, transposed=transposed)
        for one, other in zip(operands, expected):
            check_operand(one, other, where)
        assert record.item() == max(AMAX_BEFORE, values.float().abs().max().item()), where


def check_fused_with_statistics(rows, columns, matrix_dtype, device):
    """rms_norm of given 1 / rms of rows: the bytes of torch code, for no sum has another order."""
    generator = torch.Generator().manual_seed(rows + columns)
    matrix, weight = (
        torch.randn(*shape, generator=generator).to(matrix_dtype) for shape in ((rows, columns), (columns,))
    )
    inverse_rms = torch.rand(rows, generator=generator) + 0.5
    scale, records = torch.full((1,), 0.01), [torch.full((1,), AMAX_BEFORE, device=d) for d in ("cpu", device)]
    expected = casts.rms_norm(matrix, weight, inverse_rms, torch.float8_e4m3fn, scale, records[0], True, True, False)
    given = (tensor.to(device) for tensor in (matrix, weight, inverse_rms))
    actual = casts.rms_norm(*given, torch.float8_e4m3fn, scale.to(device), records[1], True, True, True)
    for one, other in zip(actual[:2], expected):
        check_operand(one, other, (rows, columns, matrix_dtype))
    assert torch.equal(actual[2].cpu(), expected[2])
    assert records[1].item() == records[0].item() == max(AMAX_BEFORE, expected[2].abs().max())


def check_transpose(rows, columns, length, device):
    """kernels.transpose of every byte value into rows of `length`: zeros beyond `rows`, nothing beyond the last row."""
    from zeropp_fp8.kernels.casts.transpose import transpose

    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=generator)
    expected = torch.zeros(columns, length, dtype=torch.uint8)
    expected[:, :rows] = codes.t()
    memory = torch.full((columns * length + 64,), 0xA5, dtype=torch.uint8, device=device)
    transpose(codes.to(device), memory[: columns * length].view(columns, length).t())
    written, beyond = memory.cpu().split([columns * length, 64])
    assert torch.equal(written.view(columns, length), expected), (rows, columns, length)
    assert (beyond == 0xA5).all(), (rows, columns, length)
