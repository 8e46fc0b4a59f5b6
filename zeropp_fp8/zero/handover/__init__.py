"""Weights of a training engine for an engine that generates elsewhere.

float8.py    which weights go as FP8 codes, and the layout of these
contents.py  what there is of a model, in groups, and what of it has changed
source.py    named tensors, a block of the model at a time
transfer.py  sending them in buckets over a group that trainer and receivers share
vllm.py      vLLM's own classes around them, where vLLM is installed
"""
