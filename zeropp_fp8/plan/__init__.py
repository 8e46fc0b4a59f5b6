"""The cost of a step before it is run: time, bytes on the wire and memory of each method, by formula.

    python -m zeropp_fp8 plan --params 7e9 --nodes 8 --ranks-per-node 8 --gbit 100 --tokens 2048

A step is two passes over the model's blocks and the optimizer; in a pass the wire works beside the GPU and the Python
host. `step_time.py` has the formulas. Everything here is plain arithmetic: no torch, no GPU, no communication.
"""

from zeropp_fp8.plan.hardware import EMULATED_H200, H100, H200, PRESETS, V100, Hardware
from zeropp_fp8.plan.job import Cluster, Job, Lora, Model, PlanError
from zeropp_fp8.plan.memory import MemoryEstimate, memory_per_gpu
from zeropp_fp8.plan.methods import LORA_METHODS, METHODS, TABLE_METHODS, Method, method_named, method_of
from zeropp_fp8.plan.step_time import StepEstimate, estimate

__all__ = [
    "EMULATED_H200",
    "H100",
    "H200",
    "LORA_METHODS",
    "METHODS",
    "PRESETS",
    "TABLE_METHODS",
    "V100",
    "Cluster",
    "Hardware",
    "Job",
    "Lora",
    "MemoryEstimate",
    "Method",
    "Model",
    "PlanError",
    "StepEstimate",
    "estimate",
    "memory_per_gpu",
    "method_named",
    "method_of",
]
