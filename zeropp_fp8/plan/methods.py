"""The methods that are compared: what each moves, on which route, in how many bytes per parameter.

ZeRO-3 moves 3 M per step between nodes (M: the model in 16 bits): gather forward, gather backward, reduce gradients.
ZeRO++ makes it 0.75 M: 0.5 M + 0 + 0.25 M (arXiv 2306.10209, table 1). Those counts leave out the factor (W-1)/W of a
ring and (N-1)/N of two levels, which `traffic.py` adds, and the scales, which are counted here.

What this project does is read out of its configuration (`method_of`): a recipe is planned as it is defined.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from zeropp_fp8.config import FIXED_BLOCKS, MX_FORMATS, RECIPES, PluginConfig, difference_bits, with_differences
from zeropp_fp8.config.sections import bits_of
from zeropp_fp8.plan.job import BYTES_16BIT, GIGA, Cluster, Job, PlanError
from zeropp_fp8.plan.traffic import Traffic, exchange, flat_ring, hybrid_reduction, two_levels, within_node

# DeepSpeed's own: fp32 scales, groups of up to 8,000 weights and of 2,048 gradients.
IN_TREE_INT8 = 1 + 4 / 8000
IN_TREE_INT4 = 0.5 + 4 / 2048

Route = Literal["ring", "exchange", "two-level", "node", "rank"]


class Weights(NamedTuple):
    """Parameters that are stored and sent alike.

    Attributes:
        numel: how many.
        frozen: they are not trained.
        code_bytes: bytes per parameter, stored and sent as codes; None: 16 bits.
    """

    numel: float
    frozen: bool = False
    code_bytes: float | None = None


@dataclass(frozen=True)
class Method:
    """One way to train with sharded weights, all of them or LoRA adapters alone.

    Attributes:
        gather, weight_bytes: route of the forward gather, bytes per parameter that it sends.
        backward_gather, backward_bytes: the same for the backward pass. "rank": nothing is sent, every rank has a copy.
        secondary_bytes: bytes per parameter of a copy that each node (or rank) keeps (hpZ); 0: none.
        copies: bytes that this copy may take on a GPU, or "auto" (`secondary.memory_gb`); None: no bound.
        difference_of: format of the weights whose exact differences are sent between nodes and added to that copy
            (Job.learning_rate); None: whole weights are sent.
        later_from_secondary: forward passes of later micro-batches gather from that copy too, and those of frozen
            weights in all steps but the first.
        stored_bytes: bytes per parameter of the blocks' frozen weights, stored and sent as codes; None: 16 bits.
        reduce: route of the gradients; "exchange": one all-to-all over all ranks, each of which counts as a node;
            "node" is HSDP's, with an all-reduce between nodes.
        gradient_intra, gradient_inter: bytes per gradient on the two levels.
        sums_in_node: gradients of several micro-batches add up in the node and are sent between nodes once per step
            (HSDP: each replica keeps its own until the last one).
        gathered_by: what is gathered at once.
        deepspeed: DeepSpeed's ZeRO-3 runs the step: live parameters are kept from forward to backward. Else FSDP2,
            which keeps its root group (embeddings, head) gathered.
        hops_overlap: the hop between nodes of one block and the hop within the node of another run at the same time.
        host_by_tensor: DeepSpeed's own coordinator pays the host for each tensor and each gather, others by block.
        states_sharded_over: ranks that share one copy of weights and optimizer states.
        fp32_gradients: the gradient shard is fp32 (FSDP2 with fp32 parameters), else 16 bits.
        stored_gradient_bytes: bytes per stored gradient where it is neither.
        residual_bytes: bytes per gradient of what error feedback keeps, on every rank.
        state_bytes: bytes per parameter of master weight and moments.
        fused_update: the optimizer reads gradients where they are and makes no fp32 copies.
        compiled: torch.compile runs the blocks.
        cast_bytes: memory traffic of casting an operand, bytes per element; 0: linear layers compute in 16 bits.
        fp8_products: they multiply at the rate of FP8; MX formats are multiplied in 16 bits.
        reduces_by_tensor: DeepSpeed's reducer takes the gradients, although weights are gathered by block.
    """

    name: str
    gather: Route = "ring"
    weight_bytes: float = BYTES_16BIT
    backward_gather: Route = "ring"
    backward_bytes: float = BYTES_16BIT
    secondary_bytes: float = 0.0
    copies: float | str | None = None
    difference_of: str | None = None
    later_from_secondary: bool = False
    stored_bytes: float | None = None
    reduce: Route = "ring"
    gradient_intra: float = BYTES_16BIT
    gradient_inter: float = BYTES_16BIT
    sums_in_node: bool = False
    gathered_by: Literal["tensor", "block"] = "tensor"
    deepspeed: bool = True
    host_by_tensor: bool = True
    hops_overlap: bool = False
    states_sharded_over: Literal["world", "node"] = "world"
    fp32_gradients: bool = False
    stored_gradient_bytes: float | None = None
    residual_bytes: float = 0.0
    state_bytes: float = 12.0
    fused_update: bool = False
    compiled: bool = False
    cast_bytes: float = 0.0
    fp8_products: bool = False
    reduces_by_tensor: bool = False

    @property
    def quantizes_weights(self) -> bool:
        return self.weight_bytes < BYTES_16BIT

    @property
    def quantizes_gradients(self) -> bool:
        return self.gradient_inter < BYTES_16BIT

    @property
    def update(self) -> Literal["optimizer", "fp8_optimizer", "zeropp", "zero3"]:
        """The name of Hardware's bytes of an update; "zeropp" where this project reduces gradients and leaves them in
        16 bits."""
        if not self.deepspeed:
            return "optimizer"
        if self.fused_update:
            return "fp8_optimizer"
        own = self.quantizes_gradients and self.stored_gradient_bytes is None and not self.host_by_tensor
        return "zeropp" if own else "zero3"

    @property
    def is_modelled_with_lora(self) -> bool:
        in_tree = self.host_by_tensor and (self.quantizes_weights or self.quantizes_gradients or self.secondary_bytes)
        return self.deepspeed and not (in_tree or self.cast_bytes or self.compiled)

    def kept_parameters(self, job: Job) -> float:
        """Parameters that stay gathered from forward to backward, so that the backward pass does not gather them."""
        kept = job.kept_parameters if self.deepspeed else job.model.embedding_parameters
        return min(kept, job.all_parameters)

    def weights(self, job: Job) -> list[Weights]:
        """The gathered weights. Codes are those of all the blocks' parameters, norms counted in. The backward pass
        needs the frozen embedding where its output requires gradients, as checkpointing makes it (Hugging Face's
        enable_input_require_grads), and is counted so."""
        if job.lora is None:
            return [Weights(job.model.parameters, job.frozen)]
        embeddings = job.model.embedding_parameters
        blocks = Weights(job.model.parameters - embeddings, True, self.stored_bytes)
        return [Weights(job.trained_parameters), blocks, Weights(embeddings, True)]

    def check(self, job: Job) -> None:
        """Raise PlanError where this method does not train what the job trains, or is not modelled for it."""
        if job.lora is None and self.stored_bytes is not None:
            raise PlanError(f"{self.name}: its codes are of frozen weights; a full training has none: give --lora-rank")
        if job.lora is not None and not self.is_modelled_with_lora:
            raise PlanError(
                f"{self.name}: its LoRA is not modelled; that of {', '.join(LORA_METHODS)} is, not compiled: take "
                "one of these, or leave out --lora-rank"
            )

    def copy_ranks(self, cluster: Cluster) -> int | None:
        """Ranks that share one copy of the secondary shards; None where there is none. This project makes none where
        all ranks would share it; DeepSpeed's hpZ does."""
        ranks = 1 if self.backward_gather == "rank" else cluster.ranks_per_node
        if not self.secondary_bytes or (ranks == cluster.world_size and not self.host_by_tensor):
            return None
        return ranks

    def copied(self, job: Job) -> list[tuple[Weights, float]]:
        """Each of `weights`, and the share of it of which a copy stays: of frozen ones first, as far as memory goes."""
        weights, ranks = self.weights(job), self.copy_ranks(job.cluster)
        if job.copies is None or ranks is None or not self.later_from_secondary:
            return [(part, 1.0) for part in weights]
        shares, left = {}, job.copies
        for part in sorted(weights, key=lambda part: not part.frozen):
            needed = part.numel * (part.code_bytes or self.secondary_bytes) / ranks
            shares[part] = min(1.0, left / needed)
            left -= shares[part] * needed
        return [(part, shares[part]) for part in weights]

    def sum_ranks(self, cluster: Cluster) -> int | None:
        """Ranks that share the sums of several micro-batches' gradients; None where each is reduced to the end."""
        ranks = 1 if self.reduce == "exchange" else cluster.ranks_per_node
        return ranks if self.sums_in_node and ranks < cluster.world_size else None

    def state_ranks(self, job: Job) -> int:
        """Ranks over which one copy of weights and optimizer states is spread."""
        return job.cluster.ranks_per_node if self.states_sharded_over == "node" else job.cluster.world_size

    def difference_bytes(self, job: Job) -> float:
        return difference_bits(job.learning_rate, self.difference_of, job.steps) / 8

    def gathers(self, job: Job) -> int:
        return job.model.tensors if self.gathered_by == "tensor" else job.model.units

    def forward_traffic(self, job: Job, first: bool = True) -> Traffic:
        """Weights of one forward pass; `first` micro-batch of a step (not the first step) or a later one."""
        traffic = Traffic()
        for part, copied in self.copied(job):
            num_bytes = part.numel * (part.code_bytes or self.weight_bytes)
            from_copy = copied if self.later_from_secondary and (part.frozen or not first) else 0.0
            traffic += self._partly(from_copy, num_bytes, job.cluster)
            # Codes of adapters change almost wholly (lora_step/h200-2-25gbit.json: 6.9 bits of 8), as B starts at zero.
            exact = self.difference_of and not job.lora
            if exact and not from_copy and self.copy_ranks(job.cluster) is not None:
                left = 1 - copied * (1 - self.difference_bytes(job) / self.weight_bytes)
                in_node = left if self.backward_gather == "rank" else 1.0
                traffic = replace(traffic, inter=left * traffic.inter, intra=in_node * traffic.intra)
        return traffic

    def backward_traffic(self, job: Job) -> Traffic:
        """Weights of one backward pass. What is kept from the forward pass is taken evenly from all."""
        gathered, traffic = 1 - self.kept_parameters(job) / job.all_parameters, Traffic()
        for part, copied in self.copied(job):
            num_bytes = part.numel * gathered * (part.code_bytes or self.backward_bytes)
            traffic += self._partly(copied, num_bytes, job.cluster)
        return traffic

    def _partly(self, copied: float, num_bytes: float, cluster: Cluster) -> Traffic:
        """A gather of which a share comes from copies."""
        traffic = Traffic()
        for route, share in ((self.backward_gather, copied), (self.gather, 1 - copied)):
            if share:
                traffic += _gather(route, share * num_bytes, cluster, self.hops_overlap)
        return traffic

    def gradient_traffic(self, job: Job, last: bool = True) -> Traffic:
        """Gradients of one backward pass, the `last` of a step or an earlier one."""
        inter, intra = (b * job.trained_parameters for b in (self.gradient_inter, self.gradient_intra))
        if self.sums_in_node and not last:
            return Traffic() if self.reduce == "exchange" else within_node(intra, job.cluster)
        if self.reduce == "two-level":
            return two_levels(inter, intra, job.cluster, self.hops_overlap)
        return {"node": hybrid_reduction, "exchange": exchange, "ring": flat_ring}[self.reduce](inter, job.cluster)


