"""Collectives on two levels (node, network) with quantized payloads, and the ledger of the bytes that they send.

It works without DeepSpeed, on any torch.distributed backend with uint8 all-gather and all-to-all (gloo, NCCL):

    topology = make_topology(ranks_per_node=8)
    for_each_rank = fp8_all_to_all(from_each_rank, ActivationExchange(node=rank // 8))  # with its gradient

Weights go through the hops of all_gather.py, gradients by the plans of reduce_scatter.py and reduce_to_owners.py.
"""

from zeropp_fp8.comm.activations import ActivationExchange, fp8_all_to_all
from zeropp_fp8.comm.error_feedback import ErrorFeedback
from zeropp_fp8.comm.ledger import WireLedger
from zeropp_fp8.comm.objects import gather_objects
from zeropp_fp8.comm.topology import Level, Topology, make_topology, time_limit

__all__ = [
    "ActivationExchange",
    "ErrorFeedback",
    "Level",
    "Topology",
    "WireLedger",
    "fp8_all_to_all",
    "gather_objects",
    "make_topology",
    "time_limit",
]
