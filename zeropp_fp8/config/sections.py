"""The `zeropp_fp8` section as pydantic models: every field, its type, its default and what it means."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, Strict
from typing_extensions import NotRequired, TypedDict

from zeropp_fp8.config.words import Remarks

SECTION = "zeropp_fp8"

MX_FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
# Blocks as the formats' specifications fix them, with a scale of one byte each and no rotation.
FIXED_BLOCKS = dict.fromkeys(MX_FORMATS, 32)
FP8_FORMATS = ("fp8_e4m3", "fp8_e5m2")
_ON_THE_WIRE, _FROZEN, _STATES = "weights and gradients on the wire", "frozen weights", "optimizer states"
# The uses of each format; CONTRIBUTING.md says what else a new one needs.
USES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("none", "int8", "int4"), (_ON_THE_WIRE, _FROZEN)),
    "fp8_e4m3": (_ON_THE_WIRE, _FROZEN, _STATES),
    "fp8_e5m2": (_ON_THE_WIRE, _STATES),
    **dict.fromkeys(FIXED_BLOCKS, (_ON_THE_WIRE, _FROZEN)),
    "nf4": (_FROZEN,),
    "fp16": (_STATES,),
}
WIRE_FORMATS, FROZEN_FORMATS = (
    tuple(name for name, uses in USES.items() if use in uses) for use in (_ON_THE_WIRE, _FROZEN)
)
DOUBLE_QUANTIZED_NAMES = tuple(name for name in FROZEN_FORMATS if name not in ("none", *FIXED_BLOCKS))
_ONLY = {name: ", and of ".join(uses) for name, uses in USES.items() if _ON_THE_WIRE not in uses}
ELSEWHERE = Remarks({name: f"it is a format of {uses}" for name, uses in _ONLY.items()})
# At learning rates of 1e-7 to 1e-3, near benchmarks/results/weight_changes/cpu-1-local.json, whose largest is 6e-4.
_DIFFERENCE_BITS = {
    "none": (0.07, 0.2, 0.75, 2.7, 5.5),
    "int8": (0.04, 0.06, 0.18, 0.62, 3),
    "fp8_e4m3": (0.035, 0.065, 0.17, 0.55, 2.05),
}
STATE_FORMATS = ("fp32", "bf16", "fp16", *FP8_FORMATS)
STATE_BLOCKS = tuple(16 << shift for shift in range(7))
HADAMARD_GROUP = 32
COMPUTE_FORMATS = ("none", "fp8", "fp8_hybrid", *MX_FORMATS)
OPERANDS = ("weights", "activations", "gradients")
GEMMS = ("output", "grad_input", "grad_weight")  # of a linear layer


def bits_of(name: str) -> int:
    """The bits of a format's codes: the first number in its name; of "none" 16."""
    found = re.search(r"\d+", name)
    return int(found[0]) if found else 16


def formats_of(part: Any) -> set[str]:
    """The formats in which weights, gradients or frozen weights are sent; "none" is left out."""
    fields = ("format", "intra_format", "inter_format")
    return {getattr(part, field) for field in fields if hasattr(part, field)} - {"none"}


def difference_bits(learning_rate: float, weight_format: str = "none", steps: int | None = None) -> float:
    """About how many bits an exact difference takes under AdamW, of a bf16 weight or of its code; logarithms on lines.

    Args:
        weight_format: of `weights.format`.
        steps: of AdamW so far, whose first ones move every weight by the whole rate; None: many.
    """
    bits = _DIFFERENCE_BITS[weight_format]
    place = min(max(math.log10(learning_rate) + 7, 0), len(bits) - 1)
    low, high = bits[math.floor(place)], bits[math.ceil(place)]
    first = 0 if steps is None else 0.4 / (steps + 1)
    return low * (high / low) ** (place % 1) * (1 + first)


