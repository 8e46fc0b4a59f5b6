"""Track backwards: a backward begins when it first reaches the model, and ends when autograd calls back."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from zeropp_fp8.zero.reduce.order import is_still_to_come, runs_to_its_leaves

_NONE = -1  # autograd's number if no backward runs
_ENDED_BY_EXCEPTION = (
    "an exception has ended the last backward after some of its gradients may have been added to those of earlier "
    "ones; call engine.optimizer.zero_grad() and begin the step again"
)


class Backwards:
    """The backwards of one stage. It answers DeepSpeed's questions about them.

    Attributes:
        ended: the number of backwards that have ended since the last step.
        looked_at: autograd's number of the last backward that was checked.
    """

    def __init__(self, stage) -> None:
        self.stage = stage
        self.ended = 0
        self._running: _Running | None = None  # the backward that has reached the model and has not ended
        self.looked_at = _NONE
        self._passed_by = _NONE  # the number of the last backward that is not the user's

    @property
    def one_runs(self) -> bool:
        return self._running is not None

    def module_reached(self, only_engine: bool) -> None:
        """Begin the backward when it comes to the first module of the model.

        Args:
            only_engine: no other engine has the model; otherwise the loss may be another engine's.

        Raises:
            RuntimeError: an exception has ended the last backward while gradients accumulate.
        """
        number = torch._C._current_graph_task_id()
        if number in (self.looked_at, self._passed_by) or self._is_under_way(number):
            return
        trained = (param for group in reversed(self.stage.fp16_groups) for param in reversed(group))
        if any(map(is_still_to_come, trained)) or (only_engine and runs_to_its_leaves()):
            self._begin()
        else:
            self.looked_at, self._passed_by = _NONE, number
            _Running(self.stage.parameter_offload.release_backward_leftovers)

    def gradient_came(self) -> None:
        """Begin a parameter's backward, if it has not begun: it may have reached no module."""
        number = torch._C._current_graph_task_id()  # none if coalesced gradients are reduced, after all backwards
        if number not in (self.looked_at, _NONE) and not self._is_under_way(number):
            self._begin()

    def _is_under_way(self, number: int) -> bool:
        """Whether the running backward, with this number of autograd's, has begun, or is not one of the user's."""
        self._forget_dead()
        self.looked_at = number
        # A loss in tiles goes backward inside the forward: these gradients wait for the user's backward.
        return self._running is not None or self.stage.gatherer.module_depth > 0

    def _begin(self) -> None:
        stage = self.stage
        stage.gatherer.ownership.check_placement()
        self._running = _Running(self._has_run)
        stage.reduction.backward_begins()
        boundary = stage.session.engine().is_gradient_accumulation_boundary()  # DeepSpeed updates it once per forward
        if hasattr(stage, "set_gradient_accumulation_boundary"):
            stage.set_gradient_accumulation_boundary(boundary)
        else:
            stage.is_gradient_accumulation_boundary = boundary
        state = getattr(stage, "_backward_hook_state", None)
        if state is not None:
            state.backward_active_depth = 0
            state.enter_backward()
            state.post_backward_callback_queued = True

    def _has_run(self) -> None:
        """Let the engine end the backward, if no engine.backward() is about to do so."""
        self._running = None
        if hasattr(self.stage, "run_grad_acc_post_hooks"):
            self.stage.run_grad_acc_post_hooks()

    def independent_gradient_partition_epilogue(self) -> None:
        """End a backward: bring the rest of its gradients to where the step finds them."""
        self.stage.reduction.finish_backward()
        self._running = None
        self.ended += 1

    def refuse_running(self) -> None:
        """Refuse to begin the step while a backward counts as running.

        Raises:
            RuntimeError: an exception has ended the last backward.
        """
        if self._running is not None:
            self.drop()
            raise RuntimeError(_ENDED_BY_EXCEPTION)

    def _forget_dead(self) -> None:
        """Drop the gradients of a backward that an exception has ended; the next backward would add to them."""
        if self._running is None or self._running.is_alive():
            return
        self.drop()
        if self.ended or self.stage._coalesce_grad_reduction:
            raise RuntimeError(_ENDED_BY_EXCEPTION)
        self.stage.reduction.forget_gradients()

    def drop(self) -> None:
        """Forget the running backward, and the gradients that it has brought."""
        self._running = None
        if hasattr(self.stage, "_backward_hook_state"):
            self.stage._backward_active_depth = 0
        self.stage.parameter_offload.release_backward_leftovers()
        self.stage.reduction.drop_gradients()

    # -- answers to DeepSpeed ----------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Leave out DeepSpeed's count: a loss of two forwards would enter twice, leave once, and never be reduced."""

    def queue_post_backward_callback(self) -> bool:
        """Leave out DeepSpeed's callback, which comes once per forward: autograd is asked for each backward."""
        return True

    def should_refresh_expected_hook_count(self) -> bool:
        """Return False: autograd tells the end of a backward, not a count of DeepSpeed's hooks."""
        return False

    def backward_epilogue(self) -> None:
        """End a backward. (DeepSpeed 0.18 reports neither this nor the beginning of a forward.)"""
        self.stage.stock.backward_epilogue()
        self.stage.parameter_offload.release_backward_leftovers()  # as DeepSpeed has done since 0.19
        self._running = None

    def clear_backward_seen_flag(self) -> None:
        """Begin a forward.

        Raises:
            RuntimeError: an exception has ended the last backward while gradients accumulate.
        """
        self._forget_dead()
        self.stage.stock.clear_backward_seen_flag()


class _Running:
    """A backward that autograd runs. It calls `ended` when it has run; an exception ends it without a call.

    Only autograd refers to the callback, so however the backward ends, the callback is gone then.
    """

    def __init__(self, ended: Callable[[], None]) -> None:
        def call() -> None:
            ended()

        self._call = weakref.ref(call)
        torch.autograd.Variable._execution_engine.queue_callback(call)

    def is_alive(self) -> bool:
        """Whether autograd still runs it."""
        return self._call() is not None
