"""Launching a Triton kernel without what Triton works out anew in every launch.

`kernel[grid](...)` binds arguments to names, finds what each of them specializes the kernel for, and makes a string of
all that to look the compiled kernel up by: most of a launch's time on the host. What a kernel is compiled for are the
dtypes of tensors, whether addresses and integers are multiples of 16, integers that are 1, and the constants. A
`Kernel` looks up just that, and gives what it finds the arguments as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs


class Kernel:
    """A kernel of `triton.jit` that is launched on the device of its first argument.

    As with `triton.jit`, a launch is `kernel[grid](*arguments, **constants)`: tensors of one device, numbers and None
    in the order of the parameters, a tensor first; then the constants, which are the last parameters, and Triton's
    options by name, hashable.
    """

    def __init__(self, kernel: triton.JITFunction) -> None:
        self.jitted = kernel
        # In Triton's interpreter it is none. On AMD's devices kernels are specialized for the size of tensors, too.
        self._by_triton = not isinstance(kernel, triton.JITFunction) or torch.version.hip is not None
        self._known: dict[Hashable, tuple[Any, tuple]] = {}  # Triton's CompiledKernel, the values of its constants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments, **constants) -> None:
        device = arguments[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch(grid, *arguments, **constants)
            return
        if (
            self._by_triton
            or device < 0
            or knobs.runtime.launch_enter_hook.calls
            or knobs.runtime.launch_exit_hook.calls
        ):
            self.jitted[grid](*arguments, **constants)
            return
        # Triton takes an address as it is, while it asks the driver where a tensor lies.
        values = [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]
        key = (device, *map(specialization, arguments, values), *constants.items())
        known = self._known.get(key)
        if known is None:
            compiled = self.jitted[grid](*arguments, **constants)
            last = self.jitted.params[len(arguments) :]
            self._known[key] = compiled, tuple(constants.get(param.name, param.default) for param in last)
            return
        compiled, last = known
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            *(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None, *values, *last
        )


def specialization(argument: Any, value: Any) -> Hashable:
    """What Triton compiles for an argument, `value` being a tensor's address: where this is equal, that is."""
    if isinstance(argument, Tensor):
        return argument.dtype, value % 16 == 0
    if type(argument) is int:  # an integer of 32 bits, of 64, or of 64 without a sign
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31, argument < 2**63
    return type(argument)
