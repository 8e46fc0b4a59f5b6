"""The effect of rounding on a run: samples by layer, and what follows from them. Off unless the section asks for it.

They are parts of a stage (zero/stage_part.py): told of each loss, when gradients are ready, and when a step has ended.
"""

from __future__ import annotations

import itertools

from zeropp_fp8.config import trial_from_environment

_engines = itertools.count()  # that are observed, in this process


def observe(engine) -> None:
    """Put onto an engine that trains the parts that its section, or an experiment, asks for. Collective."""
    session, trial, number = engine.zeropp_fp8_session, trial_from_environment(), next(_engines)
    if session.config.numerics.every:
        from zeropp_fp8.numerics.sample import Sampler

        session.parts.append(Sampler(engine, number))
    if session.config.numerics.watch != "none":
        from zeropp_fp8.numerics.watch import Watch

        session.parts.append(Watch(engine))
    if trial is not None:
        from zeropp_fp8.numerics.trial import Recorder

        session.parts.append(Recorder(engine, number, trial))
