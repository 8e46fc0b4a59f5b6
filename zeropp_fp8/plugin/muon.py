"""`"optimizer": {"type": "Muon"}` of a ds_config, on owners of whole matrices: DeepSpeed's keys, the plugin's update.

DeepSpeed's own gathers each gradient and momentum, and all ranks orthogonalize every matrix: under ZeRO-3 some 80 bits
per parameter and step, and it takes no reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from zeropp_fp8 import sharded
from zeropp_fp8.optim import UPDATES, Muon
from zeropp_fp8.optim.muon import Rows

_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "nesterov": True, "ns_steps": 5, "ns_method": "gram"}
_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_OTHERS = ("muon_lr", "adam_lr", "per_head_muon", "torch_adam", "adam_w_mode", "fp32_optimizer_states")
_FUSED = ("query_key_value", "qkv_proj", "Wqkv")
# By the type of a model, for the same names stand for other orders elsewhere: each whole, or beside their queries.
_WHOLE = ("phi3", "phi4_multimodal", "modernbert", "mpt")
_BESIDE = ("gpt_neox", "gpt_neox_japanese", "bloom", "falcon", "persimmon")


def refusals(params: Mapping[str, Any]) -> Iterator[str]:
    """A line for each of "optimizer.params" that cannot be had."""
    known = dict.fromkeys((*_MUON, *_ADAM, *_OTHERS))
    unknown = [key for key in params if key not in known]
    if unknown:
        yield f'"optimizer.params": Muon has no {", ".join(unknown)}; it has {", ".join(known)}'
    yield from UPDATES["Muon"].refusals(params)
    if params.get("adam_w_mode") is False:
        yield '"optimizer.params.adam_w_mode": the Adam beside Muon is AdamW here; remove the key'


def muon_of(module: nn.Module, model_parameters: Iterable, params: Mapping[str, Any]) -> Muon:
    """The optimizer of a ds_config that `refusals` has nothing against.

    Args:
        model_parameters: parameters, or groups whose own options go before those of `params`. DeepSpeed has tagged them
            with `use_muon`, and with `muon_num_heads` for "per_head_muon".

    Raises:
        ValueError: parameters that the module does not have.
    """
    given = list(model_parameters)
    loose = [each for each in given if not isinstance(each, dict)]
    names = {param: name for name, param in module.named_parameters()}
    groups = []
    for group in ([{"params": loose}] if loose else []) + [each for each in given if isinstance(each, dict)]:
        kinds: dict[tuple[bool, Rows | None], list[nn.Parameter]] = {}
        for param in group["params"]:
            if param.requires_grad:
                if not hasattr(param, "use_muon"):
                    raise ValueError(
                        f"Muon: a parameter of shape {tuple(sharded.shape(param))} is none of the model's; give "
                        "deepspeed.initialize parameters of its model, or set their attribute use_muon"
                    )
                rows = _rows_of(names.get(param, ""), param, module) if param.use_muon else None
                kinds.setdefault((bool(param.use_muon), rows), []).append(param)
        for (uses_muon, rows), members in kinds.items():
            defaults, own_lr = (_MUON, "muon_lr") if uses_muon else (_ADAM, "adam_lr")
            options = {**defaults, **{key: params[key] for key in defaults if key in params}}
            options["lr"] = params.get(own_lr, options["lr"])
            options |= {key: group[key] for key in defaults if key in group}
            groups.append({"params": members, "use_muon": uses_muon, "rows": rows, **options})
    return Muon(groups)


def _rows_of(name: str, param: nn.Parameter, module: nn.Module) -> Rows | None:
    """Rows of the matrices that one parameter of a transformers model holds, if it holds several.

    Fused gate and up projections, and fused query, key and value, in the two orders that models have.
    """
    *path, leaf = name.removesuffix(".weight").split(".")
    rows = sharded.shape(param)[-2]
    if heads := getattr(param, "muon_num_heads", None):
        return Rows(heads, (rows // heads,), joined=False)
    config = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    transposed = getattr(module.get_submodule(".".join(path)), "is_transposed", False)
    if leaf == "gate_up_proj" and rows % 2 == 0 and not transposed:
        return Rows(1, (rows // 2, rows // 2))
    kind = getattr(config, "model_type", None)
    if leaf not in _FUSED or kind not in _WHOLE + _BESIDE:
        return None
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = (rows // size - heads) // 2
    if keys < 1 or rows != (heads + 2 * keys) * size or heads % keys:
        return None
    if kind in _WHOLE:
        return Rows(1, (heads * size, keys * size, keys * size))
    return Rows(keys, (heads // keys * size, size, size))
