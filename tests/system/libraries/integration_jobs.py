"""The scripts of examples/integrations on ranks, by the commands of their page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import traceback
from unittest import mock

import deepspeed
import torch.distributed as dist
from trainer_jobs import tell_accelerate
from transformers import set_seed

import zeropp_fp8
import zeropp_fp8_autoload as autoload
from zeropp_fp8 import run

# What stands before a script: how the plugin is switched on where its ds_config alone does not.
WAYS = {"run": ["-m", "zeropp_fp8.run"], "enable": ["enable()"]}


def run_scripts(commands):
    """{name: (what it ended with, what it printed)} of {name: (environment, what an interpreter is given)}."""
    from accelerate.state import AcceleratorState, GradientState

    tell_accelerate()
    ended = {}
    for name, (environment, words) in commands.items():
        printed = io.StringIO()
        with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(printed):
            try:
                _run(words)
                said = ""
            except Exception:
                said = traceback.format_exc()
        ended[name] = said, printed.getvalue()
        for state in (AcceleratorState, GradientState):  # each script has a process of its own
            state._reset_state()
        dist.barrier()
    return ended


def _run(words):
    """Run `python WORDS` in a new process: nothing of the plugin is on but what the .pth file puts there."""
    zeropp_fp8.disable()
    set_seed(0)  # in every new process torch's generator begins alike
    if os.environ.get(autoload.VARIABLE) != "0":
        autoload._watch(deepspeed)
    if words[0] in WAYS["enable"]:
        zeropp_fp8.enable()
        words = words[1:]
    if words[:2] == WAYS["run"]:
        run.main(words[2:])
    else:
        with (
            mock.patch.object(sys, "argv", words),
            mock.patch.object(sys, "path", [os.path.dirname(words[0]), *sys.path]),
        ):
            runpy.run_path(words[0], run_name="__main__")


def losses(text):
    """Return the losses of Trainer's logs, or of the loop's lines."""
    return [float(number) for number in re.findall(r"(?:'loss': '?|step \d+ loss )(-?[\d.]+(?:e-?\d+)?)", text)]


def share_right(text):
    """Return what a script's own measure says in the last line of an evaluation."""
    return float(re.findall(r"'eval_right': '?([\d.]+)", text)[-1])
