"""Weights that stay on a rank while a model generates: their values, or their codes.

A forward pass of ZeRO-3 gathers and drops every block. Generation runs one per token, so a rank keeps what fits for the
whole rollout: the values of all weights, or, in a half to a quarter of that memory, the codes of linear layers' weights
as they were received. Both are what the training forward computes with, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute.experts import projections_of
from zeropp_fp8.zero.gather.gatherer import Gatherer
from zeropp_fp8.zero.gather.units import Unit
from zeropp_fp8.zero.generation.adapters import Adapter, with_adapters
from zeropp_fp8.zero.generation.codes import holds_codes, quantized_weight, take_codes, values_of
from zeropp_fp8.zero.generation.few_choices import few_choices
from zeropp_fp8.zero.generation.layers import multipliable_weights

if TYPE_CHECKING:
    from zeropp_fp8.kernels.linear.quantized_linear import QuantizedStack  # needs Triton, which is loaded on first use

_DECODED_UNITS = 2  # a block may consist of two units with codes: stored weights, and others that are sent quantized


class _Resident:
    """An engine's weights as they are kept between `gather` and `release`."""

    def __init__(self, gatherer: Gatherer) -> None:
        self.gatherer = gatherer
        self._marked: list[Parameter] = []

    def gather(self) -> None:
        """Keep what is to be kept. Collective."""
        for param in self.gatherer.ownership.params.values():
            if not sharded.known(param).as_numbers:  # those that are sent as operands of FP8 products come as numbers
                sharded.remember(param, as_numbers=True)
                self._marked.append(param)
        waiting = [unit for unit in self.gatherer.units if unit.missing]
        for unit, coming in zip(waiting, [*waiting[1:], None]):
            self.gatherer.hops.start(unit)
            if coming is not None and self.gatherer.device.type == "cuda":
                self.gatherer.hops.start(coming, ahead=True)  # its bytes are on their way while this one is decoded
            self._keep(unit)

    def _keep(self, unit: Unit) -> None:
        """Take what the gather of a unit brings."""
        self.gatherer.finish(unit)

    def forget(self) -> None:
        """Drop what a forward pass leaves to the next one."""

    def release(self) -> None:
        """Drop what was kept. No communication."""
        for param in self._marked:
            sharded.remember(param, as_numbers=False)
        self._marked.clear()
        for unit in self.gatherer.units:
            unit.storage.note(unit.params)  # an adapter may have been merged into the values: they are dropped with it
            if unit.is_pending:
                self.gatherer.hops.cancel(unit)
            if not unit.persistent:
                self.gatherer.release(unit)

    def linear(self, module: nn.Linear, adapters: Sequence[Adapter] = ()) -> Callable[[Tensor], Tensor]:
        """The forward of a linear layer whose weight is there: without DeepSpeed's autograd function around it."""
        weight, bias = module.weight.data, None if module.bias is None else module.bias.data
        return with_adapters(lambda input: torch.ops.aten.linear.default(input, weight, bias), adapters)

    def experts(self, module: nn.Module) -> Callable | None:
        """The forward of packed experts; None: their own."""
        return None


class ResidentValues(_Resident):
    """All parameters of an engine, gathered once."""

    def __init__(self, gatherer: Gatherer, written: Iterable[Parameter] = ()) -> None:
        """`written`: parameters that somebody will write to, of which shards must not be lent."""
        super().__init__(gatherer)
        self._written = {id(param) for param in written}

    def num_bytes(self) -> int:
        """Bytes that a rank needs besides what it has."""
        needed = 0
        for unit in self.gatherer.units:
            comes = unit.missing and not unit.shards_are_values
            params = unit.params if comes else (p for p in unit.params if id(p) in self._written)
            needed += sum(sharded.numel(p) * unit.dtype_of(p).itemsize for p in params)
        return needed


