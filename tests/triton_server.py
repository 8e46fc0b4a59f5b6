"""Imports torch, Triton and the cases of tests once, and then forks a process for each script that it is sent.

A request is a line of JSON on standard input: {"script": text, "outputs": [path, ...]}. For each path a process is
forked, which prints into path.out and path.err. The answer is a line of JSON on standard output: their exit statuses.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
import types

import torch

IMPORTS = (
    "pytest",
    "triton.backends.compiler",
    "triton.compiler",
    "cast_cases",
    "payload_checks",
    "optim_cases",
    "quantized_cases",
    "zeropp_fp8.kernels",
)


def patch_once() -> None:
    """Let the interpreter replace what triton.language holds once, and not at each call of each function of a kernel.

    Looking for what there is to replace is half of its time. Nothing but kernels uses triton.language in a process that
    interprets, so that it need not be as it was in between.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, done = interpreter._patch_lang, set()
    nothing = types.SimpleNamespace(restore=lambda: None)

    def patch_lang(function):
        modules = frozenset(id(v) for v in function.__globals__.values() if v is language or v is language.core)
        if modules not in done:
            patch(function)
            done.add(modules)
        return nothing

    interpreter._patch_lang = patch_lang


def turns(place: int, count: int):
    """A function that says in one of `count` processes, and in each in its turn, that it is this one's turn."""
    asked = -1

    def turn() -> bool:
        nonlocal asked
        asked += 1
        return asked % count == place

    return turn


def run(script: str, output: str, place: int, count: int) -> None:
    """Run a script as `python -c` does, with turn() and mine(cases) beside what it defines; ends this process."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for stream, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{output}.{kind}", os.O_WRONLY | os.O_CREAT), stream)
        sys.stdout = os.fdopen(1, "w")
        torch.set_num_threads(1)
        turn = turns(place, count)
        names = {"__name__": "__main__", "turn": turn, "mine": lambda cases: [case for case in cases if turn()]}
        exec(compile(script, "<script>", "exec"), names)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in IMPORTS:
        importlib.import_module(name)
    if os.environ["TRITON_INTERPRET"] == "1":
        patch_once()
    gc.collect()
    gc.freeze()  # or the first collection in each process copies the memory of all that is imported
    for line in sys.stdin:
        request = json.loads(line)
        outputs, children = request["outputs"], []
        for place, output in enumerate(outputs):
            child = os.fork()
            if child == 0:
                run(request["script"], output, place, len(outputs))
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), file=answers, flush=True)


if __name__ == "__main__":
    main()
