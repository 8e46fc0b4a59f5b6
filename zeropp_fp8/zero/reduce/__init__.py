"""A gradient's way from autograd to the rank that keeps its mean.

order.py            the one order in which gradients are reduced on every rank
reducer.py          quantize a unit of gradients, send it in two hops, hand over this rank's part
reduction_unit.py   parameters that are reduced in one message, and their sums that rest inside the node
node_sums.py        whether sums of several micro-batches rest inside the node
gradient_scales.py  FP8-LM: scales that all ranks share, and mu
"""
