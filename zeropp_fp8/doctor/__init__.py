"""Facts known before a run: of a machine and its links (`doctor`), and of a ds_config (`check`).

python -m zeropp_fp8 doctor                         also: torchrun ... -m zeropp_fp8 doctor, on all ranks
python -m zeropp_fp8 check ds_config.json
"""
