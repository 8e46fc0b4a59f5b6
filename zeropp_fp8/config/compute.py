"""The formats of each operand and each GEMM in the compute section."""

from __future__ import annotations

from fnmatch import fnmatch

from zeropp_fp8.config.sections import MX_FORMATS, ComputeConfig


def completed_compute(compute: ComputeConfig) -> ComputeConfig:
    """Return the section with `scaling` "mx" if formats are MX and the user named no scaling."""
    if "scaling" in compute.model_fields_set or not any(f in MX_FORMATS for f in _named_formats(compute)):
        return compute
    return compute.model_copy(update={"scaling": "mx"})


def _named_formats(compute: ComputeConfig) -> list[str]:
    return list(compute.format.values()) if isinstance(compute.format, dict) else [compute.format]


def operand_formats(compute: ComputeConfig) -> dict[str, str]:
    """Return the format of each operand of a linear layer's GEMMs: {"weights", "activations", "gradients"}.

    `compute` must have passed `check_compute`, and must not be "none".
    """
    if isinstance(compute.format, dict):
        formats = dict(compute.format)
        formats.setdefault("gradients", formats["activations"])
        return formats
    of_gradients = {"fp8": "fp8_e4m3", "fp8_hybrid": "fp8_e5m2"}
    if compute.format in of_gradients:
        return {"weights": "fp8_e4m3", "activations": "fp8_e4m3", "gradients": of_gradients[compute.format]}
    return dict.fromkeys(("weights", "activations", "gradients"), compute.format)


def patterns_of_gemms(compute: ComputeConfig) -> dict[str, list[str]]:
    """Return {GEMM: name patterns of layers in which it stays in high precision}, for GEMMs with such layers."""
    named = compute.high_precision_gemms
    found = {gemm: ["*"] for gemm in named} if isinstance(named, list) else {g: list(p) for g, p in named.items()}
    if compute.format != "none" and operand_formats(compute)["gradients"] == "none":
        found |= {"grad_input": ["*"], "grad_weight": ["*"]}
    return found


def high_precision_gemms(compute: ComputeConfig, name: str) -> frozenset[str]:
    """Return the GEMMs that stay in high precision in the layer of this name."""
    return frozenset(gemm for gemm, patterns in patterns_of_gemms(compute).items() if matches(name, patterns))


def matches(name: str, patterns: list[str]) -> bool:
    """Whether a dotted name or a run of its parts ("layers.0") is one of the patterns (with * and ?).

    A pattern also matches with more in front of the name: modules around it, or PEFT's "base_model.model".
    """
    parts = name.split(".")
    runs = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
    return any(fnmatch(run, pattern) for pattern in patterns for run in runs)
