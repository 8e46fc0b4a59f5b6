"""The plugin inside DeepSpeed. No other folder changes anything that belongs to DeepSpeed or TRL."""

from zeropp_fp8.plugin.install import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]