def _gather(route: Route, num_bytes: float, cluster: Cluster, hops_overlap: bool) -> Traffic:
    if route == "rank":
        return Traffic()
    if route == "two-level":
        return two_levels(num_bytes, num_bytes, cluster, hops_overlap)
    return (within_node if route == "node" else flat_ring)(num_bytes, cluster)


# This project: two levels, a block at a time.
_LOSSLESS = Method(
    "lossless",
    gather="two-level",
    backward_gather="two-level",
    gathered_by="block",
    host_by_tensor=False,
    hops_overlap=True,
    reduces_by_tensor=True,
)
# A pass reads 16 bits and writes codes in two layouts. MX blocks run along both axes: two passes, which write 16 bits.
_FP8_CASTS, _MX_CASTS = 2.0 + 2 * 1.0, 2 * (2.0 + 2.0)
_STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def element_bytes(name: str, block_size: int, double_quantize: bool = False) -> float:
    """Bytes per element in a format, with a scale per block: of 2 bytes, of NF4 4, of MX 1. Scales in 8 bits
    with an fp32 scale for 256 of them are `double_quantize` (arXiv 2305.14314, section 3). "none": 16 bits."""
    if name == "none":
        return BYTES_16BIT
    scale = 1 if name in FIXED_BLOCKS else 1 + 4 / 256 if double_quantize else 4 if name == "nf4" else 2
    return bits_of(name) / 8 + scale / FIXED_BLOCKS.get(name, block_size)