BlockSize = Annotated[int, Strict(), Field(ge=2, le=1 << 20, multiple_of=2)]
Flag = Annotated[bool, Strict()]
PositiveInt = Annotated[int, Strict(), Field(ge=1)]
Memory = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
IsAuto = AfterValidator(lambda given: "auto" if given == "detect" else given)  # Accelerate refuses the word "auto"
OnTheWire = Annotated[Literal[WIRE_FORMATS], ELSEWHERE]
AtRest = Annotated[Literal[FROZEN_FORMATS], ELSEWHERE]
Gemm = Literal[GEMMS]
OfState = Literal[STATE_FORMATS]

_SHARE_A_SCALE = "elements that share a scale; 32 with MX"
_ROTATE = "rotate groups of 32 elements first (Hadamard), so that outliers harm 4-bit codes less"
_NAMED = "name patterns of modules or parameters"


# The docstrings of these classes and the descriptions of their fields are docs/configuration.md (`make docs`).
class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TopologyConfig(_Section):
    """The ranks that share a node.

    Every rank tells its place once, and all ranks decide from all places. A host is what NCCL takes for one:
    `NCCL_HOSTID` if it is set, otherwise the host's name and boot id. Numbers of launchers (`LOCAL_WORLD_SIZE`,
    `LOCAL_SIZE`, ...) are not needed; if one contradicts the hosts the start table reports it, and the hosts win.

    A number overrides the hosts (to try two nodes on one host, or for NVLink that spans hosts): rank r of
    the job is on node r // number. In both cases the nodes of a data-parallel group are those of its own ranks: with
    tensor parallelism of 2 on two nodes of two ranks, both groups have one rank on each node. Nodes with unequal
    numbers of a group's ranks, and ranks that are not numbered node by node, are refused; `1` makes every rank a
    node of its own.
    """

    ranks_per_node: PositiveInt | Literal["detect"] = Field(
        "detect",
        description='ranks of the job on each node, numbered node by node; "detect": ranks of one host are a node',
    )


class WeightsConfig(_Section):
    """qwZ: the format in which weights are sent when they are gathered.

    Parameters with fewer than two dimensions (norms, biases) are always sent in their own 16 or 32 bits. A block with
    NaN or Inf decodes to NaN, so DeepSpeed's overflow checks see it.

    Differences lose nothing: weights are the same as without them, bit for bit. Each node adds the differences to its
    copy of the weights (`secondary.scope`), which has 16-bit numbers, INT8 or FP8 codes. Under AdamW a bf16 weight
    takes about 0.2 bits at a learning rate of 1e-6, 0.8 at 1e-5 and 3 at 1e-4; an INT8 code takes 0.06, 0.2 and 0.6.
    "auto" means "exact" wherever there is such a copy, and "none" elsewhere.
    Whole weights are sent at start, and after anything but a step has written them. Weights that are sent in fp32, and
    small ones that ZeRO-3 keeps gathered (`stage3_param_persistence_threshold`), are always sent whole.
    """

    format: OnTheWire = Field("none", description="none: 16 or 32 bits, as stock")
    block_size: BlockSize = Field(256, description=_SHARE_A_SCALE)
    hadamard: Flag = Field(False, description=_ROTATE)
    skip_modules: list[str] = Field([], description=f"{_NAMED} whose weights are sent in 16 or 32 bits")
    difference: Annotated[Literal["auto", "detect", "none", "exact"], IsAuto] = Field(
        "auto",
        description="exact: between nodes, only what the last step has changed in weights or their codes is sent; "
        "auto: exact where possible",
    )


class SecondaryConfig(_Section):
    """hpZ: each node caches the codes of all weights, so that later gathers send nothing between nodes."""

    scope: Literal["none", "node", "rank"] | PositiveInt = Field(
        "none",
        description="how many ranks share one copy of the codes: all of a node, one, or a divisor of a node's ranks",
    )
    memory_gb: Annotated[Literal["all", "auto", "detect"] | Memory, IsAuto] = Field(
        "all",
        description="GB (10^9 bytes) that the copy may take on a rank; weights that do not fit are gathered each time; "
        "auto: what is free at start, less a quarter of the device's memory; all: no limit",
    )


