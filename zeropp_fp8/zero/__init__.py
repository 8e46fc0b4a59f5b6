"""ZeRO-3 with this project's collectives: what stands between DeepSpeed's stage 3 and `comm/`.

session.py       what one engine shares: configuration, topology, formats, ledger, generators
blocks.py        finding the transformer blocks of a model
units.py         the units in which parameters are gathered together
trace.py         in which order a step fetches them
coordinator.py   when they are fetched, fetched ahead and released
weights.py       how: payloads, hops, secondary shards, the closures put on each parameter
order.py         the one order in which gradients are reduced on every rank
gradients.py     reducing a unit of gradients
linear.py        ZeRO-3's linear function at less host cost
fused_update.py  torch's fused Adam where the user left the choice to torch
offload.py       subclass of DeepSpeedZeRoOffload (all there is without an optimizer)
stage3.py        subclass of DeepSpeedZeroOptimizer_Stage3
report.py        the table printed at start
"""
