"""Hand the weights of a training engine over to an engine that generates elsewhere, one block of the model at a time.

    source = WeightSource(engine)                        # on every rank
    for name, tensor in source: ...                      # on every rank, each step; or Transfer, or vllm_transfer
    for patches in Changes(source): ...                  # what has changed, on rank 0

Nothing imports this module unless it is asked for. See docs/handover.md.
"""

from zeropp_fp8.zero.handover.changes import Changes, Patch
from zeropp_fp8.zero.handover.source import ParamMeta, WeightSource
from zeropp_fp8.zero.handover.transfer import Transfer, TransferGroup, TransferInit, received
from zeropp_fp8.zero.handover.vllm import vllm_transfer

__all__ = ["Changes", "ParamMeta", "Patch", "Transfer", "TransferGroup", "TransferInit", "WeightSource"]
__all__ += ["received", "vllm_transfer"]
