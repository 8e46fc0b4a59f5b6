"""Write the plugin's numbers to the logs of a Hugging Face Trainer (also TRL's), and so to W&B, TensorBoard and others.

    trainer = Trainer(...)
    zeropp_fp8.integrations.log_metrics(trainer)
    trainer.train()

It needs transformers, and is imported only where it is asked for. DeepSpeed's own monitor does not need it.
"""

from __future__ import annotations

from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback

from zeropp_fp8.zero.holders import engine_of
from zeropp_fp8.zero.telemetry import StepMetrics, formats

PREFIX = "zeropp_fp8/"


def log_metrics(trainer) -> None:
    """Add the numbers of zero/telemetry.py to each entry with a loss, as means over the steps since the last entry.

    The formats are words. They go into `trainer.state.log_history` once, when training begins, and at that time to
    TensorBoard (a text, "zeropp_fp8/formats") and W&B (the run's config). Call this before `train()`, once.

    Raises:
        ValueError: in `train()`, if the Trainer does not run with the plugin.
    """
    # Reporters write an entry when they are called, and those of `report_to` are called before a user's callback.
    handler = trainer.callback_handler
    handler.callbacks.insert(0, _LogMetrics())
    handler.callbacks.append(_TellFormats(handler))  # after the reporters have begun


class _LogMetrics(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._metrics = StepMetrics(engine_of(model, "log_metrics").zeropp_fp8_session)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            found = {f"{PREFIX}{name}": value for name, value in self._metrics().items()}
            logs.update(found)
            state.log_history[-1].update(found)  # a copy of the entry, made before callbacks are called


class _TellFormats(TrainerCallback):
    def __init__(self, handler) -> None:
        self._handler = handler

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        engine = engine_of(model, "log_metrics")
        entry = {f"{PREFIX}{name}": value for name, value in formats(engine.zeropp_fp8_session).items()}
        state.log_history.append({**entry, "step": state.global_step})
        if not state.is_world_process_zero:
            return
        for callback in self._handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
                text = "\n".join(f"    {name}: {value}" for name, value in entry.items())  # in Markdown: verbatim
                callback.tb_writer.add_text(f"{PREFIX}formats", text, state.global_step)
            if isinstance(callback, WandbCallback) and callback._wandb is not None and callback._wandb.run is not None:
                callback._wandb.config.update(entry, allow_val_change=True)
