"""The whole model in Hugging Face's format, with no rank holding it.

lockstep.py      errors of one rank that reach all
weights.py       a model's tensors by their names, adapters merged in, and what is gathered together for them
merged.py        saving them in the model's own dtype
shard_writer.py  safetensors files, one tensor at a time
"""
