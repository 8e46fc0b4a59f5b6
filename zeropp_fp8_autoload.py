"""Enables zeropp_fp8 in a process whose ds_config names it: `pip install` and the section are enough.

`zeropp_fp8_autoload.pth`, beside this file in site-packages, imports it when an interpreter starts, so it needs nothing
but `sys` and `os`, which are there already. It puts a finder before the others that knows the name `deepspeed` alone.
When DeepSpeed has been imported, the two places where the ds_configs of a training job arrive are watched:
`DeepSpeedConfig`, which `deepspeed.initialize` makes before the engine, and `deepspeed.zero.Init`. The first ds_config
with the section (or with a name that is almost it, which the plugin refuses) calls `zeropp_fp8.enable()`, whose errors
are raised there: no such job trains as stock. Until then nothing of zeropp_fp8 is imported.

ZEROPP_FP8_AUTOLOAD=0 switches this off. With 1, every ds_config enables the plugin, which then honours DeepSpeed's
own ZeRO++ keys too, as after `enable()`; so does ZEROPP_FP8_RECIPE. Where a script calls `zeropp_fp8.enable()` or
`disable()`, the watch ends, and it is the script that decides.
"""

import os
import sys

VARIABLE = "ZEROPP_FP8_AUTOLOAD"
_stock_inits = []  # (class, its own __init__)


class _Finder:
    """Finds `deepspeed` as the finders after it do, with a loader that watches what it has loaded."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "deepspeed" or cls not in sys.meta_path or os.environ.get(VARIABLE) == "0":
            return None
        for finder in sys.meta_path[sys.meta_path.index(cls) + 1 :]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Another loader, with a look at the module that it has run."""

    def __init__(self, loader):
        self._loader = loader

    def __getattr__(self, name):
        if name == "_loader":  # of one that is being copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if not hasattr(module, "initialize"):  # a folder of the same name
            return
        try:
            _watch(module)
        except Exception as error:
            import warnings

            unwatch()
            warnings.warn(
                f"zeropp_fp8 cannot see the ds_configs of this DeepSpeed ({type(error).__name__}: {error}); where one "
                "has a zeropp_fp8 section, call zeropp_fp8.enable() before deepspeed.initialize and zero.Init",
                stacklevel=2,
            )


def _watch(deepspeed):
    _put_back()  # reloaded, it has the same classes
    for owner in (deepspeed.DeepSpeedConfig, deepspeed.zero.Init):
        stock_init = owner.__init__
        owner.__init__ = _watching(owner, stock_init)
        _stock_inits.append((owner, stock_init))


def _watching(owner, stock_init):
    import functools
    import inspect

    signature = inspect.signature(stock_init)

    @functools.wraps(stock_init)
    def __init__(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments
        if any(_asks(given[name]) for name in ("config", "config_dict_or_path") if given.get(name) is not None):
            import zeropp_fp8

            zeropp_fp8.enable()  # ends the watch: the class has an __init__ of the plugin now
            if _stock_inits:  # which would be called by that one, and call it, without end
                raise ImportError(
                    f"{zeropp_fp8.__file__} is of another version than {__file__}: install zeropp_fp8 again, or set "
                    f"{VARIABLE}=0 and call its enable() yourself"
                )
            return owner.__init__(self, *args, **kwargs)
        return stock_init(self, *args, **kwargs)

    return __init__


def _asks(ds_config):
    """Whether a ds_config, in any form that DeepSpeed takes, is one for the plugin."""
    import difflib

    switch = os.environ.get(VARIABLE, "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} is {switch!r}; set it to 0 or 1, or leave it out")
    if switch == "1" or os.environ.get("ZEROPP_FP8_RECIPE"):
        return True
    if isinstance(ds_config, (str, os.PathLike)):
        ds_config = _read(ds_config)
    # A null or misspelt section is the plugin's to refuse: DeepSpeed would pass over it.
    return isinstance(ds_config, dict) and any(
        difflib.get_close_matches(str(key).lower(), ["zeropp_fp8"]) for key in ds_config
    )


def _read(ds_config):
    import base64

    import hjson  # DeepSpeed's own

    try:
        if os.path.exists(ds_config):
            with open(ds_config) as file:
                return hjson.load(file)
        return hjson.loads(base64.urlsafe_b64decode(os.fspath(ds_config)).decode())
    except (OSError, ValueError):
        return None  # DeepSpeed reads it next, and says what is wrong with it


def unwatch():
    """End the watch: of DeepSpeed and the import system nothing is changed by this file any more."""
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)
    _put_back()


def _put_back():
    while _stock_inits:
        owner, stock_init = _stock_inits.pop()
        owner.__init__ = stock_init


sys.meta_path.insert(0, _Finder)