class GradientsConfig(_Section):
    """qgZ: formats in which gradients are sent, first inside a node, then between nodes, and stored until the step.

    `"scales": "tensor"` is FP8-LM's choice: all ranks encode a tensor with the same scale, so that codes can be added.
    """

    intra_format: OnTheWire = Field("none", description="format inside a node; none: 16 or 32 bits, as stock")
    inter_format: OnTheWire = Field("none", description="format between nodes; none: 16 or 32 bits, as stock")
    block_size: BlockSize = Field(128, description=_SHARE_A_SCALE)
    hadamard: Flag = Field(True, description=_ROTATE + "; inside a node only 4 bits or fewer are")
    skip_modules: list[str] = Field(
        [], description=f'{_NAMED} whose gradients are sent in 16 or 32 bits; not with "scales": "tensor"'
    )
    error_feedback: Flag = Field(
        False, description="keep in 8 bits what rounding between nodes dropped, and add it to the next gradient"
    )
    scales: Literal["block", "tensor"] = Field(
        "block",
        description="tensor: all ranks share a scale per tensor, from the amax of the last 16 steps (FP8 on both hops)",
    )
    store_format: Literal[("none", *FP8_FORMATS)] = Field(
        "none", description="format of reduced gradients until the step; none: 16 or 32 bits"
    )
    accumulate_in: Annotated[Literal["auto", "detect", "node", "world"], IsAuto] = Field(
        "auto",
        description="where gradients of several micro-batches are added. node: on the node's ranks, where they take "
        "1/ranks-per-node of a gradient's memory, and are sent between nodes once per step; world: each is reduced "
        "over all ranks; auto: node if that takes at most a tenth of a device's memory",
    )


_Operand = Annotated[
    Literal[("fp8_e4m3", *MX_FORMATS)],
    Remarks({"fp8_e5m2": "no FP8 GEMM multiplies two E5M2 operands, and gradients may be E5M2"}),
]


class OperandFormats(TypedDict):
    """A format for each operand of a linear layer's GEMMs."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    weights: _Operand
    activations: _Operand
    gradients: NotRequired[Literal[(*FP8_FORMATS, *MX_FORMATS, "none")]]


class ComputeConfig(_Section):
    """Linear layers and packed experts in FP8 or MX; [Compute in FP8 and MX](compute.md) says what each choice means.

    MX formats imply `"scaling": "mx"`. With a format per operand, gradients take the activations' format unless they
    have their own; with MX formats theirs may be `"none"`, a backward pass in high precision.

    A linear layer has three GEMMs: `output` (x W^T), `grad_input` (g W) and `grad_weight` (g^T x).
    `"high_precision_gemms": ["grad_weight"]` multiplies the unquantized numbers of the last one in 16 or 32 bits;
    `{"grad_weight": ["layers.0", "*.down_proj"]}` does so in these layers only. The other GEMMs' bits do not change.
    """

    format: Literal[COMPUTE_FORMATS] | OperandFormats = Field(
        "none",
        description="fp8: E4M3 throughout; fp8_hybrid: gradients in E5M2; or a format per operand",
        json_schema_extra={"or": '`{"weights": .., "activations": .., "gradients": ..}`'},
    )
    scaling: Literal["delayed", "current", "per_channel", "block", "mx"] = Field(
        "delayed",
        description="which values of an operand share a scale, and when it is found; delayed: from the last 16 steps",
    )
    skip_modules: list[str] = Field(["lm_head"], description="name patterns of layers that stay in high precision")
    high_precision_gemms: list[Gemm] | dict[Gemm, list[str]] = Field(
        [],
        description="GEMMs that stay in high precision, in all layers or in those with these names",
        json_schema_extra={"or": "`{GEMM: a list of name patterns}`"},
    )
    min_features: PositiveInt = Field(64, description="a layer with fewer inputs or outputs stays as it is")
    allow_fp16: Flag = Field(
        False, description="train in or cast to fp16 although FP8-trained weights may leave its range"
    )


class OptimizerConfig(_Section):
    """Formats of AdamW's states; the optimizer must be an Adam or AdamW (`"torch_adam": true` in a ds_config)."""

    master_format: OfState = Field("fp32", description="format of master weights; fp16 has a scale")
    exp_avg_format: OfState = Field("fp32", description="format of the first moment")
    exp_avg_sq_format: OfState = Field("fp32", description="format of the second moment")
    scales: Literal["tensor", "block"] = Field(
        "tensor",
        description="block: 128 elements share a scale; tensor: all of a tensor (of a rank's part, if it is sliced)",
    )


