"""The plugin inside DeepSpeed. The only folder that changes anything of DeepSpeed's, or TRL's.

install.py        what is replaced, and how it is put back
relied_on.py      the names of DeepSpeed that this project relies on, and their check
stock.py          what DeepSpeed refuses of a ds_config, takes for something else, or never looks at
auto.py           the "auto" values of a ds_config, as Hugging Face's libraries fill them in
engine.py         which engine a ds_config gets
zeropp_engine.py  the plugin's engine: ZeRO-3 is built, checkpoints are saved and loaded
trl.py            TRL's own generation, the only thing outside of DeepSpeed that is replaced
"""

from zeropp_fp8.plugin.install import disable, enable, is_enabled

__all__ = ["disable", "enable", "is_enabled"]
