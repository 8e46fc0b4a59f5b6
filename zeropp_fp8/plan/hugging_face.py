"""The plan's model of a Hugging Face model, out of its config.json: all sizes exact, no weights read."""

from __future__ import annotations

import os
from typing import Any

from zeropp_fp8.plan.job import Model, PlanError


def model_of(source: str | os.PathLike) -> Model:
    """Build the model without memory for its weights (on torch's "meta" device) and count.

    Args:
        source: a config.json, the folder of one, or a model's name on the Hugging Face hub (or in its local cache).
    """
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    where = f"the model {os.fspath(source)!r}"
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        first = str(error).strip().partition("\n")[0]
        raise PlanError(
            f"{where} has no config.json that transformers reads ({first}); give the path of one, the name of a model "
            "on the hub, or --params"
        ) from None
    try:
        with torch.device("meta"):
            model = _class_of(config)._from_config(config)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise PlanError(f"{where} cannot be built from its config.json ({error}); give --params instead") from None
    return _counted(model, config.get_text_config(), where)


def _class_of(config: Any) -> Any:
    """The class that the config names, else that of a causal language model, else the one without a head."""
    import transformers

    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    found = next(filter(None, named), None)
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        found = found or mapping.get(type(config), None)
    return found


def _counted(model: Any, text: Any, where: str) -> Model:
    sizes = {name: getattr(text, name, None) for name in ("hidden_size", "num_hidden_layers", "vocab_size")}
    missing = [name for name, size in sizes.items() if not isinstance(size, int)]
    if missing:
        raise PlanError(f"{where} is no transformer of equal blocks: its config has no {missing[0]}; give --params")
    hidden, layers, vocabulary = sizes.values()
    if getattr(text, "is_encoder_decoder", False):
        layers += getattr(text, "num_decoder_layers", None) or layers
    params = list(model.parameters())  # a tied one once
    tables = [p for p in params if p.shape == (vocabulary, hidden)]
    if not tables:
        raise PlanError(f"{where} has no embedding of vocab_size x hidden_size; give --params")
    matrices = sum(p.dim() > 1 for p in params) - len(tables)
    return Model(sum(p.numel() for p in params), hidden, layers, vocabulary, max(1, matrices // layers), len(tables))
