"""A gradient's way from autograd to the rank that keeps its mean.

backwards.py        where a backward begins and ends
hooks.py            autograd's hooks, which hand gradients over
order.py            the one order in which gradients are reduced on every rank
reduction.py        what a stage has of all this: a unit's way, and what a step begins with
buckets.py          DeepSpeed's buckets, where nothing is quantized
reducer.py          quantize a unit of gradients, send it in two hops, hand over this rank's part
reduction_unit.py   parameters that are reduced in one message, and their sums that rest inside the node
gradient_scales.py  FP8-LM: scales that all ranks share, and mu
"""
