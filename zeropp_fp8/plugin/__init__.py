"""The plugin inside DeepSpeed. No other folder changes anything that belongs to DeepSpeed or TRL.

install.py        replaces names of DeepSpeed, and puts them back
relied_on.py      lists the names of DeepSpeed that this project relies on, and checks them
stock.py          finds what DeepSpeed refuses in a ds_config, misreads, or never reads
auto.py           handles the "auto" values of a ds_config, which Hugging Face's libraries fill in
engine.py         chooses the engine for a ds_config
zeropp_engine.py  is the plugin's engine: it builds ZeRO-3, and saves and loads checkpoints
trl.py            replaces TRL's own generation, the only thing replaced outside DeepSpeed
"""

from zeropp_fp8.plugin.install import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]
