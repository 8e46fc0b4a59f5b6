"""Facts known before a run: of a machine and its links (`doctor`), and of a ds_config (`check`).

python -m zeropp_fp8 doctor                         also: torchrun ... -m zeropp_fp8 doctor, on all ranks
python -m zeropp_fp8 check ds_config.json

diagnosis.py     doctor: what the ranks find, compared, and the report
ranks.py         what ranks tell each other, which no dead or hanging rank can hold up
facts.py         what a rank finds about itself
versions.py      packages and their supported ranges
accelerator.py   the device, what it can do, and how fast it multiplies and copies
kernels.py       kernels against the bytes of the torch code
variables.py     environment variables that change how ranks talk
compared.py      what ranks say of themselves, side by side
links.py         rates within and between nodes, with the plugin's own collectives
check.py         check: a ds_config
unused.py        fields that change nothing
problems.py      what is wrong, and what to do
"""
