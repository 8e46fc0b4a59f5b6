"""Promises of every number format, as checks of (format, dtype, device); payload_checks.py has those of kernels.

`ENTRIES` has each format of the registry as it is and with the options that matter: a new one is picked up by itself,
and asks for its NumPy reference.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import reference
import torch
from error_bounds import HALF_SMALLEST, UNIT_ROUNDOFF, error_bound
from hypothesis import strategies as st

from zeropp_fp8.formats import FORMAT_NAMES, MX_NAMES, chunks, make_format, tensor_scaled
from zeropp_fp8.formats.dynamic_map import dynamic_levels

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Rotations, blocks that are no power of two, of a few codes, or long, one scale for all, both kinds of double scales.
ENTRIES = {name: {"name": name} for name in FORMAT_NAMES} | {
    "int8-96": {"name": "int8", "block_size": 96},
    "int8-32": {"name": "int8", "block_size": 32},
    "int8-2": {"name": "int8", "block_size": 2},
    "int8-8192": {"name": "int8", "block_size": 8192},
    "int8-whole": {"name": "int8", "block_size": None},
    "int8-hadamard": {"name": "int8", "block_size": 256, "hadamard": True},
    "int4-2": {"name": "int4", "block_size": 2},
    "int4-34": {"name": "int4", "block_size": 34},
    "int4-whole": {"name": "int4", "block_size": None},
    "int4-hadamard": {"name": "int4", "block_size": 128, "hadamard": True},
    "int4-hadamard-96": {"name": "int4", "block_size": 96, "hadamard": True},
    "int4-hadamard-whole": {"name": "int4", "block_size": None, "hadamard": True},
    "fp8_e4m3-hadamard": {"name": "fp8_e4m3", "block_size": 64, "hadamard": True},
    "fp8_e4m3-whole": {"name": "fp8_e4m3", "block_size": None},
    "fp8_e4m3-tensor": {"name": "fp8_e4m3", "scales": "tensor"},
    "fp8_e5m2-32": {"name": "fp8_e5m2", "block_size": 32},
    "fp8_e5m2-hadamard": {"name": "fp8_e5m2", "block_size": 128, "hadamard": True},
    **{f"{name}-floor": {"name": name, "scale_mode": "floor"} for name in MX_NAMES},
    "nf4-34": {"name": "nf4", "block_size": 34},
    "nf4-4096": {"name": "nf4", "block_size": 4096},
    "nf4-double": {"name": "nf4", "double_quantize": True},
    "nf4-2-double": {"name": "nf4", "block_size": 2, "double_quantize": True},
    "int4-double": {"name": "int4", "block_size": 64, "double_quantize": True},
    "int8-double": {"name": "int8", "block_size": 64, "double_quantize": True},
    "int8-3-double": {"name": "int8", "block_size": 3, "double_quantize": True},
    "fp8_e4m3-double": {"name": "fp8_e4m3", "block_size": 128, "double_quantize": True},
    "fp8_e4m3-1-double": {"name": "fp8_e4m3", "block_size": 1, "double_quantize": True},
}
EXACT = ("none", "fp16")
QUANTIZED = tuple(entry for entry in ENTRIES if entry not in EXACT)
ROTATED, DOUBLE = (
    tuple(entry for entry, given in ENTRIES.items() if given.get(option)) for option in ("hadamard", "double_quantize")
)
WHOLE = tuple(entry for entry, given in ENTRIES.items() if given.get("block_size", 0) is None)  # no parts
MX = tuple(entry for entry, given in ENTRIES.items() if given["name"] in MX_NAMES)
PLAIN = tuple(entry for entry in QUANTIZED if entry not in ROTATED + DOUBLE)
CODED = tuple(entry for entry in PLAIN if (ENTRIES[entry].get("block_size") or 0) < 8192)


def make(entry: str, dtype: torch.dtype = torch.bfloat16):
    """A format by its name in ENTRIES; `dtype`: of numbers that are no codes."""
    return make_format(**ENTRIES[entry] | ({"dtype": dtype} if entry == "none" else {}))


def options_of(entry: str) -> tuple[str, dict]:
    options = dict(ENTRIES[entry])
    return options.pop("name"), options


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def through(fmt, tensor):
    """Encode and decode."""
    return fmt.decode(fmt.encode(tensor), tensor.shape, tensor.dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, zeros with their signs, NaN where NaN (a CPU and a GPU cast NaN to different bits)."""
    actual, nan = actual.cpu(), expected.isnan()
    signs = torch.equal(actual.signbit() & ~nan, expected.signbit() & ~nan)
    return signs and torch.equal(actual.isnan(), nan) and torch.equal(actual[~nan], expected[~nan])


