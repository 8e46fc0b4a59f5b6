"""TRL's own generation (GRPO, RLOO, online DPO, its callbacks) with zeropp_fp8.generation, where an engine allows it.

All of TRL's trainers come through `trl.models.utils._unwrap_model_for_generation`, which gathers a ZeRO-3 model whole,
and takes off its hooks and puts them back. Nothing of TRL is imported here: it is asked whether it is there when an
engine is made, which its trainers do long after they were imported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import contextmanager

from deepspeed.utils import logger

_MODULE, _NAME, _CALLER = "trl.models.utils", "_unwrap_model_for_generation", "unwrap_model_for_generation"
_TAKES = ["model", "accelerator", "gather_deepspeed3_params"]
_OURS = "zeropp_fp8"  # on the function that stands in for TRL's


def generate_with_the_plugin(replace: Callable[[object, str, object], None]) -> None:
    """Replace TRL's function, if TRL is loaded and is one that is known; another one is left as it is, and said."""
    module = sys.modules.get(_MODULE)
    stock = getattr(module, _NAME, None)
    if module is None or hasattr(stock, _OURS):
        return
    caller = inspect.unwrap(getattr(module, _CALLER, None) or (lambda: None))
    taken = list(inspect.signature(inspect.unwrap(stock)).parameters) if callable(stock) else []
    if taken[: len(_TAKES)] != _TAKES or _NAME not in caller.__code__.co_names:
        _say_once(
            f"TRL {getattr(sys.modules['trl'], '__version__', '')} generates in another way than TRL 1.16: it gathers "
            "the whole model, as it does with stock DeepSpeed"
        )
        return
    replace(module, _NAME, _unwrapping(stock))


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(f"zeropp_fp8: {message}")


def _unwrapping(stock: Callable) -> Callable:
    """TRL's function; for an engine of the plugin, zeropp_fp8.generation with the weights of its `trl_generation`."""

    @contextmanager
    @functools.wraps(stock)
    def unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=True, *args, **kwargs):
        session = getattr(model, "zeropp_fp8_session", None)
        weights = "stock" if session is None or not gather_deepspeed3_params else session.config.trl_generation
        if weights == "stock":
            context = stock(model, accelerator, gather_deepspeed3_params, *args, **kwargs)
        elif model._zeropp_fp8_offload.generating:  # the script has entered zeropp_fp8.generation itself
            context = stock(model, accelerator, False, *args, **kwargs)
        else:
            from zeropp_fp8.zero.generation.context import generation

            weights = "auto" if weights == "detect" else weights
            context = generation(model, weights, merge_adapters=True, graph=False)
        with context as unwrapped:
            yield unwrapped

    setattr(unwrap_model_for_generation, _OURS, True)
    return unwrap_model_for_generation
