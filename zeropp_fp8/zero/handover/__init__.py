"""Weights of a training engine for an engine that generates elsewhere.

float8.py    which weights go as FP8 codes, and the layout of these
contents.py  what there is of a model, in groups
source.py    named tensors, a block of the model at a time
changes.py   which elements have changed since they were handed over
transfer.py  sending them in buckets over a group that trainer and receivers share
vllm.py      vLLM's own classes around them, where vLLM is installed
"""
