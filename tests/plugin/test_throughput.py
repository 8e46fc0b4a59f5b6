"""The throughput timer waits for the stream that computes, as often as DeepSpeed's own waits for the device."""

from unittest import mock

import pytest
from deepspeed.utils import timer as ds_timer
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from zeropp_fp8.plugin import throughput


class Accelerator:
    def __init__(self):
        self.waits = []

    def synchronize(self):
        self.waits.append("device")

    def current_stream(self):
        return mock.Mock(synchronize=lambda: self.waits.append("stream"))


def waits_of(config, changed, monkeypatch):
    """Return each wait of five steps of two micro-batches, and the samples per second of the later ones."""
    accelerator = Accelerator()
    for module in (ds_timer, throughput):
        monkeypatch.setattr(module, "get_accelerator", lambda: accelerator)
    seconds = iter(range(1, 100))
    monkeypatch.setattr(ds_timer.time, "time", lambda: float(next(seconds)))
    timer = ds_timer.ThroughputTimer(config, batch_size=8)
    if changed:
        throughput.wait_for_compute(timer)
    for micro_batch in range(10):
        timer.start()
        timer.stop(global_step=micro_batch % 2 == 1)
    monkeypatch.undo()
    return accelerator.waits, timer.avg_samples_per_sec()


@pytest.mark.parametrize(
    "options", [{}, {"synchronized": False}, {"enabled": False}, {"enabled": False, "synchronized": False}]
)
def test_as_often_as_deepspeeds(options, monkeypatch):
    config = DeepSpeedThroughputTimerConfig(**options)
    (own, own_speed), (stock, speed) = (waits_of(config, changed, monkeypatch) for changed in (True, False))
    assert own == ["stream"] * len(stock) and own_speed == speed
    assert bool(stock) is (options == {}) and config.synchronized is options.get("synchronized", True)


def test_a_cpu_has_no_stream():
    timer = ds_timer.ThroughputTimer(DeepSpeedThroughputTimerConfig(), batch_size=8, start_step=0)
    throughput.wait_for_compute(timer)
    timer.start()
    timer.stop(global_step=True)
    assert timer.global_step_count == 1