class FrozenConfig(_Section):
    """Frozen weights of linear layers and packed experts are stored, sent and cached as codes of `format`.

    [LoRA on quantized weights](lora.md) says which weights are stored so, and when.
    """

    modules: Literal["all-linear", "frozen"] | list[str] = Field(
        "all-linear",
        description="what becomes codes while a model is made under `zero.Init`, before anything is frozen: all linear "
        "layers and packed experts, those with these names, or (frozen) only what needs no gradient by then",
    )
    format: AtRest = Field("none", description="format in which frozen weights of layers are stored, sent and cached")
    scales: Literal["block", "tensor"] = Field(
        "block", description="tensor: one scale per weight (fp8_e4m3 only); FP8 layers multiply the stored codes"
    )
    block_size: BlockSize = Field(64, description=_SHARE_A_SCALE)
    double_quantize: Flag = Field(False, description="store scales of blocks in 8 bits (QLoRA)")
    skip_modules: list[str] = Field(
        ["lm_head", "*embed*", "score", "classifier", "v_head"],
        description="name patterns of what stays in 16 or 32 bits; a list of your own replaces this one",
    )


class ExpertsConfig(_Section):
    """Packed experts of a mixture; see [Mixtures of experts](recipes.md#mixtures-of-experts)."""

    gather: Literal["all", "used"] = Field(
        "all",
        description="which experts of a module are gathered when it runs; used: once the router has chosen, only those "
        "that some rank has tokens for; meant for few tokens per step",
    )


class ActivationsConfig(_Section):
    """Activations that sequence parallelism (DeepSpeed-Ulysses) exchanges around attention, and AutoEP's tokens."""

    wire_format: Literal["none", "fp8", "detect"] = Field(
        "none", description="fp8: E4M3 forward, E5M2 backward, a scale per token; detect: fp8 if a job exchanges any"
    )


class ReportConfig(_Section):
    """Lines that rank 0 prints while it trains."""

    every: Annotated[int, Strict(), Field(ge=0)] = Field(
        100, description="steps between two lines with the bytes that were sent; 0: no lines"
    )
    diagnose: Flag = Field(
        True,
        description="measure in steps 4 to 7 what limits a step, and print it once if it is not the links between "
        "nodes, or if they send unquantized numbers; see [Troubleshooting](troubleshooting.md#no-speed-up)",
    )


class NumericsConfig(_Section):
    """Measure how rounding affects a run; see [Numerics](numerics.md). Switched-off parts cost nothing."""

    every: Annotated[int, Strict(), Field(ge=0)] = Field(
        0, description="steps between two samples of signal-to-noise, amax and lost values per layer; 0: no samples"
    )
    parts: PositiveInt = Field(
        8, description="a sample measures one in this many of the gather units that round something; they take turns"
    )
    file: str = Field("numerics.jsonl", description="file to which rank 0 appends samples, one line of JSON each")
    watch: Literal["none", "stop", "fall_back"] = Field(
        "none",
        description="what happens if a loss jumps or something is not finite; stop: the run ends with an error; "
        "fall_back: it goes on, with what is sent, gradients and GEMMs in 16 or 32 bits",
    )
    spike: Annotated[float, Strict(), Field(ge=1, allow_inf_nan=False)] = Field(
        8.0, description="a loss jumps if it is this many standard deviations above the mean of the last 32"
    )


class CheckpointConfig(_Section):
    """Checks when a checkpoint is loaded; see [Checkpoints](checkpoints.md)."""

    verify: Flag = Field(True, description="compare the files with their manifest")


