"""The same collectives for PyTorch's FSDP2, without DeepSpeed: `zeropp_fp8.fsdp2.apply(model, recipe="zeropp")`.

unit.py          a parameter group of fully_shard, in the hops of zero/gather/
host.py          shared by the modules of a model: hops, resources of reductions, steps, writes to weights
collectives.py   the all-gather and reduce-scatter of a module, as torch calls them
replicas.py      the mean over copies of the model, where each node has one
model.py         apply() and the other functions that a script calls, and their refusals
extra_state.py   residuals of error feedback in a checkpoint
torchtitan.py    configs of torchtitan's registries
"""

from zeropp_fp8.fsdp2.extra_state import extra_state
from zeropp_fp8.fsdp2.model import apply, host_of, weights_changed, wire_report

__all__ = ["apply", "extra_state", "host_of", "weights_changed", "wire_report"]
