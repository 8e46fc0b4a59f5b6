"""An optimizer's step on states of 5 bytes per parameter: master FP16 2 B, moments FP8 1 B, FP16 2 B."""

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