def method_of(config: PluginConfig) -> Method:
    """How the plan counts a job with this configuration; a recipe's own is METHODS[recipe].

    Not modelled: a secondary copy that several ranks of a node share (counted as one in the node), scales of optimizer
    states, and layers and GEMMs that stay in 16 bits.
    """
    weights, gradients, compute, frozen = config.weights, config.gradients, config.compute, config.frozen
    scope, ring = config.secondary.scope, config.topology.ranks_per_node == 1
    fp8 = config.computes_in_low_precision and compute.format not in MX_FORMATS and compute.scaling != "mx"
    # Codes that the GEMMs multiply as they come have a scale per tensor, row or tile.
    sent = 1.0 if fp8 and weights.format == "fp8_e4m3" else element_bytes(weights.format, weights.block_size)
    changes: dict[str, Any] = {"weight_bytes": sent, "backward_bytes": sent}
    if scope != "none":
        memory = config.secondary.memory_gb
        changes |= {"secondary_bytes": sent, "later_from_secondary": True}
        changes["copies"] = memory * GIGA if isinstance(memory, float) else {"all": None, "auto": "auto"}[memory]
        changes["backward_gather"] = "rank" if scope == "rank" else "node"
    if ring:
        changes |= {"gather": "ring", "backward_gather": changes.get("backward_gather", "ring")}
    changes["difference_of"] = weights.format if weights.difference == "exact" else None
    if config.quantizes_gradients:
        intra, inter = (
            1.0 if gradients.scales == "tensor" else element_bytes(name, gradients.block_size)
            for name in (gradients.intra_format, gradients.inter_format)
        )
        changes |= {"reduce": "exchange" if ring else "two-level", "gradient_intra": inter if ring else intra}
        changes |= {"gradient_inter": inter, "reduces_by_tensor": False}
        changes["sums_in_node"] = gradients.accumulate_in != "world"
    if gradients.error_feedback:
        changes["residual_bytes"] = element_bytes("int8", gradients.block_size)
    if gradients.store_format != "none":
        changes["stored_gradient_bytes"] = 1.0 if gradients.scales == "tensor" else 1 + 1 / 128  # scales
    if config.stores_states_in_low_precision:
        states = (config.optimizer.master_format, config.optimizer.exp_avg_format, config.optimizer.exp_avg_sq_format)
        changes |= {"state_bytes": float(sum(_STATE_BYTES[name] for name in states)), "fused_update": True}
    if config.computes_in_low_precision:
        changes |= {"cast_bytes": _FP8_CASTS if fp8 else _MX_CASTS, "fp8_products": fp8}
    if config.compile == "blocks":
        changes["compiled"] = True
    if frozen.format != "none":
        changes["stored_bytes"] = element_bytes(frozen.format, frozen.block_size, frozen.double_quantize)
    return replace(_LOSSLESS, name=config.recipe or "this ds_config", **changes)