class PluginConfig(_Section):
    """A complete, checked configuration. Only `resolve()` should make it."""

    enabled: Flag = Field(True, description="false: stock DeepSpeed")
    recipe: str | None = Field(None, description="the recipe that fills all fields; a field that is set by hand wins")
    topology: TopologyConfig = TopologyConfig()
    weights: WeightsConfig = WeightsConfig()
    secondary: SecondaryConfig = SecondaryConfig()
    gradients: GradientsConfig = GradientsConfig()
    compute: ComputeConfig = ComputeConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    partition: Literal["slice", "whole_tensor"] = Field(
        "slice", description="slice: ranks share each tensor, as in stock; whole_tensor: each tensor has one owner"
    )
    partition_split: Literal["balance", "none"] = Field(
        "balance", description="balance: whole tensors may be cut by rows, so that all ranks have equally much"
    )
    frozen: FrozenConfig = FrozenConfig()
    experts: ExpertsConfig = ExpertsConfig()
    activations: ActivationsConfig = ActivationsConfig()
    gather_granularity: Literal["block", "module", "parameter"] = Field(
        "block", description="what is gathered together; block: a transformer block"
    )
    compile: Literal["none", "blocks"] = Field(
        "none", description="blocks: torch.compile each transformer block, between the hooks that gather for it"
    )
    trl_generation: Annotated[Literal["auto", "detect", "values", "codes", "sharded", "stock"], IsAuto] = Field(
        "auto",
        description="what stays on each rank while TRL's trainers generate, as in [Generation](generation.md); stock: "
        "TRL gathers the model, for vLLM too",
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    numerics: NumericsConfig = NumericsConfig()
    _recipe_variable: str | None = PrivateAttr(default=None)

    def named_by(self, variable: str) -> PluginConfig:
        """Return the same configuration, with the environment variable that has named its recipe."""
        config = self.model_copy()
        config._recipe_variable = variable
        return config

    @property
    def recipe_variable(self) -> str | None:
        """The environment variable that named the recipe, if the ds_config did not."""
        return self._recipe_variable

    @property
    def quantizes(self) -> bool:
        """Whether anything is quantized at all; if not, results are promised to be stock's, bit for bit."""
        return (
            self.can_fall_back
            or self.frozen.format != "none"
            or self.stores_states_in_low_precision
            or self.partition != "slice"
        )

    @property
    def can_fall_back(self) -> bool:
        """Whether a job has anything to give up: quantized messages, stored gradients, low-precision products."""
        return (
            self.quantizes_gradients
            or self.weights.format != "none"
            or self.computes_in_low_precision
            or self.gradients.store_format != "none"
            or self.activations.wire_format != "none"
        )

    @property
    def quantizes_gradients(self) -> bool:
        return self.gradients.intra_format != "none" or self.gradients.inter_format != "none"

    @property
    def reduces_gradients(self) -> bool:
        """Whether the plugin does it, not DeepSpeed, which reduces to equal slices in 16 or 32 bits."""
        return self.quantizes_gradients or self.partition == "whole_tensor"

    @property
    def stores_states_in_low_precision(self) -> bool:
        """Whether master weights or moments are stored in less than fp32."""
        optimizer = self.optimizer
        return {optimizer.master_format, optimizer.exp_avg_format, optimizer.exp_avg_sq_format} != {"fp32"}

    @property
    def observed(self) -> bool:
        """Whether the numerics section asks for anything."""
        return self.numerics.every > 0 or self.numerics.watch != "none"

    @property
    def computes_in_low_precision(self) -> bool:
        return self.compute.format != "none"


class InTreeKeys(BaseModel):
    """DeepSpeed's own ZeRO++ keys, in `zero_optimization`."""

    zero_quantized_weights: Flag = False
    zero_hpz_partition_size: PositiveInt = 1
    zero_quantized_gradients: Flag = False
    zero_quantized_nontrainable_weights: Flag = False
