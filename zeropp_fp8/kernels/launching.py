"""Launching a Triton kernel without what Triton works out anew in every launch.

`kernel[grid](...)` binds arguments to names, finds what each of them specializes the kernel for, and makes a string of
all that to look the compiled kernel up by: most of a launch's time on the host. What a kernel is compiled for are the
dtypes of tensors, whether addresses and integers are multiples of 16, integers that are 1, and the constants. A
`Kernel` looks up just that, and gives what it finds the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs


class Last:
    """The last arguments of a launch, its constants and options: looked at once, for launches that share them."""

    def __init__(self, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        self.arguments, self.constants = tuple(arguments), constants
        self.values = addresses(arguments)
        self.kinds = (*specializations(arguments, self.values), *constants.items())
        self.known: dict[Hashable, tuple[Any, tuple]] = {}  # by kernel and first arguments, which are few


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
        return lambda *arguments, **constants: self.launch(grid, arguments, Last((), constants))

    def launch(self, grid: tuple[int, ...], first: Sequence[Any], last: Last) -> None:
        """Launch with arguments of which the last ones were looked at before; a tensor first."""
        device = first[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(grid, first, last)
            return
        watched = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        if self._by_triton or device < 0 or watched:
            self.jitted[grid](*first, *last.arguments, **last.constants)
            return
        values = addresses(first)
        short = (self, device, *specializations(first, values))
        known = last.known.get(short)
        if known is None:
            key = (*short, *last.kinds)
            known = self._known.get(key)
            if known is None:
                compiled = self.jitted[grid](*first, *last.arguments, **last.constants)
                others = self.jitted.params[len(first) + len(last.arguments) :]
                self._known[key] = compiled, tuple(last.constants.get(param.name, param.default) for param in others)
                return
            last.known[short] = known
        compiled, constants = known
        compiled.run(
            *(*grid, 1, 1)[:3],
            torch._C._cuda_getCurrentRawStream(device),
            compiled.function,
            compiled.packed_metadata,
            *(None, None, None),  # no hooks
            *values,
            *last.values,
            *constants,
        )


def addresses(arguments: Sequence[Any]) -> list[Any]:
    """Arguments with addresses in the places of tensors: Triton asks the driver where a tensor lies."""
    return [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]


def specializations(arguments: Sequence[Any], values: Sequence[Any]) -> list[Hashable]:
    """What Triton compiles for arguments, `values` being those of `addresses`: where this is equal, that is."""
    found: list[Hashable] = []
    for argument, value in zip(arguments, values):
        kind = type(argument)
        if kind is int:
            # Whether it is 1, a multiple of 16, and its bits: 32, 64, or 64 without a sign.
            bits = 0 if -(2**31) <= value < 2**31 else 1 if value < 2**63 else 2
            found.append((value == 1) + 2 * (value % 16 == 0) + 4 * bits)
        elif isinstance(argument, Tensor):
            found += (argument.dtype, value % 16 == 0)
        else:
            found.append(kind)
    return found
