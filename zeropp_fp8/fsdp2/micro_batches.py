"""Micro-batches of a module before the last one, whose gradients are kept until then."""

from __future__ import annotations

from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from zeropp_fp8.fsdp2.unit import FSDPUnit


class MicroBatches:
    """The micro-batches of one module, which must be of the same parameters; `where` says what sends them on.

    `kept` is the key of their gradients (`FSDPUnit.reduced_as`); None: there are none.
    """

    def __init__(self, unit: FSDPUnit, module: FSDPModule, where: str) -> None:
        self._unit, self._module, self._where = unit, module, where
        self.kept: tuple | None = None
        self._versions: list[int | None] = []

    def begin(self, key: tuple, is_whole: bool, may_be_last: bool = True) -> bool:
        """Return whether this micro-batch is the last; RuntimeError, on all ranks, if what is kept cannot take it."""
        last = self._module._get_fsdp_state()._state_ctx.is_last_backward and may_be_last
        if self.kept is not None:
            self._compare(self._unit.gradient_versions(), key, is_whole or last)
        if not last:
            Variable._execution_engine.queue_callback(self._backward_ends)
        return last

    def _compare(self, versions: list[int | None], key: tuple, adds: bool) -> None:
        if not any(versions):  # by zero_grad(): torch gives each trained parameter a gradient before
            self.kept = None
        elif adds and key != self.kept:
            self.check_finished()
        elif versions != self._versions:
            raise RuntimeError(
                f"zeropp_fp8.fsdp2: gradients of {self._unit.names[0]} and others were written between micro-batches, "
                "and some are kept elsewhere: write them after the last, and give them up by zero_grad() as it is"
            )

    def _backward_ends(self) -> None:
        self._versions = self._unit.gradient_versions()

    def check_finished(self) -> None:
        """Raise RuntimeError if no last backward has sent on what is kept and not given up. The same on all ranks."""
        if self.kept is not None and any(member.sharded_param.grad is not None for member in self._unit.members):
            raise RuntimeError(
                f"zeropp_fp8.fsdp2: gradients of {self._unit.names[0]} and others are still {self._where} before the "
                "last micro-batch, whose backward must reach all trained parameters of the module"
            )
