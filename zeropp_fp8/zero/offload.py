"""Subclass of DeepSpeedZeRoOffload: gathering and releasing around modules. All there is without an optimizer."""

from __future__ import annotations

import torch
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from zeropp_fp8.comm.ledger import OUTSIDE
from zeropp_fp8.zero.blocks import find_blocks
from zeropp_fp8.zero.report import print_start_table
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.weights import WeightGatherer


class ZeroppOffload(DeepSpeedZeRoOffload):
    """DeepSpeed's hooks around modules, with this project's gathers behind them."""

    def __init__(self, module, *args, session: Session, **kwargs) -> None:
        self.session = session
        self.gatherer = WeightGatherer(session)
        self.blocks = find_blocks(module) if session.config.gather_granularity == "block" else []
        for block in self.blocks:
            block._z3_leaf = True  # DeepSpeed then fetches and releases the block as one unit
        self._evaluating = False
        super().__init__(module, *args, **kwargs)
        self.gatherer.stream = self._DeepSpeedZeRoOffload__allgather_stream
        self.gatherer.adopt(module.parameters())
        print_start_table(session, self.gatherer, module, self.blocks)

    # -- what the ledger calls the bytes of a gather: the hooks know which pass it is -------------------------------

    def _kind(self, forward: bool) -> str:
        if self._evaluating:
            return OUTSIDE
        recomputing = torch._C._current_graph_task_id() != -1  # activation checkpointing, inside backward
        return "weights_forward" if forward and not recomputing else "weights_backward"

    def pre_sub_module_forward_function(self, sub_module) -> None:
        if sub_module is self.module:
            self.gatherer.module_depth = 0  # a forward that raised left it above zero
        if self.gatherer.module_depth == 0 and torch._C._current_graph_task_id() == -1:
            self._evaluating = not torch.is_grad_enabled()
        with self.session.ledger.counting(self._kind(forward=True)):
            super().pre_sub_module_forward_function(sub_module)
        self.gatherer.module_depth += 1

    def post_sub_module_forward_function(self, sub_module) -> None:
        self.gatherer.module_depth = max(0, self.gatherer.module_depth - 1)
        super().post_sub_module_forward_function(sub_module)

    def pre_sub_module_backward_function(self, sub_module) -> None:
        self._evaluating = False
        with self.session.ledger.counting(self._kind(forward=False)):
            super().pre_sub_module_backward_function(sub_module)

    def destroy(self) -> None:
        """Take the hooks off, and give the parameters DeepSpeed's own gathers back."""
        super().destroy()
        self.gatherer.release()
