"""The context that all parts of one engine share."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.comm import Topology, WireLedger, gather_objects, make_topology
from zeropp_fp8.compute import ConversionReport
from zeropp_fp8.config import (
    FIXED_BLOCKS,
    SECTION,
    ConfigError,
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
from zeropp_fp8.config.sections import bits_of
from zeropp_fp8.formats import SharedScaleFormat, WireFormat, make_format
from zeropp_fp8.formats.shapes import is_vector
from zeropp_fp8.optim import StateFormats
from zeropp_fp8.zero.placement import Slices
from zeropp_fp8.zero.stage_part import StagePart


class SentFormats:
    """The wire formats of an engine's weights, and of gradients within and between nodes, until it falls back; None: 16
    or 32 bits.

    Attributes:
        differs: only what has changed in weights is sent; ranks must keep a copy of them for it (`keeps_copy`).
        difference_bits: of a weight, in the last step; None until one was sent.
    """

    def __init__(self, config: PluginConfig, world_size: int, keeps_copy: bool) -> None:
        weights, gradients = config.weights, config.gradients
        name = "none" if world_size == 1 else weights.format  # nothing is sent, so rounding gains nothing
        self.weights = _quantized(weights, name, weights.hadamard)
        self.differs = keeps_copy and weights.difference == "exact"
        self.difference_bits: float | None = None
        rotates_within = gradients.hadamard and bits_of(gradients.intra_format) <= 4
        self.within = _quantized(gradients, gradients.intra_format, rotates_within)
        self.between = _quantized(gradients, gradients.inter_format, gradients.hadamard)
        if gradients.scales == "tensor":
            self.within = self.between = SharedScaleFormat(gradients.intra_format)
        self.fell_back = False

    def fall_back(self) -> None:
        """Set all formats to 16 or 32 bits. The caller must tell the parts of a stage (fall_back.py)."""
        self.weights = self.within = self.between = None
        self.fell_back = True


class Session:
    """Configuration, topology and ledger of one engine, and the objects that its parts share.

    Its attributes never change; what they refer to may. Making it is collective over the data-parallel group,
    and over the model-parallel group if there is one.

    Args:
        conversion: the conversion of its linear layers, if they compute in low precision.
        engine: a weak reference to the DeepSpeed engine, which refers to this session.
        placement: maps elements of parameters to ranks.
        device: this rank's; None: as DeepSpeed has chosen it.

    Attributes:
        ranks_here: number of the group's ranks on this host.
        own_numel: elements that this rank has of a ZeRO-3 parameter, without padding.

    Raises:
        ConfigError: the ranks' hosts do not fit the configuration; raised on every rank of these groups.
    """

    def __init__(
        self,
        config: PluginConfig,
        group,
        conversion: ConversionReport | None = None,
        model_parallel_group=None,
        engine: Callable = lambda: None,
        placement: type[Slices] = Slices,
        device: torch.device | None = None,
    ) -> None:
        world_size = dist.get_world_size(group)
        self.place = place_of(dist.get_rank(), config)
        places = gather_objects(self.place, group)
        ranks_per_node, self.ranks_per_node_source = _ranks_per_node(config, places, model_parallel_group)
        self.ranks_here = sum(place.host == self.place.host for place in places)
        self.config = config
        self.conversion = conversion
        self.engine = engine
        # The formats of master weights and moments, in engines that train; None: fp32.
        self.state_formats = StateFormats.of(vars(config.optimizer)) if config.stores_states_in_low_precision else None
        self._of_experts: dict[object, Session] = {}  # by the ranks that share experts
        self.on_model = ExitStack()  # undoes what this engine has put on the model
        if conversion is not None:
            self.on_model.callback(conversion.restore)
        self.parts: list[StagePart] = []  # features of training, in the order in which a stage calls them
        self.topology: Topology = make_topology(group, ranks_per_node)
        self.secondary_ranks, self.gather_levels = _gathers(config, self.topology)
        self.ledger = WireLedger(self.topology.nodes, ranks_per_node)
        # Ids of parameters whose "weights" and "gradients" are always sent in full; the model keeps them alive.
        self.exact: dict[str, frozenset[int]] = {"weights": frozenset(), "gradients": frozenset()}
        self.placement = placement(self.topology.rank, world_size)
        self.own_numel: Callable[[Parameter], int] = self.placement.own_numel
        self.formats = SentFormats(config, world_size, self.secondary_ranks is not None)
        self.device = device or sharded.device()

    def of(self, param: Parameter) -> Session:
        """The session of the ranks that share a parameter: this one, or one with another topology. Collective at first.

        Raises:
            ConfigError: nodes have different numbers of these ranks; on all ranks.
        """
        group = sharded.experts_group(param)
        if group is None:
            return self
        if group not in self._of_experts:
            ranks = (dist.get_group_rank(self.topology.group, rank) for rank in dist.get_process_group_ranks(group))
            nodes = [rank // self.topology.ranks_per_node for rank in ranks]
            here = Counter(nodes)
            if any(gather_objects(len(set(here.values())) > 1, self.topology.group)):
                raise ConfigError(
                    '"expert_parallel.autoep_size" deals experts out so that nodes have different numbers of the ranks '
                    "that share one; set it to a divisor, or a multiple, of the ranks per node"
                )
            topology, made = make_topology(group, here[nodes[0]]), copy.copy(self)
            sharing, levels = _gathers(self.config, topology)
            vars(made).update(topology=topology, secondary_ranks=sharing, gather_levels=levels)
            self._of_experts[group] = made
        return self._of_experts[group]

    def leave_exact(self, model: nn.Module) -> None:
        """Send in full what `skip_modules` name and other libraries' codes; a ConfigError where they are integers."""
        named = list(model.named_parameters(remove_duplicate=False))
        for what in self.exact:
            patterns = getattr(self.config, what).skip_modules
            self.exact[what] = frozenset(id(param) for name, param in named if patterns and matches(name, patterns))
        packed = filter(sharded.holds_codes, model.modules())
        self.exact["weights"] |= {id(param) for module in packed for param in module.parameters(recurse=False)}
        for name, param in named:
            if not param.is_floating_point():
                raise ConfigError(
                    f"{name} is in {param.dtype}, and only numbers of 16 and 32 bits are sent: load the model with "
                    f'bitsandbytes\' bnb_4bit_quant_storage=torch.bfloat16, or whole, with "{SECTION}.frozen"'
                )

    def sends_exactly(self, what: str, param: Parameter) -> bool:
        """Whether the "weights" or "gradients" of a parameter are sent in 16 or 32 bits, whatever the formats."""
        return is_vector(sharded.shape(param)) or id(param) in self.exact[what]

    def places_like(self, other: Session | None, param: Parameter) -> bool:
        """Whether each rank has the same part of a parameter as in another engine; None: DeepSpeed's slices."""
        theirs = Slices(self.topology.rank, self.topology.world_size) if other is None else other.placement
        return self.placement.of_all_ranks(param) == theirs.of_all_ranks(param)