def _own(name: str, recipe: str, **parts: dict[str, Any]) -> Method:
    base = RECIPES[recipe]
    by_hand = {key: {**base.get(key, {}), **part} for key, part in parts.items()}
    config = with_differences(PluginConfig(**{**base, **by_hand}), {"bf16": {"enabled": True}})
    return replace(method_of(config), name=name)


_QWZ = {"weight_bytes": IN_TREE_INT8, "backward_bytes": IN_TREE_INT8}
_HPZ = {"backward_gather": "node", "secondary_bytes": BYTES_16BIT}
_QGZ = {"reduce": "two-level", "gradient_intra": IN_TREE_INT4, "gradient_inter": IN_TREE_INT4}
_FSDP2 = {"gathered_by": "block", "deepspeed": False, "host_by_tensor": False, "fp32_gradients": True}
_HSDP = {
    "gather": "node",
    "backward_gather": "node",
    "reduce": "node",
    "sums_in_node": True,
    "states_sharded_over": "node",
}

_PEERS = [
    Method(name, **fields)
    for name, fields in {
        "stock": {},
        "stock-leaf": {"gathered_by": "block"},
        "in-tree": {**_QWZ, **_HPZ, **_QGZ},
        "in-tree-leaf": {**_QWZ, **_HPZ, **_QGZ, "gathered_by": "block"},
        "in-tree-qwz": _QWZ,
        "in-tree-hpz": _HPZ,
        "in-tree-qgz": _QGZ,
        "fsdp2": _FSDP2,
        "hsdp": {**_FSDP2, **_HSDP},
    }.items()
]
_OWN = [
    *(_own(recipe, recipe) for recipe in RECIPES),
    *(_own(f"{n}-world", n, gradients={"accumulate_in": "world"}) for n in ("zeropp", "zeropp-4bit", "zeropp-pcie")),
    _own("fp8-compute", "lossless", compute={"format": "fp8"}),
]
# Frozen weights as codes; "-dq": with double quantization, as `qlora`, which is NF4; "-rank": every rank has them all.
_FROZEN = dict.fromkeys(("int8", "int8-dq"), "int8") | dict.fromkeys(("int4", "int4-dq"), "int4")
_FROZEN |= dict.fromkeys(("nf4", "qlora"), "nf4")
_STORES = [
    _own(
        f"{name}{'-rank' * (scope == 'rank')}",
        "zeropp",
        frozen={"format": stored, "block_size": 64, "double_quantize": name == "qlora" or name.endswith("-dq")},
        secondary={"scope": scope},
    )
    for scope in ("node", "rank")
    for name, stored in _FROZEN.items()
]
METHODS: dict[str, Method] = {method.name: method for method in (*_PEERS, *_OWN, *_STORES)}
METHODS |= {
    f"{name}-compiled": replace(METHODS[name], name=f"{name}-compiled", compiled=True)
    for name in ("lossless", "zeropp", "zeropp-4bit", "zeropp-exact", "fp8-lm-o1", "fp8-lm", "fp8-lm-zeropp", "hsdp")
    + ("fsdp2",)
}
# All codes are sent in each step, as with `"difference": "none"`.
_WHOLE = "-whole"
METHODS |= {
    f"{name}{_WHOLE}": replace(method, name=f"{name}{_WHOLE}", difference_of=None)
    for name, method in METHODS.items()
    if method.difference_of not in (None, "none")
}
# Not compiled, its casts are operations of torch, one after the other: 504 ms where 229 would be modelled
# (benchmarks/results/one_node/h200-2-nvlink-4x2048.json).
_TORCHAO = {"compiled": True, "cast_bytes": _FP8_CASTS, "fp8_products": True}
METHODS["fsdp2-torchao-compiled"] = Method("fsdp2-torchao-compiled", **_FSDP2, **_TORCHAO)
# Of recipes all that train what the job trains.
TABLE_METHODS = ("stock", "stock-leaf", *(name for name in RECIPES if METHODS[name].stored_bytes is None))
TABLE_METHODS += ("in-tree", "fsdp2", "hsdp")
LORA_METHODS = tuple(name for name in TABLE_METHODS if METHODS[name].is_modelled_with_lora)
LORA_METHODS += tuple(method.name for method in _STORES)
LORA_TABLE_METHODS = ("stock", "stock-leaf", "lossless", "zeropp", "zeropp-exact")
LORA_TABLE_METHODS += ("int8", "int4", "nf4", "qlora", "qlora-rank")


def method_named(name: str) -> Method:
    """A method by name, "_" for "-" and any case allowed."""
    key = name.lower().replace("_", "-")
    if key not in METHODS:
        close = difflib.get_close_matches(key, METHODS, n=1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        raise PlanError(f"there is no method {name!r}{hint}; methods are {', '.join(METHODS)}")
    return METHODS[key]
