"""The methods that are compared: what each moves, on which route, in how many bytes a parameter.

ZeRO-3 moves 3 M a step between nodes (M: the model in 16 bits): gather forward, gather backward, reduce gradients.
ZeRO++ makes it 0.75 M: 0.5 M + 0 + 0.25 M (arXiv 2306.10209, table 1). Those counts leave out the factor (W-1)/W of a
ring and (N-1)/N of two levels, which `traffic.py` adds, and the scales, which are counted here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal

from zeropp_fp8.plan.job import BYTES_16BIT, Cluster, Job, PlanError
from zeropp_fp8.plan.traffic import Traffic, flat_ring, hybrid_reduction, two_levels, within_node

SCALE_BYTES = 2  # one bf16 scale a block
INT8_BLOCK_256 = 1 + SCALE_BYTES / 256
INT8_BLOCK_128 = 1 + SCALE_BYTES / 128
INT4_BLOCK_128 = 0.5 + SCALE_BYTES / 128
# DeepSpeed's own: fp32 scales, groups of up to 8,000 weights and of 2,048 gradients.
IN_TREE_INT8 = 1 + 4 / 8000
IN_TREE_INT4 = 0.5 + 4 / 2048

Route = Literal["ring", "two-level", "node"]


@dataclass(frozen=True)
class Method:
    """One way to train with sharded weights.

    Attributes:
        gather, weight_bytes: route of the forward gather, bytes a parameter of what travels.
        backward_gather, backward_bytes: the same for the backward pass.
        secondary_bytes: bytes a parameter of a copy that each node keeps (hpZ); 0: none.
        later_from_secondary: forward passes of later micro-batches gather from that copy too.
        reduce: route of the gradients; "node" is HSDP's, with an all-reduce between nodes.
        gradient_intra, gradient_inter: bytes a gradient on the two levels.
        sums_in_node: gradients of several micro-batches add up in the node and cross between nodes once a step (HSDP:
            each replica keeps its own until the last one).
        gathered_by: what is gathered at once.
        deepspeed: DeepSpeed's ZeRO-3 runs the step: live parameters are kept from forward to backward. Else FSDP2,
            which keeps its root group (embeddings, head) gathered.
        hops_overlap: the hop between nodes of one block and the hop within the node of another run at the same time.
        host_by_tensor: DeepSpeed's own coordinator pays the host for each tensor and each gather. This project's (and
            FSDP2's) work by block was measured to cost no more than the block's own Python.
        states_sharded_over: ranks that share one copy of weights and optimizer states.
        fp32_gradients: the gradient shard is fp32 (FSDP2 with fp32 parameters), else 16 bits.
        stored_gradient_bytes: bytes a gradient at rest where it is neither.
        state_bytes: bytes a parameter of master weight and moments.
        fused_update: the optimizer reads gradients where they are and makes no fp32 copies.
        compiled: torch.compile runs the blocks.
    """

    name: str
    gather: Route = "ring"
    weight_bytes: float = BYTES_16BIT
    backward_gather: Route = "ring"
    backward_bytes: float = BYTES_16BIT
    secondary_bytes: float = 0.0
    later_from_secondary: bool = False
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
    state_bytes: float = 12.0
    fused_update: bool = False
    compiled: bool = False

    @property
    def quantizes_weights(self) -> bool:
        return self.weight_bytes < BYTES_16BIT

    @property
    def quantizes_gradients(self) -> bool:
        return self.gradient_inter < BYTES_16BIT

    def kept_parameters(self, job: Job) -> float:
        """Parameters that stay gathered from forward to backward, so that the backward pass does not gather them."""
        kept = job.kept_parameters if self.deepspeed else job.model.embedding_parameters
        return min(kept, job.model.parameters)

    def state_ranks(self, job: Job) -> int:
        """Ranks over which one copy of weights and optimizer states is spread."""
        return job.cluster.ranks_per_node if self.states_sharded_over == "node" else job.cluster.world_size

    def gathers(self, job: Job) -> int:
        """Gathers of one pass."""
        return job.model.tensors if self.gathered_by == "tensor" else job.model.units

    def forward_traffic(self, job: Job, first: bool = True) -> Traffic:
        """Weights of one forward pass; `first` micro-batch of a step or a later one."""
        route = "node" if self.later_from_secondary and not first else self.gather
        return _gather(route, self.weight_bytes * job.model.parameters, job.cluster, self.hops_overlap)

    def backward_traffic(self, job: Job) -> Traffic:
        """Weights of one backward pass."""
        gathered = job.model.parameters - self.kept_parameters(job)
        return _gather(self.backward_gather, self.backward_bytes * gathered, job.cluster, self.hops_overlap)

    def gradient_traffic(self, job: Job, last: bool = True) -> Traffic:
        """Gradients of one backward pass, the `last` of a step or an earlier one."""
        inter, intra = (b * job.model.parameters for b in (self.gradient_inter, self.gradient_intra))
        if self.sums_in_node and not last:
            return within_node(intra, job.cluster)
        if self.reduce == "two-level":
            return two_levels(inter, intra, job.cluster, self.hops_overlap)
        return (hybrid_reduction if self.reduce == "node" else flat_ring)(inter, job.cluster)


def _gather(route: Route, num_bytes: float, cluster: Cluster, hops_overlap: bool) -> Traffic:
    if route == "two-level":
        return two_levels(num_bytes, num_bytes, cluster, hops_overlap)
    return (within_node if route == "node" else flat_ring)(num_bytes, cluster)


# This project: two levels, a block at a time.
_OWN = {
    "gather": "two-level",
    "backward_gather": "two-level",
    "gathered_by": "block",
    "host_by_tensor": False,
    "hops_overlap": True,
}
# FP8-LM's levels: gradients in FP8 on both levels and at rest; scales that all ranks share cost nothing.
_FP8_LM = {
    **_OWN,
    "reduce": "two-level",
    "gradient_intra": 1.0,
    "gradient_inter": 1.0,
    "sums_in_node": True,
    "stored_gradient_bytes": 1.0,
}
_FP8_STATES = {"state_bytes": 5.0, "fused_update": True}


def _zeropp(weight_bytes: float) -> dict:
    """The received codes kept as secondary shard; gradients in INT8 in the node and INT4 between."""
    kept = {"backward_gather": "node", "secondary_bytes": weight_bytes, "later_from_secondary": True}
    gradients = {"reduce": "two-level", "gradient_intra": INT8_BLOCK_128, "gradient_inter": INT4_BLOCK_128}
    gradients["sums_in_node"] = True
    return {**_OWN, "weight_bytes": weight_bytes, "backward_bytes": weight_bytes, **kept, **gradients}


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

_EAGER = {
    name: Method(name, **fields)
    for name, fields in {
        "stock": {},
        "stock-leaf": {"gathered_by": "block"},
        "lossless": _OWN,
        "zeropp": _zeropp(INT8_BLOCK_256),
        "zeropp-4bit": _zeropp(INT4_BLOCK_128),
        "zeropp-world": {**_zeropp(INT8_BLOCK_256), "sums_in_node": False},
        "zeropp-4bit-world": {**_zeropp(INT4_BLOCK_128), "sums_in_node": False},
        "fp8-lm-o1": _FP8_LM,
        "fp8-lm-o2": {**_FP8_LM, **_FP8_STATES},
        "fp8-lm": {**_FP8_LM, **_FP8_STATES, "weight_bytes": 1.0, "backward_bytes": 1.0},
        "fp8-lm-zeropp": {**_zeropp(1.0), **_FP8_STATES, "stored_gradient_bytes": 1 + 1 / 128},
        "in-tree": {**_QWZ, **_HPZ, **_QGZ},
        "in-tree-leaf": {**_QWZ, **_HPZ, **_QGZ, "gathered_by": "block"},
        "in-tree-qwz": _QWZ,
        "in-tree-hpz": _HPZ,
        "in-tree-qgz": _QGZ,
        "fsdp2": _FSDP2,
        "hsdp": {**_FSDP2, **_HSDP},
    }.items()
}
_COMPILED = [
    replace(_EAGER[name], name=f"{name}-compiled", compiled=True)
    for name in ("lossless", "zeropp", "zeropp-4bit", "fsdp2", "hsdp")
]
METHODS: dict[str, Method] = {**_EAGER, **{method.name: method for method in _COMPILED}}
TABLE_METHODS = ("stock", "stock-leaf", "lossless", "zeropp", "zeropp-4bit", "fp8-lm", "in-tree", "fsdp2", "hsdp")


def method_named(name: str) -> Method:
    """A method by name, "_" for "-" and any case allowed.

    Raises:
        PlanError: there is none of this name.
    """
    key = name.lower().replace("_", "-")
    if key not in METHODS:
        close = difflib.get_close_matches(key, METHODS, n=1)
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        raise PlanError(f"there is no method {name!r}{hint}; methods are {', '.join(METHODS)}")
    return METHODS[key]