def assert_same(actual, expected, *what):
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    places = ((actual != expected) & ~(actual.isnan() & expected.isnan())).nonzero()[:5].tolist()
    assert same(actual, expected), (*what, places, [(actual[tuple(p)], expected[tuple(p)]) for p in places])


def bits_of(tensor):
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def wide(numel, dtype, seed=0):
    """Numbers over most of a dtype's exponents, blocks of one magnitude and of many, signed zeros, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal), math.log2(info.max)
    exponents = low + torch.rand(numel, generator=generator, dtype=torch.float64) * (high - low - 0.01)
    exponents[: numel // 2] = (exponents[0] + 8 * torch.rand(numel // 2, generator=generator)).clamp(max=high - 0.01)
    values = torch.exp2(exponents) * torch.randn(numel, generator=generator).sign()
    values[::7] = 0.0
    values[3::14] = -0.0
    values[5::31] = -info.smallest_normal / 3
    return values.to(dtype)


def awkward(numels, dtype, seed=0):
    """Tensors over nine orders of magnitude, with zeros of both signs, a NaN and an Inf."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for numel in numels:
        values = torch.randn(numel, generator=generator) * torch.logspace(-5, 4, max(numel, 1))[:numel]
        values[::7] = 0
        values[3::14] = -0.0
        tensors.append(values.to(dtype))
    if tensors[-1].numel() > 200:
        tensors[-1][150] = float("nan")
    if tensors[0].numel() > 2:
        tensors[0][-1] = float("inf")
    return tensors


@st.composite
def tensors(draw, longest=1500):
    """Finite tensors of any shape and dtype; some with magnitudes from subnormal to the largest."""
    shape = draw(
        st.one_of(
            st.sampled_from([(), (0,), (1,), (7,), (0, 3), (1, 1, 1), (31,), (33,), (63,), (65,), (127,), (513,)]),
            st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
            st.integers(0, longest).map(lambda numel: (numel,)),
        )
    )
    numel, dtype = math.prod(shape), draw(st.sampled_from(list(DTYPES.values())))
    info = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    uniform = torch.rand(numel, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "mixed", "largest", "subnormal", "sparse", "zeros", "equal", "steps"]))
    if kind == "mixed":  # every binade of the dtype
        low, high = math.log2(info.smallest_normal) - 6, math.log2(info.max)
        values = values.sign() * torch.exp2(low + uniform * (high - low))
    elif kind == "largest":
        values = values.sign() * info.max * torch.where(uniform < draw(st.sampled_from([0.01, 0.5])), 1.0, uniform)
    elif kind == "subnormal":
        values = values.sign() * info.smallest_normal * uniform
    elif kind == "sparse":
        values = values * (uniform < 0.03)
    elif kind == "zeros":
        values = values * 0
    elif kind == "equal":
        values = torch.full((numel,), draw(st.sampled_from([1.0, -3.0, info.max, info.tiny])), dtype=torch.float64)
    elif kind == "steps":
        values = values * torch.exp2(torch.arange(numel) // 200 % 30 - 20).double()
    return values.clamp(info.min, info.max).to(dtype).view(shape)


SPECIALS = st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([math.nan, math.inf])), max_size=3)


def with_specials(tensor, specials):
    for place, special in specials if tensor.numel() else ():
        tensor.view(-1)[place % tensor.numel()] = special
    return tensor


# -- the NumPy reference ----------------------------------------------------------------------------------------------


def element_of(name):
    if name not in reference.ELEMENTS:
        pytest.fail(f"{name} has no reference: write it into ELEMENTS of tests/formats/reference.py, from its paper")
    return reference.ELEMENTS[name]


def expected_of(entry, tensor):
    """(payload, decoded float64 [n]) of a flat tensor, by the reference."""
    name, options = options_of(entry)
    if entry in EXACT:
        stored = tensor if entry == "none" else tensor.half()
        return reference.padded(bytes(bits_of(stored).tolist())), stored.double().numpy()
    element_of(name)
    return reference.encoded(tensor.float().numpy(), name, np.array(dynamic_levels(), np.float32), **options)


