"""Weights of a training engine for an engine that generates elsewhere.

float8.py           which weights go as FP8 codes, and the layout of these
contents.py         what there is of a model, in groups
source.py           named tensors, a block of the model at a time
handed.py           what went last, on each rank its own part; what differs comes to rank 0
changes.py          as elements, with their places
updates.py          as exact differences, with a version and a checksum: update.py
transfer.py         sending these over a group (group.py) that trainer and receivers share
folder_transfer.py  writing them to a folder: folder.py
receiver.py         applying them, in an engine's process
vllm.py             vLLM's own classes around a source, where vLLM is installed
vllm_engine.py      a receiver in vLLM's worker
"""
