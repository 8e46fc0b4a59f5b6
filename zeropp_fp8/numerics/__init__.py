"""The effect of rounding on a run: samples by layer, and what follows from them. Off unless the section asks for it.

measure.py     signal-to-noise, amax, and what became zero or was cut off, of numbers and what they decode to
sample.py      a sampled step: weights, gradients and operands as they travel and compute, against what they were
picture.py     maps of layers by steps
show.py        python -m zeropp_fp8 numerics FILE: the samples as a table and a picture
watch.py       losses that jump: stop, or go on in high precision
trial.py       what each step of an experiment gave
reference.py   python -m zeropp_fp8 reference: a job's launch line, as it is and in `lossless`, and the difference
bisect.py      python -m zeropp_fp8 bisect: the same with pieces, GEMMs and layers in high precision

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
