"""The whole model in Hugging Face's format, with no rank holding it.

merged.py        a model in its own dtype, adapters merged in
shard_writer.py  safetensors files, one tensor at a time
"""
