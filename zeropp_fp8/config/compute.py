"""Rules of the compute section: which formats, scalings and roundings work together."""

from __future__ import annotations

from zeropp_fp8.config.patterns import matches
from zeropp_fp8.config.sections import FP8_FORMATS, GEMMS, MX_FORMATS, SECTION, ComputeConfig, ConfigError, nearest


def completed_compute(compute: ComputeConfig) -> ComputeConfig:
    """The section with `scaling` "mx" where formats are MX and the user named no scaling."""
    if "scaling" in compute.model_fields_set or not any(f in MX_FORMATS for f in _named_formats(compute)):
        return compute
    return compute.model_copy(update={"scaling": "mx"})


def _named_formats(compute: ComputeConfig) -> list[str]:
    return list(compute.format.values()) if isinstance(compute.format, dict) else [compute.format]


def operand_formats(compute: ComputeConfig) -> dict[str, str]:
    """The format of each operand of a linear layer's GEMMs: {"weights", "activations", "gradients"}.

    `compute` must have passed `check_compute`, and not be "none".
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
    """{GEMM: name patterns of layers in which it stays in high precision}, of those that do anywhere."""
    named = compute.high_precision_gemms
    found = {gemm: ["*"] for gemm in named} if isinstance(named, list) else {g: list(p) for g, p in named.items()}
    if compute.format != "none" and operand_formats(compute)["gradients"] == "none":
        found |= {"grad_input": ["*"], "grad_weight": ["*"]}
    return found


def high_precision_gemms(compute: ComputeConfig, name: str) -> frozenset[str]:
    """The GEMMs that stay in high precision in the layer of this name."""
    return frozenset(gemm for gemm, patterns in patterns_of_gemms(compute).items() if matches(name, patterns))


def check_compute(compute: ComputeConfig) -> None:
    """Rules inside the compute section.

    Raises:
        ConfigError: formats, scaling and rounding that cannot work together.
    """
    where = f"{SECTION}.compute"
    if compute.format == "none":
        return
    shorthands = ("none", "fp8", "fp8_hybrid", *MX_FORMATS)
    if isinstance(compute.format, dict):
        roles = ("weights", "activations", "gradients")
        unknown = [role for role in compute.format if role not in roles]
        if unknown:
            raise ConfigError(f'"{where}.format": unknown operand {unknown[0]!r}; operands are {", ".join(roles)}')
        missing = [role for role in roles[:2] if role not in compute.format]
        if missing:
            raise ConfigError(f'"{where}.format": the format of "{missing[0]}" is missing; name one, or one for all')
        for role, name in compute.format.items():
            known = (*FP8_FORMATS, *MX_FORMATS, *(("none",) if role == "gradients" else ()))
            if name not in known:
                raise ConfigError(
                    f'"{where}.format.{role}": {name!r} cannot be computed with{nearest(name, known)}; '
                    f"formats here are {', '.join(known)}"
                )
    elif compute.format not in shorthands:
        raise ConfigError(
            f'"{where}.format": {compute.format!r} cannot be computed with{nearest(compute.format, shorthands)}; '
            f"formats here are {', '.join(shorthands)}, or one an operand"
        )
    if all("*" in patterns_of_gemms(compute).get(gemm, ()) for gemm in GEMMS):
        raise ConfigError(
            f'"{where}.high_precision_gemms" leaves no GEMM of any layer in low precision; set "{where}.format" to '
            '"none", or name fewer'
        )
    formats = operand_formats(compute)
    mx = [role for role, name in formats.items() if name in MX_FORMATS]
    fp8 = [role for role, name in formats.items() if name in FP8_FORMATS]
    if compute.scaling == "mx" and fp8:
        raise ConfigError(
            f'"{where}.scaling": "mx" goes with MX formats, but {fp8[0]} are {formats[fp8[0]]}; '
            'use an MX format such as "mxfp8_e4m3", or scaling "delayed", "current", "per_channel" or "block"'
        )
    if compute.scaling != "mx" and mx:
        raise ConfigError(
            f'"{where}.scaling": "{compute.scaling}" goes with FP8, but {mx[0]} are {formats[mx[0]]}; '
            'use "scaling": "mx", or "format": "fp8"'
        )
    if compute.scaling != "mx":
        if formats["gradients"] == "none":
            raise ConfigError(
                f'"{where}.format.gradients": "none" (a backward pass in high precision) goes with MX formats only; '
                "use fp8_e4m3 or fp8_e5m2"
            )
        for role in ("weights", "activations"):
            if formats[role] != "fp8_e4m3":
                raise ConfigError(
                    f'"{where}.format.{role}": {formats[role]}: no FP8 GEMM multiplies two E5M2 operands, as gradients '
                    "may be; use fp8_e4m3"
                )
        if compute.scaling == "block" and formats["gradients"] != "fp8_e4m3":
            raise ConfigError(
                f'"{where}.format": gradients in E5M2 do not go with scaling "block", whose GEMM takes E4M3 only; '
                'use "fp8"'
            )
        if compute.rounding != "nearest":
            raise ConfigError(f'"{where}.rounding": FP8 casts round to nearest; set "nearest", or use MX formats')
