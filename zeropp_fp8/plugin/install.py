"""Install the plugin: the names of DeepSpeed that it replaces, and how it restores them.

DeepSpeedEngine.__init__         -> an engine whose ds_config asks for the plugin gets a subclass, which builds
                                    the plugin's ZeRO-3; engines of other classes refuse such a ds_config
deepspeed.DeepSpeedConfig        -> its error names the file that cannot be read
deepspeed.zero.Init.__init__     -> hides the four ZeRO++ keys and checks the configuration early
deepspeed.zero.Init              -> stores frozen weights as codes while a model is made; gathers and partitions
                                    each parameter by the engine that it belongs to
zero3_linear_wrap                -> the same linear function at half the host cost
deepspeed.sequence               -> exchanges activations in FP8 if an engine asks for it
groups._clone_world_group        -> the data-parallel group has the time limit of the world
FlopsProfiler                    -> counts layers that compute in FP8 or MX (flops.py)
trl.models.utils                 -> if TRL is loaded: its generation is zeropp_fp8.generation (trl.py)
VLLMGeneration                   -> if TRL is loaded with vLLM: weights are handed over block by block (trl.py)
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from zeropp_fp8.config import IN_TREE_KEYS, load_ds_config, without_in_tree_keys
from zeropp_fp8.plugin.engine import choosing_init
from zeropp_fp8.plugin.relied_on import verify
from zeropp_fp8.plugin.stock import checked

_restore: list[Callable[[], None]] = []  # each puts one name back


def _replace(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        _restore.append(functools.partial(owner.__setitem__, name, owner.get(name)))
        owner[name] = value
    else:
        _restore.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def is_enabled() -> bool:
    return bool(_restore)


def enable() -> None:
    if is_enabled():
        return
    # zero.Init replaces torch.Tensor.__new__; importing torch._dynamo under that dies in torch 2.13, so import first.
    import deepspeed
    import torch._dynamo

    verify()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.profiling.flops_profiler import FlopsProfiler
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    from zeropp_fp8.plugin.flops import counting_start, ending_stop
    from zeropp_fp8.zero.frozen.init import gathering, partitioning, storing_exit, storing_post_init
    from zeropp_fp8.zero.linear_function import lean_linear
    from zeropp_fp8.zero.ulysses import replace_exchanges

    _end_watch()
    _replace(deepspeed.DeepSpeedEngine, "__init__", choosing_init(deepspeed.DeepSpeedEngine, _replace))
    _replace(deepspeed.DeepSpeedConfig, "__init__", _init_naming_file(deepspeed.DeepSpeedConfig.__init__))
    _replace(Init, "__init__", _init_without_in_tree_keys(Init.__init__))
    _replace(Init, "_post_init_method", storing_post_init(Init._post_init_method))
    _replace(Init, "__exit__", storing_exit(Init.__exit__))
    _replace(Init, "_all_gather", gathering(Init._all_gather))
    _replace(Init, "_partition", partitioning(Init._partition))
    stock_linear = partition_parameters.zero3_linear_wrap
    _replace(partition_parameters, "zero3_linear_wrap", lean_linear(stock_linear))
    if torch.nn.functional.linear is stock_linear:  # an earlier engine has put it there
        _replace(torch.nn.functional, "linear", partition_parameters.zero3_linear_wrap)
    replace_exchanges(_replace)
    _replace(FlopsProfiler, "start_profile", counting_start(FlopsProfiler.start_profile))
    _replace(FlopsProfiler, "stop_profile", ending_stop(FlopsProfiler.stop_profile))
    _replace(groups, "_clone_world_group", _world_group_with_time_limit)
    if get_accelerator().device_name() == "cpu":
        # init_distributed() would compile a shared-memory op with gcc (30 s), and nothing here uses it.
        _replace(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)


def disable() -> None:
    _end_watch()
    while _restore:
        _restore.pop()()


def _end_watch() -> None:
    """Tell zeropp_fp8_autoload, if it is installed, that this file takes over."""
    autoload = sys.modules.get("zeropp_fp8_autoload")
    if autoload is not None:
        autoload.unwatch()


def _init_naming_file(stock_init):
    """Wrap DeepSpeedConfig.__init__, which reads a ds_config before any engine is made.

    An error names the file; if the ds_config asks for the plugin, the error names every fault.
    """

    @functools.wraps(stock_init)
    def __init__(self, config, *args, **kwargs):
        given = load_ds_config(config) if isinstance(config, (str, os.PathLike)) else config
        try:
            stock_init(self, config, *args, **kwargs)
        except Exception:
            if isinstance(given, Mapping) and not hasattr(self, "looking"):
                checked(given, getattr(self, "world_size", None))
            raise

    return __init__


def _world_group_with_time_limit():
    """Copy the world group, over which ZeRO-3 works, with the script's time limit; DeepSpeed's copy has torch's."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    from zeropp_fp8.comm import time_limit

    if groups._WORLD_GROUP is None:
        groups._WORLD_GROUP = dist.new_group(ranks=range(dist.get_world_size()), timeout=time_limit())
    return groups._WORLD_GROUP


def _init_without_in_tree_keys(stock_init):
    """Wrap zero.Init.__init__: it checks the configuration and does not see the ZeRO++ keys."""
    from zeropp_fp8.zero.frozen.init import stream_into_store

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        bound = inspect.signature(stock_init).bind(self, *args, **kwargs)
        for name in ("config_dict_or_path", "config"):
            given = bound.arguments.get(name)
            if given is not None:
                ds_config = load_ds_config(given)
                plugin_config = checked(ds_config)
                if plugin_config is not None:
                    stream_into_store(self, plugin_config)
                    bound.arguments[name] = without_in_tree_keys(ds_config)
                    for key in IN_TREE_KEYS:  # some of these keys are arguments of Init too
                        if key in bound.arguments:
                            bound.arguments[key] = IN_TREE_KEYS[key]
        stock_init(*bound.args, **bound.kwargs)

    return __init__