def _ranks_per_node(config: PluginConfig, places: list[Place], model_parallel_group) -> tuple[int, str]:
    """(ranks of the data-parallel group per node, source of the number); errors are raised on every rank."""
    refusal = found = None
    try:
        found = find_ranks_per_node(places, dist.get_world_size())
        check_topology(config, found[0])
    except ConfigError as error:
        refusal = str(error)
    # Tensor-parallel ranks belong to different data-parallel groups, and would wait for each other.
    refusals = [refusal] if model_parallel_group is None else gather_objects(refusal, model_parallel_group)
    for message in filter(None, refusals):
        raise ConfigError(message)
    return found


def _gathers(config: PluginConfig, topology: Topology) -> tuple[int | None, tuple]:
    """Return (ranks that share a copy, if there are copies; the hops of gathers)."""
    sharing = secondary_ranks(config, topology.ranks_per_node)
    if sharing is not None:
        sharing = math.gcd(sharing, topology.ranks_per_node)  # experts may be shared by fewer ranks of a node
    # If all ranks share one copy (one node, one rank), each would hold just the shard that it sends anyway.
    sharing = None if sharing == topology.world_size else sharing
    return sharing, topology.gather_levels(sharing)


def _quantized(section: WeightsConfig | GradientsConfig, name: str, hadamard: bool = False) -> WireFormat | None:
    """The wire format `name` with the options of its section; None for "none"."""
    options = {} if name in FIXED_BLOCKS else {"block_size": section.block_size, "hadamard": hadamard}
    return None if name == "none" else make_format(name, **options)
