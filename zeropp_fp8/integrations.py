"""The plugin's numbers in the logs of a Hugging Face Trainer, TRL's included, and so in W&B, TensorBoard and others.

    trainer = Trainer(...)
    zeropp_fp8.integrations.log_metrics(trainer)
    trainer.train()

It needs transformers, and is imported only where it is asked for. DeepSpeed's own monitor needs nothing of it.
"""

from __future__ import annotations

from transformers import TrainerCallback

from zeropp_fp8.zero.holders import engine_of
from zeropp_fp8.zero.metrics import StepMetrics, formats

PREFIX = "zeropp_fp8/"


def log_metrics(trainer) -> None:
    """Add the numbers of zeropp_fp8/zero/metrics.py to each entry with a loss, as means over the steps since the last.

    The formats go into `trainer.state.log_history` once, when training begins. Call it before `train()`, once.

    Raises:
        ValueError: in `train()`, if the Trainer does not run with the plugin.
    """
    # Reporters write an entry when their turn comes, and those of `report_to` come before a callback of the user's.
    trainer.callback_handler.callbacks.insert(0, _LogMetrics())


class _LogMetrics(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        engine = engine_of(model, "log_metrics")
        self._metrics = StepMetrics(engine)
        entry = {f"{PREFIX}{name}": value for name, value in formats(engine.zeropp_fp8_session).items()}
        state.log_history.append({**entry, "step": state.global_step})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            found = {f"{PREFIX}{name}": value for name, value in self._metrics().items()}
            logs.update(found)
            state.log_history[-1].update(found)  # a copy of the entry, made before callbacks are asked