def in_dtype(decoded, dtype, clamped=True):
    """float64 numbers as fp32 ones and then in `dtype`, finite ones within its range."""
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = decoded.astype(np.float32)
    largest = torch.finfo(dtype).max
    rounded = np.where(np.isfinite(decoded) & clamped, np.clip(rounded, -largest, largest), rounded)
    return torch.from_numpy(rounded).to(dtype)


def hard(entry):
    """fp32 numbers that are hard to round, in blocks of scale 1, of a small and of a large one.

    Every number of the format, every middle of two, and their neighbours; then blocks whose largest numbers are around
    those where scales change, at every third exponent.
    """
    name, options = options_of(entry)
    element = element_of(name)
    block = reference.block_of(name, options) or 128
    if block > 256 or block < 12 or "scales" in options:
        return torch.zeros(0)
    grid = np.unique(element.numbers[np.isfinite(element.numbers)])
    points = torch.from_numpy(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [1e-30, 2.0**-126]])).float()
    points = torch.cat([torch.nextafter(points, torch.tensor(end)) for end in (0.0, math.inf)] + [points, -points])
    points = points[points.abs() <= element.largest]
    rows = torch.nn.functional.pad(points, (0, -len(points) % (block - 1))).view(-1, block - 1)
    rounding = torch.nn.functional.pad(rows, (1, 0), value=element.largest)
    rounding = torch.cat([rounding * factor for factor in (1.0, 2.0**-40, 2.0**40)])
    if options.get("double_quantize"):
        return rounding.reshape(-1)
    starts = [2.0**e * factor for e in range(-126, 128, 3) for factor in (1.0, element.largest)]
    starts = torch.tensor([start for start in starts if 2.0**-125 < start < 2.0**127])
    amax = torch.cat([torch.nextafter(starts, torch.tensor(end)) for end in (0.0, math.inf)] + [starts])
    amax = torch.cat([amax, torch.tensor([2.0**-126, torch.finfo(torch.float32).max])])
    scales = torch.zeros(len(amax), block)
    scales[:, 7] = -amax
    return torch.cat([rounding.reshape(-1), scales.reshape(-1)])


def check_reference(entry, dtype, device=CPU):
    """Bytes and values are those of the reference: odd sizes, all magnitudes, NaN and Inf, every tie."""
    fmt, rotated = make(entry, dtype), entry in ROTATED
    cases = [wide(numel, dtype, numel) for numel in (1, 7, 31, 33, 100, 300, 1001)]
    if rotated:
        cases = [normal(numel, seed=numel, dtype=dtype) for numel in (1, 31, 33, 320, 1001)]
    elif entry not in DOUBLE:
        spoiled = wide(1001, dtype, 5)
        spoiled[[40, 200, 500, 1000]] = torch.tensor([math.nan, -math.nan, math.inf, -math.inf], dtype=dtype)
        spoiled[600] = torch.finfo(dtype).max
        cases += [spoiled]
    else:
        cases += [normal(5001, seed=3, dtype=dtype) * torch.logspace(-2, 1, 5001).to(dtype)]
    cases += [torch.zeros(0, dtype=dtype), torch.zeros(40, dtype=dtype)]
    if dtype == torch.float32 and not rotated and entry not in EXACT:
        cases.append(hard(entry))
    for tensor in cases:
        payload, decoded = expected_of(entry, tensor)
        found = fmt.encode(tensor.to(device))
        assert len(payload) == fmt.payload_bytes(tensor.numel()) == found.numel()
        if rotated:
            values = fmt.decode(found, tensor.shape, torch.float32).cpu().double().numpy()
            np.testing.assert_allclose(values, decoded, rtol=0, atol=1e-5)
            continue
        assert bytes(found.tolist()) == payload, (entry, dtype, tensor.numel())
        for output in DTYPES.values() if entry != "none" else [dtype]:
            assert_same(fmt.decode(found, tensor.shape, output).cpu(), in_dtype(decoded, output, entry not in EXACT))


def check_numbers(entry, values):
    """Any fp32 numbers, NaN and Inf and subnormals among them: the bytes are those of the reference."""
    tensor = torch.tensor(values, dtype=torch.float32)
    payload, decoded = expected_of(entry, tensor)
    found = make(entry, torch.float32).encode(tensor)
    assert bytes(found.tolist()) == payload
    assert_same(make(entry, torch.float32).decode(found, tensor.shape, torch.float32), in_dtype(decoded, torch.float32))


