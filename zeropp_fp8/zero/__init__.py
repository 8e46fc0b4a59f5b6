"""ZeRO-3 with this project's collectives: what stands between DeepSpeed's stage 3 and `comm/`.

session.py    what one engine shares: configuration, topology, formats, ledger, generators
weights.py    gathering parameters: payload cache, secondary shards, the closures put on each parameter
gradients.py  reducing a bucket of gradients
order.py      the one order in which gradients are reduced on every rank
blocks.py     finding the transformer blocks of a model
offload.py    subclass of DeepSpeedZeRoOffload (all there is without an optimizer)
stage3.py     subclass of DeepSpeedZeroOptimizer_Stage3
report.py     the table printed at start
"""
