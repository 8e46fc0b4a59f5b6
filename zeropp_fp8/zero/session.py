"""What the parts of one engine share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm import ActivationExchange, Topology, WireLedger, make_topology
from zeropp_fp8.compute import ConversionReport
from zeropp_fp8.config import (
    FIXED_BLOCKS,
    ConfigError,
    DifferenceConfig,
    GradientsConfig,
    Place,
    PluginConfig,
    WeightsConfig,
    check_topology,
    find_ranks_per_node,
    place_of,
    secondary_ranks,
)
from zeropp_fp8.config.compute import matches
from zeropp_fp8.formats import SharedScaleFormat, WireFormat, make_format
from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.optim import StateFormats
from zeropp_fp8.zero.placement import Slices
from zeropp_fp8.zero.stage_part import StagePart


class Session:
    """Configuration, topology, formats and ledger of one engine.

    `conversion`: what became of its linear layers, where they compute in low precision. `ranks_here`: of the group, on
    this host.
    Made once the data-parallel group exists. Making it is collective over that group and, where there is one, over the
    model-parallel group.

    Raises:
        ConfigError: the ranks are not where the configuration needs them; on every rank of these groups.
    """

    def __init__(
        self, config: PluginConfig, group, conversion: ConversionReport | None = None, model_parallel_group=None
    ) -> None:
        world_size = dist.get_world_size(group)
        self.place = place_of(dist.get_rank(), config)
        places = told_by_all(self.place, group)
        ranks_per_node, self.ranks_per_node_source = _ranks_per_node(config, places, model_parallel_group)
        self.ranks_here = sum(place.host == self.place.host for place in places)
        self.config = config
        self.conversion = conversion
        self.engine: Callable = lambda: None  # the DeepSpeed engine, which refers to this: a weak reference
        self.state_formats: StateFormats | None = None  # what master weights and moments rest in; None: fp32
        self.secondary_bytes = 0  # that secondary shards may take, where that is bounded
        self.residual_bytes = 0  # that error feedback will take
        self.bytes_to_come = 0  # what residuals and sums will take, from the first backward passes on
        self.sums_numel = 0  # gradients of several backward passes that add up on this rank inside the node; 0: world
        self.shares = None  # what a step's time goes to (StepShares of bound.py), once it is measured
        self.on_model = ExitStack()  # takes off the model what this engine has put on it
        if conversion is not None:
            self.on_model.callback(conversion.restore)
        self.activations: ActivationExchange | None = None  # of sequence parallelism, where it is in FP8
        self.fell_back = False  # from the formats of the section, to high precision
        self.parts: list[StagePart] = []  # features of training, in the order in which a stage asks them
        self.numerics: dict[str, float] = {}  # what the last sample has found, by name
        self.topology: Topology = make_topology(group, ranks_per_node)
        sharing = secondary_ranks(config, ranks_per_node)
        # A copy that all ranks share (one node, one rank) would hold on each of them the shard that it sends anyway.
        self.secondary_ranks = None if sharing == world_size else sharing
        self.gather_levels = self.topology.gather_levels(self.secondary_ranks)
        self.ledger = WireLedger(self.topology.nodes, ranks_per_node)
        self.progress = self.ledger.meter()
        # By id, whose "weights" and "gradients" travel in full whatever the formats; the model keeps them.
        self.exact: dict[str, frozenset[int]] = {"weights": frozenset(), "gradients": frozenset()}
        self.placement = Slices(self.topology.rank, world_size)  # until parameters are given to owners

        weights, gradients = config.weights, config.gradients
        if world_size == 1:  # nothing is sent, so nothing is gained by rounding it
            weights = weights.model_copy(update={"format": "none"})
        self.weight_format = _quantized(weights, weights.format, weights.hadamard)
        difference = config.weights.difference
        # Of what the ranks of a node share of the weights: without such a copy there is nothing to add to.
        keeps = self.secondary_ranks is not None
        self.difference_format = _quantized(difference, difference.format) if keeps else None
        self.intra_format = _quantized(
            gradients, gradients.intra_format, gradients.hadamard and gradients.intra_format == "int4"
        )
        self.inter_format = _quantized(gradients, gradients.inter_format, gradients.hadamard)
        if gradients.scales == "tensor":
            self.intra_format = self.inter_format = SharedScaleFormat(gradients.intra_format)
        self.device = sharded.device()

    def leave_exact(self, model: nn.Module) -> None:
        """Let what `skip_modules` of weights and gradients names in a model travel in full."""
        named = list(model.named_parameters(remove_duplicate=False))
        for what in self.exact:
            patterns = getattr(self.config, what).skip_modules
            self.exact[what] = frozenset(id(param) for name, param in named if patterns and matches(name, patterns))

    def sends_exactly(self, what: str, param: Parameter) -> bool:
        """Whether the "weights" or "gradients" of a parameter travel in 16 or 32 bits whatever the formats."""
        return is_vector(sharded.shape(param)) or id(param) in self.exact[what]

    def own_numel(self, param: Parameter) -> int:
        """Elements that this rank has of a ZeRO-3 parameter, without padding."""
        return self.placement.own_numel(param)

    def places_like(self, other: Session | None, param: Parameter) -> bool:
        """Whether each rank has the same of a parameter as in another engine; None: as DeepSpeed cuts it."""
        theirs = Slices(self.topology.rank, self.topology.world_size) if other is None else other.placement
        return self.placement.of_all_ranks(param) == theirs.of_all_ranks(param)


def told_by_all(mine: object, group) -> list:
    """What each rank of a group says. Collective."""
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told


def _ranks_per_node(config: PluginConfig, places: list[Place], model_parallel_group) -> tuple[int, str]:
    """(ranks of the data-parallel group on each node, where the number comes from), or an error on every rank."""
    refusal = found = None
    try:
        found = find_ranks_per_node(places, dist.get_world_size())
        check_topology(config, found[0])
    except ConfigError as error:
        refusal = str(error)
    # Tensor-parallel ranks belong to different data-parallel groups, and would wait for each other.
    refusals = [refusal] if model_parallel_group is None else told_by_all(refusal, model_parallel_group)
    for message in filter(None, refusals):
        raise ConfigError(message)
    return found


def _quantized(
    section: WeightsConfig | DifferenceConfig | GradientsConfig, name: str, hadamard: bool = False
) -> WireFormat | None:
    """The wire format `name` with the options of its section; None for "none"."""
    if name == "none":
        return None
    if name in FIXED_BLOCKS:
        return make_format(name)
    return make_format(name, block_size=section.block_size, hadamard=hadamard)