def check_codes(entry):
    """Every code decodes to its number with every scale of a byte, or with some; also codes that are never written."""
    name, options = options_of(entry)
    element, block = element_of(name), reference.block_of(name, options)
    count = math.lcm(block or 1, 1 << element.bits)
    codes = np.tile(np.arange(1 << element.bits), count >> element.bits)
    factors = [2.0 ** (byte - 127) for byte in range(255)] + [math.nan]
    factors = factors if entry in MX else [0.0, 2.0**-126, 0.375, 1.0, 1.5 * 2.0**30, math.nan]
    rows = []
    for byte, factor in enumerate(factors):
        scale = bytes([byte]) if entry in MX else np.float32(factor).tobytes()
        scale = scale if entry in MX or name == "nf4" or "scales" in options else scale[2:]
        head = scale * (1 if "scales" in options else count // (block or count))
        rows.append(list(reference.padded(head) + reference.padded(reference.packed(codes, element.bits))))
    with np.errstate(invalid="ignore"):
        expected = element.numbers[codes] * np.array(factors)[:, None]
    if name not in reference.HOLDS_SPECIAL:
        largest = torch.finfo(torch.float32).max
        expected = np.where(np.isinf(expected), np.sign(expected) * largest, expected)
    for dtype in DTYPES.values():
        decoded = make(entry).decode_rows(torch.tensor(rows, dtype=torch.uint8), count, dtype)
        assert_same(decoded, in_dtype(expected, dtype), entry)


def check_sizes(entry):
    fmt = make(entry)
    assert fmt.payload_bytes(0) == 0 and all(fmt.payload_bytes(numel) % 16 == 0 for numel in range(200))
    assert fmt.payload_bytes(1 << 24) * 8 / (1 << 24) == pytest.approx(fmt.bits_per_element, abs=1e-4)
    remade = make_format(**fmt.options())
    assert remade.key == fmt.key and hash(remade.key) is not None and remade.is_exact == (entry in EXACT)


# -- any tensor -------------------------------------------------------------------------------------------------------


def bound_of(entry, tensor):
    """float64 [n], the largest error of each element; None where bytes are compared with the reference alone."""
    name, options = options_of(entry)
    block, double = reference.block_of(name, options), options.get("double_quantize", False)
    if "scales" in options or (not double and name in MX_NAMES):
        return None
    element_of(name)
    flat = tensor.reshape(-1)
    if name != "nf4" and not double:
        return error_bound(tensor, name, block, options.get("hadamard", False), tensor.dtype)
    bound = torch.from_numpy(reference.bound_of_errors(flat.float().numpy(), name, block, double))
    return bound + UNIT_ROUNDOFF[tensor.dtype] * (flat.double().abs() + bound) + HALF_SMALLEST[tensor.dtype]


def check_any_tensor(entry, tensor):
    """Finite, of its shape and dtype, within the error bound, the same each time; zeros stay zeros."""
    fmt = make(entry, tensor.dtype)
    payload = fmt.encode(tensor)
    assert payload.dtype == torch.uint8 and payload.shape == (fmt.payload_bytes(tensor.numel()),)
    assert torch.equal(fmt.encode(tensor), payload)
    decoded = fmt.decode(payload, tensor.shape, tensor.dtype)
    assert decoded.shape == tensor.shape and decoded.dtype == tensor.dtype and decoded.is_contiguous()
    assert entry == "fp16" or decoded.isfinite().all()
    if entry == "none":
        assert torch.equal(bits_of(decoded), bits_of(tensor))
    bound = bound_of(entry, tensor) if tensor.numel() and entry not in EXACT else None
    if bound is not None:
        error = (decoded.double() - tensor.double()).abs().reshape(-1)
        worst = (error - bound).argmax()
        assert (error <= bound).all(), f"error {error[worst]} over bound {bound[worst]}"
    assert tensor.any() or not decoded.any()


def check_nan(entry, dtype, device=CPU):
    """Exactly the block with NaN or Inf becomes NaN, or the number alone where codes hold it; others do not change."""
    name, options = options_of(entry)
    fmt, alone = make(entry, dtype), name in reference.HOLDS_SPECIAL or "scales" in options
    block = 1 if alone else reference.block_of(name, options) or 300
    clean = normal(300, dtype=dtype)
    # No place below has the largest number of its block, so that a scale which does not count it stays.
    clean[[0, 101, 299]] = 0.01
    expected = through(fmt, clean.to(device)).cpu()
    for special in (math.nan, math.inf, -math.inf):
        for place in (0, 101, 299):
            tensor, inside = clean.clone(), torch.arange(300) // block == place // block
            tensor[place] = special
            payload = fmt.encode(tensor.to(device))
            decoded = fmt.decode(payload, (300,), dtype).cpu()
            if name == "mxfp8_e5m2" and math.isinf(special):
                assert decoded[place].item() == special
            else:
                assert decoded[inside].isnan().all()
            if options.get("double_quantize"):  # the other scales' mean and groups change
                assert decoded[~inside].isfinite().all()
                bound = bound_of(entry, tensor.masked_fill(inside, 0.0))
                assert ((decoded.double() - tensor.double()).abs() <= bound)[~inside].all()
            else:
                assert_same(decoded[~inside], expected[~inside], special, place)
    everything = through(fmt, torch.full((100,), math.nan, dtype=dtype, device=device))
    assert everything.isnan().all()


# -- rows, pieces, sums, parts ----------------------------------------------------------------------------------------


def check_rows(entry, monkeypatch):
    """Rows are encoded independently, strided ones and those in pieces too, into `out` and nothing beside it."""
    fmt = make(entry, torch.float32)
    for numel in (0, 1, 7, 33, 301, 1001):
        matrix = normal(5, numel) * torch.logspace(-3, 3, 5)[:, None]
        payload = fmt.encode_rows(matrix)
        size = fmt.payload_bytes(numel)
        assert payload.shape == (5, size) and torch.equal(payload, torch.stack([fmt.encode(row) for row in matrix]))
        assert torch.equal(fmt.encode_rows(matrix.t().contiguous().t()), payload)
        around = torch.full((5, size + 32), 77, dtype=torch.uint8)
        part = around[:, 16 : 16 + size]
        assert fmt.encode_rows(matrix, part) is part and torch.equal(part, payload)
        assert (around[:, :16] == 77).all() and (around[:, 16 + size :] == 77).all()
        for dtype in DTYPES.values() if entry != "none" else [torch.float32]:
            decoded = fmt.decode_rows(payload, numel, dtype)
            assert torch.equal(decoded, torch.stack([fmt.decode(row, (numel,), dtype) for row in payload]))
            values = torch.full((5, numel + 10), 77, dtype=dtype)
            part = values[:, 5 : 5 + numel]
            assert fmt.decode_rows(payload, numel, dtype, part) is part and torch.equal(part, decoded)
            assert (values[:, :5] == 77).all() and (values[:, 5 + numel :] == 77).all()
        assert fmt.encode_rows(matrix[:0]).shape == (0, size)
    matrix[2, 500], matrix[4, 0] = -math.nan, math.inf
    seen = []
    for piece in (1 << 18, 3003, 200, 1):
        monkeypatch.setattr(chunks, "PIECE", piece)
        monkeypatch.setattr(tensor_scaled, "_CHUNK", max(piece, 100))
        payload = fmt.encode_rows(matrix)
        mean = fmt.mean_of_rows([payload, payload.flip(0)], 1001)
        seen.append([bits_of(each) for each in (payload, fmt.decode_rows(payload, 1001, torch.float32), mean)])
    assert all(torch.equal(a, b) for others in seen[1:] for a, b in zip(seen[0], others))


def check_mean(entry, device=CPU):
    """The fp32 sum of what payloads decode to, in their order, times 1 / their number; NaN and Inf go through."""
    fmt = make(entry, torch.float32)
    tensors = [normal(3, 200, seed=seed).to(device) * 10.0**seed for seed in range(3)]
    tensors[1][2, 150] = math.inf
    for count in (1, 2, 3):
        payloads = [fmt.encode_rows(tensor) for tensor in tensors[:count]]
        total = torch.zeros(3, 200, device=device)
        for payload in payloads:
            total = total + fmt.decode_rows(payload, 200, torch.float32)
        mean, expected = fmt.mean_of_rows(payloads, 200), total * (1.0 / count)
        assert mean.dtype == torch.float32
        if entry in ROTATED:  # which is undone once, after the sum
            torch.testing.assert_close(mean, expected, rtol=1e-5, atol=1e-4, equal_nan=True)
        else:
            assert torch.equal(mean.isnan(), expected.isnan()) and torch.equal(mean.nan_to_num(), expected.nan_to_num())
        special = mean[2, 150]
        assert count == 1 or special.isnan() or (fmt.name in ("none", "fp16", "mxfp8_e5m2") and special == math.inf)


def encode_parts(fmt, tensor, world):
    """([world, bytes of a part], elements of a part): equal parts, as short as whole granules allow."""
    numel = max(1, math.ceil(tensor.numel() / world / fmt.granule)) * fmt.granule
    out = torch.full((world, fmt.payload_bytes(numel)), 0xAB, dtype=torch.uint8, device=tensor.device)
    for rank in range(world):
        fmt.encode_part(tensor, rank * numel, numel, out[rank])
    return out, numel


def check_parts(entry, tensor, world, finite=True):
    """The codes and scales of the whole, however many parts; zeros beyond the end, and a payload like any other."""
    fmt = make(entry, tensor.dtype)
    parts, numel = encode_parts(fmt, tensor, world)
    decoded = fmt.decode_rows(parts, numel, tensor.dtype).view(-1)
    whole = fmt.decode(fmt.encode(tensor), tensor.shape, tensor.dtype).view(-1)
    assert torch.equal(bits_of(decoded[: tensor.numel()].nan_to_num(7.0)), bits_of(whole.nan_to_num(7.0)))
    assert torch.equal(decoded[: tensor.numel()].isnan(), whole.isnan())
    if finite and entry not in ROTATED:
        assert not decoded[tensor.numel() :].any()
    one = torch.full((fmt.payload_bytes(world * numel),), 0xAB, dtype=torch.uint8, device=tensor.device)
    fmt.encode_part(tensor, 0, world * numel, one)
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, world * numel - tensor.numel()))
    if entry not in DOUBLE:
        assert torch.equal(one, fmt.encode(flat)), "a part's payload is one like any other"
    shared = one[fmt.shared_bytes(world * numel)]
    assert all(torch.equal(part[fmt.shared_bytes(numel)], shared) for part in parts)
    if fmt.is_exact:
        return
    for (start, size), (first, _) in zip(fmt.granule_runs(numel), fmt.granule_runs(world * numel)):
        bytes_here = size * (numel // fmt.granule)
        assert torch.equal(parts[:, start : start + bytes_here].reshape(-1), one[first : first + world * bytes_here])


# -- refusals ---------------------------------------------------------------------------------------------------------


def check_refusals(entry):
    fmt = make(entry)
    for dtype in (torch.float64, torch.int32, torch.bool):
        with pytest.raises(
            TypeError, match=rf"{fmt.name}: can encode float32, bfloat16 and float16 tensors, got {dtype}"
        ):
            fmt.encode(torch.ones(4, dtype=dtype))
    payload = fmt.encode(torch.ones(100))
    for wrong in (payload[:-16], torch.cat([payload, payload]), payload.view(torch.int8)):
        with pytest.raises(ValueError, match=rf"{fmt.name}: a payload for shape \(4, 25\) is {payload.numel()} bytes"):
            fmt.decode(wrong, (4, 25), torch.float32)
    if entry in WHOLE:
        with pytest.raises(ValueError, match=f"{fmt.name}: one scale for the whole tensor"):
            fmt.encode_part(torch.ones(4), 0, 0, payload[:0])
        return
    granule = fmt.granule
    out = torch.empty(fmt.payload_bytes(2 * granule), dtype=torch.uint8)
    for first, numel in ((1, granule), (0, granule - 1), (-granule, granule), (0, -granule)):
        if granule > 1 or min(first, numel) < 0:
            with pytest.raises(ValueError, match=f"{fmt.name}: a part begins and ends at multiples of {granule}"):
                fmt.encode_part(torch.ones(granule), first, numel, out)
    for wrong in (out[:-16], out.view(1, -1), out.view(torch.int8)):
        with pytest.raises(ValueError, match=f"{fmt.name}: the payload of {2 * granule} elements is"):
            fmt.encode_part(torch.ones(granule), 0, 2 * granule, wrong)
    for tensor in (torch.ones(granule).double(), torch.ones(0, dtype=torch.int32)):
        with pytest.raises(TypeError, match=f"{fmt.name}: can encode float32, bfloat16 and float16"):
            fmt.encode_part(tensor, 0, 2 * granule, out)
    fmt.encode_part(torch.ones(granule), 0, 0, out[:0])
    fmt.encode_part(torch.ones(granule), granule, 2 * granule, out)
    assert not fmt.decode(out, (2 * granule,), torch.float32).any(), "a part beyond the end"
