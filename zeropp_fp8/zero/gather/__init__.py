"""A weight's way from the ranks' shards to the layer that computes with it, and out of memory again.

blocks.py        finding the transformer blocks of a model
units.py         parameters that travel together, and how
trace.py         in which order a step fetches units
coordinator.py   when they are fetched, fetched ahead and released: what DeepSpeed's hooks ask
gatherer.py      hops, buffers, secondary shards; exact gathers for looking and changing
gemm_weights.py  weights whose gathered bytes are the operand of a GEMM
adopted.py       what an engine keeps on a parameter, and lists that hold parameters of several engines
"""
