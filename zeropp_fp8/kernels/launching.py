"""Launching a Triton kernel without what Triton works out anew in every launch.

`kernel[grid](...)` binds arguments to names, finds what each of them specializes the kernel for, and makes a string of
all that to look the compiled kernel up by: most of a launch's time on the host. What a kernel is compiled for are the
dtypes of tensors, whether addresses and integers are multiples of 16, integers that are 1, and the constants. A
`Kernel` looks up just that, and gives what it finds the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PLANS = 4096  # that a kind of launch keeps: one a shape of its matrices, and a layer has some


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
        self._known: dict[Hashable, Compiled] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **constants: self.launch(grid, arguments, constants)

    def launch(self, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> Compiled | None:
        """Launch, and give what ran; None where Triton has to launch every time."""
        device = arguments[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self.launch(grid, arguments, constants)
        watched = knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls
        if self._by_triton or device < 0 or watched:
            self.jitted[grid](*arguments, **constants)
            return None
        values, specialized = bind(arguments)
        key = (device, *specialized, *constants.items())
        known = self._known.get(key)
        if known is None:
            compiled = self.jitted[grid](*arguments, **constants)
            others = self.jitted.params[len(arguments) :]
            ends = tuple(constants.get(param.name, param.default) for param in others)
            what = compiled.function, compiled.packed_metadata, None, None, None
            known = self._known[key] = Compiled(device, compiled.run, what, ends)
        else:
            known.launch((*grid, 1, 1)[:3], values)
        return known


class Compiled(NamedTuple):
    """A kernel that Triton has compiled and launched once, on a device.

    Attributes:
        run: Triton's launcher.
        kernel: the function on the device and its metadata, and no hooks.
        constants: their values.
    """

    device: int
    run: Callable[..., None]
    kernel: tuple
    constants: tuple

    def launch(self, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        """Launch on the current stream, with the values that `bind` gives of the arguments."""
        self.run(*grid, torch._C._cuda_getCurrentRawStream(self.device), *self.kernel, *values, *self.constants)


class Plan:
    """A launch that is made again and again, with other tensors in front and all else as it was: looked at once.

    Args:
        last: the arguments after the tensors; they are kept.
        constants: and options.
    """

    def __init__(self, kernel: Kernel, grid: tuple[int, ...], last: Sequence[Any], constants: dict[str, Any]) -> None:
        self._kernel, self._grid, self._last, self._constants = kernel, grid, tuple(last), constants
        self._known: Compiled | None = None  # for tensors that lie at multiples of 16 wherever it matters
        self._matters: tuple[bool, ...] = ()
        self._before = (*grid, 1, 1)[:3]  # what the launcher takes before the stream, and after the tensors
        self._after: tuple = ()

    def __call__(self, *first: Tensor | None) -> None:
        """Launch with tensors that are as many, and of the device and the dtypes, as in the first call; a tensor first.

        Tensors of FP8 count as their bytes. For None, a tensor that the kernel does not touch, the first one stands.
        """
        place = first[0].data_ptr()
        values = [place if tensor is None else tensor.data_ptr() for tensor in first]
        known, hooks = self._known, knobs.runtime
        if known is not None and known.device == torch._C._cuda_getDevice():
            bits = 0
            for value in compress(values, self._matters):
                bits |= value
            if not (bits % 16 or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls):
                stream = torch._C._cuda_getCurrentRawStream(known.device)
                known.run(*self._before, stream, *known.kernel, *values, *self._after)
                return
        # Triton before 3.7 has no pointers to float8 on devices without the type, and its interpreter has none at all.
        tensors = [first[0] if tensor is None else tensor for tensor in first]
        given = [tensor.view(torch.uint8) if tensor.dtype in FLOAT8 else tensor for tensor in tensors]
        compiled = self._kernel.launch(self._grid, (*given, *self._last), self._constants)
        if compiled is not None:
            params = self._kernel.jitted.params[: len(first)]
            matters = tuple(not param.do_not_specialize_on_alignment for param in params)
            if not any(value % 16 for value in compress(values, matters)):
                self._known, self._matters = compiled, matters
                self._after = (*bind(self._last)[0], *compiled.constants)


def bind(arguments: Sequence[Any]) -> tuple[list[Any], list[Hashable]]:
    """(arguments with addresses in the places of tensors, what Triton compiles for them: where it is equal, that is).

    Triton asks the driver where a tensor lies; here the tensor is asked.
    """
    values: list[Any] = []
    specialized: list[Hashable] = []
    for argument in arguments:
        kind, value = type(argument), argument
        if kind is int:
            # Whether it is 1, a multiple of 16, and its bits: 32, 64, or 64 without a sign.
            bits = 0 if -(2**31) <= value < 2**31 else 1 if value < 2**63 else 2
            specialized.append((value == 1) + 2 * (value % 16 == 0) + 4 * bits)
        elif kind is Tensor or isinstance(argument, Tensor):
            value = argument.data_ptr()
            specialized += (argument.dtype, value % 16 == 0)
        else:
            specialized.append(kind)
        values.append(value)
    return values, specialized
