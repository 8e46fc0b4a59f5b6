"""Frozen weights that rest as codes: in their shards, on the wire and between uses.

store.py        a stored parameter: to codes and back, gathering, writing, errors
selection.py    which weights are stored, while a model is made and when an engine is
init.py         deepspeed.zero.Init that stores, and gathers each parameter through its engine
unit.py         a storage (gather/): what rests is what travels
operands.py     weights that rest as FP8 operands
checkpoint.py   saving and loading codes
saved_ranks.py  reading what other ranks have saved
(../fragment.py  what a checkpoint holds of a stored parameter; pickles name that module)
"""
