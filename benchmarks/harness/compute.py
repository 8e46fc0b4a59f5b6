"""Linear layers in the formats that compute benchmarks compare.

bf16                           nn.Linear
current, delayed, per_channel, block       this project's scalings, E4M3 throughout
current-hybrid, delayed-hybrid             the same with gradients in E5M2
mxfp8                          emulated on Hopper, which has no MX GEMM: for information, it cannot be faster
torchao-tensorwise, -rowwise   torchao.float8.convert_to_float8_training, where torchao can be imported
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from benchmarks.harness.command import choose_runs
from benchmarks.harness.environment import describe
from zeropp_fp8.compute import ConversionReport, convert_linear_layers
from zeropp_fp8.compute.gemm import has_fp8_gemm

BF16 = "bf16"
OURS = {
    "current": {"format": "fp8", "scaling": "current"},
    "delayed": {"format": "fp8", "scaling": "delayed"},
    "per_channel": {"format": "fp8", "scaling": "per_channel"},
    "block": {"format": "fp8", "scaling": "block"},
    "current-hybrid": {"format": "fp8_hybrid", "scaling": "current"},
    "delayed-hybrid": {"format": "fp8_hybrid", "scaling": "delayed"},
    "mxfp8": {"format": "mxfp8_e4m3"},
}
TORCHAO = "torchao-"
RUNS = (BF16, *OURS, TORCHAO + "tensorwise", TORCHAO + "rowwise")


def converted(module: nn.Module, run: str) -> tuple[nn.Module, ConversionReport | None]:
    """The module with the linear layers of a run, and this project's report of it.

    Raises:
        RuntimeError: not one layer was converted.
    """
    if run == BF16:
        return module, None
    if run.startswith(TORCHAO):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(run.removeprefix(TORCHAO))
        return convert_to_float8_training(
            module, config=config, module_filter_fn=lambda module, name: "lm_head" not in name
        ), None
    report = convert_linear_layers(module, OURS[run])
    if not report.converted:
        raise RuntimeError(f"{run}: {report}")
    return module, report


def has_torchao() -> bool:
    """Whether torchao can be imported."""
    try:
        import torchao.float8  # noqa: F401
    except ImportError:
        return False
    return True


def choose(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Make args.runs and args.modes lists of what was asked for; that torchao's are left out is printed."""
    choose_runs(args, parser, RUNS)
    args.modes = args.modes.split(",")
    unknown = [mode for mode in args.modes if mode not in ("eager", "compile")]
    if unknown:
        parser.error(f"unknown mode {unknown[0]}; modes are eager and compile")
    if not has_torchao() and any(run.startswith(TORCHAO) for run in args.runs):
        print("torchao cannot be imported: not measured")
        args.runs = [run for run in args.runs if not run.startswith(TORCHAO)]


def head_of(question: str, device: torch.device) -> dict:
    """The head of a result, with torchao's version and which FP8 GEMMs the device has."""
    head = describe(question)
    if has_torchao():
        import torchao

        head["versions"]["torchao"] = torchao.__version__
    head["fp8_gemms"] = {kind: has_fp8_gemm(device, kind) for kind in ("tensor", "row", "block", "tile")}
    missing = ", ".join(kind for kind, there in head["fp8_gemms"].items() if not there)
    if missing:
        print(f"This device has no FP8 GEMM with scales per {missing}: there it is emulated, and times mean nothing.")
    return head
