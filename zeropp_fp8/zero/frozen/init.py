"""deepspeed.zero.Init that stores frozen weights as codes while a model is made, and knows whose each parameter is.

Each function takes DeepSpeed's method and gives the one that takes its place (plugin/install.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist

from zeropp_fp8.config import PluginConfig
from zeropp_fp8.zero.frozen.selection import StreamingStore
from zeropp_fp8.zero.frozen.store import gather_stored, partition_stored, stored_weight
from zeropp_fp8.zero.gather.attached import by_engine

_STREAMING = "_zeropp_fp8_streaming"


def stream_into_store(init, config: PluginConfig | None) -> None:
    """Let a zero.Init store what is made under it, if its configuration has a store."""
    if config is not None and config.enabled and config.frozen.format != "none":
        setattr(init, _STREAMING, StreamingStore(config.frozen))


def storing_post_init(stock: Callable) -> Callable:
    """Init._post_init_method, called when a module has been made: its weights may go into the store."""

    @functools.wraps(stock)
    def _post_init_method(self, module):
        stock(self, module)
        streaming: StreamingStore | None = getattr(self, _STREAMING, None)
        if streaming is not None:
            streaming.module_finished(module)

    return _post_init_method


def storing_exit(stock: Callable) -> Callable:
    """Init.__exit__: the model is complete, and names are known."""

    @functools.wraps(stock)
    def __exit__(self, exc_type, exc_value, traceback):
        result = stock(self, exc_type, exc_value, traceback)
        streaming: StreamingStore | None = getattr(self, _STREAMING, None)
        if streaming is not None and exc_type is None:
            taken_back = streaming.model_finished()
            if taken_back and dist.get_rank() == 0:
                print(
                    f"zeropp_fp8: {taken_back} weights were quantized while the model was made and are left out of the "
                    "store by their full names; until a checkpoint is loaded they hold rounded values",
                    flush=True,
                )
        return result

    return __exit__


def gathering(stock: Callable) -> Callable:
    """Init._all_gather: what GatheredParameters and others call for several parameters, of any engines."""

    @functools.wraps(stock)
    def _all_gather(self, param_list, async_op=False, hierarchy=None):
        handles = []
        for gatherer, params in by_engine(param_list):
            if gatherer is not None:
                gatherer.gather_exactly(params)
                continue
            others = [p for p in params if stored_weight(p) is None]
            if len(others) < len(params):
                gather_stored([p for p in params if stored_weight(p) is not None])
            if others:
                handles += stock(self, others, async_op=async_op, hierarchy=hierarchy) or []
        return handles if async_op else None

    return _all_gather


def partitioning(stock: Callable) -> Callable:
    """Init._partition: dropping values, or taking over what was written to them."""

    @functools.wraps(stock)
    def _partition(self, param_list, force=False, has_been_updated=False, free_data=True):
        for gatherer, params in by_engine(param_list):
            if gatherer is not None:
                gatherer.partition(params, has_been_updated, free_data)
                continue
            others = [p for p in params if stored_weight(p) is None]
            if others:
                stock(self, others, force=force, has_been_updated=has_been_updated, free_data=free_data)
            if len(others) < len(params):  # last: it may raise
                partition_stored([p for p in params if stored_weight(p) is not None], has_been_updated, free_data)

    return _partition
