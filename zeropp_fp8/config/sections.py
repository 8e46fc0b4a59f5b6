"""The `zeropp_fp8` section as pydantic models: every field, its type and its default."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, Strict

SECTION = "zeropp_fp8"


class ConfigError(ValueError):
    """A ds_config that the plugin cannot honour. The message names the key and the remedy."""


MX_FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
MX_BLOCK_SIZE = 32  # fixed by the OCP Microscaling specification
FP8_FORMATS = ("fp8_e4m3", "fp8_e5m2")
WIRE_FORMATS = ("none", "int8", "int4", *FP8_FORMATS, *MX_FORMATS)
FROZEN_FORMATS = ("none", "int4", "int8", "nf4", "fp8_e4m3", *MX_FORMATS)
ELSEWHERE = {"nf4": "it is a format of frozen weights", "fp16": "it is a format of optimizer states"}
STATE_FORMATS = ("fp32", "bf16", "fp16", *FP8_FORMATS)
HADAMARD_GROUP = 32


def nearest(word: str, known) -> str:
    match = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f' (did you mean "{match[0]}"?)' if match else ""


Rounding = Literal["nearest", "half_away", "stochastic"]
ScaleMode = Literal["rceil", "floor"]
BlockSize = Annotated[int, Strict(), Field(ge=2, le=1 << 20)]
Flag = Annotated[bool, Strict()]
PositiveInt = Annotated[int, Strict(), Field(ge=1)]
History = Annotated[int, Strict(), Field(ge=1, le=1 << 20)]  # numbers that are kept for each tensor
Seed = Annotated[int, Strict(), Field(ge=0, lt=1 << 43)]  # times a million, and more, it seeds generators of 64 bits


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopologyConfig(_Section):
    """`ranks_per_node`: of the job, numbered node by node; or "detect": ranks of one host are a node."""

    ranks_per_node: PositiveInt | Literal["detect"] = "detect"


class WeightsConfig(_Section):
    """qwZ: how weights travel when they are gathered."""

    format: str = "none"
    block_size: BlockSize = 256
    hadamard: Flag = False
    rounding: Rounding = "nearest"
    scale_mode: ScaleMode = "rceil"  # of MX formats


class SecondaryConfig(_Section):
    """hpZ: `scope` none | node | rank | a number of ranks that divides ranks_per_node."""

    scope: Literal["none", "node", "rank"] | PositiveInt = "none"


class GradientsConfig(_Section):
    """qgZ: how gradients travel inside a node (`intra_format`) and between nodes (`inter_format`).

    `scales`: "block" (each block of a payload has its own) or "tensor" (one that all ranks share, from the amax of
    earlier steps; FP8 only). With shared scales `scale_policy` says how the sum over ranks is kept in range: "auto" (a
    factor mu that adapts), "pre" (divide by the ranks before) or "post" (divide afterwards).
    `store_format`: what the reduced gradients are kept in until the step: none (16 or 32 bits) or FP8.
    `reduction`: "two_hop" (codes are exchanged and added in fp32) or "nccl" (NCCL adds FP8 codes).
    """

    intra_format: str = "none"
    inter_format: str = "none"
    block_size: BlockSize = 128
    hadamard: Flag = True
    rounding: Rounding = "nearest"
    scale_mode: ScaleMode = "rceil"  # of MX formats
    error_feedback: Flag = False
    scales: Literal["block", "tensor"] = "block"
    scale_policy: Literal["auto", "pre", "post"] = "auto"
    amax_history: History = 16  # steps
    store_format: str = "none"
    reduction: Literal["two_hop", "nccl"] = "two_hop"


class ComputeConfig(_Section):
    """Linear layers in FP8 or MX.

    `format`: none | fp8 (E4M3 throughout) | fp8_hybrid (gradients in E5M2) | an MX format for all three operands |
    {"weights": .., "activations": .., "gradients": ..}; of MX formats gradients may be "none": a backward pass in high
    precision, and are the activations' format where not given.
    `scaling`: which values of an operand share a scale, and when it is found; "mx" unless told where formats are MX.
    """

    format: str | dict[str, str] = "none"
    scaling: Literal["delayed", "current", "per_channel", "block", "mx"] = "delayed"
    amax_history: History = 16  # steps
    amax_reduction: Literal["max", "most_recent"] = "max"
    scale_mode: ScaleMode = "rceil"
    rounding: Rounding = "nearest"
    skip_modules: list[str] = ["lm_head"]
    min_features: PositiveInt = 64  # a layer with fewer inputs or outputs stays as it is
    evaluate_in: Literal["compute_format", "high_precision"] = "compute_format"
    allow_fp16: Flag = False


class OptimizerConfig(_Section):
    """What AdamW's states are stored in: fp32 | bf16 | fp16 (with a scale) | fp8_e4m3 | fp8_e5m2.

    `scales`: one a tensor (of a rank's slice of it, where tensors are sliced) or one a block of `block_size` elements.
    `rounding`: of the master weights. `expand_range`: of FP8 moments (COAT).
    """

    master_format: str = "fp32"
    exp_avg_format: str = "fp32"
    exp_avg_sq_format: str = "fp32"
    scales: Literal["tensor", "block"] = "tensor"
    block_size: BlockSize = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    expand_range: Flag = False


class FrozenConfig(_Section):
    """Frozen weights of linear layers rest, travel and are kept as codes of `format`.

    `modules`: which are quantized while a model is made under zero.Init and its checkpoint streams in, before anything
    is frozen: "all-linear", a list of name patterns, or "frozen": none but those that need no gradient by then. What
    is frozen when the engine is made is stored too, as far as `modules` names it.
    `scales`: "tensor": of fp8_e4m3 one scale a weight, so that layers that compute in FP8 multiply with the codes as
    they rest. `double_quantize`: scales of blocks in 8 bits (QLoRA). `skip_modules`: name patterns of what stays in 16
    or 32 bits; a list of your own replaces the default one.
    """

    modules: Literal["all-linear", "frozen"] | list[str] = "all-linear"
    format: str = "none"
    scales: Literal["block", "tensor"] = "block"
    block_size: BlockSize = 64
    double_quantize: Flag = False
    scale_mode: ScaleMode = "rceil"  # of MX formats
    skip_modules: list[str] = ["lm_head", "*embed*", "score", "classifier", "v_head"]


class ActivationsConfig(_Section):
    """How sequence parallelism exchanges activations; "detect": in FP8 where the job is sequence-parallel."""

    wire_format: Literal["none", "fp8", "detect"] = "none"


class ReportConfig(_Section):
    """`every`: steps between two lines with the bytes on the wire; 0 for none."""

    every: Annotated[int, Strict(), Field(ge=0)] = 100


class CheckpointConfig(_Section):
    """`verify`: whether the files of a checkpoint are compared with its manifest when it is loaded."""

    verify: Flag = True


class PluginConfig(_Section):
    """A complete, checked configuration. `resolve()` makes it; nothing else should."""

    enabled: Flag = True
    recipe: str | None = None
    seed: Seed = 0
    topology: TopologyConfig = TopologyConfig()
    weights: WeightsConfig = WeightsConfig()
    secondary: SecondaryConfig = SecondaryConfig()
    gradients: GradientsConfig = GradientsConfig()
    compute: ComputeConfig = ComputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    partition: Literal["slice", "whole_tensor"] = "slice"
    partition_split: Literal["balance", "large", "none"] = "balance"  # of whole tensors: which may be cut by rows
    frozen: FrozenConfig = FrozenConfig()
    activations: ActivationsConfig = ActivationsConfig()
    gather_granularity: Literal["block", "module", "parameter"] = "block"
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    _recipe_variable: str | None = PrivateAttr(default=None)

    def named_by(self, variable: str) -> PluginConfig:
        """The same configuration, whose recipe an environment variable has named."""
        config = self.model_copy()
        config._recipe_variable = variable
        return config

    @property
    def recipe_variable(self) -> str | None:
        """The environment variable that named the recipe, where the ds_config did not."""
        return self._recipe_variable

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized at all; if not, results are promised to be stock's, bit for bit."""
        return (
            self.quantizes_gradients
            or self.weights.format != "none"
            or self.frozen.format != "none"
            or self.computes_in_low_precision
            or self.stores_states_in_low_precision
            or self.gradients.store_format != "none"
            or self.partition != "slice"
            or self.activations.wire_format != "none"
        )

    @property
    def quantizes_gradients(self) -> bool:
        return self.gradients.intra_format != "none" or self.gradients.inter_format != "none"

    @property
    def stores_states_in_low_precision(self) -> bool:
        """Whether master weights or moments are kept in less than fp32."""
        optimizer = self.optimizer
        return {optimizer.master_format, optimizer.exp_avg_format, optimizer.exp_avg_sq_format} != {"fp32"}

    @property
    def computes_in_low_precision(self) -> bool:
        return self.compute.format != "none"
