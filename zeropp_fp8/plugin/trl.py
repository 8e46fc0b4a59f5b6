"""TRL's own generation (GRPO, RLOO, online DPO, its callbacks) by zeropp_fp8.generation, if an engine allows it.

TRL's trainers call `trl.models.utils._unwrap_model_for_generation`, which gathers a whole ZeRO-3 model and removes its
hooks. With vLLM they take the weights from `VLLMGeneration._iter_named_params`, which with PEFT gathers the whole model
too; a WeightSource yields them block by block. This file imports nothing of TRL: it looks for modules that are loaded
when an engine is made.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

from deepspeed.utils import logger

from zeropp_fp8 import sharded

_MODULE, _NAME, _CALLER = "trl.models.utils", "_unwrap_model_for_generation", "unwrap_model_for_generation"
_TAKES = ["model", "accelerator", "gather_deepspeed3_params"]
_VLLM_MODULE, _VLLM_CLASS, _WEIGHTS = "trl.generation.vllm_generation", "VLLMGeneration", "_iter_named_params"
_OURS = "zeropp_fp8"  # marks the function that replaces TRL's
_BEGUN = "_zeropp_fp8_begun"  # iterations of a sync


def generate_with_the_plugin(replace: Callable[[object, str, object], None]) -> None:
    """Replace TRL's function if TRL is loaded and the function is known; report and keep an unknown one."""
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
    """Replace TRL's iteration over a model's weights for vLLM, if that module is loaded and known."""
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
    replace(holder, "sync_weights", _in_lockstep(caller))


def _handing_over(stock: Callable) -> Callable:
    """Wrap TRL's method: a model of the plugin yields block by block, unless its `trl_generation` is "stock"."""

    @functools.wraps(stock)
    def _iter_named_params(self):
        if not _hands_over(self.model):
            return stock(self)
        from zeropp_fp8.zero.handover.source import WeightSource

        weights = iter(WeightSource(self.model))
        vars(self).get(_BEGUN, []).append(weights)
        return weights

    setattr(_iter_named_params, _OURS, True)
    return _iter_named_params


def _in_lockstep(stock: Callable) -> Callable:
    """Wrap TRL's method, in which rank 0 sends what all ranks gather: where it cannot, all of them say so.

    What it has not taken is gathered nevertheless, or the other ranks would wait for it.
    """

    @functools.wraps(stock)
    def sync_weights(self):
        if not _hands_over(self.model):
            return stock(self)
        from zeropp_fp8.zero.export.lockstep import Lockstep

        lockstep, begun = Lockstep("TRL's sync_weights"), []
        setattr(self, _BEGUN, begun)
        lockstep.always(stock, self)
        if lockstep.error is not None and not begun:  # before it came to the weights, which the other ranks gather
            lockstep.always(self._iter_named_params)
        delattr(self, _BEGUN)
        for weights in begun:
            lockstep.always(deque, weights, 0)
        lockstep.raise_everywhere()

    return sync_weights


def _hands_over(model) -> bool:
    """Whether a model is one of the plugin's whose section does not leave TRL its own way."""
    states = (sharded.known(param).wire for param in model.parameters())
    session = next((state.owner.session for state in states if state is not None), None)
    return session is not None and session.config.trl_generation != "stock"


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(f"zeropp_fp8: {message}")


def _unwrapping(stock: Callable) -> Callable:
    """Wrap TRL's function: the plugin's engine uses zeropp_fp8.generation with its `trl_generation` weights."""

    @contextmanager
    @functools.wraps(stock)
    def unwrap_model_for_generation(model, accelerator, gather_deepspeed3_params=True, *args, **kwargs):
        session = getattr(model, "zeropp_fp8_session", None)
        inside = session is not None and model._zeropp_fp8_offload.generating  # the script is in that context already
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
