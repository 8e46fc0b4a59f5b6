"""Brings weights from the ranks' shards to the layer that computes with them, and drops them again.

blocks.py        finds the transformer blocks of a model
route.py         the hops, and the order of rows in their results
units.py         parameters that are gathered together (a parameter group): the interface, and cutting a model
storage.py       how parameters are stored; exact gathers and writing back of several at once
sliced.py        the default storage: slices of numbers, encoded for the wire
waiting.py       the error message if parameters never come
buffers.py       offsets in a unit's buffers
difference.py    exact differences of 16-bit weights between nodes, added to the copies
gemm_weights.py  weights whose gathered bytes are a GEMM operand
secondary.py     chooses the units that keep the results of the first hops
ownership.py     attaches parameters to an engine, and detaches them
hops.py          pending gathers: lanes and buffers
gatherer.py      gathers, drops and writes back values of parameters; never asks for a unit's storage
trace.py         the order in which a step fetches units
coordinator.py   fetches, prefetches and releases units when DeepSpeed's hooks ask
attached.py      the plugin's state of a parameter, and lists with parameters of several engines
"""
