"""trainer.py with one line that switches the plugin on, where nothing else does. See docs/integrations.md."""

import trainer

import zeropp_fp8

if __name__ == "__main__":
    zeropp_fp8.enable()  # before anything reads the ds_config
    trainer.main()
