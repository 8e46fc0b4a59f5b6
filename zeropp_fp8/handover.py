"""Hand the weights of a training engine over to an engine that generates elsewhere, one block of the model at a time.

    source = WeightSource(engine)                        # on every rank
    for name, tensor in source: ...                      # on every rank, each step; or vllm_transfer
    for patches in Changes(source): ...                  # the elements that have changed, on rank 0
    Transfer, FolderTransfer                             # exact differences, over a group or through files

Nothing imports this module unless it is asked for. An engine has zeropp_fp8.receiving. See docs/handover.md.
"""

from zeropp_fp8.zero.handover.changes import Changes, Patch
from zeropp_fp8.zero.handover.folder_transfer import FolderTransfer
from zeropp_fp8.zero.handover.source import ParamMeta, WeightSource
from zeropp_fp8.zero.handover.transfer import Transfer
from zeropp_fp8.zero.handover.updates import Updates
from zeropp_fp8.zero.handover.vllm import vllm_transfer

__all__ = ["Changes", "FolderTransfer", "ParamMeta", "Patch", "Transfer", "Updates", "WeightSource", "vllm_transfer"]
