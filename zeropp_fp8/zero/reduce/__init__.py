"""The path of a gradient from autograd to the rank that keeps its mean.

backwards.py        finds where a backward begins and ends
hooks.py            autograd's hooks, which hand gradients over
order.py            the one order in which gradients are reduced on every rank
reduction.py        reduces a stage's gradients: unit by unit in backward, and at the beginning of a step
buckets.py          buckets, if gradients are not quantized
reducer.py          quantizes a unit of gradients, sends it in two hops, hands over this rank's part
reduction_unit.py   parameters that are reduced in one message, and their sums that accumulate in the node
gradient_scales.py  FP8-LM: scales that all ranks share, and mu
"""