class ResidentCodes(_Resident):
    """The codes of linear layers' weights, and the values of everything else.

    A few rows (a token of each sequence) are multiplied with the codes as they lie, where there is a kernel for it; for
    more, the weights of a block are decoded when its first layer needs them and dropped when another block does.
    """

    def __init__(self, gatherer: Gatherer, module: nn.Module) -> None:
        super().__init__(gatherer)
        weights = multipliable_weights(module)
        self._codes_of: dict[int, Tensor] = {}  # id of a unit: its payloads
        self._unit_of: dict[int, Unit] = {}  # id of a parameter whose codes are kept
        self._decoded: OrderedDict[int, dict[int, Tensor]] = OrderedDict()
        for unit in (unit for unit in gatherer.units if unit.missing):
            for param in unit.params_in_codes():
                if id(param) in weights:
                    self._unit_of[id(param)] = unit

    def num_bytes(self) -> int:
        """Bytes that a rank needs besides what it has."""
        with_codes, total = {id(unit): unit for unit in self._unit_of.values()}, 0
        for unit in self.gatherer.units:
            if not unit.missing or unit.shards_are_values:
                continue
            if id(unit) in with_codes and not holds_codes(unit):
                total += sum(unit.bytes_of(p) for p in unit.params) * self.gatherer.route.world_size
            params = (p for p in unit.params if id(p) not in self._unit_of)
            total += sum(sharded.numel(p) * unit.dtype_of(p).itemsize for p in params)
        decoded = [
            sum(sharded.numel(p) * unit.dtype_of(p).itemsize for p in unit.params) for unit in with_codes.values()
        ]
        return int(total) + sum(sorted(decoded)[-_DECODED_UNITS:])

    def _keep(self, unit: Unit) -> None:
        if not any(id(param) in self._unit_of for param in unit.params):
            self.gatherer.finish(unit)
            return
        codes = self._codes_of[id(unit)] = take_codes(self.gatherer, unit)
        values = values_of(unit, codes)
        for param in unit.params:
            if id(param) not in self._unit_of:
                # A copy: the values of a unit lie in one buffer, most of which is to be dropped.
                self.gatherer.let_hold(unit, param, values[id(param)].clone())

    def forget(self) -> None:
        self._decoded.clear()

    def release(self) -> None:
        self._codes_of.clear()
        self.forget()
        super().release()

    def linear(self, module: nn.Linear, adapters: Sequence[Adapter] = ()) -> Callable[[Tensor], Tensor]:
        """The forward of a linear layer, for few rows with its first adapter in the same kernel."""
        param = dict.__getitem__(module._parameters, "weight")
        if id(param) not in self._unit_of:
            return super().linear(module, adapters)
        bias = None if module.bias is None else module.bias.data
        unit = self._unit_of[id(param)]
        decoded = with_adapters(
            lambda input: torch.ops.aten.linear.default(input, self._values_of(unit)[id(param)], bias), adapters
        )
        on_gpu = self.gatherer.device.type == "cuda"
        weight = quantized_weight(unit, param, self._codes_of[id(unit)]) if on_gpu else None
        if weight is None:
            return decoded
        from zeropp_fp8.kernels.linear.quantized_linear import FEW_ROWS, Lora, QuantizedLinear

        fused = next((adapter for adapter in adapters if adapter.bias is None), None)
        lora = None if fused is None else Lora(fused.lora_A, fused.lora_B, fused.scaling)
        multiply = with_adapters(QuantizedLinear(weight, bias, lora), [a for a in adapters if a is not fused])
        most, dtype = FEW_ROWS * weight.shape[1], weight.dtype

        def forward(input: Tensor) -> Tensor:
            few = input.numel() <= most and input.dtype == dtype
            return multiply(input) if few else decoded(input)

        return forward

    def experts(self, module: nn.Module) -> Callable | None:
        """For few tokens the products of experts that are chosen, with their codes as they lie."""
        params = {n: p for n, p in projections_of(module).items() if id(p) in self._unit_of}
        if not params:
            return None
        own = module.forward

        def decoded(*args, **kwargs) -> Tensor:
            before = {param: param.data for param in params.values()}
            try:
                for param in before:
                    sharded.set_full(param, self._values_of(self._unit_of[id(param)])[id(param)])
                return own(*args, **kwargs)
            finally:
                for param, nothing in before.items():
                    sharded.set_dropped(param, nothing)

        stacks = self._stacks(params) if self.gatherer.device.type == "cuda" and len(params) == 2 else []
        return few_choices(module, stacks, decoded) if len(stacks) == 2 else decoded

    def _stacks(self, params: dict[str, Parameter]) -> list[QuantizedStack]:
        from zeropp_fp8.kernels.linear.quantized_linear import QuantizedStack

        units = [(param, self._unit_of[id(param)]) for param in params.values()]
        weights = [(p, quantized_weight(unit, p, self._codes_of[id(unit)])) for p, unit in units]
        return [QuantizedStack(weight, sharded.shape(param)[0]) for param, weight in weights if weight is not None]

    def _values_of(self, unit: Unit) -> dict[int, Tensor]:
        values = self._decoded.get(id(unit))
        if values is None:
            while len(self._decoded) >= _DECODED_UNITS:
                self._decoded.popitem(last=False)
            values = self._decoded[id(unit)] = values_of(unit, self._codes_of[id(unit)])
        return values
