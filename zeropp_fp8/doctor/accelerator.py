"""The device of a rank: what it can do of the package, and how fast it multiplies and copies."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

GIGA = 1e9
SHAPE = (8192, 4096, 4096)  # rows, outputs, inputs of a linear layer
COPIED_BYTES = 1 << 29
REPEATS = 10


def cpu_where_there_is_no_gpu() -> None:
    """DeepSpeed stops where it finds no accelerator and was not told that the CPU is meant."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def device_of(local_rank: int) -> torch.device:
    """The GPU of a rank, made the current one; the CPU where there is none."""
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= count:
        raise RuntimeError(
            f"local rank {local_rank} has no GPU: {count} are visible; start at most {count} rank(s) on this host, or "
            "change CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> dict[str, Any]:
    """Name, memory and what of the package the device enables."""
    from zeropp_fp8.compute.gemm import execution

    gemms = {scaling: execution(device, scaling) for scaling in ("delayed", "per_channel", "block", "mx")}
    if device.type == "cpu":
        return {"name": "CPU", "gemms": gemms, "kernels": "none: torch code gives the same bytes"}
    from zeropp_fp8.kernels.wire.launch_tables import native_float8

    properties = torch.cuda.get_device_properties(device)
    converted = "with FP8 instructions" if native_float8(device) else "FP8 codes made without FP8 instructions"
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "bytes": properties.total_memory,
        "uuid": str(getattr(properties, "uuid", device.index)),
        "gemms": gemms,
        "kernels": f"Triton's, {converted}",
    }


def rates(device: torch.device) -> dict[str, float]:
    """{"matrix_tflops", "fp8_tflops", "memory_gbs"} of a GPU, as zeropp_fp8.plan counts them."""
    from zeropp_fp8.compute.casts import cast_per_tensor
    from zeropp_fp8.compute.gemm import has_fp8_gemm, matmul_nt

    rows, outputs, inputs = SHAPE
    generator = torch.Generator(device).manual_seed(0)  # zeros multiply faster
    x, weight = (
        torch.randn(each, inputs, dtype=torch.bfloat16, device=device, generator=generator) for each in (rows, outputs)
    )
    flop = 2 * rows * outputs * inputs
    found = {"matrix_tflops": flop / _seconds(lambda: x @ weight.t()) / 1e12}
    found["fp8_tflops"] = found["matrix_tflops"]
    if has_fp8_gemm(device, "tensor"):
        operands = [cast_per_tensor(each, torch.float8_e4m3fn)[0] for each in (x, weight)]
        found["fp8_tflops"] = flop / _seconds(lambda: matmul_nt(*operands, torch.bfloat16)) / 1e12
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["memory_gbs"] = 2 * COPIED_BYTES / _seconds(lambda: target.copy_(source)) / GIGA
    return found


def _seconds(function) -> float:
    """The time of one call, after some that are not counted."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        function()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS
