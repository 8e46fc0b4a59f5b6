"""NVIDIA's assembler on Triton's code: registers and spills are its doing, and it needs no GPU."""

import os
import re
import subprocess

from triton.backends.nvidia.compiler import get_ptxas


def said_of(code: str) -> str:
    """The report on PTX, by the assembler that Triton takes for the code's target: others may not know its version."""
    target = re.search(r"\.target (sm_(\d+)\w*)", code)
    command = [get_ptxas(int(target[2])).path, "-v", f"-arch={target[1]}", "-o", os.devnull, "/dev/stdin"]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=True).stderr
