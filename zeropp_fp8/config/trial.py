"""A job as an experiment: an environment variable gives up parts of its precision, for some steps.

`python -m zeropp_fp8 reference` and `bisect` start the launch line of a job several times; scripts and ds_configs do
not change.
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from zeropp_fp8.config.compute import patterns_of_gemms
from zeropp_fp8.config.sections import SECTION, Gemm, GradientsConfig, NumericsConfig, PluginConfig
from zeropp_fp8.config.words import ConfigError

TRIAL_VARIABLE = "ZEROPP_FP8_TRIAL"
# piece -> fields of the gradients section; every other piece is a section of the same name, with its defaults.
_OF_GRADIENTS: dict[str, dict[str, Any]] = {
    "gradients_within": {"intra_format": "none"},
    "gradients_between": {"inter_format": "none", "error_feedback": False},
    "gradients_at_rest": {"store_format": "none"},
}
# piece -> the section whose `skip_modules` keeps layers of the piece in high precision.
SKIPPED_IN = {
    "weights": "weights",
    "gradients_within": "gradients",
    "gradients_between": "gradients",
    "compute": "compute",
    "frozen": "frozen",
}


class Trial(BaseModel):
    """One run of an experiment; JSON in ZEROPP_FP8_TRIAL.

    Attributes:
        steps: every rank ends after this many, with status 0; `engine`: the engine whose steps count, in the order in
            which training engines are made; None: any engine.
        file: rank 0 writes the numbers of each step to it.
        high: pieces (`pieces_of`) in high precision; "all" of them: the recipe `lossless`.
        skip_modules: by section (`SKIPPED_IN`), name patterns of layers that are left out, added to its own.
        gemms: by GEMM, name patterns of layers in which it stays in high precision, added to its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int
    file: str
    engine: int | None = None
    high: list[str] = []
    skip_modules: dict[str, list[str]] = {}
    gemms: dict[Gemm, list[str]] = {}

    def applied(self, config: PluginConfig) -> PluginConfig:
        """Return the configuration of the run."""
        if "all" in self.high:
            kept = ("topology", "gather_granularity", "compile", "trl_generation", "checkpoint", "report")
            return PluginConfig(recipe="lossless", **{name: getattr(config, name) for name in kept})
        changes: dict[str, Any] = {"numerics": NumericsConfig()}
        known = pieces_of(config)
        for piece in self.high:
            if piece not in known:
                raise ConfigError(f'{TRIAL_VARIABLE}: "{piece}" is no piece of "{SECTION}"; pieces are {known}')
            if piece in _OF_GRADIENTS:
                gradients = changes.get("gradients", config.gradients)
                changes["gradients"] = gradients.model_copy(update=_OF_GRADIENTS[piece])
            else:
                changes[piece] = type(getattr(config, piece))()
        for section, patterns in self.skip_modules.items():
            part = changes.get(section, getattr(config, section))
            changes[section] = part.model_copy(update={"skip_modules": [*part.skip_modules, *patterns]})
        if self.gemms:
            part = changes.get("compute", config.compute)
            named = patterns_of_gemms(part)
            more = {gemm: [*named.get(gemm, ()), *patterns] for gemm, patterns in self.gemms.items()}
            changes["compute"] = part.model_copy(update={"high_precision_gemms": named | more})
        changed = config.model_copy(update=changes)
        if not config.reduces_gradients or changed.reduces_gradients:
            return changed
        # DeepSpeed reduces them, to the dtype that it keeps.
        return changed.model_copy(update={"gradients": GradientsConfig()})


def trial_from_environment() -> Trial | None:
    """Return the trial in ZEROPP_FP8_TRIAL, if that is set."""
    text = os.environ.get(TRIAL_VARIABLE)
    try:
        return Trial.model_validate_json(text) if text else None
    except ValidationError as error:
        raise ConfigError(f"{TRIAL_VARIABLE} is set by python -m zeropp_fp8 reference, not by hand: {error}") from None


def pieces_of(config: PluginConfig) -> list[str]:
    """Return the low-precision parts of a configuration, as pieces that can be given up one by one."""
    gradients, alone = config.gradients, config.gradients.scales == "block"
    used = {
        "weights": config.weights.format != "none",
        "gradients": config.quantizes_gradients and not alone,  # codes are added unchanged: all pieces or none
        "gradients_within": gradients.intra_format != "none" and alone,
        "gradients_between": gradients.inter_format != "none" and alone,
        "gradients_at_rest": gradients.store_format != "none" and alone,
        "compute": config.computes_in_low_precision,
        "optimizer": config.stores_states_in_low_precision,
        "frozen": config.frozen.format != "none",
        "activations": config.activations.wire_format != "none",
    }
    return [name for name, is_used in used.items() if is_used]
