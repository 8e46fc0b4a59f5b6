"""An optimizer's step on states of 5 bytes per parameter: master FP16 2 B, moments FP8 1 B, FP16 2 B.

state_formats.py  the choice of formats, and what they are
segments.py       where tensors lie in a flat buffer
state_buffer.py   one quantity of all of them in one format
gradients.py      FP8 gradients laid out the same way
update.py         what an optimizer's step is, on what one owner has: which optimizer has which
adamw.py          AdamW's, on such buffers: the torch reference of kernels/optimizer/adamw.py
muon.py           Muon's, of whole matrices
launch.py         the same step in one launch of the kernel
"""

from zeropp_fp8.optim.adamw import Hyper, adamw_step
from zeropp_fp8.optim.gradients import FP8Gradients
from zeropp_fp8.optim.muon import Muon
from zeropp_fp8.optim.segments import Segments
from zeropp_fp8.optim.state_buffer import StateBuffer, make_state_buffers
from zeropp_fp8.optim.state_formats import STORAGE_NAMES, StateFormats
from zeropp_fp8.optim.update import UPDATES, Owned, Update, update_of

__all__ = [
    "STORAGE_NAMES",
    "UPDATES",
    "FP8Gradients",
    "Hyper",
    "Muon",
    "Owned",
    "Segments",
    "StateBuffer",
    "StateFormats",
    "Update",
    "adamw_step",
    "make_state_buffers",
    "update_of",
]
