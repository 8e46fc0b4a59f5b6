"""The weights of a trainer in the process of an engine that generates, which imports no DeepSpeed.

receiver = Receiver(model.state_dict())
receiver.apply(update)                               # of zeropp_fp8.handover.Updates, however it gets here
receiver.receive(header, TransferGroup.join(...))    # from zeropp_fp8.handover.Transfer
catch_up(folder, receiver)                           # from zeropp_fp8.handover.FolderTransfer; docs/handover.md
"""

from zeropp_fp8.zero.handover.folder import catch_up
from zeropp_fp8.zero.handover.group import TransferGroup
from zeropp_fp8.zero.handover.receiver import MissedUpdate, Receiver
from zeropp_fp8.zero.handover.update import Header, Update

__all__ = ["Header", "MissedUpdate", "Receiver", "TransferGroup", "Update", "catch_up"]
