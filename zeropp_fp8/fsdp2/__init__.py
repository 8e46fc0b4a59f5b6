"""The same collectives for PyTorch's FSDP2, without DeepSpeed: `zeropp_fp8.fsdp2.apply(model, recipe="zeropp")`."""

from zeropp_fp8.fsdp2.extra_state import extra_state
from zeropp_fp8.fsdp2.model import apply, host_of, weights_changed, wire_report

__all__ = ["apply", "extra_state", "host_of", "weights_changed", "wire_report"]
