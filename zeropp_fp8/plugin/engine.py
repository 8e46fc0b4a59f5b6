"""Choose the engine for a ds_config: DeepSpeed's own, or the plugin's (zeropp_engine.py)."""

from __future__ import annotations

import functools
import os

from zeropp_fp8 import sharded
from zeropp_fp8.config import RECIPE_VARIABLE, SECTION, ConfigError, asks_for_plugin, load_ds_config, resolve
from zeropp_fp8.config.words import at
from zeropp_fp8.plugin.stock import checked
from zeropp_fp8.plugin.trl import generate_with_the_plugin, hand_over_with_the_plugin


def choosing_init(stock_class, replace):
    """Make a `DeepSpeedEngine.__init__` that turns an engine into the plugin's if its ds_config asks for the plugin.

    Every other engine keeps its class and gets nothing of the plugin, because scripts and libraries compare classes.
    `replace` replaces a name of a module until the plugin is disabled.
    """
    from zeropp_fp8.plugin.zeropp_engine import ALONE, ZeroppEngine

    stock_init = stock_class.__init__

    @functools.wraps(stock_init)
    def __init__(self, args, model, *positional, config=None, **kwargs):
        config = load_ds_config(config) if config is not None else None
        if config is not None and type(self) is not stock_class:
            _refuse_other_engine(type(self), config)
        plugin_config = None
        if config is not None:
            client = {"optimizer": kwargs.get("optimizer"), "scheduler": kwargs.get("lr_scheduler")}
            made = tuple(name for name, given in client.items() if given is None)
            plugin_config = checked(config, getattr(kwargs.get("config_class"), "world_size", None), made)
        kwargs["config"] = config
        if plugin_config is not None:
            generate_with_the_plugin(replace)
            hand_over_with_the_plugin(replace)
            object.__setattr__(self, "__class__", ZeroppEngine)
            self._zeropp_fp8_init(plugin_config, args, model, *positional, **kwargs)
        else:
            _refuse_left_over(model)
            stock_init(self, args, model, *positional, **kwargs)
        for module in model.modules():
            for handle in module.__dict__.pop(ALONE, ()):
                handle.remove()
        if plugin_config is None and self.global_rank == 0:
            recipe, stage = os.environ.get(RECIPE_VARIABLE), at(config or {}, ("zero_optimization", "stage")) or 0
            named = f"={recipe} is for stage 3 without a section" if recipe else " names no recipe"
            print(
                f'zeropp_fp8: stock DeepSpeed; the ds_config has stage {stage}, no "{SECTION}" section and no ZeRO++ '
                f"key (or switches the section off), and {RECIPE_VARIABLE}{named}",
                flush=True,
            )

    return __init__


def _refuse_other_engine(cls, config) -> None:
    """Refuse the plugin for an engine that is not DeepSpeedEngine itself: it would train as stock does."""
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    if issubclass(cls, DeepSpeedHybridEngine):  # the hybrid engine has ZeRO-3 code of its own
        resolve(config, hybrid_engine=True)
    elif not asks_for_plugin(config) and resolve(config) is None:
        return
    elif issubclass(cls, PipelineEngine):
        raise ConfigError(
            f'"{SECTION}" (or a ZeRO++ key) with a PipelineModule: pipelines go with ZeRO stages 0 and 1, the plugin '
            "works with stage 3; remove the section and the keys, or the PipelineModule"
        )
    else:
        raise ConfigError(
            f'"{SECTION}" (or a ZeRO++ key) with {cls.__name__}, an engine class of its own: the plugin trains '
            "DeepSpeedEngine, as deepspeed.initialize makes it; remove the section and the keys, or the class"
        )


def _refuse_left_over(model) -> None:
    """Refuse a model that is still attached to an engine of the plugin: DeepSpeed alone could not handle its state."""
    from zeropp_fp8.compute.products import LinearPrecision

    layer = next(
        (n for n, m in model.named_modules() if isinstance(getattr(m, "precision", None), LinearPrecision)), None
    )
    param = next((n for n, p in model.named_parameters() if sharded.known(p).wire is not None), None)
    stored = next((n for n, p in model.named_parameters() if sharded.stored_as_codes(p)), None)
    if stored is not None and param is None:
        raise ConfigError(
            f"{stored} is stored as codes (frozen store), which stock DeepSpeed would take for numbers; add the "
            f'"{SECTION}" section with which the model was made to this ds_config, or make the model without '
            '"frozen.format"'
        )
    if layer is not None or param is not None:
        raise ConfigError(
            f'the ds_config has no "{SECTION}" section, but an engine that had one still holds the model: '
            + (f"the layer {layer} computes in low precision" if layer is not None else f"{param} is gathered by it")
            + "; call destroy() on that engine before the next one is made"
        )
