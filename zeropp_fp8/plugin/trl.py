"""TRL's own generation (GRPO, RLOO, online DPO, its callbacks) with zeropp_fp8.generation, where an engine allows it.

All of TRL's trainers come through `trl.models.utils._unwrap_model_for_generation`, which gathers a ZeRO-3 model whole,
and takes off its hooks and puts them back. With vLLM they take the weights from `VLLMGeneration._iter_named_params`,
which with PEFT gathers it whole too; a WeightSource brings it block by block. Nothing of TRL is imported here: it is
asked whether it is there when an engine is made, which its trainers do long after they were imported.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

from deepspeed.utils import logger

from zeropp_fp8 import sharded

_MODULE, _NAME, _CALLER = "trl.models.utils", "_unwrap_model_for_generation", "unwrap_model_for_generation"
_TAKES = ["model", "accelerator", "gather_deepspeed3_params"]
_VLLM_MODULE, _VLLM_CLASS, _WEIGHTS = "trl.generation.vllm_generation", "VLLMGeneration", "_iter_named_params"
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


def hand_over_with_the_plugin(replace: Callable[[object, str, object], None]) -> None:
    """Replace how TRL iterates over a model's weights for vLLM, if it has loaded that and it is known."""
    holder = getattr(sys.modules.get(_VLLM_MODULE), _VLLM_CLASS, None)
    stock = getattr(holder, _WEIGHTS, None)
    if holder is None or hasattr(stock, _OURS):
        return
    caller = getattr(holder, "sync_weights", None)
    if stock is None or caller is None or _WEIGHTS not in inspect.unwrap(caller).__code__.co_names:
        _say_once(
            "this TRL hands weights to vLLM in another way than TRL 1.16: it gathers them as with stock DeepSpeed"
        )
        return
    replace(holder, _WEIGHTS, _handing_over(stock))


def _handing_over(stock: Callable) -> Callable:
    """TRL's method; for a model of the plugin, unless its `trl_generation` is "stock", block by block."""

    @functools.wraps(stock)
    def _iter_named_params(self):
        states = (sharded.known(param).wire for param in self.model.parameters())
        session = next((state.owner.session for state in states if state is not None), None)
        if session is None or session.config.trl_generation == "stock":
            return stock(self)
        from zeropp_fp8.zero.handover.source import WeightSource

        return iter(WeightSource(self.model))

    setattr(_iter_named_params, _OURS, True)
    return _iter_named_params


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(f"zeropp_fp8: {message}")


def _unwrapping(stock: Callable) -> Callable:
    """TRL's function; for an engine of the plugin, zeropp_fp8.generation with the weights of its `trl_generation`."""

    @contextmanager
    @functools.wraps(stock)
    def unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=True, *args, **kwargs):
        session = getattr(model, "zeropp_fp8_session", None)
        inside = session is not None and model._zeropp_fp8_offload.generating  # the script is in zeropp_fp8.generation
        gathers = gather_deepspeed3_params and not inside
        with ExitStack() as stack:
            if session is not None and gathers and session.config.trl_generation != "stock":
                from zeropp_fp8.zero.generation.context import generation

                weights = session.config.trl_generation
                unwrapped = stack.enter_context(generation(model, weights, merge_adapters=True, graph=False))
            else:
                unwrapped = stack.enter_context(stock(model, accelerator, gathers, *args, **kwargs))
                if session is not None and not gathers and not inside and session.topology.world_size > 1:
                    from zeropp_fp8.zero.generation.context import without_batches

                    stack.enter_context(without_batches(unwrapped))
            yield unwrapped

    setattr(unwrap_model_for_generation, _OURS, True)
    return unwrap_model_for_generation
