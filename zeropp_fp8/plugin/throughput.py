"""DeepSpeed's throughput timer, waiting for what is computed alone: weights may already be sent for the next step.

By default it waits for the whole device before and after each micro-batch.
"""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator
from deepspeed.utils.timer import ThroughputTimer


class ComputeTimer(ThroughputTimer):
    """The class that `wait_for_compute` gives to an engine's timer, which data loaders have too."""

    def start(self) -> None:
        self._wait()
        super().start()

    def stop(self, *args, **kwargs) -> None:
        self._wait()
        super().stop(*args, **kwargs)

    def _wait(self) -> None:
        waits = self.waits and self.global_step_count >= self.start_step
        if waits and (stream := get_accelerator().current_stream()) is not None:
            stream.synchronize()


def wait_for_compute(timer: ThroughputTimer) -> None:
    """Let a timer wait for the stream that computes, where it would wait for the device."""
    timer.waits = timer.config.enabled and timer.config.synchronized
    timer.config = timer.config.model_copy(update={"synchronized": False})
    timer.__class__ = ComputeTimer
