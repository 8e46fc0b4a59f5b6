"""The scripts of examples/integrations on ranks, by the commands of their page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import traceback

import torch.distributed as dist
from trainer_jobs import tell_accelerate

from zeropp_fp8 import run


def run_scripts(commands):
    """{script: (what it ended with, what it printed)} of {script: (environment, its words from the script on)}."""
    from accelerate.state import AcceleratorState, GradientState

    tell_accelerate()
    ended = {}
    for script, (environment, words) in commands.items():
        os.environ.update(environment)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                run.main(words)
                said = ""
            except Exception:
                said = traceback.format_exc()
        ended[script] = said, printed.getvalue()
        for name in environment:
            del os.environ[name]
        for state in (AcceleratorState, GradientState):  # each script has a process of its own
            state._reset_state()
        dist.barrier()
    return ended


def losses(text):
    """Those of Trainer's logs, or of the loop's lines."""
    return [float(number) for number in re.findall(r"(?:'loss': '?|step \d+ loss )(-?[\d.]+(?:e-?\d+)?)", text)]
