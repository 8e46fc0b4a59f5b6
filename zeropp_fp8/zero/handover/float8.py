"""FP8 codes for an engine that computes in FP8: the layout of compressed-tensors checkpoints, which vLLM loads.

    NAME.weight        float8_e4m3fn [out, in]
    NAME.weight_scale  fp32 [out, 1], a scale per row; or [ceil(out / 128), ceil(in / 128)] where training computes with
                       tiles. value = code * scale

The scale of a tensor is written once per row. vLLM joins q, k and v (and gate and up) in one matrix, and with a scale
per tensor it would round the codes again to the largest of theirs; rows keep their own.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from zeropp_fp8.compute import casts
from zeropp_fp8.compute.convert import ConversionReport
from zeropp_fp8.compute.operand import BLOCK, Float8Operand
from zeropp_fp8.config.compute import matches
from zeropp_fp8.zero.export.weights import Part

DTYPE = torch.float8_e4m3fn
_CASTS = {
    "delayed": casts.cast_per_tensor,
    "current": casts.cast_per_tensor,
    "per_channel": casts.cast_per_row,
    "block": casts.cast_tiles,
}


class Float8Weights:
    """Which linear layers' weights are sent as codes: those that training computes in FP8; without FP8 compute all of
    nn.Linear but `skip_modules` and routers.

    Args:
        parts: of the model, without PEFT's wrapper.
        conversion: of the training engine, if its linear layers compute in low precision.
        skip_modules: name patterns.
        routing: id of linear layers that choose experts.
    """

    def __init__(
        self, parts: list[Part], conversion: ConversionReport | None, skip_modules: list[str], routing: set[int]
    ) -> None:
        scaling = conversion.scaling.compute.scaling if conversion is not None else None
        self._cast = _CASTS.get(scaling, casts.cast_per_row)
        computed = {id(m) for m in conversion.converted.values()} if scaling in _CASTS else None
        self._layers, self._others = set(), []
        users = Counter(id(param) for part in parts for param in part.inner.parameters(recurse=False))
        for part in parts:
            module, name = part.inner, part.prefix.removesuffix(".")
            if not isinstance(module, nn.Linear):
                continue
            wanted = id(module) not in routing and not matches(name, skip_modules)
            chosen = wanted if computed is None else id(module) in computed
            if chosen and users[id(dict.__getitem__(module._parameters, "weight"))] == 1:
                self._layers.add(id(module))
            else:
                self._others.append(name)

    def __contains__(self, module: nn.Module) -> bool:
        return id(module) in self._layers

    def encode(self, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """Codes and scales of a weight [out, in] in 16 or 32 bits, with their names; on "meta" their shapes."""
        if weight.is_meta:
            rows, columns = weight.shape
            by_tile = self._cast is casts.cast_tiles
            shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if by_tile else (rows, 1)
            return _named(
                name, weight.new_empty(rows, columns, dtype=DTYPE), weight.new_empty(shape, dtype=torch.float)
            )
        return self.of_operand(name, self._cast(weight, DTYPE, transposed=False)[0])

    @staticmethod
    def of_operand(name: str, operand: Float8Operand) -> list[tuple[str, Tensor]]:
        """The same of an operand as training multiplies it, in memory of their own."""
        rows, columns = operand.shape
        scale = operand.scale.view(1, 1).expand(rows, 1) if operand.granularity == "tensor" else operand.scale
        codes = operand.codes[:, :columns].clone(memory_format=torch.contiguous_format)
        return _named(name, codes, scale.clone(memory_format=torch.contiguous_format))

    def quantization_config(self) -> dict:
        """The entry of the engine's config.json for such weights (`hf_overrides={"quantization_config": ...}`)."""
        by_tile = self._cast is casts.cast_tiles
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**number, "dynamic": False, "strategy": "block" if by_tile else "channel"}
        inputs = {**number, "dynamic": True, "strategy": "group" if by_tile else "token"}
        if by_tile:
            weights["block_structure"], inputs["group_size"] = [BLOCK, BLOCK], BLOCK
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "ignore": list(self._others),
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        }


def _named(name: str, codes: Tensor, scale: Tensor) -> list[tuple[str, Tensor]]:
    return [(name, codes), (f"{name}_scale", scale)]
