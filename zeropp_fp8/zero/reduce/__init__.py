"""A gradient's way from autograd to the rank that keeps its mean.

order.py            the one order in which gradients are reduced on every rank
reducer.py          quantize a unit of gradients, send it in two hops, hand over this rank's part
node_sums.py        sums of several micro-batches that rest inside the node
gradient_scales.py  FP8-LM: scales that all ranks share, and mu
"""
