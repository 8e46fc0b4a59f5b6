"""A weight's way from the ranks' shards to the layer that computes with it, and out of memory again.

blocks.py        finding the transformer blocks of a model
route.py         the hops, and in which order what they bring lies
units.py         parameters that travel together: what a unit answers, and cutting a model into units
storage.py       how parameters rest; what is done with several at once: exact gathers, writing back
sliced.py        the ordinary storage: slices of numbers, encoded for the wire
waiting.py       what is said where parameters never come
buffers.py       where things lie in a unit's buffers
difference.py    how weights have changed, between nodes, and what that is added to
delta.py         what a unit's copies have to do with that
gemm_weights.py  weights whose gathered bytes are the operand of a GEMM
secondary.py     which units keep what the first hops brought
ownership.py     which parameters an engine has, and who has them before and after it
hops.py          gathers under way: lanes and buffers
gatherer.py      values of parameters: brings, drops and writes them back; never asks for a unit's storage
trace.py         in which order a step fetches units
coordinator.py   when they are fetched, fetched ahead and released: what DeepSpeed's hooks ask
adopted.py       what is kept on a parameter, and lists that hold parameters of several engines
"""
